"""Links of pages, and pages and sections that comments name, exist."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [
    "base",
    "bench",
    "client",
    "deploy",
    "docs",
    "kernels",
    "proto",
    "scheduler",
    "server",
    "tests",
    "tools",
]
SOURCES = {".cc", ".cmake", ".cu", ".cuh", ".h", ".in", ".proto", ".py", ".sh", ".txt", ".yaml"}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
RESULTS = re.compile(r"\bbench/results/[\w-]+")
# A page, and its section where it is quoted after that, also where a comment's line ends between.
NAMED = re.compile(r'\b(docs/[\w/-]+\.md)\b(?:\)?,[\s#/*]+"([^"]{1,80})")?')


def files(suffixes: set[str]) -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.suffix in suffixes]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return found


@cache
def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text()), re.MULTILINE)


@cache
def sections(page: Path) -> list[str]:
    bold = re.findall(r"^\*\*(.+?)\*\*", page.read_text(), re.MULTILINE)  # as a paragraph begins
    return [title.casefold() for title in headings(page) + bold]


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them."""
    found: set[str] = set()
    for heading in headings(page):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        again = 0
        while (name := f"{anchor}-{again}" if again else anchor) in found:
            again += 1
        found.add(name)
    return found


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            yield f"{page.relative_to(ROOT)}: {target}"
    for folder in RESULTS.findall(page.read_text()):
        if not (ROOT / folder).exists():
            yield f"{page.relative_to(ROOT)}: {folder}"


def dead_names(path: Path) -> Iterator[str]:
    for name, quoted in NAMED.findall(path.read_text(errors="replace")):
        page = ROOT / name
        section = re.sub(r"[\s#/*]+", " ", quoted).casefold()
        if not page.is_file() or not any(section in title for title in sections(page)):
            yield f"{path.relative_to(ROOT)}: {name} {quoted}"


def test_every_link_between_pages_leads_to_a_file_and_a_heading() -> None:
    pages = files({".md"})
    assert len(pages) > 30
    assert [dead for page in pages for dead in dead_links(page)] == []


def test_every_page_that_a_comment_names_exists() -> None:
    sources = files(SOURCES | {".md"})
    assert len(sources) > 500
    assert [dead for path in sources for dead in dead_names(path)] == []
