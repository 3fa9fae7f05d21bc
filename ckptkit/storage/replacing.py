"""What an output may replace: an earlier output, and no checkpoint that is not part of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from ckptkit.core.errors import CkptkitError, OutputExistsError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME, check_manifest_size, parse_manifest
from ckptkit.storage.local.workdir import entries

_EXAMPLES = 3
_TRAINING = "training"
_COUNTED = 1000
_NAMES = frozenset({".metadata", ".snapshot_metadata", "latest"})
_ENDINGS = (
    *(".distcp", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".metadata"),
    *(".npz", ".h5", ".msgpack", ".onnx", ".index.json"),
)


def refuse_unnamed(
    found: Collection[str], manifest: bytes | None, location: str, known: Collection[str] = ()
) -> None:
    """Refuses to replace checkpoints and weights that no manifest there names.

    Args:
        found: The files of the place, relative to it.
        manifest: The content of its manifest, None where it has none.
        location: What messages call the place.
        known: Further files that may go, such as those of an unfinished commit.
    """
    refused = sorted(name for name in set(found) - set(known) if _is_of_checkpoint(name))
    _refuse(_unnamed(refused, manifest, location), location, has_manifest=manifest is not None)


def refuse_unnamed_in(out: Path, named_as: str) -> None:
    """Refuses to replace a directory with checkpoints or weights that its manifest does not name.

    Args:
        out: The directory.
        named_as: What messages call it.
    """
    path = out / MANIFEST_NAME
    try:
        check_manifest_size(path.stat().st_size, where=str(path))
        manifest: bytes | None = path.read_bytes()
    except (OSError, CkptkitError):
        manifest = None
    found = (name for name in _files_in(out) if _is_of_checkpoint(name))
    unnamed = list(islice(_unnamed(found, manifest, named_as), _COUNTED))
    _refuse(unnamed, named_as, has_manifest=manifest is not None)


def manifest_mark(out: Path) -> tuple[int, ...]:
    """Returns what tells the manifest in a directory from one that another run puts there."""
    try:
        found = (out / MANIFEST_NAME).stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def manifest_digest(out: Path) -> str:
    """Returns the same as `manifest_mark` on all machines that see a directory."""
    try:
        with (out / MANIFEST_NAME).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def refuse_newer(now: str | tuple[int, ...], seen: str | tuple[int, ...], named_as: str) -> None:
    """Refuses to replace an output that was put in a directory after this run had looked at it.

    Args:
        now: What `manifest_mark` or `manifest_digest` returns at the commit.
        seen: What it returned when the run began.
        named_as: What messages call the directory.
    """
    if now and now != seen:
        raise OutputExistsError(
            "another run has put its output there since this one began",
            where=named_as,
            hint="run one command at a time for an output, and this one again",
        )


def removable(
    found: Collection[str], manifest: bytes | None, where: str, known: Collection[str] = ()
) -> set[str]:
    """Returns the files of a place in a store that go when its output is replaced.

    Files that the earlier manifest does not name stay; all files go where it cannot be read.
    """
    if manifest is not None and not _is_readable(manifest, where):
        return set(found)
    return set(found) & {MANIFEST_NAME, *known, *named_files(manifest, where)}


def _unnamed(found: Iterable[str], manifest: bytes | None, where: str) -> Iterator[str]:
    named = named_files(manifest, where)
    # A manifest that cannot be read is that of a damaged output, whose files stand next to it.
    is_damaged = manifest is not None and not _is_readable(manifest, where)
    for name in found:
        if name not in named and not (is_damaged and "/" not in name):
            yield name


def _is_of_checkpoint(name: str) -> bool:
    """Tells by its name whether a file holds weights or state of a training, or is a manifest.

    >>> _is_of_checkpoint("checkpoint-4/optimizer_0/.metadata"), _is_of_checkpoint("notes.md")
    (True, False)
    """
    last = name.rpartition("/")[2]
    is_nested_manifest = last == MANIFEST_NAME and name != MANIFEST_NAME
    return last in _NAMES or is_nested_manifest or last.lower().endswith(_ENDINGS)


def _is_readable(manifest: bytes, where: str) -> bool:
    try:
        parse_manifest(manifest, where=where)
    except CkptkitError:
        return False
    return True


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


def _refuse(unnamed: Iterable[str], location: str, *, has_manifest: bool) -> None:
    listed = list(unnamed)
    if not listed:
        return
    examples = ", ".join(repr(name) for name in listed[:_EXAMPLES])
    rest = len(listed) - _EXAMPLES
    more = f" and {rest:,} more" if rest > 0 else ""
    by = f"its {MANIFEST_NAME} does not name" if has_manifest else f"no {MANIFEST_NAME} names"
    raise RefusedError(
        f"holds checkpoint or weight files that {by} as files of an output, and --overwrite"
        f" replaces an earlier output only: {examples}{more}",
        where=location,
        hint="move them away, or remove them by hand; or choose another place",
    )
