"""`ckptkit.diff`: two checkpoints, tensor by tensor, across formats."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ckptkit.conversion.source.adapters import read_config
from ckptkit.conversion.source.open import open_checkpoint, read_config_in
from ckptkit.conversion.source.read import leaf_span, scan
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.threads import usable_cores
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.reader import Origin, TensorReader, same_bytes
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
    """

    a: str
    b: str
    equal: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    reshaped: Mapping[str, tuple[str, str]]
    changed: tuple[TensorDifference, ...]
    note: str = ""

    def __bool__(self) -> bool:
        return self.same

    @property
    def same(self) -> bool:
        """Whether both hold the same tensors."""
        return not (self.only_in_a or self.only_in_b or self.reshaped or self.changed)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"same": self.same}


class _Side:
    """One of the two checkpoints.

    Attributes:
        checkpoint: The checkpoint, with the names that are compared.
        config: Its configuration, or None.
        name: What its origin is called.
    """

    def __init__(self, stack: ExitStack, path: PathLike, name: str) -> None:
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
    listener: Listener | None = None,
) -> Difference:
    """Compares the models of two checkpoints bit by bit, whatever their formats.

    Args:
        a: The first one.
        b: The second one.
        choice: The map of names, for each side that it is for.
        base: A folder with the configuration, where neither side has one.
        listener: Receives progress events, from several threads.

    Returns:
        How they differ.
    """
    with ExitStack() as stack:
        sides = _Side(stack, a, "a"), _Side(stack, b, "b")
        note = _convert_names(sides, choice, base)
        first, second = sides[0].with_ties_of(sides[1]), sides[1].with_ties_of(sides[0])
        common = [name for name in first if name in second]
        reshaped: dict[str, tuple[str, str]] = {
            name: (_extent(first[name]), _extent(second[name]))
            for name in common
            if _extent(first[name]) != _extent(second[name])
        }
        alike = {name: second[name] for name in common if name not in reshaped}
        changed = _Comparison(first, alike, sides[1].origin).run(
            sides[0].origin, listener or ignore
        )
        only = (
            tuple(name for name in first if name not in second),
            tuple(name for name in second if name not in first),
        )
        # Names in training differ from those on disk where transformers has to be asked.
        is_renamed = any(determine_need(s.config, has_base=True).kind == "ask" for s in sides)
        return Difference(
            a=sides[0].checkpoint.path,
            b=sides[1].checkpoint.path,
            equal=len(alike) - len(changed),
            only_in_a=only[0],
            only_in_b=only[1],
            reshaped=reshaped,
            changed=changed,
            note=note or (_NAMES_DIFFER if all(only) and is_renamed else ""),
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


class _Comparison:
    """Reads both sides leaf by leaf and counts what differs."""

    def __init__(
        self, first: Mapping[Fqn, TensorEntry], second: Mapping[Fqn, TensorEntry], origin: Origin
    ) -> None:
        self._first = {name: first[name] for name in second}
        self._second = second
        self._origin = origin
        self._local = threading.local()
        self._lock = threading.Lock()
        self._differences: dict[Fqn, TensorDifference] = {}

    def run(self, origin: Origin, listener: Listener) -> tuple[TensorDifference, ...]:
        named = {name: replace(entry, name=name) for name, entry in self._first.items()}
        errors = scan(
            origin, list(named.values()), self._visit, workers=usable_cores() + 1, listener=listener
        )
        for error in errors.values():
            raise error
        self._origin.checksums.finish()
        return tuple(self._differences[name] for name in named if name in self._differences)

    def _visit(self, entry: TensorEntry, leaf: int, view: memoryview) -> None:
        if not hasattr(self._local, "reader"):
            self._local.reader = TensorReader(self._origin)
        other, second = memoryview(bytearray(len(view))), self._second[entry.name]
        self._local.reader.fill(second.key, leaf_span(second, leaf), other)
        if same_bytes(view, other):
            return
        elements, largest = _count(entry, view, other)
        with self._lock:
            before = self._differences.get(entry.name, TensorDifference(entry.name, 0, None))
            values = [value for value in (before.largest, largest) if value is not None]
            self._differences[entry.name] = TensorDifference(
                entry.name, before.elements + elements, max(values, default=None)
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
