"""A model before and after training, compared tensor by tensor, and changes as low-rank products.

Tensors are read from both sides in blocks. Small matrices are decomposed exactly. For the others a
subspace with the largest singular vectors is found by random projection and power iterations,
which takes seconds where LAPACK takes minutes. The error is that of the factors as written.

Source: Halko, Martinsson, Tropp, "Finding structure with randomness" (2011), algorithms 4.4
and 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.adapters.merge.base_model import (
    BaseSource,
    NamesOfBase,
    convert_names,
    open_base,
    place_on_disk,
)
from ckptkit.conversion.names_on_disk import find_disk_names
from ckptkit.conversion.source.open import OpenedCheckpoint, is_folder, open_checkpoint
from ckptkit.conversion.source.read import find_ties
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import AdapterError, RefusedError, UnsupportedError
from ckptkit.core.index import Fqn, Span, TensorEntry
from ckptkit.engine.casts import Caster, overflow_error
from ckptkit.engine.outcome import BytesWritten, Listener
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.hub_names.disk_tensors import HubNames
from ckptkit.options import ConsolidateRequest, matches
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.plan import SOURCE, name_order
from ckptkit.plan.selection import select_model
from ckptkit.plan.ties import find_absent_tied_names
from ckptkit.plan.weight_kinds import (
    PACKED_WEIGHT,
    find_adapter,
    looks_packed,
    own_adapters,
)
from ckptkit.storage.places import PathLike, place_of

Matrix = NDArray[np.float32]
EXACT = 512
"""Up to this many rows or columns, whichever are fewer, a matrix is decomposed exactly."""

_SEED = 0x5EED  # the same factors in every run
_MORE = 16  # further directions, which make the last wanted ones exact
_ROUNDS = 12
_SETTLED = 1e-5  # of the energy: a round that adds less is the last
_BLOCK_ELEMENTS = 1 << 20


class LowRankFactors(Struct, frozen=True):
    """A product `up @ down` of low rank.

    Attributes:
        up: float32, [rows, rank].
        down: float32, [rank, columns].
    """

    up: Matrix
    down: Matrix


def truncate_svd(matrix: Matrix, rank: int) -> LowRankFactors:
    """Returns the factors of a rank whose product is nearest to a matrix.

    The singular values are shared evenly between the two, as in mergekit. The same matrix has the
    same factors in every run on one machine; their signs are fixed.

    Args:
        matrix: float32, [rows, columns], finite.
        rank: At most the smaller side of the matrix.
    """
    rows, columns = matrix.shape
    if rows < columns:  # the side that is projected is the longer one
        turned = truncate_svd(matrix.T, rank)
        return LowRankFactors(
            np.ascontiguousarray(turned.down.T), np.ascontiguousarray(turned.up.T)
        )
    wanted = rank + _MORE
    if columns <= EXACT or 2 * wanted >= columns:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
    else:
        basis = _find_range(matrix, wanted, rank)
        inner, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ inner
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    # A decomposition leaves signs open: the largest element of each right vector is positive.
    signs = np.sign(np.take_along_axis(right, np.abs(right).argmax(axis=1)[:, None], axis=1))
    signs[signs == 0] = 1
    root = np.sqrt(values)
    return LowRankFactors(left * signs.T * root, right * signs * root[:, None])


def _find_range(matrix: Matrix, wanted: int, rank: int) -> Matrix:
    """Returns an orthonormal basis, [rows, wanted], of the strongest part of a matrix's range."""
    random = np.random.Generator(np.random.PCG64(_SEED))
    start = random.standard_normal((matrix.shape[1], wanted), np.float32)
    basis = np.linalg.qr(matrix @ start)[0]
    total, before = compute_squared_norm(matrix), 0.0
    for _ in range(_ROUNDS):
        back, triangle = np.linalg.qr(matrix.T @ basis)
        energy = float(np.sum(np.linalg.svd(triangle, compute_uv=False)[:rank] ** 2, dtype=float))
        if energy - before <= _SETTLED * total:
            break
        before = energy
        basis = np.linalg.qr(matrix @ back)[0]
    return basis


def compute_squared_norm(matrix: NDArray[Any]) -> float:
    rows, total = _rows_at_once(matrix), 0.0
    for start in range(0, len(matrix), rows):
        wide = matrix[start : start + rows].astype(np.float64)
        total += float(np.vdot(wide, wide))
    return total


