"""From a path or a URL as the user gave it to what reads or writes there."""

from __future__ import annotations

from ckptkit.storage.base import Folder, Target
from ckptkit.storage.local import LocalSource
from ckptkit.storage.locations import PathLike, Place, Sources, is_url, local_path, place_of
from ckptkit.storage.staging import LocalTarget

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


def open_source(place: PathLike) -> Folder:
    """Opens a directory, or a prefix of an object store, for reading.

    Raises:
        MissingFileError: If there is none.
        AccessError: If its storage does not let us in.
        RefusedError: If nothing here reads such a URL.
    """
    if is_url(place):
        from ckptkit.storage.remote_source import RemoteSource  # late: it imports fsspec

        return RemoteSource(place_of(place))
    return LocalSource(local_path(place))


def open_target(place: PathLike, *, overwrite: bool) -> Target:
    """Prepares a place for an output, which appears there when it is committed.

    Raises:
        OutputExistsError: If it holds something and is not to be overwritten.
        OutputError: If nothing can be written there.
        RefusedError: If nothing here writes to such a URL.
    """
    if is_url(place):
        from ckptkit.storage.remote_target import open_remote_target  # late: it imports fsspec

        return open_remote_target(place_of(place), overwrite=overwrite)
    return LocalTarget(local_path(place), overwrite=overwrite)
