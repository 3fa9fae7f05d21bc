"""The base that an adapter was trained on: what is recorded of it, and whether a given one is it.

Commits, repositories and bytes are compared. The record of an extracted adapter has checksums of a
few frozen weights, and how the base was packed; `ckptkit.lora.quantized` parses it.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.base_model import BaseSource, NamesOfBase, open_base, take_weights
from ckptkit.adapters.packed_bases import ModelWeights, QuantizedBase, find_packings
from ckptkit.adapters.sources import OpenedAdapter
from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.conversion.source.adapters import read_record_of_base
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.conversion.source.paths import make_absolute, resolve_path
from ckptkit.core.checksums import ChecksumPiece, crc32_of_pieces
from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError, InputError, RefusedError
from ckptkit.core.index import Fqn, Span, TensorEntry
from ckptkit.core.manifest import RUN_FACTS
from ckptkit.core.model_configs import parse_json_object
from ckptkit.core.text import Aside, quote
from ckptkit.engine.casts import Caster
from ckptkit.engine.locate import Locator
from ckptkit.engine.reader import RUN_BYTES, Origin
from ckptkit.lora.changes import QloraBase
from ckptkit.lora.config import LoraSettings
from ckptkit.lora.dialects import build_table, find_linear_shapes, make_plain_name
from ckptkit.lora.quantized import (
    FOUR_BITS,
    BaseIdentity,
    BaseRecord,
    PackedWeight,
    Quantization,
    WeightDigest,
    compare_bases,
    find_packed_weights,
    identify_base,
    parse_recorded_base,
    read_settings,
)
from ckptkit.storage.places import is_url

_LISTED = 3


def find_recorded_base(settings: LoraSettings, checkpoint: OpenedCheckpoint) -> BaseIdentity:
    """Returns the base that an adapter's configuration, or the run that saved it, records."""
    expected = parse_recorded_base(settings)
    path = posixpath.join(checkpoint.folder, RUN_FACTS)
    try:
        size = checkpoint.source.stat(path).size_bytes
    except InputError:
        return expected
    if size > MAX_JSON_BYTES:
        return expected
    facts = parse_json_object(checkpoint.source.read(path, 0, size), where=path)
    recorded = facts.get("base_model")
    if not isinstance(recorded, Mapping):
        return expected
    name, commit = recorded.get("id"), recorded.get("commit_hash")
    return BaseIdentity(
        expected.name or (name if isinstance(name, str) else ""),
        expected.commit or (commit if isinstance(commit, str) else ""),
    )


def open_recorded_base(
    stack: ExitStack, expected: BaseIdentity, base: BaseSource
) -> BaseSource | None:
    """Opens the folder that an adapter records as its base, if it still exists.

    Relative paths can no longer be resolved; the folder that was given is not opened again.
    """
    path = Path(expected.name)
    if is_url(base.opened.location) or not path.is_absolute() or not path.is_dir():
        return None
    if path.samefile(base.opened.location):
        return None
    packed = base.unpacked
    names = NamesOfBase(unpack="keep" if packed is None else packed.asked)
    try:
        return open_base(stack, path, None, names)
    except CkptkitError:
        return None  # a folder that has become something else proves nothing


def compare_weights(
    trained: ModelWeights, given: ModelWeights, hidden: Collection[str], *, most: int | None = None
) -> tuple[list[str], int]:
    """Compares the frozen weights of one base with those of another, bit by bit.

    Where element types differ, the given weights are cast: training may use another type. `hidden`
    names are packed on either side; `most` limits the elements of each. Returns the names that
    differ, and how many were compared.
    """
    readers = ArrayReader(trained.origin), ArrayReader(given.origin)

    def differ(ours: TensorEntry, theirs: TensorEntry) -> bool:
        elements = ours.elements if most is None else min(ours.elements, most)
        step = RUN_BYTES // max(ours.dtype.itemsize, theirs.dtype.itemsize)
        bits = f"u{ours.dtype.itemsize}"
        for start in range(0, elements, step):
            span = Span(start, min(start + step, elements))
            one, other = readers[0].read(ours.key, span), readers[1].read(theirs.key, span)
            if theirs.dtype != ours.dtype:
                cast = np.empty_like(one)
                Caster(theirs.dtype, ours.dtype).cast(other, cast)
                other = cast
            if not np.array_equal(one.view(bits), other.view(bits)):
                return True
        return False

    pairs = {
        name: (ours, theirs)
        for name, ours in trained.entries.items()
        if (theirs := given.entries.get(name)) is not None
        and name not in hidden
        and ours.shape == theirs.shape
        and ours.dtype.kind == theirs.dtype.kind == "float"
    }
    return [name for name, pair in pairs.items() if differ(*pair)], len(pairs)


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


_SAMPLE = 1 << 16  # elements of each weight: two models differ nearly everywhere


