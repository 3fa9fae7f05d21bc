"""The rules of the house that no linter knows, checked over our own source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES_IN_A_FILE = 600
MOST_LINES_IN_A_FUNCTION = 50
READ_THE_ENVIRONMENT = (
    ROOT / "ckptkit/naming/program.py",  # keeps the libraries of its process off the network
    ROOT / "ckptkit/pipeline/answer_cache.py",  # XDG_CACHE_HOME, where a user's caches are
    ROOT / "ckptkit/run.py",
    ROOT / "ckptkit/training/environment.py",
)
VAGUE_WORDS = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LIBRARY = sorted((ROOT / "ckptkit").rglob("*.py"))
SOURCES = LIBRARY + sorted((ROOT / "cli").rglob("*.py"))


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_source = pytest.mark.parametrize("path", SOURCES, ids=_short)
every_library_source = pytest.mark.parametrize("path", LIBRARY, ids=_short)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _calls_of(tree: ast.AST, name: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def _public_definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Yields the public functions and classes of a module or class, and what those classes hold.

    An overload has its docstring on the implementation, and a property's setter on its getter.
    """
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        if any(_ends_with(mark, {"overload", "setter"}) for mark in node.decorator_list):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _public_definitions(node.body)


def _ends_with(decorator: ast.expr, names: set[str]) -> bool:
    last = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
    return last in names


def test_there_is_source_to_check() -> None:
    assert {ROOT / "ckptkit/api.py", ROOT / "cli/ckptkit_cli/main.py"} <= set(SOURCES)


@every_source
def test_a_file_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_IN_A_FILE


@every_source
def test_functions_are_short(path: Path) -> None:
    long = {
        node.name: lines
        for node in ast.walk(_tree(path))
        if isinstance(node, FUNCTIONS)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES_IN_A_FUNCTION
    }
    assert not long


@every_source
def test_a_module_has_a_telling_name(path: Path) -> None:
    words = {
        word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")
    }
    assert not words & VAGUE_WORDS


@every_source
def test_imports_are_absolute(path: Path) -> None:
    relative = [
        node.lineno
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not relative


@every_source
def test_what_is_public_has_a_docstring(path: Path) -> None:
    tree = _tree(path)
    bare = [
        node.name for node in _public_definitions(tree.body) if not (ast.get_docstring(node) or "")
    ]
    if tree.body and not ast.get_docstring(tree):
        bare.insert(0, "the module")
    assert not bare


@every_library_source
def test_the_library_never_prints(path: Path) -> None:
    assert not _calls_of(_tree(path), "print")


@every_library_source
def test_the_library_reads_no_environment_but_where_that_is_its_task(path: Path) -> None:
    reads = [
        node.lineno
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert not reads or path in READ_THE_ENVIRONMENT


@every_source
def test_nothing_is_left_to_do(path: Path) -> None:
    marks = ("TODO", "FIXME", "XXX", "HACK")
    assert not [mark for mark in marks if mark in path.read_text(encoding="utf-8")]
