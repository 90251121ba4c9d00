"""What lanes compute with may be replaced on disk under a running job: an upgrade of a package."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from daemons import HANGS_AFTER_S, dmuonctl, lane_pids, program, until
from survivors import STEPS, Survivor


def replaced_lane(daemon) -> None:
    """Kills the only lane, and waits for its successor."""
    (lane,) = lane_pids(daemon.process.pid)
    os.kill(lane, signal.SIGKILL)
    deadline = time.monotonic() + HANGS_AFTER_S
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
    trainer = Survivor(address, 0, 1, STEPS, hold=10)
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


class Library:
    """In a folder of ours, where lanes find it; another build of it has the same code."""

    def __init__(self, path: str, folder: Path):
        self.name = Path(path).name
        self.here = folder / self.name
        shutil.copy(path, self.here)
        notes = subprocess.run(["readelf", "-n", path], capture_output=True, check=True, text=True)
        (self.build,) = re.findall(r"Build ID: (\w+)", notes.stdout)
        self.other_build = f"{int(self.build[:2], 16) ^ 1:02x}{self.build[2:]}"

    def replace(self) -> None:
        contents = self.here.read_bytes()
        assert contents.count(bytes.fromhex(self.build)) == 1
        other = self.here.with_name("new")
        other.write_bytes(
            contents.replace(bytes.fromhex(self.build), bytes.fromhex(self.other_build))
        )
        self.here.rename(self.here.with_name("old"))
        other.rename(self.here)

    def bring_back(self) -> None:
        self.here.with_name("old").rename(self.here)


def loaded(name: str) -> str:
    """Where lanes have a library from."""
    lane = program("dmuond-lane")
    said = subprocess.run(["ldd", lane], capture_output=True, check=True, text=True).stdout
    return re.search(rf"{name}\S* => (\S+)", said).group(1)


def held_at_step_10(daemons, libraries: Path, *flags: str):
    """Address, daemon and trainer of a job whose lanes look for libraries there first."""
    environment = {"LD_LIBRARY_PATH": str(libraries)}
    (address,) = daemons.start(1, 1, *flags, environments=[environment])
    trainer = Survivor(address, 0, 1, STEPS, hold=10)
    trainer.wait_for(10)
    return address, daemons.members[0], trainer


def test_a_library_that_was_replaced_is_refused_until_it_is_back_or_accepted(
    daemons, tmp_path, undisturbed
):
    library = Library(loaded("libopenblas"), tmp_path)
    address, daemon, trainer = held_at_step_10(daemons, tmp_path)
    assert findings(address)["lanes' files"]["verdict"] == "ok"
    refused = dmuonctl(address, "job", "accept-lanes", "default")
    assert refused.returncode == 1 and "LANES_NOT_REFUSED" in refused.stderr
    library.replace()
    replaced_lane(daemon)
    text = until(daemon.text, "new lanes cannot start and are tried again")
    assert re.search(
        rf"lane 0 would go on with other bits: its {re.escape(library.name)} \({library.here}\) is "
        rf"build-id {library.other_build}, and the job began with build-id {library.build}\. ",
        text,
    )
    finding = findings(address)["lanes' files"]
    assert finding["verdict"] == "warn"
    assert f"is build-id {library.other_build}" in finding["detail"]
    assert trainer.process.poll() is None
    library.bring_back()
    trainer.wait_for(trainer.step() + 10)
    library.replace()
    replaced_lane(daemon)
    until(daemon.text, "(?s)new lanes cannot start.*new lanes cannot start")
    accepted = dmuonctl(address, "job", "accept-lanes", "default").stdout
    differs = f"is build-id {library.other_build} instead of build-id {library.build}"
    assert "job 'default' goes on with these lanes of node 0: " in accepted and differs in accepted
    assert differs in dmuonctl(address, "status").stdout
    assert "an operator has accepted" in daemon.text()
    assert findings(address)["lanes' files"]["verdict"] == "ok"
    assert trainer.finish() == undisturbed, "the other build is of the same code"


def test_another_build_of_libm_with_the_same_results_keeps_no_lane_from_starting(
    daemons, tmp_path, undisturbed
):
    library = Library(loaded("libm.so"), tmp_path)
    address, daemon, trainer = held_at_step_10(daemons, tmp_path)
    adjusted = [
        int(Path(f"/proc/{pid}/oom_score_adj").read_text())
        for pid in (daemon.process.pid, lane_pids(daemon.process.pid)[0])
    ]
    assert adjusted[0] < adjusted[1] <= adjusted[0] + 50, "before the daemon, and few trainers"
    library.replace()
    replaced_lane(daemon)
    trainer.wait_for(trainer.step() + 10)
    maps = Path(f"/proc/{lane_pids(daemon.process.pid)[0]}/maps").read_text()
    assert f"{library.here}\n" in maps, "the lane has loaded it"
    assert trainer.finish() == undisturbed


def test_a_job_does_not_begin_where_nodes_have_other_builds_of_a_library(daemons, tmp_path):
    library = Library(loaded("libopenblas"), tmp_path)
    library.replace()
    addresses = daemons.start(2, 1, environments=[{}, {"LD_LIBRARY_PATH": str(tmp_path)}])
    trainers = [Survivor(address, rank, 2, STEPS) for rank, address in enumerate(addresses)]
    for trainer in trainers:
        with pytest.raises(AssertionError, match="LANE_DIFFERS"):
            trainer.finish()
        said = trainer.report()
        for part in (library.name, library.build, library.other_build, "node 0", "node 1"):
            assert part in said


def test_a_lane_with_other_bits_that_comes_last_costs_an_epoch_and_no_step(daemons, tmp_path):
    """Its siblings are connected with the other node's lanes by then."""
    library = Library(loaded("libopenblas"), tmp_path)
    library.replace()
    gate = tmp_path / "gate"
    lane = tmp_path / "lane"
    lane.write_text(
        f"""#!/bin/sh
case "$OTHER_LIBRARIES $*" in /*--lane=[13]" "*)
  if [ -p {gate} ]; then cat {gate}; rm {gate}; export LD_LIBRARY_PATH=$OTHER_LIBRARIES; fi;;
esac
exec {program("dmuond-lane")} "$@"
"""
    )
    lane.chmod(0o755)
    addresses = daemons.start(
        2,
        2,
        f"--lane_binary={lane}",
        environments=[{"OTHER_LIBRARIES": "-"}, {"OTHER_LIBRARIES": str(tmp_path)}],
    )
    trainers = [
        Survivor(address, rank, 2, STEPS, hold=hold)
        for rank, (address, hold) in enumerate(zip(addresses, (10, None), strict=True))
    ]
    trainers[0].wait_for(10)
    os.mkfifo(gate)
    os.kill(lane_pids(daemons.members[1].process.pid)[0], signal.SIGKILL)
    until(daemons.members[1].text, "(?s)(lane configured.*){3}")
    gate.write_text("")
    until(daemons.members[1].text, "would go on with other bits")
    weights = [
        [line for line in trainer.finish() if not line.startswith("step ")] for trainer in trainers
    ]
    assert weights[0] == weights[1] != []
    for daemon in daemons.members:
        assert re.search('msg="new lanes".*would go on with other bits', daemon.text()), "the cause"
        assert "unexpected rendezvous" not in daemon.text()
        assert daemon.text().count('msg="new lanes"') == 2, "one lane died, one differed"


