"""Reading what a directory says of itself, from a local disk."""

from __future__ import annotations

from pathlib import Path

from ckptkit.core.manifest import MANIFEST_NAME, Manifest, check_manifest_size, parse_manifest


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a directory."""
    path = folder / MANIFEST_NAME
    check_manifest_size(path.stat().st_size, where=str(path))
    return parse_manifest(path.read_bytes(), where=str(path))
