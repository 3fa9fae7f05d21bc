"""Where an output may go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptkit.core.errors import RefusedError
from ckptkit.formats.dcp import METADATA
from ckptkit.pipeline.opening import PathLike
from ckptkit.pipeline.source_places import check_path
from ckptkit.storage.places import Place, is_url, local_path, place_of
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
    """
    check_path(src, "SRC")
    check_path(out, "OUT")
    read = [(one, "source") for one in (src, *also)]
    if base is not None:
        read.append((base, "base"))
    if is_url(out):
        _check_remote(read, place_of(out), overwrite=overwrite)
        return
    for place, what in read:
        if not is_url(place):
            _check_apart(local_path(place).resolve(), local_path(out), what, overwrite=overwrite)
    _check_local(local_path(out), overwrite=overwrite)


def _check_remote(read: Sequence[tuple[PathLike, str]], out: Place, *, overwrite: bool) -> None:
    from ckptkit.storage.remote_target import check_remote_target  # late: it imports fsspec

    for place, what in read:
        if is_url(place):
            _refuse_nested(place_of(place), out, what)
    check_remote_target(out, overwrite=overwrite)


def _refuse_nested(source: Place, out: Place, what: str) -> None:
    if not source.shares_store(out):
        return
    outer, inner = f"{source.inner_path}/", f"{out.inner_path}/"
    if inner.startswith(outer):
        raise RefusedError(
            f"the output would lie inside the {what}",
            where=out.location,
            hint="choose a place beside the checkpoint",
        )
    if outer.startswith(inner):
        raise RefusedError(
            f"the {what} lies inside the output", where=out.location, hint="choose another place"
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


def _check_apart(source: Path, out: Path, what: str, *, overwrite: bool) -> None:
    target = out.resolve()
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
