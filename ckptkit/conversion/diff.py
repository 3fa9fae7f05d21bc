"""`ckptkit.diff`: two checkpoints, tensor by tensor, across formats."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ckptkit.conversion.source.adapters import read_config
from ckptkit.conversion.source.open import open_checkpoint, read_config_in
from ckptkit.conversion.source.read import leaf_span, scan
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.errors import AmbiguousSourceError, UsageError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.threads import usable_cores
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.reader import Origin, TensorReader, same_bytes
from ckptkit.engine.values import Gaps, combine_gaps, finite, measure_gaps
from ckptkit.hub_names.known_models import determine_need, recognise_framework
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.selection import select_model
from ckptkit.plan.ties import find_tie_candidates
from ckptkit.storage.places import PathLike

_NAMES_DIFFER = (
    "a training checkpoint of this type of model has other names than a model folder; to"
    " compare the two, consolidate it first and compare the output"
)
_ONE_OF_SEVERAL = (
    "give the path of one of them; of several models in one checkpoint, write one with `ckptkit"
    " consolidate --select`, and compare the output"
)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that both have, with other bytes.

    Attributes:
        name: The tensor.
        elements: How many elements have other bits.
        largest: The largest absolute difference of a value; None where it is not a number.
    """

    name: str
    elements: int
    largest: float | None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far values may be apart, as `numpy.allclose` and `torch.testing` have it.

    Attributes:
        rtol: The part of the value in the second checkpoint.
        atol: What is allowed in addition.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if not 0 <= value < math.inf:
                raise UsageError(
                    f"{value!r} is no tolerance; expected 0, or a positive number",
                    where=f"--{name}",
                    hint=f"pass --{name} 1e-3",
                )


def make_tolerance(*, numeric: bool, rtol: float | None, atol: float | None) -> Tolerance | None:
    """Reads the options of a comparison of numbers; None where bits are compared."""
    if numeric:
        return Tolerance(rtol or 0.0, atol or 0.0)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            raise UsageError(
                "applies to a comparison of numbers, and bits are compared",
                where=f"--{name} {value}",
                hint="pass --numeric with it (in Python, numeric=True)",
            )
    return None


