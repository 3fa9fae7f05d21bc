"""Names of files and folders, judged without looking at the disk."""

from __future__ import annotations

from pathlib import PurePath

from ckptkit.core.errors import UnsafePathError

WORK_INFIX = ".ckptkit-"
"""In the names of the hidden folders in which outputs are staged."""


def is_work_folder(name: str) -> bool:
    return name.startswith(".") and WORK_INFIX in name


def hidden_name(name: str, mark: str) -> str:
    """Returns the name of a hidden folder in which the folder `name` is staged or removed.

    >>> hidden_name("checkpoint-5", "0123abcd-1")
    '.checkpoint-5.ckptkit-0123abcd-1'
    """
    return f".{name}{WORK_INFIX}{mark}"


def check_relative(path: str, where: str) -> None:
    """Refuses a path that would lead out of the folder it is relative to."""
    pure = PurePath(path)
    if pure.anchor or ".." in pure.parts or not pure.parts or "\0" in path:
        raise UnsafePathError(
            f"the file name {path!r} was found where a path inside the folder was expected",
            where=where,
        )


def check_below(name: str, place: str) -> None:
    """Refuses to remove an object that is not below a place.

    Args:
        name: Of an object, relative to the place; a slash at its end belongs to a folder's marker.
        place: Bucket and folders.
    """
    parts = name.removesuffix("/").split("/")
    if not place.strip("/") or not set(parts).isdisjoint({"", ".", ".."}):
        raise UnsafePathError(
            f"{name!r} was to be removed, which is no name below the place",
            where=place,
            hint="nothing was removed; remove it by hand if it is not needed",
        )
