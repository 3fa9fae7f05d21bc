"""`ckptkit.average`: the mean of several steps, tensor by tensor, without a step in memory.

Each source is planned as a conversion of its own, and the plans are joined: a float of the output
is computed from those of all sources. Everything else, such as names, files and configuration, is
that of the last source.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.conversion.source.paths import resolve_path
from ckptkit.conversion.write import (
    PlannedOutput,
    check_destination,
    choose_settings,
    estimate_plan,
)
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import AmbiguousSourceError, CannotPlanError, RefusedError, UsageError
from ckptkit.core.index import Fqn, Span
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.engine.casts import Caster
from ckptkit.engine.kernels import ComputedOperand, Operand, Preparations, operand_of, recast
from ckptkit.engine.reader import same_bytes
from ckptkit.engine.segment_reader import Inputs, SegmentReader
from ckptkit.engine.values import BLOCK_ELEMENTS, wide_dtype, widen
from ckptkit.options import matches
from ckptkit.plan.load_report import AVERAGE
from ckptkit.plan.plan import (
    FILLING,
    SOURCE,
    Compute,
    Copy,
    Demand,
    Kernel,
    Product,
    RawCopy,
    Reading,
    Segment,
    SegmentRange,
    TensorSpec,
)
from ckptkit.plan.weight_kinds import describe_stored, is_quantized
from ckptkit.runs.listing import list_run
from ckptkit.runs.steps import abandoned
from ckptkit.storage.places import PathLike, Place, place_of

_FEWEST = 2  # sources
_TINIEST = float(np.finfo(np.float32).smallest_subnormal)
_LARGEST = float(np.finfo(np.float32).max)
# What a worker reads of all sources for one block; the usual kernel reads as much of one.
_INPUT_BYTES = 4 << 20
_LEAST_ELEMENTS = 1 << 14
Array = NDArray[Any]


class Weighting(Struct, frozen=True):
    """How much each source counts; sources are in order, the oldest first."""

    method: Literal["uniform", "weights", "ema"] = "uniform"
    weights: tuple[float, ...] = ()  # for `weights`, the factor of each source; their sum is 1
    decay: float = 0.0  # for `ema`, how much of the average stays with each newer source

    @classmethod
    def from_options(cls, weights: Sequence[float] | None, ema: float | None) -> Weighting:
        """Reads `--weights` and `--ema`; weights are divided by their sum."""
        if weights is not None and ema is not None:
            raise UsageError(
                "cannot be combined with --weights, which says how much each source counts",
                where=f"--ema {ema}",
                hint="leave one of the two out",
            )
        if ema is not None:
            if not 0 < ema < 1:
                raise UsageError(
                    f"{ema!r} is not between 0 and 1",
                    where="--ema",
                    hint="pass the part of the average that each newer step keeps: --ema 0.9",
                )
            return cls("ema", decay=float(ema))
        if weights is None:
            return cls()
        for weight in weights:
            if not math.isfinite(weight) or weight == 0:
                raise UsageError(
                    f"{weight!r} is no weight that changes anything",
                    where="--weights",
                    hint="leave the source out, or give it a weight such as 0.5",
                )
        return cls("weights", weights=_divide_by_sum(weights))

    def check_count(self, sources: int) -> None:
        """Refuses weights for another number of sources, and an average of a single one."""
        if self.method == "weights" and len(self.weights) != sources:
            raise UsageError(
                f"number of weights is {len(self.weights)} against {sources} sources",
                where="--weights",
                hint="pass one weight for each source, in the same order",
            )
        if sources < _FEWEST:
            raise UsageError(
                "one source was found where an average needs two",
                where="SRC",
                hint="name several steps, or the run with --last 5; `ckptkit consolidate` writes"
                " the model of one",
            )

    def share_of(self, number: int, count: int) -> float:
        """Returns how much a source counts in the end."""
        if self.method == "uniform":
            return 1 / count
        if self.method == "weights":
            return self.weights[number]
        return self.decay ** (count - 1 - number) * (1 if number == 0 else 1 - self.decay)

    def combine(self, values: Sequence[Array], total: Array, term: Array) -> None:
        """Fills `total` with the average of some elements, in the type of `total`.

        Each operation is rounded to that type, in the order of the sources: `uniform` adds them and
        divides by their number; `weights` adds the products with the weights, rounded to the type;
        `ema` starts with the first and, for each further `x`, becomes
        `decay * total + (1 - decay) * x`.
        """
        kind = total.dtype.type
        widen(values[0], total)
        if self.method == "weights":
            total *= kind(self.weights[0])
        for number, further in enumerate(values[1:], 1):
            widened = further
            if further.dtype != term.dtype:
                widen(further, term)
                widened = term
            if self.method == "weights":
                widened = np.multiply(widened, kind(self.weights[number]), out=term)
            elif self.method == "ema":
                total *= kind(self.decay)
                widened = np.multiply(widened, kind(1 - self.decay), out=term)
            total += widened
        if self.method == "uniform":
            total /= kind(len(values))


def _divide_by_sum(weights: Sequence[float]) -> tuple[float, ...]:
    hint = "pass weights such as 0.5,0.3,0.2; some can be negative"
    try:
        total = math.fsum(weights)
    except OverflowError:
        total = math.inf
    if not 0 < total < math.inf:
        raise UsageError(
            f"the sum of all weights is {total:g}, by which they are divided; expected more than 0,"
            " and a finite number",
            where="--weights",
            hint=hint,
        )
    shares = tuple(weight / total for weight in weights)
    for weight, share in zip(weights, shares, strict=True):
        if not _TINIEST <= abs(share) <= _LARGEST:
            raise UsageError(
                f"{weight!r}, divided by the sum of all weights, {total:g}, is {share:g}; expected"
                f" from {_TINIEST:g} to {_LARGEST:g}, so that it is a number in float32 too",
                where="--weights",
                hint=hint,
            )
    return shares


class AverageKernel(Kernel, Struct, frozen=True):
    """Averages tensors of floats, in the widest type that one of them needs, and rounds once."""

    operands: tuple[Operand, ...]
    weighting: Weighting

    @property
    def is_ready(self) -> bool:
        computed = (one for one in self.operands if isinstance(one, ComputedOperand))
        return all(one.kernel.is_ready for one in computed)

    def prepare(self, _out: TensorSpec, reading: Reading) -> AverageKernel:
        prepared = (
            one.prepare(reading) if isinstance(one, ComputedOperand) else one
            for one in self.operands
        )
        return replace(self, operands=tuple(prepared))

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Returns what is read of all sources."""
        return tuple(demand for operand in self.operands for demand in operand.demands(block))

    def run(self, out: TensorSpec, block: Span, inputs: Sequence[Array], target: Array) -> None:
        """Averages one block, in parts that stay in the processor's cache."""
        values, at = [], 0
        for operand in self.operands:
            count = len(operand.demands(block))
            values.append(operand.values(block, inputs[at : at + count]))
            at += count
        types = (wide_dtype(operand.dtype) for operand in self.operands)
        wide = max(types, key=lambda dtype: dtype.itemsize)
        caster = Caster(BY_NAME[wide.name], out.dtype)
        memory = np.empty((2, min(BLOCK_ELEMENTS, target.size)), wide)
        for start in range(0, target.size, BLOCK_ELEMENTS):
            part = slice(start, min(start + BLOCK_ELEMENTS, target.size))
            total, term = memory[:, : part.stop - start]
            with np.errstate(all="ignore"):
                self.weighting.combine([own[part] for own in values], total, term)
            if wide == numpy_dtype(out.dtype):
                # A cast makes one NaN of all; without one, they are as the processor has made them.
                total[np.isnan(total)] = np.nan
            where = f"tensor {out.name!r}"
            caster.cast_all(total, target[part], where=where, block_start=block.start + start)


