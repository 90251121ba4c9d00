"""A job belongs to the user whose trainer began it: in memory, in its snapshots, on all nodes."""

import itertools
import json
import os
from pathlib import Path

import dmuond
import pytest
from daemons import dmuonctl, until
from users import GROUP, ONE, OTHER, User, need_root, together

pytestmark = need_root
LETS_BOTH_IN = (f"--socket_group={GROUP}", f"--allowed_uids=0,{ONE},{OTHER}")


def start(daemons, nodes: int, *flags: str) -> list[str]:
    """Both users reach the sockets."""
    addresses = daemons.start(nodes, 1, *LETS_BOTH_IN, *flags)
    folder = Path(daemons.members[0].path).parent
    os.chown(folder, 0, GROUP)
    folder.chmod(0o750)
    return addresses


def refused(user: User, *arguments, **named) -> dmuond.Error:
    with pytest.raises(dmuond.Error) as told:
        user.join(*arguments, **named)
    assert told.value.reason == "JOB_OF_ANOTHER_USER", told.value
    assert told.value.code == "PERMISSION_DENIED"
    assert told.value.metadata["owner_uid"] == str(ONE)
    assert told.value.metadata["uid"] == str(OTHER)
    assert f"uid {ONE}" in str(told.value) and f"uid {OTHER}" in str(told.value)
    assert "DMUOND_JOB" in str(told.value) and f"--job_uids={ONE},{OTHER}" in str(told.value)
    return told.value


def states(address: str, folder: Path) -> list[tuple]:
    listed = json.loads(dmuonctl(address, "snapshot", "list", str(folder), "mine", "--json").stdout)
    return [(one["step"], one["state"], one["owner_uid"]) for one in listed]


def test_another_user_has_no_part_in_a_job_nor_in_its_snapshots(daemons, tmp_path):
    address = start(daemons, 1, f"--snapshot_dir={tmp_path}")[0]
    one, mate, other, root = User(ONE), User(ONE), User(OTHER), User(0)
    one.begin("join", address, "mine", 0, 2)
    until(daemons.members[0].text, "session opened")
    for resume in ("never", "discard"):
        for rank in range(2):
            refused(other, address, "mine", rank, 2, resume=resume)
    mate.join(address, "mine", 1, 2)
    one.end()
    assert together([one, mate], "step") == [1, 1]
    jobs = json.loads(dmuonctl(address, "jobs", "--json").stdout)["jobs"]
    assert jobs[0]["owner_uid"] == ONE
    assert [trainer["uid"] for trainer in jobs[0]["trainers"]] == [ONE, ONE]
    assert f"of uid {ONE}\n" in dmuonctl(address, "status").stdout

    # Neither beside a live rank nor in a dead one's place, and not by beginning anew.
    for resume in ("never", "if_present", "discard"):
        refused(other, address, "mine", 0, 2, resume=resume)
    mate.kill()
    until(daemons.members[0].text, "trainer gone")
    for resume in ("if_present", "discard"):
        refused(other, address, "mine", 1, 2, resume=resume)
    assert root.join(address, "mine", 1, 2, resume="if_present") == 1, "root may"
    assert together([one, root], "step") == [2, 2]

    # It is the user's as a snapshot, too.
    one.begin("call", "save_snapshot")
    assert one.end() == 2
    for user in (one, root):
        user.begin("call", "close")
        user.end()
    until(lambda: dmuonctl(address, "jobs").stdout, "no job")
    for resume in ("never", "if_present", "require", "discard"):
        refused(other, address, "mine", 0, 1, resume=resume)
    assert states(address, tmp_path) == [(2, "durable", ONE)]
    assert root.join(address, "mine", 0, 1, resume="require") == 2
    assert json.loads(dmuonctl(address, "jobs", "--json").stdout)["jobs"][0]["owner_uid"] == ONE
    root.kill()
    until(daemons.members[0].text, r"(?s)trainer gone.*trainer gone")
    again = User(ONE)
    assert again.join(address, "mine", 0, 1, resume="require") == 2, "whoever went on with it"
    assert other.join(address, "theirs", 0, 1) == 0, "a name of its own"


