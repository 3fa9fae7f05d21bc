"""Small files that the user has saved with a step."""

from __future__ import annotations

from pathlib import PurePosixPath

from ckptkit.core.errors import UsageError
from ckptkit.core.manifest import MANIFEST_NAME, SIDE_FOLDER
from ckptkit.core.texts import a_kind
from ckptkit.training.pieces import SmallFile


def checked_file(name: str, data: bytes) -> SmallFile:
    """Returns a file of the user's, to lie in a step's directory.

    Args:
        name: Of the file, relative to the directory.
        data: What it holds.

    Raises:
        UsageError: If it is no name for a file, taken by a step's own files, or there are no bytes.
    """
    where = f"files[{name!r}]"
    if not isinstance(data, bytes):
        raise UsageError(f"{a_kind(data)} was found where bytes were expected", where=where)
    pure = PurePosixPath(name)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in name:
        raise UsageError("no name of a file in the step's directory was found", where=where)
    if str(pure) == MANIFEST_NAME or pure.parts[0] == SIDE_FOLDER or pure.suffix == ".distcp":
        raise UsageError(
            "this name is taken by files of the step itself", where=where, hint="choose another"
        )
    return SmallFile(str(pure), data)
