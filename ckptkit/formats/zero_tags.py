"""Which of the tags of a DeepSpeed run is meant: the one that its file `latest` names.

Source: deepspeed/runtime/engine.py (`save_checkpoint`, which writes it last).
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Sequence

from ckptkit.core.errors import InputError
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import is_unit_folder, step_of
from ckptkit.formats.zero import ZeroReader
from ckptkit.storage.base import Source

_LATEST = "latest"
_MAX_TAG_BYTES = 4096


def without_older_tags(
    source: Source, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], tuple[str, ...]]:
    """Leaves out tags beside the one that `latest` names, where tags are not numbered by step.

    Args:
        source: Where the candidates lie.
        candidates: What was recognised there.

    Returns:
        What is left, and what was left out, in words.
    """
    runs: dict[str, list[Candidate]] = defaultdict(list)
    for one in candidates:
        if one.format == ZeroReader.name and one.folder:
            runs[posixpath.dirname(one.folder)].append(one)
    dropped: list[Candidate] = []
    notes: list[str] = []
    for run, tags in runs.items():
        wanted = _tag(source, run) if len(tags) > 1 and not all(map(_is_told, tags)) else None
        others = [one for one in tags if posixpath.basename(one.folder) != wanted]
        if len(others) == len(tags) - 1:
            dropped += others
            left = ", ".join(repr(one.folder) for one in others)
            notes.append(f"'{_LATEST}' names {wanted!r}; left alone: {left}")
    return [one for one in candidates if one not in dropped], tuple(notes)


def _is_told(candidate: Candidate) -> bool:
    """Tells whether a tag's own name says what it is: a step, or one of a step's models."""
    tag = posixpath.basename(candidate.folder)
    return step_of(tag) is not None or is_unit_folder(tag)


def _tag(source: Source, run: str) -> str | None:
    """Returns what the file `latest` of a run says, or None where there is none."""
    path = posixpath.join(run, _LATEST)
    try:
        size = min(source.stat(path).size_bytes, _MAX_TAG_BYTES)
        return source.read(path, 0, size).decode("utf-8", "replace").strip()
    except InputError:
        return None
