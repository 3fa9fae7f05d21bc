"""Files that belong to no checkpoint, in groups that are few enough to be shown."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"\d+")
_MOST_GROUPS = 24


@dataclass(frozen=True, slots=True, order=True)
class FileGroup:
    """Files with alike names in one folder, or all that lie below a folder.

    Attributes:
        name: The path, with `*` for numbers that differ; that of a folder ends with `/`. Empty
            for the rest, where there are too many groups.
        files: How many there are.
    """

    name: str
    files: int

    def __str__(self) -> str:
        if not self.name:
            return f"{self.files:,} more"
        return self.name if self.files == 1 else f"{self.name} ({self.files:,})"


def grouped(
    paths: Sequence[str], *, base: str = "", known: Collection[str] = ()
) -> tuple[FileGroup, ...]:
    """Groups files.

    Args:
        paths: Those to be shown, all of them below `base`.
        base: A folder; names are relative to it.
        known: Paths of files that are accounted for. What lies beside one of them is shown file
            by file; a folder in which there is none is shown as one.

    Returns:
        The groups, sorted by name; the last one stands for the rest where there are too many.
    """
    opened = {base, *_above(base), *(folder for path in known for folder in _above(path))}
    groups: dict[str, list[str]] = {}
    for path in paths:
        name = _shown(path, opened)[len(base) :].lstrip("/")
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    named = sorted(
        FileGroup(names[0] if len(set(names)) == 1 else pattern, len(names))
        for pattern, names in groups.items()
    )
    rest = sum(group.files for group in named[_MOST_GROUPS:])
    return (*named[:_MOST_GROUPS], *([FileGroup("", rest)] if rest else []))


def _above(path: str) -> Iterator[str]:
    """Yields the folders that a file lies in, the innermost first; the root is empty."""
    while path:
        path = posixpath.dirname(path)
        yield path


def _shown(path: str, opened: Collection[str]) -> str:
    """Returns a file's path, or that of the outermost folder around it that is not opened."""
    closed = [folder for folder in _above(path) if folder not in opened]
    return f"{closed[-1]}/" if closed else path