_LISTED = 3
_WEIGHTS = (".safetensors", ".bin")
_SCALES = "float8_e8m0fnu"  # powers of two without a sign


class AverageJob(ConversionJob, frozen=True):
    """An average as values; `src` is the last source, and the other options are for each source."""

    sources: tuple[PathLike, ...] = ()  # all of them, the oldest first
    weighting: Weighting = Weighting()
    take_last: tuple[str, ...] = ()  # patterns of tensors that the last source gives as they are
    passed: tuple[str, ...] = ()  # notes on newer steps that are no sources

    @classmethod
    def of(
        cls,
        job: ConversionJob,
        sources: Sequence[PathLike],
        weighting: Weighting,
        *,
        last: int | None = None,
        take_last: Sequence[str] = (),
    ) -> AverageJob:
        """Makes the job of an average."""
        passed: tuple[str, ...] = ()
        if last is not None:
            if len(sources) != 1:
                raise UsageError(
                    f"takes the newest steps of one run, and {len(sources)} sources are named",
                    where=f"--last {last}",
                    hint="name one run, or leave --last out",
                )
            sources, passed = find_last_steps(place_of(sources[0]), last)
        weighting.check_count(len(sources))
        values = {name: getattr(job, name) for name in ConversionJob.__struct_fields__}
        values |= {"src": sources[-1], "advice": AVERAGE}
        return cls(
            **values,
            sources=tuple(sources),
            weighting=weighting,
            take_last=tuple(take_last),
            passed=passed,
        )

    def check_places(self) -> None:
        """Refuses an output that could not be written, before any work is done."""
        like = self.request.like
        if self.request.is_packed:
            raise UsageError(
                "packs weights, and an average has none that are stored",
                where=f"--dtype {self.request.dtype}",
                hint="leave it out, and pack the average with `ckptkit consolidate`",
            )
        for source in self.sources:
            check_destination(
                source, self.destination, overwrite=self.overwrite, base=self.base, like=like
            )

    @contextmanager
    def plan_output(self) -> Iterator[PlannedOutput]:
        """Opens all sources, proves that they are alike, and plans the output; writes nothing."""
        request, is_cast = self.request, self.request.dtype != "keep"
        values = {name: getattr(self, name) for name in ConversionJob.__struct_fields__}
        job = ConversionJob(**values)
        unrounded = replace(job, request=replace(request, dtype="keep"), from_masters=is_cast)
        with ExitStack() as stack:
            plans = []
            for number, source in enumerate(self.sources):
                origins = f"{SOURCE}-{number}", f"{FILLING}-{number}"
                own = replace(unrounded, src=source, origins=origins)
                plans.append(stack.enter_context(own.plan_output()))
            layout = stack.enter_context(job.plan_output()) if is_cast else plans[-1]
            yield _join_plans(self, plans, layout)


