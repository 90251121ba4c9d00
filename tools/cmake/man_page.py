"""Makes a program's man page of what it prints for --help, which is the one place for its words.

    man_page.py PROGRAM SECTION > NAME.SECTION

--help has, with empty lines between them: a line "name: what it is"; paragraphs; blocks that are
indented, of commands as one types them; or a line of synopsis with such a block right behind it, of
subcommands; and at the end the flags, "  --name (default: x)" with their text below.
"""

import re
import subprocess
import sys
from pathlib import Path

TEXT_FROM = 20  # a line that begins beyond this column is the text of the command above it


def escaped(text: str) -> str:
    """As roff shows it letter by letter."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = "".join(c if ord(c) < 128 else f"\\[u{ord(c):04X}]" for c in text)
    return "\\&" + text if text[:1] in (".", "'") else text


def heading(name: str) -> list[str]:
    return [f".SH {name}"]


def commands(block: list[str]) -> list[str]:
    """Each command with its text.

    Some have one text together, and a text may go on in the next line.
    """
    page, waiting = [], []
    for line in block:
        bare = line.strip()
        if len(line) - len(line.lstrip()) < TEXT_FROM:
            usage, *text = re.split(r" {2,}", bare, maxsplit=1)
            waiting.append(usage)
        else:
            text = [bare]
        if text and not waiting:
            page.append(escaped(text[0]))
        elif text:
            page += [".TP", f"\\fB{escaped(waiting[0])}\\fR"]
            for more in waiting[1:]:
                page += [".TQ", f"\\fB{escaped(more)}\\fR"]
            page.append(escaped(text[0]))
            waiting = []
    assert not waiting, f"no text for {waiting}"
    return page


def flags(block: list[str]) -> list[str]:
    page = []
    for line in block:
        flag = re.fullmatch(r"  --(\w+)(?: \(default: (.*)\))?", line)
        if flag:
            value = f" (default: {flag[2]})" if flag[2] else ""
            page += [".TP", f"\\fB\\-\\-{flag[1]}\\fR{escaped(value)}"]
        else:
            page.append(escaped(line.strip()))
    return page


def man_page(name: str, section: int, help_text: str, version: str) -> str:
    first, *blocks = [block.splitlines() for block in re.split(r"\n{2,}", help_text.strip("\n"))]
    said, what = first[0].split(": ", 1)
    assert said == name and len(first) == 1, f"{first} is not '{name}: what it is'"
    *before, of_flags = blocks
    synopsis, description, of_commands = [f"{name} [--FLAG=VALUE...]"], [], []
    for block in before:
        indented = [line.startswith(" ") for line in block]
        if all(indented):
            description += [".PP", ".nf", *(escaped(line) for line in block), ".fi"]
        elif any(indented):
            synopsis, of_commands = block[:1], commands(block[1:])
        else:
            description += [".PP", *(escaped(line) for line in block)]
    page = [f'.TH {name.upper()} {section} "" "dmuond {version}" ""']
    page += [*heading("NAME"), f"{name} \\- {escaped(what.rstrip('.'))}"]
    page += [*heading("SYNOPSIS"), escaped(synopsis[0])]
    page += [*heading("DESCRIPTION"), *description] if description else []
    page += [*heading("COMMANDS"), *of_commands] if of_commands else []
    page += [*heading("OPTIONS"), *flags(of_flags)]
    other = {"dmuond": "dmuonctl (1)", "dmuonctl": "dmuond (8)"}[name]
    return "\n".join([*page, *heading("SEE ALSO"), f".BR {other}", ""])


def made_of(program: Path, section: int) -> str:
    def says(flag: str) -> str:
        return subprocess.run([program, flag], check=True, capture_output=True, text=True).stdout

    version = says("--version").split()[1]
    return man_page(program.name, section, says("--help"), version)


if __name__ == "__main__":
    sys.stdout.write(made_of(Path(sys.argv[1]), int(sys.argv[2])))
