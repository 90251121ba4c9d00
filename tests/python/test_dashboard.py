"""deploy/grafana/dmuond.json asks for what there is: every query against a real run's metrics."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import dmuond
import needs
from certificates import tls_flags
from daemons import ROOT, free_port, lane_pids
from test_core_client import scalars, two_matrices
from test_metrics import ALERTS, group, group_of, page_rows
from test_programs import run, wait_for

BOARD = json.loads((ROOT / "deploy/grafana/dmuond.json").read_text())
EVERY_SAMPLE_HAS = {"instance", "job", "group"}  # the first two by Prometheus


def queries() -> dict[str, str]:
    """By panel and letter."""
    return {
        f"{panel['title']}, {target['refId']}": target["expr"]
        for panel in BOARD["panels"]
        for target in panel.get("targets", [])
    }


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    places, numbers = set(), set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & places, panel["title"]
        places |= own
        assert panel["id"] not in numbers
        numbers.add(panel["id"])


def test_every_query_names_metrics_and_labels_that_there_are() -> None:
    rows = page_rows()
    asked = set()
    for where, query in {**queries(), "alerts": ALERTS.read_text()}.items():
        names = {
            re.sub(r"_bucket$", "", name) if re.sub(r"_bucket$", "", name) in rows else name
            for name in re.findall(r"dmuond_[a-z_]+", query)
        }
        assert names and names <= rows.keys(), where
        asked |= names
        labels = set().union(*(rows[name][1] for name in names)) | EVERY_SAMPLE_HAS
        if where == "alerts":
            continue
        for by in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r", *", by)) - {"le"} <= labels, where
        for matched in re.findall(r"\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=", matched)) <= labels, where
    assert len(asked) > 25
    chosen = {v["name"]: v.get("query") for v in BOARD["templating"]["list"]}
    for name in ("group", "job"):
        assert re.findall(r"dmuond_\w+", chosen[name]["query"])[0] in rows
    # Nothing of another group's is shown.
    for where, query in {**queries(), "job": chosen["job"]["query"]}.items():
        assert query.count("dmuond_") == query.count('{group="$group"'), where


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """Its address; it scrapes the targets once a second."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        "  - {job_name: dmuond, honor_labels: true, "
        f"static_configs: [{{targets: {json.dumps(targets)}}}]}}\n"
    )
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "prometheus.log").open("w"),
    )
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, query: str) -> list:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        said = json.load(answer)
    assert said["status"] == "success", said
    return said["data"]["result"]


def ready(address: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(ask(address, "vector(1)"))
    return False


def test_every_query_finds_something_in_a_real_run(daemons, tmp_path) -> None:
    needs.program("prometheus", "apt: prometheus")
    flags = [f"--snapshot_dir={tmp_path / 'snapshots'}", *tls_flags(tmp_path)]
    with (
        group(daemons, tmp_path, *flags) as members,
        prometheus(tmp_path, [metrics for _, metrics in members]) as address,
    ):
        daemon, metrics = members[0]
        name = group_of(metrics)
        where = f"unix:{daemon.path}"
        assert run("dmuonctl", "job", "end", "other", f"--address={where}").returncode != 0
        with dmuond.Session(where, rank=0, world_size=1) as session:
            two_matrices(session)
            session.step(scalars())
            wait_for(lambda: ready(address))
            until = time.monotonic() + 12  # the rates look back so far
            while time.monotonic() < until:
                session.step(scalars())
                if session.last_committed_step == 3:
                    os.kill(lane_pids(daemon.process.pid)[0], signal.SIGKILL)
                assert run("dmuonctl", "snapshot", "save", f"--address={where}").returncode == 0
            empty = []
            for panel, query in queries().items():
                query = query.replace("$__rate_interval", "10s").replace("$job", ".*")
                query = query.replace("$group", name)
                if not ask(address, query):
                    empty.append((panel, query))
            assert empty == []
