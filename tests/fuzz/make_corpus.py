"""Makes the corpora of the fuzz targets beside it: messages as clients and members send them.

usage: PYTHONPATH=client/python/src python tests/fuzz/make_corpus.py   (after a change of the proto)
"""

import struct
from pathlib import Path

from dmuond._proto import lane_pb2, peer_pb2, trainer_pb2, types_pb2

CORPUS = Path(__file__).with_name("corpus")
OWN_KEY, OWN_ATTEMPT = 1, 2
ROWS, COLUMNS = 8, 16
OWNER = 0  # the node whose lane gets the matrix


def write(target: str, name: str, data: bytes) -> None:
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def layout() -> dict:
    parameter = types_pb2.Parameter(
        name="matrix",
        shape=[ROWS, COLUMNS],
        weight_type=types_pb2.ELEMENT_TYPE_FLOAT32,
        gradient_type=types_pb2.ELEMENT_TYPE_FLOAT32,
        route=types_pb2.ROUTE_MUON,
        reduce_factor=1,
    )
    fragment = types_pb2.Fragment(contribution=types_pb2.CONTRIBUTION_SUM)
    fragment.box.begin.extend([0, 0])
    fragment.box.end.extend([ROWS, COLUMNS])
    for arena, part in ((1, fragment.gradient), (2, fragment.weight)):
        part.arena = arena
        part.strides.extend([COLUMNS, 1])
    group = types_pb2.GroupConfig(preset="torch")
    return {"parameters": [parameter], "fragments": [fragment], "groups": [group]}


def scalars() -> types_pb2.StepScalars:
    made = types_pb2.StepScalars(loss_scale=1, clip_muon=True)
    made.groups.add(learning_rate=0.01, momentum=0.95, beta1=0.9, beta2=0.95, eps=1e-8)
    return made


def trainer_requests() -> None:
    wait = {"wait_ms": 10}
    arenas = trainer_pb2.AttachBuffersRequest()
    for arena in (1, 2):
        added = arenas.arenas.add(id=arena, size_bytes=ROWS * COLUMNS * 4)
        added.daemon.SetInParent()
    handle = trainer_pb2.AttachBuffersRequest()
    handle.arenas.add(id=1, size_bytes=512).cuda_ipc.handle = bytes(64)
    push = trainer_pb2.PushParametersRequest(all_weights=True, step=1)
    some = trainer_pb2.PushParametersRequest(weights=["matrix"], step=1)
    state = trainer_pb2.PushParametersRequest(state=True, step=1)
    chunk = trainer_pb2.PushParametersRequest()
    chunk.chunk.parameter = "matrix"
    chunk.chunk.kind = trainer_pb2.STATE_KIND_MASTER
    chunk.chunk.data = bytes(ROWS * COLUMNS * 4)

    def stream(*messages) -> bytes:
        parts = (message.SerializeToString() for message in messages)
        return b"".join(struct.pack("<H", len(part)) + part for part in parts)

    submit = trainer_pb2.SubmitStepRequest(step=2, scalars=scalars(), **wait)
    requests = {
        "hello": (0, trainer_pb2.HelloRequest(version_min=1, version_max=1, client="fuzz")),
        "open": (1, trainer_pb2.OpenSessionRequest(job="fuzz", world_size=1, home_lane=-1)),
        "layout": (2, trainer_pb2.RegisterLayoutRequest(**layout())),
        "attach": (3, arenas),
        "attach_ipc": (3, handle),
        "push": (4, stream(push)),
        "push_some": (4, stream(some)),
        "push_state": (4, stream(state, chunk)),
        "pull": (5, trainer_pb2.PullParametersRequest(parameters=["matrix"])),
        "submit": (6, submit),
        "submit_absent": (6, trainer_pb2.SubmitStepRequest(step=2, scalars=scalars(), absent=[0])),
        "withdraw": (6, trainer_pb2.SubmitStepRequest(step=2, scalars=scalars(), withdraw=True)),
        "wait": (7, trainer_pb2.WaitStepRequest(step=1, **wait)),
        "watch": (8, trainer_pb2.WatchSessionRequest()),
        "ack": (9, trainer_pb2.AckRollbackRequest(to_step=1)),
        "save": (10, trainer_pb2.SaveSnapshotRequest()),
        "load": (11, trainer_pb2.LoadSnapshotRequest()),
        "close": (12, trainer_pb2.CloseSessionRequest()),
        "status": (13, b""),
        "plan": (14, b""),
        "routing": (15, b""),
        "log_level": (16, b"\x0a\x05error"),
        "fresh_layout": (17, trainer_pb2.RegisterLayoutRequest(**layout())),
        "attach_socket": (18, b"hello"),
    }
    for name, (method, request) in requests.items():
        body = request if isinstance(request, bytes) else request.SerializeToString()
        write("trainer_requests", name, bytes([method, OWN_KEY | OWN_ATTEMPT]) + body)


