"""The rules of the house that no linter knows, checked over our own source."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tests.source_trees import parse_source

ROOT = Path(__file__).resolve().parents[2]
READ_THE_ENVIRONMENT = (
    ROOT / "ckptkit/engine/progress.py",  # TERM, of a terminal that cannot draw a line again
    # Keeps the libraries of its process off the network.
    ROOT / "ckptkit/hub_names/transformers/program.py",
    ROOT / "ckptkit/conversion/naming_program.py",  # XDG_CACHE_HOME, where a user's caches are
    ROOT / "ckptkit/run.py",
    ROOT / "ckptkit/training/environment.py",
)
VAGUE_WORDS = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

LIBRARY = sorted((ROOT / "ckptkit").rglob("*.py"))
SOURCES = LIBRARY + sorted((ROOT / "cli").rglob("*.py"))


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _breaches(check: Callable[[Path], object], paths: Sequence[Path]) -> dict[str, object]:
    """Returns what a check found, by file; files in which it found nothing are left out.

    One test goes over all files: a test for each file and rule took a minute of 4,500 tests.
    """
    return {_short(path): breach for path in paths if (breach := check(path))}


def test_there_is_source_to_check() -> None:
    assert {ROOT / "ckptkit/api.py", ROOT / "cli/ckptkit_cli/main.py"} <= set(SOURCES)


def test_modules_have_telling_names() -> None:
    def vague(path: Path) -> set[str]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        return VAGUE_WORDS & {word for part in parts for word in part.split("_")}

    assert not _breaches(vague, SOURCES)


def test_the_library_reads_no_environment_but_where_that_is_its_task() -> None:
    def reads(path: Path) -> list[int]:
        return [
            node.lineno
            for node in ast.walk(parse_source(path))
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
        ]

    named = [path for path in LIBRARY if re.search("environ|getenv", _text(path))]

    assert set(_breaches(reads, named)) == set(map(_short, READ_THE_ENVIRONMENT))


def test_nothing_is_left_to_do() -> None:
    marks = ("TODO", "FIXME", "XXX", "HACK")
    assert not _breaches(lambda path: [mark for mark in marks if mark in _text(path)], SOURCES)


def test_listings_of_folders_are_closed() -> None:
    """One that an error leaves open is a warning at any later time, in any other place."""
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        for line in _text(path).splitlines()
        if "scandir(" in line and not line.lstrip().startswith("with ")
    ]
    assert lines == []
