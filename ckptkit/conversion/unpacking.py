"""Makes of a checkpoint with packed weights one that has their elements, unpacked when read.

The index keeps the packed tensors, as some that belong to no model, and gets each weight under its
name, with its shape. All that follows, such as casts, names and layouts, sees plain weights.
"""

from __future__ import annotations

import itertools
import json
import math
import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import InputError, RefusedError
from ckptkit.core.index import ChunkTable, Fqn, Key, Shape, Span, TensorEntry
from ckptkit.core.text import Aside, counted, join_first
from ckptkit.engine.kernels import StoredOperand
from ckptkit.engine.packed_numbers import Grid, UnpackedOperand, make_table
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.number_formats import BITSANDBYTES, METHODS, PackedGroup, Packing, find_packing
from ckptkit.plan.packed_forms import PackedForm, find_form
from ckptkit.plan.packing_settings import (
    HEADER,
    WHOLE,
    Blocks,
    Settings,
    drop_quantization,
    find_method,
    find_quantization,
    read_settings,
)
from ckptkit.plan.plan import SOURCE
from ckptkit.plan.weight_kinds import describe_stored

if TYPE_CHECKING:
    from ckptkit.engine.bitsandbytes import EightBitWeight, FourBitWeight

_MODELOPT = "hf_quant_config.json"
_WORD_BITS = 32
_SIZES = (2, 4, 8)  # bits of numbers that do not cross the bytes of a word
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a one in each number of a word
_LISTED = 3
_RESULTS = ("float32", "float16", "bfloat16")
_PUBLISHED = "pass the configuration that was published with these files with --config"


class StoredForm(Struct, frozen=True):
    """How an unpacked weight is stored."""

    group: PackedGroup
    shape: Shape  # of the weight
    form: PackedForm | None  # None for one that nothing is packed in


class Unpacked(Struct, frozen=True):
    """A model with unpacked weights."""

    checkpoint: OpenedCheckpoint
    config: Mapping[str, Any] | None  # which says nothing of packed weights
    asked: str  # the element type
    notes: Sequence[str] = ()
    method: str = ""  # `quant_method` of the configuration
    stored: Mapping[Key, StoredForm] = {}  # by the unpacked weight; empty where none is packed
    unused: Sequence[TensorEntry] = ()  # what only packed weights need


def unpack_checkpoint(
    checkpoint: OpenedCheckpoint,
    config: Mapping[str, Any] | None,
    asked: str,
    *,
    methods: Collection[str] = METHODS,
) -> Unpacked:
    """Unpacks what the schemes of `ckptkit.plan.number_formats` have packed; else changes nothing.

    `asked`: the element type that the user wants. `methods`: whose schemes are unpacked.
    """
    options = find_quantization(config) or _read_modelopt(checkpoint)
    method = find_method(options)
    if options is None or method not in methods or asked not in _RESULTS:
        return Unpacked(checkpoint, config, asked)
    index, where = checkpoint.index, checkpoint.path
    header = {path[1]: text for path, text in index.values.items() if path[:1] == (HEADER,)}
    options = {**options, HEADER: header}
    trees: dict[str, dict[str, TensorEntry]] = {}
    for entry in index.of_part("model"):
        if checkpoint.select in {None, entry.tree}:
            trees.setdefault(entry.tree, {})[entry.name] = entry
    tensors = dict(index.tensors)
    found: dict[Key, StoredForm] = {}
    unused: list[TensorEntry] = []
    for entries in trees.values():
        packing = find_packing(entries, method, location=where)
        if not packing.groups:
            continue
        stored = [entry for group in packing.groups for entry in group.entries]
        refuse_problems(index, stored, where)
        _refuse_split(stored, where)
        read = _make_reader(checkpoint)
        shapes = _read_shapes(packing, read, where)
        for group in packing.groups:
            settings, form = read_settings(options, group, location=where), None
            if method == BITSANDBYTES:
                made = _unpack_bitsandbytes(group, read, config, where)
            else:
                weight = _Weight(group, settings, shapes.get(group.name), asked, where)
                made = weight.make()
                form = find_form(group.scheme, settings.calls, weight.blocks, made.shape)
            tensors[made.key] = made
            found[made.key] = StoredForm(group, made.shape, form)
        for entry in (*stored, *packing.unused):
            tensors[entry.key] = replace(entry, part="other")
        unused += packing.unused
    if not found:
        return Unpacked(checkpoint, config, asked)
    titles = dict.fromkeys(one.group.scheme.title for one in found.values())
    notes: list[str] = [Aside(f"{counted(len(found), 'weight')} unpacked: {', '.join(titles)}")]
    if unused:
        listed = join_first([repr(str(entry.name)) for entry in unused], len(unused), _LISTED)
        notes.append(f"left out, as unpacked weights need none of them: {listed}")
    opened = replace(checkpoint, index=replace(index, tensors=tensors))
    plain = None if config is None else drop_quantization(config)
    return Unpacked(opened, plain, asked, notes, method, found, unused)


