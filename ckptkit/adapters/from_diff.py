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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import force_setattr, replace
from numpy.typing import NDArray

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.base_identity import read_digests, select_evenly
from ckptkit.adapters.base_model import (
    BaseSource,
    NamesOfBase,
    convert_names,
    list_weights,
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
from ckptkit.core.index import Fqn, Key, Shape, Span, TensorEntry
from ckptkit.core.manifest import Manifest
from ckptkit.core.text import list_first
from ckptkit.engine.casts import Caster, overflow_error
from ckptkit.engine.kernels import ConstantKernel
from ckptkit.engine.outcome import BytesWritten, Listener, Started, ignore
from ckptkit.engine.reader import Origin
from ckptkit.engine.segment_reader import Inputs
from ckptkit.hub_names.disk_tensors import HubNames
from ckptkit.lora.changes import HEADS, find_model_types
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.inference import find_shortest_names, is_conv1d, is_saved
from ckptkit.lora.quantized import BaseRecord, identify_base
from ckptkit.options import (
    FACTOR_DTYPES,
    Resources,
    choose_dtype,
    matches,
    positive_number,
)
from ckptkit.plan.plan import (
    SOURCE,
    Compute,
    Copy,
    Plan,
    Product,
    TensorSpec,
    name_order,
)
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


class Approximation(Struct, frozen=True):
    """The change of one weight as a product of two factors."""

    up: NDArray[Any]  # [out, rank], in the element type that is written
    down: NDArray[Any]  # [rank, in], in the same
    change: float  # Frobenius norm of what training changed
    missed: float  # Frobenius norm of the error of the written factors

    @property
    def rank(self) -> int:
        return len(self.down)


def approximate(change: Matrix, rank: int, dtype: DType, *, where: str) -> Approximation | None:
    """Finds the factors of a change, [out, in], and measures their error; None without change.

    A smaller matrix than `rank` gets the length of its smaller side.
    """
    norm = math.sqrt(compute_squared_norm(change))
    if norm == 0:
        return None
    written = []
    for factor in truncate_svd(change, min(rank, *change.shape)):
        cast = np.empty(factor.shape, numpy_dtype(dtype))
        source = np.ascontiguousarray(factor).reshape(-1)
        overflow = Caster(_FLOAT32, dtype).cast(source, cast.reshape(-1))
        if overflow is not None:
            raise overflow_error(overflow, dtype, where=where)
        written.append(cast)
    up, down = written
    missed = compute_squared_distance(change, up.astype(np.float32), down.astype(np.float32))
    return Approximation(up, down, norm, math.sqrt(missed))


class ComparedModels(Struct, frozen=True):
    opened: tuple[OpenedCheckpoint, OpenedCheckpoint]  # the tuned model, and the base
    origins: tuple[Origin, Origin]
    config: Mapping[str, Any] | None
    # Every tensor that both have, of one shape, in the order of the names; tied ones once.
    pairs: Mapping[Fqn, tuple[TensorEntry, TensorEntry]]
    tied: Mapping[Fqn, Fqn]  # names of the tuned model, with those that they are tied to
    left_out: Sequence[Fqn]  # cannot be compared, and the user excluded them
    parts: frozenset[Fqn]  # names on disk of parts of tensors in memory, which adapters cannot name
    notes: tuple[str, ...]


def open_models(
    stack: ExitStack, tuned: PathLike, base: PathLike, select: str | None, exclude: tuple[str, ...]
) -> ComparedModels:
    """Opens both checkpoints, of a run its newest step, and pairs their tensors.

    `exclude` has patterns of names that may be in one model only, or differ in shape.
    """
    checkpoint = stack.enter_context(open_checkpoint(tuned, select=select))
    list_weights(checkpoint)
    folders = SideFolders(stack, checkpoint, None)
    own_config = folders.config(folders.choose(allow_code=False)[0])
    before = open_base(stack, base, None, NamesOfBase(config=own_config, option="--base"))
    checkpoint = convert_names(checkpoint, "auto", own_config or before.config)
    entries = {entry.name: entry for entry in list_weights(checkpoint)}
    origin = Origin(SOURCE, checkpoint.source, checkpoint.index)
    after = BaseSource(checkpoint, origin, entries, own_config, is_live=True)
    for side in (after, before):
        _refuse_quantized(list(side.entries.values()), side.config, side.opened.path)
    config = after.config or before.config
    names = find_disk_names(config, None, base=place_of(base) if is_folder(base) else None)
    parts: set[Fqn] = set()
    tensors, tied = [], []
    for side, its_config in ((after, config), (before, before.config or config)):
        renamed, parts_of_side = _rename_to_live(side.entries, names.names)
        parts |= parts_of_side
        # A separate origin, so that what is compared here is verified again when it is copied.
        aside = Origin(side.origin.name, side.origin.source, side.origin.index)
        tied.append(find_ties(its_config, list(renamed.values()), aside).dropped)
        tensors.append({n: entry for n, entry in renamed.items() if n not in tied[-1]})
    last, first = tensors
    absent = find_absent_tied_names(config, last.keys())
    absent_before = find_absent_tied_names(before.config or config, first.keys())
    pairs, left_out = _pair_tensors(
        last | {t: last[s] for t, s in absent.items() if t in first},
        first | {t: first[s] for t, s in absent_before.items() if t in last},
        exclude,
        (after.opened.path, before.opened.path),
    )
    return ComparedModels(
        opened=(after.opened, before.opened),
        origins=(after.origin, before.origin),
        config=config,
        pairs=pairs,
        tied={**absent, **tied[0]},
        left_out=left_out,
        parts=frozenset(parts),
        notes=names.notes,
    )


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


def _rename_to_live(
    entries: Mapping[Fqn, TensorEntry], hub: HubNames | None
) -> tuple[Mapping[Fqn, TensorEntry], set[Fqn]]:
    """Renames a model's tensors to their names in memory, which adapters use.

    With it come names on disk of tensors that are only parts of one in memory.
    """
    names = entries.keys()
    if hub is None or sum(n in hub.tensors for n in names) < sum(n in hub.live for n in names):
        return entries, set()
    placed = place_on_disk(names, hub)
    renamed = {}
    for tensor in placed:
        name = tensor.name if tensor.part is not None else tensor.live[0]
        renamed[name] = replace(entries[tensor.name], name=name)
    return renamed, {tensor.name for tensor in placed if tensor.part is not None}


def _pair_tensors(
    tuned: Mapping[Fqn, TensorEntry],
    base: Mapping[Fqn, TensorEntry],
    exclude: tuple[str, ...],
    places: tuple[str, str],
) -> tuple[dict[Fqn, tuple[TensorEntry, TensorEntry]], list[Fqn]]:
    pairs, left_out = {}, []
    for name in sorted(tuned.keys() | base.keys(), key=name_order):
        after, before, misfit = tuned.get(name), base.get(name), ""
        if after is None or before is None:
            has, lacks = places if before is None else places[::-1]
            misfit = f"is in {has} and not in {lacks}"
        elif after.shape != before.shape:
            shapes = list(after.shape), list(before.shape)
            misfit = f"has shape {shapes[0]} after training and {shapes[1]} before it"
        if not misfit:
            pairs[name] = (tuned[name], base[name])
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


_POOR = 0.9  # of the changes' energy: less is noted
_LISTED = 3


class DiffRequest(Struct, frozen=True, kw_only=True):
    """Checks the options as a user passes them."""

    rank: int | str  # of the factors, or the smaller side of a matrix if that is less
    dtype: str = FACTOR_DTYPES[0]  # of the factors
    include: tuple[str, ...] = ()  # patterns of matrices to approximate; empty for all but heads
    exclude: tuple[str, ...] = ()
    full: tuple[str, ...] = ()  # kept whole, with the rest of their modules
    select: str | None = None

    def __post_init__(self) -> None:
        rank = positive_number(self.rank, option="--rank", example=16)
        force_setattr(self, "rank", rank or 0)
        force_setattr(self, "dtype", choose_dtype(self.dtype, FACTOR_DTYPES))

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
        listener(Started(sum(after.size_bytes for after, _ in sides.pairs.values())))
        changes = _measure_changes(sides, request, listener)
        planned = _plan_output(sides, changes, request, str(Path(base).absolute()), out)
        return write_output(planned, strategy, listener)


class _Changes(Struct):
    # By module, with the name of the weight.
    approximated: dict[str, tuple[Fqn, Approximation]] = field(default_factory=dict)
    norms: dict[Fqn, float] = field(default_factory=dict)  # of other changes, by name of the tensor
    unchanged: list[str] = field(default_factory=list)  # modules that could be approximated
    unverified: Mapping[str, set[Key]] = field(default_factory=dict)  # by origin


def _measure_changes(sides: ComparedModels, request: DiffRequest, listener: Listener) -> _Changes:
    """Reads both models once, and approximates the changes."""
    reader = ArrayReader(*sides.origins)
    types = find_model_types(sides.config)
    dtype = dtype_named(request.dtype)
    changes = _Changes()
    for name, pair in sides.pairs.items():
        _refuse_packed(name, *pair)
        blocks = _read_change(reader, sides, name, listener)
        role = "whole" if name in sides.parts else classify_tensor(name, pair[0].shape, types)
        if role == "whole" or matches(name, request.full) or not request.approximates(name):
            norm = math.sqrt(sum(compute_squared_norm(block) for _, block in blocks))
            if norm:
                changes.norms[name] = norm
            continue
        whole = np.empty(pair[0].elements, np.float32)
        for span, block in blocks:
            whole[span.start : span.stop] = block
        change = whole.reshape(pair[0].shape)
        if role == "transposed":
            change = change.T
        factors = approximate(change, int(request.rank), dtype, where=f"tensor {name!r}")
        if factors is None:
            changes.unchanged.append(module_of(name))
        else:
            changes.approximated[module_of(name)] = name, factors
    reader.finish()
    changes.unverified = {origin.name: reader.unverified(origin.name) for origin in sides.origins}
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
    return changes


def _read_change(
    reader: ArrayReader, sides: ComparedModels, name: Fqn, listener: Listener
) -> Iterator[tuple[Span, NDArray[Any]]]:
    """Yields what training changed in a tensor, in constant memory."""
    after, before = sides.pairs[name]
    tuned, base = sides.origins
    # Differences of integers, which are positions and counters, are exact in float64.
    wide = np.float32 if {after.dtype.kind, before.dtype.kind} == {"float"} else np.float64
    for start in range(0, after.elements, _AT_ONCE):
        span = Span(start, min(start + _AT_ONCE, after.elements))
        last = reader.read(after.key, span, tuned.name)
        first = reader.read(before.key, span, base.name)
        # The wider of the two, and never less than the result.
        widest = np.float64 if np.float64 in {last.dtype.type, first.dtype.type} else wide
        with np.errstate(all="ignore"):  # the result is checked
            block = (last.astype(widest) - first.astype(widest)).astype(wide, copy=False)
        if not np.isfinite(block).all():
            raise AdapterError(
                "NaN or infinity was found, which has no difference to anything",
                where=f"tensor {name!r}",
                hint="leave the tensor out with --exclude, or take an earlier step of the run",
            )
        listener(BytesWritten((span.stop - span.start) * after.dtype.itemsize))
        yield span, block


def _refuse_packed(name: Fqn, tuned: TensorEntry, base: TensorEntry) -> None:
    for side, entry, other in (("tuned", tuned, base), ("base", base, tuned)):
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
                where=f"tensor {name!r}",
                hint="name a model in a floating type of 16 bits or more, such as one that was"
                " dequantized",
            )


