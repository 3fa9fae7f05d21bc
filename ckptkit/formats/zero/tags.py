"""Which of the tags of a DeepSpeed run is meant: the one that its file `latest` names.

Universal checkpoints are made of tags, have a file `latest_universal` of their own, and usually lie
beside what they were made of, under its name and a suffix.

Source: deepspeed/runtime/engine.py (`save_checkpoint`, which writes it last),
deepspeed/checkpoint/ds_to_universal.py (`main`).
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Sequence

from ckptkit.core.errors import InputError
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import is_unit_folder, step_of
from ckptkit.formats.zero.reader import ZeroReader
from ckptkit.formats.zero.universal import UniversalReader
from ckptkit.storage.base import Source

_LATEST = {ZeroReader.name: "latest", UniversalReader.name: "latest_universal"}
TAG_FILES = frozenset(_LATEST.values())
"""Files that name a tag, beside the folders of tags."""
_MADE = re.compile(r"(.+?)[-_.]?(?:universal|ucp|uni)", re.IGNORECASE)
_MAX_TAG_BYTES = 4096


def without_older_tags(
    source: Source, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], tuple[str, ...]]:
    """Leaves out tags beside the one that `latest` names, where tags are not numbered by step.

    Left out as well are universal checkpoints beside the tags that they were made of.

    Args:
        source: Where the candidates lie.
        candidates: What was recognised there.

    Returns:
        What is left, and what was left out, in words.
    """
    dropped = _made_of_others(candidates)
    notes = [
        f"{one.folder!r} was made of a checkpoint beside it, and left alone" for one in dropped
    ]
    runs: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for one in candidates:
        if one.format in _LATEST and one.folder and one not in dropped:
            runs[posixpath.dirname(one.folder), one.format].append(one)
    for (run, name), tags in runs.items():
        file = _LATEST[name]
        is_asked = len(tags) > 1 and not all(map(_is_told, tags))
        wanted = _tag(source, posixpath.join(run, file)) if is_asked else None
        others = [one for one in tags if posixpath.basename(one.folder) != wanted]
        if len(others) == len(tags) - 1:
            dropped += others
            left = ", ".join(repr(one.folder) for one in others)
            notes.append(f"'{file}' names {wanted!r}; left alone: {left}")
    return [one for one in candidates if one not in dropped], tuple(notes)


def _made_of_others(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the universal checkpoints that are called after a tag beside them."""
    tags = {one.folder for one in candidates if one.format == ZeroReader.name}
    made = []
    for one in candidates:
        match = _MADE.fullmatch(one.folder) if one.format == UniversalReader.name else None
        if match is not None and match[1] in tags:
            made.append(one)
    return made


def _is_told(candidate: Candidate) -> bool:
    """Tells whether a tag's own name says what it is: a step, or one of a step's models."""
    tag = posixpath.basename(candidate.folder)
    return step_of(tag) is not None or is_unit_folder(tag)


def _tag(source: Source, path: str) -> str | None:
    """Returns what the file that names the latest tag says, or None where there is none."""
    try:
        size = min(source.stat(path).size_bytes, _MAX_TAG_BYTES)
        return source.read(path, 0, size).decode("utf-8", "replace").strip()
    except InputError:
        return None
