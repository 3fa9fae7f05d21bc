"""The reference has every public name, every command with its options, and every code."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from docs.site.commands import command_pages, options_of
from tests.documentation.public_types import find_public_types, name_of

ROOT = Path(__file__).resolve().parents[2]
SURFACE = json.loads((ROOT / "tests/contract/public_surface.json").read_text(encoding="utf-8"))
PYTHON = sorted((ROOT / "docs/reference/python").glob("*.md"))
MODULES = ("ckptkit", "ckptkit.hub", "ckptkit.training", "ckptkit.readers")
# Parts of a page that no directive of its own shows: errors are on one page, all of them.
ERRORS = "ckptkit.core.errors"
PLAIN = {"__version__", "GROUP", "Fqn", "Key", "Shape"}
"""Names that are no function and no class: the pages have them in their text, or not at all."""


INTEGRATIONS = ("accelerate", "transformers")
NOT_FOR_USERS = {
    "ckptkit.storage.base.Source",  # public in readers.md, under the name there
    *("ckptkit.lora.quantized.Packing", "ckptkit.lora.quantized.FourBitSettings"),
    "ckptkit.lora.quantized.PackedRecord",  # a part of those
    # Of an adapter's description, the commands and sentences are shown that follow from them.
    *("ckptkit.lora.foreign.ForeignAdapter", "ckptkit.lora.foreign.Factor"),
}


def directives() -> dict[str, dict[str, Any]]:
    """Returns the options of each directive of the pages, by the name that it shows."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PYTHON)
    found = re.findall(r"^::: (\S+)\n((?:    .*\n)*)", f"{text}\n", re.MULTILINE)
    return {name: (yaml.safe_load(options) or {}).get("options", {}) for name, options in found}


def documented() -> set[str]:
    """Returns the names under which the pages show functions and classes, and their own names."""
    shown = directives()
    return {*shown, *(options["heading"] for options in shown.values() if "heading" in options)}


def public_names(module: ModuleType) -> list[str]:
    """Returns the names of a module of integrations; the `…_like_stock` are for `ckptkit.run`."""
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    names = getattr(module, "__all__", own)
    return [name for name in names if name[0] != "_" and not name.endswith("_like_stock")]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_its_place(module: str) -> None:
    names = documented()
    errors = importlib.import_module(ERRORS)
    missing = [
        name
        for name in importlib.import_module(module).__all__
        if f"{module}.{name}" not in names
        and not hasattr(errors, name)
        and name not in PLAIN
        and not _is_module(f"{module}.{name}")
    ]
    assert missing == [], "docs/reference/python has to show these, as it does the others"
    assert ERRORS in names


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_every_public_name_of_an_integration_has_its_place(name: str) -> None:
    module = importlib.import_module(f"ckptkit.integrations.{name}")
    names = {f"{module.__name__}.{public}" for public in public_names(module)}
    assert names
    assert names - documented() == set()


@pytest.mark.slow
def test_every_type_of_a_result_or_of_a_field_has_its_place() -> None:
    modules = [importlib.import_module(module) for module in MODULES if module != "ckptkit.readers"]
    modules += [importlib.import_module(f"ckptkit.integrations.{name}") for name in INTEGRATIONS]
    roots = [
        value
        for module in modules
        for name in getattr(module, "__all__", None) or public_names(module)
        if callable(value := getattr(module, name))
    ]
    members = {
        name: options["members"]
        for name, options in directives().items()
        if isinstance(options.get("members"), list)
    }
    found = find_public_types(roots, members)
    assert len(found) > 60
    missing = {
        name_of(one): where
        for one, where in found.items()
        if name_of(one) not in documented() | NOT_FOR_USERS
    }
    assert missing == {}, "docs/reference/python has to show these, as it does the others"


def test_every_public_member_of_the_checkpointer_has_its_place() -> None:
    from ckptkit.training import Checkpointer

    shown = directives()["ckptkit.training.checkpointer.Checkpointer"]["members"]
    assert set(shown) == {name for name in vars(Checkpointer) if name[0] != "_"}


def test_every_pinned_function_has_its_place() -> None:
    names = documented()
    classes = {"ckptkit.training.Checkpointer", "ckptkit.training.SaveHandle"}
    assert classes <= names
    page = (ROOT / "docs/reference/python/training.md").read_text(encoding="utf-8")
    methods = set(re.findall(r"(?<=[\s\[,])\w+(?=[\s\],])", page)) | {"__init__"}
    missing = [
        name
        for name in SURFACE["functions"]
        if name not in names
        and not (name.rpartition(".")[0] in classes and name.rpartition(".")[2] in methods)
    ]
    assert missing == []


def test_every_command_has_a_page_with_all_of_its_options() -> None:
    pages = command_pages()
    assert {title.removeprefix("ckptkit ") for title, _ in pages.values()} == set(
        SURFACE["commands"]
    )
    for title, text in pages.values():
        flags = options_of(title.removeprefix("ckptkit "))
        assert [flag for flag in flags if flag not in text and flag not in {"-h", "--help"}] == []


def test_every_error_code_is_explained() -> None:
    page = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\d+) \|", page, re.MULTILINE))
    assert rows == {code: str(status) for code, status in SURFACE["errors"].items()}


def test_pages_of_the_navigation_are_those_in_the_folder() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    found = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in named if not name.startswith("files/")} == found


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
