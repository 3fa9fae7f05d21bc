"""Where an output may go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptkit.core.errors import RefusedError
from ckptkit.formats.dcp import METADATA
from ckptkit.pipeline.opening import PathLike, check_path
from ckptkit.storage.staging import output_exists
from ckptkit.storage.workfolder import is_empty


def check_destination(
    src: PathLike,
    out: PathLike,
    *,
    overwrite: bool,
    also: Sequence[PathLike] = (),
    base: PathLike | None = None,
) -> None:
    """Refuses destinations that could not be written, before any work is done.

    Args:
        src: The source.
        out: The output.
        overwrite: Whether an output that holds something is replaced.
        also: Further directories of the source.
        base: The model that is read besides, or None.

    Raises:
        UsageError: If one of them is no usable path.
        RefusedError: If source and output lie inside one another, or if the current directory
            would be replaced.
        OutputExistsError: If the output holds something and is not to be overwritten.
    """  # noqa: DOC501  `output_exists` makes it
    check_path(os.fspath(src), "SRC")
    check_path(os.fspath(out), "OUT")
    for one in (src, *also):
        _check_apart(Path(one).resolve(), out, "source", overwrite=overwrite)
    if base is not None:
        _check_apart(Path(base).resolve(), out, "base", overwrite=overwrite)
    target, here = Path(out).resolve(), Path.cwd()
    if overwrite and (target == here or target in here.parents) and not is_empty(target):
        raise RefusedError(
            "the output would replace the directory that this command runs in",
            where=os.fspath(out),
            hint="name a directory below it",
        )
    if not overwrite and target.is_dir() and not is_empty(target):
        raise output_exists(Path(out))


def _check_apart(source: Path, out: PathLike, what: str, *, overwrite: bool) -> None:
    target = Path(out).resolve()
    # A file may well be converted into a folder beside it, unless it is a part of many.
    folder = source if source.is_dir() else source.parent
    is_part = source.suffix == ".distcp" or source.name == METADATA
    if (source.is_dir() or is_part) and (target == folder or folder in target.parents):
        raise RefusedError(
            f"the output would lie inside the {what}",
            where=os.fspath(out),
            hint="choose a directory beside the checkpoint",
        )
    if overwrite and (target == folder or target in folder.parents):
        raise RefusedError(
            f"the {what} lies inside the output, which is to be replaced",
            where=os.fspath(out),
            hint="choose another output directory",
        )
