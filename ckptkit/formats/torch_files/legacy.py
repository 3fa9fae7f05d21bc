"""The files that torch wrote before 1.6, and writes still when it is asked to.

Five pickles follow one another: a magic number, the version of the layout, facts about the
machine, the object, and the keys of the storages; then, key by key, a count of elements (int64)
and the elements. There are no checksums.

Source: torch/serialization.py (`_legacy_save`, `_legacy_load`), torch/csrc/serialization.cpp
(`THPStorage_writeFileRaw`), torch 0.4 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptkit.core.errors import FormatError, LimitError, TruncatedFileError, UnsupportedError
from ckptkit.formats.pickle.pickles import parse_first_pickle, shown
from ckptkit.formats.pickle.torch_values import StorageRef, storage_ref
from ckptkit.formats.pickle.torch_zip import MAX_PICKLE_BYTES
from ckptkit.formats.pickle.zip_directory import Read

HEAD_BYTES = 512  # enough to tell the layouts of a file apart
_PICKLE = b"\x80"  # every binary pickle begins so
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # the same, pickled
_MAGIC_WITHIN = 32
_TAR, _TAR_AT = b"ustar", 257
_VERSION = 1001
_COUNT_BYTES = 8
_FIRST_WINDOW = 1 << 16
_GROWTH = 4
_SAVE_AGAIN = "save it again: `torch.save(torch.load(path, weights_only=True), path)`"


def is_legacy(head: bytes) -> bool:
    """Tells from the first `HEAD_BYTES` of a file whether it has this layout."""
    if head[_TAR_AT:].startswith(_TAR):
        raise UnsupportedError(
            "file is the tar archive that torch wrote before 0.1.10, which is not modelled",
            hint="load it with `torch.load(path, weights_only=False)` if you trust it, and save it"
            " again",
        )
    if not head.startswith(_PICKLE):
        return False
    if len(head) >= _MAGIC_WITHIN and _MAGIC not in head[:_MAGIC_WITHIN]:
        raise UnsupportedError(
            "file is a plain pickle, not what `torch.save` writes",
            hint="load it with the program that wrote it, and save its tensors with `torch.save`",
        )
    return True


@dataclass(frozen=True, slots=True)
class LegacyArchive:
    """An opened file.

    Attributes:
        read: Returns the bytes `[start, stop)` of the file.
        storages: What the pickle says of each storage, by key.
        starts: The first byte of the elements of each.
        where: The file, for messages.
    """

    read: Read
    storages: Mapping[str, StorageRef]
    starts: Mapping[str, int]
    where: str

    def extent(self, storage: StorageRef) -> tuple[int, int, None]:
        """Returns a storage's first byte and the one after its last; there is no checksum."""
        first = self.storages[storage.key]
        start = self.starts[storage.key]
        count = int.from_bytes(self.read(start - _COUNT_BYTES, start), "little", signed=True)
        if count != first.elements:
            raise FormatError(
                f"storage {shown(storage.key)} has {count:,} elements, its tensors need"
                f" {first.elements:,}",
                where=self.where,
            )
        return start, start + first.size_bytes, None


def open_legacy(
    read: Read, size_bytes: int, allowed: Mapping[tuple[str, str], object], *, where: str
) -> tuple[object, int, LegacyArchive]:
    """Opens a file of this layout and parses its pickles.

    Args:
        read: Returns the bytes `[start, stop)` of the file.
        size_bytes: The file's length.
        allowed: What the pickle may name, and what stands for it.
        where: The file, for messages.

    Returns:
        What the file holds, how long the pickle of that is, and where its storages lie.
    """
    pickles = _Pickles(read, size_bytes, where)
    if pickles.next({}, None) != _MAGIC_NUMBER:
        raise FormatError("does not begin with the number that files of torch have", where=where)
    _check_facts(pickles.next({}, None), pickles.next({}, None), where)
    storages = _Storages()
    start = pickles.at
    root = pickles.next(allowed, storages)
    pickle_bytes = pickles.at - start
    keys = pickles.next({}, None)
    starts = _placed(keys, storages.found, pickles.at, size_bytes, where)
    return root, pickle_bytes, LegacyArchive(read, storages.found, starts, where)


