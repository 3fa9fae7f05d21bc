"""Whether a given base is the one that was trained on: by commits, repositories and bytes."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.base_records import read_digests
from ckptkit.adapters.merge.base_model import BaseSource, open_base, take_weights
from ckptkit.adapters.merge.report import SourceAdapter
from ckptkit.adapters.quantized.bases import ModelWeights, QuantizedBase
from ckptkit.conversion.source.adapters import read_record_of_base
from ckptkit.conversion.source.open import OpenedCheckpoint, make_absolute, resolve_path
from ckptkit.core.errors import CkptkitError, InputError, RefusedError
from ckptkit.core.index import Span
from ckptkit.core.manifest import RUN_FACTS
from ckptkit.core.model_configs import parse_json_object
from ckptkit.engine.casts import Caster
from ckptkit.engine.reader import RUN_BYTES
from ckptkit.lora.changes import QloraBase
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


def find_recorded_base(settings: LoraSettings, checkpoint: OpenedCheckpoint) -> RecordedBase:
    """Returns the base that an adapter's configuration, or the run that saved it, records."""
    expected = parse_recorded_base(settings)
    recorded = _read_run_facts(checkpoint).get("base_model")
    if not isinstance(recorded, Mapping):
        return expected
    name, commit = recorded.get("id"), recorded.get("commit_hash")
    return RecordedBase(
        expected.name or (name if isinstance(name, str) else ""),
        expected.commit or (commit if isinstance(commit, str) else ""),
    )


def _read_run_facts(checkpoint: OpenedCheckpoint) -> Mapping[str, Any]:
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
    """Compares the recorded base with the one that was given; `allowed` accepts another base."""
    path = base.opened.path
    given = identify_base(make_absolute(path), base.config)
    if not given.repository:
        given = identify_base(resolve_path(path), base.config)
    comparison = compare_bases(expected, given)
    if comparison.contradictions:
        refuse_other_base(comparison.contradictions, path, where=where, allowed=allowed)
    return comparison


def refuse_other_base(reasons: Collection[str], path: str, *, where: str, allowed: bool) -> None:
    """Refuses a base that is proven not to be the one that was trained on."""
    if not allowed:
        raise RefusedError(
            f"the base {path} is not the one that the adapter was trained on: {'; '.join(reasons)}",
            where=where,
            hint=_ANYWAY,
        )


