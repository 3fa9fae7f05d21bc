"""Whether tied tensors are still one after a merge: what they hold is compared, byte by byte.

Whether a model was given another number of tokens than the base that it was made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.adapters.merge.base_tensors import BaseTensor
from ckptkit.conversion.source.read import same_bytes
from ckptkit.core.errors import InputError, RefusedError
from ckptkit.core.index import Fqn, Span, TensorEntry
from ckptkit.core.model_configs import parse_model_config
from ckptkit.engine.kernels import StoredOperand
from ckptkit.engine.reader import RUN_BYTES, Origin, TensorReader
from ckptkit.lora.changes import Change, Replacement
from ckptkit.lora.config import LoraSettings
from ckptkit.lora.dialects import find_vocabulary, is_input_embedding, make_plain_name
from ckptkit.lora.tying import Equality, TiedPair, find_equalities
from ckptkit.plan.side_files import CONFIG, MAX_JSON_BYTES
from ckptkit.plan.ties import choose_ties_to_drop, untie_config
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.places import is_url

Changes = Mapping[Fqn, Sequence[Change]]


@dataclass(frozen=True, slots=True)
class MergedTies:
    """What becomes of the names that the configuration ties.

    Attributes:
        dropped: Names that are not written, with the name that stands for each.
        written: Absent names that have to be written now, with the one whose base they share.
        untied: Pairs that the merge makes differ.
        broken: Pairs that differ in the base already.
    """

    dropped: Mapping[Fqn, Fqn] = field(default_factory=dict)
    written: Mapping[Fqn, Fqn] = field(default_factory=dict)
    untied: Mapping[Fqn, Fqn] = field(default_factory=dict)
    broken: Mapping[Fqn, Fqn] = field(default_factory=dict)


class TieJudge:
    """Compares what tied names hold."""

    def __init__(self, origins: Mapping[str, Origin], base: Mapping[Fqn, BaseTensor]) -> None:
        self._base = base
        # Origins of its own: what was compared is read, and proven, once more when written.
        self._readers = {
            name: TensorReader(Origin(origin.name, origin.source, origin.index))
            for name, origin in origins.items()
        }
        self._indexes = {name: origin.index for name, origin in origins.items()}

    def judge(
        self, config: Mapping[str, Any] | None, pairs: Sequence[TiedPair], changes: Changes
    ) -> MergedTies:
        """Tells which ties hold after the merge.

        Args:
            config: The configuration that declares them.
            pairs: What it declares.
            changes: Of every tensor, those that PEFT shares between tied modules included.
        """
        same: dict[Fqn, Fqn] = {}
        untied: dict[Fqn, Fqn] = {}
        broken: dict[Fqn, Fqn] = {}
        for pair in pairs:
            ours, theirs = changes.get(pair.target, ()), changes.get(pair.source, ())
            if not (ours or theirs):
                (same if self._base_agrees(pair) else broken)[pair.target] = pair.source
            elif self._changed_alike(ours, theirs) and (
                _is_replaced(ours) or self._base_agrees(pair)
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
        (one_origin, one), (other_origin, other) = first, second
        itemsize = one.dtype.itemsize
        step = RUN_BYTES // itemsize
        buffers = [memoryview(bytearray(min(RUN_BYTES, one.size_bytes))) for _ in range(2)]
        for start in range(0, one.elements, step):
            span = Span(start, min(start + step, one.elements))
            views = [buffer[: (span.stop - span.start) * itemsize] for buffer in buffers]
            self._readers[one_origin].fill(one.key, span, views[0])
            self._readers[other_origin].fill(other.key, span, views[1])
            if not same_bytes(*views):
                return False
        return True

    def _base_agrees(self, pair: TiedPair) -> bool:
        if not pair.is_present:
            return True
        if not pair.may_agree:
            return False
        entries = [self._stored(self._base[name]) for name in (pair.target, pair.source)]
        return None not in entries and self.same_tensors(*(e for e in entries if e is not None))

    def _stored(self, tensor: BaseTensor) -> tuple[str, TensorEntry] | None:
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
        first, second = self._whole(*equality.first), self._whole(*equality.second)
        return np.array_equal(first, second.T)

    def _whole(self, origin: str, entry: TensorEntry) -> NDArray[Any]:
        """Reads a factor; those of embeddings are as long as the vocabulary and narrow."""
        data = bytearray(entry.size_bytes)
        self._readers[origin].fill(entry.key, Span(0, entry.elements), memoryview(data))
        return np.frombuffer(data, f"u{entry.dtype.itemsize}").reshape(entry.shape)


def _is_replaced(changes: Sequence[Change]) -> bool:
    return bool(changes) and isinstance(changes[0], Replacement)


def refuse_differing_bases(judge: TieJudge, changes: Changes) -> None:
    """Refuses adapters that bring different tensors to put beneath their updates of one."""
    for name, found in changes.items():
        frozen = [change for change in found if isinstance(change, Replacement) and change.frozen]
        for other in frozen[1:]:
            first, second = frozen[0].tensor, other.tensor
            same = (first.dtype, first.shape) == (second.dtype, second.shape)
            origins = (frozen[0].source.origin, other.source.origin)
            if not same or not judge.same_tensors((origins[0], first), (origins[1], second)):
                raise RefusedError(
                    f"{name!r} was trained upon in two adapters with different weights",
                    where=other.source.where,
                    hint="merge adapters that were trained on one base model",
                )


def describe_ties(config: Mapping[str, Any] | None, ties: MergedTies) -> Iterator[str]:
    """Says which names are written although the configuration ties them."""
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


_MATRIX = 2


def find_resized_embeddings(
    settings: LoraSettings,
    base: Mapping[Fqn, TensorEntry],
    rest: Mapping[Fqn, TensorEntry],
) -> Iterator[str]:
    """Yields the embeddings that PEFT saves with an adapter because their size was changed.

    The base has to be a folder on this machine; of one on the Hub, nothing is known.

    Args:
        settings: The adapter's configuration, which names the base.
        base: The tensors of the base in the checkpoint, by their plain names.
        rest: The same by their names in the PEFT model.

    Source: peft 0.21, `get_peft_model_state_dict` with `save_embedding_layers="auto"`.
    """
    tokens = _tokens_of(settings.base_model_name_or_path)
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


def _tokens_of(folder: str | None) -> int | None:
    """Returns the number of tokens of the model in a folder; None where that is unknown."""
    if not folder or "\0" in folder or is_url(folder) or not Path(folder).is_dir():
        return None  # of the Hub, mostly; what a record names is not asked for over a network
    try:
        with LocalSource(Path(folder)) as source:
            size_bytes = min(source.stat(CONFIG).size_bytes, MAX_JSON_BYTES)
            document = parse_model_config(source.read(CONFIG, 0, size_bytes), where=CONFIG)
    except InputError:
        return None
    tokens = document.get("vocab_size")
    return tokens if isinstance(tokens, int) else None
