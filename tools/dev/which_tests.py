"""Finds tests by name, or those nearest to what has changed: for ./dev test.

    which_tests.py cpp NAME           files of C++ tests with NAME in theirs, or a TEST called so
    which_tests.py python NAME        files of Python tests likewise, or tests called so
    which_tests.py changed [FILE...]  tests nearest to these files, or to what git says has changed

Prints a line for each: `cpp FILE [TEST]` or `python ARGUMENT-OF-PYTEST...`.

Nearest to a C++ source are the tests of the folder in tests/ that is called as its own, or else as
the next one above it, and those that include its header. Nearest to a Python module are the tests
that import it or are called after it; to any other file, the Python tests that name it.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (".cc", ".h")
CLIENT = Path("client/python/src")
# Of a module of the client that no test names: a job in which all of its folder takes part.
ALL_TAKE_PART = {"dmuond.torch": "test_torch_options.py", "dmuond": "test_core_client.py"}


class Tests:
    """The files of tests below a checkout, and what is in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        cpp = (*root.glob("tests/**/*_test.*"), *root.glob("tests/**/*_fuzz.cc"))
        # Those of kernels/cuda need nvcc, and are not in the build that ./dev test makes.
        self.cpp = {path.stem: path for path in sorted(cpp) if path.parent.name != "cuda"}
        self.python = sorted(root.glob("tests/*/test_*.py"))
        self.text = {p: p.read_text() for p in (*self.cpp.values(), *self.python)}

    def cpp_called(self, name: str) -> Iterable[str]:
        files = [stem for stem in self.cpp if name in stem]
        if files:
            return [f"cpp {stem}" for stem in ([name] if name in files else files)]
        called = re.compile(
            rf"^(?:TYPED_)?(?:RC_GTEST_|)[A-Z_]+\((\w+),\s*\w*{re.escape(name)}\w*\)", re.M
        )
        return [
            f"cpp {stem} *{name}*"
            for stem, path in self.cpp.items()
            if called.search(self.text[path])
        ]

    def python_called(self, name: str) -> Iterable[str]:
        path, _, test = name.partition("::")
        if (self.root / path).exists():
            return [f"python {name}"]
        word = path.removesuffix(".py")
        files = [file for file in self.python if word in file.stem]
        exact = [file for file in files if file.stem in (word, f"test_{word}")]
        if files:
            return [
                f"python {self._shown(file)}{'::' + test if test else ''}"
                for file in exact or files
            ]
        defined = re.compile(rf"^ *def test_?\w*{re.escape(name)}", re.M)
        files = [file for file in self.python if defined.search(self.text[file])]
        return [f"python {' '.join(map(self._shown, files))} -k {name}"] if files else []

    def nearest(self, changed: Path) -> set[str]:
        if changed.suffix in SOURCES:
            return {f"cpp {stem}" for stem in self._of_source(changed)}
        if changed.suffix == ".py":
            return {f"python {self._shown(file)}" for file in self._of_module(changed)}
        named = re.compile(rf"(?<![\w/]){re.escape(changed.name)}(?![\w/])")
        return {
            f"python {self._shown(file)}" for file in self.python if named.search(self.text[file])
        }

    def _of_source(self, changed: Path) -> Iterable[str]:
        if changed.stem in self.cpp and self.cpp[changed.stem] == self.root / changed:
            return [changed.stem]
        folder = changed.parent if changed.parts[0] == "tests" else "tests" / changed.parent
        own: list[str] = []
        while not own and folder != Path("tests"):
            own = [stem for stem, path in self.cpp.items() if path.parent == self.root / folder]
            folder = folder.parent
        header = f'{changed.parent.name}/{changed.stem}.h"'
        including = [stem for stem, path in self.cpp.items() if header in self.text[path]]
        # A helper of tests is their own, and not all of its folder's.
        return including if changed.parts[0] == "tests" and including else own + including

    def _of_module(self, changed: Path) -> Iterable[Path]:
        if self.root / changed in self.python:
            return [self.root / changed]
        if not changed.is_relative_to(CLIENT):
            imports = re.compile(
                rf"^(?:import|from) {changed.stem}\b|\b{re.escape(changed.name)}", re.M
            )
            return [file for file in self.python if imports.search(self.text[file])]
        module = changed.relative_to(CLIENT).with_suffix("")
        if module.name == "__init__":
            module = module.parent
        package, name = ".".join(module.parts[:-1]), module.name
        imports = re.compile(
            rf"\b{re.escape(package)}\.{name}\b|\bfrom {re.escape(package)} import .*\b{name}\b"
        )
        found = [
            file
            for file in self.python
            if imports.search(self.text[file]) or file.stem.endswith(f"_{name}")
        ]
        if found:
            return found
        while package not in ALL_TAKE_PART:
            package = package.rpartition(".")[0]
        return [self.root / "tests/python" / ALL_TAKE_PART[package]]

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.root))


def changed_files() -> list[Path]:
    """What differs from the last commit; where nothing does, what that commit has changed."""

    def git(*arguments: str) -> list[str]:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()

    names = git("diff", "--name-only", "HEAD") + git("ls-files", "-o", "--exclude-standard")
    return [Path(name) for name in names or git("diff", "--name-only", "HEAD~1")]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("cpp", "python", "changed"))
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    tests = Tests(ROOT)
    if options.how != "changed":
        found = {
            line
            for name in options.names
            for line in (tests.cpp_called if options.how == "cpp" else tests.python_called)(name)
        }
    else:
        files = [Path(name) for name in options.names] or changed_files()
        near = {file: tests.nearest(file) for file in files}
        for file in (file for file, lines in near.items() if not lines):
            print(f"no test is near {file}: ./dev test runs all", file=sys.stderr)
        found = set().union(*near.values())
    print("\n".join(sorted(found)))
    return 0 if found else 3


if __name__ == "__main__":
    sys.exit(main())
