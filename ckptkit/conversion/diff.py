"""`ckptkit.diff`: two checkpoints, tensor by tensor, across formats."""

from __future__ import annotations

import math
import posixpath
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.conversion.source.adapters import ROLES, Role, read_config, select_with_base
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.conversion.source.paths import read_config_in
from ckptkit.conversion.source.read import leaf_span, report_notes, scan
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.conversion.unpacking import unpack_to_measure
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.display import Displayed, Facts, plain_fields
from ckptkit.core.errors import AmbiguousSourceError, CannotPlanError, UsageError
from ckptkit.core.frameworks import recognise_by_tensors
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.text import counted
from ckptkit.core.threads import usable_cores
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.reader import Origin, TensorReader, same_bytes
from ckptkit.engine.values import Gaps, combine_gaps, finite, measure_gaps
from ckptkit.formats.discovery import ITSELF
from ckptkit.hub_names.known_models import determine_need
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.packing_settings import find_quantization
from ckptkit.plan.ties import find_tie_candidates
from ckptkit.storage.places import PathLike

_NAMES_DIFFER = (
    "a training checkpoint of this type of model has other names than a model folder; to"
    " compare the two, consolidate it first and compare the output"
)
_ONE_OF_SEVERAL = (
    "give the path of one of them, or the name of one with --select: once for the sides that have"
    " it, or twice, for A and then for B"
)
_SIDES = 2


class TensorDifference(Struct, frozen=True):
    """A tensor that both have, with other bytes.

    Attributes:
        name: The tensor.
        elements: How many elements have other bits.
        largest: The largest absolute difference of a value; None where it is not a number.
    """

    name: str
    elements: int
    largest: float | None


class Tolerance(Struct, frozen=True):
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


class NumericDifference(Struct, frozen=True):
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
        change: The Euclidean norm of the difference of both, where both are finite; None beyond
            float64.
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
    change: float | None = None


