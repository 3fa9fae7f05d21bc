"""Writing an output through any file system of fsspec: every file from its start to its end.

What fsspec promises of all stores is a file that is opened, written in order and closed, and
that readers see when it is committed. So files are left open until the commit, which closes them
one by one, the manifest last.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from ckptkit.core.errors import OutputError
from ckptkit.storage.names import check_relative
from ckptkit.storage.places import Place
from ckptkit.storage.remote_store import RemoteStore
from ckptkit.storage.store_errors import Writing, output_there, quietly, writing_to
from ckptkit.storage.streams import Room, Stream

_BLOCK_BYTES = 8 << 20


class StreamTarget:
    """A folder of a store that holds a whole output once it is committed.

    Writes have to come in about the order of files and bytes, as an execution's tasks do.
    """

    def __init__(self, place: Place, *, overwrite: bool) -> None:
        """Looks at what is there.

        Args:
            place: The URL and its options.
            overwrite: Whether what lies there is replaced by the commit.

        Raises:
            OutputExistsError: If something lies there and is not to be replaced.
        """
        # A client of its own: the files of a transaction are those of its file system.
        self._store = RemoteStore(place.protocol, place.options, place.location)
        self._filesystem = self._store.filesystem
        self._location = place.location
        self._writing: Writing = writing_to(place.location, self._store.options)
        self._overwrite = overwrite
        self._streams: dict[str, Stream] = {}
        self._published: list[str] = []
        self._room = Room()
        with self._writing():
            self._path = self._store.path_of(place.location)
            self._refuse_filled()
        self._filesystem.start_transaction()

    @property
    def location(self) -> str:
        """The URL, as it was named."""
        return self._location

    def free_bytes(self) -> int | None:
        """Returns None: nobody knows how much room a store has."""
        return None

    def create(self, path: str, size_bytes: int) -> None:
        """Takes note of a file of that size; it is opened with its first bytes.

        Raises:
            OutputError: If it exists already.
            UnsafePathError: If it would lie outside the output.
        """
        check_relative(path, self._location)
        if path in self._streams:
            raise OutputError(f"the file {path!r} is there already", where=self._location)
        self._streams[path] = Stream(lambda: self._open(path), size_bytes, self._room)

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Writes bytes of a created file; those that come too early wait for their turn.

        Raises:
            OutputError: If the store does not take them.
            ValueError: If the range is not inside a file that was created.
        """
        stream = self._streams.get(path)
        if stream is None or start < 0 or start + data.nbytes > stream.size_bytes:
            raise ValueError(f"bytes [{start}, {start + data.nbytes}) are not in file {path!r}")
        with self._writing():
            stream.write(start, data.cast("B"))

    def give_up(self) -> None:
        """Lets those go who wait for a write that will not come; nothing is written any more."""
        self._room.give_up()

    def commit(self, last: str) -> None:
        """Makes everything visible, the file `last` after all others.

        Readers of what is replaced lose its `last` file first, and so never take old for new.

        Raises:
            OutputExistsError: If the place was filled by somebody else meanwhile.
            OutputError: If the store refuses.
            ValueError: If `last` was not created, or a file lacks bytes.
        """
        if last not in self._streams:
            raise ValueError(f"file {last!r} was not created")
        lacking = [path for path, stream in self._streams.items() if not stream.is_whole]
        if lacking:
            raise ValueError(f"bytes are missing of {lacking[0]!r}")
        with self._writing():
            self._refuse_filled()
            old = self._store.listing(self._path) if self._overwrite else {}
            if last in old:
                self._remove(last)
            for path in sorted(self._streams, key=lambda path: (path == last, path)):
                self._published.append(path)
                self._streams[path].publish()
        made = set(self._streams)
        self._streams.clear()
        self._published.clear()
        self._filesystem.transaction.files.clear()
        for path in sorted(old.keys() - made):
            quietly(self._writing, partial(self._remove, path))

    def abandon(self) -> None:
        """Removes what was written; does nothing after a commit."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            quietly(self._writing, stream.discard)
        published, self._published = self._published, []
        for path in published:  # the last one of a commit that failed may be visible or not
            quietly(self._writing, partial(self._remove, path))
        self._filesystem.transaction.files.clear()

    def _open(self, path: str) -> Any:
        name = f"{self._path}/{path}"
        try:
            return self._filesystem.open(name, "wb", block_size=_BLOCK_BYTES)
        except FileNotFoundError:  # a store with folders that have to be made
            self._filesystem.makedirs(name.rpartition("/")[0], exist_ok=True)
            return self._filesystem.open(name, "wb", block_size=_BLOCK_BYTES)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._path}/{path}")

    def _refuse_filled(self) -> None:
        if not self._overwrite and self._store.listing(self._path):
            raise output_there(self._location)
