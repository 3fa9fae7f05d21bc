"""The rules of the house that no linter knows, checked over our own source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
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
# What users and plug-ins call. Elsewhere a docstring says what the name does not. pyproject.toml
# has the same list, for the sections of these docstrings.
FULL_DOCSTRINGS = (
    *("ckptkit/__init__.py", "ckptkit/api.py", "ckptkit/options.py"),
    *("ckptkit/file_system.py", "ckptkit/readers.py", "ckptkit/run.py"),
    "ckptkit/core/dtypes.py",
    "ckptkit/core/errors.py",
    *("ckptkit/core/index.py", "ckptkit/formats/base.py", "ckptkit/formats/registry.py"),
    *("ckptkit/hub/download.py", "ckptkit/hub/publish.py"),
    *("ckptkit/integrations/accelerate/__init__.py", "ckptkit/integrations/scalars.py"),
    *("ckptkit/integrations/transformers/__init__.py", "ckptkit/storage/base.py"),
    *("ckptkit/training/checkpointer.py", "ckptkit/training/handle.py"),
    *("ckptkit/training/settings.py", "ckptkit/training/state/fsdp.py"),
)
VAGUE_WORDS = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
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


def test_modules_have_telling_names() -> None:
    def vague(path: Path) -> set[str]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        return VAGUE_WORDS & {word for part in parts for word in part.split("_")}

    assert not _breaches(vague, SOURCES)


def test_imports_are_absolute() -> None:
    def relative(path: Path) -> list[int]:
        return [
            node.lineno
            for node in ast.walk(parse_source(path))
            if isinstance(node, ast.ImportFrom) and node.level > 0
        ]

    assert not _breaches(relative, SOURCES)


def test_what_is_public_has_a_docstring() -> None:
    def bare(path: Path) -> list[str]:
        tree = parse_source(path)
        return [one.name for one in _public_definitions(tree.body) if not ast.get_docstring(one)]

    assert not _breaches(bare, [ROOT / name for name in FULL_DOCSTRINGS])


def test_every_module_has_a_docstring() -> None:
    def bare(path: Path) -> bool:
        return bool(parse_source(path).body) and not ast.get_docstring(parse_source(path))

    assert not _breaches(bare, SOURCES)


def test_the_library_never_prints() -> None:
    assert not _breaches(lambda path: _calls_of(parse_source(path), "print"), LIBRARY)


def test_the_library_reads_no_environment_but_where_that_is_its_task() -> None:
    def reads(path: Path) -> list[int]:
        return [
            node.lineno
            for node in ast.walk(parse_source(path))
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
        ]

    assert set(_breaches(reads, LIBRARY)) == set(map(_short, READ_THE_ENVIRONMENT))


def test_nothing_is_left_to_do() -> None:
    marks = ("TODO", "FIXME", "XXX", "HACK")
    assert not _breaches(lambda path: [mark for mark in marks if mark in _text(path)], SOURCES)


def test_listings_of_folders_are_closed() -> None:
    """One that an error leaves open is a warning at any later time, in any other place."""
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if "scandir(" in line and not line.lstrip().startswith("with ")
    ]
    assert lines == []
