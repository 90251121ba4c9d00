"""Prints the lines of requirements files that this interpreter's environment does not satisfy.

Usage: python_needs.py REQUIREMENTS... Needs the standard library only: it runs before anything is
installed.
"""

import re
import sys
from importlib import metadata
from pathlib import Path


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.9.1+cpu' gives (2, 9, 1)."""
    return tuple(int(n) for n in re.match(r"\d+(?:\.\d+)*", text).group().split("."))


def is_satisfied(requirement: str) -> bool:
    name, _, wanted = requirement.partition(">=")
    try:
        have = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return not wanted or parse_version(have) >= parse_version(wanted)


def main(paths: list[str]) -> None:
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            requirement = line.split("#")[0].strip()
            if requirement and not is_satisfied(requirement):
                print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