def find_last_steps(run: Place, count: int) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """Returns the newest complete steps of a run, the oldest first, and notes on those between.

    Steps that training went back from do not count.
    """
    listing = list_run(run)
    complete = [step for step in listing.steps if step.complete]
    series = sorted({step.series for step in complete})
    if len(series) > 1:
        listed = " and ".join(f"'{name}N'" for name in series[:_LISTED])
        raise AmbiguousSourceError(
            f"holds steps of {len(series)} kinds: {listed}",
            where=run.location,
            hint="name the steps one by one, without --last",
        )
    left = abandoned(complete)
    steps = [step for step in complete if step.step not in left]
    if len(steps) < count:
        others = len(listing.steps) - len(steps)
        more = f", and {others:,} that are incomplete, or that training went back from"
        raise RefusedError(
            f"{len(steps):,} complete steps were found{more if others else ''}, {count:,} were"
            " expected",
            where=run.location,
            hint=(f"pass --last {len(steps)}; " if steps else "")
            + f"`ckptkit ls {shlex.quote(run.location)}` lists the steps, and what they lack",
        )
    taken = steps[-count:]
    passed = [
        f"{step.name} was passed over: {step.problem or 'training went back from it'}"
        for step in listing.steps
        if step.step > taken[0].step and step not in taken
    ]
    return tuple(run.beside(step.path) for step in taken), (*listing.notes, *passed)


Tensors = Mapping[Fqn, Product]


