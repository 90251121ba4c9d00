"""fault_trainer.py on dmuond.torch, with early signals and overlap_forward: seconds to start.

--device=cuda:0, or cuda:0,own with weights that stay in memory of its own: on that GPU, where torch
finds one, and else on one of the fake driver, with tests/python/gpu_tensors.py in its place.
"""

import contextlib

import torch
from dmuond.torch import Muon
from fault_trainer import LEARNING_RATE, Trainer, main
from torch import nn


class TorchTrainer(Trainer):
    def __init__(self, options):
        torch.set_num_threads(1)
        torch.manual_seed(77)
        self.options = options
        self.unsaid = False
        self.model = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 24), nn.Tanh())
        device, _, own = options.device.partition(",")
        if torch.cuda.is_available():
            torch.cuda.set_device(device)
            self.model.to(device)
        with on_a_gpu(device, own == "own"):
            self.optimizer = self.make_optimizer(options, "trainer" if own else "daemon")
        self.session = self.optimizer.session

    def make_optimizer(self, options, arenas):
        return Muon(
            self.model,
            lr=LEARNING_RATE,
            weight_decay=0.01,
            route=[("*.weight", "muon")],
            max_grad_norm=3,
            overlap_forward=options.early,
            bucket_bytes=1000,
            address=options.address,
            rank=options.rank,
            world_size=options.world_size,
            resume=options.resume,
            arenas=arenas,
            verbose=False,
        )

    @property
    def weights(self):
        return [parameter.detach().cpu().numpy() for parameter in self.model.parameters()]

    def take_arenas(self):
        """The optimizer has moved the parameters there."""

    def first_weights(self):
        """The optimizer has pushed them."""

    def step(self, step):
        chance = torch.Generator().manual_seed(1000 * step + self.options.rank)
        drawn = torch.randn(8, 24, generator=chance)
        output = self.model(drawn.to(self.model[0].weight.device))
        if self.unsaid:
            self.say("step")
        self.optimizer.zero_grad()
        output.square().mean().backward()
        self.optimizer.trainer_state = str(step).encode()
        self.optimizer.step()


def on_a_gpu(device: str, own: bool) -> contextlib.AbstractContextManager:
    if device == "cpu" or torch.cuda.is_available():
        return contextlib.nullcontext()
    import gpu_tensors  # finds the driver

    return gpu_tensors.in_their_place(int(device.removeprefix("cuda:")), own)


if __name__ == "__main__":
    main(TorchTrainer)
