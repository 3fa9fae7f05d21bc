"""Which texts are ids of repositories."""

from __future__ import annotations

import pytest

from ckptkit.hub.client import is_repo_id


@pytest.mark.parametrize("text", ["org/name", "name", "a.b/c_d-e"])
def test_ids_of_repositories_are_recognised(text: str) -> None:
    assert is_repo_id(text)


@pytest.mark.parametrize(
    "text",
    ["", "a/b/c", "/a/b", "a b", "../x", "a/..", "https://x/a", "a--b/c", "x.git", "ä/b"],
)
def test_what_is_no_id_of_a_repository_is_refused(text: str) -> None:
    assert not is_repo_id(text)