def _join_plans(
    job: AverageJob, plans: Sequence[PlannedOutput], layout: PlannedOutput
) -> PlannedOutput:
    """Joins the plan of each source, without casts, in that of the last with its casts."""
    tensors: list[Tensors] = [
        {
            spec.name: Product(spec, segment.body)
            for _, segment, spec in plan.plan.specs()
            if isinstance(segment.body, (Copy, Compute))
        }
        for plan in plans
    ]
    paths = [plan.checkpoint.path for plan in plans]
    steps = [plan.checkpoint.index.run.step for plan in plans]
    _check_order(job, plans, paths, steps)
    for path, own in zip(paths[:-1], tensors, strict=False):
        _check_likeness(job, own, tensors[-1], path, paths[-1])
    _check_modules(plans, layout)
    averaged = _choose_averaged(job, layout, tensors[-1])
    # Checksums of their own: what is compared here is read again when it is written.
    origins = {name: origin for plan in plans for name, origin in plan.inputs.origins.items()}
    inputs = Inputs(origins, layout.inputs.folders)
    # Integers and other tensors without a mean have to be the same in all sources.
    rest = [n for n in tensors[-1] if n not in averaged and not matches(n, job.take_last)]
    with Preparations() as preparations:
        reader = SegmentReader(inputs.with_own_checksums(), preparations)
        for path, own in zip(paths[:-1], tensors, strict=False):
            unlike = [n for n in rest if not _is_same(own[n], tensors[-1][n], reader)]
            if unlike:
                raise _unlike_error(unlike, tensors[-1], path, paths[-1])

    def average(segment: Segment) -> Segment:
        if segment.spec is None:
            return segment
        name, dtype = segment.spec.name, segment.spec.dtype
        if name not in averaged:
            return replace(segment, body=recast(tensors[-1][name], dtype).body)
        products = [own[name] for own in tensors]
        kernel = AverageKernel(tuple(map(operand_of, products)), job.weighting)
        reads = dict.fromkeys(read for operand in kernel.operands for read in operand.reads)
        itemsize = max(product.spec.dtype.itemsize for product in products)
        elements = max(_LEAST_ELEMENTS, _INPUT_BYTES // (len(products) * itemsize))
        return replace(segment, body=Compute(kernel, tuple(reads), elements))

    files = tuple(
        replace(file, segments=tuple(map(average, file.segments))) for file in layout.plan.files
    )
    plan = replace(layout.plan, files=files, notes=(*job.passed, *layout.plan.notes))
    sources = tuple(plan.checkpoint for plan in reversed(plans))
    settings = choose_settings(job.resources, plan, sources=sources, out=job.out)
    settings = replace(settings, check=job.request.check)
    read = sum(plan.estimate.bytes_read for plan in plans)
    weighting = job.weighting
    described: dict[str, Any] = {"method": weighting.method}
    if weighting.method == "weights":
        described["weights"] = list(weighting.weights)
    elif weighting.method == "ema":
        described["decay"] = weighting.decay
    options = {**layout.options, "average": described}
    options |= {"take_last": list(job.take_last)} if job.take_last else {}
    listed = [
        {"path": path, "step": step, "weight": weighting.share_of(number, len(plans))}
        for number, (path, step) in enumerate(zip(paths, steps, strict=True))
    ]
    return replace(
        layout,
        sources=sources,
        plan=plan,
        inputs=inputs.with_own_checksums(),
        settings=settings,
        estimate=estimate_plan(plan, settings, job.out, bytes_read=read),
        options=options,
        facts={**layout.facts, "average": listed},
    )


def _check_order(
    job: AverageJob,
    plans: Sequence[PlannedOutput],
    paths: Sequence[str],
    steps: Sequence[int | None],
) -> None:
    held = [_files_of(plan.checkpoint) for plan in plans]
    for path, own in zip(paths, held, strict=True):
        if held.count(own) > 1:
            raise UsageError(
                "the same source is named twice",
                where=f"SRC {path}",
                hint="name it once; --weights says how much it counts",
            )
    known = [step for step in steps if step is not None]
    is_ordered = known == sorted(known) or len(known) < len(steps)
    if job.weighting.method == "ema" and not is_ordered:
        raise RefusedError(
            f"the sources are of the steps {', '.join(map(str, steps))}, and the oldest has to"
            " come first",
            where="--ema",
            hint=f"name them in the order of their steps, or the run with --last {len(steps)}",
        )


def _files_of(checkpoint: OpenedCheckpoint) -> set[str]:
    """Returns where the files are, which a folder and a file in it have in common."""
    folder = checkpoint.source.location
    paths = (posixpath.join(folder, file.path) for file in checkpoint.index.files)
    return set(map(resolve_path, paths))


def _check_likeness(
    job: AverageJob, tensors: Tensors, last: Tensors, path: str, last_path: str
) -> None:
    """Refuses a source whose tensors differ from the last one's in name, type or shape.

    Floats of other types are averaged where `--dtype` names that of the output.
    """

    def shown(product: Product | None) -> str:
        spec = None if product is None else product.spec
        return "absent" if spec is None else f"{spec.dtype.name} {list(spec.shape)}"

    def is_alike(one: Product | None, other: Product | None) -> bool:
        if job.request.dtype != "keep" and one is not None and other is not None:
            dtypes = one.spec.dtype, other.spec.dtype
            if all(dtype.kind == "float" and dtype.itemsize > 1 for dtype in dtypes):
                return one.spec.shape == other.spec.shape
        return shown(one) == shown(other)

    unlike = [
        f"{name!r} is {shown(tensors.get(name))} against {shown(last.get(name))}"
        for name in sorted(last.keys() | tensors.keys())
        if not is_alike(tensors.get(name), last.get(name))
    ]
    if unlike:
        more = f"; and {len(unlike) - _LISTED:,} more" if len(unlike) > _LISTED else ""
        raise CannotPlanError(
            f"tensor {'; '.join(unlike[:_LISTED])}{more} in {last_path}",
            where=path,
            hint="an average needs the same tensors, with the same types and shapes, in all"
            " sources: leave others out with --exclude, or pass the type of the average with"
            " --dtype",
        )


def _check_modules(plans: Sequence[PlannedOutput], layout: PlannedOutput) -> None:
    """Refuses weights of modules beside an encoder, unless files hold the same in all."""
    modules, where = layout.facts.get("modules", ()), plans[-1].checkpoint.path
    if modules:
        raise RefusedError(
            f"holds weights of modules beside an encoder, in {', '.join(map(repr, modules))},"
            " which are not averaged",
            where=where,
            hint="average the encoder alone: `--strip-prefix 0.model. --exclude '[1-9]*'`",
        )
    held: list[dict[str, bytes]] = []
    for plan in plans:  # digests of weight files that stand in a folder of their own
        held.append({})
        for file in plan.plan.files:
            body = file.segments[0].body
            if "/" in file.path and file.path.endswith(_WEIGHTS) and isinstance(body, RawCopy):
                data = plan.inputs.folders[body.origin].read(body.path, 0, file.size_bytes)
                held[-1][file.path] = hashlib.blake2b(data).digest()
    for path, digest in held[-1].items():
        if any(other.get(path) != digest for other in held[:-1]):
            raise RefusedError(
                f"{path!r} is of a module beside the encoder, and differs between the models: it is"
                " not averaged",
                where=where,
                hint=f"average copies of the models without {path.partition('/')[0]!r}, and these"
                " folders apart",
            )


def _choose_averaged(job: AverageJob, layout: PlannedOutput, last: Tensors) -> set[Fqn]:
    """Returns the tensors to average; the others are taken from the last source."""
    dtypes = {name: product.spec.dtype for name, product in last.items()}
    shapes = {name: product.spec.shape for name, product in last.items()}
    for pattern in job.take_last:
        if not any(matches(name, (pattern,)) for name in dtypes):
            raise UsageError(
                f"none of {len(dtypes):,} tensors has such a name, the first is"
                f" {next(iter(dtypes), '')!r}",
                where=f"--take-last {pattern}",
                hint="patterns must fit whole names, such as '*.running_mean'",
            )
    filled = layout.facts.get("filled", {}).get("tensors", ())  # the same in all sources
    stored = describe_stored((n, shapes[n], dtype.name) for n, dtype in dtypes.items())
    chosen = set()
    for name, dtype in dtypes.items():
        if name in filled or matches(name, job.take_last):
            continue
        is_packed = stored[name].is_packed or is_quantized(name, shapes[name], dtypes)
        if is_packed or dtype.name == _SCALES:
            raise RefusedError(
                f"tensor {name!r} is quantized, or a scale of one that is: an average of packed"
                " numbers is none of the weights",
                where=layout.checkpoint.path,
                hint="unpack each source first, with `ckptkit consolidate SRC OUT --dtype"
                f" bfloat16`, or keep the last with --take-last '{name}'",
            )
        if dtype.kind == "float":
            chosen.add(name)
    return chosen


def _is_same(one: Product, other: Product, reader: SegmentReader) -> bool:
    size = one.spec.size_bytes
    segments = [Segment(0, size, product.body, product.spec) for product in (one, other)]
    views = [memoryview(bytearray(min(size, LEAF_BYTES))) for _ in segments]
    for start in range(0, size, LEAF_BYTES):
        stop = min(start + LEAF_BYTES, size)
        for segment, view in zip(segments, views, strict=True):
            reader.fill(SegmentRange(0, segment, start, stop), view[: stop - start])
        if not same_bytes(views[0][: stop - start], views[1][: stop - start]):
            return False
    return True


def _unlike_error(unlike: Sequence[Fqn], last: Tensors, path: str, last_path: str) -> RefusedError:
    listed = [f"{name!r} ({last[name].spec.dtype.name})" for name in unlike[:_LISTED]]
    listed += [f"{len(unlike) - _LISTED:,} more"] if len(unlike) > _LISTED else []
    rest = ", ".join(listed[:-1])
    subject = f"tensors {rest} and {listed[-1]} have" if rest else f"tensor {listed[-1]} has"
    return RefusedError(
        f"{subject} other elements than in {last_path}, and only floats have a mean",
        where=path,
        hint=f"take them from the last source with --take-last '{unlike[0]}', or leave them out"
        " with --exclude; both can be repeated",
    )
