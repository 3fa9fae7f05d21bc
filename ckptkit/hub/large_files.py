"""Large files of a push or a pull: one read for hash, digests and the search for secrets."""

from __future__ import annotations

import hashlib
import posixpath
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from ckptkit.core.checksums import digest_like, leaf_ranges
from ckptkit.core.errors import RefusedError, VerificationError
from ckptkit.core.manifest import LEAF_BYTES, Manifest
from ckptkit.engine.outcome import BytesWritten, Listener
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header
from ckptkit.hub.secrets import SecretSearch, refuse_secrets
from ckptkit.storage.base import Source

_HINT = "run `ckptkit verify` on the folder; write it again with `ckptkit consolidate`"


class DigestRange(Struct, frozen=True):
    """A range of a file with a digest in the manifest: a tensor, or the whole file."""

    what: str
    start: int
    stop: int
    digest: str


class LargeFile(Struct, frozen=True):
    """A file that is never held in memory as a whole."""

    path: str
    size_bytes: int
    parts: tuple[DigestRange, ...]  # to check, in the order of their bytes
    words: bytes = b""  # the metadata of its header


def large_file(
    source: Source, path: str, manifest: Manifest | None, *, check: bool = True
) -> LargeFile:
    """Reads the header of a file."""
    file = source.stat(path)
    parts: list[DigestRange] = []
    words = ""
    if path.endswith(".safetensors"):
        header = read_header(source, file)
        words = "\n".join(f"{key}={text}" for key, text in header.metadata.items())
        if manifest is not None and check:
            parts = _match_tensors(
                header.tensors, path, manifest, posixpath.join(source.location, path)
            )
    elif manifest is not None and path in manifest.files and manifest.files[path].digest:
        parts = [DigestRange(path, 0, file.size_bytes, manifest.files[path].digest)]
    return LargeFile(path, file.size_bytes, tuple(parts), words.encode(errors="replace"))


def _match_tensors(
    tensors: Iterable[HeaderTensor], path: str, manifest: Manifest, where: str
) -> list[DigestRange]:
    """Returns the ranges of the tensors of a file, which are those that the manifest has."""
    expected = {name: t for name, t in manifest.tensors.items() if t.file == path}
    parts = []
    for tensor in tensors:
        record = expected.pop(tensor.name, None)
        dtype, shape = tensor.dtype.name, tuple(tensor.shape)
        if record is None or (record.dtype, tuple(record.shape)) != (dtype, shape):
            raise VerificationError(
                f"tensor {tensor.name!r} is {dtype} {list(shape)}, unlike in the manifest",
                where=where,
                hint=_HINT,
            )
        what = f"tensor {tensor.name!r}"
        parts.append(DigestRange(what, tensor.start, tensor.stop, record.digest))
    if expected:
        raise VerificationError(
            f"tensor {min(expected)!r} of the manifest is not in it", where=where, hint=_HINT
        )
    return parts


def read_checked(
    source: Source,
    file: LargeFile,
    listener: Listener,
    sink: Callable[[bytes], None],
    secrets: Sequence[str] = (),
) -> None:
    """Reads a file once, checks its digests, and searches it for secrets.

    Every byte is passed to the sink, in blocks of 8 to 16 MiB.
    """
    search = SecretSearch(secrets)
    digests = [digest_like(part.digest) for part in file.parts]
    for block in _blocks(file):
        start, stop = block[0][0], block[-1][1]
        data = source.read(file.path, start, stop)
        search.add(data)
        refuse_secrets([f"{kind} in {file.path}" for kind in search.kinds], source.location)
        sink(data)
        view = memoryview(data)
        for piece_start, piece_stop, number, leaf in block:
            if number is not None:
                digests[number].add(leaf, view[piece_start - start : piece_stop - start])
        listener(BytesWritten(stop - start, file.path))
    for digest, part in zip(digests, file.parts, strict=True):
        if digest.value(part.stop - part.start) != part.digest:
            raise VerificationError(
                f"{part.what} has another digest than the manifest",
                where=posixpath.join(source.location, file.path),
                hint=_HINT,
            )


def _blocks(file: LargeFile) -> Iterator[list[tuple[int, int, int | None, int]]]:
    """Yields `(start, stop, part, leaf)` of all bytes in order; no part for those between."""
    ranges: list[tuple[int, int, int | None]] = []
    at = 0
    for number, part in enumerate(file.parts):
        ranges += [(at, part.start, None), (part.start, part.stop, number)]
        at = part.stop
    ranges.append((at, file.size_bytes, None))
    block: list[tuple[int, int, int | None, int]] = []
    for start, stop, of_part in ranges:
        for leaf, (first, last) in enumerate(leaf_ranges(stop - start)):
            block.append((start + first, start + last, of_part, leaf))
            if start + last - block[0][0] >= LEAF_BYTES:
                yield block
                block = []
    if block:
        yield block


_AT_ONCE = 4
_MOST_REGULAR_BYTES = 100_000_000  # of files that a Hub may keep in git, without LFS


def hash_files(
    folder: Source, files: Sequence[LargeFile], listener: Listener, secrets: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Reads, checks and searches files, a few at once.

    Returns the hashes that a Hub may report for each, by path: its SHA-256, or git's id.
    """
    stopped = threading.Event()

    def read(file: LargeFile) -> frozenset[str]:
        hashes = [hashlib.sha256()]
        if file.size_bytes <= _MOST_REGULAR_BYTES:
            hashes.append(git_hash(file.size_bytes))

        def add(data: bytes) -> None:
            if stopped.is_set():
                raise RefusedError("the push was stopped because of an error with another file")
            for whole in hashes:
                whole.update(data)

        read_checked(folder, file, listener, add, secrets)
        return frozenset(whole.hexdigest() for whole in hashes)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="push") as pool:
        futures = {file.path: pool.submit(read, file) for file in files}
        try:
            return {path: future.result() for path, future in futures.items()}
        except BaseException:  # a signal too
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def git_hash(size_bytes: int) -> hashlib._Hash:
    """Returns the beginning of a file's id in git, to which its content is added."""
    return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
