"""From a path or a URL as the user gave it to what reads or writes there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.core.errors import RefusedError
from ckptkit.storage.base import Folder, Target
from ckptkit.storage.local import LocalSource
from ckptkit.storage.staging import LocalTarget

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Place(os.PathLike[str]):
    """A location with what its storage has to be told, such as an endpoint and its keys.

    It can stand wherever a path can: `os.fspath` gives the location alone.

    Attributes:
        location: A local path, or a URL such as `s3://bucket/run`.
        options: What fsspec is given for it; secrets, and therefore in no message and no `repr`.
    """

    location: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __fspath__(self) -> str:
        return self.location


def is_url(place: PathLike) -> bool:
    """Says whether a place is no path of this machine's file systems."""
    return "://" in os.fspath(place)


def open_source(place: PathLike) -> Folder:
    """Opens a directory, or a prefix of an object store, for reading.

    Raises:
        MissingFileError: If there is none.
        RefusedError: If nothing here reads such a URL.
    """  # noqa: DOC501  `LocalSource` makes the first
    if is_url(place):
        raise _not_yet(place)
    return LocalSource(Path(place))


def open_target(place: PathLike, *, overwrite: bool) -> Target:
    """Prepares a place for an output, which appears there when it is committed.

    Raises:
        OutputExistsError: If it holds something and is not to be overwritten.
        OutputError: If nothing can be written there.
        RefusedError: If nothing here writes to such a URL.
    """  # noqa: DOC501  `LocalTarget` makes the first two
    if is_url(place):
        raise _not_yet(place)
    return LocalTarget(Path(place), overwrite=overwrite)


def _not_yet(place: PathLike) -> RefusedError:
    return RefusedError("URLs are not read by this version", where=os.fspath(place))