def test_a_group_has_one_owner_for_a_job_the_one_that_node_0_heard_of_first(daemons):
    nodes = start(daemons, 2)
    one, mate, other = User(ONE), User(ONE), User(OTHER)
    one.begin("join", nodes[0], "mine", 0, 2)
    until(daemons.members[0].text, "session opened")
    refused(other, nodes[1], "mine", 1, 2)
    other.begin("open", nodes[1], "mine", 1, 2)
    assert other.end() == 0, "its node has not asked node 0 yet"
    until(daemons.members[1].text, "session refused(?s:.*)session refused")
    mate.join(nodes[1], "mine", 1, 2)
    one.end()
    assert together([one, mate], "step") == [1, 1]
    mate.kill()
    until(daemons.members[1].text, "trainer gone")
    refused(other, nodes[1], "mine", 1, 2, resume="if_present")
    assert User(ONE).join(nodes[1], "mine", 1, 2, resume="if_present") == 1


def save(user: User, address: str, name: str) -> None:
    """A job that has ended, with one snapshot."""
    user.join(address, name, 0, 1)
    user.begin("step")
    user.end()
    for call in ("save_snapshot", "close"):
        user.begin("call", call)
        user.end()
    until(lambda: dmuonctl(address, "jobs").stdout, "no job")


def owners(address: str) -> dict[str, int]:
    jobs = json.loads(dmuonctl(address, "jobs", "--json").stdout)["jobs"]
    return {job["name"]: job["owner_uid"] for job in jobs}


def test_a_job_that_an_admin_begins_anew_stays_its_users(daemons, tmp_path):
    address = start(daemons, 1, f"--snapshot_dir={tmp_path}")[0]
    one, root = User(ONE), User(0)
    save(one, address, "saved")
    assert root.join(address, "saved", 0, 1, resume="discard") == 0
    assert owners(address) == {"saved": ONE}
    # In memory alone, whose user has died.
    one.join(address, "unsaved", 0, 1)
    assert together([one], "step") == [1]
    one.kill()
    until(daemons.members[0].text, "trainer gone")
    again = User(0)
    assert again.join(address, "unsaved", 0, 1, resume="discard") == 0
    assert owners(address) == {"saved": ONE, "unsaved": ONE}
    refused(User(OTHER), address, "unsaved", 0, 1, resume="discard")


def test_whose_snapshots_are_that_cannot_be_read_is_not_guessed(daemons, tmp_path):
    address = start(daemons, 1, f"--snapshot_dir={tmp_path}")[0]
    one = User(ONE)
    save(one, address, "mine")
    next((tmp_path / "mine").glob("*/manifest.json")).write_text("{")
    for user, resume in itertools.product((one, User(OTHER)), ("if_present", "discard", "never")):
        with pytest.raises(dmuond.Error, match="manifest.json") as told:
            user.join(address, "mine", 0, 1, resume=resume)
        assert told.value.reason == "SNAPSHOT_BROKEN", told.value
        assert "nothing says any more whose" in str(told.value)
    assert User(0).join(address, "mine", 0, 1, resume="discard") == 0, "root may"


def test_a_job_is_the_user_s_of_the_snapshot_it_goes_on_from(daemons, tmp_path):
    address = start(daemons, 1, f"--snapshot_dir={tmp_path}")[0]
    one = User(ONE)
    save(one, address, "mine")
    older = next((tmp_path / "mine").iterdir())
    older.rename(tmp_path / older.name)
    save(User(OTHER), address, "mine")
    next((tmp_path / "mine").glob("*/lane-*.safetensors")).unlink()
    (tmp_path / older.name).rename(tmp_path / "mine" / older.name)
    root = User(0)
    assert root.join(address, "mine", 0, 1, resume="require") == 1
    assert owners(address) == {"mine": ONE}


def test_users_share_jobs_where_the_daemon_says_so(daemons):
    address = start(daemons, 1, f"--job_uids={ONE},{OTHER}")[0]
    one, other = User(ONE), User(OTHER)
    one.begin("join", address, "ours", 0, 2)
    other.join(address, "ours", 1, 2)
    one.end()
    assert together([one, other], "step") == [1, 1]