class _Storages:
    """Understands persistent ids, and keeps the storages that they name."""

    def __init__(self) -> None:
        self.found: dict[str, StorageRef] = {}

    def __call__(self, identity: object) -> StorageRef:
        match identity:
            case ("storage", _, _, _, _, None):
                storage = storage_ref(identity[:-1])
            case ("storage", _, _, _, _, _):
                raise UnsupportedError(
                    "storage is a view of another, as torch wrote them before 0.4; this is not"
                    " modelled",
                    hint=_SAVE_AGAIN,
                )
            case _:
                raise FormatError("persistent id is not that of a storage")
        first = self.found.setdefault(storage.key, storage)
        if first.size_bytes != storage.size_bytes:
            raise FormatError(f"storage {shown(storage.key)} has two different lengths")
        return storage

    def clear(self) -> None:
        """Forgets what a pickle named that has to be read once more."""
        self.found.clear()


class _Pickles:
    """Reads pickles that follow one another, of which nothing says how long they are.

    Attributes:
        at: Where the next one starts.
    """

    def __init__(self, read: Read, size_bytes: int, where: str) -> None:
        self.at = 0
        self._read = read
        self._size_bytes = size_bytes
        self._where = where

    def next(self, allowed: Mapping[tuple[str, str], object], storages: _Storages | None) -> object:
        """Parses the next pickle, in windows that grow until it ends inside one."""
        window = _FIRST_WINDOW
        while True:
            stop = min(self.at + window, self._size_bytes)
            data = self._read(self.at, stop)
            try:
                value, length = self._parsed(data, allowed, storages)
            except TruncatedFileError:
                if stop == self._size_bytes:
                    raise
            else:
                self.at += length
                return value
            if window >= MAX_PICKLE_BYTES:
                raise LimitError(
                    f"pickle has more than {MAX_PICKLE_BYTES:,} bytes, as no real one has",
                    where=self._where,
                )
            window *= _GROWTH

    def _parsed(
        self,
        data: bytes,
        allowed: Mapping[tuple[str, str], object],
        storages: _Storages | None,
    ) -> tuple[object, int]:
        where = f"{self._where}: pickle at byte {self.at:,}"
        persistent: Callable[[object], object] | None = storages
        if storages is not None:
            storages.clear()
        return parse_first_pickle(data, allowed, where=where, persistent=persistent)


def _check_facts(version: object, machine: object, where: str) -> None:
    if version != _VERSION:
        found = f"version {version}" if type(version) is int else "no number for a version"
        raise UnsupportedError(
            f"layout has {found}, only {_VERSION:,} is modelled",
            where=where,
            hint=_SAVE_AGAIN,
        )
    little = machine.get("little_endian") if isinstance(machine, dict) else None
    if little is False:
        raise UnsupportedError(
            "numbers are stored big-endian, only little-endian is modelled", where=where
        )
    if little is not True:
        raise FormatError("does not tell the byte order of its numbers", where=where)


def _placed(
    keys: object, storages: Mapping[str, StorageRef], at: int, size_bytes: int, where: str
) -> dict[str, int]:
    """Returns where each storage's elements start; together they take up the rest of the file."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FormatError("list of storages is not one of keys", where=where)
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise FormatError(
            f"{len(keys):,} storages are listed, the pickle refers to {len(storages):,} others",
            where=where,
        )
    starts = {}
    for key in keys:
        starts[key] = at + _COUNT_BYTES
        at = starts[key] + storages[key].size_bytes
    if at > size_bytes:
        raise TruncatedFileError(
            f"storages end at byte {at:,}, the file ends at byte {size_bytes:,}", where=where
        )
    if at < size_bytes:
        raise FormatError(f"{size_bytes - at:,} bytes follow the last storage", where=where)
    return starts
