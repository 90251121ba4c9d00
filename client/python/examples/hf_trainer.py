"""Hugging Face's Trainer: the optimizer is made by it, or handed to it.

usage: dmuonctl run -- python hf_trainer.py FOLDER STEPS [--handed] [--resume]
Needs the packages transformers and accelerate. --resume goes on from FOLDER's newest checkpoint.
"""

import argparse
from typing import Any

import dmuond.torch
import torch
from tiny_model import batch, digest
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

OPTIONS = {"lr": 1e-2, "adamw_lr": 1e-3, "max_grad_norm": 1.0, "verbose": False}


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = batch(index)[0]
        return {"input_ids": tokens, "labels": tokens}


class Metrics(TrainerCallback):
    """Puts opt.metrics() beside the Trainer's own figures."""

    def on_log(self, *_: Any, logs: dict, optimizer: Any, **__: Any) -> None:
        if "loss" in logs:
            logs |= optimizer.optimizer.metrics()  # accelerate has wrapped it


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )


def make_trainer(model: LlamaForCausalLM, folder: str, steps: int, handed: bool) -> Trainer:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.0,  # the daemon clips the gradients of all ranks together
        save_steps=4,
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    if handed:
        made = {"optimizers": (dmuond.torch.Muon(model, **OPTIONS), None)}
    else:
        made = {"optimizer_cls_and_kwargs": (dmuond.torch.Muon, {"params": model, **OPTIONS})}
    return Trainer(model, arguments, train_dataset=Tokens(), callbacks=[Metrics()], **made)


def main(folder: str, steps: int, handed: bool, resume: bool) -> None:
    model = make_model()
    trainer = make_trainer(model, folder, steps, handed)
    trainer.train(resume_from_checkpoint=resume)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print("step", entry["step"], entry["loss"], entry["learning_rate"], flush=True)
    print("weights", digest(model), flush=True)
    trainer.optimizer.optimizer.close()  # accelerate has wrapped it


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("steps", type=int)
    parser.add_argument("--handed", action="store_true")
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
