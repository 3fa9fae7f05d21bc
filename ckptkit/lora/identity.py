"""Whether a base model is the one that an adapter was trained on: what is recorded, what is found.

Names of models say little, since folders are renamed and copied; commits prove. So a commit that
differs is a contradiction, and so are two repositories of the Hub; what cannot be told either way
is a note, unless the weights themselves can be compared.

Source: huggingface_hub's cache (`models--org--name/snapshots/COMMIT`); transformers, which keeps
`_commit_hash` and `_name_or_path` in configurations of older versions.

An extracted adapter has left its base behind. Its manifest records checksums of a few frozen
weights, and how the base was packed, so that a merge can check the base that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Shape
from ckptkit.core.manifest import Manifest
from ckptkit.lora.config import LoraSettings
from ckptkit.lora.quantized import Quantization, quantization_from_json

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/([^/]+)")
_URL = re.compile(r"hf://([\w.-]+)/([\w.-]+)(?:@([0-9a-f]{40}))?(?:/|$)")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT_KEY = "_commit_hash"
# Fields of the source in the manifest of an extracted adapter.
_DIGESTS = "base_digests"
_QUANTIZATION = "base_quantization"


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


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """A frozen weight of the base, as it was in training.

    Attributes:
        dtype: Its element type.
        shape: Its shape.
        crc32: Checksum of its bytes, row-major.
    """

    dtype: str
    shape: Shape
    crc32: int


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """What is recorded of a base.

    Attributes:
        digests: Of a few of its weights, by their names in the plain model.
        quantization: How it was packed; None where it was not.
    """

    digests: Mapping[str, WeightDigest] = field(default_factory=dict)
    quantization: Quantization | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the record as the source of a manifest holds it."""
        facts: dict[str, Any] = {}
        if self.digests:
            facts[_DIGESTS] = {
                name: {
                    "dtype": digest.dtype,
                    "shape": list(digest.shape),
                    "crc32": digest.crc32,
                }
                for name, digest in self.digests.items()
            }
        if self.quantization is not None:
            facts[_QUANTIZATION] = self.quantization.to_json()
        return facts


def parse_base_record(manifest: Manifest, where: str) -> BaseRecord:
    """Parses what the manifest of an extracted adapter records of its base.

    Args:
        manifest: The manifest; one of another kind records nothing.
        where: The path of the manifest, for messages.
    """
    if manifest.kind != "adapter":
        return BaseRecord()
    try:
        digests = {
            str(name): WeightDigest(
                str(digest["dtype"]), tuple(map(int, digest["shape"])), int(digest["crc32"])
            )
            for name, digest in manifest.source.get(_DIGESTS, {}).items()
        }
        quantization = manifest.source.get(_QUANTIZATION)
        if quantization is None:
            return BaseRecord(digests)
        return BaseRecord(digests, quantization_from_json(quantization))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            "what the manifest says of the adapter's base is damaged",
            where=where,
            hint="extract the adapter again",
        ) from error
