"""The trainer of fault_trainer.py with its arenas on a GPU, as device_memory.cc has it in C++.

--device=cuda:0, or cuda:0,own with arenas in memory of its own. The host computes, in copies of its
own; a stream takes them there and back, and signals and waits are the stream's.
"""

import numpy as np
from fault_trainer import GRADIENTS, WEIGHTS, Trainer, main
from gpus import make_stream, own_memory


class CudaTrainer(Trainer):
    def __init__(self, options):
        self.device, _, own = options.device.partition(",")
        self.own = own == "own"
        self.ordinal = int(self.device.removeprefix("cuda:"))
        self.stream = make_stream(self.ordinal)
        super().__init__(options)

    def memory(self):
        return own_memory(self.layout.bytes, self.ordinal) if self.own else self.layout.bytes

    def take_arenas(self) -> None:
        self.slots = {
            arena: [
                self.session.arenas[arena].slot(fragment.weight.offset_bytes, shape)
                for fragment, shape in zip(self.layout.fragments, self.layout.shapes, strict=True)
            ]
            for arena in (GRADIENTS, WEIGHTS)
        }
        self.gradients = [np.zeros(shape, np.float32) for shape in self.layout.shapes]
        self.weights = [slot.read(self.stream) for slot in self.slots[WEIGHTS]]

    def send(self, arena: int, parameter: int) -> None:
        values = {GRADIENTS: self.gradients, WEIGHTS: self.weights}[arena][parameter]
        slot = self.slots[arena][parameter]
        slot.write(values, self.stream)
        if arena == WEIGHTS:
            slot.read(self.stream)  # it is there

    def fetch_weights(self) -> None:
        self.weights = [slot.read(self.stream) for slot in self.slots[WEIGHTS]]
        # The stream goes on where they cannot come any more: this says whether they have.
        self.session.wait_published()


if __name__ == "__main__":
    main(CudaTrainer)
