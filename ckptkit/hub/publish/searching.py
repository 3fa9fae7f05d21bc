"""Searching files of any kind for secrets: texts, binary data with texts in it, archives.

Texts in binary data are found by their eight-byte words: a run of 20 characters or more holds an
aligned word of characters only, and the first half of the next one. Tensors hold few such words,
so that a search of weights takes less time than their SHA-256.
"""

from __future__ import annotations

import bz2
import functools
import io
import itertools
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.errors import RefusedError
from ckptkit.hub.publish.secrets import PRIVATE_KEY, TOKEN_IN_USE, find_secrets, is_worth_searching

MAX_SMALL_BYTES = 64_000_000
"""Larger files are not held in memory as a whole: no text of a model is, tokenizers take 33 MB."""
_SMALL_BYTES = 1 << 20  # data up to this size is searched as if it were text
_CARRIED_BYTES = 4096  # of a block, which are searched again with the next one
_AROUND_WORDS = 16  # what of the surroundings of a text is searched with it
_AROUND_BYTES = 8 * _AROUND_WORDS
_MOST_UNPACKED_BYTES = 1 << 30
_MOST_MEMORY_BYTES = 256 << 20  # of an unpacker
_BLOCK_BYTES = 8 << 20
_DEPTH = 2  # of archives in archives
_ZIP = b"PK\x03\x04"
_DAMAGED = (
    EOFError,
    OSError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)
_HIGH = np.uint64(0x8080808080808080)
_HALF, _TWICE = np.uint64(0xFFFFFFFF), np.uint64(0x100000001)
_SPACES = np.uint64(0x2020202020202020)
_WIDE = (  # the bytes that are zero in UTF-16 of either byte order
    (np.uint64(0xFF00FF00FF00FF00), np.uint64(0x2000200020002000)),
    (np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0020002000200020)),
)
_DER_KEY = re.compile(  # PKCS #8, also of elliptic curves, and PKCS #1
    rb"\x30[\x2e-\x83].{0,2}\x02\x01[\x00\x01]\x30[\x05-\x20]\x06[\x03-\x0b](?:\x2a\x86\x48|\x2b\x65)"
    rb"|\x30\x82..\x02\x01\x00\x02\x82[\x01\x02].\x00",
    re.DOTALL,
)


class SecretSearch:
    """Searches data that comes in blocks, such as a file on its way to the Hub.

    Attributes:
        kinds: The kinds of secrets that were found so far.
    """

    def __init__(self, known: Sequence[str] = ()) -> None:
        self.kinds: list[str] = []
        self._known = known
        self._plain = [secret.encode() for secret in known if is_worth_searching(secret)]
        self._tail = b""

    def add(self, block: bytes) -> None:
        """Searches the next block, and what crosses its border with the one before."""
        if self._tail:
            self._search(self._tail + block[:_CARRIED_BYTES])
        self._search(block)
        self._tail = (self._tail + block[-_CARRIED_BYTES:])[-_CARRIED_BYTES:]

    def _search(self, data: bytes) -> None:
        for text in find_texts(data):
            for kind in find_secrets(text, self._known):
                if kind not in self.kinds:
                    self.kinds.append(kind)
        # find_texts misses secrets that are short, or next to characters outside ASCII.
        if TOKEN_IN_USE not in self.kinds and any(secret in data for secret in self._plain):
            self.kinds.append(TOKEN_IN_USE)


def secrets_in(blocks: Iterable[bytes], known: Sequence[str] = ()) -> list[str]:
    """Returns the kinds of secrets that a file holds, also in compressed parts of it.

    Args:
        blocks: Its content in order. The first block shows the kind of the file; the members of a
            zip archive are unpacked where the archive is one block.
        known: Secrets that are in use.
    """
    return list(_search(iter(blocks), known, _DEPTH))


def refuse_secrets(secrets: Sequence[str], where: str) -> None:
    """Refuses to publish secrets."""
    if secrets:
        raise RefusedError(
            f"a push would publish {', '.join(secrets)}",
            where=where,
            hint="remove it from the file, and revoke it if it was ever published",
        )


