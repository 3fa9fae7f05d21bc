"""Tied weights: what the configuration declares is believed only when the bytes agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Span, TensorEntry
from ckptkit.execution.tensors import RUN_BYTES, Origin, TensorReader
from ckptkit.pipeline.naming_program import ask_parameters
from ckptkit.pipeline.scanning import same_bytes
from ckptkit.planning.ties import (
    patterns_without_targets,
    tie_candidates,
    tie_conflicts,
    tied_names_absent,
    ties_to_drop,
)


@dataclass(frozen=True, slots=True)
class Ties:
    """Names that are tied, and names that are declared so but are not.

    Attributes:
        dropped: Targets with the bytes of their source, by target.
        broken: Targets with other bytes than the source that they are declared tied to.
    """

    dropped: Mapping[Fqn, Fqn]
    broken: Mapping[Fqn, Fqn]


def find_ties(
    config: Mapping[str, Any] | None, entries: Sequence[TensorEntry], origin: Origin
) -> Ties:
    """Compares the bytes of every pair that the configuration declares tied.

    Returns:
        The ties that hold, and those that do not.

    Raises:
        InputError: If the source cannot be read.
    """
    by_name = {entry.name: entry for entry in entries}
    extents = {name: (entry.dtype, entry.shape) for name, entry in by_name.items()}
    pairs = tie_candidates(config, extents)
    reader = TensorReader(origin)
    same: dict[Fqn, Fqn] = {}
    broken = dict(tie_conflicts(config, extents))
    for target, source in pairs.items():
        equal = _same_values(reader, by_name[target], by_name[source])
        (same if equal else broken)[target] = source
    return Ties(ties_to_drop(config, same, broken), broken)


def absent_twins(
    config: Mapping[str, Any] | None, names: Collection[Fqn]
) -> tuple[Mapping[Fqn, Fqn], str]:
    """Finds the names of tied weights that a live model has besides.

    Returns:
        From each absent name to the one in `names` that holds its bytes, and what the user
        should know; empty if that is all.
    """
    absent = dict(tied_names_absent(config, names))
    model_class = patterns_without_targets(config, {*names, *absent})
    if config is None or model_class is None:
        return absent, ""
    try:
        groups = ask_parameters(config, [])
    except RefusedError as error:
        return absent, (
            f"{model_class} ties further names, which are not written, as they cannot be told"
            f" ({error.message}); training that loads every name will miss them"
        )
    for group in groups:
        there = [name for name in group["names"] if name in names]
        if there:
            absent |= {Fqn(n): Fqn(there[0]) for n in group["names"] if n not in names}
    return absent, ""


def _same_values(reader: TensorReader, first: TensorEntry, second: TensorEntry) -> bool:
    itemsize = first.dtype.itemsize
    step = RUN_BYTES // itemsize
    buffers = [memoryview(bytearray(RUN_BYTES)) for _ in range(2)]
    for start in range(0, first.elements, step):
        span = Span(start, min(start + step, first.elements))
        views = [buffer[: (span.stop - span.start) * itemsize] for buffer in buffers]
        reader.fill(first.key, span, views[0])
        reader.fill(second.key, span, views[1])
        if not same_bytes(*views):
            return False
    return True
