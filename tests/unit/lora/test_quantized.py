"""Whether a base is the one that was trained on."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.lora.config import LoraSettings
from ckptkit.lora.quantized import (
    BaseIdentity,
    compare_bases,
    identify_base,
    parse_recorded_base,
)

ONE, TWO = "a" * 40, "b" * 40
CACHE = f"/home/me/.cache/huggingface/hub/models--org--name/snapshots/{ONE}"


def settings(**config: Any) -> LoraSettings:
    return LoraSettings.parse({"target_modules": ["q"], **config})


def test_a_path_of_the_cache_tells_repository_and_commit() -> None:
    assert identify_base(CACHE, None) == BaseIdentity(CACHE, ONE, "org/name")
    expected = parse_recorded_base(settings(base_model_name_or_path=CACHE))
    assert (expected.name, expected.commit) == ("org/name", ONE)


def test_a_branch_is_no_commit() -> None:
    assert (
        parse_recorded_base(settings(base_model_name_or_path="org/name", revision="main")).commit
        == ""
    )


def test_a_configuration_may_tell_its_commit() -> None:
    assert identify_base("/models/x", {"_commit_hash": TWO}).commit == TWO
    assert identify_base("/models/x", {"_commit_hash": "none"}).commit == ""


@pytest.mark.parametrize(
    ("expected", "found", "verdict"),
    [
        (BaseIdentity("org/name", ONE), BaseIdentity("x", TWO, "org/name"), "contradicted"),
        (BaseIdentity("org/name", ONE), BaseIdentity("x", ONE, "org/name"), "silent"),
        (BaseIdentity("org/name"), BaseIdentity("x", repository="org/other"), "contradicted"),
        (BaseIdentity("org/name"), BaseIdentity("x", repository="org/name"), "noted"),
        (BaseIdentity("/mnt/model"), BaseIdentity("/data/model"), "noted"),
        (BaseIdentity("/mnt/model"), BaseIdentity("/mnt/model"), "silent"),
        (BaseIdentity(), BaseIdentity("/data/model"), "noted"),
    ],
)
def test_commits_and_repositories_prove_and_names_are_noted(
    expected: BaseIdentity, found: BaseIdentity, verdict: str
) -> None:
    contradictions, note = compare_bases(expected, found)
    assert (bool(contradictions), bool(note)) == (verdict == "contradicted", verdict == "noted")