def peer_messages() -> None:
    def at(node: int, **fields) -> bytes:
        body = peer_pb2.MemberMessage(**fields).SerializeToString()
        return bytes([node]) + struct.pack("<H", len(body)) + body

    def attempt(number: int) -> int:
        return (1 << 32) + number

    own_digest = 1
    common = {"job": "fuzz", "world_size": 1}
    join = peer_pb2.JoinRequest(node=1, nodes=2, lanes=1, boot_id=5)
    session = peer_pb2.RankSession(rank=0, node=1, incarnation=1, **common)
    registration = peer_pb2.Registration(rank=0, node=1, home_lane=0, **common, **layout())
    attached = peer_pb2.RankAttached(rank=0, incarnation=1)

    def plan_ready(node: int) -> bytes:
        return at(node, plan_ready=peer_pb2.PlanReady(node=node, digest=own_digest, epoch=1))

    def rail_ready(node: int, number: int, operation: int, kind: int) -> bytes:
        ready = {"operation": operation, "kind": kind, "bucket": 0, "rail": 0}
        return at(node, rail_ready=peer_pb2.RailReady(attempt=attempt(number), node=node, **ready))

    def vote(node: int, number: int, kind: int) -> bytes:
        told = peer_pb2.Vote(attempt=attempt(number), node=node, plan_digest=own_digest)
        if kind == peer_pb2.ATTEMPT_KIND_STEP and node == OWNER:
            told.norms.add(unit=0, sums=[1.0])
        return at(node, vote=told)

    def submitted(number: int, step: int, kind: int) -> bytes:
        told = {"rank": 0, "attempt": attempt(number), "step": step, "kind": kind}
        message = peer_pb2.RankSubmitted(incarnation=1, **told)
        if kind == peer_pb2.ATTEMPT_KIND_STEP:
            message.scalars.CopyFrom(scalars())
        return at(1, submitted=message)

    def whole(number: int, step: int, kind: int) -> bytes:
        collect, publish = peer_pb2.RAIL_OPERATION_COLLECT, peer_pb2.RAIL_OPERATION_PUBLISH
        parts = [submitted(number, step, kind)]
        parts += [rail_ready(node, number, collect, kind) for node in (0, 1)]
        parts += [vote(node, number, kind) for node in (0, 1)]
        parts += [rail_ready(node, number, publish, kind) for node in (0, 1)]
        return b"".join(parts)

    push, step = peer_pb2.ATTEMPT_KIND_PUSH, peer_pb2.ATTEMPT_KIND_STEP
    begin = at(1, join=join) + at(1, rank_session=session) + at(1, registration=registration)
    open_ = begin + plan_ready(0) + plan_ready(1) + at(1, rank_attached=attached)
    pushed = open_ + whole(1, 0, push)
    stepped = pushed + whole(2, 1, step)
    written = {"attempt": attempt(2)}
    saved = stepped
    for node in (0, 1):
        told = peer_pb2.SnapshotWritten(node=node, **written)
        saved += at(node, snapshot_written=told)
    saved += at(0, manifest_written=peer_pb2.ManifestWritten(**written))
    for name, messages in {
        "registered": begin,
        "two_nodes": open_,
        "pushed": pushed,
        "stepped": stepped,
        "saved": saved,
        "asked": stepped + at(1, snapshot_request=peer_pb2.SnapshotRequest()),
        "loaded": saved + at(1, load_snapshot=peer_pb2.LoadSnapshotOf(step=1, why="asked")),
        "state": stepped + at(1, member_state=peer_pb2.MemberState(epoch=1)),
        "gone": stepped + at(1, rank_gone=peer_pb2.RankGone(rank=0, incarnation=1, detail="gone")),
        "left": begin + at(1, rank_gone=peer_pb2.RankGone(rank=0, incarnation=1, detail="gone")),
        "lane_lost": stepped + at(1, lane_lost=peer_pb2.LaneLost(lane=1, detail="killed")),
        "leaving": stepped + at(1, leaving=peer_pb2.Leaving(node=1, patience_ms=1 << 62)),
        "rendezvous": begin + at(1, rendezvous=peer_pb2.Rendezvous(node=1, epoch=1, blob=b"b")),
        "broken": begin + at(0, plan_ready=peer_pb2.PlanReady(node=0, error="no", epoch=1)),
    }.items():
        write("peer_messages", name, messages)


def frames() -> None:
    report = lane_pb2.LaneReport()
    report.gathered.attempt = 1
    report.gathered.norms.add(unit=0, sums=[1.0, 2.0])
    command = lane_pb2.LaneCommand()
    command.submitted.rank = 0
    command.submitted.scalars.CopyFrom(scalars())
    for name, message in (("report", report), ("command", command)):
        body = message.SerializeToString()
        write("frames", name, struct.pack("<II", len(body), 0) + body)
        write("frames", f"{name}_alone", body)
        write("frames", f"{name}_twice", 2 * (struct.pack("<II", len(body), 0) + body))
    write("frames", "long", struct.pack("<II", 1 << 30, 0) + b"short")
    write("frames", "descriptors", struct.pack("<II", 4, 253) + b"four")


def config() -> None:
    for name, text in {
        "one": 'devices: "cpu:2"\nallowed_uids: [1000, 1001]\nstep_timeout: "5m"\n',
        "group": 'nodes: 2 node_rank: 1 coordinator: "127.0.0.1:7400" peer_listen: "127.0.0.1:0"',
        "times": 'register_timeout: "90s" session_linger: "1h30m" step_timeout: "500ms"',
        "limits": "lane_memory_bytes: 1073741824 job_memory_bytes: 0 connections_max: 12",
        "log": 'log_level: "debug" log_format: "json" reflection: true skips_max: 3',
        "wrong": 'devices: "gpu:x" threads: -1 socket: "relative" log_level: "loud"',
    }.items():
        write("config", name, text.encode())


if __name__ == "__main__":
    trainer_requests()
    peer_messages()
    frames()
    config()
