"""Makes the corpora of the fuzz targets beside it: messages as clients and members send them.

usage, after a change of the proto:
    PYTHONPATH=client/python/src:tests/python python tests/fuzz/make_corpus.py
"""

import struct
from pathlib import Path

import one_matrix
from dmuond._proto import lane_pb2, peer_pb2, snapshot_pb2, trainer_pb2, types_pb2
from google.protobuf import text_format

CORPUS = Path(__file__).with_name("corpus")
OWN_KEY, OWN_ATTEMPT = 1, 2
ROWS, COLUMNS = 8, 16
OWNER = 0  # the node whose lane gets the matrix


def write(target: str, name: str, data: bytes) -> None:
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def layout() -> dict:
    return one_matrix.layout(
        ROWS, COLUMNS, name="matrix", preset="torch", reduce_factor=1, weight=2, gradient=1
    )


def huge_layout() -> dict:
    """More elements than a job can have: 2^31 pieces."""
    made = layout()
    made["parameters"][0].route = types_pb2.ROUTE_ADAMW
    made["parameters"][0].shape[:] = made["fragments"][0].box.end[:] = [1 << 28, 1 << 27]
    for part in (made["fragments"][0].gradient, made["fragments"][0].weight):
        part.strides[:] = [1 << 27, 1]
    return made


def rows_layout(count: int) -> dict:
    """Each row of a tensor is a fragment; one trainer may have 1,024."""
    made = layout()
    made["parameters"][0].route = types_pb2.ROUTE_ADAMW
    made["parameters"][0].shape[:] = [count]
    made["fragments"] = []
    for row in range(count):
        fragment = types_pb2.Fragment(contribution=types_pb2.CONTRIBUTION_SUM)
        fragment.box.begin.append(row)
        fragment.box.end.append(row + 1)
        for arena, part in ((1, fragment.gradient), (2, fragment.weight)):
            part.arena = arena
            part.offset_bytes = 4 * row
            part.strides.append(1)
        made["fragments"].append(fragment)
    return made


def scalars() -> types_pb2.StepScalars:
    made = types_pb2.StepScalars(loss_scale=1, clip_muon=True)
    made.groups.add(learning_rate=0.01, momentum=0.95, beta1=0.9, beta2=0.95, eps=1e-8)
    return made


