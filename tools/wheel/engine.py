"""Builds the wheel dmuond-engine from a build folder: programs, and the libraries that they need.

    engine.py BUILD OUT

BUILD has been built as far as its target `programs`. OUT gets
dmuond_engine-VERSION-py3-none-manylinux_2_N_x86_64.whl: all of it works with the C library 2.N and
newer ones. VERSION ends with +cpu if the build has no kernels for GPUs.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import libraries

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOC = Path("/usr/share/doc")
# Debian's packages of headers from which code gets into the programs.
HEADERS = ("nlohmann-json3-dev", "libxxhash-dev")
BYTES_MAX = 60_000_000


def cached(build: Path) -> dict[str, str]:
    """What CMake has been told, and has found."""
    text = (build / "CMakeCache.txt").read_text()
    return dict(re.findall(r"^([\w-]+):\w+=(.*)$", text, re.M))


def packages_of(files: Iterable[Path]) -> set[str]:
    """The packages of Debian that the files are of."""
    # A package may list /lib/... for what is found as /usr/lib/..., or the reverse.
    names = {
        file: {real, Path("/usr", *real.parts[1:]), Path("/", *real.parts[2:])}
        for file in files
        for real in [file.resolve()]
    }
    asked = ("dpkg", "-S", *set().union(*names.values()))  # ends with 1 for those that nobody has
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    packages = {Path(path): name for name, path in re.findall(r"^([^:, ]+).*: (/.*)$", told, re.M)}
    for file, possible in names.items():
        if possible.isdisjoint(packages):
            sys.exit(f"engine.py: no package of Debian has {file}, whose licence must be shipped")
    return set(packages.values())


def cuda_licence(toolkit: Path) -> Path:
    """Of the CUDA runtime that is linked into the lane."""
    packed = "dist-info/nvidia_cuda_runtime-*/licenses/License.txt"
    for found in (
        toolkit / "EULA.txt",
        *toolkit.glob(packed),
        *DOC.glob("cuda-cudart-*/copyright"),
    ):
        if found.exists():
            return found
    sys.exit(
        f"engine.py: the licence of CUDA's runtime is neither EULA.txt in {toolkit} nor in {DOC}"
    )


def copy_licences(packages: set[str], into: Path) -> None:
    """Those of packages, and the licences that they only name."""
    into.mkdir()
    for package in packages:
        text = (DOC / package / "copyright").read_bytes()
        (into / f"{package}.txt").write_bytes(text)
        for named in re.findall(rb"/usr/share/common-licenses/[\w.+-]*\w", text):
            shutil.copy(named.decode(), into)


def build_wheel(build: Path, out: Path) -> None:
    told = cached(build)
    with tempfile.TemporaryDirectory() as scratch:
        project, programs = Path(scratch, "engine"), Path(scratch, "programs")
        shutil.copytree(HERE / "engine", project, ignore=shutil.ignore_patterns("__pycache__"))
        install = ("cmake", "--install", build, "--component", "programs", "--prefix", programs)
        libraries.run(*install)
        package = project / "dmuond_engine"
        sources = libraries.collect(
            sorted((programs / "bin").iterdir()), package / "bin", package / "lib"
        )
        shutil.copytree(programs / "share", project / "share")
        for name in ("LICENSE", "NOTICE"):
            shutil.copy(ROOT / name, project)
        others = project / "others"
        copy_licences({*HEADERS, *packages_of(sources.values())}, others)
        version = told["CMAKE_PROJECT_VERSION"]
        if told.get("DMUOND_CUDA") == "ON":
            toolkit = Path(told["CMAKE_CUDA_COMPILER"]).resolve().parents[1]
            shutil.copy(cuda_licence(toolkit), others / "cuda-runtime.txt")
        else:
            version += "+cpu"
        files = libraries.files_in(package / "bin", package / "lib")
        major, minor = max(map(libraries.c_library, files))
        (project / "VERSION").write_text(version)
        (project / "TAG").write_text(f"manylinux_{major}_{minor}_x86_64")
        pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
        libraries.run(*pip, "-w", out, project)
    (wheel,) = out.glob(f"dmuond_engine-{version}-*.whl")
    size = wheel.stat().st_size
    print(f"{wheel}: {size / 1e6:.1f} MB")
    if size > BYTES_MAX:
        sys.exit(f"engine.py: {wheel} has more than {BYTES_MAX} bytes")


if __name__ == "__main__":
    build_wheel(Path(sys.argv[1]), Path(sys.argv[2]))