def _plan_output(
    sides: ComparedModels, changes: _Changes, request: DiffRequest, base: str, out: PathLike
) -> PlannedOutput:
    """Plans the files of an adapter, with a report of what it holds and lacks."""
    whole, biased, is_tied = _choose_whole(sides, changes, request.full)
    tensors = {name: after for name, (after, _) in sides.pairs.items()}
    tensors |= {t: tensors[s] for t, s in sides.tied.items() if t not in tensors}
    # Whole tensors by their names in PEFT's files.
    kept = {
        name: PEFT_PREFIX + name
        for name in tensors
        if any(f"{module_of(name)}.".startswith(f"{module}.") for module in whole)
    }
    kept |= {
        name: f"{PEFT_PREFIX}{module_of(name)}.base_layer{_BIAS}"
        for name in tensors
        if name not in kept and name.endswith(_BIAS) and module_of(name) in biased
    }
    names = [origin.name for origin in sides.origins]
    products = [
        Product(
            TensorSpec(
                Fqn(f"{PEFT_PREFIX}{module}.{factor}.weight"),
                dtype_named(request.dtype),
                values.shape,
            ),
            Compute(
                ConstantKernel(values.reshape(-1)),
                tuple(zip(names, (e.key for e in sides.pairs[name]), strict=True)),
            ),
        )
        for module, (name, own) in changes.approximated.items()
        for factor, values in (("lora_A", own.down), ("lora_B", own.up))
    ]
    products += [
        Product(TensorSpec(Fqn(kept[n]), e.dtype, e.shape), Copy(SOURCE, e.key))
        for n, e in tensors.items()
        if n in kept
    ]
    config = _make_config(sides, changes, base)
    config["bias"] = "lora_only" if biased else "none"
    config["modules_to_save"] = whole or None
    if is_tied:  # older versions do not know the option
        config["ensure_weight_tying"] = True
    files = layout_adapter_files(products, config, name_component(sides.config))
    report = _report(sides, changes, kept)
    plan = Plan(files, {}, tuple(_describe(sides, report, request)))
    settings = choose_settings(Resources(), plan, sources=sides.opened, out=out)
    origins = {}
    for origin in sides.origins:
        origins[origin.name] = origin
        # Chunks without checksums were read already.
        origin.unverified |= changes.unverified[origin.name]
    read = sum(sum(entry.size_bytes for entry in pair) for pair in sides.pairs.values())
    # Digests of a few weights of the base, with which a merge checks its base.
    changed = {str(name): sides.pairs[name][1] for name, _ in changes.approximated.values()}
    digests = read_digests(sides.origins[1], dict(select_evenly(changed)))
    options = {
        "include": list(request.include),
        "exclude": list(request.exclude),
        "full": list(request.full),
        "select": request.select,
        "dtype": request.dtype if request.dtype != FACTOR_DTYPES[0] else None,
    }
    return PlannedOutput(
        sources=sides.opened,
        plan=plan,
        inputs=Inputs(origins, {}),
        settings=settings,
        estimate=estimate_plan(plan, settings, out, bytes_read=read),
        kind="adapter",
        options={"rank": request.rank} | {name: v for name, v in options.items() if v},
        facts={"base": base, "difference": report, **BaseRecord(digests).facts()},
    )


