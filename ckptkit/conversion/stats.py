"""`ckptkit.stats`: norms, ranges, zeros, NaN and infinities of the tensors of a checkpoint."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from msgspec import Struct, field

from ckptkit.conversion.source.adapters import ROLES, Role, read_config, select_with_base
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.conversion.source.read import open_with_names, report_notes, scan
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.conversion.unpacking import unpack_to_measure
from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.display import Displayed, Facts, plain_fields
from ckptkit.core.errors import NotFiniteError
from ckptkit.core.index import Key, Shape, TensorEntry
from ckptkit.core.text import counted
from ckptkit.core.threads import usable_cores
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.reader import Origin
from ckptkit.engine.values import (
    ELEMENT_COUNTS,
    STATISTICS,
    Measured,
    Measures,
    combine,
    describe_not_finite,
    finite,
    measure,
)
from ckptkit.options import ConsolidateRequest, NotFinite
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.optimizer_states import OPTIMIZER
from ckptkit.plan.plan import SOURCE
from ckptkit.plan.weight_kinds import FOUR_BIT, describe_stored
from ckptkit.storage.places import PathLike

_LISTED = 3


class TensorStatistics(Measured, frozen=True):
    """One tensor, and what was measured of it: the numbers of `Measured`.

    Attributes:
        name: The tensor.
        dtype: Its element type.
        shape: Its shape.
        parameters: How many parameters of the model it holds: two for each byte of a 4-bit weight,
            none for its scales.
        label: What it is, such as `4-bit`, `scales` or `rank 8`; empty for a plain tensor.
        role: Whether it is of the adapter, or of its base, where PEFT trained the model.
    """

    name: str
    dtype: str
    shape: Shape
    parameters: int = 0
    label: str = ""
    role: Role = ""

    @property
    def zero_share(self) -> float:
        """The share of zeros among the elements, from 0 to 1."""
        return self.zeros / self.elements if self.elements else 0.0

    def count(self, kind: NotFinite) -> int:
        """Returns how many elements are `nan`, or `inf`."""
        return self.nan if kind == "nan" else self.infinite

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers; what a plain tensor of a plain model has not is left out."""
        plain = {**plain_fields(self), "zero_share": self.zero_share}
        if not self.label:
            del plain["label"], plain["parameters"]
        if not self.role:
            del plain["role"]
        return plain


def sum_counts(tensors: Iterable[TensorStatistics]) -> dict[str, int]:
    """Returns the counts among what is measured, of several tensors together."""
    listed = tuple(tensors)
    names = [name for name in STATISTICS if name in ELEMENT_COUNTS]
    return {name: sum(getattr(one, name) for one in listed) for name in names}


