"""Real text that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Folders that are not prose of the library's authors: tests, bundled packages, generated tables.
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "encodings",
}
_VALIDATION_EVERY = 20  # one file in so many


def load() -> tuple[Tensor, Tensor]:
    """Training and validation bytes. The split depends on the order of file names alone."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts)
    )
    if not files:
        raise FileNotFoundError(f"no Python source under {root}: the standard library is zipped")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % _VALIDATION_EVERY == 0].append(path.read_bytes())
    training, validation = (
        torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts
    )
    return training, validation


def batch(text: Tensor, seed: int, size: int, length: int) -> Tensor:
    """`size` pieces of length + 1 bytes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - length - 1, (size,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