def _search(blocks: Iterator[bytes], known: Sequence[str], depth: int) -> dict[str, None]:
    search = SecretSearch(known)
    kinds: dict[str, None] = {}

    def searched() -> Iterator[bytes]:
        for block in blocks:
            search.add(block)
            yield block

    stream = searched()
    first = next(stream, b"")
    if _DER_KEY.match(first):
        kinds[PRIVATE_KEY] = None
    with suppress(*_DAMAGED):
        if depth and _unpacker(first) is not None:
            whole = _unpacked(itertools.chain([first], stream))
            kinds |= _search(_limited(whole), known, depth - 1)
        elif depth and first.startswith(_ZIP):
            kinds |= _search_zip(first, known, depth - 1)
    for _ in stream:
        pass
    return dict.fromkeys(search.kinds) | kinds


def _search_zip(data: bytes, known: Sequence[str], depth: int) -> dict[str, None]:
    kinds: dict[str, None] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                blocks = iter(functools.partial(file.read, _BLOCK_BYTES), b"")
                kinds |= _search(_limited(blocks), known, depth)
    return kinds


def _unpacker(first: bytes) -> Any:
    """Returns a decompressor for a stream by its first bytes; None if it is not compressed."""
    decompressors: dict[bytes, Callable[[], object]] = {
        b"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),
        b"BZh": bz2.BZ2Decompressor,
        b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(memlimit=_MOST_MEMORY_BYTES),
    }
    return next((make() for magic, make in decompressors.items() if first.startswith(magic)), None)


def _unpacked(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the content of compressed streams that follow one another."""
    unpacker: Any = None
    for block in blocks:
        rest = block
        while rest:
            if unpacker is None or unpacker.eof:
                unpacker = _unpacker(rest)
            if unpacker is None:
                return
            yield from _decompress(rest, unpacker)
            rest = unpacker.unused_data if unpacker.eof else b""


def _decompress(block: bytes, unpacker: Any) -> Iterator[bytes]:
    piece = unpacker.decompress(block, _BLOCK_BYTES)
    while piece:
        yield piece
        if unpacker.eof:
            return
        piece = unpacker.decompress(getattr(unpacker, "unconsumed_tail", b""), _BLOCK_BYTES)


def _limited(blocks: Iterator[bytes]) -> Iterator[bytes]:
    left = _MOST_UNPACKED_BYTES
    for block in blocks:
        yield block
        left -= len(block)
        if left <= 0:
            return


def find_texts(data: bytes) -> Iterator[bytes]:
    """Yields the texts in some data, with their surroundings; those in UTF-16 also as ASCII."""
    parts = data if len(data) <= _SMALL_BYTES else _texts_of_binary(data)
    yield parts
    if b"\0" in parts:
        yield parts.translate(None, b"\0")


def _texts_of_binary(data: bytes) -> bytes:
    words = np.frombuffer(data, "<u8", len(data) // 8)
    plain = np.flatnonzero(((words & _HIGH) == 0) & (words != 0))
    texts = plain[_are_characters(words[plain])]
    texts = texts[texts < len(words) - 1]
    following = (words[texts + 1] & _HALF) * _TWICE  # the half of a word, as a word
    texts = texts[((following & _HIGH) == 0) & _are_characters(following)]
    if not len(texts):
        return data[-_AROUND_BYTES:]
    gaps = np.flatnonzero(np.diff(texts) > 2 * _AROUND_WORDS)
    starts = texts[np.concatenate(([0], gaps + 1))] - _AROUND_WORDS
    stops = texts[np.concatenate((gaps, [len(texts) - 1]))] + 2 + _AROUND_WORDS
    ranges = zip((starts * 8).tolist(), (stops * 8).tolist(), strict=True)
    pieces = [data[max(start, 0) : stop] for start, stop in ranges]
    return b"\n".join([*pieces, data[-_AROUND_BYTES:]])


def _are_characters(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Returns which words of ASCII bytes hold text, also UTF-16, without control characters."""
    are_text = _have_no_control(words)
    for zeros, spaces in _WIDE:
        are_text |= ((words & zeros) == 0) & _have_no_control(words | spaces)
    return are_text


def _have_no_control(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    # Source: "hasless" of https://graphics.stanford.edu/~seander/bithacks.html
    below: NDArray[np.bool_] = ((words - _SPACES) & ~words & _HIGH) == 0
    return below