def norms(sums: list[float]) -> peer_pb2.UnitNorms:
    return peer_pb2.UnitNorms(
        unit=[0], first_block=[0], first_element=[0], sum_count=[len(sums)], sums=sums
    )


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
    chunk.chunks.add(
        parameter="matrix",
        kind=trainer_pb2.STATE_KIND_MASTER,
        data=bytes(ROWS * COLUMNS * 4),
    )

    def half(number: int) -> trainer_pb2.PushParametersRequest:
        made = trainer_pb2.PushParametersRequest()
        made.CopyFrom(chunk)
        made.chunks[0].first_element = number * ROWS * COLUMNS // 2
        made.chunks[0].data = bytes(ROWS * COLUMNS * 2)
        return made

    unknown = trainer_pb2.PushParametersRequest()
    unknown.CopyFrom(chunk)
    unknown.chunks[0].kind = 77

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
        "push_state_halves": (4, stream(state, half(0), half(1))),
        "push_state_hole": (4, stream(state, half(1))),
        "push_state_unknown": (4, stream(state, unknown)),
        "pull": (5, trainer_pb2.PullParametersRequest(parameters=["matrix"])),
        "submit": (6, submit),
        "submit_absent": (6, trainer_pb2.SubmitStepRequest(step=2, scalars=scalars(), absent=[0])),
        "withdraw": (6, trainer_pb2.SubmitStepRequest(step=2, scalars=scalars(), withdraw=True)),
        "not_finite": (6, trainer_pb2.SubmitStepRequest(step=2, scalars=scalars(), not_finite=0)),
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
        "fresh_layout_huge": (17, trainer_pb2.RegisterLayoutRequest(**huge_layout())),
        "fresh_layout_rows": (17, trainer_pb2.RegisterLayoutRequest(**rows_layout(1024))),
        "fresh_layout_more_rows": (17, trainer_pb2.RegisterLayoutRequest(**rows_layout(1025))),
        "attach_socket": (18, b"hello"),
        "load_job": (19, b""),
        "save_job": (20, b""),
        "jobs": (21, b""),
        "readiness": (22, b"\x08\x02\x10\x05"),
        "drain": (23, b""),
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
        ready = {"operation": operation, "kind": kind, "buckets": [0, 1], "rail": 0}
        told = peer_pb2.RailReady(attempt=attempt(number), **ready)
        return at(node, reports=peer_pb2.Reports(ready=[told]))

    def vote(node: int, number: int, kind: int) -> bytes:
        told = peer_pb2.Vote(attempt=attempt(number), node=node, plan_digest=own_digest)
        if kind == peer_pb2.ATTEMPT_KIND_STEP and node == OWNER:
            told.norms.CopyFrom(norms([1.0]))
        return at(node, vote=told)

    def submitted(number: int, step: int, kind: int) -> bytes:
        told = {"rank": 0, "attempt": attempt(number), "step": step, "kind": kind}
        message = peer_pb2.RankSubmitted(incarnation=1, **told)
        if kind == peer_pb2.ATTEMPT_KIND_STEP:
            message.scalars.CopyFrom(scalars())
        return at(1, reports=peer_pb2.Reports(submitted=[message]))

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
        "loaded": saved
        + at(
            1,
            load_snapshot=peer_pb2.LoadSnapshotOf(
                to=peer_pb2.SnapshotId(attempt=attempt(2), step=1), why="asked"
            ),
        ),
        "state": stepped + at(1, member_state=peer_pb2.MemberState(epoch=1)),
        "gone": stepped + at(1, rank_gone=peer_pb2.RankGone(rank=0, incarnation=1, detail="gone")),
        "left": begin + at(1, rank_gone=peer_pb2.RankGone(rank=0, incarnation=1, detail="gone")),
        "lane_lost": stepped + at(1, lane_lost=peer_pb2.LaneLost(lane=1, detail="killed")),
        "leaving": stepped + at(1, leaving=peer_pb2.Leaving(node=1, patience_ms=1 << 62)),
        "rendezvous": begin + at(1, rendezvous=peer_pb2.Rendezvous(node=1, epoch=1, blob=b"b")),
        "broken": begin + at(0, plan_ready=peer_pb2.PlanReady(node=0, error="no", epoch=1)),
    }.items():
        write("peer_messages", name, messages)


def join() -> None:
    right, answers = 1, 2
    told, read, write_state = 0, 1, 2

    def thing(kind: int, message) -> bytes:
        body = message.SerializeToString()
        return bytes([kind]) + struct.pack("<H", len(body)) + body

    def says(**fields) -> bytes:
        return thing(told, peer_pb2.MemberMessage(**fields))

    first = says(join=peer_pb2.JoinRequest())
    state = says(member_state=peer_pb2.MemberState(epoch=1))
    reads = thing(read, peer_pb2.ReadStateRequest())
    writes = thing(write_state, peer_pb2.WriteStateRequest())
    beat = says(heartbeat=peer_pb2.Heartbeat(counter=1))
    answer = says(directory_answer=peer_pb2.DirectoryAnswer(error="not here"))
    for name, flags, things in [
        ("joins", right | answers, first + state + beat),
        ("has_another_directory", right, first + beat + answer),
        ("is_another_node", right | answers, says(join=peer_pb2.JoinRequest(node=9))),
        ("says_nothing_right", 0, first),
        ("does_not_join", right, beat + state),
        ("reads_and_writes", right | answers, reads + first + state + reads + writes),
    ]:
        write("join", name, bytes([flags]) + things)
    stranger = 4
    hello = peer_pb2.PeerHello(node=1, nonce=bytes(32)).SerializeToString()
    answer = peer_pb2.PeerAnswer(proof=bytes(32)).SerializeToString()
    parts = b"".join(struct.pack(">H", len(part)) + part for part in (hello, answer))
    write("join", "stranger", bytes([stranger]) + parts)


