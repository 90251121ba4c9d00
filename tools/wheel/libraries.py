"""Collects programs for other machines, with the libraries that these may lack.

    libraries.py --into FOLDER --libraries FOLDER [--without WHEEL] PROGRAM...

Copies the programs into the first folder, without symbols. Copies the shared libraries
that they need into the second folder, and has the programs look there first. Libraries that lie in
WHEEL are left out. So are the C and C++ runtime and the driver, which are the other machine's own.
What needs a newer runtime than Debian 12's is refused; Ubuntu 24.04 has all that this one has.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

# For the driver the build has the tests' fake.
OF_THE_MACHINE = re.compile(
    r"(ld-linux-x86-64|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|cuda))\.so\.\d+"
)
# Versions of symbols by the C library of the release that has them: Ubuntu 22.04's and 24.04's.
RUNTIMES = {
    (2, 35): {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    (2, 39): {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}
DEBIAN_12 = (2, 36)


def run(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def needed(file: Path) -> list[str]:
    """The names of libraries that a program or library is linked with."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", file))


def c_library(file: Path) -> tuple[int, int]:
    """The oldest C library with which the file works, by the versions of symbols that it needs."""
    newest: dict[str, tuple[int, ...]] = {}
    for kind, version in re.findall(
        r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+) ", run("readelf", "-V", file)
    ):
        newest[kind] = max(newest.get(kind, ()), tuple(map(int, version.split("."))))
    own = newest.pop("GLIBC", (2, 0))[:2]
    for release, has in RUNTIMES.items():
        if all(version <= has[kind] for kind, version in newest.items()):
            return max(own, release)
    sys.exit(f"libraries.py: {file} needs {newest}, which no release has that it knows: add it")


def find(program: Path) -> dict[str, Path]:
    """The libraries that the program loads here and another machine may lack, by name."""
    found = {}
    for line in run("ldd", program).splitlines():
        name, arrow, where = line.strip().partition(" => ")
        if arrow and not OF_THE_MACHINE.fullmatch(name):
            if where == "not found":
                sys.exit(f"libraries.py: {program} needs {name}, which is not here")
            found[name] = Path(where.split()[0])
    return found


def files_in(*folders: Path) -> list[Path]:
    return [file for folder in folders for file in folder.iterdir() if file.is_file()]


def collect(
    programs: Iterable[Path],
    into: Path,
    libraries: Path,
    without: frozenset[str] = frozenset(),
    strip: str = "--strip-debug",
) -> dict[str, Path]:
    """Returns where each library was copied from, by name.

    strip: what to leave out of programs. Names of functions, which stay, are for backtraces.
    """
    sources: dict[str, Path] = {}
    into.mkdir(parents=True, exist_ok=True)
    libraries.mkdir(parents=True, exist_ok=True)
    for program in programs:
        sources |= {n: path for n, path in find(program).items() if n not in without}
        copy = into / program.name
        run("strip", strip, "-o", copy, program)
        # Of the libraries' own needs, too, which the newer RUNPATH is not.
        place = f"$ORIGIN/{os.path.relpath(libraries, into)}"
        run("patchelf", "--force-rpath", "--set-rpath", place, copy)
    for name, path in sources.items():
        shutil.copyfile(path, libraries / name)
    for file in files_in(into, libraries):
        for name in needed(file):
            there = name in without or (libraries / name).exists()
            if not there and not OF_THE_MACHINE.fullmatch(name):
                sys.exit(f"libraries.py: {file} needs {name}, which is not copied")
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--without", type=Path)
    parser.add_argument("programs", nargs="+", type=Path)
    options = parser.parse_args()
    without = zipfile.ZipFile(options.without).namelist() if options.without else []
    names = frozenset(Path(name).name for name in without)
    collect(options.programs, options.into, options.libraries, names, "--strip-all")
    for file in files_in(options.into, options.libraries):
        if c_library(file) > DEBIAN_12:
            sys.exit(f"libraries.py: {file} needs more than Debian 12 has: build it there")


if __name__ == "__main__":
    main()
