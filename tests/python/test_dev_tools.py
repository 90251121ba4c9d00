"""What ./dev does besides building: its checks fail where they must."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import needs
import pytest

ROOT = Path(__file__).resolve().parents[2]


def bash(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, "bash", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("unity", [False, True], ids=["alone", "unity"])
def test_files_that_clang_tidy_did_not_reach_are_named_and_fail(tmp_path, unity):
    needs.program("clang-tidy", "./dev setup --all")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "late.cc").write_text("int late();\n")
    build = tmp_path / "build"
    compiled = "late.cc"
    if unity:
        compiled = "build/Unity/unity_0_cxx.cxx"
        (build / "Unity").mkdir(parents=True)
        (tmp_path / compiled).write_text(f'#include "{tmp_path}/late.cc"\n')
    build.mkdir(exist_ok=True)
    command = f"c++ -o late.o -c {compiled}"
    entry = {"directory": str(tmp_path), "file": compiled, "command": command}
    (build / "compile_commands.json").write_text(json.dumps([entry]))
    done = subprocess.run(
        [sys.executable, ROOT / "tools/dev/tidy.py", "--build", build, "--minutes", "0"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "not reached in 0 minutes: late.cc" in done.stdout
    checked = json.loads((build / "tidy/compile_commands.json").read_text())
    assert [str(tmp_path / one["file"]) for one in checked] == [str(tmp_path / "late.cc")]
    assert "Unity" not in checked[0]["command"]


USES_A_LOCK = """
namespace absl { inline namespace lts_20220623 { class Mutex { public: void Lock(); }; } }
void Use(absl::Mutex& mutex) { mutex.Lock(); }
"""


@pytest.mark.parametrize(
    ("source", "good"), [(USES_A_LOCK, False), ("int Use() { return 1; }", True)]
)
def test_a_tsan_program_that_locks_with_abseil_is_refused(tmp_path, source, good):
    needs.program("c++", "./dev setup")
    (tmp_path / "a.cc").write_text(source)
    library = tmp_path / "a_test"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, tmp_path / "a.cc"], check=True)
    done = bash(
        'say() { echo "$*" >&2; }; . tools/dev/test.sh; check_tsan_program "$1"', str(library)
    )
    assert (done.returncode == 0) == good, done.stderr
    assert ("absl::lts_20220623::Mutex::Lock()" in done.stderr) != good


@pytest.mark.parametrize(
    ("version", "usable"),
    [("1.13.1", False), ("2.8.0", False), ("2.9.1+cpu", True), ("2.15.0a0", True)],
)
def test_a_torch_of_the_system_is_used_where_it_is_new_enough(tmp_path, version, usable):
    info = tmp_path / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = bash('. tools/dev/setup.sh; has_usable_torch "$1"', str(python))
    assert (done.returncode == 0) == usable, done.stderr


SAYS = """import needs
needs.package("nobody.has.this")
"""
SKIPS = """import pytest
@pytest.mark.skipif(True, reason="by a mark")
@pytest.mark.parametrize("a", [1, 2])
def test_marked(a): pass
def test_asks(): pytest.skip("as it runs")
def test_runs(): pass
@pytest.mark.rest("test_runs shows most of it")
def test_rest(): pass
"""
OF_GOOGLETEST = """[ RUN      ] SomeTest.Skips/0
some_test.cc:7: Skipped
only root can

