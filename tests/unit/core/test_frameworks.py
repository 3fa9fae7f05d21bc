"""The tables of frameworks and unread formats beside fixtures and pages; no two rows clash."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.frameworks import (
    PLAIN_FOLDERS,
    PROFILES,
    Profile,
    is_optimizer_folder,
    is_unit_folder,
)
from ckptkit.core.unread_formats import UNREAD, UnreadFormat

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*(ROOT / "docs/reference").glob("*.md"), *(ROOT / "docs/how-to").glob("*.md")]
ENVIRONMENTS = tomllib.loads((ROOT / "fixtures/environments.toml").read_text())
TRAINED = sorted((ROOT / "tests/frameworks").glob("*.toml"))
UNNAMED = {"stacked experts"}  # what several frameworks do


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_profile_has_a_page_its_source_and_real_checkpoints(profile: Profile) -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    assert profile.name.split(" (")[0].split()[-1] in pages or profile.name in UNNAMED
    assert profile.source or profile.name in UNNAMED
    for fixture in profile.fixtures:
        assert (ROOT / "fixtures" / fixture / "checkpoint").is_dir()


@pytest.mark.parametrize("row", ENVIRONMENTS.values(), ids=list(ENVIRONMENTS))
def test_an_environment_writes_fixtures_and_the_page_lists_the_newest(row: dict[str, Any]) -> None:
    for case in (case for cases in row["run"].values() for case in cases):
        assert (ROOT / "fixtures" / case / "checkpoint").is_dir()
    assert all((ROOT / file).is_file() for file in row["tests"])
    page = (ROOT / "docs/reference/versions.md").read_text()
    line = f"| {row['title']} | {row['tried']} | {row['saves']} |"
    assert (line in page) == row.get("newest", False)


def test_the_page_lists_no_other_release() -> None:
    page = (ROOT / "docs/reference/versions.md").read_text()
    newest = [row for row in ENVIRONMENTS.values() if row.get("newest")]
    table = page.split("| | tried on | saves |\n|---|---|---|\n")[1].split("\n\n")[0]
    assert len(table.splitlines()) == len(newest)


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_the_page_lists_the_frameworks_that_train_under_ckptkit_run(path: Path) -> None:
    row = tomllib.loads(path.read_text())
    assert (
        f"| {row['title']} | {row['tried']} | "
        in (ROOT / "docs/reference/integrations.md").read_text()
    )


@pytest.mark.parametrize(
    "claims",
    [
        lambda p: [p.name],
        lambda p: [p.mark] if p.mark else [],
        lambda p: [p.package] if p.package else [],
        lambda p: [p.tensors] if p.tensors else [],
        lambda p: [p.modules] if p.modules else [],
        lambda p: list(p.copies),
        lambda p: list(p.weights),
        lambda p: [counter[0] for counter in p.counters],
    ],
    ids=["name", "mark", "package", "tensors", "modules", "copies", "weights", "counters"],
)
def test_no_two_profiles_claim_the_same(claims: Callable[[Profile], list[str]]) -> None:
    claimed = Counter(one for profile in PROFILES for one in claims(profile))
    assert claimed
    assert [one for one, count in claimed.items() if count > 1] == []


@pytest.mark.parametrize("one", UNREAD, ids=lambda one: one.name)
def test_a_format_that_is_not_read_is_on_a_page_and_has_its_source(one: UnreadFormat) -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    assert one.name.split(" (")[0].split()[-1] in pages
    assert (bool(one.source), bool(one.advice)) == (True, True)
    assert one.name not in [profile.name for profile in PROFILES]
    assert [other.name for other in UNREAD].count(one.name) == 1


def test_folders_of_steps_are_told_from_those_of_runs() -> None:
    units = ["pytorch_model_fsdp_0", "optimizer_0", "dist_ckpt", "hf_ckpt", "model_1", "optim"]
    assert all(map(is_unit_folder, [*PLAIN_FOLDERS, *units]))
    assert [name for name in units if is_optimizer_folder(name)] == ["optimizer_0", "optim"]
    runs = ["checkpoints", "runs", "step_100", "global_step_5", "llama", "final", "iter_0000005"]
    assert not any(map(is_unit_folder, runs))
