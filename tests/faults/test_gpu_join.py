"""What a machine with GPUs is asked (tests/gpu_join), asked of the fake driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from daemons import program

ASKING = Path(__file__).parents[1] / "gpu_join"
needs.fake_gpus()


class Answer:
    def __init__(self, out: Path, arguments: tuple[str, ...], variables: dict[str, str]):
        command = [sys.executable, ASKING, "--fake", f"--programs={program('dmuond').parent}"]
        ran = subprocess.run(
            [*command, f"--out={out}", *arguments],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        self.code, self.text = ran.returncode, ran.stdout + ran.stderr
        self.rows = json.loads((out / "gpu-join.json").read_text())["rows"]
        self.logs = [log.read_text() for log in (out / "logs").iterdir()]

    def rows_of(self, part: str) -> list[dict]:
        return [row for row in self.rows if row["part"] == part]


@pytest.fixture
def ask(tmp_path):
    return lambda *arguments, **variables: Answer(tmp_path, arguments, variables)


def test_jobs_have_the_same_bits_in_every_setup(ask):
    answer = ask("doctor", "context", "equal", "several", "--gpus=2", "--steps=150")
    assert answer.code == 0, answer.text
    names = {row["name"] for row in answer.rows_of("equal")}
    assert {
        f"{setup}{mode}" for setup in ("1x1", "1x2 own", "2x1") for mode in ("", " mps")
    } <= names


def test_contracts_are_rows(ask):
    answer = ask("contracts", "--gpus=2", "--mps=off")
    assert answer.code == 0, answer.text
    assert len(answer.rows) > 50


def test_whatever_dies_the_bits_are_the_same(ask):
    # Work that begins late: a fault is noticed when the next signals are enqueued already.
    answer = ask(
        "faults",
        "--gpus=1",
        "--mps=on",
        "--steps=60",
        "--only=*illegal access*,*in a kernel*,killed at lane.update.before_f*,daemon killed*",
        FAKE_CUDA_DELAY_US="2000",
    )
    assert answer.code == 0, answer.text
    assert len(answer.rows) == 10, answer.text
    assert any("ended CUDA_FAILED" in log for log in answer.logs), answer.text


def test_the_first_wrong_row_stops_its_part_and_no_other(ask):
    answer = ask(
        "doctor", "equal", "--gpus=1", "--mps=off", "--steps=4", FAKE_CUDA_COMPUTE_MODE="2"
    )
    assert answer.code == 1, answer.text
    *before, last = answer.rows_of("doctor")
    assert all(row["right"] for row in before)
    assert (last["name"], last["wanted"], last["right"]) == ("cuda:0", "ok or a warning", False)
    assert "prohibited" in last["found"]
    assert [row["right"] for row in answer.rows_of("equal")] == [True] * 3


def test_a_row_that_takes_too_long_is_wrong_and_what_it_has_started_is_ended(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(ASKING)!r})
from pathlib import Path
from machine import Machine
from rows import Check, Table
out = Path({str(tmp_path)!r})
machine = Machine(Path("/usr/bin"), True, 1, out, "")
def look():
    program = machine.start(["/usr/bin/sh", "-c", "sleep 60 & echo $!; wait"], "sleeper.log")
    time.sleep(60)
table = Table(out, "none", "*")
table.check_all("part", iter([Check("late", "ends", look, 0.5)]), machine.end_programs)
machine.close()
print(table.rows[0].right, table.rows[0].found)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert ran.stdout.splitlines()[-1] == "False nothing, 0.5 s after its begin", ran.stdout
    child = (tmp_path / "sleeper.log").read_text().strip()
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
