"""Reading a file once: for its hash, for the manifest's digests, and for whoever sends it."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import VerificationError
from ckptkit.core.manifest import LEAF_BYTES, Manifest
from ckptkit.execution.events import BytesWritten, Listener
from ckptkit.formats.safetensors import StoredTensor, read_header
from ckptkit.hub.searching import SecretSearch, refuse_found
from ckptkit.kernels.checksums import leaf_ranges
from ckptkit.kernels.digests import Digest, digest_like
from ckptkit.storage.base import Source

Sink = Callable[[bytes], None]
_HINT = "see what `ckptkit verify` says of the folder; write it again with `ckptkit consolidate`"


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file whose digest the manifest holds: a tensor, or the file itself."""

    what: str
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file that is streamed, and never in memory as a whole.

    Attributes:
        path: Relative to its folder.
        size_bytes: Its size.
        parts: What is checked while it is read, in the order of the bytes.
        words: What its header says beside the tensors.
    """

    path: str
    size_bytes: int
    parts: tuple[Part, ...]
    words: bytes = b""


def large_file(
    source: Source, path: str, manifest: Manifest | None, *, check: bool = True
) -> LargeFile:
    """Looks at a file before it is read.

    Args:
        source: Where it lies.
        path: The file.
        manifest: What is known of it, if there is a manifest.
        check: Whether its tensors are compared with the manifest.

    Raises:
        InputError: If it is damaged.
        VerificationError: If it holds other tensors than the manifest says.
    """
    file = source.stat(path)
    parts: list[Part] = []
    words = ""
    if path.endswith(".safetensors"):
        header = read_header(source, file)
        words = "\n".join(f"{key}={text}" for key, text in header.metadata.items())
        if manifest is not None and check:
            parts = list(_tensors(source, path, header.tensors, manifest))
    elif manifest is not None and path in manifest.files and manifest.files[path].digest:
        parts = [Part(path, 0, file.size_bytes, manifest.files[path].digest)]
    return LargeFile(path, file.size_bytes, tuple(parts), words.encode(errors="replace"))


def _tensors(
    source: Source, path: str, tensors: tuple[StoredTensor, ...], manifest: Manifest
) -> Iterator[Part]:
    expected = {name: t for name, t in manifest.tensors.items() if t.file == path}
    where = posixpath.join(source.location, path)
    for tensor in tensors:
        record = expected.pop(tensor.name, None)
        found = (tensor.dtype.name, tuple(tensor.shape))
        if record is None or (record.dtype, tuple(record.shape)) != found:
            raise VerificationError(
                f"tensor {tensor.name!r} is {found[0]} {list(found[1])}, and not what the manifest"
                " says",
                where=where,
                hint=_HINT,
            )
        yield Part(f"tensor {tensor.name!r}", tensor.start, tensor.stop, record.digest)
    if expected:
        raise VerificationError(
            f"tensor {min(expected)!r} of the manifest is not in it", where=where, hint=_HINT
        )


class OneReading:
    """Reads a file from its first to its last byte, once."""

    def __init__(
        self, source: Source, file: LargeFile, listener: Listener, secrets: Sequence[str] = ()
    ) -> None:
        self._source = source
        self._file = file
        self._listener = listener
        self._search = SecretSearch(secrets)
        self._digests: Mapping[int, Digest] = {
            number: digest_like(part.digest) for number, part in enumerate(file.parts)
        }

    def to(self, sink: Sink) -> None:
        """Gives every byte to the sink, in blocks of 8 to 16 MiB, and checks the digests.

        Raises:
            VerificationError: If a digest is not the manifest's.
            RefusedError: If there is a secret in it; the sink is not given the block that has it.
            InputError: If the file cannot be read, or ends early.
        """
        for block in self._blocks():
            start, stop = block[0][0], block[-1][1]
            data = self._source.read(self._file.path, start, stop)
            self._search.add(data)
            where = self._source.location
            refuse_found([f"{kind} in {self._file.path}" for kind in self._search.found], where)
            sink(data)
            view = memoryview(data)
            for piece_start, piece_stop, number, leaf in block:
                if number is not None:
                    self._digests[number].add(leaf, view[piece_start - start : piece_stop - start])
            self._listener(BytesWritten(stop - start))
        self._check()

    def sha256(self) -> str:
        """Reads for the hash alone; raises as `to` does."""
        found = hashlib.sha256()
        self.to(found.update)
        return found.hexdigest()

    def _check(self) -> None:
        for number, part in enumerate(self._file.parts):
            if self._digests[number].value(part.stop - part.start) != part.digest:
                raise VerificationError(
                    f"{part.what} has another digest than the manifest",
                    where=posixpath.join(self._source.location, self._file.path),
                    hint=_HINT,
                )

    def _blocks(self) -> Iterator[list[tuple[int, int, int | None, int]]]:
        block: list[tuple[int, int, int | None, int]] = []
        for piece in self._pieces():
            block.append(piece)
            if piece[1] - block[0][0] >= LEAF_BYTES:
                yield block
                block = []
        if block:
            yield block

    def _pieces(self) -> Iterator[tuple[int, int, int | None, int]]:
        """Yields `(start, stop, part, leaf)` of all bytes in order; no part for those between."""
        at = 0
        for number, part in enumerate(self._file.parts):
            yield from _cut(at, part.start, None)
            yield from _cut(part.start, part.stop, number)
            at = part.stop
        yield from _cut(at, self._file.size_bytes, None)


def _cut(start: int, stop: int, number: int | None) -> Iterator[tuple[int, int, int | None, int]]:
    for leaf, (first, last) in enumerate(leaf_ranges(stop - start)):
        yield start + first, start + last, number, leaf
