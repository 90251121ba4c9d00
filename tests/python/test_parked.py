"""The network of lanes is down for longer than anybody tries: the job is parked, and goes on."""

import contextlib
import json
import os
import shutil
import subprocess

import core_trainer
import numpy as np
import pytest
from core_trainer import Job, Tensor, together, whole
from daemons import Daemons, dmuonctl, free_port, secret_file, until

SQUARE = Tensor("square", (16, 16))
JOB = Job((SQUARE,), ((whole(SQUARE),),) * 2, name="job")
RAILS = ("127.0.0.6", "127.0.0.7")  # by node; daemons speak over 127.0.0.1

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "iptables", "nsenter", "unshare"))),
    reason="only root can cut a network, which takes ip, iptables, nsenter and unshare",
)


@pytest.fixture
def inside():
    """How to run a command in a network of the test's own; it is ready."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"up\n"
    yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
    holder.kill()
    holder.wait()


@pytest.fixture
def rails(inside):
    """What cuts the network between lanes, and what mends it."""
    rule = ["INPUT", "-d", "127.0.0.6/31", "-j", "DROP"]

    def change(what):
        subprocess.run([*inside, "iptables", what, *rule], check=True)

    return (lambda: change("-A")), (lambda: change("-D"))


@pytest.fixture
def group(inside, tmp_path):
    coordinator = f"127.0.0.1:{free_port()}"
    with Daemons() as started:
        for node, rail in enumerate(RAILS):
            started.start_alone(
                "--devices=cpu:1",
                "--threads=1",
                f"--node_rank={node}",
                "--nodes=2",
                f"--coordinator={coordinator}",
                f"--peer_listen={coordinator if node == 0 else '127.0.0.1:0'}",
                f"--peer_secret_file={secret_file(tmp_path)}",
                f"--rail_address={rail}",
                "--rail_timeout=2s",
                "--register_timeout=3s",
                "--session_linger=4s",
                under=inside,
            )
        for daemon in started.members:
            daemon.wait_ready()
        yield started.members


def state(daemon):
    found = json.loads(dmuonctl(f"unix:{daemon.path}", "--json", "status").stdout)
    return found["job"]["state"]


def test_a_rail_that_is_cut_parks_the_job_and_costs_no_step(group, rails):
    cut, mend = rails
    ranks = together(
        *(
            lambda r=r: core_trainer.Trainer(r, 2, JOB, address=f"unix:{group[r].path}")
            for r in range(2)
        )
    )
    together(*(rank.step for rank in ranks))
    cut()

    def while_it_is_cut():
        with contextlib.ExitStack() as at_last:
            at_last.callback(mend)
            for daemon in group:
                until(daemon.text, "(?s)the job is parked.*the job is parked")  # tried again, too
            until(lambda: state(group[1]), "parked")
            until(
                lambda: dmuonctl(f"unix:{group[0].path}", "status").stdout,
                "for lanes that can work, the job being parked: .*they are tried again",
            )

    together(while_it_is_cut, *(rank.step for rank in ranks))
    assert [rank.session.last_committed_step for rank in ranks] == [2, 2]
    assert np.array_equal(ranks[0].weights[0], ranks[1].weights[0])
    until(lambda: state(group[0]), "running")
    together(*(rank.session.close for rank in ranks))
