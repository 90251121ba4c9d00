"""Who may change a daemon by dmuonctl, what its log says, and what doctor says of snapshots."""

import os
import re
import shutil
import subprocess

import dmuond
import pytest
from daemons import HANGS_AFTER_S, program, until
from test_core_client import scalars, two_matrices

NOBODY = 65534


def ctl(address: str, *arguments: str, tool: str | None = None) -> subprocess.CompletedProcess:
    """By the user nobody, where a tool is given."""
    nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if tool else {}
    return subprocess.run(
        [tool or program("dmuonctl"), *arguments, f"--address={address}"],
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        **nobody,
    )


def tool_of_nobody(daemon) -> str:
    """Lets that user come to the socket, and to a dmuonctl beside it."""
    folder = os.path.dirname(daemon.path)
    os.chown(folder, 0, NOBODY)
    os.chmod(folder, 0o750)
    tool = shutil.copy(program("dmuonctl"), folder)
    os.chmod(tool, 0o755)
    return tool


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_is_no_admin_may_look_and_not_change_and_the_log_names_callers(daemons):
    address = daemons.start(1, 1, f"--socket_group={NOBODY}")[0]
    daemon = daemons.members[0]
    tool = tool_of_nobody(daemon)
    looked = ctl(address, "status", tool=tool)
    assert looked.returncode == 0, looked.stderr
    for change in (["log-level", "debug"], ["drain"], ["job", "end", "j"], ["snapshot", "save"]):
        refused = ctl(address, *change, tool=tool)
        assert refused.returncode != 0
        assert "--admin_uids" in refused.stderr and f"uid {NOBODY}" in refused.stderr, refused
    refusals = re.findall(r'msg="an admin call is refused .*', daemon.text())
    assert 1 <= len(refusals) <= 4
    assert f"uid={NOBODY}" in refusals[0] and "call=SetLogLevel" in refusals[0]

    assert ctl(address, "log-level", "debug").returncode == 0
    own = rf'changes something" call=SetLogLevel uid={os.geteuid()} pid=\d+'
    assert re.search(own, until(daemon.text, "changes something"))
    assert daemon.process.poll() is None, "it was not drained"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_admin_by_flag_may_change(daemons):
    address = daemons.start(1, 1, f"--socket_group={NOBODY}", f"--admin_uids={NOBODY}")[0]
    daemon = daemons.members[0]
    changed = ctl(address, "log-level", "debug", tool=tool_of_nobody(daemon))
    assert changed.returncode == 0, changed.stderr
    assert re.search(f"call=SetLogLevel uid={NOBODY} ", until(daemon.text, "changes something"))


def test_doctor_names_snapshots_that_failed(daemons, tmp_path):
    directory = tmp_path / "snapshots"
    address = daemons.start(1, 1, f"--snapshot_dir={directory}", "--snapshot_every_steps=0")[0]
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
        session.step(scalars())
        assert re.search(r"ok +snapshots", ctl(address, "doctor").stdout)
        directory.rename(tmp_path / "away")
        directory.mkdir()
        failed = ctl(address, "snapshot", "save")
        assert failed.returncode != 0 and "is another directory" in failed.stderr, failed
        doctor = ctl(address, "doctor").stdout
        assert re.search(r"warn +snapshots +step 1 committed, none durable; 1 failed", doctor), (
            doctor
        )
        assert "snapshots of" not in doctor
        with dmuond.Session(address, rank=0, world_size=1, job="second") as second:
            two_matrices(second)
            second.step(scalars())
            doctor = ctl(address, "doctor").stdout
        assert re.search(r"warn +snapshots of default", doctor), doctor
        assert re.search(r"ok +snapshots of second +step 1 committed, none durable", doctor)
        for job in ("default", "second"):
            assert re.search(rf"ok +lanes of {job} +0 ready", doctor)
