"""Each module of the client knows only what is below it: no import leads back to where it began."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "client/python/src/dmuond"


def module_name(path: Path, package: Path) -> str:
    parts = (package.name, *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named_by(node: ast.AST, inside: str) -> list[str]:
    """What an import statement names, absolutely; `inside` is the package that it stands in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parents = inside.split(".")
    base = ".".join(parents[: len(parents) + 1 - node.level]) if node.level else ""
    whole = ".".join(filter(None, (base, node.module)))
    return [f"{whole}.{alias.name}" for alias in node.names]


def imports(package: Path) -> dict[str, set[str]]:
    """Module → modules of the package that it names, in functions and for type checkers, too.

    Python runs the __init__ of every package on the way to a module, but a module that imports from
    within its own package does not thereby depend on what its package's __init__ gathers.
    """
    paths = {module_name(path, package): path for path in package.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        inside = name if path.stem == "__init__" else name.rpartition(".")[0]
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            for named in named_by(node, inside):
                module = named if named in paths else named.rpartition(".")[0]
                if module in paths and module != name:
                    found[name].add(module)
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the next, the last one the first; empty: there is none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for module in sorted(graph[path[-1]]):
            if module in path:
                return [*path[path.index(module) :], module]
            if module not in done and (found := search([*path, module])):
                return found
        done.add(path[-1])
        return []

    for module in sorted(graph):
        if module not in done and (found := search([module])):
            return found
    return []


def test_no_import_of_the_client_leads_back_to_where_it_began():
    graph = imports(PACKAGE)
    assert "dmuond.link" in graph["dmuond.member"]  # it sees what is there
    assert " → ".join(circle(graph)) == ""


@pytest.mark.parametrize(
    "back",
    [
        "from made_up.first import x",
        "from made_up import first",
        "import made_up.first",
        "from . import first",
        "from .first import x",
        "def f():\n    from made_up import first",
        "if TYPE_CHECKING:\n    from made_up.first import X",
    ],
)
def test_a_circle_is_found_in_whatever_way_it_is_spelled(tmp_path, back):
    package = tmp_path / "made_up"
    package.mkdir()
    (package / "__init__.py").write_text("from made_up.first import x\n")
    (package / "first.py").write_text("from made_up import second\n")
    (package / "second.py").write_text(back + "\n")
    assert circle(imports(package)) == ["made_up.first", "made_up.second", "made_up.first"]
