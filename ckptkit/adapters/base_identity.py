"""Whether a given base is the one that each adapter was trained on, by all that can be known.

Whether the base of a merge is the one that was trained on: commits, repositories, bytes.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.adapters.base_records import read_digests
from ckptkit.adapters.merge.base_model import BaseSource, open_base, take_weights
from ckptkit.adapters.merge.report import SourceAdapter
from ckptkit.adapters.quantized.bases import ModelWeights, QloraBase, QuantizedBase
from ckptkit.conversion.source.adapters import read_record_of_base
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.conversion.source.places import make_absolute, resolve_path
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.errors import CkptkitError, InputError, RefusedError
from ckptkit.core.index import Span, TensorEntry
from ckptkit.core.manifest import RUN_FACTS
from ckptkit.core.model_configs import parse_json_object
from ckptkit.engine.casts import Caster
from ckptkit.engine.reader import RUN_BYTES, Origin, TensorReader
from ckptkit.lora.config import LoraSettings
from ckptkit.lora.dialects import make_plain_name
from ckptkit.lora.layers import build_table
from ckptkit.lora.quantized import Quantization
from ckptkit.lora.recorded_base import (
    BaseComparison,
    RecordedBase,
    WeightDigest,
    compare_bases,
    identify_base,
    parse_recorded_base,
)
from ckptkit.plan.side_files import MAX_JSON_BYTES
from ckptkit.storage.places import is_url

_LISTED = 3
_ANYWAY = (
    "pass the base that was trained on, or --allow-other-base to merge onto this one all the same"
)


def recorded_base(settings: LoraSettings, checkpoint: OpenedCheckpoint) -> RecordedBase:
    """Returns what an adapter's configuration, or the run that saved it, tells of its base."""
    expected = parse_recorded_base(settings)
    recorded = _run_facts(checkpoint).get("base_model")
    if not isinstance(recorded, Mapping):
        return expected
    name, commit = recorded.get("id"), recorded.get("commit_hash")
    return RecordedBase(
        expected.name or (name if isinstance(name, str) else ""),
        expected.commit or (commit if isinstance(commit, str) else ""),
    )


def _run_facts(checkpoint: OpenedCheckpoint) -> Mapping[str, Any]:
    path = posixpath.join(checkpoint.folder, RUN_FACTS)
    try:
        size = checkpoint.source.stat(path).size_bytes
    except InputError:
        return {}
    if size > MAX_JSON_BYTES:
        return {}
    return parse_json_object(checkpoint.source.read(path, 0, size), where=path)


def check_identity(
    expected: RecordedBase, base: BaseSource, *, where: str, allowed: bool
) -> BaseComparison:
    """Compares what an adapter records of its base with the base that was given.

    Args:
        expected: What is recorded.
        base: The base that was given.
        where: What to call the adapter in errors.
        allowed: Whether another base is taken all the same.
    """
    path = base.opened.path
    found = identify_base(make_absolute(path), base.config)
    if not found.repository:
        found = identify_base(resolve_path(path), base.config)
    judgement = compare_bases(expected, found)
    if judgement.contradictions:
        refuse_other_base(judgement.contradictions, path, where=where, allowed=allowed)
    return judgement


def refuse_other_base(reasons: Collection[str], path: str, *, where: str, allowed: bool) -> None:
    """Refuses a base that is proven to be another than the one that was trained on."""
    if not allowed:
        raise RefusedError(
            f"the base {path} is not the one that the adapter was trained on: {'; '.join(reasons)}",
            where=where,
            hint=_ANYWAY,
        )


def recorded_weights(
    stack: ExitStack, expected: RecordedBase, base: BaseSource
) -> BaseSource | None:
    """Opens the folder that an adapter records as its base, where it is still there.

    Args:
        stack: Closes its files.
        expected: The recorded base; its relative paths can no longer be resolved.
        base: The base that was given; the same folder is not opened again.
    """
    path = Path(expected.name)
    if is_url(base.opened.location) or not path.is_absolute() or not path.is_dir():
        return None
    if path.samefile(base.opened.location):
        return None
    try:
        return open_base(stack, path, None)
    except CkptkitError:
        return None  # a folder that has become something else proves nothing


