"""Makes docs/python_reference.md of the Python client's docstrings.

usage: python3 tools/dev/python_reference.py > docs/python_reference.md
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "client/python/src"
# Of each section: module, and names in it.
SECTIONS = {
    "The optimizer: `dmuond.torch`": [
        ("dmuond.torch.muon", ["Muon"]),
        ("dmuond.torch.loop_state", ["LoopState"]),
        ("dmuond.torch.views", ["RowBlocks", "Heads", "Experts", "Flatten"]),
        ("dmuond.torch.presets", ["Preset"]),
    ],
    "The core client: `dmuond`": [
        ("dmuond.session", ["Session"]),
        ("dmuond.member", ["Registered"]),
        ("dmuond.state_chunks", ["StateTensor"]),
        ("dmuond.device_array", ["DeviceArray"]),
    ],
    "Errors: `dmuond`": [
        (
            "dmuond.errors",
            [
                "Error",
                "InvalidArgumentError",
                "FailedPreconditionError",
                "RolledBack",
                "Aborted",
                "DaemonLost",
                "StateLost",
                "Unreachable",
            ],
        ),
    ],
}
HEAD = """# Python reference

Made of the docstrings by [tools/dev/python_reference.py](../tools/dev/python_reference.py); a test
compares them. What to do with it is in [python.md](python.md), each preset's fields are in
[maths.md](maths.md), reasons of errors in [errors.md](errors.md).
"""


def page() -> str:
    parts = [HEAD]
    for title, modules in SECTIONS.items():
        parts.append(f"## {title}\n")
        for module, names in modules:
            path = SOURCE / (module.replace(".", "/") + ".py")
            tree = ast.parse(path.read_text())
            classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
            parts += [text for name in names for text in described(classes[name])]
    return "\n".join(parts)


def described(found: ast.ClassDef) -> list[str]:
    """A class: how it is made, what it is, and its public methods and properties."""
    members = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    made = next((node for node in members if node.name == "__init__"), None)
    parts = [f"### {found.name}\n"]
    if made is not None:
        parts.append(code(signature(found.name, made)))
    else:
        fields = [ast.unparse(node) for node in found.body if isinstance(node, ast.AnnAssign)]
        parts.append(code("\n".join([f"class {found.name}", *(f"    {f}" for f in fields)])))
    parts.append(code(documented(found)))
    if made is not None and ast.get_docstring(made):
        parts.append(code(documented(made)))
    for node in members:
        if not node.name.startswith("_") and not _sets(node) and ast.get_docstring(node):
            parts.append(f"#### {found.name}.{node.name}\n")
            parts.append(code(f"{_call(node)}\n\n{documented(node)}"))
    return parts


def _sets(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)


def _call(node: ast.FunctionDef) -> str:
    named = [each.id for each in node.decorator_list if isinstance(each, ast.Name)]
    if "property" in named:
        return f"{node.name}: {ast.unparse(node.returns)}"
    return signature(node.name, node)


def signature(name: str, node: ast.FunctionDef) -> str:
    """Parameters stand on lines of their own where there are many."""
    arguments = node.args
    arguments.args = [each for each in arguments.args if each.arg != "self"]
    returns = f" -> {ast.unparse(node.returns)}" if name == node.name and node.returns else ""
    line = f"{name}({ast.unparse(arguments)}){returns}"
    if len(line) <= 100:
        return line
    positional = ast.arguments([], arguments.args, None, [], [], None, arguments.defaults)
    lines = [_one(positional, index) for index in range(len(arguments.args))]
    if arguments.vararg or arguments.kwonlyargs:
        lines.append("*" + (arguments.vararg.arg if arguments.vararg else ""))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        lines.append(ast.unparse(each) + ("" if default is None else f" = {ast.unparse(default)}"))
    if arguments.kwarg:
        lines.append("**" + ast.unparse(arguments.kwarg))
    return "\n".join([f"{name}(", *(f"    {each}," for each in lines), f"){returns}"])


def _one(arguments: ast.arguments, index: int) -> str:
    with_default = index - (len(arguments.args) - len(arguments.defaults))
    shown = ast.unparse(arguments.args[index])
    if with_default < 0:
        return shown
    return f"{shown} = {ast.unparse(arguments.defaults[with_default])}"


def documented(node: ast.ClassDef | ast.FunctionDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


def code(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines()) + "\n"


if __name__ == "__main__":
    print(page(), end="")
