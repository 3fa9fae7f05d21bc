"""Opening a path or a URL, for reading or for writing.

Imports are late: those of stores need fsspec, and most commands read directories only.
"""

from __future__ import annotations

from ckptkit.storage.base import Source, Target
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.locations import PathLike, Place, Sources, is_url, local_path, place_of

__all__ = [
    "PathLike",
    "Place",
    "Sources",
    "is_url",
    "local_path",
    "open_source",
    "open_target",
    "place_of",
]


def open_source(place: PathLike) -> Source:
    """Opens a directory, or a prefix of an object store, for reading."""
    if is_url(place):
        from ckptkit.storage.remote.source import RemoteSource

        return RemoteSource(place_of(place))
    return LocalSource(local_path(place))


def open_target(place: PathLike, *, overwrite: bool) -> Target:
    """Prepares a place for an output, which appears there when it is committed."""
    if is_url(place):
        from ckptkit.storage.remote.stream_target import open_remote_target

        return open_remote_target(place_of(place), overwrite=overwrite)
    from ckptkit.storage.local.target import LocalTarget

    return LocalTarget(local_path(place), overwrite=overwrite)
