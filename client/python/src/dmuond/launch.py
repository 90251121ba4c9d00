"""Which start of all ranks together this process belongs to, for resume="discard".

The first rank of a start ends the job that is there, the others join it: the daemons tell starts
apart by a name, which must be equal on all ranks of one start and another one with the next.
client/cpp/src/launch.cc makes the same one.
"""

from __future__ import annotations

import os
import uuid

from dmuond.errors import InvalidArgumentError

BYTES_MAX = 128


def name(world_size: int) -> str:
    """DMUOND_LAUNCH, or what launchers have set; InvalidArgumentError where that says nothing."""
    given = os.environ.get("DMUOND_LAUNCH", "")
    if len(given.encode()) > BYTES_MAX:
        raise InvalidArgumentError(
            f"DMUOND_LAUNCH has {len(given.encode())} bytes; at most {BYTES_MAX} are possible"
        )
    if given:
        return given
    if world_size == 1:
        return uuid.uuid4().hex
    # A name that is too long keeps its end, in which starts differ most.
    found = "/".join(_parts()).encode()[-BYTES_MAX:].decode(errors="ignore")
    if not found:
        raise InvalidArgumentError(
            f'resume="discard" with world_size={world_size}: neither torchrun nor Slurm says which '
            "ranks were started together. Set DMUOND_LAUNCH to one value on all of them, and to "
            "another with the next start (DMUOND_LAUNCH=$(date +%s), say)"
        )
    return found


def _parts() -> list[str]:
    def have(*names: str) -> list[str] | None:
        values = [os.environ.get(name, "") for name in names]
        return values if all(values) else None

    parts = []
    if run := have("TORCHELASTIC_RUN_ID"):
        parts.append(f"torchelastic:{run[0]}")
    if master := have("MASTER_ADDR", "MASTER_PORT"):
        parts.append(f"master:{master[0]}:{master[1]}")
    if slurm := have("SLURM_JOB_ID", "SLURM_STEP_ID"):
        parts.append(f"slurm:{slurm[0]}.{slurm[1]}.{os.environ.get('SLURM_RESTART_COUNT', '0')}")
    worlds = have("LOCAL_WORLD_SIZE", "WORLD_SIZE")
    # All ranks are children of one launcher: run ids and ports may be those of the last time.
    if worlds and worlds[0] == worlds[1]:
        parent = os.getppid()
        parts.append(f"parent:{parent}.{_started(parent)}")
    return parts


def _started(pid: int) -> str:
    """When a process began, in clock ticks since the machine did: pids are used again."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return "0"
