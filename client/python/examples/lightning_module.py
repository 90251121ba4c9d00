"""Lightning: the optimizer comes from configure_optimizers, checkpoints are the Trainer's.

usage: dmuonctl run -- python lightning_module.py FOLDER STEPS [--resume]
Needs the package lightning. --resume goes on from FOLDER/last.ckpt.
"""

import argparse
import warnings

import dmuond.torch
import lightning
import torch
from tiny_model import batch, digest, loss_of, make_model


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, _: torch.Tensor, index: int) -> torch.Tensor:
        tokens = batch(self.global_step)  # Lightning begins a loader anew when it goes on
        loss = loss_of(self.model(tokens), tokens)
        print("step", self.global_step + 1, loss.item(), flush=True)
        return loss

    def configure_optimizers(self) -> dict:
        opt = dmuond.torch.Muon(self, lr=1e-2, adamw_lr=1e-3, max_grad_norm=1.0, verbose=False)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: object) -> None:
        self.log_dict(self.optimizers().optimizer.metrics())


def main(folder: str, steps: int, resume: bool) -> None:
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(range(1000))
    trainer.fit(module, loader, ckpt_path=f"{folder}/last.ckpt" if resume else None)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    print("weights", digest(module), flush=True)
    trainer.optimizers[0].close()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("steps", type=int)
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
