"""Where an output may go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ckptkit.core.errors import RefusedError
from ckptkit.formats.dcp import METADATA
from ckptkit.pipeline.opening import PathLike
from ckptkit.pipeline.source_places import check_path
from ckptkit.storage.place_identity import Overlap, find_overlap
from ckptkit.storage.places import Place, is_url, local_path, place_of
from ckptkit.storage.replacing import refuse_unnamed_in
from ckptkit.storage.staging import output_exists
from ckptkit.storage.workfolder import is_empty


def check_destination(
    src: PathLike,
    out: PathLike,
    *,
    overwrite: bool,
    also: Sequence[PathLike] = (),
    base: PathLike | None = None,
    like: PathLike | None = None,
) -> None:
    """Refuses destinations that could not be written, before any work is done.

    Args:
        src: The source.
        out: The output.
        overwrite: Whether an output that holds something is replaced.
        also: Further directories of the source.
        base: The model that is read besides, or None.
        like: The model whose file names are kept, or None; the output may take its place.

    Raises:
        UsageError: If one of them is no usable path.
        RefusedError: If source and output lie inside one another, or if the current directory
            would be replaced.
        OutputExistsError: If the output holds something and is not to be overwritten.
    """
    check_path(src, "SRC")
    check_path(out, "OUT")
    read = [(one, "source") for one in (src, *also)]
    if base is not None:
        read.append((base, "base"))
    for place, what in read:
        _refuse_nested(place_of(place), place_of(out), what, overwrite=overwrite)
    if like is not None and find_overlap(out, like) is Overlap.AROUND:
        _refuse_around(place_of(out), "model of --like")
    if is_url(out):
        from ckptkit.storage.remote_target import check_remote_target  # late: it imports fsspec

        check_remote_target(place_of(out), overwrite=overwrite)
    else:
        _check_local(local_path(out), overwrite=overwrite)


def _refuse_nested(source: Place, out: Place, what: str, *, overwrite: bool) -> None:
    folder, is_single = source, False
    if not is_url(source) and not local_path(source).exists():
        return  # the reader says that it is missing
    if not is_url(source) and local_path(source).is_file():
        path = local_path(source).resolve()
        folder = place_of(path.parent)
        # A file may be converted into a folder in its own, unless it is a part of a checkpoint.
        is_single = path.suffix != ".distcp" and path.name != METADATA
    overlap = find_overlap(out, folder)
    if overlap is Overlap.NONE or (overlap is Overlap.INSIDE and is_single):
        return
    if overlap is Overlap.INSIDE or (overlap is Overlap.SAME and not is_single):
        raise RefusedError(
            f"the output would lie inside the {what}",
            where=out.location,
            hint="choose a place beside the checkpoint",
        )
    if overwrite or is_url(out):
        _refuse_around(out, what)


def _refuse_around(out: Place, what: str) -> NoReturn:
    raise RefusedError(
        f"the {what} lies inside the output, which is to be replaced",
        where=out.location,
        hint="choose another place",
    )


def _check_local(out: Path, *, overwrite: bool) -> None:
    target, here = out.resolve(), Path.cwd()
    if overwrite and (target == here or target in here.parents) and not is_empty(target):
        raise RefusedError(
            "the output would replace the directory that this command runs in",
            where=os.fspath(out),
            hint="name a directory below it",
        )
    if not overwrite and target.is_dir() and not is_empty(target):
        raise output_exists(out)
    if overwrite and target.is_dir():
        refuse_unnamed_in(target, os.fspath(out))
