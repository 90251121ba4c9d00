"""docs/quickstart.md: its script, run as the page runs it, says what the page shows."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from daemons import program

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/quickstart.md").read_text()
SCRIPT = ROOT / "client/python/examples/train.py"
COMMAND = "    $ dmuonctl run -- python client/python/examples/train.py\n"
PATIENCE_S = 240


def run(config: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program("dmuonctl"), "run", f"--config={config}", "--", sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "DMUOND_JOB"},  # conftest's
    )


def seen(text: str) -> tuple[dict[str, str], dict[int, float]]:
    """Routes of the table by parameter, and losses by step."""
    lines = [line.split() for line in text.splitlines()]
    routes = {w[0]: w[2] for w in lines if len(w) > 2 and w[2] in ("muon", "adamw")}
    return routes, {int(w[1][:-1]): float(w[3]) for w in lines if w[:1] == ["step"]}


def timeless(text: str) -> str:
    """On one line, with no time of day."""
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "", " ".join(text.split()))


def test_the_page_shows_the_script():
    assert textwrap.indent(SCRIPT.read_text(), "    ") in PAGE


def test_the_script_says_what_the_page_shows_and_a_second_start_is_refused(tmp_path):
    config = tmp_path / "config"
    config.write_text(f'snapshot_dir: "{tmp_path}/snapshots" snapshot_every_steps: 100')
    first = run(config)
    assert first.returncode == 0, first.stderr
    routes, losses = seen(first.stdout + first.stderr)
    shown_routes, shown_losses = seen(PAGE.split(COMMAND)[1].split("\n\n")[0])
    assert routes == shown_routes and len(routes) == 5
    assert losses == pytest.approx(shown_losses, abs=0.02)
    second = run(config)
    refusal = PAGE.split("    OpenSession: ")[1].split("\n\n")[0]
    refused = timeless(second.stderr)
    # A job that ends does not wait for the snapshot that is being written, here that of step 200.
    assert timeless(refusal) in refused.replace(" at step 100, ", " at step 200, ")
    assert second.returncode == 1 and "step 50" not in second.stdout
