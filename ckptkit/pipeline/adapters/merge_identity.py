"""Whether the base of a merge is the one that was trained on: commits, repositories, bytes."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.adapters.config import LoraSettings
from ckptkit.adapters.identity import Expected, Judgement, expected_of, found_at, judge
from ckptkit.core.errors import CkptkitError, InputError, RefusedError
from ckptkit.core.index import Span, TensorEntry
from ckptkit.core.manifest import RUN_FACTS
from ckptkit.core.model_configs import parse_json_object
from ckptkit.execution.tensors import RUN_BYTES, Origin, TensorReader
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.casts import Caster
from ckptkit.pipeline.adapters.dequantizing import Weights
from ckptkit.pipeline.adapters.merge_base import BaseSource, open_base
from ckptkit.pipeline.opening import Opened
from ckptkit.pipeline.source_places import absolute, resolved
from ckptkit.planning.side_files import MAX_JSON_BYTES
from ckptkit.storage.places import is_url

_LISTED = 3
_ANYWAY = (
    "pass the base that was trained on, or --allow-other-base to merge onto this one all the same"
)


def recorded_base(settings: LoraSettings, checkpoint: Opened) -> Expected:
    """Returns what an adapter's configuration, or the run that saved it, tells of its base.

    Raises:
        FormatError: If the run's record is damaged.
    """
    expected = expected_of(settings)
    told = _run_facts(checkpoint).get("base_model")
    if not isinstance(told, Mapping):
        return expected
    name, commit = told.get("id"), told.get("commit_hash")
    return Expected(
        expected.name or (name if isinstance(name, str) else ""),
        expected.commit or (commit if isinstance(commit, str) else ""),
    )


def _run_facts(checkpoint: Opened) -> Mapping[str, Any]:
    path = posixpath.join(checkpoint.folder, RUN_FACTS)
    try:
        size = checkpoint.source.stat(path).size_bytes
    except InputError:
        return {}
    if size > MAX_JSON_BYTES:
        return {}
    return parse_json_object(checkpoint.source.read(path, 0, size), where=path)


def check_identity(expected: Expected, base: BaseSource, *, where: str, allowed: bool) -> Judgement:
    """Compares what an adapter records of its base with the base that was given.

    Args:
        expected: What is recorded.
        base: The base that was given.
        where: What to call the adapter in errors.
        allowed: Whether another base is taken all the same.

    Raises:
        RefusedError: If it is another base, and that is not allowed.
    """
    path = base.opened.path
    found = found_at(absolute(path), base.config)
    if not found.repository:
        found = found_at(resolved(path), base.config)
    judgement = judge(expected, found)
    if judgement.contradictions:
        refuse_other_base(judgement.contradictions, path, where=where, allowed=allowed)
    return judgement


def refuse_other_base(reasons: Collection[str], path: str, *, where: str, allowed: bool) -> None:
    """Refuses a base that is proven to be another than the one that was trained on.

    Raises:
        RefusedError: If that is not allowed.
    """
    if not allowed:
        raise RefusedError(
            f"the base {path} is not the one that the adapter was trained on: {'; '.join(reasons)}",
            where=where,
            hint=_ANYWAY,
        )


def recorded_weights(stack: ExitStack, expected: Expected, base: BaseSource) -> BaseSource | None:
    """Opens the folder that an adapter records as its base, where it is still there.

    Args:
        stack: Closes its files.
        expected: What is recorded; relative paths are nobody's by now.
        base: The base that was given; the same folder is not opened again.
    """
    path = Path(expected.name)
    if is_url(base.opened.location) or not path.is_absolute() or not path.is_dir():
        return None
    if path.samefile(base.opened.location):
        return None
    try:
        return open_base(stack, path, None)
    except CkptkitError:
        return None  # a folder that has become something else proves nothing


def differing_weights(
    trained: Weights, given: Weights, hidden: Collection[str], *, most: int | None = None
) -> tuple[list[str], int]:
    """Compares the frozen weights of one base with those of another, bit by bit.

    Where element types differ, the given ones are cast: training may hold them in another.

    Args:
        trained: Those that are known to be the adapter's.
        given: The base that was given.
        hidden: Names that are packed on either side.
        most: How many elements of each are compared; None for all.

    Returns:
        The names of those that differ, and how many were compared.

    Raises:
        InputError: If a source cannot be read.
    """
    readers = [
        TensorReader(Origin(side.origin.name, side.origin.source, side.origin.index))
        for side in (trained, given)
    ]
    pairs = {
        name: (entry, given.entries[name])
        for name, entry in trained.entries.items()
        if name in given.entries and name not in hidden
    }
    comparable = {
        name: (ours, theirs)
        for name, (ours, theirs) in pairs.items()
        if ours.shape == theirs.shape and ours.dtype.kind == theirs.dtype.kind == "float"
    }
    differing = [
        name
        for name, (ours, theirs) in comparable.items()
        if not _same(readers, ours, theirs, ours.elements if most is None else most)
    ]
    return differing, len(comparable)


def _same(
    readers: Sequence[TensorReader], ours: TensorEntry, theirs: TensorEntry, most: int
) -> bool:
    step = RUN_BYTES // max(ours.dtype.itemsize, theirs.dtype.itemsize)
    caster = Caster(theirs.dtype, ours.dtype)
    elements = min(ours.elements, most)
    for start in range(0, elements, step):
        span = Span(start, min(start + step, elements))
        arrays = []
        for reader, entry in zip(readers, (ours, theirs), strict=True):
            data = bytearray((span.stop - span.start) * entry.dtype.itemsize)
            reader.fill(entry.key, span, memoryview(data))
            arrays.append(np.frombuffer(data, numpy_dtype(entry.dtype)))
        cast = np.empty(len(arrays[1]), numpy_dtype(ours.dtype))
        if theirs.dtype == ours.dtype:
            cast = arrays[1]
        else:
            caster.cast(arrays[1], cast)
        bits = f"u{ours.dtype.itemsize}"
        if not np.array_equal(arrays[0].view(bits), cast.view(bits)):
            return False
    return True


def listed(names: Collection[str]) -> str:
    """Returns the first of some names, for a sentence."""
    return ", ".join(_first(names)) + (", …" if len(names) > _LISTED else "")


def _first(names: Collection[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        if number < _LISTED:
            yield name