def open_recorded_base(
    stack: ExitStack, expected: RecordedBase, base: BaseSource
) -> BaseSource | None:
    """Opens the folder that an adapter records as its base, if it still exists.

    Relative paths can no longer be resolved; the folder that was given is not opened again.
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


def compare_weights(
    trained: ModelWeights, given: ModelWeights, hidden: Collection[str], *, most: int | None = None
) -> tuple[list[str], int]:
    """Compares the frozen weights of one base with those of another, bit by bit.

    Where element types differ, the given weights are cast: training may use another type.

    Args:
        trained: The weights that the adapter was trained on.
        given: The base that was given.
        hidden: Names that are packed on either side.
        most: How many elements of each are compared; None for all.

    Returns:
        The names of those that differ, and how many were compared.
    """
    readers = ArrayReader(trained.origin), ArrayReader(given.origin)
    count, differing = 0, []
    for name, ours in trained.entries.items():
        theirs = given.entries.get(name)
        if theirs is None or name in hidden or ours.shape != theirs.shape:
            continue
        if not ours.dtype.kind == theirs.dtype.kind == "float":
            continue
        count += 1
        elements = ours.elements if most is None else min(ours.elements, most)
        step = RUN_BYTES // max(ours.dtype.itemsize, theirs.dtype.itemsize)
        spans = (Span(at, min(at + step, elements)) for at in range(0, elements, step))
        if not all(
            _are_equal(
                readers[0].read(trained.origin.name, ours.key, span),
                readers[1].read(given.origin.name, theirs.key, span),
                Caster(theirs.dtype, ours.dtype) if theirs.dtype != ours.dtype else None,
            )
            for span in spans
        ):
            differing.append(name)
    return differing, count


def _are_equal(ours: NDArray[Any], theirs: NDArray[Any], caster: Caster | None) -> bool:
    """Compares bit patterns, after a cast where element types differ."""
    if caster is not None:
        cast = np.empty_like(ours)
        caster.cast(theirs, cast)
        theirs = cast
    bits = f"u{ours.dtype.itemsize}"
    return np.array_equal(ours.view(bits), theirs.view(bits))


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


_SAMPLE = 1 << 16  # elements of each weight: two models differ nearly everywhere


def refuse_rewritten_bases(adapters: Sequence[SourceAdapter], given: BaseSource | None) -> None:
    """Refuses adapters of a base that PEFT changed when it initialized them."""
    is_own = given is None and len(adapters) == 1
    for adapter in adapters:
        settings = adapter.found.adapter.settings
        if settings.changes_base and not is_own:
            raise RefusedError(
                f"the adapter was initialized with {settings.init_lora_weights!r}, which writes"
                " into the base: merged onto another one it gives another model",
                where=adapter.source.where,
                hint="merge the checkpoint of the run itself, without --base, if it holds the"
                " base; or let PEFT save the adapter with"
                " path_initial_model_for_weight_conversion",
            )


class BaseChecks:
    """Compares the base that was given with what is known of the one that was trained on."""

    def __init__(
        self,
        stack: ExitStack,
        adapters: Sequence[SourceAdapter],
        given: BaseSource | None,
        *,
        allowed: bool,
    ) -> None:
        """Takes adapters in the order of merging; `stack` closes bases that are opened here."""
        self._stack = stack
        self._adapters = adapters
        self._given = given
        self._allowed = allowed
        self._notes: list[str] = []
        self._is_onto_originals = False
        self._unproven: dict[int, list[str]] = {}  # by position of the adapter

    def notes(self, quantized: QuantizedBase) -> list[str]:
        """Returns messages for the user, with those on packed weights."""
        doubts = () if quantized.is_proven else self._unproven.values()
        unproven = [note for notes in doubts for note in notes]
        # Merged onto originals, no packed weight was seen.
        packed = () if self._is_onto_originals else quantized.notes
        return [*self._notes, *unproven, *packed]

    def check_identity(self) -> None:
        """Compares names, commits, and the recorded folders."""
        if self._given is None:
            return
        for adapter in self._adapters:
            where = adapter.source.where
            expected = find_recorded_base(adapter.found.adapter.settings, adapter.found.opened)
            comparison = check_identity(expected, self._given, where=where, allowed=self._allowed)
            recorded = open_recorded_base(self._stack, expected, self._given)
            if recorded is None or not self._compare(
                take_weights(recorded),
                take_weights(self._given),
                adapter,
                most=_SAMPLE,
            ):
                self._unproven[adapter.source.position] = list(comparison.notes)
            self._notes += [
                f"merged onto another base: {text}" for text in comparison.contradictions
            ]

    def compare(
        self,
        given: ModelWeights,
        trained: ModelWeights | None,
        quantized: QuantizedBase,
        choice: QloraBase | None,
    ) -> None:
        """Compares the given base with the bases that checkpoints contain, or record.

        Args:
            given: The base that was given, by the names of the live model.
            trained: The base in the first adapter's checkpoint, or None.
            quantized: The packed weights on both sides.
            choice: `--qlora-base`, None by default.
        """
        if trained is not None:
            hidden = {*quantized.hidden, *self._list_trained_biases()}
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
                is_whole = quantized.is_proven or not quantized.operands
                self._check_digests(digests, given, adapter, is_whole=is_whole)

    def _check_packing(
        self, packed: Quantization, adapter: SourceAdapter, choice: QloraBase | None
    ) -> None:
        """Refuses to merge onto the originals of packed weights, unless `choice` asks for it."""
        kinds = ", ".join(packed.kinds)
        if choice == "original":
            self._is_onto_originals = True
            self._notes.append(
                f"the adapter was trained on packed weights ({kinds}) and is merged onto their"
                " originals, as requested: not exactly the function that was trained"
            )
            return
        way = (
            f"merge from the checkpoint itself ({packed.checkpoint}), which holds them"
            if packed.weights
            else "pass the base as it was saved packed"
        )
        count = f"{packed.weights:,} " if packed.weights else ""
        raise RefusedError(
            f"the adapter was trained on {count}packed weights ({kinds}), and those of --base are"
            " not their values",
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
        is_whole: bool,
    ) -> None:
        """Compares the bytes of a few weights with the checksums that were recorded."""
        comparable = {
            name: entry
            for name, digest in digests.items()
            if (entry := given.entries.get(name)) is not None
            and (entry.dtype.name, entry.shape) == (digest.dtype, digest.shape)
        }
        if not comparable:
            dtypes = ", ".join(sorted({digest.dtype for digest in digests.values()}))
            self._unproven.setdefault(adapter.source.position, []).append(
                f"the recorded checksums of the base are those of {dtypes} weights, and prove"
                " nothing about a base of other element types or shapes"
            )
            return
        actual = read_digests(given.origin, comparable)
        differing = [name for name, digest in actual.items() if digest != digests[name]]
        if not differing:
            self._unproven.pop(adapter.source.position, None)
            what = "the base" if is_whole else "what was not packed of the base"
            self._notes.append(
                f"{what} is the one that the adapter was trained on, proven by {len(actual):,} of"
                " its weights"
            )
            return
        self._refuse_or_note(
            f"{len(differing):,} of {len(actual):,} weights have other checksums than those"
            f" recorded in training: {_list_some(differing)}",
            given,
            adapter,
        )

    def _list_trained_biases(self) -> Iterator[str]:
        """Yields biases of the base that were trained."""
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
        differing, count = compare_weights(trained, given, hidden, most=most)
        if not differing:
            return count > 0
        self._refuse_or_note(
            f"{len(differing):,} of {count:,} weights differ from those in {trained.location}:"
            f" {_list_some(differing)}",
            given,
            adapter,
        )
        return False

    def _refuse_or_note(self, text: str, given: ModelWeights, adapter: SourceAdapter) -> None:
        where = adapter.source.where
        refuse_other_base([text], given.location, where=where, allowed=self._allowed)
        self._notes.append(f"merged onto another base: {text}")