def test_a_parked_job_that_is_saved_is_left_at_once(daemons, tmp_path):
    library = Library(loaded("libopenblas"), tmp_path)
    address, daemon, trainer = held_at_step_10(
        daemons,
        tmp_path,
        f"--snapshot_dir={tmp_path / 'snapshots'}",
        "--snapshot_every_steps=0",
        "--register_timeout=1s",
    )
    trainer.process.send_signal(signal.SIGSTOP)
    for _ in range(2):  # the first may be of the step before the one in flight
        assert dmuonctl(address, "snapshot", "save").returncode == 0
    library.replace()
    replaced_lane(daemon)
    until(daemon.text, "the job is parked")
    began = time.monotonic()
    drained = dmuonctl(address, "drain")
    took = time.monotonic() - began
    assert drained.returncode == 0, drained.stderr
    assert took < 20, "it waited for lanes"
    trainer.end()


def test_whatever_lanes_call_of_libm_is_compared_or_exact():
    """Results of pow and log2 are in LaneBits.functions; the others' are fixed by the standards."""

    def symbols(path: str, kind: str) -> set[str]:
        said = subprocess.run(["nm", "-D", kind, path], capture_output=True, check=True, text=True)
        return {line.split()[-1].split("@")[0] for line in said.stdout.splitlines() if line}

    called = symbols(program("dmuond-lane"), "--undefined-only")
    of_libm = symbols(loaded("libm.so"), "--defined-only") - symbols(
        loaded("libc.so"), "--defined-only"
    )
    exact = {"sqrt", "lround", "llround"}
    assert called & of_libm - exact == {"pow", "log2"}
