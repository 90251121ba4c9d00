"""What lanes compute with may be replaced on disk under a running job: an upgrade of a package."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from daemons import PATIENCE_S, dmuonctl, lane_pids, program, until
from survivors import STEPS, Survivor


def replaced_lane(daemon) -> None:
    """Kills the only lane, and waits for its successor."""
    (lane,) = lane_pids(daemon.process.pid)
    os.kill(lane, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while not set(lane_pids(daemon.process.pid)) - {lane}:
        assert time.monotonic() < deadline, daemon.text()
        time.sleep(0.01)


def findings(address: str) -> dict[str, dict]:
    found = json.loads(dmuonctl(address, "doctor", "--json").stdout)
    return {finding["what"]: finding for finding in found}


def test_a_program_that_was_replaced_or_is_missing_starts_as_it_was(daemons, tmp_path, undisturbed):
    lane = tmp_path / "dmuond-lane"
    shutil.copy(program("dmuond-lane"), lane)
    (address,) = daemons.start(1, 1, f"--lane_binary={lane}")
    (daemon,) = daemons.members
    trainer = Survivor(address, 0, 1, STEPS)
    trainer.wait_for(10)
    assert findings(address)["lanes' files"]["verdict"] == "ok"
    other = tmp_path / "new"
    other.write_text("#!/bin/sh\nexit 7\n")
    other.chmod(0o755)
    other.rename(lane)
    replaced_lane(daemon)
    finding = findings(address)["lanes' files"]
    assert finding["verdict"] == "warn"
    assert re.search(rf"dmuond-lane \({lane}\) is 17 bytes of .*, lanes run ", finding["detail"])
    trainer.wait_for(trainer.step() + 10)
    lane.unlink()
    replaced_lane(daemon)
    assert trainer.finish() == undisturbed


def test_a_library_that_was_replaced_is_refused_and_the_job_waits(daemons, tmp_path, undisturbed):
    said = subprocess.run(
        [program("dmuond-lane"), "--print_bits"], capture_output=True, check=True, text=True
    ).stdout
    name, path, build = re.search(
        r'name: "(libopenblas[^"]*)"\s+path: "([^"]+)"\s+id: "build-id (\w+)"', said
    ).groups()
    library = tmp_path / name
    shutil.copy(path, library)
    (address,) = daemons.start(1, 1, environments=[{"LD_LIBRARY_PATH": str(tmp_path)}])
    (daemon,) = daemons.members
    trainer = Survivor(address, 0, 1, STEPS)
    trainer.wait_for(10)
    assert findings(address)["lanes' files"]["verdict"] == "ok"
    other_build = f"{int(build[:2], 16) ^ 1:02x}{build[2:]}"
    other = tmp_path / "new"
    bytes_of_it = Path(path).read_bytes()
    assert bytes_of_it.count(bytes.fromhex(build)) == 1
    other.write_bytes(bytes_of_it.replace(bytes.fromhex(build), bytes.fromhex(other_build)))
    library.rename(tmp_path / "old")
    other.rename(library)
    replaced_lane(daemon)
    text = until(daemon.text, "new lanes cannot start and are tried again")
    assert re.search(
        rf"lane 0 would go on with other bits: its {re.escape(name)} \({library}\) is build-id "
        rf"{other_build}, and the job began with build-id {build}\. ",
        text,
    )
    finding = findings(address)["lanes' files"]
    assert finding["verdict"] == "warn" and f"is build-id {other_build}" in finding["detail"]
    assert trainer.process.poll() is None
    (tmp_path / "old").rename(library)
    assert trainer.finish() == undisturbed