def compute_squared_distance(matrix: Matrix, factors: LowRankFactors) -> float:
    """Returns the sum of the squares of `matrix - up @ down`, block by block."""
    rows = _rows_at_once(matrix)
    total = 0.0
    for start in range(0, matrix.shape[0], rows):
        block = slice(start, start + rows)
        missed = matrix[block] - factors.up[block] @ factors.down
        total += compute_squared_norm(missed)
    return total


def _rows_at_once(matrix: NDArray[Any]) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, matrix[:1].size))


_FLOAT32 = BY_NAME["float32"]
_AT_ONCE = 1 << 20  # elements of one tensor that are read from each side at a time


class ComparedTensor(Struct, frozen=True):
    """One tensor on both sides, of the same shape."""

    name: Fqn
    tuned: TensorEntry
    base: TensorEntry


class Approximation(Struct, frozen=True):
    """The change of one weight as a product of two factors.

    Attributes:
        up: [out, rank], in the element type that is written.
        down: [rank, in], in the same.
        change: Frobenius norm of what training changed.
        missed: Frobenius norm of the error of the written factors.
    """

    up: NDArray[Any]
    down: NDArray[Any]
    change: float
    missed: float

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def error(self) -> float:
        return self.missed / self.change

    @property
    def energy(self) -> float:
        return max(0.0, 1.0 - self.error**2)


class ChangeReader:
    """Reads the difference between two checkpoints. For one thread."""

    def __init__(self, tuned: Origin, base: Origin, listener: Listener) -> None:
        """`listener` receives the bytes that were read of the tuned model."""
        self._readers = TensorReader(tuned), TensorReader(base)
        self._listener = listener

    def norm(self, pair: ComparedTensor) -> float:
        """Returns the Frobenius norm of a change, in constant memory."""
        return math.sqrt(sum(compute_squared_norm(block) for _, block in self._blocks(pair)))

    def matrix(self, pair: ComparedTensor) -> Matrix:
        """Returns the change of a matrix, float32."""
        whole = np.empty(pair.tuned.elements, np.float32)
        for span, block in self._blocks(pair):
            whole[span.start : span.stop] = block
        return whole.reshape(pair.tuned.shape)

    def _blocks(self, pair: ComparedTensor) -> Iterator[tuple[Span, NDArray[Any]]]:
        _refuse_packed(pair)
        kinds = {pair.tuned.dtype.kind, pair.base.dtype.kind}
        # Differences of integers, which are positions and counters, are exact in float64.
        wide = np.float32 if kinds == {"float"} else np.float64
        for start in range(0, pair.tuned.elements, _AT_ONCE):
            span = Span(start, min(start + _AT_ONCE, pair.tuned.elements))
            tuned = self._read(0, pair.tuned, span)
            base = self._read(1, pair.base, span)
            # The wider of the two, and never less than the result.
            widest = np.float64 if np.float64 in {tuned.dtype.type, base.dtype.type} else wide
            with np.errstate(all="ignore"):  # the result is checked
                block = (tuned.astype(widest) - base.astype(widest)).astype(wide, copy=False)
            if not np.isfinite(block).all():
                raise AdapterError(
                    "NaN or infinity was found, which has no difference to anything",
                    where=f"tensor {pair.name!r}",
                    hint="leave the tensor out with --exclude, or take an earlier step of the run",
                )
            self._listener(BytesWritten((span.stop - span.start) * pair.tuned.dtype.itemsize))
            yield span, block

    def _read(self, side: int, entry: TensorEntry, span: Span) -> NDArray[Any]:
        buffer = memoryview(bytearray((span.stop - span.start) * entry.dtype.itemsize))
        self._readers[side].fill(entry.key, span, buffer)
        return np.frombuffer(buffer, numpy_dtype(entry.dtype))


def _refuse_packed(pair: ComparedTensor) -> None:
    for side, entry, other in (("tuned", pair.tuned, pair.base), ("base", pair.base, pair.tuned)):
        is_float = entry.dtype.kind == "float"
        narrow = is_float and entry.dtype.itemsize == 1
        if (
            narrow
            or entry.dtype.kind == "complex"
            or (other.dtype.kind == "float" and not is_float)
        ):
            raise UnsupportedError(
                f"is {entry.dtype.name} in the {side} model, whose numbers cannot be compared with"
                " weights",
                where=f"tensor {pair.name!r}",
                hint="name a model in a floating type of 16 bits or more, such as one that was"
                " dequantized",
            )


