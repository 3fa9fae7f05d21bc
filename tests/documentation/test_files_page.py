"""The page about our own files has each field that a release has written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.errors import FormatError
from ckptkit.core.manifest import FLAT_LAYOUT, MANIFEST_NAME, RUN_FACTS, parse_manifest
from ckptkit.deltas.form import INDEX_PATH
from ckptkit.runs.push_journal import PushJournal, StepPush

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ROOT / "fixtures/written_by_0_2"
PAGE = (ROOT / "docs/reference/files.md").read_text(encoding="utf-8")
MANIFESTS = sorted(WRITTEN.rglob(MANIFEST_NAME))
BY_NAME = {"tensors", "files", "tied", "metrics", "options", "base_digests", "changed_elements"}
BY_NAME |= {"weight_map", "models", "aliases", "steps", "lost"}
"""Objects whose keys are names of the user's, not fields."""


def section(heading: str) -> str:
    """Returns the part of the page below a heading, up to the next one of the same level."""
    (found,) = re.findall(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    return str(found)


def documented(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def fields_of(value: Any, *, are_names: bool = False) -> Iterator[str]:
    """Yields the fields of a document, and those of objects and arrays in it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not are_names:
                yield name
            yield from fields_of(inner, are_names=not are_names and name in BY_NAME)
    elif isinstance(value, list):
        for inner in value:
            yield from fields_of(inner)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.parent.relative_to(WRITTEN)))
def test_each_field_of_a_manifest_is_on_the_page(path: Path) -> None:
    data = path.read_bytes()
    assert parse_manifest(data, where=str(path)).versions["ckptkit"].startswith("0.2")
    known = documented(section("`ckptkit.json`") + section("Deltas"))
    missing = set(fields_of(json.loads(data))) - known
    assert missing == set(), "docs/reference/files.md has to describe these"


def test_the_manifests_are_of_each_kind() -> None:
    kinds = {json.loads(path.read_bytes())["kind"] for path in MANIFESTS}
    assert kinds == {"adapter", "dcp", "delta", "model", "training"}


@pytest.mark.parametrize("path", sorted(WRITTEN.rglob(RUN_FACTS)), ids=lambda path: path.parts[-3])
def test_each_field_of_the_facts_of_a_run_is_on_the_page(path: Path) -> None:
    found = set(fields_of(json.loads(path.read_bytes())))
    assert {"entries", "strategy", "unit"} <= found
    assert found - documented(section(f"`{RUN_FACTS}`")) == set()


def test_each_field_of_flat_parameters_is_on_the_page() -> None:
    from ckptkit.training.state import fsdp

    source = Path(fsdp.__file__).read_text(encoding="utf-8")
    (written,) = re.findall(r"def layout_facts.*?^def ", source, re.MULTILINE | re.DOTALL)
    names = set(re.findall(r'^            "(\w+)": ', written, re.MULTILINE))
    assert len(names) == 9
    assert names <= documented(section(f"`{RUN_FACTS}`"))
    (document,) = re.findall(r'\{\n        "layout_version".*?\}', source, re.DOTALL)
    assert set(re.findall(r'"(\w+)":', document)) <= documented(section(f"`{FLAT_LAYOUT}`"))


def test_each_field_of_the_push_journal_is_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "org--name.json"
    journal = PushJournal(path, "org/name", "run", {})
    journal.note(StepPush(5, "digest", "pushed", "org/name"))
    found = set(fields_of(json.loads(path.read_bytes())))
    assert set(StepPush.__struct_fields__) <= found
    assert found - documented(section("The push journal")) == set()


def test_each_field_of_a_delta_is_on_the_page() -> None:
    index = json.loads((WRITTEN / "delta" / INDEX_PATH).read_bytes())
    assert set(fields_of(index)) - documented(section("Deltas")) == set()


def test_a_manifest_of_an_unknown_version_is_refused() -> None:
    document = json.loads((WRITTEN / "model" / MANIFEST_NAME).read_bytes())
    with pytest.raises(FormatError, match="version 2 found against 1") as caught:
        parse_manifest(json.dumps({**document, "ckptkit_manifest": 2}).encode(), where="out")
    assert caught.value.hint
    assert "Upgrade ckptkit" in PAGE
