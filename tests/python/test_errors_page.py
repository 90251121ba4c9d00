"""docs/errors.md lists every reason that the programs can give."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REASON = re.compile(r'\b(?:Error|WithReason)\((?:[^;"]*?)"([A-Z][A-Z_]+)"', re.S)
CLIENT_REASON = re.compile(
    r'\bMakeError\((?:[^;"]*?)"([A-Z][A-Z_]*[A-Z])"'  # C++
    r'|char k[A-Za-z]+\[\] = "([A-Z][A-Z_]+)"'
    r'|\breason="([A-Z][A-Z_]+)"',  # Python
    re.S,
)


def reasons_in_source() -> set[str]:
    sources = [*ROOT.glob("server/**/*.cc"), *ROOT.glob("scheduler/*.cc")]
    found = {reason for path in sources for reason in REASON.findall(path.read_text())}
    clients = [*ROOT.glob("client/cpp/src/*"), *ROOT.glob("client/python/src/dmuond/*.py")]
    groups = [groups for path in clients for groups in CLIENT_REASON.findall(path.read_text())]
    return found | {reason for group in groups for reason in group if reason}


def test_every_reason_is_on_the_page() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    listed = set(re.findall(r"`([A-Z][A-Z_]+)`", page))
    found = reasons_in_source()
    assert len(found) > 30, "the pattern no longer finds reasons in the sources"
    assert {"SESSION_STATE", "NO_SUCH_STATE", "WEIGHTS_REPUBLISHED"} <= found
    assert found - listed == set()


def test_values_in_messages_have_names() -> None:
    """Programs find in the metadata what people read: a message is made by Say() of named parts."""
    plain = re.compile(r'\bError\(\s*absl::StatusCode::\w+,\s*"[A-Z_]+",\s*absl::StrCat\([^;]*;')
    sources = [*ROOT.glob("server/**/*.cc"), *ROOT.glob("scheduler/*.cc")]
    nameless = [
        call
        for path in sources
        for call in plain.findall(path.read_text())
        if "{{" not in call  # metadata of its own
    ]
    assert nameless == []
