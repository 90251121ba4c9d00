"""A torch trainer that steps for ever, on what forked data loader workers bring.

Prints the workers' pids after its first step. See test_deaths.py.
"""

import dmuond.torch
import torch
from torch import nn


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8)


def main() -> None:
    model = nn.Linear(8, 8)
    optimizer = dmuond.torch.Muon(model, preset="torch", adamw_lr=1e-3, verbose=False)
    loader = torch.utils.data.DataLoader(
        Endless(), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    batches = iter(loader)
    told = False
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not told:
            print(*(worker.pid for worker in batches._workers), flush=True)
            told = True


if __name__ == "__main__":
    main()
