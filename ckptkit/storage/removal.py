"""Removing single files of a source, and nothing else in its folders."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.core.errors import OutputError, RefusedError
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import replace_file
from ckptkit.storage.locations import Place, is_url, local_path
from ckptkit.storage.remote.errors import error_translator
from ckptkit.storage.remote.store import RemoteStore, get_store

_READ_ONLY = frozenset({"hf", "http", "https"})


def refuse_unremovable(root: Place, paths: Collection[str]) -> None:
    if is_url(root):
        if root.protocol in _READ_ONLY:
            raise RefusedError(
                f"nothing can be removed from {root.protocol}://",
                where=root.location,
                hint="leave --delete-source out",
            )
        return
    folder = local_path(root).resolve()
    for path in paths:
        file = folder / path
        if file.resolve() != file or not file.is_file():
            raise RefusedError(
                f"{path!r} is no file of its own but a link, or is behind one",
                where=root.location,
                hint="remove the file that it points to by hand, and leave out --delete-source",
            )


def put_record(root: Place, name: str, data: bytes) -> None:
    """Writes a small file that is durable and whole, or not there."""
    if is_url(root):
        store = get_store(root)
        with error_translator(root.location, store.options)():
            path = f"{store.path_of(root.location)}/{name}"
            store.put_small(path, data)
        return
    folder = local_path(root).resolve()
    try:
        replace_file(folder / name, data, LOCAL_DISK, draft=folder / f"{name}.new")
    except OSError as error:
        raise OutputError(
            f"the removal cannot be recorded: {error.strerror}",
            where=root.location,
            hint="the output is whole and verified; the source was not removed",
        ) from error


def remove_files(root: Place, paths: Sequence[str], *, last: str) -> None:
    """Removes files in the order given, `last` at the end, and folders that are empty then.

    Some may have been removed already; the root is removed too if it is empty.
    """
    if is_url(root):
        store = get_store(root)
        with error_translator(root.location, store.options)():
            base = store.path_of(root.location)
            for path in (*paths, last):
                _remove_object(store, base, path)
        return
    folder = local_path(root).resolve()
    _remove_file(root, folder / f"{last}.new", f"the draft of its record, and {len(paths)} files")
    for number, path in enumerate(paths):
        _remove_file(root, folder / path, f"{path!r}, and {len(paths) - number - 1} files after it")
    for parent in sorted({(folder / path).parent for path in paths}, reverse=True):
        _remove_empty(parent, folder)
    _remove_file(root, folder / last, "the record of the removal")
    _remove_empty(folder, folder)


def _remove_file(root: Place, path: Path, what: str) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot be removed: {what}: {error.strerror}",
            where=root.location,
            hint="the output is whole and verified; run the same command again, or remove the"
            " rest by hand",
        ) from error


def _remove_empty(path: Path, root: Path) -> None:
    with suppress(OSError):  # another file is there, which is allowed
        while path.is_relative_to(root):
            if path.exists():
                path.rmdir()
            path = path.parent


def _remove_object(store: RemoteStore, base: str, path: str) -> None:
    store.delete(base, [path])
