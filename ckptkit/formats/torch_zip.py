"""The archive that `torch.save` writes: which tensor it holds, and where its bytes lie.

A DCP file is a row of such archives, one per chunk; a `.pt` file is one. Nothing here reads a
storage's bytes: positions come from the archive's directory, from two or three local headers
and from the pickle, and the caller checks the CRC while it copies.

Source: torch/serialization.py (`_save`, `_load`), caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import ChecksumError, FormatError, LimitError, UnsupportedError
from ckptkit.core.index import Shape
from ckptkit.formats.pickles import shown
from ckptkit.formats.torch_values import StorageRef, TensorRef, parse_values
from ckptkit.formats.zip_directory import Read, ZipEntry, data_start, read_directory

__all__ = [
    "WINDOW_BYTES",
    "Archive",
    "Payload",
    "TensorCache",
    "ZipEntry",
    "data_start",
    "locate_object",
    "locate_tensor",
    "open_archive",
    "read_directory",
]

# In archives of one tensor everything but the storage lies within the first 800 and the last
# 900 bytes, whatever the tensor's size; names, shapes and alignment leave room to grow.
WINDOW_BYTES = 2_048
_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"
_LITTLE = b"little"
_MAX_BYTE_ORDER = 16
MAX_PICKLE_BYTES = 2**30
MAX_TENSOR_PICKLE_BYTES = 2**16  # of one tensor; real ones have some 200 bytes


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the bytes of an archive's only tensor lie.

    Attributes:
        start: First byte of its storage, from the archive's start.
        stop: First byte after the storage.
        crc32: Checksum of the whole storage, or None where none was stored.
        dtype: Element type.
        shape: Sizes, in elements.
        strides: Steps between neighbours of each dimension, in elements of the storage.
        storage_offset: The tensor's first element, in elements from the storage's start.
        row_major: Whether the elements lie one after another in row-major order.
    """

    start: int
    stop: int
    crc32: int | None
    dtype: DType
    shape: Shape
    strides: Shape
    storage_offset: int
    row_major: bool


class TensorCache:
    """Remembers what pickles say, since chunks of one shape have equal ones.

    It holds at most `limit` of them and may be shared by threads.
    """

    __slots__ = ("_limit", "_tensors")

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._tensors: dict[bytes, tuple[TensorRef, bool]] = {}

    def tensor(self, pickle: bytes, *, where: str) -> tuple[TensorRef, bool]:
        """Returns the tensor that a pickle describes, and whether it is row-major.

        Raises:
            FormatError: If the pickle holds anything but one tensor.
            UnsafePickleError: If it names something outside the allow-list.
        """
        found = self._tensors.get(pickle)
        if found is None:
            value = parse_values(pickle, where=where)
            if not isinstance(value, TensorRef):
                raise FormatError("archive does not hold one tensor", where=where)
            found = value, value.row_major
            if len(self._tensors) >= self._limit:
                self._tensors.clear()
            if len(pickle) <= WINDOW_BYTES:
                self._tensors[pickle] = found
        return found


@dataclass(frozen=True, slots=True)
class Archive:
    """An opened archive: its directory is read and checked, its pickle is not.

    Attributes:
        read: Returns the bytes `[start, stop)` of the archive.
        entries: Its records by full name.
        prefix: What every record name starts with, `/` included.
        where: The file, for messages.
    """

    read: Read
    entries: Mapping[str, ZipEntry]
    prefix: str
    where: str

    def pickle(self, *, max_bytes: int = MAX_PICKLE_BYTES) -> bytes:
        """Returns the checked bytes of `data.pkl`.

        Raises:
            LimitError: If there are more than `max_bytes`.
            ChecksumError: If they do not have the checksum in the directory.
        """
        entry = self.entries[self.prefix + _PICKLE]
        if entry.size_bytes > max_bytes:
            raise LimitError(
                f"{entry.name!r} has {entry.size_bytes:,} bytes, more than the "
                f"{max_bytes:,} of any real one",
                where=self.where,
            )
        start = data_start(self.read, entry, where=self.where)
        data = self.read(start, start + entry.size_bytes)
        found = zlib.crc32(data)
        if entry.crc32 not in {None, found}:
            raise ChecksumError(
                f"{entry.name!r} has CRC-32 {found:#010x}, {entry.crc32:#010x} was stored",
                where=self.where,
                hint="the file was damaged after it was written; take another copy",
            )
        return data

    def extent(self, storage: StorageRef) -> tuple[int, int, int | None]:
        """Returns a storage's first byte, the one after its last, and the checksum stored for it.

        Raises:
            FormatError: If there is no such record, or if it has another length.
        """
        entry = self.entries.get(f"{self.prefix}data/{storage.key}")
        if entry is None:
            raise FormatError(
                f"record of storage {shown(storage.key)} is missing", where=self.where
            )
        if entry.size_bytes != storage.size_bytes:
            raise FormatError(
                f"{entry.name!r} has {entry.size_bytes:,} bytes, its tensors need "
                f"{storage.size_bytes:,}",
                where=self.where,
            )
        start = data_start(self.read, entry, where=self.where)
        return start, start + entry.size_bytes, entry.crc32


