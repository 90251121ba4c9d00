"""What the examples train: a language model of two blocks on made-up tokens."""

import hashlib

import torch
from torch import nn

WORDS, WIDTH, LENGTH, BATCH = 64, 32, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel()


def batch(step: int, rank: int = 0) -> torch.Tensor:
    """The tokens of a rank for a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(0, WORDS // 4, (BATCH, LENGTH), generator=generator).cumsum(1) % WORDS


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def digest(model: nn.Module) -> str:
    """Of the weights, bit by bit."""
    parts = (p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()
