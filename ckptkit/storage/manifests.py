"""The manifest of a folder: reading it, and which files of an earlier output it lets one replace.

The size of a manifest is checked before its bytes are read.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ckptkit.core.errors import CkptkitError, OutputExistsError, RefusedError
from ckptkit.core.manifest import (
    MANIFEST_NAME,
    TRAINING,
    Manifest,
    check_manifest_size,
    parse_manifest,
)
from ckptkit.core.text import list_first
from ckptkit.storage.local.workdir import list_entries

if TYPE_CHECKING:  # which needs numpy
    from ckptkit.storage.base import Source

_EXAMPLES = 3
_COUNTED = 1000
_NAMES = frozenset({".metadata", ".snapshot_metadata", "latest"})
_ENDINGS = (
    *(".distcp", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".metadata"),
    *(".npz", ".h5", ".msgpack", ".onnx", ".index.json"),
)


def read_manifest(source: Source, folder: str = "") -> Manifest:
    path = posixpath.join(folder, MANIFEST_NAME)
    where = posixpath.join(source.location, path)
    size = source.stat(path).size_bytes
    check_manifest_size(size, where=where)
    return parse_manifest(source.read(path, 0, size), where=where)


def read_local_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a directory; raises an `OSError` if it cannot be read."""
    path = folder / MANIFEST_NAME
    check_manifest_size(path.stat().st_size, where=str(path))
    return parse_manifest(path.read_bytes(), where=str(path))


class EarlierOutput(Struct, frozen=True):
    """What the manifest of a place says of the output that is to be replaced.

    Attributes:
        has_manifest: Whether there is one that can be read at all.
        is_damaged: Whether it is not a valid manifest.
        files: The files that it names; none for a step of a training run, which is no output.
    """

    has_manifest: bool = False
    is_damaged: bool = False
    files: frozenset[str] = frozenset()

    @classmethod
    def from_manifest(cls, data: bytes | None, where: str) -> EarlierOutput:
        if data is None:
            return cls()
        try:
            manifest = parse_manifest(data, where=where)
        except CkptkitError:
            return cls(has_manifest=True, is_damaged=True)
        is_output = manifest.kind != TRAINING
        return cls(has_manifest=True, files=frozenset(manifest.files) if is_output else frozenset())

    def unnamed(self, paths: Iterable[str]) -> Iterator[str]:
        """Yields the files that do not belong to the output.

        With a damaged manifest, all files in the same folder count as its files.
        """
        for name in paths:
            if name not in self.files and not (self.is_damaged and "/" not in name):
                yield name

    def removable(self, paths: Collection[str], unfinished: Collection[str] = ()) -> set[str]:
        """Returns the files of a place in a store that are removed when its output is replaced.

        Files that the manifest does not name stay, but for `unfinished`, further files of the
        output; all files are removed where it is damaged.
        """
        if self.is_damaged:
            return set(paths)
        return set(paths) & {MANIFEST_NAME, *unfinished, *self.files}


def refuse_unnamed(
    paths: Collection[str], earlier: EarlierOutput, location: str, unfinished: Collection[str] = ()
) -> None:
    """Refuses to replace checkpoints and weights that no manifest there names.

    `unfinished` may be replaced, such as the files of an unfinished commit.
    """
    checked = sorted(name for name in set(paths) - set(unfinished) if _is_of_checkpoint(name))
    _refuse(earlier.unnamed(checked), location, has_manifest=earlier.has_manifest)


def refuse_unnamed_in(out: Path, named_as: str) -> None:
    """Refuses to replace checkpoints or weights that the manifest of a directory does not name."""
    path = out / MANIFEST_NAME
    try:
        check_manifest_size(path.stat().st_size, where=str(path))
        manifest: bytes | None = path.read_bytes()
    except (OSError, CkptkitError):
        manifest = None
    earlier = EarlierOutput.from_manifest(manifest, named_as)
    paths = (name for name in _files_in(out) if _is_of_checkpoint(name))
    unnamed = list(islice(earlier.unnamed(paths), _COUNTED))
    _refuse(unnamed, named_as, has_manifest=earlier.has_manifest)


def manifest_digest(out: Path) -> str:
    """Returns a digest of the manifest of a directory: the same value on all machines."""
    try:
        with (out / MANIFEST_NAME).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def refuse_newer(now: object, seen: object, named_as: str) -> None:
    """Refuses to replace an output that another run committed after this run began.

    `now` and `seen` identify the manifest, by `manifest_digest` or an ETag; `now` is false where
    there is none.
    """
    if now and now != seen:
        raise OutputExistsError(
            "another run has put its output there since this one began",
            where=named_as,
            hint="run one command at a time for an output, and this one again",
        )


def _is_of_checkpoint(name: str) -> bool:
    """Says by its name whether a file holds weights or state of a training, or is a manifest.

    >>> _is_of_checkpoint("checkpoint-4/optimizer_0/.metadata"), _is_of_checkpoint("notes.md")
    (True, False)
    """
    last = name.rpartition("/")[2]
    is_nested_manifest = last == MANIFEST_NAME and name != MANIFEST_NAME
    return last in _NAMES or is_nested_manifest or last.lower().endswith(_ENDINGS)


def _files_in(out: Path) -> Iterator[str]:
    """Yields the files and links of a directory, sorted within each folder."""
    for entry in sorted(list_entries(out)):
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
    by = f"its {MANIFEST_NAME} does not name" if has_manifest else f"no {MANIFEST_NAME} names"
    raise RefusedError(
        f"holds checkpoint or weight files that {by} as files of an output, and --overwrite"
        f" replaces an earlier output only: {list_first(listed, _EXAMPLES)}",
        where=location,
        hint="move them away, or remove them by hand; or choose another place",
    )