def _make_config(sides: ComparedModels, changes: _Changes, base: str) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`; every module is scaled by 1."""
    types = find_model_types(sides.config)
    is_transposed = any(
        classify_tensor(name, sides.pairs[name][0].shape, types) == "transposed"
        for name, _ in changes.approximated.values()
    )
    identity = identify_base(base, sides.config)
    ranks = {module: own.rank for module, (_, own) in changes.approximated.items()}
    rank = max(ranks.values())
    patterns: dict[str, int] = {}  # names that match the modules of one smaller rank each
    for less in sorted(set(ranks.values()) - {rank}):
        names = find_shortest_names({m for m, r in ranks.items() if r == less}, ranks.keys())
        patterns |= dict.fromkeys(map(re.escape, names), less)
    listed = (sides.config or {}).get("architectures")
    name = str(listed[0]) if isinstance(listed, Sequence) and listed else ""
    modules = {module_of(name) for name in sides.pairs}
    return {
        "auto_mapping": None,
        "base_model_name_or_path": identity.repository or base,
        "fan_in_fan_out": is_transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "revision": identity.commit or None,
        "target_modules": find_shortest_names(ranks.keys(), modules),
        "task_type": next((task for end, task in _TASKS.items() if name.endswith(end)), None),
        "use_dora": False,
        "use_rslora": False,
    }


def _report(sides: ComparedModels, changes: _Changes, kept: Container[Fqn]) -> dict[str, Any]:
    norms, approximations = changes.norms, [own for _, own in changes.approximated.values()]
    without = [name for name in norms if name not in kept]
    lost = {name: norms[name] for name in sorted(without, key=lambda name: -norms[name])}
    change = _length(own.change for own in approximations)
    missed = _length(own.missed for own in approximations)
    everything = _length((change, *norms.values()))
    return {
        "change": everything,
        "error": missed / change,
        "energy": max(0.0, 1 - (missed / change) ** 2),
        "error_with_lost": _length((missed, *lost.values())) / everything,
        "layers": {
            module: {
                "shape": list(sides.pairs[name][0].shape),
                "rank": own.rank,
                "change": own.change,
                "error": own.missed / own.change,
                "energy": max(0.0, 1.0 - (own.missed / own.change) ** 2),
            }
            for module, (name, own) in changes.approximated.items()
        },
        "whole": {n: v for n, v in norms.items() if n not in lost},
        "lost": lost,
        "unchanged": changes.unchanged,
        "left_out": list(sides.left_out),
    }


def _describe(
    sides: ComparedModels, report: Mapping[str, Any], request: DiffRequest
) -> Iterator[str]:
    yield from sides.notes
    if sides.left_out:
        yield (
            "left out by --exclude and not compared, since one model lacks them or has another"
            f" shape: {list_first(list(sides.left_out), _LISTED)}"
        )
    if report["unchanged"]:
        yield (
            f"{len(report['unchanged']):,} of"
            f" {len(report['unchanged']) + len(report['layers']):,} matrices did not change and"
            f" have no factors: {list_first(report['unchanged'], _LISTED)}"
        )
    if report["energy"] < _POOR:
        yield (
            f"rank {request.rank} keeps {report['energy']:.1%} of the energy of the"
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


def _length(norms: Iterable[float]) -> float:
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


def _choose_whole(
    sides: ComparedModels, changes: _Changes, full: tuple[str, ...]
) -> tuple[list[str], set[str], bool]:
    """Decides how tensors that match `full` are stored.

    The bias of an approximated weight is saved as a bias; any other tensor with its module. Returns
    the whole modules, those whose biases are kept, and whether some of them are tied.
    """
    wanted = {name for name in changes.norms.keys() - sides.parts if matches(name, full)}
    # A head that is tied to a replaced embedding would keep the old one; it is replaced too.
    ties = {target for target, source in sides.tied.items() if source in wanted}
    wanted |= ties
    biased = {
        m for n in wanted if n.endswith(_BIAS) and (m := module_of(n)) in changes.approximated
    }
    whole = sorted({module_of(name) for name in wanted} - biased)
    for module in whole:
        others = {module_of(name) for name in sides.pairs} - set(whole)
        meant = next((o for o in sorted(others) if is_saved([module], o)), None)
        if meant is not None or not module:
            raise RefusedError(
                f"module {module!r} cannot be saved whole: PEFT, which goes by the ends of names,"
                f" would match {meant!r} too",
                where="--full",
                hint="leave it out of --full, or match both with it",
            )
    return whole, biased, bool(ties)
