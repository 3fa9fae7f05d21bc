"""The digests of tensors in a manifest, computed from leaves in the scheme that was used."""

from __future__ import annotations

from typing import Protocol

from ckptkit.core.crc import crc32
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.kernels.checksums import RangeChecksum, join_leaves, leaf_digest, leaf_ranges
from ckptkit.kernels.shares import CRC32_SCHEME


class Digest(Protocol):
    """The digest of one tensor, from leaves that may come from several threads."""

    def add(self, leaf: int, data: memoryview) -> None:
        """Takes a leaf by its number."""
        ...

    def value(self, size_bytes: int) -> str:
        """Returns the digest of the tensor, of which all leaves were taken."""
        ...


def digest_like(known: str) -> Digest:
    """Returns an empty digest in the scheme of a known one.

    What several processes wrote has the CRC-32 of its bytes, `crc32:` and 8 hexadecimal digits,
    because that can be joined over ranges of any kind; everything else a tree of XXH3-128.
    """
    return _Crc32() if known.startswith(f"{CRC32_SCHEME}:") else _Tree()


def digest_as(known: str, data: memoryview) -> str:
    """Returns the digest of a whole content in the scheme of a known one."""
    digest = digest_like(known)
    for leaf, (start, stop) in enumerate(leaf_ranges(len(data))):
        digest.add(leaf, data[start:stop])
    return digest.value(len(data))


class _Tree:
    def __init__(self) -> None:
        self._leaves: dict[int, bytes] = {}

    def add(self, leaf: int, data: memoryview) -> None:
        self._leaves[leaf] = leaf_digest(data)

    def value(self, _size_bytes: int) -> str:
        return join_leaves(self._leaves)


class _Crc32:
    def __init__(self) -> None:
        self._sum = RangeChecksum()

    def add(self, leaf: int, data: memoryview) -> None:
        self._sum.add(leaf * LEAF_BYTES, len(data), crc32(data))

    def value(self, size_bytes: int) -> str:
        return f"{CRC32_SCHEME}:{self._sum.value(size_bytes):08x}"
