"""What kind of folder is to be pushed: one that loads, or one that has to be consolidated.

Reading a file once: for its hash, for the manifest's digests, and for whoever sends it.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.checksums import Digest, digest_like, leaf_ranges
from ckptkit.core.errors import (
    IncompleteCheckpointError,
    MissingFileError,
    RefusedError,
    SourceChangedError,
    UnsafePathError,
    VerificationError,
)
from ckptkit.core.index import FileRef
from ckptkit.core.manifest import LEAF_BYTES, MANIFEST_NAME, TRAINING, Manifest
from ckptkit.engine.outcome import BytesWritten, Listener
from ckptkit.formats.registry import recognise
from ckptkit.formats.safetensors.reader import StoredTensor, read_header
from ckptkit.formats.torch_files.reader import INDEX_ENDING
from ckptkit.hub.publish.contents import Small
from ckptkit.hub.publish.files import is_weights, named_by_index
from ckptkit.hub.publish.searching import SecretSearch, refuse_found
from ckptkit.runs.steps import file_problems
from ckptkit.storage.base import Folder, Source
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url

_LOADS = frozenset({"safetensors", "torch"})
_DEPTH = 1
_RUN_DEPTH = 2
_WHOLE_DEPTH = 8
_PUSHED = frozenset({"model", "adapter", "torch"})
MAX_FILE_BYTES = 500_000_000_000
"""What the Hub takes as one file."""


def local_folder(place: PathLike) -> Path:
    """Returns the folder to push."""
    where = os.fspath(place)
    if is_url(place):
        raise RefusedError(
            "a push reads a folder of this machine",
            where=where,
            hint="write it to a local folder first: `ckptkit consolidate URL DIR`",
        )
    if not Path(where).is_dir():
        raise MissingFileError(
            "no folder was found where that of a model was expected",
            where=where,
            hint="pass what `ckptkit consolidate` or `ckptkit adapter extract` wrote",
        )
    return Path(where)


def read_model_manifest(source: Source, paths: Iterable[str]) -> Manifest | None:
    """Returns the manifest of a folder that can be pushed, None if it has none."""
    if MANIFEST_NAME not in set(paths):
        return None
    manifest = read_manifest(source)
    if manifest.kind == TRAINING:
        raise _to_consolidate(source.location, "is a step of a training run")
    if manifest.kind not in _PUSHED:
        raise _to_consolidate(source.location, f"holds a {manifest.kind!r} output")
    return manifest


def refuse_checkpoints(source: Source, paths: Iterable[str]) -> None:
    """Refuses what no library loads from the Hub."""
    for candidate in recognise(list(paths)):
        if candidate.format not in _LOADS:
            raise _to_consolidate(source.location, f"is a sharded checkpoint ({candidate.reason})")


def _to_consolidate(location: str, what: str) -> RefusedError:
    return RefusedError(
        f"{what}, which nothing loads from the Hub",
        where=location,
        hint=f"run `ckptkit consolidate {location} OUT` (or `ckptkit adapter extract`, for an"
        " adapter), then push OUT",
    )


def files_below(source: Source) -> list[str]:
    return list(source.walk(_DEPTH))


def files_of_whole(source: Source, whole: str) -> list[str]:
    """Lists the files of a folder that is pushed as it is.

    Args:
        source: What it lies in.
        whole: Its name; empty for none.
    """
    paths = source.walk(_WHOLE_DEPTH) if whole else iter(())
    return [path for path in paths if path.startswith(f"{whole}/")]


def stat_all(source: Source, paths: Iterable[str]) -> dict[str, FileRef]:
    """Looks at the files to push."""
    found = {}
    for path in paths:
        where = posixpath.join(source.location, path)
        try:
            found[path] = source.stat(path)
        except UnsafePathError as error:
            raise RefusedError(
                "is a link that leads out of the folder",
                where=where,
                hint="put the file itself there, or push the folder that it lies in",
            ) from error
        if found[path].size_bytes > MAX_FILE_BYTES:
            raise RefusedError(
                f"has {found[path].size_bytes:,} bytes, and the Hub takes {MAX_FILE_BYTES:,}",
                where=where,
                hint="write smaller files with `ckptkit consolidate --max-shard-size 5GB`",
            )
    return found


def check_complete(
    source: Source, manifest: Manifest | None, files: Iterable[str], small: Mapping[str, Small]
) -> None:
    """Refuses a model with missing or strange weight files."""
    files = list(files)
    weights = [path for path in files if is_weights(path) and not path.endswith(INDEX_ENDING)]
    if not weights:
        refuse_checkpoints(source, source.walk(_RUN_DEPTH))
        raise RefusedError(
            "holds no weights",
            where=source.location,
            hint="pass a folder with model.safetensors or adapter_model.safetensors, such as"
            " `ckptkit consolidate` writes",
        )
    for path, file in small.items():
        if path.endswith(INDEX_ENDING):
            _check_index(posixpath.join(source.location, path), file.document, files)
    if manifest is not None:
        _check_files(source, manifest, weights)


def _check_index(where: str, document: Any, files: list[str]) -> None:
    weight_map = document.get("weight_map") if isinstance(document, Mapping) else None
    missing = named_by_index(weight_map, files) if isinstance(weight_map, Mapping) else ["?"]
    if missing:
        raise IncompleteCheckpointError(
            f"the index names {len(missing):,} files that are not there, such as {missing[0]!r}",
            where=where,
            hint="the folder was not written whole; write it again with `ckptkit consolidate`",
        )


def _check_files(source: Source, manifest: Manifest, weights: Iterable[str]) -> None:
    hint = "see what `ckptkit verify` says; write the folder again with `ckptkit consolidate`"
    for problem in file_problems(source, "", manifest):
        raise VerificationError(problem.message, where=problem.where, hint=hint)
    for path in weights:
        if path not in manifest.files:
            where = posixpath.join(source.location, path)
            raise VerificationError("is not in the manifest", where=where, hint=hint)


def check_unchanged(source: Folder, refs: Iterable[FileRef]) -> None:
    """Refuses to commit what changed while it was sent."""
    changed = source.changed(list(refs))
    if changed is not None:
        raise SourceChangedError(
            f"{changed.path!r} changed while it was sent",
            where=source.location,
            hint="wait until whoever writes there has finished, then push again",
        )


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
        """Gives every byte to the sink, in blocks of 8 to 16 MiB, and checks the digests."""
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