def refuse_rewritten_bases(adapters: Sequence[OpenedAdapter], given: BaseSource | None) -> None:
    """Refuses adapters of a base that PEFT changed when it initialized them."""
    is_own = given is None and len(adapters) == 1
    for adapter in adapters:
        settings = adapter.adapter.settings
        if settings.changes_base and not is_own:
            raise RefusedError(
                f"the adapter was initialized with {quote(str(settings.init_lora_weights))},"
                " which writes into the base: merged onto another one it gives another model",
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
        adapters: Sequence[OpenedAdapter],
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
        if self._given is None:
            return
        for adapter in self._adapters:
            expected = find_recorded_base(adapter.adapter.settings, adapter.opened)
            path, config = self._given.opened.path, self._given.config
            given = identify_base(make_absolute(path), config)
            if not given.repository:
                given = identify_base(resolve_path(path), config)
            contradictions, note = compare_bases(expected, given)
            self._refuse_or_note(contradictions, path, adapter)
            recorded = open_recorded_base(self._stack, expected, self._given)
            if recorded is None or not self._compare(
                take_weights(recorded), take_weights(self._given), adapter, most=_SAMPLE
            ):
                self._unproven[adapter.source.position] = [note] if note else []

    def compare(
        self,
        given: ModelWeights,
        trained: ModelWeights | None,
        quantized: QuantizedBase,
        choice: QloraBase | None,
    ) -> None:
        """Compares the given base with the bases that checkpoints contain, or record."""
        if trained is not None:
            tables = [build_table(adapter.adapter.tensors) for adapter in self._adapters]
            whole = [make_plain_name(name) for table in tables for name in table.whole]
            biases = (name for name in whole if name.endswith(".bias"))  # they were trained
            hidden = {*quantized.hidden, *biases}
            if self._compare(trained, given, self._adapters[0], hidden=hidden):
                self._unproven.clear()
        for adapter in self._adapters:
            if adapter.base:
                continue
            record = read_record_of_base(adapter.opened)
            packed, unpacked = record.quantization, self._given and self._given.unpacked
            is_unpacked = packed and unpacked and unpacked.method in packed.kinds
            if packed is not None and not quantized.operands and not is_unpacked:
                self._check_packing(packed, adapter, choice)
            digests = {n: d for n, d in record.digests.items() if n not in quantized.hidden}
            if digests:
                is_whole = quantized.is_proven or not quantized.operands
                self._check_digests(digests, given, adapter, is_whole=is_whole)

    def _check_packing(
        self, packed: Quantization, adapter: OpenedAdapter, choice: QloraBase | None
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
        adapter: OpenedAdapter,
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
            note = f"{what} is the one that the adapter was trained on, proven by"
            self._notes.append(Aside(f"{note} {len(actual):,} of its weights"))
            return
        what = (
            f"{len(differing):,} of {len(actual):,} weights have other checksums than those"
            f" recorded in training: {_list_some(differing)}"
        )
        self._refuse_or_note([what], given.location, adapter)

    def _compare(
        self,
        trained: ModelWeights,
        given: ModelWeights,
        adapter: OpenedAdapter,
        *,
        hidden: Collection[str] = (),
        most: int | None = None,
    ) -> bool:
        """Refuses a given base whose weights are not those trained on; True where they agree."""
        differing, count = compare_weights(trained, given, hidden, most=most)
        if not differing:
            return count > 0
        what = (
            f"{len(differing):,} of {count:,} weights differ from those in {trained.location}:"
            f" {_list_some(differing)}"
        )
        self._refuse_or_note([what], given.location, adapter)
        return False

    def _refuse_or_note(self, reasons: list[str], base: str, adapter: OpenedAdapter) -> None:
        """Refuses a base that is proven not to be the one that was trained on."""
        if reasons and not self._allowed:
            raise RefusedError(
                f"the base {base} is not the one that the adapter was trained on:"
                f" {'; '.join(reasons)}",
                where=adapter.source.where,
                hint="pass the base that was trained on, or --allow-other-base to merge onto this"
                " one all the same",
            )
        self._notes += [f"merged onto another base: {text}" for text in reasons]


_MOST = 8  # weights: two models differ nearly everywhere
_KIND = "adapter"


def make_base_record(found: OpenedAdapter) -> BaseRecord:
    """Makes the record of an adapter's base; of its bytes, only quantization states are read.

    Where the adapter's folder has a record of a base that it does not hold, that one is kept.
    """
    earlier = BaseRecord() if found.base else read_record_of_base(found.opened)
    shapes = find_linear_shapes(found.adapter)
    packed = find_packed_weights({str(name): entry for name, entry in found.base.items()}, shapes)
    quantization = _find_quantization(found, packed, shapes)
    frozen = {
        name: found.base[Fqn(name)]
        for name in shapes
        if name in found.base and name not in packed and not found.adapter.settings.changes_base
    }
    if packed and not frozen:  # the embedding and the norms still identify the model
        frozen = {
            str(name): entry
            for name, entry in found.base.items()
            if name.endswith(".weight")  # biases may have been trained
            and name not in packed
            and entry.dtype.kind == "float"
            and entry.shape[1:] != (1,)  # which packed numbers may have
        }
    digests = collect_digests(Origin(_KIND, found.opened.source, found.opened.index), frozen)
    return BaseRecord(digests or earlier.digests, quantization or earlier.quantization)


def _find_quantization(
    found: OpenedAdapter, packed: Mapping[str, PackedWeight], shapes: Iterable[str]
) -> Quantization | None:
    config = found.folders.config(found.folders.choose(allow_code=False)[0])
    options = (config or {}).get("quantization_config")
    options = options if isinstance(options, Mapping) else {}
    four_bits = read_settings({"quantization_config": options}).quant_type or "4 bits"
    kinds = []
    for weight in packed.values():
        states = [kind for kind in weight.companions if kind.startswith("quant_state.")]
        kind = states[0].rpartition("__")[2] if states else four_bits
        kinds.append(kind if weight.bits == FOUR_BITS else "int8")
    checkpoint = make_absolute(found.opened.path)
    if kinds:
        origin = Origin(_KIND, found.opened.source, found.opened.index)
        entries = {n: weight.packed for n, weight in packed.items() if weight.bits == FOUR_BITS}
        crcs = {name: digest.crc32 for name, digest in collect_digests(origin, entries).items()}
        base = {str(name): entry for name, entry in found.base.items()}
        holder = ModelWeights(origin, base, config, found.opened.source.location)
        packings = find_packings(holder, packed, read_settings(config), crcs)
        return Quantization(tuple(sorted(set(kinds))), len(kinds), checkpoint, packings)
    if not options or options.get("dequantize") or any(name in found.base for name in shapes):
        return None  # weights that were saved unpacked were used unpacked
    kind = str(options.get("quant_method", "bitsandbytes"))
    kind = four_bits if options.get("load_in_4bit") else kind
    kind = "int8" if options.get("load_in_8bit") else kind
    return Quantization((kind,), 0, checkpoint)


def collect_digests(origin: Origin, entries: Mapping[str, TensorEntry]) -> dict[str, WeightDigest]:
    """Returns digests of up to 8 weights, from the checksums that are stored with their bytes.

    Weights without checksums are left out.
    """
    locator = Locator(origin.source, origin.index)
    digests = {}
    for name, entry in select_evenly(entries):
        crc = _join_crc32(locator, entry)
        if crc is not None:
            digests[name] = WeightDigest(entry.dtype.name, entry.shape, crc)
    return digests


def read_digests(origin: Origin, entries: Mapping[str, TensorEntry]) -> dict[str, WeightDigest]:
    """Returns digests of weights, computed from their bytes."""
    reader = ArrayReader(origin)
    digests = {}
    for name, entry in entries.items():
        crc = 0
        for block in reader.read_blocks(entry):
            crc = crc32(block.view(np.uint8).data, crc)
        digests[name] = WeightDigest(entry.dtype.name, entry.shape, crc)
    return digests


def select_evenly(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, TensorEntry]]:
    """Yields up to 8 of some tensors, at even distances."""
    names = list(entries)
    count = min(_MOST, len(names))
    for number in range(count):
        name = names[number * len(names) // count]
        yield name, entries[name]


def _join_crc32(locator: Locator, entry: TensorEntry) -> int | None:
    """Joins the checksums of a tensor's chunks, if each is a run of elements with a checksum."""
    if entry.rounded_from is not None or entry.derivation is not None:
        return None
    pieces: list[ChecksumPiece] = []
    seen = set()
    row_elements = math.prod(entry.shape[1:])
    for row, chunk in enumerate(entry.chunks):
        place = chunk.place
        if not isinstance(place, Span):
            if place.sizes[1:] != entry.shape[1:]:
                return None  # its elements are not consecutive
            first = (*place.offsets, 0)[0] * row_elements
            place = Span(first, first + (*place.sizes, 1)[0] * row_elements)
        start, length = (
            elements * entry.dtype.itemsize for elements in (place.start, place.stop - place.start)
        )
        if not length or (start, length) in seen:
            continue  # a replica
        seen.add((start, length))
        try:
            at = locator.locate(entry, entry.chunks, row)
        except InputError:
            return None  # a damaged base is no part of the adapter
        is_alone = at.origin == at.start and at.stop - at.start == length
        if at.crc32 is None or not is_alone or at.strides is not None:
            return None
        pieces.append((start, length, at.crc32))
    try:
        return crc32_of_pieces(pieces, entry.size_bytes)
    except ValueError:  # overlapping chunks
        return None
