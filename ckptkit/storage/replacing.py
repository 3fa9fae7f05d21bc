"""What an output may take the place of: an earlier output, and nothing that was put there since."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME, check_manifest_size, parse_manifest
from ckptkit.storage.workfolder import entries

_EXAMPLES = 3
_TRAINING = "training"
_COUNTED = 1000


def refuse_unnamed(
    found: Collection[str], manifest: bytes | None, location: str, known: Collection[str] = ()
) -> None:
    """Refuses to replace files that no manifest there names.

    Args:
        found: The files of the place, relative to it.
        manifest: The content of its manifest, None where it has none.
        location: What messages call the place.
        known: Further files that may go, such as those of an unfinished commit.

    Raises:
        RefusedError: If there is a file that is not of an earlier output.
    """
    named = {MANIFEST_NAME, *known, *named_files(manifest, location)}
    _refuse(sorted(set(found) - named), location, has_manifest=manifest is not None)


def refuse_unnamed_in(out: Path, named_as: str) -> None:
    """Refuses to replace a directory with files that its manifest does not name.

    Args:
        out: The directory.
        named_as: What messages call it.

    Raises:
        RefusedError: If there is a file that is not of an earlier output.
    """
    path = out / MANIFEST_NAME
    try:
        check_manifest_size(path.stat().st_size, where=str(path))
        manifest: bytes | None = path.read_bytes()
    except (OSError, CkptkitError):
        manifest = None
    named = {MANIFEST_NAME, *named_files(manifest, named_as)}
    unnamed = (file for file in _files_in(out) if file not in named)
    _refuse(list(islice(unnamed, _COUNTED)), named_as, has_manifest=manifest is not None)


def named_files(manifest: bytes | None, where: str) -> frozenset[str]:
    """Returns the files that a manifest names; none where it cannot be read."""
    if manifest is None:
        return frozenset()
    try:
        found = parse_manifest(manifest, where=where)
    except CkptkitError:
        return frozenset()
    # A step of a training is no output, whatever its manifest names.
    return frozenset() if found.kind == _TRAINING else frozenset(found.files)


def _files_in(out: Path) -> Iterator[str]:
    """Yields the files and links of a directory, sorted within each folder."""
    for entry in sorted(entries(out)):
        if entry.is_symlink() or not entry.is_dir():
            yield entry.name
            continue
        for folder, folders, files in os.walk(entry):
            folders.sort()
            links = [name for name in folders if Path(folder, name).is_symlink()]
            for name in sorted([*files, *links]):
                yield Path(folder, name).relative_to(out).as_posix()


def _refuse(unnamed: list[str], location: str, *, has_manifest: bool) -> None:
    if not unnamed:
        return
    examples = ", ".join(repr(name) for name in unnamed[:_EXAMPLES])
    rest = len(unnamed) - _EXAMPLES
    more = f" and {rest:,} more" if rest > 0 else ""
    whose = f"its {MANIFEST_NAME}" if has_manifest else f"no {MANIFEST_NAME}"
    verb = "does not name as those of an output" if has_manifest else "names"
    raise RefusedError(
        f"holds files that {whose} {verb}, and only an earlier output is replaced:"
        f" {examples}{more}",
        where=location,
        hint="move them away, or remove them by hand; or choose another place",
    )
