"""What a training loop needs to go on from a step, carried by the steps themselves."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dmuond import types
from dmuond.errors import Error, InvalidArgumentError
from dmuond.session import TRAINER_STATE_BYTES_MAX
from dmuond.torch import scaler
from dmuond.torch.muon import Muon

_GENERATORS = torch.Generator | np.random.Generator | random.Random
_OWN = "dmuond"  # under this key lies what is not a part of the caller's


class LoopState:
    """Random numbers, schedules, a scaler and more, in opt.trainer_state and back.

    loop = dmuond.torch.LoopState(opt, schedule=schedule, after_step=schedule.step)
    for step in loop.steps(1000):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()

    A step commits the state as it is *in* opt.step(), the options of the groups with it. So
    whatever runs before opt.step() in an iteration is in it. What a loop does after it is not, and
    a process may die between the two: `after_step` has all of that. steps() calls it after each
    iteration that has made a step, and once when the loop goes on from a step that was committed.
    The run is then the one that nothing disturbed, bit for bit.

    parts: by names of their own, what has a state_dict() and load_state_dict() (schedules, a
        GradScaler, torchdata's loaders), torch.Generator, numpy.random.Generator, random.Random.
        Tensors, numbers, strings, lists and dicts of them can be carried; 1 MiB in all.
    after_step: schedule.step, or a function that does more: scaler.update() belongs there, too.
        What happens once an epoch goes by opt.last_committed_step, which is the same when it runs
        again; opt.last_outcome is not.

    The global random numbers of torch (of the parameters' GPU, too), numpy and Python are parts by
    themselves. Where a job goes on from a snapshot with more ranks than it had, the new ones get
    the parts of rank 0, and keep the random numbers that the script has seeded. One LoopState for
    an optimizer; each rank has its own. Not for several threads.
    Raises InvalidArgumentError where a part cannot be carried.
    """

    def __init__(
        self, optimizer: Muon, *, after_step: Callable[[], Any] | None = None, **parts: Any
    ) -> None:
        self._optimizer = optimizer
        self._after_step = after_step
        self._parts = parts
        for name, part in parts.items():
            if not _can_be_carried(part):
                raise InvalidArgumentError(
                    f"{name}= is of type {type(part).__name__}, which has no state_dict() and "
                    "load_state_dict(): give it both, or carry it in a part that has"
                )
        self._scalers = [part for part in parts.values() if isinstance(part, torch.amp.GradScaler)]
        self._updates = 0  # that a parameter with a gradient in every step has had
        self._beginning = self._dump()
        _check(self._beginning)  # what cannot come back is to be known before it is needed
        self._done = optimizer.last_committed_step  # after_step() has run for it
        optimizer.trainer_state = self._dump

    def steps(self, last: int) -> Iterator[int]:
        """Numbers of the steps to be made, up to `last`, from where the job is.

        Begins with restore(). After dmuond.RolledBack call it again.
        """
        self.restore()
        while self._optimizer.last_committed_step < last:
            yield self._optimizer.last_committed_step + 1
            if self._optimizer.last_committed_step != self._done:
                self._finish_step()

    def restore(self) -> None:
        """Makes everything what it is after the job's last committed step."""
        state = self._optimizer.trainer_state
        saved = _load(state or self._beginning)
        other = saved.keys() ^ {_OWN, *self._parts}
        if other:
            raise Error(
                f"what step {self._optimizer.last_committed_step} carries and this LoopState have "
                f"different parts: {', '.join(sorted(other))}. Make it with those of then"
            )
        own = saved[_OWN]
        rank = self._optimizer.session.rank
        others = own.get("rank", rank) != rank  # of a world that did not have this rank
        if not others:
            _set_random_numbers(own["random"], self._device())
        # Parameters of another rank may be others, and its groups are in the same order.
        names = [] if others else _unpacked(own.get("names"))
        self._optimizer._load_options(
            [
                {"params": members, "param_names": members, **options}
                for options, members in itertools.zip_longest(own["groups"], names, fillvalue=())
            ]
        )
        for name, part in self._parts.items():
            if not (others and isinstance(part, _GENERATORS)):
                _load_part(part, saved[name])
        self._updates = own["updates"]
        self._done = self._optimizer.last_committed_step
        if state:
            self._replay_after_step()

    def _finish_step(self) -> None:
        outcome = self._optimizer.last_outcome
        self._updates += outcome is not None and outcome.kind == types.Outcome.KIND_COMMITTED
        self._done = self._optimizer.last_committed_step
        if self._after_step is not None:
            self._after_step()

    def _replay_after_step(self) -> None:
        """Does what follows the step that was committed, of which this process saw no outcome."""
        if self._scalers:
            now = self._optimizer._updates_of_any()
            skipped = now == self._updates
            self._updates = now
            for each in self._scalers:
                scaler.replay(each, self._optimizer, skipped)
        if self._after_step is not None:
            self._after_step()

    def _dump(self) -> bytes:
        own = {
            "random": _random_numbers(self._device()),
            "rank": self._optimizer.session.rank,
            "groups": self._optimizer._options_to_save(),
            "names": _packed(tuple(tuple(g["param_names"]) for g in self._optimizer.param_groups)),
            "updates": self._updates,
        }
        parts = {name: _state_of(part) for name, part in self._parts.items()}
        with _refusing_odd_parts():
            torch.save(_plain({_OWN: own, **parts}), buffer := io.BytesIO())
        return buffer.getvalue()

    def _device(self) -> torch.device:
        return self._optimizer.param_groups[0]["params"][0].device


@functools.lru_cache(maxsize=8)
def _packed(names: tuple[tuple[str, ...], ...]) -> torch.Tensor:
    """Names of a model's parameters repeat themselves: a tenth of their bytes is left."""
    packed = zlib.compress(json.dumps(names).encode())
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _unpacked(names: torch.Tensor | None) -> list[list[str]]:
    return [] if names is None else json.loads(zlib.decompress(names.numpy().tobytes()))


def _check(state: bytes) -> None:
    _load(state)
    if len(state) > TRAINER_STATE_BYTES_MAX:
        raise InvalidArgumentError(
            f"the LoopState has {len(state)} bytes, and a step carries 1 MiB: keep large parts in "
            "a checkpoint of your own"
        )


def _load(state: bytes) -> dict[str, Any]:
    with _refusing_odd_parts():
        return torch.load(io.BytesIO(state))


@contextlib.contextmanager
def _refusing_odd_parts() -> Iterator[None]:
    try:
        yield
    except (AttributeError, TypeError, RuntimeError, pickle.PickleError) as error:
        raise InvalidArgumentError(
            f"a part of the LoopState cannot be carried: {error}. Parts may have tensors, numbers, "
            "strings, lists and dicts"
        ) from None


def _plain(value: Any) -> Any:
    """What torch.load() takes without running anybody's code."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.view(np.int32) if value.dtype == np.uint32 else value)
    return value.item() if isinstance(value, np.generic) else value


# --- parts ---


def _can_be_carried(part: Any) -> bool:
    both = callable(getattr(part, "state_dict", None)) and hasattr(part, "load_state_dict")
    return isinstance(part, _GENERATORS) or both


def _state_of(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, random.Random):
        return part.getstate()
    return part.state_dict()


def _load_part(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = _as_numpy(state)
    elif isinstance(part, random.Random):
        part.setstate(state)
    else:
        part.load_state_dict(state)


def _as_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_numpy(each) for key, each in value.items()}
    return value.numpy().view(np.uint32) if isinstance(value, torch.Tensor) else value


def _random_numbers(device: torch.device) -> dict[str, Any]:
    found = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def _set_random_numbers(saved: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(saved["torch"])
    np.random.set_state(_as_numpy(saved["numpy"]))
    random.setstate(saved["python"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)
