"""Where an output may go."""

from __future__ import annotations

import os
from pathlib import Path

from ckptkit.core.errors import RefusedError
from ckptkit.pipeline.opening import PathLike
from ckptkit.storage.staging import output_exists
from ckptkit.storage.workfolder import is_empty


def check_destination(src: PathLike, out: PathLike, *, overwrite: bool) -> None:
    """Refuses destinations that could not be written, before any work is done.

    Raises:
        RefusedError: If source and output lie inside one another.
        OutputExistsError: If the output holds something and is not to be overwritten.
    """  # noqa: DOC501  `output_exists` makes it
    source, target = Path(src).resolve(), Path(out).resolve()
    # A file may well be converted into a folder beside it.
    folder = source if source.is_dir() else source.parent
    if source.is_dir() and (target == folder or folder in target.parents):
        raise RefusedError(
            "the output would lie inside the source",
            where=os.fspath(out),
            hint="choose a directory beside the checkpoint",
        )
    if overwrite and (target == folder or target in folder.parents):
        raise RefusedError(
            "the source lies inside the output, which is to be replaced",
            where=os.fspath(out),
            hint="choose another output directory",
        )
    if not overwrite and target.is_dir() and not is_empty(target):
        raise output_exists(Path(out))