def open_archive(read: Read, size_bytes: int, *, where: str) -> Archive:
    """Returns an archive that takes up exactly the bytes `[0, size_bytes)`, opened.

    Args:
        read: Returns the bytes `[start, stop)` of the archive.
        size_bytes: The archive's length.
        where: The file, for messages.

    Raises:
        FormatError: If the archive is damaged, or was not written by `torch.save`.
        UnsupportedError: If it holds a TorchScript program, or big-endian numbers.
    """
    entries = read_directory(read, size_bytes, where=where)
    prefix = next(iter(entries), "").partition("/")[0] + "/"
    if prefix + "constants.pkl" in entries:
        raise UnsupportedError(
            "archive holds a TorchScript program, not values",
            where=where,
            hint="load it with `torch.jit.load` and save its `state_dict()` with `torch.save`",
        )
    if prefix + _PICKLE not in entries:
        raise FormatError("zip archive has no 'data.pkl', so torch did not write it", where=where)
    archive = Archive(read, entries, prefix, where)
    _check_byte_order(archive)
    return archive


def locate_tensor(
    read: Read, size_bytes: int, *, where: str, cache: TensorCache | None = None
) -> Payload:
    """Returns where the bytes of the only tensor in an archive lie.

    Reads the whole of a small archive at once, and of others the first and the last
    `WINDOW_BYTES`; more only where those do not hold what is needed.

    Args:
        read: Returns the bytes `[start, stop)` of the archive.
        size_bytes: The archive's length.
        where: The file or tensor, for messages.
        cache: Makes archives with equal pickles cheaper; pass the same one for all of them.

    Raises:
        FormatError: If the archive is damaged or does not hold one tensor.
        ChecksumError: If the pickle does not have its checksum.
        UnsafePickleError: If the pickle names something outside the allow-list.
        UnsupportedError: If byte order, dtype or kind of tensor are not modelled.
    """
    archive = open_archive(_windowed(read, size_bytes), size_bytes, where=where)
    pickle = archive.pickle(max_bytes=MAX_TENSOR_PICKLE_BYTES)
    tensor, row_major = (cache or TensorCache()).tensor(pickle, where=where)
    start, stop, crc32 = archive.extent(tensor.storage)
    return Payload(
        start,
        stop,
        crc32,
        tensor.dtype,
        tensor.shape,
        tensor.strides,
        tensor.storage_offset,
        row_major,
    )


def locate_object(read: Read, size_bytes: int, *, where: str) -> object:
    """Returns the Python object in an archive, inert: nothing it names is imported or called.

    Args:
        read: Returns the bytes `[start, stop)` of the archive.
        size_bytes: The archive's length.
        where: The file or key, for messages.

    Returns:
        Plain values; a tensor among them is a `TensorRef`.

    Raises:
        FormatError: If the archive is damaged.
        ChecksumError: If the pickle does not have its checksum.
        UnsafePickleError: If the pickle names something outside the allow-list.
    """
    archive = open_archive(_windowed(read, size_bytes), size_bytes, where=where)
    return parse_values(archive.pickle(), where=where)


def _check_byte_order(archive: Archive) -> None:
    # Older writers left the record out; they ran on little-endian machines only in practice.
    entry = archive.entries.get(archive.prefix + _BYTE_ORDER)
    if entry is None:
        return
    start = data_start(archive.read, entry, where=archive.where)
    found = archive.read(start, start + min(entry.size_bytes, _MAX_BYTE_ORDER))
    if found == b"big":
        raise UnsupportedError(
            "numbers are stored big-endian, only little-endian is modelled",
            where=archive.where,
        )
    if found != _LITTLE:
        raise FormatError(f"byte order is {found!r}, not b'little'", where=archive.where)


def _windowed(read: Read, size_bytes: int) -> Read:
    """Serves what lies in the first or last `WINDOW_BYTES` from two reads, or from one."""
    if size_bytes <= 2 * WINDOW_BYTES:
        whole = read(0, size_bytes)
        return lambda start, stop: whole[start:stop]
    head = read(0, WINDOW_BYTES)
    tail_start = size_bytes - WINDOW_BYTES
    tail = read(tail_start, size_bytes)

    def cached(start: int, stop: int) -> bytes:
        if stop <= WINDOW_BYTES:
            return head[start:stop]
        if start >= tail_start:
            return tail[start - tail_start : stop - tail_start]
        return read(start, stop)

    return cached
