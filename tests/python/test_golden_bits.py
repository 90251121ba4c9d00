"""The bits of every preset, layout, route, dtype and option are those that were recorded.

The jobs are those of golden_trainer.py. Some run on GPUs of the fake driver, too, which has the
bits of the CPU: test_torch_on_gpus.py.
"""

import json
import re
import subprocess
from pathlib import Path

import golden_trainer
import pytest
from daemons import program
from trainers import Ranks

RECORDED = Path(__file__).with_name("golden_bits.json")
RECORD = "./dev test --python -- tests/python/test_golden_bits.py --record-bits"
# Products are OpenBLAS's, which has other kernels, and other bits, for each type of processor. The
# lanes here take those that every x86-64 with AVX2 runs. All else in a lane has the same bits on
# each (kernels/cpu/clones.h).
ENVIRONMENT = {"OPENBLAS_CORETYPE": "Haswell"}
PATIENCE_S = 240.0  # for all jobs of a world
WORLDS = {1: golden_trainer.ON_ONE_RANK, 4: golden_trainer.ON_FOUR_RANKS}


def library() -> str:
    """The version and kernels of the lanes' OpenBLAS; skips where the processor lacks them."""
    if not {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"this processor has no AVX2 for {ENVIRONMENT}")
    said = subprocess.run(
        [program("dmuond-lane"), "--print_bits"],
        env=ENVIRONMENT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    return " ".join(re.search(r'(OpenBLAS \S+)[^"]*"\ncore_type: "(\w+)"', said).groups())


def check(found: dict[str, golden_trainer.Digests]) -> None:
    """Compares digests with those that were recorded for such lanes; skips where there are none."""
    known, name = json.loads(RECORDED.read_text()), library()
    if name not in known:
        pytest.skip(f"no digests are recorded for {name}, but for {', '.join(known)}: {RECORD}")
    others = []
    for job, digests in found.items():
        wanted = known[name].get(job, [""] * len(digests))
        pairs = zip(("weights", "state", "outcomes"), digests, wanted, strict=False)
        if differing := [what for what, digest, want in pairs if digest != want]:
            others.append(f"{job}: {', '.join(differing)}")
    assert not others, (
        f"{len(others)} of {len(found)} have other bits than those that were recorded:\n  "
        + "\n  ".join(others)
        + "\nA change that moves bits on purpose records them anew, and its commit's message names "
        f"which and why:\n  {RECORD}"
    )


def record(found: dict[str, golden_trainer.Digests]) -> None:
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    libraries = []
    for name, digests in (known | {library(): found}).items():
        lines = (f"{json.dumps(job)}: {json.dumps(own)}" for job, own in digests.items())
        libraries.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    RECORDED.write_text("{" + ",\n".join(libraries) + "}\n")


def test_bits_are_those_that_were_recorded(daemons, tmp_path, request):
    addresses = daemons.start(2, 1, environments=[ENVIRONMENT] * 2)
    found = {}
    # DTensor keeps a flattened mesh for meshes like it that come later in the process.
    with Ranks() as ranks:
        for world, jobs in WORLDS.items():
            told = str(tmp_path / "group"), list(jobs)
            results = ranks.run(golden_trainer.run, world, addresses, *told, timeout_s=PATIENCE_S)
            found |= golden_trainer.of_all(results)
    if request.config.getoption("--record-bits"):
        record(found)
    check(found)
