"""`ckptkit.adapter_from_diff`: the change that full training made, as a LoRA adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.adapters.base_records import read_digests, spread
from ckptkit.adapters.tuned import Approximation, ChangeReader, Pair, Sides, approximate, open_sides
from ckptkit.conversion.source.open import PathLike
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    check_destination,
    choose_settings,
    estimate_plan,
    write_output,
)
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn
from ckptkit.core.manifest import Manifest
from ckptkit.core.model_configs import to_json
from ckptkit.engine.executor import Inputs
from ckptkit.engine.kernels import ConstantKernel
from ckptkit.engine.outcome import Listener, Started, ignore
from ckptkit.engine.reader import Origin
from ckptkit.lora.changes import model_types
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.differences import DiffPatterns, adapter_config, kept, module_of, role_of
from ckptkit.lora.identity import BaseRecord, found_at
from ckptkit.options import FACTOR_DTYPES, Resources, choose_dtype, matches, positive_number
from ckptkit.plan.layouts.hf import layout_adapter
from ckptkit.plan.plan import SOURCE, Compute, Copy, Literal, Plan, Product, TensorSpec, contiguous
from ckptkit.storage.places import open_target

_CONFIG = "adapter_config.json"
_POOR = 0.9  # of the changes' energy: what is below is told
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
    """Checks what was asked for."""
    number = positive_number(rank, option="--rank", example=16)
    dtype = choose_dtype(dtype, FACTOR_DTYPES)
    patterns = DiffPatterns(tuple(include), tuple(exclude), tuple(full))
    return DiffRequest(rank=number or 0, patterns=patterns, dtype=dtype, select=select)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRequest:
    """What is to be made of a difference.

    Attributes:
        rank: Of the factors; smaller matrices get less.
        patterns: Which tensors are approximated, and which kept as they are.
        dtype: Element type of the factors.
        select: Which model of the tuned side to take where there are several, or None.
    """

    rank: int
    patterns: DiffPatterns
    dtype: str
    select: str | None


def run_adapter_from_diff(
    tuned: PathLike,
    out: PathLike,
    request: DiffRequest,
    *,
    base: PathLike,
    overwrite: bool = False,
    listener: Listener = ignore,
) -> Manifest:
    """Writes a LoRA adapter that does to a base model what full training did, as far as it can.

    Returns:
        The manifest, with what each layer's factors miss.
    """
    check_destination(tuned, out, overwrite=overwrite, also=(base,))
    with (
        SingleProcess(open_target(out, overwrite=overwrite), listener) as strategy,
        _prepared(tuned, out, request, base, listener) as planned,
    ):
        return write_output(planned, strategy, listener)


@contextmanager
def _prepared(
    tuned: PathLike, out: PathLike, request: DiffRequest, base: PathLike, listener: Listener
) -> Iterator[PlannedOutput]:
    with ExitStack() as stack:
        sides = open_sides(stack, tuned, base, request.select, request.patterns.exclude)
        listener(Started(sum(pair.tuned.size_bytes for pair in sides.pairs)))
        changes = _measured(sides, request, listener)
        yield _Output(sides, changes, request, str(Path(base).absolute())).prepared(out)


@dataclass(slots=True)
class _Changes:
    """What was found, as it is found.

    Attributes:
        approximated: By module.
        norms: Of tensors that changed and are not approximated, by name.
        unchanged: Modules that could be approximated and did not change.
    """

    approximated: dict[str, tuple[Pair, Approximation]] = field(default_factory=dict)
    norms: dict[Fqn, float] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)


def _measured(sides: Sides, request: DiffRequest, listener: Listener) -> _Changes:
    """Reads both sides once, and makes factors of what changed."""
    reader = ChangeReader(sides.tuned, sides.base, listener)
    types, patterns = model_types(sides.config), request.patterns
    dtype = dtype_named(request.dtype)
    found = _Changes()
    for pair in sides.pairs:
        role = role_of(pair.name, pair.tuned.shape, types)
        if pair.name in sides.parts:
            role = "whole"
        is_kept = matches(pair.name, patterns.full)
        if role == "whole" or is_kept or not patterns.approximates(pair.name):
            if norm := reader.norm(pair):
                found.norms[pair.name] = norm
            continue
        change = reader.matrix(pair)
        if role == "transposed":
            change = change.T
        factors = approximate(change, request.rank, dtype, where=f"tensor {pair.name!r}")
        if factors is None:
            found.unchanged.append(module_of(pair.name))
        else:
            found.approximated[module_of(pair.name)] = pair, factors
    for origin in (sides.tuned, sides.base):
        origin.checksums.finish()
    return found


class _Output:
    """Plans the files of an adapter, and says what they hold."""

    def __init__(self, sides: Sides, changes: _Changes, request: DiffRequest, base: str) -> None:
        self._sides = sides
        self._changes = changes
        self._request = request
        self._base = base
        if not changes.approximated:
            raise _nothing_to_write(sides, changes)
        ranks = {module: one.rank for module, (_, one) in changes.approximated.items()}
        full = [n for n in changes.norms.keys() - sides.parts if matches(n, request.patterns.full)]
        names = [pair.name for pair in sides.pairs]
        self._kept = kept(ranks, full, names, sides.tied)

    def prepared(self, out: PathLike) -> PlannedOutput:
        sides, opened = self._sides, self._sides.opened
        document = to_json(self._config())
        weights = layout_adapter([*self._factors(), *self._copies()])
        config = contiguous(_CONFIG, [(len(document), Literal(document), None)])
        plan = Plan((weights, config), {}, tuple(self._notes()))
        settings = choose_settings(Resources(), plan, sources=opened, out=out)
        read = sum(pair.tuned.size_bytes + pair.base.size_bytes for pair in sides.pairs)
        return PlannedOutput(
            sources=opened,
            plan=plan,
            inputs=Inputs({o.name: _again(o) for o in (sides.tuned, sides.base)}, {}),
            settings=settings,
            estimate=estimate_plan(plan, settings, out, bytes_read=read),
            kind="adapter",
            options=self._options(),
            facts={
                "base": self._base,
                "difference": self._report(),
                **self._record().facts(),
            },
        )

    def _record(self) -> BaseRecord:
        """Digests a few weights of the base, by which a merge will know it again."""
        changed = [pair for pair, _ in self._changes.approximated.values()]
        bases = dict(spread({pair.name: pair.base for pair in changed}))
        return BaseRecord(read_digests(self._sides.base, bases))

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
            file_name = self._kept.file_name(name)
            if file_name is not None:
                spec = TensorSpec(Fqn(file_name), entry.dtype, entry.shape)
                yield Product(spec, Copy(SOURCE, entry.key))

    def _config(self) -> Mapping[str, Any]:
        sides = self._sides
        types = model_types(sides.config)
        is_transposed = any(
            role_of(pair.name, pair.tuned.shape, types) == "transposed"
            for pair, _ in self._changes.approximated.values()
        )
        found = found_at(self._base, sides.config)
        return adapter_config(
            self._kept,
            {module_of(pair.name) for pair in sides.pairs},
            sides.config,
            transposed=is_transposed,
            base=(found.repository or self._base, found.commit or None),
        )

    def _options(self) -> dict[str, Any]:
        request, patterns = self._request, self._request.patterns
        chosen = {
            "include": list(patterns.include),
            "exclude": list(patterns.exclude),
            "full": list(patterns.full),
            "select": request.select,
            "dtype": request.dtype if request.dtype != FACTOR_DTYPES[0] else None,
        }
        return {"rank": request.rank} | {name: value for name, value in chosen.items() if value}

    def _lost(self) -> dict[Fqn, float]:
        """Returns what changed and is not in the adapter, the largest change first."""
        norms = self._changes.norms
        lost = [name for name in norms if self._kept.file_name(name) is None]
        return {name: norms[name] for name in sorted(lost, key=lambda name: -norms[name])}

    def _report(self) -> dict[str, Any]:
        ones = [one for _, one in self._changes.approximated.values()]
        lost = self._lost()
        change, missed = _length(one.change for one in ones), _length(one.missed for one in ones)
        everything = _length((change, *self._changes.norms.values()))
        return {
            "change": everything,
            "error": missed / change,
            "energy": max(0.0, 1 - (missed / change) ** 2),
            "error_with_lost": _length((missed, *lost.values())) / everything,
            "layers": {
                module: _row(pair, one)
                for module, (pair, one) in self._changes.approximated.items()
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
                "left out by --exclude, and not compared, as one side lacks them or has another"
                f" shape: {_few(list(self._sides.left_out))}"
            )
        if report["unchanged"]:
            yield (
                f"{len(report['unchanged']):,} of"
                f" {len(report['unchanged']) + len(report['layers']):,} matrices did not change and"
                f" have no factors: {_few(report['unchanged'])}"
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


def _row(pair: Pair, one: Approximation) -> dict[str, Any]:
    return {
        "shape": list(pair.tuned.shape),
        "rank": one.rank,
        "change": one.change,
        "error": one.error,
        "energy": one.energy,
    }


def _length(norms: Iterator[float] | Sequence[float] | Any) -> float:
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return f"{', '.join(map(repr, names[:_LISTED]))}{more}"


def _again(origin: Origin) -> Origin:
    """Opens a source once more: what is copied is proven again, what had no checksum is known."""
    fresh = Origin(origin.name, origin.source, origin.index)
    fresh.unverified |= origin.unverified
    return fresh


def _nothing_to_write(sides: Sides, changes: _Changes) -> RefusedError:
    where = sides.opened[0].path
    if not changes.norms:
        return RefusedError(
            f"holds the same numbers as the base model in all {len(sides.pairs):,} tensors",
            where=where,
            hint="name the model after training, and as --base the one before it",
        )
    names = sorted(changes.norms, key=lambda name: -changes.norms[name])
    return RefusedError(
        f"no matrix of a linear layer that was asked for changed, only {_few(names)}",
        where=where,
        hint="choose others with --include, or publish the model itself",
    )
