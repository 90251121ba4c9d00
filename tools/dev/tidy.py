"""Runs clang-tidy over what a build directory compiles.

Usage: tidy.py --build DIR [--jobs N] [--changed] [--minutes M]

With --changed only files that the last 20 commits touched are checked (and, for a touched header,
the source file of the same name or else one that includes it). --minutes bounds the time: newest
changes go first. Exits 1 when clang-tidy found something, or did not reach a file, which is named.

A file that was clean is remembered, by everything that it includes and the configuration, in the
user's cache directory, and not checked again until one of these changes.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

COMMITS = 20
# clang reads g++'s command lines: no precompiled headers of g++'s, no warnings that only g++ knows.
# The analysis of locks is clang's own and costs nothing beside the rest.
ARGUMENTS = [
    "--extra-arg=-Wno-unknown-warning-option",
    "--extra-arg=-Wthread-safety",
    "--checks=clang-diagnostic-thread-safety*",
    # The analyzer follows a function for 20,000 states, not for 225,000: half of a file's time.
    *(
        f"--extra-arg={word}"
        for word in ("-Xclang", "-analyzer-config", "-Xclang", "max-nodes=20000")
    ),
]


def git(*arguments: str) -> list[str]:
    return subprocess.run(
        ["git", *arguments], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def without_precompiled_header(command: str) -> str:
    words = shlex.split(command)
    kept: list[str] = []
    skip = False
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if skip:
            skip = False
        elif word == "-include" and "cmake_pch" in following:
            skip = True
        elif word not in ("-fpch-preprocess", "-Winvalid-pch"):
            kept.append(word)
    return shlex.join(kept)


def compiled(build: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each source of ours with its entry in the compilation database.

    Where several are compiled as one (DMUOND_UNITY), each has a copy of that one's entry.
    """
    root = Path.cwd()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = Path(entry["directory"], entry["file"]).resolve()
        entries = {file: entry}
        if file.parent.name == "Unity":
            entries = {
                Path(name): {
                    **entry,
                    "file": name,
                    "command": entry["command"].replace(entry["file"], name),
                }
                for name in re.findall(r'#include "(.*)"', file.read_text())
            }
        for source, its_entry in entries.items():
            if source.is_relative_to(root) and not source.is_relative_to(root / "build"):
                yield source, its_entry


def write_database(build: Path) -> tuple[Path, list[Path]]:
    """A compilation database that clang can read, and the sources of ours in it."""
    root = Path.cwd()
    ours = list(compiled(build))
    for _, entry in ours:
        entry["command"] = without_precompiled_header(entry["command"])
    directory = build / "tidy"
    directory.mkdir(exist_ok=True)
    (directory / "compile_commands.json").write_text(json.dumps([entry for _, entry in ours]))
    return directory, sorted({source.relative_to(root) for source, _ in ours})


def source_for_header(header: Path, sources: list[Path]) -> Path | None:
    same_name = header.with_suffix(".cc")
    if same_name in sources:
        return same_name
    include = re.compile(rf'#include "(.*/)?{re.escape(header.name)}"')
    return next((source for source in sources if include.search(source.read_text())), None)


def changed_sources(sources: list[Path]) -> list[Path]:
    """Sources behind the files that the last commits touched, newest change first."""
    touched = git("log", f"--max-count={COMMITS}", "--name-only", "--format=", "--diff-filter=d")
    chosen: dict[Path, None] = {}
    for path in map(Path, filter(None, touched)):
        source = path if path in sources else None
        if path.suffix == ".h" and path.exists():
            source = source_for_header(path, sources)
        if source is not None:
            chosen[source] = None
    return list(chosen)


def dependencies(build: Path) -> dict[str, list[str]]:
    """What each object was made of, as ninja has noted it; all paths as seen from `build`."""
    if not (build / "build.ninja").exists():
        return {}
    told = subprocess.run(
        ["ninja", "-C", build, "-t", "deps"], check=True, capture_output=True, text=True
    ).stdout
    files = {}
    for block in told.split("\n\n"):
        first, *others = block.splitlines() or [""]
        files[first.partition(": #deps")[0]] = [line.strip() for line in others]
    return files


@functools.cache
def content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class CleanFiles:
    """Remembers files that had no findings, across runs and checkouts."""

    def __init__(self, build: Path) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._directory = base / "dmuond-tidy"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._build = build
        self._dependencies = dependencies(build)
        self._commands = {source: entry["command"] for source, entry in compiled(build)}
        configuration = [content(Path(name)) for name in git("ls-files", "*.clang-tidy")]
        version = subprocess.run(
            ["clang-tidy", "--version"], check=True, capture_output=True, text=True
        ).stdout
        self._common = [version, *configuration, *ARGUMENTS]

    def key(self, source: Path) -> Path | None:
        """Where a clean result is noted; None if it is not known what the file includes."""
        command = self._commands[source.resolve()]
        words = shlex.split(command)
        made = [words[words.index("-o") + 1]]
        # What is in a precompiled header is not among the object's own.
        made += [
            os.path.relpath(f"{word}.gch", self._build)
            for word in words
            if word.endswith("cmake_pch.hxx")
        ]
        if not all(target in self._dependencies for target in made):
            return None
        root = Path.cwd()
        paths = {(self._build / name).resolve() for t in made for name in self._dependencies[t]}
        included = [f"{os.path.relpath(path, root)} {content(path)}" for path in sorted(paths)]
        text = "\n".join([*self._common, command.replace(str(root), "."), *included])
        return self._directory / hashlib.sha256(text.encode()).hexdigest()


def check(source: Path, database: Path, clean_files: CleanFiles) -> tuple[Path, bool, str, float]:
    start = time.monotonic()
    note = clean_files.key(source)
    if note is not None and note.exists():
        note.touch()
        return source, True, "", time.monotonic() - start
    done = subprocess.run(
        ["clang-tidy", "--quiet", "-p", database, *ARGUMENTS, source],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 and note is not None:
        note.touch()
    return source, done.returncode == 0, done.stdout, time.monotonic() - start


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--build", type=Path, required=True)
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--changed", action="store_true")
    options.add_argument("--minutes", type=float, default=float("inf"))
    args = options.parse_args()

    database, sources = write_database(args.build)
    if args.changed:
        sources = changed_sources(sources)
    clean_files = CleanFiles(args.build)
    deadline = time.monotonic() + args.minutes * 60
    dirty = 0
    unreached: list[Path] = []

    def check_in_time(source: Path):
        return check(source, database, clean_files) if time.monotonic() < deadline else None

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for number, (source, result) in enumerate(
            zip(sources, pool.map(check_in_time, sources), strict=True), 1
        ):
            if result is None:
                unreached.append(source)
                continue
            _, clean, text, seconds = result
            print(f"[{number}/{len(sources)}] {source} {seconds:.0f} s", flush=True)
            if not clean:
                dirty += 1
                print(text, flush=True)
    for source in unreached:
        print(f"not reached in {args.minutes:g} minutes: {source}")
    print(
        f"clang-tidy: {len(sources) - len(unreached)} files checked, {dirty} with findings, "
        f"{len(unreached)} not reached"
    )
    return 1 if dirty or unreached else 0


if __name__ == "__main__":
    sys.exit(main())
