"""Prints those of its arguments that this interpreter's environment does not satisfy.

An argument is NAME or NAME>=VERSION. Needs the standard library only: it runs before anything is
installed.
"""

import re
import sys
from importlib import metadata


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


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        if not is_satisfied(wanted):
            print(wanted)