def unpack_to_measure(
    checkpoint: OpenedCheckpoint, config: Mapping[str, Any] | None
) -> OpenedCheckpoint:
    """Unpacks weights as far as possible without rounding; refuses those that stay packed."""
    checkpoint = unpack_checkpoint(checkpoint, config, "float32").checkpoint
    rows = [(str(e.name), e.shape, e.dtype.name) for e in checkpoint.index.of_part("model")]
    packed = (n for n, one in describe_stored(rows).items() if one.is_packed)
    tiny = (name for name, _, dtype in rows if dtype.startswith("float8"))
    name = next(itertools.chain(packed, tiny), None)
    if name is not None:
        said = find_quantization(config)
        method = "no configuration says how" if said is None else f"as {find_method(said)!r}"
        raise RefusedError(
            f"tensor {name!r} belongs to a packed weight ({method}), which is not unpacked",
            where=checkpoint.path,
            hint="pass with --base the configuration that says how weights are packed, or leave"
            " --unpacked out"
            if said is None
            else "leave --unpacked out: numbers are those that are stored then",
        )
    return checkpoint


def name_packing(
    checkpoint: OpenedCheckpoint,
    config: Mapping[str, Any] | None,
    entries: Iterable[TensorEntry],
) -> dict[str, int]:
    """Returns how many weights each scheme has packed, by the title of the scheme."""
    method = find_method(find_quantization(config) or _read_modelopt(checkpoint))
    trees: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries:
        if entry.part == "model":
            trees.setdefault(entry.tree, {})[entry.name] = entry
    return dict(
        Counter(
            group.scheme.title
            for tensors in trees.values()
            for group in find_packing(tensors, method, location=checkpoint.path).groups
        )
    )


