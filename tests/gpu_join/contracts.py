"""What is taken for granted of the driver: a row for each statement of driver_contracts."""

import json
from collections.abc import Iterator

from rows import Check, WrongError
from run import Run

DEADLINE_S = 300.0


def checks(run: Run) -> Iterator[Check]:
    contracts: list[dict] = []

    def look() -> str:
        path = run.machine.out / f"contracts{run.mode}.json"
        command = [run.machine.programs / "driver_contracts", "--json", path]
        # A process of four GPUs takes a second to begin, and most statements have one.
        program = run.machine.run(command, f"contracts{run.mode}.log", DEADLINE_S)
        if not path.exists():
            raise WrongError(program.last_words)
        contracts.extend(json.loads(path.read_text())["contracts"])
        return f"{len(contracts)} statements"

    yield Check(f"driver_contracts{run.mode}", "comes to its end", look, DEADLINE_S, always=True)
    for contract in contracts:
        yield Check(contract["name"] + run.mode, "holds", lambda c=contract: _seen(c))


def _seen(contract: dict) -> str:
    found = f"{contract['verdict']} {contract['seen']}".strip()
    if contract["verdict"] == "FAILS":
        raise WrongError(f"{found} ({contract['statement']})")
    return found
