"""Names the tests that a run of ./dev test has skipped or left to --all, and why.

Usage: skipped.py LOGS BUILD. LOGS has pytest.xml, where pytest has run, and PRESET.log, where ctest
has run for a preset; what the programs of C++ have said is in ctest's log below BUILD/PRESET.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

LEFT = "left to ./dev test --all: "  # tests/conftest.py says so
NOT_RUN = re.compile(r"^\t *\d+ - (\S+) \((Disabled|Skipped|Not Run)\)$", re.M)
# pytest's words where a module has skipped all of its tests.
OF_MODULE = re.compile(r"^\(.*'Skipped: (.*)'\)$", re.S)
# GoogleTest: file:line: Skipped, the reason, and some lines later the test's name.
SKIPPED = re.compile(
    r"^\S+:\d+: Skipped\n(?P<reason>.*)\n(?:(?!\[).*\n)*\[  SKIPPED \] (?P<name>.*) \(\d+ ms\)$",
    re.M,
)


def of_pytest(report: Path) -> Iterator[tuple[str, str]]:
    for case in ElementTree.parse(report).iter("testcase"):
        for skipped in case.iter("skipped"):
            name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
            of_module = OF_MODULE.search(skipped.text or "")
            reason = of_module[1] if of_module else skipped.get("message", "")
            yield name, reason.partition("\n")[0]


def of_ctest(log: Path, said: Path) -> Iterator[tuple[str, str]]:
    for name, how in NOT_RUN.findall(log.read_text(errors="replace")):
        yield name, how.lower()
    if said.exists():
        for match in SKIPPED.finditer(said.read_text(errors="replace")):
            yield match["name"], match["reason"]


def main(logs: Path, build: Path) -> None:
    found = []
    for log in sorted(logs.glob("*.log")):
        if log.stem == "pytest":
            report = log.with_suffix(".xml")
            found += of_pytest(report) if report.exists() else [("pytest", "it has no report")]
        else:
            found += of_ctest(log, build / log.stem / "Testing/Temporary/LastTest.log")
    left = [(name, why.removeprefix(LEFT)) for name, why in found if why.startswith(LEFT)]
    skipped = [(name, why) for name, why in found if not why.startswith(LEFT)]
    if left:
        print(
            f"\nleft to ./dev test --all: {len(left)}; of each file, and what shows most of them:"
        )
        by_file = Counter((name.partition("::")[0], why) for name, why in left)
        for (file, why), count in sorted(by_file.items()):
            print(f"  {file}, {count}: {why}")
    print(f"\nskipped: {len(skipped)}")
    for name, reason in sorted(skipped):
        print(f"  {name}: {reason}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
