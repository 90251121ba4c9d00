"""The wire contract explains itself: every call, field and value has a comment."""

import re
from pathlib import Path

import pytest

PROTOS = sorted((Path(__file__).resolve().parents[2] / "proto" / "dmuond" / "v1").glob("*.proto"))
FIELD = re.compile(r"\s+(?:[\w.<>, ]+ )?(\w+)\s*=\s*\d+;\s*(//.*)?$")

CALL = re.compile(r"\s+rpc (\w+)\(")


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_field_has_a_comment(path: Path) -> None:
    """Behind it, or on the line before it."""
    lines = path.read_text().splitlines()
    fields = [(at, match) for at, line in enumerate(lines) if (match := FIELD.match(line))]
    assert fields, "the pattern no longer finds fields"
    bare = [
        match.group(1)
        for at, match in fields
        if not match.group(2) and not lines[at - 1].strip().startswith("//")
    ]
    assert bare == []


@pytest.mark.parametrize(
    "path", [p for p in PROTOS if "\nservice " in p.read_text()], ids=lambda p: p.stem
)
def test_every_call_has_a_comment(path: Path) -> None:
    """On the line before it."""
    lines = path.read_text().splitlines()
    calls = [(at, match) for at, line in enumerate(lines) if (match := CALL.match(line))]
    assert calls, "the pattern no longer finds calls"
    assert [m.group(1) for at, m in calls if not lines[at - 1].strip().startswith("//")] == []