def differing_weights(
    trained: ModelWeights, given: ModelWeights, hidden: Collection[str], *, most: int | None = None
) -> tuple[list[str], int]:
    """Compares the frozen weights of one base with those of another, bit by bit.

    Where element types differ, the given ones are cast: training may hold them in another.

    Args:
        trained: Those that are known to be the adapter's.
        given: The base that was given.
        hidden: Names that are packed on either side.
        most: How many elements of each are compared; None for all.

    Returns:
        The names of those that differ, and how many were compared.
    """
    readers = [
        TensorReader(Origin(side.origin.name, side.origin.source, side.origin.index))
        for side in (trained, given)
    ]
    pairs = {
        name: (entry, given.entries[name])
        for name, entry in trained.entries.items()
        if name in given.entries and name not in hidden
    }
    comparable = {
        name: (ours, theirs)
        for name, (ours, theirs) in pairs.items()
        if ours.shape == theirs.shape and ours.dtype.kind == theirs.dtype.kind == "float"
    }
    differing = [
        name
        for name, (ours, theirs) in comparable.items()
        if not _same(readers, ours, theirs, ours.elements if most is None else most)
    ]
    return differing, len(comparable)


def _same(
    readers: Sequence[TensorReader], ours: TensorEntry, theirs: TensorEntry, most: int
) -> bool:
    step = RUN_BYTES // max(ours.dtype.itemsize, theirs.dtype.itemsize)
    caster = Caster(theirs.dtype, ours.dtype)
    elements = min(ours.elements, most)
    for start in range(0, elements, step):
        span = Span(start, min(start + step, elements))
        arrays = []
        for reader, entry in zip(readers, (ours, theirs), strict=True):
            data = bytearray((span.stop - span.start) * entry.dtype.itemsize)
            reader.fill(entry.key, span, memoryview(data))
            arrays.append(np.frombuffer(data, numpy_dtype(entry.dtype)))
        cast = np.empty(len(arrays[1]), numpy_dtype(ours.dtype))
        if theirs.dtype == ours.dtype:
            cast = arrays[1]
        else:
            caster.cast(arrays[1], cast)
        bits = f"u{ours.dtype.itemsize}"
        if not np.array_equal(arrays[0].view(bits), cast.view(bits)):
            return False
    return True


def listed(names: Collection[str]) -> str:
    """Returns the first of some names, for a sentence."""
    return ", ".join(_first(names)) + (", …" if len(names) > _LISTED else "")


