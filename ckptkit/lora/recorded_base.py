"""Whether a base model is the one that an adapter was trained on, by what is recorded of it.

Names of models prove little, since folders are renamed and copied; commits do. So another commit is
a contradiction, and so is another repository of the Hub; what is neither proven nor disproven is a
note, unless the weights themselves can be compared.

Source: huggingface_hub's cache (`models--org--name/snapshots/COMMIT`); transformers, which keeps
`_commit_hash` and `_name_or_path` in configurations of older versions.

An extracted adapter has left its base behind. Its manifest records checksums of a few frozen
weights, and how the base was packed, so that a merge can check the base that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

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


class RecordedBase(Struct, frozen=True):
    """The base that an adapter was trained on, as far as it is recorded.

    Attributes:
        name: Repository or path; empty where it is not recorded.
        commit: The full commit of the repository; empty where it is not recorded.
    """

    name: str = ""
    commit: str = ""


class GivenBase(Struct, frozen=True):
    """The base that was given, as far as it can be identified.

    Attributes:
        path: Its resolved path.
        repository: `org/name` where its path contains it, else empty.
        commit: The full commit, where its path or its configuration contains it, else empty.
    """

    path: str
    repository: str = ""
    commit: str = ""


class BaseComparison(Struct, frozen=True):
    """The result of comparing a given base with the recorded one.

    Attributes:
        contradictions: Proofs that it is another base.
        proofs: Proofs that it is the same.
        notes: Messages for the user where nothing proves either.
    """

    contradictions: tuple[str, ...] = ()
    proofs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def parse_recorded_base(settings: LoraSettings) -> RecordedBase:
    """Returns the base that an adapter's configuration records."""
    name = settings.base_model_name_or_path or ""
    cached = _CACHED.search(name)
    commit = settings.revision or ""
    if cached is not None:  # a run that was given a path of the Hub's cache
        name, commit = f"{cached[1]}/{cached[2]}", cached[3]
    return RecordedBase(name, commit if _COMMIT.fullmatch(commit) else "")


def identify_base(path: str, config: Mapping[str, Any] | None) -> GivenBase:
    """Identifies a base by its path and its configuration.

    Links in `path` are resolved no further than the snapshot of the Hub's cache.
    """
    cached = _CACHED.search(path) or _URL.match(path)
    repository, commit = (f"{cached[1]}/{cached[2]}", cached[3] or "") if cached else ("", "")
    recorded = (config or {}).get(_COMMIT_KEY)
    if not commit and isinstance(recorded, str):
        commit = recorded
    return GivenBase(path, repository, commit if _COMMIT.fullmatch(commit) else "")


def compare_bases(expected: RecordedBase, base: GivenBase) -> BaseComparison:
    """Compares the base that was trained on with the one that is given."""
    contradictions: list[str] = []
    proofs: list[str] = []
    if expected.commit and base.commit:
        same = expected.commit == base.commit
        text = f"found commit {base.commit}, expected {expected.commit}"
        (proofs if same else contradictions).append(text)
    is_repository = _REPOSITORY.fullmatch(expected.name) is not None
    if base.repository and is_repository and base.repository != expected.name:
        contradictions.append(f"found repository {base.repository}, expected {expected.name}")
    if contradictions or proofs:
        return BaseComparison(tuple(contradictions), tuple(proofs))
    if not expected.name:
        note = f"the base that was trained on is not recorded; {base.path} is used unchecked"
    elif base.repository == expected.name:
        note = (
            f"the adapter records no commit of {expected.name}, so that nothing proves that"
            f" {base.path} has the same weights"
        )
    elif expected.name.rstrip("/") == base.path.rstrip("/"):
        return BaseComparison()
    else:
        note = (
            f"the adapter was trained on {expected.name}, and nothing proves that {base.path} has"
            " the same weights"
        )
    return BaseComparison(notes=(note,))


class WeightDigest(Struct, frozen=True):
    """A frozen weight of the base, as it was in training.

    Attributes:
        dtype: Its element type.
        shape: Its shape.
        crc32: Checksum of its bytes, row-major.
    """

    dtype: str
    shape: Shape
    crc32: int


class BaseRecord(Struct, frozen=True):
    """The record of a base.

    Attributes:
        digests: Digests of a few weights, by their names in the plain model.
        quantization: How it was packed; None where it was not.
    """

    digests: Mapping[str, WeightDigest] = field(default_factory=dict)
    quantization: Quantization | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the record as the source of a manifest holds it."""
        facts: dict[str, Any] = {}
        if self.digests:
            facts[_DIGESTS] = {
                name: {"dtype": digest.dtype, "shape": list(digest.shape), "crc32": digest.crc32}
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
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            "what the manifest says of the adapter's base is damaged",
            where=where,
            hint="extract the adapter again",
        ) from error
