"""`ckptkit.adapter_from_diff`: the change that full training made, as a LoRA adapter.

The models before and after training are read in blocks, and changed tensors are sorted into those
that a LoRA can hold and those that it cannot. Small matrices are decomposed exactly. For the others
a subspace with the largest singular vectors is found by random projection and power iterations,
which takes seconds where LAPACK takes minutes. The error is that of the factors as written.

Source: Halko, Martinsson, Tropp, "Finding structure with randomness" (2011), algorithms 4.4 and
5.1; peft 0.21, `check_target_module_exists` in `tuners/tuners_utils.py` and `_set_trainable` in
`utils/other.py` for how modules are named, `lora/config.py` for the configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.adapters.base_identity import read_digests, select_evenly
from ckptkit.adapters.base_model import (
    BaseSource,
    NamesOfBase,
    convert_names,
    open_base,
    place_on_disk,
)
from ckptkit.adapters.extract import layout_adapter_files, name_component
from ckptkit.conversion.names_on_disk import find_disk_names
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint
from ckptkit.conversion.source.paths import is_folder
from ckptkit.conversion.source.read import find_ties
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    check_destination,
    choose_settings,
    estimate_plan,
    write_output,
)
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType, dtype_named
from ckptkit.core.errors import AdapterError, RefusedError, UnsupportedError
from ckptkit.core.index import Fqn, Shape, Span, TensorEntry
from ckptkit.core.manifest import Manifest
from ckptkit.core.text import list_first
from ckptkit.engine.casts import Caster, overflow_error
from ckptkit.engine.kernels import ConstantKernel
from ckptkit.engine.outcome import BytesWritten, Listener, Started, ignore
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.engine.segment_reader import Inputs
from ckptkit.hub_names.disk_tensors import HubNames
from ckptkit.lora.changes import HEADS, find_model_types
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.inference import find_shortest_names, is_conv1d, is_saved
from ckptkit.lora.quantized import BaseRecord, identify_base
from ckptkit.options import (
    FACTOR_DTYPES,
    ConsolidateRequest,
    Resources,
    choose_dtype,
    matches,
    positive_number,
)
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.plan import (
    SOURCE,
    Compute,
    Copy,
    Plan,
    Product,
    TensorSpec,
    name_order,
)
from ckptkit.plan.selection import select_model
from ckptkit.plan.ties import find_absent_tied_names
from ckptkit.plan.vocabulary import is_embedding, is_head
from ckptkit.plan.weight_kinds import (
    PACKED_WEIGHT,
    find_adapter,
    looks_packed,
    own_adapters,
)
from ckptkit.storage.places import PathLike, open_target, place_of

Matrix = NDArray[np.float32]
EXACT = 512
"""Up to this many rows or columns, whichever are fewer, a matrix is decomposed exactly."""

_SEED = 0x5EED  # the same factors in every run
_MORE = 16  # further directions, which make the last wanted ones exact
_ROUNDS = 12
_SETTLED = 1e-5  # of the energy: a round that adds less is the last
_BLOCK_ELEMENTS = 1 << 20


def truncate_svd(matrix: Matrix, rank: int) -> tuple[Matrix, Matrix]:
    """Returns factors [rows, rank] and [rank, columns] with the product nearest to a matrix.

    The singular values are shared evenly between the two, as in mergekit. The same matrix has the
    same factors in every run on one machine; their signs are fixed.
    """
    rows, columns = matrix.shape
    if rows < columns:  # the side that is projected is the longer one
        up, down = truncate_svd(matrix.T, rank)
        return np.ascontiguousarray(down.T), np.ascontiguousarray(up.T)
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
    return left * signs.T * root, right * signs * root[:, None]


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


def compute_squared_distance(matrix: Matrix, up: Matrix, down: Matrix) -> float:
    """Returns the sum of the squares of `matrix - up @ down`, block by block."""
    rows = _rows_at_once(matrix)
    total = 0.0
    for start in range(0, matrix.shape[0], rows):
        block = slice(start, start + rows)
        missed = matrix[block] - up[block] @ down
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
    """The change of one weight as a product of two factors."""

    up: NDArray[Any]  # [out, rank], in the element type that is written
    down: NDArray[Any]  # [rank, in], in the same
    change: float  # Frobenius norm of what training changed
    missed: float  # Frobenius norm of the error of the written factors

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
    """Finds the factors of a change, [out, in], and measures their error; None without change.

    A smaller matrix than `rank` gets the length of its smaller side.
    """
    norm = math.sqrt(compute_squared_norm(change))
    if norm == 0:
        return None
    factors = truncate_svd(change, min(rank, *change.shape))
    up, down = (_cast(factor, dtype, where) for factor in factors)
    missed = compute_squared_distance(change, up.astype(np.float32), down.astype(np.float32))
    return Approximation(up, down, norm, math.sqrt(missed))


def _cast(factor: Matrix, dtype: DType, where: str) -> NDArray[Any]:
    cast = np.empty(factor.shape, numpy_dtype(dtype))
    source = np.ascontiguousarray(factor).reshape(-1)
    overflow = Caster(_FLOAT32, dtype).cast(source, cast.reshape(-1))
    if overflow is not None:
        raise overflow_error(overflow, dtype, where=where)
    return cast


_Tensors = dict[Fqn, TensorEntry]


class ComparedModels(Struct, frozen=True):
    opened: tuple[OpenedCheckpoint, OpenedCheckpoint]  # the tuned model, and the base
    tuned: Origin
    base: Origin
    config: Mapping[str, Any] | None
    # Every tensor that both have, in the order of the names; tied ones once.
    pairs: Sequence[ComparedTensor]
    tied: Mapping[Fqn, Fqn]  # names of the tuned model, with those that they are tied to
    left_out: Sequence[Fqn]  # cannot be compared, and the user excluded them
    parts: frozenset[Fqn]  # names on disk of parts of tensors in memory, which adapters cannot name
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

    With it come names on disk of tensors that are only parts of one in memory.
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


_CONFIG = "adapter_config.json"
_POOR = 0.9  # of the changes' energy: less is noted
_LISTED = 3


def make_diff_request(
    rank: int | str,
    dtype: str = FACTOR_DTYPES[0],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    full: Sequence[str] = (),
    select: str | None = None,
) -> DiffRequest:
    number = positive_number(rank, option="--rank", example=16)
    dtype = choose_dtype(dtype, FACTOR_DTYPES)
    return DiffRequest(
        rank=number or 0,
        dtype=dtype,
        include=tuple(include),
        exclude=tuple(exclude),
        full=tuple(full),
        select=select,
    )


class DiffRequest(Struct, frozen=True, kw_only=True):
    rank: int  # of the factors, or the smaller side of a matrix if that is less
    dtype: str  # of the factors
    include: tuple[str, ...]  # patterns of matrices to approximate; empty for all but heads
    exclude: tuple[str, ...]
    full: tuple[str, ...]  # kept whole, with the rest of their modules
    select: str | None

    def approximates(self, name: str) -> bool:
        is_included = matches(name, self.include) if self.include else not is_head(name)
        return is_included and not matches(name, self.exclude)


def run_adapter_from_diff(
    tuned: PathLike,
    out: PathLike,
    request: DiffRequest,
    *,
    base: PathLike,
    overwrite: bool = False,
    listener: Listener = ignore,
) -> Manifest:
    """Writes a LoRA adapter that approximates the change of full training."""
    check_destination(tuned, out, overwrite=overwrite, also=(base,))
    with (
        SingleProcess(open_target(out, overwrite=overwrite), listener) as strategy,
        ExitStack() as stack,
    ):
        sides = open_models(stack, tuned, base, request.select, request.exclude)
        listener(Started(sum(pair.tuned.size_bytes for pair in sides.pairs)))
        changes = _measured(sides, request, listener)
        planned = _Output(sides, changes, request, str(Path(base).absolute())).prepared(out)
        return write_output(planned, strategy, listener)


class _Changes(Struct):
    # By module.
    approximated: dict[str, tuple[ComparedTensor, Approximation]] = field(default_factory=dict)
    norms: dict[Fqn, float] = field(default_factory=dict)  # of other changes, by name of the tensor
    unchanged: list[str] = field(default_factory=list)  # modules that could be approximated


def _measured(sides: ComparedModels, request: DiffRequest, listener: Listener) -> _Changes:
    """Reads both models once, and approximates the changes."""
    reader = ChangeReader(sides.tuned, sides.base, listener)
    types = find_model_types(sides.config)
    dtype = dtype_named(request.dtype)
    changes = _Changes()
    for pair in sides.pairs:
        role = classify_tensor(pair.name, pair.tuned.shape, types)
        if pair.name in sides.parts:
            role = "whole"
        is_kept = matches(pair.name, request.full)
        if role == "whole" or is_kept or not request.approximates(pair.name):
            if norm := reader.norm(pair):
                changes.norms[pair.name] = norm
            continue
        change = reader.matrix(pair)
        if role == "transposed":
            change = change.T
        factors = approximate(change, request.rank, dtype, where=f"tensor {pair.name!r}")
        if factors is None:
            changes.unchanged.append(module_of(pair.name))
        else:
            changes.approximated[module_of(pair.name)] = pair, factors
    for origin in (sides.tuned, sides.base):
        origin.checksums.finish()
    return changes


class _Output:
    """Plans the files of an adapter, and reports their content."""

    def __init__(
        self, sides: ComparedModels, changes: _Changes, request: DiffRequest, base: str
    ) -> None:
        self._sides = sides
        self._changes = changes
        self._request = request
        self._base = base
        if not changes.approximated and not changes.norms:
            raise RefusedError(
                f"holds the same numbers as the base model in all {len(sides.pairs):,} tensors",
                where=sides.opened[0].path,
                hint="name the model after training, and as --base the one before it",
            )
        if not changes.approximated:
            largest = sorted(changes.norms, key=lambda name: -changes.norms[name])
            raise RefusedError(
                "no matrix of a linear layer that was asked for changed, only"
                f" {list_first(largest, _LISTED)}",
                where=sides.opened[0].path,
                hint="choose others with --include, or publish the model itself",
            )
        ranks = {module: factors.rank for module, (_, factors) in changes.approximated.items()}
        full = [n for n in changes.norms.keys() - sides.parts if matches(n, request.full)]
        names = [pair.name for pair in sides.pairs]
        self._content = plan_content(ranks, full, names, sides.tied)

    def prepared(self, out: PathLike) -> PlannedOutput:
        sides, opened = self._sides, self._sides.opened
        products, component = [*self._factors(), *self._copies()], name_component(sides.config)
        files = layout_adapter_files(products, self._config(), component)
        plan = Plan(files, {}, tuple(self._notes()))
        settings = choose_settings(Resources(), plan, sources=opened, out=out)
        origins = {}
        for origin in (sides.tuned, sides.base):
            # Opened again, so that copies are verified; chunks without checksums are kept.
            origins[origin.name] = Origin(origin.name, origin.source, origin.index)
            origins[origin.name].unverified |= origin.unverified
        read = sum(pair.tuned.size_bytes + pair.base.size_bytes for pair in sides.pairs)
        # Digests of a few weights of the base, with which a merge checks its base.
        changed = [pair for pair, _ in self._changes.approximated.values()]
        digested = dict(select_evenly({pair.name: pair.base for pair in changed}))
        record = BaseRecord(read_digests(sides.base, digested))
        return PlannedOutput(
            sources=opened,
            plan=plan,
            inputs=Inputs(origins, {}),
            settings=settings,
            estimate=estimate_plan(plan, settings, out, bytes_read=read),
            kind="adapter",
            options=self._options(),
            facts={"base": self._base, "difference": self._report(), **record.facts()},
        )

    def _factors(self) -> Iterator[Product]:
        dtype = dtype_named(self._request.dtype)
        for module, (pair, factors) in self._changes.approximated.items():
            reads = ((SOURCE, pair.tuned.key), (self._sides.base.name, pair.base.key))
            for name, factor in (("lora_A", factors.down), ("lora_B", factors.up)):
                spec = TensorSpec(Fqn(f"{PEFT_PREFIX}{module}.{name}.weight"), dtype, factor.shape)
                yield Product(spec, Compute(ConstantKernel(factor.reshape(-1)), reads))

    def _copies(self) -> Iterator[Product]:
        tensors = {pair.name: pair.tuned for pair in self._sides.pairs}
        tensors |= {t: tensors[s] for t, s in self._sides.tied.items() if t not in tensors}
        for name, entry in tensors.items():
            file_name = self._content.file_name(name)
            if file_name is not None:
                spec = TensorSpec(Fqn(file_name), entry.dtype, entry.shape)
                yield Product(spec, Copy(SOURCE, entry.key))

    def _config(self) -> dict[str, Any]:
        """Returns the content of `adapter_config.json`; every module is scaled by 1."""
        content, config = self._content, self._sides.config
        types = find_model_types(config)
        is_transposed = any(
            classify_tensor(pair.name, pair.tuned.shape, types) == "transposed"
            for pair, _ in self._changes.approximated.values()
        )
        identity = identify_base(self._base, config)
        rank = max(content.ranks.values())
        capped = {module: r for module, r in content.ranks.items() if r != rank}
        patterns: dict[str, int] = {}  # names that match the modules of one rank each
        for own in sorted(set(capped.values())):
            of_rank = {module for module, r in capped.items() if r == own}
            names = find_shortest_names(of_rank, content.ranks.keys())
            patterns |= dict.fromkeys(map(re.escape, names), own)
        listed = (config or {}).get("architectures")
        name = str(listed[0]) if isinstance(listed, Sequence) and listed else ""
        modules = {module_of(pair.name) for pair in self._sides.pairs}
        # Older versions do not know the option.
        tying = {"ensure_weight_tying": True} if content.is_tied else {}
        return {
            "auto_mapping": None,
            "base_model_name_or_path": identity.repository or self._base,
            "bias": "lora_only" if content.biased else "none",
            "fan_in_fan_out": is_transposed,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "modules_to_save": list(content.whole) or None,
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": patterns,
            "alpha_pattern": patterns,
            "revision": identity.commit or None,
            "target_modules": find_shortest_names(content.ranks.keys(), modules),
            "task_type": next((task for end, task in _TASKS.items() if name.endswith(end)), None),
            "use_dora": False,
            "use_rslora": False,
            **tying,
        }

    def _options(self) -> dict[str, Any]:
        request = self._request
        chosen = {
            "include": list(request.include),
            "exclude": list(request.exclude),
            "full": list(request.full),
            "select": request.select,
            "dtype": request.dtype if request.dtype != FACTOR_DTYPES[0] else None,
        }
        return {"rank": request.rank} | {name: value for name, value in chosen.items() if value}

    def _report(self) -> dict[str, Any]:
        approximations = [own for _, own in self._changes.approximated.values()]
        norms = self._changes.norms
        without = [name for name in norms if self._content.file_name(name) is None]
        lost = {name: norms[name] for name in sorted(without, key=lambda name: -norms[name])}
        change = _length(own.change for own in approximations)
        missed = _length(own.missed for own in approximations)
        everything = _length((change, *self._changes.norms.values()))
        return {
            "change": everything,
            "error": missed / change,
            "energy": max(0.0, 1 - (missed / change) ** 2),
            "error_with_lost": _length((missed, *lost.values())) / everything,
            "layers": {
                module: {
                    "shape": list(pair.tuned.shape),
                    "rank": own.rank,
                    "change": own.change,
                    "error": own.error,
                    "energy": own.energy,
                }
                for module, (pair, own) in self._changes.approximated.items()
            },
            "whole": {n: v for n, v in self._changes.norms.items() if n not in lost},
            "lost": lost,
            "unchanged": self._changes.unchanged,
            "left_out": list(self._sides.left_out),
        }

    def _notes(self) -> Iterator[str]:
        report = self._report()
        yield from self._sides.notes
        if self._sides.left_out:
            yield (
                "left out by --exclude and not compared, since one model lacks them or has another"
                f" shape: {list_first(list(self._sides.left_out), _LISTED)}"
            )
        if report["unchanged"]:
            yield (
                f"{len(report['unchanged']):,} of"
                f" {len(report['unchanged']) + len(report['layers']):,} matrices did not change and"
                f" have no factors: {list_first(report['unchanged'], _LISTED)}"
            )
        if report["energy"] < _POOR:
            yield (
                f"rank {self._request.rank} keeps {report['energy']:.1%} of the energy of the"
                f" changes (relative error {report['error']:.3g}); a larger --rank keeps more, and"
                " --report shows each layer"
            )
        if lost := report["lost"]:
            few = [f"{name!r} ({norm:.3g})" for name, norm in list(lost.items())[:_LISTED]]
            more = f" and {len(lost) - _LISTED:,} more" if len(lost) > _LISTED else ""
            yield (
                f"{len(lost):,} tensors changed that a LoRA has no factors for, and the adapter"
                f" LACKS these changes (norm): {', '.join(few)}{more}; pass --full GLOB to save"
                " their modules whole"
            )


def _length(norms: Iterator[float] | Sequence[float] | Any) -> float:
    return math.sqrt(math.fsum(norm * norm for norm in norms))


_MATRIX = 2
_WEIGHT, _BIAS = ".weight", ".bias"
# Modules with a matrix that no product of Linear's is: tables of rows, and routers, which
# Transformers has as classes of their own.
_TABLE = re.compile(
    r"(embed_(?!out$).*|.*embeddings?|.*_embed|wte|wpe|shared|tokens_embed|relative_attention_bias"
    r"|gate|router)"
)
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
_TASKS |= {end: task for task, end in HEADS.items()}


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def classify_tensor(name: str, shape: Shape, model_types: frozenset[str]) -> str:
    """Returns `linear` or `transposed` for the weight of a linear layer, else `whole`."""
    module = module_of(name)
    if len(shape) != _MATRIX or not name.endswith(_WEIGHT) or 0 in shape:
        return "whole"
    if is_embedding(name) or _TABLE.fullmatch(module.rpartition(".")[2]):
        return "whole"
    return "transposed" if is_conv1d(module, model_types) else "linear"


class AdapterContent(Struct, frozen=True):
    ranks: Mapping[str, int]  # of each module that is approximated
    biased: frozenset[str] = frozenset()  # approximated modules whose biases are kept
    whole: tuple[str, ...] = ()  # modules that are kept whole
    is_tied: bool = False  # some of these are tied to each other

    def file_name(self, name: str) -> str | None:
        """Returns the name of a whole tensor in PEFT's files; None if it is not kept."""
        module = module_of(name)
        if any(module == whole or module.startswith(f"{whole}.") for whole in self.whole):
            return PEFT_PREFIX + name
        if module in self.biased and name.endswith(_BIAS):
            return f"{PEFT_PREFIX}{module}.base_layer{_BIAS}"
        return None


def plan_content(
    ranks: Mapping[str, int], full: Iterable[str], tensors: Collection[str], tied: Mapping[Fqn, Fqn]
) -> AdapterContent:
    """Decides how whole tensors are stored in an adapter.

    The bias of an approximated weight is saved as a bias; any other tensor with its module.
    """
    wanted = set(full)
    # A head that is tied to a replaced embedding would keep the old one; it is replaced too.
    ties = {target for target, source in tied.items() if source in wanted}
    wanted |= ties
    biased = {module_of(n) for n in wanted if n.endswith(_BIAS) and module_of(n) in ranks}
    whole = sorted({module_of(name) for name in wanted} - biased)
    for module in whole:
        others = {module_of(name) for name in tensors} - set(whole)
        meant = next((o for o in sorted(others) if is_saved([module], o)), None)
        if meant is not None or not module:
            raise RefusedError(
                f"module {module!r} cannot be saved whole: PEFT, which goes by the ends of names,"
                f" would match {meant!r} too",
                where="--full",
                hint="leave it out of --full, or match both with it",
            )
    return AdapterContent(ranks, frozenset(biased), tuple(whole), bool(ties))
