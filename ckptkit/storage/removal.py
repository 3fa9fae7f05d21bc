"""Single files taken away from a place that was read, and nothing that lies beside them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.core.errors import OutputError, RefusedError
from ckptkit.storage.locations import Place, is_url, local_path
from ckptkit.storage.remote_store import RemoteStore, store_of
from ckptkit.storage.retries import retried
from ckptkit.storage.store_errors import writing_to

_READ_ONLY = frozenset({"hf", "http", "https"})


def refuse_unremovable(root: Place, paths: Collection[str]) -> None:
    """Refuses files that cannot be removed, or that stand for others.

    Args:
        root: The place that they lie in.
        paths: Relative to it.

    Raises:
        RefusedError: If there is one.
    """
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
                f"{path!r} is no file of its own but a link, or lies behind one",
                where=root.location,
                hint="remove what it stands for by hand, and leave --delete-source out",
            )


def remove_files(root: Place, paths: Sequence[str]) -> None:
    """Removes files in the order that they are given in, and folders that are empty then.

    Args:
        root: The place that they lie in; it stays, unless it is left empty.
        paths: Relative to it.

    Raises:
        OutputError: If one stays; so do those after it.
    """
    if is_url(root):
        _remove_objects(root, paths)
        return
    folder = local_path(root).resolve()
    for number, path in enumerate(paths):
        try:
            (folder / path).unlink()
        except OSError as error:
            raise OutputError(
                f"{path!r} cannot be removed, nor {len(paths) - number - 1} files after it:"
                f" {error.strerror}",
                where=root.location,
                hint="the output is whole and verified; remove the rest by hand",
            ) from error
    with suppress(OSError):  # something else lies there, as it may
        for parent in sorted({(folder / path).parent for path in paths}, reverse=True):
            _remove_empty(parent, folder)


def _remove_empty(path: Path, root: Path) -> None:
    while path.is_relative_to(root) and not any(path.iterdir()):
        path.rmdir()
        path = path.parent


def _remove_objects(root: Place, paths: Sequence[str]) -> None:
    store = store_of(root)
    with writing_to(root.location, store.options)():
        base = store.path_of(root.location)
        for path in paths:
            _remove_object(store, f"{base}/{path}")


def _remove_object(store: RemoteStore, path: str) -> None:
    with suppress(FileNotFoundError):  # also where the answer to a first try was lost
        retried(lambda: store.filesystem.rm_file(path), store.patience, what=f"remove {path}")
