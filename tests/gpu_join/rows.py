"""Rows of a table: what is wanted, what was found, and whether it is right."""

import dataclasses
import fnmatch
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NAME_WIDTH, WANTED_WIDTH = 52, 46


class WrongError(Exception):
    """What a check has found instead of what is wanted."""


class LateError(WrongError):
    pass


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    wanted: str
    look: Callable[[], str]  # returns what it has found, or raises
    deadline_s: float = 120.0
    always: bool = False  # also where a pattern has not chosen it: later ones need it


@dataclasses.dataclass(frozen=True)
class Row:
    part: str
    name: str
    wanted: str
    found: str
    right: bool
    seconds: float

    @property
    def text(self) -> str:
        verdict = "right" if self.right else "WRONG"
        name = f"{self.part}: {self.name}"
        return (
            f"{verdict}  {name:{NAME_WIDTH}}  {self.wanted:{WANTED_WIDTH}}  {self.found}"
            f"  [{self.seconds:.1f} s]"
        )


class Table:
    """Is printed row by row, and is whole in gpu-join.txt and gpu-join.json after each."""

    def __init__(self, out: Path, machine: str, only: str, goes_on: bool = False):
        self.rows: list[Row] = []
        self._out, self._machine, self._only = out, machine, only.split(",")
        self._goes_on = goes_on
        signal.signal(signal.SIGALRM, _raise_late)
        print(f"# {machine}", flush=True)

    def check_all(self, part: str, checks: Iterator[Check], clear_up: Callable[[], None]) -> None:
        """Until the first wrong row, unless it goes on. After each, `clear_up` ends what runs."""
        for check in checks:
            chosen = any(fnmatch.fnmatch(check.name, pattern) for pattern in self._only)
            if not (check.always or chosen):
                continue
            row = self._row(part, check, clear_up)
            self.rows.append(row)
            print(row.text, flush=True)
            self._write()
            if not row.right and not self._goes_on:
                print(f"# {part} stops here", flush=True)
                return

    @property
    def all_right(self) -> bool:
        return bool(self.rows) and all(row.right for row in self.rows)

    def _row(self, part: str, check: Check, clear_up: Callable[[], None]) -> Row:
        begin = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, check.deadline_s)
            found, right = check.look(), True
        except LateError:
            found, right = f"nothing, {check.deadline_s:g} s after its begin", False
        except (WrongError, OSError) as error:
            found, right = str(error), False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            clear_up()
        return Row(part, check.name, check.wanted, found, right, time.monotonic() - begin)

    def _write(self) -> None:
        lines = [f"# {self._machine}", *(row.text for row in self.rows)]
        (self._out / "gpu-join.txt").write_text("\n".join(lines) + "\n")
        rows = [dataclasses.asdict(row) for row in self.rows]
        whole = {"machine": self._machine, "rows": rows}
        (self._out / "gpu-join.json").write_text(json.dumps(whole, indent=1) + "\n")


def _raise_late(_number, _frame):
    raise LateError
