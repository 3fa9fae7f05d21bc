"""Opens the places that options and arguments name: directories, or prefixes of a store."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ckptkit.core.errors import NotACheckpointError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.base import Folder, is_there
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.place_identity import PlaceRelation, find_overlaps
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of

_DEEP = 64  # folders below a prefix; more than any path has


def check_path(text: PathLike, what: str) -> None:
    """Refuses paths that no system call would take, before one fails on them."""
    if not os.fspath(text):
        raise UsageError("is empty, where a path was expected", where=what)
    if is_url(text):
        return
    try:
        Path(text).resolve()
        Path(text).is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        shown = os.fspath(text)[:80]
        raise UsageError(f"is no usable path: {reason}", where=f"{what} {shown!r}") from error


def open_folder(stack: ExitStack, place: PathLike, option: str) -> Folder:
    """Opens a directory, or a prefix that holds something.

    Args:
        stack: Closes it.
        place: The place as the user named it.
        option: The option, for messages.
    """
    check_path(place, option)
    if not is_url(place):
        if not local_path(place).is_dir():
            raise NotACheckpointError("no such directory", where=f"{option} {place}")
        return stack.enter_context(LocalSource(local_path(place)))
    source = stack.enter_context(open_source(place))
    if not _holds_something(source):
        raise NotACheckpointError("nothing is there", where=f"{option} {place}")
    return source


def open_root(stack: ExitStack, place: PathLike) -> tuple[Folder, str | None]:
    """Opens the folder to search; returns it with the name of the file if the place is a file."""
    if is_url(place):
        return _open_remote_root(stack, place_of(place))
    path = local_path(place)
    if path.is_dir():
        return stack.enter_context(LocalSource(path)), None
    if path.is_file():
        return stack.enter_context(LocalSource(path.parent)), path.name
    there = "neither a file nor a directory" if path.exists() else "no such file or directory"
    raise NotACheckpointError(there, where=os.fspath(place))


def _open_remote_root(stack: ExitStack, place: Place) -> tuple[Folder, str | None]:
    source = stack.enter_context(open_source(place))
    if _holds_something(source):
        return source, None
    parent, name = posixpath.split(place)
    if not parent.endswith("/"):  # nothing is above `s3://bucket`
        above = stack.enter_context(open_source(place.beside(parent)))
        if is_there(above, name):
            return above, name
    raise NotACheckpointError("there is no object at or below this URL", where=place)


def open_others(stack: ExitStack, first: Place, also: Sequence[PathLike]) -> Iterator[Folder]:
    """Opens the further directories of a checkpoint, each place once.

    Places are compared by what they name: a URL may be written with another endpoint or protocol.

    Yields:
        Folders that are neither the first one nor yielded before.
    """
    for place in also:
        check_path(place, "--also")
    pairs = find_overlaps([first, *also]) if also else ()
    repeated = {max(pair) for *pair, how in pairs if how is PlaceRelation.SAME}
    for number, place in enumerate(also, 1):
        if number not in repeated:
            yield open_folder(stack, place, "--also")


def is_folder(place: PathLike) -> bool:
    """Returns whether a place is a directory, or a prefix that holds something."""
    if not is_url(place):
        return local_path(place).is_dir()
    with open_source(place) as source:
        return _holds_something(source)


def is_anything(place: PathLike) -> bool:
    """Returns whether there is a directory or a file."""
    if not is_url(place):
        return local_path(place).exists()
    try:
        with ExitStack() as stack:
            _open_remote_root(stack, place_of(place))
    except NotACheckpointError:
        return False
    return True


def make_absolute(place: PathLike) -> str:
    """Returns a path from the root of its file system on; a URL is absolute."""
    return os.fspath(place) if is_url(place) else str(local_path(place).absolute())


def resolve_path(place: PathLike) -> str:
    """Returns a path with its links followed; object stores have none."""
    return os.fspath(place) if is_url(place) else str(local_path(place).resolve())


def _holds_something(source: Folder) -> bool:
    return next(iter(source.walk(_DEEP)), None) is not None or is_there(source, MANIFEST_NAME)
