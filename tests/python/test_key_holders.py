"""Who may use a session's key: the process that opened the session, and nobody else."""

import subprocess
import sys

import dmuond
import pytest
from dmuond._proto import trainer_pb2 as pb

STRANGER = """
import sys
import grpc
from dmuond import _proto
from dmuond._proto import trainer_pb2 as pb
address, session, incarnation, secret = sys.argv[1], *map(int, sys.argv[2:])
key = pb.SessionKey(session=session, incarnation=incarnation, secret=secret)
channel = grpc.insecure_channel(address, [("grpc.default_authority", "localhost")])
try:
    _proto.stub(channel, "Trainer").CloseSession(pb.CloseSessionRequest(key=key), timeout=10)
except grpc.RpcError as error:
    print(error.code().name, error.details())
"""


def test_the_key_of_a_session_is_of_no_use_to_another_process(address):
    with dmuond.Session(address, rank=0, world_size=1) as session:
        key = session._link.key
        words = [str(number) for number in (key.session, key.incarnation, key.secret)]
        said = subprocess.run(
            [sys.executable, "-c", STRANGER, address, *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        assert said.startswith("PERMISSION_DENIED"), said
        assert "must open a session of its own" in said
        with pytest.raises(dmuond.Error) as caught:  # it is open still
            session._link.call("WaitStep", pb.WaitStepRequest(key=key, step=1))
        assert caught.value.reason != "INCARNATION_OLD"
