"""Whether tied tensors are still equal after a merge, by their bytes; and resized embeddings.

An embedding is resized if the model has another number of tokens than the base it was made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.merge.base_tensors import BaseTensor
from ckptkit.conversion.source.read import same_bytes
from ckptkit.core.errors import InputError, RefusedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.model_configs import parse_model_config
from ckptkit.engine.kernels import StoredOperand
from ckptkit.engine.reader import Origin
from ckptkit.lora.changes import Change, Changes, Replacement, list_frozen
from ckptkit.lora.config import LoraSettings
from ckptkit.lora.dialects import find_vocabulary, is_input_embedding, make_plain_name
from ckptkit.lora.tying import Equality, TiedPair, find_equalities
from ckptkit.plan.side_files import CONFIG, MAX_JSON_BYTES
from ckptkit.plan.ties import choose_ties_to_drop, untie_config
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.places import is_url

_MATRIX = 2


@dataclass(frozen=True, slots=True)
class MergedTies:
    """The names that the configuration ties, after a merge.

    Attributes:
        dropped: Names that are not written, with the name that replaces each.
        written: Absent names that have to be written now, with the one whose base they share.
        untied: Pairs that differ after the merge.
        broken: Pairs that differ in the base already.
    """

    dropped: Mapping[Fqn, Fqn] = field(default_factory=dict)
    written: Mapping[Fqn, Fqn] = field(default_factory=dict)
    untied: Mapping[Fqn, Fqn] = field(default_factory=dict)
    broken: Mapping[Fqn, Fqn] = field(default_factory=dict)


class TieJudge:
    """Compares the tensors of tied names."""

    def __init__(self, origins: Mapping[str, Origin], base: Mapping[Fqn, BaseTensor]) -> None:
        self._base = base
        self._reader = ArrayReader(*origins.values())
        self._indexes = {name: origin.index for name, origin in origins.items()}

    def judge(
        self, config: Mapping[str, Any] | None, pairs: Sequence[TiedPair], changes: Changes
    ) -> MergedTies:
        """Decides which ties hold after the merge.

        `changes` include those that PEFT shares between tied modules.
        """
        same: dict[Fqn, Fqn] = {}
        untied: dict[Fqn, Fqn] = {}
        broken: dict[Fqn, Fqn] = {}
        for pair in pairs:
            ours, theirs = changes.get(pair.target, ()), changes.get(pair.source, ())
            if not (ours or theirs):
                (same if self._base_agrees(pair) else broken)[pair.target] = pair.source
            elif self._changed_alike(ours, theirs) and (
                (ours and isinstance(ours[0], Replacement)) or self._base_agrees(pair)
            ):
                same[pair.target] = pair.source
            else:
                untied[pair.target] = pair.source
        absent = {pair.target: pair.source for pair in pairs if not pair.is_present}
        dropped = choose_ties_to_drop(config, same, [*untied, *broken])
        written = {t: s for t, s in absent.items() if t in untied}
        if untie_config(config or {}) != config and (untied or broken):
            written = absent
        return MergedTies(
            {t: s for t, s in dropped.items() if t not in absent or t in changes},
            written,
            untied,
            broken,
        )

    def same_tensors(self, first: tuple[str, TensorEntry], second: tuple[str, TensorEntry]) -> bool:
        """Compares two stored tensors of one element type and shape."""
        blocks = zip(
            self._reader.read_blocks(*first), self._reader.read_blocks(*second), strict=True
        )
        return all(same_bytes(a.view(np.uint8).data, b.view(np.uint8).data) for a, b in blocks)

    def _base_agrees(self, pair: TiedPair) -> bool:
        if not pair.is_present:
            return True
        if not pair.may_agree:
            return False
        target, source = (self._find_entry(self._base[name]) for name in (pair.target, pair.source))
        return target is not None and source is not None and self.same_tensors(target, source)

    def _find_entry(self, tensor: BaseTensor) -> tuple[str, TensorEntry] | None:
        operand = tensor.operand
        if not isinstance(operand, StoredOperand):
            return None
        return operand.origin, self._indexes[operand.origin].tensors[operand.key]

    def _changed_alike(self, ours: Sequence[Change], theirs: Sequence[Change]) -> bool:
        needed = find_equalities(ours, theirs)
        return needed is not None and all(map(self._is_equal, needed))

    def _is_equal(self, equality: Equality) -> bool:
        if not equality.is_transposed:
            return self.same_tensors(equality.first, equality.second)
        bits = f"u{equality.first[1].dtype.itemsize}"
        first, second = (
            self._reader.read_whole(*tensor).view(bits).reshape(tensor[1].shape)
            for tensor in (equality.first, equality.second)
        )
        return np.array_equal(first, second.T)


def refuse_differing_bases(judge: TieJudge, changes: Changes) -> None:
    """Refuses adapters whose updates of one tensor have different frozen bases."""
    for name, own in changes.items():
        frozen = list_frozen(own)
        for other in frozen[1:]:
            first, second = frozen[0].tensor, other.tensor
            is_same = (first.dtype, first.shape) == (second.dtype, second.shape)
            origins = (frozen[0].source.origin, other.source.origin)
            if not is_same or not judge.same_tensors((origins[0], first), (origins[1], second)):
                raise RefusedError(
                    f"two adapters have different frozen weights of {name!r}",
                    where=other.source.where,
                    hint="merge adapters that were trained on one base model",
                )


def describe_ties(config: Mapping[str, Any] | None, ties: MergedTies) -> Iterator[str]:
    """Yields notes on names that are written although the configuration ties them."""
    changed = untie_config(config or {}) != config
    consequence = (
        "both are written, and tie_word_embeddings is set to false"
        if changed
        else "both are written; Transformers 5 keeps them apart, older versions tie this model type"
        " whatever its configuration says"
    )
    for target, source in ties.untied.items():
        yield (
            f"the configuration ties {target!r} to {source!r}, and the adapter changes them"
            f" differently: {consequence}"
        )
    for target, source in ties.broken.items():
        yield (
            f"the configuration ties {target!r} to {source!r}, but they differ in the base:"
            f" {consequence}"
        )


def find_resized_embeddings(
    settings: LoraSettings,
    base: Mapping[Fqn, TensorEntry],
    rest: Mapping[Fqn, TensorEntry],
) -> Iterator[str]:
    """Yields the embeddings that PEFT saves with an adapter because their size was changed.

    The base that `settings` name has to be a folder on this machine. `base` are the tensors of the
    base in the checkpoint, by their plain names; `rest` the same by their names in the PEFT model.

    Source: peft 0.21, `get_peft_model_state_dict` with `save_embedding_layers="auto"`.
    """
    tokens = _read_vocabulary_size(settings.base_model_name_or_path)
    weights = {
        name.rpartition(".")[0]: entry.shape
        for name, entry in base.items()
        if name.endswith(".weight") and len(entry.shape) == _MATRIX
    }
    ends = find_vocabulary(weights)
    sizes = {weights[module][0] for module in ends if is_input_embedding(module)}
    if tokens is None or not sizes or tokens in sizes:
        return
    for name in rest:
        module = name.rpartition(".")[0]
        own = make_plain_name(module)
        if own in ends and weights[own][0] in sizes:
            yield module


def _read_vocabulary_size(folder: str | None) -> int | None:
    """Reads the number of tokens of the model in a folder; None if it is unknown."""
    if not folder or "\0" in folder or is_url(folder) or not Path(folder).is_dir():
        return None  # mostly a name on the Hub; recorded names are not looked up over a network
    try:
        with LocalSource(Path(folder)) as source:
            size_bytes = min(source.stat(CONFIG).size_bytes, MAX_JSON_BYTES)
            document = parse_model_config(source.read(CONFIG, 0, size_bytes), where=CONFIG)
    except InputError:
        return None
    tokens = document.get("vocab_size")
    return tokens if isinstance(tokens, int) else None
