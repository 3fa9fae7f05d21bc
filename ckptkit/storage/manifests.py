"""Reading the manifest of a folder; its size is checked before its bytes are read."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.manifest import MANIFEST_NAME, Manifest, check_manifest_size, parse_manifest

if TYPE_CHECKING:  # which needs numpy
    from ckptkit.storage.base import Source


def read_manifest(source: Source, folder: str = "") -> Manifest:
    """Returns the manifest of a folder of a source.

    Raises:
        MissingFileError: If the folder has no manifest.
        FormatError: If the file is too large, or is not a manifest of a known version.
    """
    path = posixpath.join(folder, MANIFEST_NAME)
    where = posixpath.join(source.location, path)
    size = source.stat(path).size_bytes
    check_manifest_size(size, where=where)
    return parse_manifest(source.read(path, 0, size), where=where)


def read_local_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a directory.

    Raises:
        OSError: If it cannot be read.
        FormatError: If the file is too large, or is not a manifest of a known version.
    """
    path = folder / MANIFEST_NAME
    check_manifest_size(path.stat().st_size, where=str(path))
    return parse_manifest(path.read_bytes(), where=str(path))
