"""What dmuonctl doctor finds beside a daemon on all GPUs."""

import json
from collections.abc import Iterator

from jobs import Setup
from rows import Check, WrongError
from run import Run

WELL_ENOUGH = "ok or a warning"


def checks(run: Run) -> Iterator[Check]:
    findings: list[dict] = []

    def look() -> str:
        machine = run.machine
        job = run.job(Setup(1, machine.gpus), f"doctor{run.mode}")
        command = [machine.programs / "dmuonctl", "doctor", "--json"]
        command += [f"--address={job.address()}", f"--lane_binary={machine.lane}"]
        program = machine.run(command, f"doctor{run.mode}.log")
        try:
            findings.extend(json.loads("\n".join(program.lines)))
        except ValueError:
            raise WrongError(program.last_words) from None
        return f"{len(findings)} findings"

    yield Check(f"dmuonctl doctor{run.mode}", "comes to its end", look, always=True)
    for finding in findings:
        wanted = _wanted(run, finding["what"])
        name = finding["what"] + run.mode
        yield Check(name, wanted, lambda f=finding, w=wanted: _found(f, w))


def _wanted(run: Run, what: str) -> str:
    if what == "MPS":
        return "ok: runs" if run.machine.with_mps else "ok: does not run"
    return "ok: version" if what == "NCCL" and run.machine.gpus > 1 else WELL_ENOUGH


def _found(finding: dict, wanted: str) -> str:
    found = f"{finding['verdict']}: {finding['detail']}"
    right = finding["verdict"] != "fail" if wanted == WELL_ENOUGH else found.startswith(wanted)
    if not right:
        raise WrongError(f"{found} → {finding['remedy']}")
    return found
