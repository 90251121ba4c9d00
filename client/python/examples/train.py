"""Trains a small network on made-up data: the script of docs/quickstart.md."""

import dmuond.torch
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.hidden = nn.Linear(128, 128)
        self.head = nn.Linear(128, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.embed(tokens))))


torch.manual_seed(0)
model = Net()
optimizer = dmuond.torch.Muon(model, lr=5e-3, adamw_lr=1e-3)
for step in range(optimizer.last_committed_step + 1, 201):
    tokens = torch.randint(64, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (5 * tokens + 3) % 64)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
