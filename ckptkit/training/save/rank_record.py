"""What a rank tells of its part of a step, and the values in it that are no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckptkit.training.names import RNG
from ckptkit.training.save.layout import SavePlan
from ckptkit.training.state.objects import is_plain, serialise, torch_archive
from ckptkit.training.state.pieces import ObjectValue
from ckptkit.writer.messages import Inline

_ARCHIVES = 4096


def record_of(
    plan: SavePlan,
    objects: Sequence[ObjectValue],
    *,
    rank: int,
    world_size: int,
    attempt: str,
    step: int,
) -> tuple[dict[str, Any], tuple[Inline, ...]]:
    """Returns the rank's record, but for what its writer adds, and the files of its objects."""
    units: dict[str, Mapping[str, Any]] = dict(plan.record_units)
    files: list[Inline] = []
    by_unit: dict[str, list[ObjectValue]] = {}
    for value in objects:
        by_unit.setdefault(value.unit, []).append(value)
    for unit, values in by_unit.items():
        record = units.get(unit, {"tensors": [], "chunks": [], "data_files": [], "expected": []})
        names = record["data_files"]
        file, rows = objects_file(values, rank, len(names))
        units[unit] = {**record, "objects": rows, "data_files": [*names, _name_of(file)]}
        files.append(file)
    document = {
        "rank": rank,
        "world_size": world_size,
        "attempt": attempt,
        "step": step,
        "units": units,
    }
    return document, tuple(files)


def objects_file(
    objects: Sequence[ObjectValue], rank: int, file_number: int
) -> tuple[Inline, list[list[Any]]]:
    """Puts the objects of one DCP directory into a file, as archives one after another.

    Args:
        objects: At least one, all of one unit.
        rank: Names the file.
        file_number: Of the file, among those that the rank writes into the directory.

    Returns:
        The file, and `[path, file_number, start, length]` for each object.
    """
    data = bytearray()
    rows: list[list[Any]] = []
    for value in objects:
        archive = _archive_of(value)
        rows.append([list(value.key_path), file_number, len(data), len(archive)])
        data += archive
    unit = objects[0].unit
    name = f"__{rank}_{file_number}.distcp"
    return Inline(f"{unit}/{name}" if unit else name, bytes(data)), rows


def _name_of(file: Inline) -> str:
    return file.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class _Plain:
    """A value that its text describes fully, unlike `==`, to which 1 and True are the same."""

    text: str
    value: object = field(compare=False)


def _archive_of(item: ObjectValue) -> bytes:
    value = item.value
    if item.archive:
        return item.archive
    if is_plain(value):
        return _archive_of_plain(_Plain(repr(value), value))
    if item.key_path[0] == RNG:  # our own, and long: known to be readable
        return torch_archive(value)
    return serialise(value, ".".join(map(str, item.key_path)))


@lru_cache(_ARCHIVES)
def _archive_of_plain(value: _Plain) -> bytes:
    return torch_archive(value.value)
