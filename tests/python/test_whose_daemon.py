"""Whom a client speaks with before it hands anything over: another release's, another user's."""

import contextlib
import ctypes
import os
import platform

import core_trainer
import dmuond
import pytest
from core_trainer import Job, Tensor, whole
from dmuond import layout_parts, types
from dmuond._proto import trainer_pb2 as pb

NOBODY = 65534
SYS_SETRESUID = {"x86_64": 117, "aarch64": 147}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def open_session(fake, **more):
    return dmuond.Session(fake.path, rank=0, world_size=1, **more)


@contextlib.contextmanager
def as_nobody():
    """This thread alone."""
    setresuid = SYS_SETRESUID[platform.machine()]
    libc = ctypes.CDLL(None)
    assert libc.syscall(setresuid, -1, NOBODY, -1) == 0
    try:
        yield
    finally:
        assert libc.syscall(setresuid, -1, 0, -1) == 0


@pytest.mark.parametrize(
    ("version", "remedy"), [(1, "update the daemon"), (3, "update the client")]
)
def test_another_protocol_version_is_refused_by_name_before_anything_else(fake, version, remedy):
    fake.version = version
    with pytest.raises(dmuond.FailedPreconditionError, match=remedy) as caught:
        open_session(fake)
    assert caught.value.reason == "VERSION_MISMATCH"
    assert caught.value.metadata["server_version"] == str(version)
    assert caught.value.metadata["client_version"] == "2"
    assert not fake.opened


def test_one_that_would_not_skip_for_a_gradient_that_no_lane_reads_is_not_asked_to(fake):
    matrix = Tensor("w", (4, 4))
    trainer = core_trainer.Trainer(0, 1, Job((matrix,), ((whole(matrix),),)), address=fake.path)
    with pytest.raises(dmuond.FailedPreconditionError, match="update the daemon") as caught:
        trainer.session.step(core_trainer.scalars_of(1), not_finite=0)
    assert caught.value.reason == "VERSION_MISMATCH"
    assert not fake.submits
    trainer.session.close()


@as_root
@pytest.mark.parametrize("whose", ["socket", "directory", "listener"])
def test_a_daemon_of_a_stranger_gets_no_token(fake, whose, monkeypatch):
    if whose == "listener":
        with as_nobody():
            fake._listener.listen()  # the paths are right: who listens there now is not
        what = fake.path + ".attach"
    else:
        what = fake.path if whose == "socket" else os.path.dirname(fake.path)
        os.chown(what, NOBODY, NOBODY)
    with pytest.raises(dmuond.Error, match="DMUOND_SERVER_UID=65534") as caught:
        open_session(fake, token=b"secret")
    assert caught.value.reason == "SOCKET_OWNER"
    assert caught.value.metadata == {"path": what, "uid": str(NOBODY), "own_uid": "0"}
    assert not fake.opened
    open_session(fake, server_uid=NOBODY).close()
    monkeypatch.setenv("DMUOND_SERVER_UID", str(NOBODY))
    open_session(fake).close()


def test_a_layout_larger_than_a_message_is_registered_whole(fake):
    parameters = [
        types.Parameter(name="x" * 230 + str(index), shape=[4], route=types.ROUTE_TRAINER)
        for index in range(20_000)
    ]
    fragments = [
        types.Fragment(parameter=index, box=types.Box(begin=[0], end=[4]))
        for index in range(len(parameters))
    ]
    with open_session(fake) as session:
        registered = session.register(parameters, fragments, [types.GroupConfig(preset="keller")])
    (request,) = fake.registered
    assert list(request.parameters) == parameters
    assert list(request.fragments) == fragments
    assert request.ByteSize() > 4 << 20
    assert len(registered.routing) == len(parameters)
    parts = list(layout_parts.split(request))
    assert max(part.ByteSize() for part in parts) < layout_parts.PART_BYTES + 4096
    assert isinstance(parts[0], pb.RegisterLayoutRequest)