def approximate(change: Matrix, rank: int, dtype: DType, *, where: str) -> Approximation | None:
    """Finds the factors of a change, and measures their error.

    Args:
        change: The change, [out, in].
        rank: The largest rank; a smaller matrix gets the length of its smaller side.
        dtype: The element type of the factors.
        where: The tensor, for messages.

    Returns:
        The factors, or None where nothing changed.
    """
    norm = math.sqrt(compute_squared_norm(change))
    if norm == 0:
        return None
    exact = truncate_svd(change, min(rank, *change.shape))
    up, down = (_cast(factor, dtype, where) for factor in (exact.up, exact.down))
    written = LowRankFactors(up.astype(np.float32), down.astype(np.float32))
    return Approximation(up, down, norm, math.sqrt(compute_squared_distance(change, written)))


def _cast(factor: Matrix, dtype: DType, where: str) -> NDArray[Any]:
    cast = np.empty(factor.shape, numpy_dtype(dtype))
    source = np.ascontiguousarray(factor).reshape(-1)
    overflow = Caster(_FLOAT32, dtype).cast(source, cast.reshape(-1))
    if overflow is not None:
        raise overflow_error(overflow, dtype, where=where)
    return cast


_Tensors = dict[Fqn, TensorEntry]


class ComparedModels(Struct, frozen=True):
    """Two checkpoints of one model.

    Attributes:
        opened: The tuned model, and the base.
        tuned: The tuned model, for reading tensors.
        base: The base, for reading tensors.
        config: The model's configuration, or None.
        pairs: Every tensor that both have, in the order of the names; tied ones once.
        tied: Tied names of the tuned model, with the names that they are tied to.
        left_out: Names that cannot be compared, and that the user excluded.
        parts: Names on disk of tensors that are parts of larger ones in memory, which adapters
            cannot name.
        notes: Messages for the user.
    """

    opened: tuple[OpenedCheckpoint, OpenedCheckpoint]
    tuned: Origin
    base: Origin
    config: Mapping[str, Any] | None
    pairs: Sequence[ComparedTensor]
    tied: Mapping[Fqn, Fqn]
    left_out: Sequence[Fqn]
    parts: frozenset[Fqn]
    notes: tuple[str, ...]


def open_models(
    stack: ExitStack, tuned: PathLike, base: PathLike, select: str | None, exclude: tuple[str, ...]
) -> ComparedModels:
    """Opens both checkpoints and pairs their tensors.

    `exclude` has patterns of names that may be in one model only, or differ in shape.
    """
    after = _open_tuned(stack, tuned, select)
    before = open_base(stack, base, None, NamesOfBase(config=after.config, option="--base"))
    after = _convert_names(after, before.config)
    for side in (after, before):
        _refuse_quantized(list(side.entries.values()), side.config, side.opened.path)
    config = after.config or before.config
    names = find_disk_names(config, None, base=place_of(base) if is_folder(base) else None)
    after, parts = _rename_to_live(after, names.names)
    before, parts_before = _rename_to_live(before, names.names)
    last, tied = _drop_tied_names(after, config)
    first, _ = _drop_tied_names(before, before.config or config)
    pairs, left_out = _pair_tensors(
        _add_tied_names(last, config, first),
        _add_tied_names(first, before.config or config, last),
        exclude,
        (after.opened.path, before.opened.path),
    )
    return ComparedModels(
        opened=(after.opened, before.opened),
        tuned=after.origin,
        base=before.origin,
        config=config,
        pairs=pairs,
        tied={**find_absent_tied_names(config, last.keys()), **tied},
        left_out=left_out,
        parts=parts | parts_before,
        notes=names.notes,
    )


def _open_tuned(stack: ExitStack, path: PathLike, select: str | None) -> BaseSource:
    """Opens the trained model; of a run, its newest step."""
    checkpoint = stack.enter_context(open_checkpoint(path, select=select))
    request = ConsolidateRequest(select=checkpoint.select)
    entries = select_model(checkpoint.index, request, location=checkpoint.path)
    refuse_problems(checkpoint.index, entries, checkpoint.path)
    folders = SideFolders(stack, checkpoint, None)
    return BaseSource(
        checkpoint,
        Origin(SOURCE, checkpoint.source, checkpoint.index),
        {entry.name: entry for entry in entries},
        folders.config(folders.choose(allow_code=False)[0]),
        is_live=True,
    )


