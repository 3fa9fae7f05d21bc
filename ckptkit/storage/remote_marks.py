"""Small objects that are listed, put and deleted below one prefix of an object store."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ckptkit.core.errors import CkptkitError, OutputError
from ckptkit.storage.places import Place
from ckptkit.storage.remote_errors import as_input_error, told
from ckptkit.storage.remote_store import StoredObject, store_of

_MOST_BYTES = 64 << 20
Answer = TypeVar("Answer")


class MarkObjects:
    """What is done to the objects below a prefix, with the errors that ckptkit tells."""

    def __init__(self, place: Place) -> None:
        """Opens the prefix.

        Args:
            place: A URL, with the options of its storage.

        Raises:
            RefusedError: If the client for it is not installed.
            AccessError: If the storage does not let us in.
        """
        self._place = place
        self._store = store_of(place)
        self._root = self._read("", lambda: self._store.path_of(place))

    @property
    def location(self) -> str:
        """The URL as the user named it."""
        return str(self._place)

    @property
    def protocol(self) -> str:
        """The kind of store, such as `s3`."""
        return self._store.protocol

    def listing(self, folder: str) -> dict[str, StoredObject]:
        """Returns the objects below a folder, by their paths relative to it.

        Raises:
            InputError: If it cannot be listed.
        """
        return self._read(folder, lambda: self._store.listing(self._at(folder)))

    def look_up(self, path: str) -> StoredObject | None:
        """Returns an object; None where it is not there.

        Raises:
            InputError: If the store does not say.
        """
        return self._read(path, lambda: self._store.look_up(self._at(path)))

    def get(self, path: str) -> Any:
        """Returns the JSON value of an object; None where it is gone, or none.

        Raises:
            InputError: If it cannot be read.
        """
        found = self.look_up(path)
        if found is None or found.size_bytes > _MOST_BYTES:
            return None

        data = self._read(path, lambda: self._store.get_small(self._at(path)))
        if data is None:
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return None

    def put(self, path: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON value.

        Raises:
            OutputError: If it cannot be written.
        """
        data = json.dumps(value).encode()

        self._change("written", path, lambda: self._store.put_small(self._at(path), data))

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes objects; those that are gone already are no error.

        Raises:
            OutputError: If one cannot be deleted.
        """
        if paths:
            self._change("removed", paths[0], lambda: self._store.delete(self._root, paths))

    def folder_markers(self, folder: str) -> list[str]:
        """Returns the empty objects that stand for a folder and for those in it, by their paths.

        Raises:
            InputError: If they cannot be listed.
        """
        names = self._read(folder, lambda: self._store.folder_markers(self._at(folder)))
        return [f"{folder}/{name}" for name in names]

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _read(self, path: str, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001  clients raise what they like
            raise as_input_error(
                error, where=self._where(path), options=self._place.options
            ) from None

    def _change(self, verb: str, path: str, ask: Callable[[], object]) -> None:
        try:
            ask()
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001  clients raise what they like
            raise OutputError(
                f"cannot be {verb}: {told(error, self._place.options)}",
                where=self._where(path),
                hint="see whether the credentials allow it",
            ) from None

    def _where(self, path: str) -> str:
        return posixpath.join(self.location, path)