def coordinator_messages() -> None:
    trainer, saved = 1, 2
    saved_step = 3
    verdict = peer_pb2.Decision

    def thing(kind: int, message=None) -> bytes:
        body = b"" if message is None else message.SerializeToString()
        return bytes([kind]) + struct.pack("<H", len(body)) + body

    def told(**fields) -> bytes:
        return thing(0, peer_pb2.CoordinatorMessage(**fields))

    def attempt(number: int, epoch: int = 1) -> int:
        return (epoch << 32) + number

    def opened(number: int, step: int, epoch: int = 1) -> bytes:
        return told(open=peer_pb2.OpenAttempt(attempt=attempt(number, epoch), step=step))

    def decided(number: int, step: int, kind: int, what: int, epoch: int = 1) -> bytes:
        outcomes = {
            verdict.VERDICT_COMMIT: types_pb2.Outcome.KIND_COMMITTED,
            verdict.VERDICT_SKIP: types_pb2.Outcome.KIND_SKIPPED,
        }
        decision = peer_pb2.Decision(
            attempt=attempt(number, epoch), step=step, kind=kind, verdict=what, scalars=scalars()
        )
        outcome = decision.outcome
        outcome.kind = outcomes.get(what, types_pb2.Outcome.KIND_ABORTED)
        outcome.step = step
        outcome.attempt = attempt(number, epoch)
        outcome.next_attempt = attempt(number + 1, epoch)
        outcome.retry = outcome.kind == types_pb2.Outcome.KIND_ABORTED
        return told(decision=decision)

    step, push = peer_pb2.ATTEMPT_KIND_STEP, peer_pb2.ATTEMPT_KIND_PUSH
    load = peer_pb2.ATTEMPT_KIND_LOAD
    commit, abort = verdict.VERDICT_COMMIT, verdict.VERDICT_ABORT
    plan = told(plan=peer_pb2.PlanInputs(job="raw"))
    restore = peer_pb2.SnapshotId(attempt=attempt(saved_step), step=saved_step)
    restored = told(plan=peer_pb2.PlanInputs(job="raw", restore=restore))
    registration = peer_pb2.Registration(node=1, job="raw", world_size=1, **layout())
    given = peer_pb2.PlanInputs(
        job="raw", job_incarnation=1, nodes=2, lanes_per_node=1, registrations=[registration]
    )
    second = peer_pb2.Registration(rank=1, job="raw", world_size=2, **layout())
    other_back = peer_pb2.RollBack(epoch=2, plan=given)
    other_back.plan.restore.CopyFrom(restore)
    pushed = plan + opened(1, 1) + decided(1, 0, push, commit) + opened(2, 1)
    stepped = pushed + decided(2, 1, step, commit) + opened(3, 2)
    save = told(save=peer_pb2.SaveState(attempt=attempt(2), step=1))
    removed = snapshot_pb2.SnapshotManifest(job="raw", attempt=attempt(2), step=1)
    back = peer_pb2.RollBack(epoch=2, why="asked")
    back.plan.job = "raw"
    back.plan.restore.CopyFrom(restore)
    republished = told(republish=peer_pb2.Republish(attempt=attempt(1, 2), step=saved_step))
    gone_back = stepped + told(roll_back=back) + opened(1, 4, 2) + republished + opened(2, 4, 2)
    reform = told(reform=peer_pb2.Reform(epoch=2, why="a lane"))
    reformed = stepped + reform + decided(2, 1, step, commit) + opened(4, 2, 2)
    half = [ROWS // 2, COLUMNS]  # of an arena: the first of two matrices
    written = peer_pb2.WriteStateRequest(
        job_incarnation=1, kind=trainer_pb2.STATE_KIND_MOMENTUM, data=bytes(half[0] * half[1] * 4)
    )
    written.box.begin.extend([0, 0])
    written.box.end.extend(half)
    written.attempt = attempt(3)
    reads = [
        peer_pb2.ReadStateRequest(job_incarnation=1, kind=trainer_pb2.STATE_KIND_MASTER, unit=unit)
        for unit in (0, 1)
    ]
    rendezvous = peer_pb2.RendezvousComplete(epoch=1, blobs=[b"a", b"b"])
    refused = peer_pb2.RegistrationRefused(job="raw", code=3, message="no", reason="LAYOUT_INVALID")
    session = peer_pb2.RankSession(rank=0, node=1, job="raw", world_size=1, incarnation=1)
    for name, (flags, things) in {
        "planned": (trainer, plan),
        "given": (0, told(plan=given)),
        "other_layout": (trainer, told(plan=given) + opened(1, 1)),
        "other_world": (
            trainer,
            told(
                plan=peer_pb2.PlanInputs(job="raw", nodes=2, registrations=[registration, second])
            ),
        ),
        "other_way_back": (trainer | saved, stepped + told(roll_back=other_back) + opened(1, 4, 2)),
        "stepped": (trainer, stepped),
        "alone": (0, stepped),
        "loaded": (trainer, stepped + thing(2, written) + decided(3, 1, load, commit)),
        "saved": (
            trainer,
            stepped
            + save
            + told(snapshot_done=peer_pb2.SnapshotDone(attempt=attempt(2), step=1, durable_step=1)),
        ),
        "manifest": (0, stepped + save + told(write_manifest={"manifest": removed})),
        "restored": (trainer | saved, restored + opened(1, 4) + republished + opened(2, 4)),
        "gone_back": (trainer | saved, gone_back),
        "gone_back_anew": (saved, told(roll_back=back) + opened(1, 4, 2)),
        "reformed": (trainer, reformed),
        "broken": (trainer, stepped + thing(3) + reform),
        "lane_lost": (trainer, stepped + thing(4) + reform),
        "aborted": (trainer, pushed + decided(2, 1, step, abort) + opened(3, 1)),
        "expelled": (
            trainer,
            pushed + told(expel=peer_pb2.ExpelRank(rank=0, attempt=attempt(2), detail="late")),
        ),
        "overdue": (
            trainer,
            pushed + told(gather_overdue=peer_pb2.GatherOverdue(attempt=attempt(2), detail="late")),
        ),
        "halted": (trainer, stepped + told(halted=peer_pb2.Halted(node=1, step=1))),
        "lost": (
            trainer,
            stepped + told(job_ended=peer_pb2.JobEnded(job="raw", why="lost", reason="STATE_LOST")),
        ),
        "ended": (0, stepped + told(job_ended=peer_pb2.JobEnded(job="raw", why="all left"))),
        "refused": (trainer, plan + told(refused=refused)),
        "denied": (
            trainer,
            told(refused=peer_pb2.RegistrationRefused(job="raw", code=9, session=session)),
        ),
        "read": (0, stepped + thing(1, reads[0]) + thing(1, reads[1])),
        "go": (
            0,
            plan
            + told(rendezvous=rendezvous)
            + opened(1, 1)
            + told(
                goes=peer_pb2.Goes(
                    goes=[
                        peer_pb2.Go(attempt=attempt(1), operation=1, kind=push, buckets=[0, 1]),
                    ],
                ),
            ),
        ),
        "begun": (
            0,
            plan
            + opened(1, 1)
            + told(submitted=peer_pb2.RankSubmitted(attempt=attempt(1), kind=push)),
        ),
        "proof": (0, told(directory_proof=peer_pb2.DirectoryProof(name="proof-1"))),
    }.items():
        write("coordinator_messages", name, bytes([flags]) + things)


def snapshot_directory() -> None:
    vouched = 1
    replaced, changed, cut, removed, exchanged, directory, foreign, proof = range(8)
    proof_name = ".dmuond-proof-0000000000000007"
    # In their order: proof, answer, then of each step lane, manifest and trainers.
    answer, lane, manifest, trainers = 1, 2, 3, 4
    of_step_2 = 3  # further

    def befalls(what: int, entry: int, body: bytes = b"") -> bytes:
        return struct.pack("<BBH", what, entry, len(body)) + body

    def at(place: int, body: bytes = b"") -> bytes:
        return struct.pack("<H", place) + body

    header = b'{"trainer_state/0":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    other_rank = struct.pack("<Q", len(header)) + header + b"x"
    for name, (flags, things) in {
        "untouched": (0, b""),
        "changed": (0, befalls(changed, lane + of_step_2, at(5000, b"\x7f"))),
        "header": (vouched, befalls(changed, lane, at(20, b"F64"))),
        "vouched": (vouched, befalls(changed, lane + of_step_2, at(5000, b"\x7f"))),
        "cut": (0, befalls(cut, lane + of_step_2, at(100)) + befalls(cut, manifest, at(100))),
        "removed": (0, befalls(removed, trainers + of_step_2)),
        "no_manifest": (0, befalls(removed, manifest + of_step_2)),
        "exchanged": (0, befalls(exchanged, lane, bytes([lane + of_step_2]))),
        "manifests": (0, befalls(exchanged, manifest, bytes([manifest + of_step_2]))),
        "trainers": (vouched, befalls(replaced, trainers, other_rank)),
        "directory": (0, befalls(directory, 0, b"step-000000000003.1.3")),
        "foreign": (0, befalls(foreign, lane, b"notes.txt")),
        "proof": (0, befalls(proof, 0, proof_name.encode())),
        "escape": (0, befalls(proof, 0, b"../.dmuond-proof-0000000000000007")),
        "answer": (0, befalls(replaced, answer, b"0000000000000008")),
    }.items():
        write("snapshot_directory", name, bytes([flags]) + things)


# Of a lane that owns one matrix, which one trainer holds.
PROGRAM = """
  nodes: 1 lanes_per_node: 1 world_size: 1 trainers: 0 plan_digest: 7 plan_units: 1
  parameters { name: "w" weight_type: 1 gradient_type: 1 reduce_factor: 1 }
  fragments {
    box { begin: 0 begin: 0 end: 4 end: 4 }
    gradient { strides: 4 strides: 1 } weight { arena: 1 strides: 4 strides: 1 }
  }
  units {
    kind: 1 box { begin: 0 begin: 0 end: 4 end: 4 } rows: 4 cols: 4 holders: 0
    weight_offset_bytes: 256
    cells {
      box { begin: 0 begin: 0 end: 4 end: 4 } leaf_ranks: 0 leaf_nodes: 0 leaf_fragments: 0
    }
  }
  buckets { publishers: 0 }
  batches { kind: 1 rows: 4 cols: 4 weight_type: 1 units: 0 }
  slot_classes { elements: 16 tensors: 2 slots: 2 units: 0 }
  state_bytes: 1024 staging_bytes: 512
"""


def frames() -> None:
    report = lane_pb2.LaneReport()
    report.gathered.attempt = 1
    report.gathered.norms.CopyFrom(norms([1.0, 2.0]))
    command = lane_pb2.LaneCommand()
    command.submitted.rank = 0
    command.submitted.scalars.CopyFrom(scalars())
    program = lane_pb2.LaneCommand()
    text_format.Parse(PROGRAM, program.configure.program)
    for name, message in (("report", report), ("command", command), ("program", program)):
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


def rail_blob() -> None:
    for rank, length, own in ((0, 0, 2), (2, 28, 0), (7, 136, 3)):
        blob = b""
        for member in range(8):
            address = b"" if member == own else bytes([member]) * length
            blob += struct.pack("<I", len(address)) + address
        write("rail_blob", f"rank_{rank}", bytes([rank, length]) + blob)
        write("rail_blob", f"cut_{rank}", bytes([rank, length]) + blob[:-1])
    write("rail_blob", "long", bytes([1, 4]) + struct.pack("<I", 0xFFFFFFF0) + b"short")


def cost_table() -> None:
    entry = "entries { rows: %d cols: %d batch: %d microseconds: %s steps: 5 rounds: %d }\n"
    for name, text in {
        "rates": 'device: "H200" tflops: 400 gigabytes_per_second: 3700 launch_us: 20\n',
        "entries": entry % (1024, 1024, 1, "55.5", 2) + entry % (1024, 1024, 8, "300", 2),
        "choices": "choices { rows: 64 cols: 128 dtype: 1 engine: 1 form: 1 }\n",
        "huge": entry % (1 << 40, 1 << 40, 1 << 30, "1e300", 5),
        "impossible": entry % (-1, 0, 0, "nan", 9) + "tflops: inf launch_us: -1\n",
        "wrong": "entries { rows: 'x' }",
    }.items():
        write("cost_table", name, text.encode())


if __name__ == "__main__":
    trainer_requests()
    peer_messages()
    join()
    coordinator_messages()
    snapshot_directory()
    frames()
    config()
    cost_table()
    rail_blob()
