"""Pages of the documentation: their blocks of code, and what running these shows.

With `CKPTKIT_WRITE_PAGES=1`, tests write what commands show into the pages instead of comparing.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.command_line import run_command

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WRITES = bool(os.environ.get("CKPTKIT_WRITE_PAGES"))
ANYTHING = "…"
"""A line of this stands for any lines."""
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T][\d:.]+Z?"), "TIME"),
    (re.compile(r"\d\d:\d\d:\d\dZ"), "TIME"),
    (re.compile(r"\b\d[\d,.]* ?(ms|s|min|h|d|days?)\b"), "N s"),
    (re.compile(r"\b\d[\d,.]* ?[kKMGT]?B\b"), "N B"),
    (re.compile(r"\b[0-9a-f]{7,64}\b"), "HEX"),
    (re.compile(r"https?://[\w.:-]+"), "URL"),
    # Of a training: rounding differs between processors, and grows from step to step.
    (re.compile(r"\bloss +\d+\.\d+"), "loss N"),
    (re.compile(r" +"), " "),
)
_DECIMAL = re.compile(r"(?<![\w.])(-?\d+\.\d+(?:e[+-]?\d+)?)(?![\w.])")


@dataclass(frozen=True)
class Block:
    """A block of code: its language, the file that it is an excerpt of, and where it is."""

    language: str
    title: str
    text: str
    start: int


@dataclass(frozen=True)
class Command:
    """A command of a console block, and what the page shows of its output."""

    line: str
    output: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2] or "", found[3], found.start(3)) for found in _BLOCK.finditer(text)
    ]


def commands_of(block: Block) -> Iterator[Command]:
    """Yields the lines with a prompt, with the lines after each; a backslash continues a line."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, output = re.sub(r"\\\n\s*", "", part).partition("\n")
        yield Command(line, output)


def words_of(command: Command) -> list[str]:
    return shlex.split(command.line, comments=True)


def show(words: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs `ckptkit`; returns its exit status, and what a terminal shows."""
    done = run_command(*words, **environment)
    return done.returncode, done.stderr + done.stdout


def differs(shown: str, expected: str, tolerance: float = 0.02) -> str:
    """Returns how what a command shows differs from what the page says, or nothing.

    Times, sizes and losses are not compared, and other numbers with a point nearly, since they
    depend on how a processor rounds.
    """
    masked = [_masked(piece) for piece in expected.split(f"{ANYTHING}\n")]
    pieces = [
        _DECIMAL.pattern.join(re.escape(part) for part in _DECIMAL.split(piece)[::2])
        for piece in masked
    ]
    found = re.fullmatch(r"(?:.*\n)*?".join(pieces), _masked(shown))
    if found is None:
        there = f"{ANYTHING}\n".join(masked).splitlines()
        return "\n".join(difflib.unified_diff(there, _masked(shown).splitlines(), "page", "shown"))
    numbers = [number for piece in masked for number in _DECIMAL.findall(piece)]
    pairs = zip(numbers, found.groups(), strict=True)
    return "\n".join(
        f"{there} on the page, {here} shown"
        for there, here in pairs
        if not math.isclose(float(there), float(here), rel_tol=tolerance)
    )


def is_written(command: Command, shown: str) -> bool:
    """Returns whether what a command shows is written into the page; else it must fit the page."""
    by_hand = f"{ANYTHING}\n" in command.output
    if WRITES and not by_hand:
        return True
    found = differs(shown, command.output)
    how = "CKPTKIT_WRITE_PAGES=1 pytest tests/documentation writes what commands show now:"
    if by_hand:
        how = f"edit this block by hand, since its '{ANYTHING}' stands for lines of your choice:"
    assert not found, f"{how}\n{found}"
    return False


def write_outputs(page: Path, block: Block, outputs: Mapping[str, str]) -> None:
    parts = []
    for command in re.split(r"^(?=\$ )", block.text, flags=re.MULTILINE):
        found = re.match(r"\$ (?:.*\\\n)*.*\n", command)
        line = re.sub(r"\\\n\s*", "", found.group()[2:-1]) if found else ""
        has_output = found and command[found.end() :]
        parts.append(
            found.group() + outputs[line] if found and has_output and line in outputs else command
        )
    text = page.read_text(encoding="utf-8")
    assert block.text in text
    page.write_text(text.replace(block.text, "".join(parts), 1), encoding="utf-8")


def is_excerpt(block: Block) -> bool:
    """Whether a block with the name of a file has whole lines of it, indented less or not."""
    lines = "\n" + (ROOT / block.title).read_text(encoding="utf-8")
    return any(f"\n{textwrap.indent(block.text, ' ' * n)}" in lines for n in range(0, 20, 4))


def _masked(text: str) -> str:
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n" if text else ""
