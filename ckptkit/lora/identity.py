"""Whether a base model is the one that an adapter was trained on: what is recorded, what is found.

Names of models say little, since folders are renamed and copied; commits prove. So a commit that
differs is a contradiction, and so are two repositories of the Hub; what cannot be told either way
is a note, unless the weights themselves can be compared.

Source: huggingface_hub's cache (`models--org--name/snapshots/COMMIT`); transformers, which keeps
`_commit_hash` and `_name_or_path` in configurations of older versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.lora.config import LoraSettings

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/([^/]+)")
_URL = re.compile(r"hf://([\w.-]+)/([\w.-]+)(?:@([0-9a-f]{40}))?(?:/|$)")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT_KEY = "_commit_hash"


@dataclass(frozen=True, slots=True)
class Expected:
    """The base that an adapter was trained on, as far as it is recorded.

    Attributes:
        name: Repository or path; empty where nothing says.
        commit: Of the repository, in full; empty where nothing says.
    """

    name: str = ""
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The base that was given, as far as it can be told who it is.

    Attributes:
        path: Where it lies, resolved.
        repository: `org/name` where its path tells, else empty.
        commit: In full, where its path or its configuration tells, else empty.
    """

    path: str
    repository: str = ""
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What comparing the two tells.

    Attributes:
        contradictions: What proves that it is another base.
        proofs: What proves that it is the same.
        notes: What the user should know where nothing proves either.
    """

    contradictions: tuple[str, ...] = ()
    proofs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def expected_of(settings: LoraSettings) -> Expected:
    """Returns what an adapter's configuration says of its base."""
    name = settings.base_model_name_or_path or ""
    cached = _CACHED.search(name)
    commit = settings.revision or ""
    if cached is not None:  # a run that was given a path of the Hub's cache
        name, commit = f"{cached[1]}/{cached[2]}", cached[3]
    return Expected(name, commit if _COMMIT.fullmatch(commit) else "")


def found_at(path: str, config: Mapping[str, Any] | None) -> Found:
    """Returns what a base's path and configuration say of it.

    Args:
        path: Where it lies, links resolved no further than the cache's snapshot.
        config: Its `config.json`, if there is one.
    """
    cached = _CACHED.search(path) or _URL.match(path)
    repository, commit = (f"{cached[1]}/{cached[2]}", cached[3] or "") if cached else ("", "")
    told = (config or {}).get(_COMMIT_KEY)
    if not commit and isinstance(told, str):
        commit = told
    return Found(path, repository, commit if _COMMIT.fullmatch(commit) else "")


def judge(expected: Expected, found: Found) -> Judgement:
    """Compares the base that was trained on with the one that is given."""
    contradictions: list[str] = []
    proofs: list[str] = []
    if expected.commit and found.commit:
        same = expected.commit == found.commit
        text = f"commit {found.commit} was found against {expected.commit}"
        (proofs if same else contradictions).append(text)
    if found.repository and _is_repository(expected.name) and found.repository != expected.name:
        contradictions.append(f"repository {found.repository} was found against {expected.name}")
    if contradictions or proofs:
        return Judgement(tuple(contradictions), tuple(proofs))
    return Judgement(notes=_unproven(expected, found))


def _unproven(expected: Expected, found: Found) -> tuple[str, ...]:
    if not expected.name:
        return (f"which base was trained on is not recorded; {found.path} is taken as it is",)
    if found.repository == expected.name:
        return (
            (
                f"the adapter records no commit of {expected.name}, so that nothing proves that"
                f" {found.path} has the same weights"
            ),
        )
    wanted = expected.name.rstrip("/")
    if wanted == found.path.rstrip("/"):
        return ()
    return (
        (
            f"the adapter was trained on {expected.name}, and nothing proves that {found.path} has"
            " the same weights"
        ),
    )


def _is_repository(name: str) -> bool:
    return _REPOSITORY.fullmatch(name) is not None