class Difference(Displayed, Struct, frozen=True):
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
        numeric: The differences of all tensors with the same shape, if they were so compared, or
            measured.
        roles: Where PEFT trained a model of either side: of the adapter and of its base, how many
            tensors are equal, and how many there are.
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
    roles: Mapping[Role, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.same

    @property
    def same(self) -> bool:
        """Whether both hold the same tensors."""
        return not (self.only_in_a or self.only_in_b or self.reshaped or self.changed)

    def _facts(self) -> Facts:
        lone = [(name, f"only in {self.a}") for name in self.only_in_a]
        lone += [(name, f"only in {self.b}") for name in self.only_in_b]
        reshaped = [(name, f"{a} against {b}") for name, (a, b) in self.reshaped.items()]
        changed = [(one.name, f"{one.elements:,} elements differ") for one in self.changed]
        rows = [*lone, *reshaped, *changed]
        verdict = f"different, {counted(len(rows), 'tensor')}" if rows else "same"
        lines = [("verdict", verdict), ("equal", f"{self.equal:,} equal")]
        return Facts(f"{self.a} against {self.b}", lines, ("tensor", "difference"), rows)

    def to_json(self) -> dict[str, Any]:
        return {**plain_fields(self), "same": self.same}


class _Side:
    """One of the two checkpoints."""

    def __init__(
        self,
        stack: ExitStack,
        path: PathLike,
        name: str,
        select: str | None,
        listener: Listener | None,
    ) -> None:
        self.name = name
        with _hinted():
            self.checkpoint = stack.enter_context(open_checkpoint(path, select=select))
        report_notes(self.checkpoint, listener or ignore)
        self.config = read_config(SideFolders(stack, self.checkpoint, None))

    def select(self) -> tuple[Mapping[str, TensorEntry], Mapping[str, Role]]:
        """Returns the tensors of its model, and their roles; refuses what names no model."""
        with _hinted():
            return select_with_base(self.checkpoint, ConsolidateRequest())

    @cached_property
    def origin(self) -> Origin:
        return Origin(self.name, self.checkpoint.source, self.checkpoint.index)

    @cached_property
    def entries(self) -> dict[Fqn, TensorEntry]:
        entries, _ = self.select()
        refuse_problems(self.checkpoint.index, list(entries.values()), self.checkpoint.path)
        return {Fqn(name): entry for name, entry in entries.items()}

    def with_ties_of(self, other: _Side) -> dict[Fqn, TensorEntry]:
        """Returns the tensors, each tied name that only `other` writes standing for its source."""
        absent = other.entries.keys() - self.entries.keys()
        extents = {n: (e.dtype, e.shape) for n, e in (other.entries | self.entries).items()}
        ties = find_tie_candidates(self.config, extents) if absent else {}
        tied = {
            name: self.entries[source]
            for name, source in ties.items()
            if name in absent and source in self.entries
        }
        return self.entries | tied


@contextmanager
def _hinted() -> Iterator[None]:
    """Has errors advise what can be done here, where nothing is selected."""
    try:
        yield
    except AmbiguousSourceError as error:
        raise error.hinted(_ONE_OF_SEVERAL) from error


def run_diff(
    a: PathLike,
    b: PathLike,
    *,
    choice: str = "auto",
    base: PathLike | None = None,
    select: Sequence[str] = (),
    tolerance: Tolerance | None = None,
    measures: bool = False,
    unpacked: bool = False,
    listener: Listener | None = None,
) -> Difference:
    """Compares the models of two checkpoints bit by bit, whatever their formats."""
    if unpacked and tolerance is None:
        raise UsageError(
            "applies to a comparison of numbers, and bits are compared",
            where="--unpacked",
            hint="pass --numeric with it (in Python, numeric=True)",
        )
    if len(select) > _SIDES:
        raise UsageError(
            f"was given {len(select)} times",
            where="--select",
            hint="pass it once for both, or twice: for A, then for B",
        )
    with ExitStack() as stack:
        sides = _open_sides(stack, (a, b), select, listener)
        for side in sides if unpacked else ():
            config = side.config
            if find_quantization(config) is None and base is not None:
                config = read_config_in(base, "--base")
            side.checkpoint = unpack_to_measure(side.checkpoint, config)
        note = _convert_names(sides, choice, base)
        first, second = sides[0].with_ties_of(sides[1]), sides[1].with_ties_of(sides[0])
        common = [name for name in first if name in second]
        unlike = [n for n in common if not _are_comparable(first[n], second[n], tolerance)]
        reshaped = {str(n): (_extent(first[n]), _extent(second[n])) for n in unlike}
        alike = {name: second[name] for name in common if name not in reshaped}
        is_measured = measures or tolerance is not None
        comparable = (n for n in common if _are_comparable(first[n], second[n], Tolerance()))
        measured = {name: second[name] for name in comparable} if is_measured else {}
        changed, numeric = _compare(sides, first, alike, measured, tolerance, listener or ignore)
        only_in_a = tuple(name for name in first if name not in second)
        only_in_b = tuple(name for name in second if name not in first)
        changes = {change.name for change in changed}
        # Names in training differ where transformers has to be asked.
        is_renamed = any(determine_need(s.config, has_base=True).kind == "ask" for s in sides)
        roles = {**sides[1].select()[1], **sides[0].select()[1]}
        unequal = changes | {*map(str, (*only_in_a, *only_in_b)), *reshaped}
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
            numeric=numeric,
            roles={
                role: (sum(name not in unequal for name in own), len(own))
                for role in ROLES
                if (own := [name for name, its in roles.items() if its == role])
            },
        )


def _open_sides(
    stack: ExitStack,
    places: tuple[PathLike, PathLike],
    select: Sequence[str],
    listener: Listener | None,
) -> tuple[_Side, _Side]:
    """Opens both sides; a selection for both is that of one alone where the other lacks it."""
    if len(select) == 1 and posixpath.basename(select[0]) == ITSELF:
        select = [*select, *select]  # the newest step of a run is never taken in its place
    of_sides: Sequence[str | None] = select or (None, None)
    if len(of_sides) == _SIDES:
        return (
            _Side(stack, places[0], "a", of_sides[0], listener),
            _Side(stack, places[1], "b", of_sides[1], listener),
        )
    sides: list[_Side] = []
    lacking: list[CannotPlanError] = []
    for place, name in zip(places, ("a", "b"), strict=True):
        try:
            side = _Side(stack, place, name, select[0], listener)
            side.select()
        except CannotPlanError as error:
            if lacking:
                raise lacking[0] from error
            lacking.append(error)
            side = _Side(stack, place, name, None, listener)
        sides.append(side)
    return sides[0], sides[1]