@dataclass(frozen=True, slots=True)
class NumericDifference:
    """How the values of a tensor differ that both have with the same shape.

    Attributes:
        name: The tensor.
        dtypes: Its element types in both.
        elements: How many elements it has.
        unequal: How many have other values; two NaN are equal, and two zeros.
        beyond: How many differ by more than the tolerance.
        largest: The largest absolute difference of two finite values; None beyond float64.
        relative: The largest difference as a part of the value in the second checkpoint, where
            that is not zero; None beyond float64.
        cosine: The cosine of the angle between both tensors; None where one of them is zero.
        norms: The Euclidean norms of both; None beyond float64.
        lone: How many elements are finite in one alone, or NaN or infinite in different ways.
    """

    name: str
    dtypes: tuple[str, str]
    elements: int
    unequal: int
    beyond: int
    largest: float | None
    relative: float | None
    cosine: float | None
    norms: tuple[float | None, float | None]
    lone: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What `ckptkit diff` found.

    Attributes:
        a: The first checkpoint.
        b: The second one.
        equal: How many tensors have the same name, dtype, shape and bytes.
        only_in_a: Names that the second one lacks; a tied name counts as its source.
        only_in_b: Names that the first one lacks.
        reshaped: Names with another dtype or shape, with both in words.
        changed: Names with other bytes.
        note: Why most names may differ between two equal models; empty where no reason is known.
        tolerance: How far values could be apart, if they were compared as numbers. Then `equal`
            and `changed` count elements that are apart further, and `reshaped` compares no dtypes.
        numeric: The differences of all tensors with the same shape, if they were so compared.
    """

    a: str
    b: str
    equal: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    reshaped: Mapping[str, tuple[str, str]]
    changed: tuple[TensorDifference, ...]
    note: str = ""
    tolerance: Tolerance | None = None
    numeric: tuple[NumericDifference, ...] = ()

    def __bool__(self) -> bool:
        return self.same

    @property
    def same(self) -> bool:
        """Whether both hold the same tensors."""
        return not (self.only_in_a or self.only_in_b or self.reshaped or self.changed)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"same": self.same}


@contextmanager
def _hinted() -> Iterator[None]:
    """Has errors advise what can be done here, where nothing is selected."""
    try:
        yield
    except AmbiguousSourceError as error:
        raise error.hinted(_ONE_OF_SEVERAL) from error


class _Side:
    """One of the two checkpoints.

    Attributes:
        checkpoint: The checkpoint, with the names that are compared.
        config: Its configuration, or None.
        name: What its origin is called.
    """

    def __init__(self, stack: ExitStack, path: PathLike, name: str) -> None:
        with _hinted():
            self.checkpoint = stack.enter_context(open_checkpoint(path))
        self.name = name
        folders = SideFolders(stack, self.checkpoint, None)
        self.config = read_config(folders)

    @cached_property
    def origin(self) -> Origin:
        return Origin(self.name, self.checkpoint.source, self.checkpoint.index)

    @cached_property
    def entries(self) -> dict[Fqn, TensorEntry]:
        index, path = self.checkpoint.index, self.checkpoint.path
        request = ConsolidateRequest(select=self.checkpoint.select)
        with _hinted():
            entries = select_model(index, request, location=path)
        refuse_problems(index, entries, path)
        return {entry.name: entry for entry in entries}

    def convert(self, choice: str, config: Mapping[str, Any] | None) -> None:
        """Converts the names, if a map is for them."""
        if choice == "none":
            return
        from ckptkit.conversion.mapped_names import convert_checkpoint  # few models need it

        request = ConsolidateRequest(map=choice)
        self.checkpoint = convert_checkpoint(self.checkpoint, request, config)
        self.config = config

    def with_ties_of(self, other: _Side) -> dict[Fqn, TensorEntry]:
        """Returns the tensors, each tied name that only `other` writes standing for its source."""
        absent = other.entries.keys() - self.entries.keys()
        extents = {
            name: (entry.dtype, entry.shape)
            for name, entry in (other.entries | self.entries).items()
        }
        ties = find_tie_candidates(self.config, extents) if absent else {}
        tied = {
            name: self.entries[source]
            for name, source in ties.items()
            if name in absent and source in self.entries
        }
        return self.entries | tied


def run_diff(
    a: PathLike,
    b: PathLike,
    *,
    choice: str = "auto",
    base: PathLike | None = None,
    tolerance: Tolerance | None = None,
    listener: Listener | None = None,
) -> Difference:
    """Compares the models of two checkpoints bit by bit, whatever their formats.

    Args:
        a: The first one.
        b: The second one.
        choice: The map of names, for each side that it is for.
        base: A folder with the configuration, where neither side has one.
        tolerance: Compares values instead of bits, whatever their types, if it is not None.
        listener: Receives progress events, from several threads.

    Returns:
        How they differ.
    """
    with ExitStack() as stack:
        sides = _Side(stack, a, "a"), _Side(stack, b, "b")
        note = _convert_names(sides, choice, base)
        first, second = sides[0].with_ties_of(sides[1]), sides[1].with_ties_of(sides[0])
        common = [name for name in first if name in second]
        unlike = [n for n in common if not _are_comparable(first[n], second[n], tolerance)]
        reshaped = {str(n): (_extent(first[n]), _extent(second[n])) for n in unlike}
        alike = {name: second[name] for name in common if name not in reshaped}
        comparison = _Comparison(first, alike, sides[1].origin, tolerance)
        comparison.run(sides[0].origin, listener or ignore)
        changed = comparison.changed()
        only_in_a = tuple(name for name in first if name not in second)
        only_in_b = tuple(name for name in second if name not in first)
        # Names in training differ from those on disk where transformers has to be asked.
        is_renamed = any(determine_need(s.config, has_base=True).kind == "ask" for s in sides)
        return Difference(
            a=sides[0].checkpoint.path,
            b=sides[1].checkpoint.path,
            equal=len(alike) - len(changed),
            only_in_a=only_in_a,
            only_in_b=only_in_b,
            reshaped=reshaped,
            changed=changed,
            note=note or (_NAMES_DIFFER if only_in_a and only_in_b and is_renamed else ""),
            tolerance=tolerance,
            numeric=comparison.numeric(),
        )


def _convert_names(sides: tuple[_Side, _Side], choice: str, base: PathLike | None) -> str:
    """Gives both sides the names of Transformers, where a map is for theirs.

    A side without a configuration takes that of `base`, or of the other side.

    Returns:
        Why names were kept that a map might convert; empty otherwise.
    """
    names = [[str(entry.name) for entry in s.checkpoint.index.of_part("model")] for s in sides]
    wanted = ["", ""]
    if choice == "auto":
        wanted = [recognise_framework(listed) for listed in names]
    elif choice != "none":
        from ckptkit.name_maps.find import load_map

        name_map = load_map(choice)
        wanted = [name_map.source if name_map.takes_any(listed) else "" for listed in names]
        if not any(wanted):
            wanted[0] = name_map.source  # whose error says which rule is the nearest
    if not any(wanted):
        return ""
    given = None if base is None else read_config_in(base, "--base")
    configs = [s.config or given or t.config for s, t in (sides, sides[::-1])]
    if choice == "auto" and configs == [None, None] and wanted[0] == wanted[1]:
        return (
            f"names are compared as {wanted[0]} stores them, since no configuration was found; pass"
            " --base DIR to compare padded vocabularies, and layers stacked and apart"
        )
    for side, framework, config in zip(sides, wanted, configs, strict=True):
        side.convert(choice if framework else "none", config)
    return ""


def _extent(entry: TensorEntry) -> str:
    return f"{entry.dtype.name} {list(entry.shape)}"


def _are_comparable(first: TensorEntry, second: TensorEntry, tolerance: Tolerance | None) -> bool:
    is_same_type = first.dtype == second.dtype
    if tolerance is not None:
        is_same_type = (first.dtype.kind == "complex") == (second.dtype.kind == "complex")
    return first.shape == second.shape and is_same_type


class _Comparison:
    """Reads both sides leaf by leaf, and keeps how each leaf differs."""

    def __init__(
        self,
        first: Mapping[Fqn, TensorEntry],
        second: Mapping[Fqn, TensorEntry],
        origin: Origin,
        tolerance: Tolerance | None,
    ) -> None:
        self._first = {name: replace(first[name], name=name) for name in second}
        self._second = second
        self._origin = origin
        self._tolerance = tolerance
        self._local = threading.local()
        self._lock = threading.Lock()
        self._differences: dict[Fqn, TensorDifference] = {}
        self._gaps: dict[Fqn, dict[int, Gaps]] = defaultdict(dict)

    def run(self, origin: Origin, listener: Listener) -> None:
        errors = scan(
            origin,
            list(self._first.values()),
            self._visit,
            workers=usable_cores() + 1,
            listener=listener,
        )
        for error in errors.values():
            raise error
        self._origin.checksums.finish()

    def changed(self) -> tuple[TensorDifference, ...]:
        """Returns the tensors that differ, in the order of the first checkpoint."""
        if self._tolerance is not None:
            return tuple(
                TensorDifference(gaps.name, gaps.beyond, gaps.largest)
                for gaps in self.numeric()
                if gaps.beyond
            )
        return tuple(self._differences[name] for name in self._first if name in self._differences)

    def numeric(self) -> tuple[NumericDifference, ...]:
        """Returns the differences of all tensors as numbers, if they are so compared."""
        if self._tolerance is None:
            return ()
        return tuple(
            _describe_gaps(entry, self._second[name], _join_leaves(self._gaps[name]))
            for name, entry in self._first.items()
        )

    def _visit(self, entry: TensorEntry, leaf: int, view: memoryview) -> None:
        if not hasattr(self._local, "reader"):
            self._local.reader = TensorReader(self._origin)
        span, second = leaf_span(entry, leaf), self._second[entry.name]
        other = memoryview(bytearray((span.stop - span.start) * second.dtype.itemsize))
        self._local.reader.fill(second.key, span, other)
        if self._tolerance is not None:
            gaps = measure_gaps(
                np.frombuffer(view, numpy_dtype(entry.dtype)),
                np.frombuffer(other, numpy_dtype(second.dtype)),
                rtol=self._tolerance.rtol,
                atol=self._tolerance.atol,
            )
            with self._lock:
                self._gaps[entry.name][leaf] = gaps
            return
        if same_bytes(view, other):
            return
        elements, largest = _count(entry, view, other)
        with self._lock:
            before = self._differences.get(entry.name, TensorDifference(entry.name, 0, None))
            values = [value for value in (before.largest, largest) if value is not None]
            self._differences[entry.name] = TensorDifference(
                entry.name, before.elements + elements, max(values, default=None)
            )


def _join_leaves(leaves: Mapping[int, Gaps]) -> Gaps:
    return combine_gaps([gaps for _, gaps in sorted(leaves.items())])


def _describe_gaps(first: TensorEntry, second: TensorEntry, gaps: Gaps) -> NumericDifference:
    return NumericDifference(
        name=str(first.name),
        dtypes=(first.dtype.name, second.dtype.name),
        elements=gaps.elements,
        unequal=gaps.unequal,
        beyond=gaps.beyond,
        largest=finite(gaps.largest),
        relative=finite(gaps.relative),
        cosine=gaps.cosine,
        norms=(finite(gaps.norms[0]), finite(gaps.norms[1])),
        lone=gaps.lone,
    )


def _count(entry: TensorEntry, first: memoryview, second: memoryview) -> tuple[int, float | None]:
    raw = f"V{entry.dtype.itemsize}"
    unequal = np.frombuffer(first, raw) != np.frombuffer(second, raw)
    kind = numpy_dtype(entry.dtype)
    values = [np.frombuffer(side, kind)[unequal] for side in (first, second)]
    wide = np.complex128 if entry.dtype.kind == "complex" else np.float64
    with np.errstate(all="ignore"):
        gaps = np.abs(values[0].astype(wide) - values[1].astype(wide))
    finite = gaps[np.isfinite(gaps)]
    return int(np.count_nonzero(unequal)), float(finite.max()) if len(finite) else None
