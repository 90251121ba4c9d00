"""What a daemon shows to Prometheus and to people (--metrics_address), against real runs."""

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

import dmuond
import needs
import numpy as np
import pytest
import yaml
from certificates import tls_flags
from daemons import HANGS_AFTER_S, ROOT, Daemon, free_port, lane_pids, secret_file
from test_core_client import scalars, two_matrices
from test_programs import run, wait_for

QUICK_S = 2.0
LATE_AFTER_S = 30.0  # of what takes 2 s, on a busy machine
PAGE = ROOT / "docs/metrics.md"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
JOB = "a.job"
HOSTILE = "<script>a & 'b'</script>"
VOID = {"meta"}  # elements that have no end


def get(address: str, path: str, method: str = "GET") -> tuple[int, str, str]:
    """Status, type and body."""
    connection = http.client.HTTPConnection(address, timeout=HANGS_AFTER_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


Samples = dict[tuple[str, frozenset], float]


def scrape(address: str) -> tuple[dict[str, str], Samples]:
    """The type of every metric; every sample's value by its name and labels."""
    status, kind, text = get(address, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    types, samples = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, types[name] = line.split(" ")
        elif not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()
            pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")
            assert (name, frozenset(pairs)) not in samples, line
            samples[name, frozenset(pairs)] = float(value)
    return types, samples


def value(samples: Samples, name: str, **labels: str) -> float:
    """Of the one sample of this name that has these labels."""
    found = [
        sample
        for (its_name, its_labels), sample in samples.items()
        if its_name == name and labels.items() <= dict(its_labels).items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def now(address: str, name: str, **labels: str) -> float | None:
    """The same of this moment; None: there is none."""
    with contextlib.suppress(AssertionError):
        return value(scrape(address)[1], name, **labels)
    return None


def group_of(address: str) -> str:
    """The one value of the label that every sample has."""
    (group,) = {dict(labels).get("group") for _, labels in scrape(address)[1]}
    assert group
    return group


def page_rows() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of every metric, as the page has them."""
    rows = re.findall(
        r"^\| `(dmuond_\w+)` \| (\w+) \| ([\w, ]*) \|", PAGE.read_text(), re.MULTILINE
    )
    return {
        name: (kind, {label.strip() for label in labels.split(",") if label.strip()})
        for name, kind, labels in rows
    }


class Page(HTMLParser):
    """A page whose elements end in the order in which they began; its text."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        for name, what in attrs:  # nothing from outside
            assert name not in ("src", "style") and not (name == "href" and ":" in what)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@contextlib.contextmanager
def group(
    daemons, folder: Path, *flags: str, second_under: Sequence[str] = ()
) -> Iterator[list[tuple[Daemon, str]]]:
    """Two daemons of a group that has formed, each with the address of its pages.

    second_under: a command that becomes the second one.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    members = []
    for node in range(2):
        metrics = f"127.0.0.1:{free_port()}"
        daemons.start_alone(
            "--nodes=2",
            f"--node_rank={node}",
            f"--coordinator={coordinator}",
            f"--peer_listen={coordinator if node == 0 else '127.0.0.1:0'}",
            f"--peer_secret_file={secret_file(folder)}",
            "--threads=1",
            f"--metrics_address={metrics}",
            *flags,
            under=second_under if node == 1 else (),
        )
        members.append((daemons.members[-1], metrics))
    for daemon, _ in members:
        daemon.wait_ready()
    yield members


def alone(daemons, *flags: str) -> tuple[Daemon, str]:
    metrics = f"127.0.0.1:{free_port()}"
    daemons.start(1, 1, f"--metrics_address={metrics}", *flags)
    return daemons.members[-1], metrics


def published(address: str, steps: int) -> bool:
    count = now(address, "dmuond_job_phase_seconds_count", phase="update")
    return count is not None and count >= steps


def test_the_page_lists_what_a_run_gives_with_types_and_labels(daemons, tmp_path) -> None:
    given: dict[str, tuple[str, set[str]]] = {}
    flags = [f"--snapshot_dir={tmp_path / 'snapshots'}", *tls_flags(tmp_path)]
    with group(daemons, tmp_path, *flags) as members:
        address = f"unix:{members[0][0].path}"
        with dmuond.Session(address, rank=0, world_size=1) as session:
            two_matrices(session)
            session.step(scalars())
            assert run("dmuonctl", "snapshot", "save", f"--address={address}").returncode == 0
            assert run("dmuonctl", "check", f"--address={address}").returncode == 0
            assert run("dmuonctl", "job", "end", "other", f"--address={address}").returncode != 0
            assert group_of(members[0][1]) == group_of(members[1][1])
            for _, metrics in members:
                types, samples = scrape(metrics)
                for name, labels in samples:
                    base = name
                    if name not in types:
                        base = re.sub(r"_(bucket|sum|count)$", "", name)
                    had = given.setdefault(base, (types[base], set()))
                    had[1].update(label for label, _ in labels if label not in ("le", "group"))
                if shutil.which("promtool"):
                    checked = subprocess.run(
                        ["promtool", "check", "metrics"],
                        input=get(metrics, "/metrics")[2],
                        capture_output=True,
                        text=True,
                        timeout=60,
                        check=False,
                    )
                    assert checked.returncode == 0, checked.stderr
    assert given == page_rows()


def test_a_jobs_end_is_counted_by_its_reason(daemons) -> None:
    daemon, metrics = alone(daemons, "--session_linger=0", "--group_name=cluster-7/a")
    address = f"unix:{daemon.path}"
    assert group_of(metrics) == "cluster-7/a"

    def ends() -> dict[str, float]:
        counts = {
            dict(labels)["reason"]: count
            for (name, labels), count in scrape(metrics)[1].items()
            if name == "dmuond_jobs_ended_total"
        }
        assert "LEFT" in counts and "STATE_LOST" in counts  # from the start, for increase()
        return {reason: count for reason, count in counts.items() if count}

    assert ends() == {}
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
    wait_for(lambda: ends() == {"LEFT": 1})
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
        assert run("dmuonctl", "job", "end", "default", f"--address={address}").returncode == 0
        wait_for(lambda: ends() == {"LEFT": 1, "JOB_ENDED": 1})
    script = (
        "import os, dmuond; from test_core_client import two_matrices\n"
        f"session = dmuond.Session({address!r}, rank=0, world_size=1)\n"
        "two_matrices(session); os._exit(1)"
    )
    died = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, timeout=60, check=False
    )
    assert died.returncode == 1
    wait_for(lambda: ends() == {"LEFT": 1, "JOB_ENDED": 1, "TRAINER_LOST": 1})


def test_metrics_follow_a_run(daemons) -> None:
    daemon, metrics = alone(daemons)
    assert not any(name.startswith("dmuond_job_") for name in scrape(metrics)[0])
    began = time.time()
    with dmuond.Session(f"unix:{daemon.path}", job=JOB, rank=0, world_size=1) as session:
        two_matrices(session)
        for _ in range(3):
            session.step(scalars())
        wait_for(lambda: published(metrics, 3))
        types, samples = scrape(metrics)
        labels = {"job": JOB}
        assert value(samples, "dmuond_group_formed") == 1
        assert value(samples, "dmuond_lanes", state="ready", **labels) == 1
        assert value(samples, "dmuond_job_last_committed_step", **labels) == 3
        assert value(samples, "dmuond_job_steps_total", outcome="committed", **labels) == 3
        assert value(samples, "dmuond_job_steps_total", outcome="aborted", **labels) == 0
        assert value(samples, "dmuond_job_state", state="running", **labels) == 1
        assert value(samples, "dmuond_job_trainers", state="attached", **labels) == 1
        assert value(samples, "dmuond_job_units", **labels) == 2
        progress = value(samples, "dmuond_job_last_progress_timestamp_seconds", **labels)
        assert began - 1 <= progress <= time.time() + 1
        assert value(samples, "dmuond_core_lock_held_seconds_total") > 0
        assert "dmuond_job_last_snapshot_timestamp_seconds" not in types, "no --snapshot_dir"
        for phase in ("collect", "decide", "update", "publish", "quiet"):
            buckets = [
                (float(dict(its_labels)["le"]), sample)
                for (name, its_labels), sample in samples.items()
                if name == "dmuond_job_phase_seconds_bucket" and ("phase", phase) in its_labels
            ]
            counts = [count for _, count in sorted(buckets)]
            assert counts == sorted(counts)
            assert counts[-1] == value(samples, "dmuond_job_phase_seconds_count", phase=phase)
    wait_for(lambda: now(metrics, "dmuond_job_last_committed_step") is None)  # the job has ended


def test_the_size_of_each_matrix_update_is_told(daemons) -> None:
    daemon, metrics = alone(daemons)
    with dmuond.Session(f"unix:{daemon.path}", job=JOB, rank=0, world_size=1) as session:
        two_matrices(session, "w")
        weights, gradients = (session.arenas[arena].view(np.float32) for arena in (1, 2))
        gradients[:] = 0  # the second matrix's stays so
        gradients[:16] = np.random.default_rng(3).normal(size=16)
        before = weights.copy()
        norm = session.step(scalars()).gradient_norm
        change = (weights - before)[:16] / scalars().groups[0].learning_rate
        rms = float(np.sqrt(np.mean(change**2)))
        wait_for(lambda: now(metrics, "dmuond_job_matrix_update_rms", stat="max"))
        _, samples = scrape(metrics)
        told = [
            value(samples, "dmuond_job_matrix_update_rms", stat=stat) for stat in ("min", "max")
        ]
        assert told == pytest.approx([0, rms], rel=1e-4)
        page = Page(get(metrics, "/statusz")[2])
        assert f"{rms:.4f}" in page.text and "The 2 smallest updates" in page.text
        session.push()
        assert now(metrics, "dmuond_job_gradient_norm") == pytest.approx(norm), "the last step's"


def test_bytes_that_cross_rails_are_counted_where_they_are_sent(daemons, tmp_path) -> None:
    def sent(members) -> list[float]:
        name = "dmuond_job_rail_sent_bytes_total"
        return [value(scrape(metrics)[1], name) for _, metrics in members]

    with (
        group(daemons, tmp_path) as members,
        dmuond.Session(f"unix:{members[0][0].path}", rank=0, world_size=1) as session,
    ):
        two_matrices(session)
        session.step(scalars())
        wait_for(lambda: all(published(metrics, 2) for _, metrics in members))  # with the push
        before = sent(members)
        for _ in range(3):
            session.step(scalars())
        wait_for(lambda: all(published(metrics, 5) for _, metrics in members))
        # One matrix of 4 by 4 is the other node's: its gradient goes there, and its weights come.
        crossed = [after - was for was, after in zip(before, sent(members), strict=True)]
        assert crossed == [3 * 4 * 4 * 4] * 2


def test_calls_are_counted_by_code_and_refusals_by_reason(daemons) -> None:
    daemon, metrics = alone(daemons)
    with dmuond.Session(f"unix:{daemon.path}", job=JOB, rank=0, world_size=1) as session:
        two_matrices(session)
        for _ in range(3):
            session.step(scalars())
    assert run("dmuonctl", "job", "end", "other", f"--address=unix:{daemon.path}").returncode != 0
    _, samples = scrape(metrics)
    calls = {"method": "dmuond.v1.Trainer/SubmitStep", "code": "OK"}
    assert value(samples, "dmuond_rpcs_total", **calls) == 3
    assert value(samples, "dmuond_refusals_total", reason="NO_JOB") == 1


def test_the_certificates_end_is_a_moment_to_come(daemons, tmp_path) -> None:
    with group(daemons, tmp_path, *tls_flags(tmp_path)) as members:
        for _, metrics in members:
            expires = value(scrape(metrics)[1], "dmuond_certificate_expiry_timestamp_seconds")
            assert abs(expires - time.time() - 30 * 86400) < 3600


def test_a_lane_that_dies_is_counted_by_reason(daemons) -> None:
    daemon, metrics = alone(daemons)
    with dmuond.Session(f"unix:{daemon.path}", rank=0, world_size=1) as session:
        two_matrices(session)
        session.step(scalars())
        os.kill(lane_pids(daemon.process.pid)[0], signal.SIGKILL)
        session.step(scalars())
        _, samples = scrape(metrics)
    assert value(samples, "dmuond_lane_losses_total", reason="ended") == 1
    assert value(samples, "dmuond_lane_losses_total", reason="hung") == 0
    assert value(samples, "dmuond_lane_restarts_total") == 1


def test_the_status_page_answers_for_a_run_and_escapes_what_others_have_written(daemons) -> None:
    daemon, metrics = alone(daemons)
    with dmuond.Session(f"unix:{daemon.path}", job=JOB, rank=0, world_size=1) as session:
        two_matrices(session, HOSTILE)
        for _ in range(2):
            session.step(scalars())
        wait_for(lambda: published(metrics, 2))
        status, kind, html = get(metrics, "/statusz")
        assert (status, kind) == (200, "text/html; charset=utf-8")
        page = Page(html)
        assert "All right." in page.text
        assert f"Job {JOB}" in page.text and HOSTILE + "0" in page.text
        assert "<script" not in html
        assert page.seen.count("svg") == 2  # where time goes, and who owns what
        assert "step 2" in page.text
        assert "Trainers of this node: 1 of 1" in page.text
        assert "group formed" in page.text  # of the log
        routing = Page(get(metrics, "/routing")[2])
        assert routing.seen.count("tr") == 3 and HOSTILE + "1" in routing.text


def test_who_is_missing_is_on_the_page_before_the_group_has_formed(daemons, tmp_path) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    daemons.start_alone(
        "--nodes=3",
        "--node_rank=0",
        f"--coordinator=127.0.0.1:{free_port()}",
        f"--peer_secret_file={secret_file(tmp_path)}",
        f"--metrics_address={metrics}",
    )
    wait_for(lambda: "serving" in daemons.members[0].text())
    _, samples = scrape(metrics)
    assert value(samples, "dmuond_group_formed") == 0
    assert value(samples, "dmuond_group_missing_nodes") == 2
    page = Page(get(metrics, "/statusz")[2])
    assert "missing: node 1, 2" in page.text and "All right" not in page.text


def test_the_port_serves_its_pages_and_nothing_else(daemons) -> None:
    _, metrics = alone(daemons)
    status, _, body = get(metrics, "/metrics", "HEAD")
    assert (status, body) == (200, "")
    for path in ("/", "/etc/passwd", "/../../etc/passwd", "/metrics/more", "/%2e%2e/"):
        assert get(metrics, path)[0] in (400, 404), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(metrics, "/metrics", method)[0] == 405, method


def test_who_is_slow_or_sends_nothing_keeps_nobody_waiting(daemons) -> None:
    daemon, metrics = alone(daemons)
    host, port = metrics.split(":")

    def scrapes() -> None:
        began = time.monotonic()
        for path in ("/metrics", "/livez", "/statusz"):
            assert get(metrics, path)[0] == 200
        assert time.monotonic() - began < QUICK_S

    with contextlib.ExitStack() as connections:

        def connect(says: bytes) -> socket.socket:
            one = connections.enter_context(socket.create_connection((host, int(port))))
            one.sendall(says)
            return one

        dribbling = [connect(b"GET /metrics HTTP/1.1\r\n") for _ in range(40)]
        for _ in range(4):
            for one in dribbling:
                with contextlib.suppress(OSError):  # the oldest were closed
                    one.sendall(b"x")
            scrapes()
        for _ in range(300):
            connect(b"")
        scrapes()
        for _ in range(40):  # and read no answer
            connect(b"GET /statusz HTTP/1.1\r\n\r\n")
        scrapes()
        # A request has 2 s, however busy its sender is.
        last = connect(b"GET /metrics HTTP/1.1\r\n")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < LATE_AFTER_S:
                last.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < LATE_AFTER_S
        # Nor does the daemon wait for them when it ends.
        daemon.process.terminate()
        assert daemon.process.wait(LATE_AFTER_S) == 0


def test_a_request_that_is_none_is_answered_as_http_has_it(daemons) -> None:
    _, metrics = alone(daemons)
    host, port = metrics.split(":")
    for says, status in (
        (b"GET /livez HTTP/1.1\r\n\r\n", 200),
        (b"GET /livez?verbose HTTP/1.0\r\nHost: x\r\n\r\n", 200),
        (b"GET livez HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * 9000, 431),
    ):
        with socket.create_connection((host, int(port)), timeout=HANGS_AFTER_S) as one:
            one.sendall(says)
            answer = b"".join(iter(lambda: one.recv(1 << 16), b""))
            assert answer.startswith(b"HTTP/1.1 %d " % status), (says[:40], answer[:80])


def test_an_address_that_cannot_be_listened_on_is_named_before_the_daemon_serves(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for wrong, exit_code, why in (
            (address, 1, "in use"),
            ("192.0.2.1:9464", 1, "annot assign"),  # no address of this machine
            ("9464", 2, "host:port"),
            ("127.0.0.1:0", 2, "host:port"),
        ):
            ended = run(
                "dmuond", f"--socket={tmp_path / 'run/d.sock'}", f"--metrics_address={wrong}"
            )
            assert ended.returncode == exit_code, ended.stderr
            assert wrong in ended.stderr and why in ended.stderr
            assert "msg=serving" not in ended.stderr


def test_alert_rules_ask_for_metrics_that_there_are() -> None:
    asked = set(re.findall(r"dmuond_[a-z_]+", ALERTS.read_text()))
    assert len(asked) >= 6
    assert asked <= page_rows().keys()


def test_every_alert_rule_is_seen_to_fire_and_names_the_group_of_its_job() -> None:
    rules = [r for g in yaml.safe_load(ALERTS.read_text())["groups"] for r in g["rules"]]
    tests = yaml.safe_load(ALERTS.with_name("alerts_test.yml").read_text())["tests"]
    seen = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in seen if case["exp_alerts"]}
    silent = {case["alertname"] for case in seen if not case["exp_alerts"]}
    assert fired == silent == {rule["alert"] for rule in rules}
    for rule in rules:
        for labels in re.findall(r" by \(([^)]*)\)", rule["expr"]):
            assert "group" in labels.split(", "), rule["alert"]


def test_alert_rules_do_what_they_say() -> None:
    needs.program("promtool", "apt: prometheus")
    tested = subprocess.run(
        ["promtool", "test", "rules", ALERTS.with_name("alerts_test.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
