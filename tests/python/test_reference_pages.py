"""Pages that repeat what is in the sources say the same."""

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_flag_of_dmuonctl_is_on_the_page_with_its_default() -> None:
    source = (ROOT / "server/ctl/main.cc").read_text()
    flags = dict(re.findall(r"ABSL_FLAG\([^,]+, ([a-z_]+), ([^,]+),", source))
    defaults = {}
    for name, value in flags.items():
        duration = re.fullmatch(r"absl::(Seconds|Minutes)\((\d+)\)", value)
        if duration:
            seconds = int(duration[2]) * (60 if duration[1] == "Minutes" else 1)
            value = f"{seconds // 60}m" if seconds % 60 == 0 else f"{seconds}s"
        defaults[name] = value.strip('"')
    page = (ROOT / "docs/configuration.md").read_text()
    part = page[page.index("## `dmuonctl`") : page.index("## Environment")]
    rows = re.findall(r"^\| `--([a-z_]+)` \| [^|]+ \| (?:`([^`]*)`)? ?\|", part, re.MULTILINE)
    assert len(flags) > 10, "the pattern no longer finds flags in the source"
    assert dict(rows) == defaults


def test_the_guide_shows_the_script_that_survives() -> None:
    script = (ROOT / "client/python/examples/survivor.py").read_text()
    page = (ROOT / "docs/python.md").read_text()
    assert textwrap.indent(script, "    ") in page


def test_the_python_reference_is_what_its_docstrings_make() -> None:
    path = ROOT / "tools/dev/python_reference.py"
    spec = importlib.util.spec_from_file_location("python_reference", path)
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    page = (ROOT / "docs/python_reference.md").read_text()
    assert page == reference.page(), (
        "python3 tools/dev/python_reference.py > docs/python_reference.md"
    )


def test_what_the_python_packages_give_is_in_the_reference() -> None:
    page = (ROOT / "docs/python_reference.md").read_text()
    described = set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    given = set()
    for package in ("dmuond", "dmuond/torch"):
        tree = ast.parse((ROOT / f"client/python/src/{package}/__init__.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
                given |= set(ast.literal_eval(node.value))
    assert given - described == {"PRESETS", "__version__", "types"}


def test_pages_link_to_what_is_there() -> None:
    links = 0
    for folder in (".", "docs", "bench/results", "bench/results/*"):
        for page in ROOT.glob(f"{folder}/*.md"):
            for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
                if "://" not in target:
                    assert (page.parent / target).exists(), f"{page}: {target}"
                    links += 1
    assert links > 50, "the pattern no longer finds links in pages"


def test_results_have_one_folder_for_a_kind_of_machine() -> None:
    for page in (ROOT / "bench/results").glob("*/README.md"):
        assert re.fullmatch(r"cpu|([248]x)?h[12]00|faults", page.parent.name), page