class Statistics(Displayed, Struct, frozen=True):
    """What `ckptkit stats` found.

    Attributes:
        path: The checkpoint.
        format: Its format.
        step: Its step, or None.
        tensors: The numbers of each tensor, in the order of the checkpoint.
        norm: The Euclidean norm of all finite elements together.
        norms: The same of the adapter and of its base, where PEFT trained the model.
    """

    path: str
    format: str
    step: int | None
    tensors: tuple[TensorStatistics, ...]
    norm: float | None
    norms: Mapping[Role, float | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        raise ambiguous_truth(self, "statistics.nan, or statistics.find_refusal('nan')")

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def zeros(self) -> int:
        return sum(tensor.zeros for tensor in self.tensors)

    @property
    def nan(self) -> int:
        return sum(tensor.nan for tensor in self.tensors)

    @property
    def infinite(self) -> int:
        return sum(tensor.infinite for tensor in self.tensors)

    def find_refusal(self, *kinds: NotFinite) -> NotFiniteError | None:
        """Returns the error that names the tensors with elements of some kinds; None without any.

        Args:
            kinds: `nan`, `inf`, or both.
        """
        found = [tensor for tensor in self.tensors if any(tensor.count(kind) for kind in kinds)]
        if not found:
            return None
        listed = "; ".join(
            f"{tensor.name!r} has {describe_not_finite(tensor.nan, tensor.infinite, kinds)} among"
            f" {tensor.elements:,} elements"
            for tensor in found[:_LISTED]
        )
        more = f"; and {len(found) - _LISTED:,} more tensors" if len(found) > _LISTED else ""
        return NotFiniteError(
            f"tensor {listed}{more}",
            where=self.path,
            hint="if these are weights, training diverged before this step: take an earlier one",
        )

    def _facts(self) -> Facts:
        step = "" if self.step is None else f"step {self.step:,}"
        size = f"{counted(len(self.tensors), 'tensor')}, {counted(self.elements, 'element')}"
        bad = f"{self.nan:,} NaN, {self.infinite:,} infinite"
        numbers = ((t, (t.norm, t.minimum, t.maximum)) for t in self.tensors)
        rows = [
            (t.name, t.dtype, *("-" if value is None else f"{value:.4g}" for value in values))
            for t, values in numbers
        ]
        lines = [("step", step), ("measured", size), ("not finite", bad)]
        return Facts(self.path, lines, ("tensor", "dtype", "norm", "min", "max"), rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "format": self.format,
            "step": self.step,
            "elements": self.elements,
            "parameters": self.parameters,
            "norm": self.norm,
            "norms": dict(self.norms),
            **sum_counts(self.tensors),
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }


def run_stats(
    path: PathLike,
    request: ConsolidateRequest,
    *,
    also: Sequence[PathLike] = (),
    base: PathLike | None = None,
    unpacked: bool = False,
    listener: Listener | None = None,
) -> Statistics:
    """Reads the tensors of a checkpoint once, and measures them."""
    with ExitStack() as stack:
        checkpoint = open_with_names(
            stack, path, select=request.select, also=also, choice=request.map, base=base
        )
        report_notes(checkpoint, listener or ignore)
        if unpacked:
            config = read_config(SideFolders(stack, checkpoint, base))
            checkpoint = unpack_to_measure(checkpoint, config)
        index = checkpoint.index
        named, roles = select_with_base(checkpoint, request)
        for entry in index.of_part("optimizer") if request.optimizer else ():
            name = f"{OPTIMIZER}.{entry.name}"
            if request.wants(name, entry.name):
                named[name] = entry
        refuse_problems(index, list(named.values()), checkpoint.path)
        stored = describe_stored(
            (name, entry.shape, entry.dtype.name)
            for name, entry in named.items()
            if entry.part == "model"
        )
        packed = {named[name].key for name, found in stored.items() if found.label == FOUR_BIT}
        measured = _measure(checkpoint, named, packed, listener or ignore)
        whole = combine(list(measured.values()))
        by_role = {role: [measured[n] for n in named if roles.get(n) == role] for role in ROLES}
        return Statistics(
            path=checkpoint.path,
            format=checkpoint.index.format,
            step=checkpoint.index.run.step,
            tensors=tuple(
                TensorStatistics(
                    name=name,
                    dtype=entry.dtype.name,
                    shape=entry.shape,
                    **_numbers(measured[name]),
                    parameters=stored[name].parameters if name in stored else 0,
                    label=stored[name].label if name in stored else "",
                    role=roles.get(name, ""),
                )
                for name, entry in named.items()
            ),
            norm=finite(whole.norm),
            norms={role: finite(combine(own).norm) for role, own in by_role.items() if own},
        )


def _numbers(measures: Measures) -> dict[str, Any]:
    numbers = {name: getattr(measures, name) for name in Measured.__struct_fields__}
    return numbers | {"norm": finite(measures.norm)}


def _measure(
    checkpoint: OpenedCheckpoint,
    named: Mapping[str, TensorEntry],
    packed: Collection[Key],
    listener: Listener,
) -> dict[str, Measures]:
    """Reads tensors leaf by leaf, and joins the measures of the leaves."""
    lock, leaves = threading.Lock(), defaultdict[Key, dict[int, Measures]](dict)

    def visit(entry: TensorEntry, leaf: int, view: memoryview) -> None:
        dtype = np.dtype(np.uint8) if entry.key in packed else numpy_dtype(entry.dtype)
        measures = measure(np.frombuffer(view, dtype))
        with lock:
            leaves[entry.key][leaf] = measures

    origin = Origin(SOURCE, checkpoint.source, checkpoint.index)
    # Several names of a tied weight may have one key, which is read once.
    entries = list({entry.key: entry for entry in named.values()}.values())
    errors = scan(origin, entries, visit, workers=usable_cores() + 1, listener=listener)
    for error in errors.values():
        raise error
    return {
        name: combine([part for _, part in sorted(leaves[entry.key].items())])
        for name, entry in named.items()
    }