def _convert_names(sides: tuple[_Side, _Side], choice: str, base: PathLike | None) -> str:
    """Gives both sides the names of Transformers, where a map is for theirs.

    A side without a configuration takes that of `base`, or of the other side.
    """
    names = [[str(entry.name) for entry in s.checkpoint.index.of_part("model")] for s in sides]
    wanted = ["", ""]
    if choice == "auto":
        wanted = [recognise_by_tensors(listed) for listed in names]
    elif choice != "none":
        from ckptkit.name_maps.language import load_map

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
    from ckptkit.conversion.mapped_names import convert_checkpoint  # few models need it

    for side, framework, config in zip(sides, wanted, configs, strict=True):
        if framework:
            request = ConsolidateRequest(map=choice)
            side.checkpoint = convert_checkpoint(side.checkpoint, request, config)
            side.config = config
    return ""


def _extent(entry: TensorEntry) -> str:
    return f"{entry.dtype.name} {list(entry.shape)}"


def _are_comparable(first: TensorEntry, second: TensorEntry, tolerance: Tolerance | None) -> bool:
    is_same_type = first.dtype == second.dtype
    if tolerance is not None:
        is_same_type = (first.dtype.kind == "complex") == (second.dtype.kind == "complex")
    return first.shape == second.shape and is_same_type


def _compare(
    sides: tuple[_Side, _Side],
    first: Mapping[Fqn, TensorEntry],
    alike: Mapping[Fqn, TensorEntry],
    measured: Mapping[Fqn, TensorEntry],
    tolerance: Tolerance | None,
    listener: Listener,
) -> tuple[tuple[TensorDifference, ...], tuple[NumericDifference, ...]]:
    """Reads both sides leaf by leaf.

    Returns what differs of the tensors of `alike`, and how those of `measured` differ as numbers.
    """
    second, origin = {**alike, **measured}, sides[1].origin
    ours = {name: replace(entry, name=name) for name, entry in first.items() if name in second}
    local, lock = threading.local(), threading.Lock()
    differences: dict[Fqn, TensorDifference] = {}
    gaps: dict[Fqn, dict[int, Gaps]] = defaultdict(dict)
    rtol, atol = (0.0, 0.0) if tolerance is None else (tolerance.rtol, tolerance.atol)

    def visit(entry: TensorEntry, leaf: int, view: memoryview) -> None:
        if not hasattr(local, "reader"):
            local.reader = TensorReader(origin)
        span, theirs = leaf_span(entry, leaf), second[entry.name]
        other = memoryview(bytearray((span.stop - span.start) * theirs.dtype.itemsize))
        local.reader.fill(theirs.key, span, other)
        if entry.name in measured:
            values = np.frombuffer(view, numpy_dtype(entry.dtype))
            others = np.frombuffer(other, numpy_dtype(theirs.dtype))
            found = measure_gaps(values, others, rtol=rtol, atol=atol)
            with lock:
                gaps[entry.name][leaf] = found
        if tolerance is None and entry.name in alike and not same_bytes(view, other):
            elements, largest = _count(entry, view, other)
            with lock:
                before = differences.get(entry.name, TensorDifference(entry.name, 0, None))
                known = [value for value in (before.largest, largest) if value is not None]
                differences[entry.name] = TensorDifference(
                    entry.name, before.elements + elements, max(known, default=None)
                )

    workers, entries = usable_cores() + 1, list(ours.values())
    errors = scan(sides[0].origin, entries, visit, workers=workers, listener=listener)
    for error in errors.values():
        raise error
    origin.checksums.finish()
    numeric = []
    for name, entry in ours.items():
        if name not in measured:
            continue
        whole = combine_gaps([part for _, part in sorted(gaps[name].items())])
        numeric.append(
            NumericDifference(
                name=str(name),
                dtypes=(entry.dtype.name, second[name].dtype.name),
                elements=whole.elements,
                unequal=whole.unequal,
                beyond=whole.beyond,
                largest=finite(whole.largest),
                relative=finite(whole.relative),
                cosine=whole.cosine,
                norms=(finite(whole.norms[0]), finite(whole.norms[1])),
                lone=whole.lone,
                change=finite(whole.change),
            )
        )
    changed = [differences[name] for name in ours if name in differences]
    if tolerance is not None:
        changed = [TensorDifference(g.name, g.beyond, g.largest) for g in numeric if g.beyond]
    return tuple(changed), tuple(numeric)


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
