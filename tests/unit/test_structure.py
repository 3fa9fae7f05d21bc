"""The structure of the code, measured: limits that are only ever lowered.

A change that raises a figure makes the next change harder. A change that lowers one lowers its
limit here, in the same commit.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.source_trees import parse_source

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES_IN_A_FOLDER = 15
LIMITS = {
    "modules": 406,
    "modules with one importer": 60,
    "modules in import circles": 0,
    "public class names with several meanings": 3,
    "module names used in two packages": 9,
    "lines with told, somebody, nobody or whoever": 0,
    "private names of other packages": 27,
    "calls of locals()": 0,
}
MOST_FUNCTIONS_PER_1000_LINES = 81
FEWEST_COMMENTS_PER_1000_LINES = 20
_FILES = re.compile(r"\b(?:ckptkit|cli|tests|benchmarks)/[\w/]+\.py\b")
_WORDS = re.compile(r"\b(told|somebody|nobody|whoever)\b", re.IGNORECASE)


@cache
def modules() -> Mapping[str, Path]:
    """Returns all modules of the library and the command line, by their dotted names."""
    found = {}
    for base, package in ((ROOT, "ckptkit"), (ROOT / "cli", "ckptkit_cli")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def tree(name: str) -> ast.Module:
    return parse_source(modules()[name])


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Returns what each module imports of ours, late imports included, those for types left out."""
    return {name: frozenset(_imports_of(name)) - {name} for name in modules()}


def _imports_of(name: str) -> Iterator[str]:
    for node in _at_run_time(tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield from {below if below in modules() else node.module} & modules().keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & modules().keys()


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _at_run_time(child)


def in_circles() -> list[str]:
    """Returns the modules that import themselves by way of others."""
    return [name for name in modules() if name in _reached(name)]


def _reached(start: str) -> set[str]:
    reached: set[str] = set()
    waiting = list(imports()[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imports()[name]
    return reached


def with_one_importer() -> list[str]:
    importers = Counter(target for targets in imports().values() for target in targets)
    return [name for name, count in importers.items() if count == 1 and not _is_package(name)]


def _is_package(name: str) -> bool:
    return modules()[name].name == "__init__.py"


def class_names_with_several_meanings() -> list[str]:
    homes = defaultdict(set)
    for name in modules():
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(name)
    return sorted(name for name, places in homes.items() if len(places) > 1)


def file_names_used_twice() -> list[str]:
    paths = (path for path in modules().values() if not path.name.startswith("__"))
    names = Counter(path.stem for path in paths)
    return sorted(name for name, count in names.items() if count > 1)


def lines_in_an_old_tone() -> list[str]:
    return [
        f"{name}: {line.strip()}"
        for name, path in modules().items()
        for line in path.read_text(encoding="utf-8").splitlines()
        if _WORDS.search(line)
    ]


def private_names_of_others() -> list[str]:
    lines = (line for path in modules().values() for line in path.read_text("utf-8").splitlines())
    return [line for line in lines if "noqa: SLF001" in line]


def calls_of_locals() -> list[ast.Call]:
    calls = (node for name in modules() for node in ast.walk(tree(name)) if type(node) is ast.Call)
    return [call for call in calls if ast.unparse(call.func) == "locals"]


def lines_of_code_and_comments(name: str) -> tuple[int, int]:
    """Returns how many lines have code, docstrings left out, and how many have a comment.

    Each comment behind code has two spaces before it, as the formatter wants.
    """
    docstrings: set[int] = set()
    texts: set[int] = set()  # of several lines, which may look like comments
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            docstrings |= _lines_of(node)
        elif _is_text(node):
            texts |= _lines_of(node)
    code = comments = 0
    lines = modules()[name].read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(map(str.strip, lines), start=1):
        if number in docstrings or not (line or number in texts):
            continue
        alone = line.startswith("#") and number not in texts
        code += not alone
        comments += alone or "  # " in line
    return code, comments


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant | ast.JoinedStr]:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def _lines_of(node: ast.expr | ast.Expr) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


@pytest.mark.slow
def test_functions_hold_whole_steps_and_comments_give_reasons() -> None:
    counts = [lines_of_code_and_comments(name) for name in modules()]
    code, comments = (sum(column) for column in zip(*counts, strict=True))
    functions = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in modules()
        for node in ast.walk(tree(name))
    )
    assert functions / code * 1000 <= MOST_FUNCTIONS_PER_1000_LINES
    assert comments / code * 1000 >= FEWEST_COMMENTS_PER_1000_LINES


@pytest.mark.slow
def test_no_figure_of_the_structure_is_over_its_limit() -> None:
    figures = {
        "modules": len(modules()),
        "modules with one importer": len(with_one_importer()),
        "modules in import circles": len(in_circles()),
        "public class names with several meanings": len(class_names_with_several_meanings()),
        "module names used in two packages": len(file_names_used_twice()),
        "lines with told, somebody, nobody or whoever": len(lines_in_an_old_tone()),
        "private names of other packages": len(private_names_of_others()),
        "calls of locals()": len(calls_of_locals()),
    }
    over = {name: count for name, count in figures.items() if count > LIMITS[name]}
    assert not over, f"lower these again: {over}"
    under = {name: count for name, count in figures.items() if count < LIMITS[name]}
    assert not under, f"lower the limits to what was reached: {under}"


def test_a_folder_is_small_enough_to_be_read_at_a_glance() -> None:
    folders = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert {f: n for f, n in folders.items() if n > MOST_MODULES_IN_A_FOLDER} == {}


@pytest.mark.slow
def test_the_measures_see_what_they_measure() -> None:
    assert "ckptkit.core.text" in imports()["ckptkit.core.errors"]
    assert "ckptkit.training.checkpointer" in imports()["ckptkit.training"]
    assert len(class_names_with_several_meanings()) == len(set(class_names_with_several_meanings()))


def test_files_that_the_documentation_names_are_there() -> None:
    pages = (*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md")
    named = {path for page in pages for path in _FILES.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 40
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
