"""The structure of the code: no circular imports, and pages name real files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from ckptkit_cli._program import make_application
from tests.source_trees import parse_source

ROOT = Path(__file__).resolve().parents[2]
_FILES = re.compile(r"\b(?:ckptkit|cli|tests|benchmarks)/[\w/]+\.py\b")


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
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
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


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert "ckptkit.core.text" in imports()["ckptkit.core.errors"]
    assert in_circles() == []


def test_a_command_is_in_the_module_of_its_name() -> None:
    commands = make_application().commands
    assert len(commands) > 15
    for name, command in commands.items():
        module = import_module(f"ckptkit_cli.{name.replace('-', '_')}")
        assert any(value is command for value in vars(module).values()), name


def test_files_that_the_documentation_names_are_there() -> None:
    pages = (*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md")
    named = {path for page in pages for path in _FILES.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 40
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