def _read_modelopt(checkpoint: OpenedCheckpoint) -> Mapping[str, Any] | None:
    """Returns what ModelOpt says in a file of its own; None where there is none."""
    path = posixpath.join(checkpoint.folder, _MODELOPT)
    try:
        size = min(checkpoint.source.stat(path).size_bytes, MAX_JSON_BYTES)
        said = json.loads(checkpoint.source.read(path, 0, size))["quantization"]
    except (InputError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return {**said, "quant_method": "modelopt"} if isinstance(said, dict) else None


def _refuse_split(entries: Sequence[TensorEntry], where: str) -> None:
    """Refuses shards: nothing says whether blocks were counted before or after the cut."""
    for entry in entries:
        full = entry.chunks.elements() > 0
        places = np.hstack([entry.chunks.offsets[full], entry.chunks.sizes[full]])
        if len(np.unique(places, axis=0)) > 1:
            raise RefusedError(
                f"tensor {entry.name!r} is packed and split over {len(places):,} pieces, as by"
                " tensor parallelism; its blocks may have been counted in each piece",
                where=where,
                hint="take the packed model as it was published, in whole tensors",
            )


def _make_reader(checkpoint: OpenedCheckpoint) -> Callable[[TensorEntry], bytes]:
    """Returns what reads small tensors."""
    reader = TensorReader(Origin(SOURCE, checkpoint.source, checkpoint.index))

    def read(entry: TensorEntry) -> bytes:
        data = bytearray(entry.size_bytes)
        reader.fill(entry.key, Span(0, entry.elements), memoryview(data))
        return bytes(data)

    return read


def _read_shapes(
    packing: Packing, read: Callable[[TensorEntry], bytes], where: str
) -> dict[str, Shape]:
    """Returns the shapes that are stored with weights."""
    stored = {
        group.name: group.companions["shape"]
        for group in packing.groups
        if "shape" in group.companions
    }
    shapes = {}
    for name, entry in stored.items():
        if entry.dtype.kind != "int" or entry.shape not in {(2,), (3,)}:
            raise RefusedError(
                f"tensor {entry.name!r} is {entry.dtype.name} of shape {entry.shape}, expected the"
                " integers of a shape",
                where=where,
                hint="the file is damaged: download it again",
            )
        shapes[name] = tuple(np.frombuffer(read(entry), numpy_dtype(entry.dtype)).tolist())
    return shapes


def _unpack_bitsandbytes(
    group: PackedGroup,
    read: Callable[[TensorEntry], bytes],
    config: Mapping[str, Any] | None,
    where: str,
) -> TensorEntry:
    from ckptkit.engine.bitsandbytes import unpack_by_companions  # few models need these
    from ckptkit.lora.changes import find_model_types
    from ckptkit.lora.inference import is_conv1d
    from ckptkit.lora.quantized import find_packed_weights

    weight = find_packed_weights({str(e.name): e for e in group.entries}, {}).get(group.name)
    if weight is None:
        raise RefusedError(
            f"tensor {group.name!r} is {group.packed.dtype.name} of shape {group.packed.shape},"
            " expected a matrix",
            where=where,
            hint="the file is damaged: download it again",
        )
    if is_conv1d(group.name.removesuffix(".weight"), find_model_types(config)):
        raise RefusedError(
            f"weight {group.name!r} was turned over before it was packed, as its layer has its"
            " inputs in rows: no library turns it back",
            where=where,
            hint="take the model that was not packed",
        )
    operand, shape, _ = unpack_by_companions(weight, read, origin=SOURCE, location=where)
    return _make_entry(group, operand, shape)


def _make_entry(
    group: PackedGroup, operand: UnpackedOperand | FourBitWeight | EightBitWeight, shape: Shape
) -> TensorEntry:
    packed, name = group.packed, Fqn(group.name)
    return TensorEntry(
        key=Key(f"{packed.key} unpacked"),
        key_path=(*packed.key_path[:-1], name),
        name=name,
        tree=packed.tree,
        part="model",
        dtype=operand.dtype,
        shape=shape,
        chunks=ChunkTable.of((), len(shape)),
        derivation=operand,
        stored_names=tuple(one.name for one in group.entries if one.name != name),
    )


class _Weight:
    """Makes the operand of one packed weight; every contradiction is refused.

    `blocks`: the rows and columns that share a scale, once it is made.
    """

    blocks: Blocks

    def __init__(
        self,
        group: PackedGroup,
        settings: Settings,
        shape: Shape | None,
        asked: str,
        where: str,
    ) -> None:
        self._group, self._settings, self._where = group, settings, where
        self._scheme, self._asked, self._said = group.scheme, asked, shape
        packed = group.packed
        kept = len(packed.shape) - self._scheme.columns
        if kept < 1:
            raise self._refuse(packed, "is no matrix, nor some of them")
        *outer, self._high = packed.shape[:kept]
        self._outer, self._width = tuple(outer), math.prod(packed.shape[kept:])

    def make(self) -> TensorEntry:
        scheme, packed, companions = self._scheme, self._group.packed, self._group.companions
        number = self._find_number()
        codes = Grid(
            *(_stored(packed), self._high, self._width, self._width, number),
            packs_rows=scheme.packs_rows,
            order=scheme.order,
        )
        high = codes.held if scheme.packs_rows else 1
        rows, columns = self._fit_shape(self._high * high, self._width * codes.held // high)
        codes = replace(codes, rows=rows, columns=columns)
        scales, self.blocks = self._find_scales(rows, columns)
        shape = (*self._outer, *((columns, rows) if scheme.is_transposed else (rows, columns)))
        dtype = self._result()
        total, index = companions.get("total"), companions.get("index")
        if total is not None and total.elements != 1:
            raise self._refuse(total, "has more than one element")
        axis = 0 if scheme.is_transposed else 1
        if index is not None and index.shape != ((rows, columns)[axis],):
            raise self._refuse(index, f"has shape {index.shape}, expected {(rows, columns)[axis]}")
        zeros, offset = self._find_zeros(scales, number)
        operand = UnpackedOperand(
            *(codes, scales, self.blocks, shape, dtype, self._where, zeros, offset),
            total=None if total is None else _stored(total),
            total_divides=scheme.total_divides,
            index=None if index is None else _stored(index),
            index_axis=axis,
            is_transposed=scheme.is_transposed,
            rounds_scales=scheme.result == "asked",
        )
        return _make_entry(self._group, operand, shape)

    def _find_number(self) -> str:
        """Returns the format of the numbers; of several sizes the one that fits the shape."""
        number = self._scheme.numbers[self._group.packed.dtype.name]
        if "{bits}" not in number:
            return number
        bits = self._settings.bits
        if self._said is not None:
            wide = self._said[-1]
            bits = tuple(one for one in bits if -(-wide * one // _WORD_BITS) == self._width)
        if not bits:
            raise self._refuse(
                self._group.packed,
                f"has {self._width:,} words in a row, which {self._said} in"
                f" {' or '.join(map(str, self._settings.bits))} bits do not fill",
            )
        if bits[0] not in _SIZES:
            raise self._refuse(self._group.packed, f"has numbers of {bits[0]} bits: not modelled")
        return number.format(bits=bits[0])

    def _fit_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the rows and columns of the weight; the last word may be partly empty."""
        if self._said is None:
            return rows, columns
        *outer, high, wide = self._said
        if tuple(outer) != self._outer or high != rows or not 0 < wide <= columns:
            raise self._refuse(
                self._group.packed,
                f"has room for {rows:,} x {columns:,} numbers, but"
                f" {self._group.companions['shape'].name!r} says {self._said}",
            )
        return high, wide

    def _find_zeros(self, scales: Grid, number: str) -> tuple[Grid | None, float]:
        """Returns the zero points of blocks, and what is subtracted from all numbers."""
        scheme, entry = self._scheme, self._group.companions.get("zero")
        bits = 8 // make_table(number).shape[1]
        offset = float(1 << (bits - 1)) if scheme.is_centred else 0.0
        if entry is None:
            return None, offset
        if entry.shape == self._group.companions["scale"].shape:
            zeros = replace(scales, stored=_stored(entry), number="")
            return zeros, offset
        # Packed as the weight is, in the other direction.
        held = _WORD_BITS // bits
        packs_rows = not scheme.packs_rows and scheme.order == "plain"
        shape = (
            (-(-scales.rows // held), scales.columns)
            if packs_rows
            else (scales.rows, -(-scales.columns // held))
        )
        if entry.dtype.itemsize * 8 != _WORD_BITS or entry.shape != (*self._outer, *shape):
            raise self._refuse(
                entry, f"is {entry.dtype.name} of shape {entry.shape}, expected int32 {shape}"
            )
        return (
            Grid(
                *(_stored(entry), scales.rows, scales.columns, shape[1], number),
                packs_rows=packs_rows,
                order=scheme.order,
                added=_ONES[bits] if self._settings.is_one_less else 0,
            ),
            0.0,
        )

    def _find_scales(self, rows: int, columns: int) -> tuple[Grid, Blocks]:
        """Returns the scales of blocks, and the size of a block."""
        entry, expected = self._group.companions["scale"], []
        number = self._scheme.scales.get(entry.dtype.name, "")
        if not number and (entry.dtype.kind != "float" or entry.dtype.itemsize == 1):
            raise self._refuse(entry, f"is {entry.dtype.name}, which is no type of scales")
        for high, wide in self._settings.blocks:
            block = high or max(1, rows), wide or max(1, columns)
            grid = -(-rows // block[0]), -(-columns // block[1])
            shapes = {(*self._outer, *grid)}
            if wide == WHOLE:
                shapes |= {(*self._outer, grid[0])}
            if high == wide == WHOLE:
                shapes |= {self._outer, (), (1,), (1, 1)}
            if entry.shape in shapes:
                self._check_division(rows, columns, block)
                is_shared = math.prod(entry.shape) == math.prod(grid)
                return Grid(_stored(entry), *grid, grid[1], number, is_shared=is_shared), block
            expected.append(min(shapes, key=lambda shape: -len(shape)))
        shown = " or ".join(map(str, expected))
        raise self._refuse(entry, f"has shape {entry.shape}, expected {shown}")

    def _check_division(self, rows: int, columns: int, block: Blocks) -> None:
        """Refuses a group that ends short, but of blocks of rows and columns."""
        for size, along, across in ((columns, *block[::-1]), (rows, *block)):
            if across == 1 and size % along and not self._scheme.has_rest:
                raise self._refuse(
                    self._group.packed,
                    f"has {size:,} numbers in a line, which blocks of {along} do not divide",
                )

    def _result(self) -> DType:
        result = self._scheme.result
        if result == "asked":
            result = self._asked
        elif result == "scale":
            result = self._group.companions["scale"].dtype.name
        return BY_NAME[result]

    def _refuse(self, entry: TensorEntry, problem: str) -> RefusedError:
        return RefusedError(
            f"tensor {entry.name!r} {problem} ({self._scheme.title})",
            where=self._where,
            hint=_PUBLISHED,
        )


def _stored(entry: TensorEntry) -> StoredOperand:
    return StoredOperand(SOURCE, entry.key, entry.dtype)
