"""dmuond.torch with torch's own GPUs: a row for each test of test_torch_on_cuda.py."""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import bundle
from rows import Check, WrongError
from run import Run

TESTS = "test_torch_on_cuda.py"


def checks(run: Run) -> Iterator[Check]:
    cases: list[ElementTree.Element] = []

    def look() -> str:
        report = run.machine.out / f"torch{run.mode.replace(' ', '-')}.xml"
        program = run.machine.start(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", bundle.PYTHON / TESTS],
            f"torch{run.mode}.log",
            DMUOND_BIN_DIR=str(run.machine.programs),
        )
        program.process.wait()
        if not report.exists():
            raise WrongError(program.last_words)
        cases.extend(ElementTree.parse(report).iter("testcase"))
        if not cases:
            raise WrongError(f"no test: {program.last_words}")
        return f"{len(cases)} tests"

    yield Check(f"torch{run.mode}", "comes to its end", look, 400.0, always=True)
    for case in cases:
        name = case.get("name", "").removeprefix("test_")
        yield Check(name + run.mode, "passes", lambda c=case: _seen(c))


def _seen(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if (wrong := case.find(kind)) is not None:
            raise WrongError(f"{kind}: {wrong.get('message', '')[:200]}")
    found = [one.get("value", "") for one in case.iter("property") if one.get("name") == "found"]
    return found[0] if found else "passed"