def _first(names: Collection[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        if number < _LISTED:
            yield name


_SAMPLE = 1 << 16  # elements of each weight: two models differ nearly everywhere


def refuse_rewritten_bases(adapters: Sequence[SourceAdapter], given: BaseSource | None) -> None:
    """Refuses adapters that were trained on a base which PEFT had written into."""
    own = given is None and len(adapters) == 1
    for adapter in adapters:
        settings = adapter.found.adapter.settings
        if settings.changes_base and not own:
            raise RefusedError(
                f"the adapter was started with {settings.init_lora_weights!r}, which writes"
                " into the base: merged onto another it gives another model",
                where=adapter.source.where,
                hint="merge the checkpoint of the run itself, without --base, if it holds the"
                " base; or let PEFT save the adapter with"
                " path_initial_model_for_weight_conversion",
            )


class BaseChecks:
    """Compares the base that was given with what is known of the one trained on."""

    def __init__(
        self,
        stack: ExitStack,
        adapters: Sequence[SourceAdapter],
        given: BaseSource | None,
        *,
        allowed: bool,
    ) -> None:
        """Takes what was opened.

        Args:
            stack: Closes further bases, which are opened to be compared.
            adapters: The adapters, in the order of merging.
            given: The base that was given, or None.
            allowed: Whether another base is taken all the same.
        """
        self._stack = stack
        self._adapters = adapters
        self._given = given
        self._allowed = allowed
        self._notes: list[str] = []
        self._is_onto_originals = False
        self._unproven: dict[int, list[str]] = {}  # by position of the adapter

    def notes(self, quantized: QuantizedBase) -> list[str]:
        """Returns what the user should know, what packed weights tell included."""
        texts = () if quantized.is_proven else self._unproven.values()
        unproven = [text for some in texts for text in some]
        told = () if self._is_onto_originals else quantized.notes  # which saw no packed weight
        return [*self._notes, *unproven, *told]

    def check_identity(self) -> None:
        """Compares names, commits, and the folders that are recorded."""
        if self._given is None:
            return
        for adapter in self._adapters:
            where = adapter.source.where
            expected = recorded_base(adapter.found.adapter.settings, adapter.found.opened)
            judgement = check_identity(expected, self._given, where=where, allowed=self._allowed)
            recorded = recorded_weights(self._stack, expected, self._given)
            if recorded is None or not self._compare(
                take_weights(recorded),
                take_weights(self._given),
                adapter,
                most=_SAMPLE,
            ):
                self._unproven[adapter.source.position] = list(judgement.notes)
            self._notes += [
                f"another base is merged onto: {text}" for text in judgement.contradictions
            ]

    def compare(
        self,
        given: ModelWeights,
        trained: ModelWeights | None,
        quantized: QuantizedBase,
        choice: QloraBase | None,
    ) -> None:
        """Compares the given base with what checkpoints hold, or record, of theirs.

        Args:
            given: The base that was given, by the names of the live model.
            trained: What the first adapter's checkpoint holds of the base, or None.
            quantized: The packed weights on both sides.
            choice: What an adapter of a packed base is to be merged onto, None where nobody said.
        """
        if trained is not None:
            hidden = {*quantized.hidden, *self._trained_biases()}
            if self._compare(trained, given, self._adapters[0], hidden=hidden):
                self._unproven.clear()
        for adapter in self._adapters:
            if adapter.found.base:
                continue
            record = read_record_of_base(adapter.found.opened)
            if record.quantization is not None and not quantized.operands:
                self._check_packing(record.quantization, adapter, choice)
            digests = {n: d for n, d in record.digests.items() if n not in quantized.hidden}
            if digests:
                tells_all = quantized.is_proven or not quantized.operands
                self._check_digests(digests, given, adapter, tells_all=tells_all)

    def _check_packing(
        self, told: Quantization, adapter: SourceAdapter, choice: QloraBase | None
    ) -> None:
        """Refuses to merge onto weights that are not those trained on, unless it is asked for."""
        kinds = ", ".join(told.kinds)
        if choice == "original":
            self._is_onto_originals = True
            self._notes.append(
                f"the adapter was trained on packed weights ({kinds}) and is merged onto their"
                " originals, as was asked for: not quite the function that was trained"
            )
            return
        way = (
            f"merge from the checkpoint itself ({told.checkpoint}), which holds them"
            if told.weights
            else "pass the base as it was saved packed"
        )
        count = f"{told.weights:,} " if told.weights else ""
        raise RefusedError(
            f"the adapter was trained on {count}packed weights ({kinds}), and those of --base are"
            " not what they stand for",
            where=adapter.source.where,
            hint=f"{way}; or pass --qlora-base original to merge onto the weights as they were"
            " before",
        )

    def _check_digests(
        self,
        digests: Mapping[str, WeightDigest],
        given: ModelWeights,
        adapter: SourceAdapter,
        *,
        tells_all: bool,
    ) -> None:
        """Compares the bytes of a few weights with the checksums that were recorded."""
        comparable = {
            name: entry
            for name, one in digests.items()
            if (entry := given.entries.get(name)) is not None
            and (entry.dtype.name, entry.shape) == (one.dtype, one.shape)
        }
        if not comparable:
            self._unproven.setdefault(adapter.source.position, []).append(_incomparable(digests))
            return
        found = read_digests(given.origin, comparable)
        differing = [name for name, one in found.items() if one != digests[name]]
        if not differing:
            self._unproven.pop(adapter.source.position, None)
            what = "the base" if tells_all else "what was not packed of the base"
            self._notes.append(
                f"{what} is the one that the adapter was trained on, proven by {len(found):,} of"
                " its weights"
            )
            return
        self._refuse_or_tell(
            f"{len(differing):,} of {len(found):,} weights have other checksums than those"
            f" recorded in training: {listed(differing)}",
            given,
            adapter,
        )

    def _trained_biases(self) -> Iterator[str]:
        """Yields what lies with the frozen weights and was trained all the same."""
        for adapter in self._adapters:
            for name in build_table(adapter.found.adapter.tensors).whole:
                if name.endswith(".bias"):
                    yield make_plain_name(name)

    def _compare(
        self,
        trained: ModelWeights,
        given: ModelWeights,
        adapter: SourceAdapter,
        *,
        hidden: Collection[str] = (),
        most: int | None = None,
    ) -> bool:
        """Refuses a given base whose weights are not those trained on; True where they agree."""
        differing, count = differing_weights(trained, given, hidden, most=most)
        if not differing:
            return count > 0
        self._refuse_or_tell(
            f"{len(differing):,} of {count:,} weights differ from those in {trained.location}:"
            f" {listed(differing)}",
            given,
            adapter,
        )
        return False

    def _refuse_or_tell(self, text: str, given: ModelWeights, adapter: SourceAdapter) -> None:
        where = adapter.source.where
        refuse_other_base([text], given.location, where=where, allowed=self._allowed)
        self._notes.append(f"another base is merged onto: {text}")


def _incomparable(digests: Mapping[str, WeightDigest]) -> str:
    dtypes = ", ".join(sorted({one.dtype for one in digests.values()}))
    return (
        f"the checksums that are recorded of the base are those of {dtypes} weights, and prove"
        " nothing of a base of other element types or shapes"
    )