[  SKIPPED ] SomeTest.Skips/0 (3 ms)
[  SKIPPED ] 1 test, listed below:"""


def test_what_a_run_has_skipped_is_counted_and_named_with_its_reason(tmp_path, monkeypatch):
    logs, build = tmp_path / "logs", tmp_path / "build/cpu"
    logs.mkdir()
    build.mkdir(parents=True)
    for module in ("says", "says_too"):  # at one place, for one reason
        (tmp_path / f"test_{module}.py").write_text(SAYS)
    (tmp_path / "test_skips.py").write_text(SKIPS)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    paths = f"testpaths = {tmp_path}\npythonpath = {ROOT / 'tests/python'}\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{paths}")
    (build / "said").write_text(OF_GOOGLETEST)
    (build / "CTestTestfile.cmake").write_text(
        "add_test(some_test cat said)\nadd_test(other_test true)\n"
        "set_tests_properties(other_test PROPERTIES DISABLED TRUE)\n"
    )
    runs = {
        "pytest": [sys.executable, "-m", "pytest", "-n2", f"--junitxml={logs}/pytest.xml"],
        "cpu": ["ctest", "--test-dir", build],
    }
    monkeypatch.delenv("CI", raising=False)
    for name, command in runs.items():
        with (logs / f"{name}.log").open("w") as log:
            subprocess.run(command, cwd=tmp_path, stdout=log, check=True)
    told = subprocess.run(
        [sys.executable, ROOT / "tools/dev/skipped.py", logs, tmp_path / "build"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert told.stdout.splitlines() == [
        "",
        "left to ./dev test --all: 1; of each file, and what shows most of them:",
        "  test_skips, 1: test_runs shows most of it",
        "",
        "skipped: 7",
        "  SomeTest.Skips/0: only root can",
        "  other_test: disabled",
        "  test_says: needs the Python package nobody.has.this (./dev setup --frameworks)",
        "  test_says_too: needs the Python package nobody.has.this (./dev setup --frameworks)",
        "  test_skips::test_asks: as it runs",
        "  test_skips::test_marked[1]: by a mark",
        "  test_skips::test_marked[2]: by a mark",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--gpu"], "wheel: unknown option --gpu"), (["a", "b"], "wheel takes one folder")],
)
def test_wheel_refuses_what_it_does_not_know(arguments, says):
    done = bash('exec ./dev wheel "$@"', *arguments)
    assert done.returncode == 1
    assert says in done.stderr


@pytest.mark.parametrize("in_ci", [False, True])
def test_what_a_test_needs_and_the_machine_lacks_fails_in_ci_alone(monkeypatch, in_ci):
    monkeypatch.setenv("CI", str(in_ci).lower())
    needs.package("pytest")
    needs.program("sh", "dash")
    ends = pytest.fail.Exception if in_ci else pytest.skip.Exception
    for lacks in (
        lambda: needs.package("nobody.has.this"),
        lambda: needs.program("nobody-has-this", "nowhere"),
    ):
        with pytest.raises(ends, match="nobody.has.this"):
            lacks()


def which_tests(*arguments: str) -> list[str]:
    command = [sys.executable, ROOT / "tools/dev/which_tests.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == bool(done.stdout.strip()), done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize(
    ("language", "name", "found"),
    [
        ("cpp", "clip", ["cpp clip_test"]),
        ("cpp", "step_simulation_test", ["cpp step_simulation_test"]),
        ("cpp", "WhoWaitsForASnapshotThatHangs", ["*WhoWaitsForASnapshotThatHangs*"]),
        ("python", "dev_tools", ["python tests/python/test_dev_tools.py"]),
        ("python", "test_dev_tools.py", ["python tests/python/test_dev_tools.py"]),
        ("python", "tests/python/test_x.py", []),
        ("python", "clang_tidy", ["python tests/python/test_dev_tools.py -k clang_tidy"]),
        ("python", "test_dev_tools.py::test_a", ["python tests/python/test_dev_tools.py::test_a"]),
    ],
)
def test_a_test_is_found_by_its_files_name_or_its_own(language, name, found):
    lines = which_tests(language, name)
    assert len(lines) == len(found)
    assert all(line.endswith(end) for line, end in zip(lines, found, strict=True)), lines


@pytest.mark.parametrize(
    ("changed", "near", "far"),
    [
        ("scheduler/job/node_job.cc", "cpp node_job_record_test", "cpp clip_test"),
        ("server/daemon/calls/job_calls.cc", "cpp sessions_test", "cpp hanging_disk_test"),
        ("proto/dmuond/wire/frame.h", "cpp frame_test", "cpp clip_test"),
        ("tests/scheduler/clip_test.cc", "cpp clip_test", "cpp plan_test"),
        ("tests/server/system/disk_driver.h", "cpp hanging_disk_test", "cpp leak_test"),
        (
            "client/python/src/dmuond/torch/loop_state.py",
            "python tests/python/test_loop_state.py",
            "python tests/python/test_wheel.py",
        ),
        (
            "client/python/src/dmuond/torch/fused.py",
            "python tests/python/test_torch_options.py",
            "python tests/python/test_wheel.py",
        ),
        (
            "tests/python/survivors.py",
            "python tests/python/test_daemon_deaths.py",
            "python tests/python/test_wheel.py",
        ),
        (
            "docs/errors.md",
            "python tests/python/test_errors_page.py",
            "python tests/python/test_wheel.py",
        ),
    ],
)
def test_tests_that_are_near_to_a_changed_file_are_found(changed, near, far):
    lines = which_tests("changed", changed)
    assert near in lines and far not in lines, lines


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--every"], "unknown option --every"),
        (["--faults=some"], "unknown option --faults=some"),
        (["--cpp=a", "--changed"], "one of --cpp=NAME, --python=NAME and --changed"),
        (["--changed", "--all"], "beside --changed, .* have no effect"),
        (["--python=wheel", "--cpp"], "beside --python, .* have no effect"),
        (["--cpp", "--", "-k", "oldest"], "no Python tests are run, which would get: -k oldest"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(options, refusal):
    script = 'die() { echo "$*" >&2; exit 1; }; . tools/dev/test.sh; setup_for() { die set up; }'
    refused = bash(script + '; cmd_test "$@"', *options)
    assert refused.returncode == 1
    assert re.search(refusal, refused.stderr), refused.stderr