def _convert_names(side: BaseSource, config: Mapping[str, Any] | None) -> BaseSource:
    """Converts the names of the trained model, if a map is for them."""
    opened = convert_names(side.opened, "auto", side.config or config)
    if opened is side.opened:
        return side
    request = ConsolidateRequest(select=opened.select)
    entries = {e.name: e for e in select_model(opened.index, request, location=opened.path)}
    origin = Origin(side.origin.name, opened.source, opened.index)
    return replace(side, opened=opened, origin=origin, entries=entries, is_live=False)


def _refuse_quantized(
    entries: Sequence[TensorEntry], config: Mapping[str, Any] | None, location: str
) -> None:
    sign = find_adapter((entry.name for entry in entries), own_adapters(config))
    packed = (e.name for e in entries if looks_packed(e.name, e.shape, e.dtype.name))
    name, what = (sign.name, sign.title) if sign else (next(packed, ""), PACKED_WEIGHT)
    if name:
        raise RefusedError(
            f"tensor {name!r} belongs to {what}, expected the weights of a whole model",
            where=location,
            hint="name the model in the element type that it was trained in; an adapter of LoRA is"
            " taken out with `ckptkit adapter extract`, and `ckptkit adapter merge` makes a"
            " whole model of it",
        )
    if (config or {}).get("quantization_config"):
        raise RefusedError(
            "the configuration has a 'quantization_config': packed numbers have no difference that"
            " factors could hold",
            where=location,
            hint="name the model in the element type that it was trained in",
        )


def _rename_to_live(side: BaseSource, hub: HubNames | None) -> tuple[BaseSource, frozenset[Fqn]]:
    """Renames a model's tensors to their names in memory, which adapters use.

    Returns:
        The model, and names on disk of tensors that are only parts of one in memory.
    """
    names = side.entries.keys()
    if hub is None or sum(n in hub.tensors for n in names) < sum(n in hub.live for n in names):
        return side, frozenset()
    placed = place_on_disk(names, hub)
    parts = frozenset(tensor.name for tensor in placed if tensor.part is not None)
    renamed = {}
    for tensor in placed:
        name = tensor.name if tensor.part is not None else tensor.live[0]
        renamed[name] = replace(side.entries[tensor.name], name=name)
    return replace(side, entries=renamed), parts


def _drop_tied_names(
    side: BaseSource, config: Mapping[str, Any] | None
) -> tuple[_Tensors, Mapping[Fqn, Fqn]]:
    """Returns the tensors without tied names, and the tied names."""
    # A separate origin, so that what is compared here is verified again when it is copied.
    aside = Origin(side.origin.name, side.origin.source, side.origin.index)
    dropped = find_ties(config, list(side.entries.values()), aside).dropped
    return {n: entry for n, entry in side.entries.items() if n not in dropped}, dropped


def _add_tied_names(
    tensors: _Tensors, config: Mapping[str, Any] | None, other: Mapping[Fqn, TensorEntry]
) -> _Tensors:
    """Adds tied names that the other model has."""
    absent = find_absent_tied_names(config, tensors.keys())
    return tensors | {t: tensors[s] for t, s in absent.items() if t in other}


def _pair_tensors(
    tuned: _Tensors, base: _Tensors, exclude: tuple[str, ...], places: tuple[str, str]
) -> tuple[list[ComparedTensor], list[Fqn]]:
    pairs, left_out = [], []
    for name in sorted(tuned.keys() | base.keys(), key=name_order):
        after, before, misfit = tuned.get(name), base.get(name), ""
        if after is None or before is None:
            has, lacks = places if before is None else places[::-1]
            misfit = f"is in {has} and not in {lacks}"
        elif after.shape != before.shape:
            shapes = list(after.shape), list(before.shape)
            misfit = f"has shape {shapes[0]} after training and {shapes[1]} before it"
        if not misfit:
            pairs.append(ComparedTensor(name, tuned[name], base[name]))
        elif matches(name, exclude):
            left_out.append(name)
        else:
            raise RefusedError(
                misfit,
                where=f"tensor {name!r}",
                hint="name the model that was trained as --base, or leave the tensor out with"
                f" --exclude '{name}'; both sides in one form (`ckptkit consolidate` writes a model"
                " folder) have the same names",
            )
    return pairs, left_out
