"""What lies beside a model in the folder of its step: what was noted, and what is ignored."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import InputError
from ckptkit.core.manifest import MANIFEST_NAME, RUN_FACTS, SIDE_FOLDER
from ckptkit.formats.surroundings import FileGroup, grouped
from ckptkit.formats.zero_tags import TAG_FILES
from ckptkit.pipeline.opening import Opened
from ckptkit.pipeline.steps import step_folder
from ckptkit.planning.side_files import MAX_JSON_BYTES, is_side_file

_DESCRIBING = (SIDE_FOLDER, "huggingface")  # folders of side files


def ignored_files(checkpoint: Opened) -> tuple[FileGroup, ...]:
    """Groups the files of a step that are neither read nor taken along beside the weights."""
    base = checkpoint.folder
    inside = [path for path in checkpoint.paths if _is_inside(path, base)]
    read = {file.path for file in checkpoint.index.files}
    left = [path for path in inside if path not in read and not _describes(path, base)]
    return grouped(left, base=base, known=read)


def _is_inside(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


def _describes(path: str, base: str) -> bool:
    """Tells whether a file describes the model or the step, and is known by its name."""
    first, _, rest = posixpath.relpath(path, base or ".").partition("/")
    name = posixpath.basename(path)
    is_known = name == MANIFEST_NAME or name in TAG_FILES or is_side_file(name)
    return is_known or (rest != "" and first in _DESCRIBING)


def saved_mesh(checkpoint: Opened) -> tuple[tuple[str, int], ...]:
    """Returns the mesh of the first model of a step that ckptkit saved; empty where unknown."""
    if checkpoint.manifest is None:
        return ()
    step = step_folder(checkpoint.units[0].candidate.folder)
    path = posixpath.join(step, RUN_FACTS)
    try:
        size = checkpoint.source.stat(path).size_bytes
        data = checkpoint.source.read(path, 0, min(size, MAX_JSON_BYTES))
        return _first_mesh(json.loads(data))
    except (InputError, ValueError, RecursionError):
        return ()


def _first_mesh(facts: Any) -> tuple[tuple[str, int], ...]:
    models = facts.get("models") if isinstance(facts, Mapping) else None
    first = next(iter(models.values()), None) if isinstance(models, Mapping) else None
    match first:
        case {"mesh": {"names": [*names], "shape": [*shape]}} if all(map(_is_size, shape)):
            padded = [*map(str, names), *[""] * len(shape)]
            return tuple(zip(padded, shape, strict=False))
    return ()


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
