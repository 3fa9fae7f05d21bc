"""The form of a delta on disk: what slime publishes and what SGLang pulls.

A delta is a folder with `model.safetensors.index.json` and the files that it names. The index has
texts by the name `metadata`: `version` and `base_version` (six digits), `delta_encoding`,
`compression_format` ("zstd") and `checksum_format`. Each file is a safetensors file of uint8
vectors, one for each tensor that changed, under the name of the tensor. Its `__metadata__` has the
checksum of all bytes of each tensor after the change, by the same name. A tensor that did not
change is in no file. In a folder with several deltas, that of version N is in `weight_v{N:06d}`;
version 0 is the model that an engine was started with.

A delta that ckptkit wrote has a manifest, too, which those programs do not read: with digests of
its files, of every tensor after the change, and of the changed ones before it.

Source: slime/utils/disk_delta.py and slime/backends/megatron_utils/update_weight/
update_weight_from_disk_delta.py of THUDM/slime (August 2026); python/sglang/srt/weight_sync/
local_checkpoint.py of SGLang.
"""

from __future__ import annotations

import json
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self, get_args

import xxhash
from msgspec import Struct

from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    RefusedError,
    UnsupportedError,
)
from ckptkit.core.index import FileRef
from ckptkit.core.manifest import Manifest
from ckptkit.deltas.encoding import HINT, Decoder, open_decoder
from ckptkit.formats.parsing import (
    INDEX_ENDING,
    check_weight_map,
    is_count,
    read_from,
    read_index_document,
)
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header
from ckptkit.options import ChecksumFormat as ChecksumFormat  # noqa: PLC0414  of the form
from ckptkit.options import Encoding as Encoding  # noqa: PLC0414
from ckptkit.runs.find_run import absent_folder
from ckptkit.storage.base import Source
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, local_path, open_source, place_of

DELTA = "delta"
"""The kind of a delta in its manifest, and the name of its facts in the manifest's source."""
INDEX_PATH = f"model.safetensors{INDEX_ENDING}"
ENCODING_KEY = "delta_encoding"
_COMPRESSION = "zstd"
_VERSION = re.compile(r"\d{1,9}")
_FOLDER = re.compile(r"weight_v(\d{6,9})")
_METADATA_KEY = "__metadata__"
_ALIGNMENT = 8
_NAME_A_FOLDER = "name the folder of one delta, such as deltas/weight_v000001"


class Hasher(Protocol):
    """Computes a checksum of bytes that come one after another."""

    def update(self, data: Any, /) -> object:
        """Adds bytes."""
        ...

    def hexdigest(self) -> str:
        """Returns the checksum of all bytes so far, in hexadecimal digits."""
        ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _new_blake3() -> Hasher:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise RefusedError(
            "the checksum blake3 needs the package 'blake3', which is not installed",
            where="--checksum blake3",
            hint="run `pip install blake3`",
        ) from error
    hasher: Hasher = blake3()
    return hasher


_HASHERS: Mapping[str, Callable[[], Hasher]] = {
    "xxh3-128": xxhash.xxh3_128,
    "blake3": _new_blake3,
    "adler32": _Adler32,
}


def new_hasher(checksum: ChecksumFormat) -> Hasher:
    return _HASHERS[checksum]()


class DeltaHead(Struct, frozen=True):
    """What the index of a delta says about all of it."""

    version: int  # the version that it leads to
    base_version: int  # the version that it has to be applied to
    # How a change is written: `xor` with the bytes before, or `overwrite`, the positions and the
    # new values of bytes
    encoding: Encoding = "xor"
    checksum: ChecksumFormat = "xxh3-128"  # the kind of the tensors' checksums

    @classmethod
    def parse(cls, metadata: Mapping[str, Any], where: str) -> Self:
        """Reads the texts of an index."""
        compression = metadata.get("compression_format")
        if compression != _COMPRESSION:
            raise UnsupportedError(
                f"compression {compression!r:.100} was found against {_COMPRESSION!r}",
                where=where,
                hint=HINT,
            )
        return cls(
            _parse_version(metadata, "version", where),
            _parse_version(metadata, "base_version", where),
            _parse_choice(metadata, ENCODING_KEY, get_args(Encoding), where),
            _parse_choice(metadata, "checksum_format", get_args(ChecksumFormat), where),
        )

    def to_index(self, weight_map: Mapping[str, str]) -> bytes:
        """Returns the index of the delta; `weight_map` has the file of each changed tensor."""
        metadata = {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base_version:06d}",
            ENCODING_KEY: self.encoding,
            "compression_format": _COMPRESSION,
            "checksum_format": self.checksum,
        }
        return json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}).encode()


def _parse_version(metadata: Mapping[str, Any], key: str, where: str) -> int:
    value = metadata.get(key)
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not _VERSION.fullmatch(text):
        raise FormatError(f"{key!r} is {value!r:.100} and not a number", where=where, hint=HINT)
    return int(text)


def _parse_choice(metadata: Mapping[str, Any], key: str, known: Sequence[str], where: str) -> Any:
    value = metadata.get(key)
    if value not in known:
        raise UnsupportedError(
            f"{key!r} is {value!r:.100}; known are {', '.join(known)}", where=where, hint=HINT
        )
    return value


class DeltaTensor(Struct, frozen=True):
    """The change of one tensor."""

    name: str  # the tensor
    path: str  # the file that has the change
    start: int  # first byte of the compressed change in the file
    stop: int  # first byte after it
    checksum: str  # of the tensor's bytes after the change, in hexadecimal digits

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class OpenedDelta(Struct, frozen=True):
    """A delta, its files open and their headers parsed."""

    location: str  # the place as the user named it
    source: Source  # its files
    head: DeltaHead  # what holds for all of it
    tensors: Mapping[str, DeltaTensor]  # the changes by the names of the tensors
    files: tuple[FileRef, ...]  # the index, and the files that it names
    manifest: Manifest | None  # its manifest, if ckptkit wrote it

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its manifest says about the delta; empty without one."""
        facts = None if self.manifest is None else self.manifest.source.get(DELTA)
        return facts if isinstance(facts, dict) else {}

    @property
    def base_digests(self) -> Mapping[str, str]:
        """The digests of changed tensors before the change, as far as they are known."""
        digests = self.facts.get("base_digests")
        table = digests if isinstance(digests, dict) else {}
        return {name: text for name, text in table.items() if isinstance(text, str)}

    @property
    def changed_elements(self) -> Mapping[str, int]:
        """How many elements of each changed tensor changed, as far as that is known."""
        counts = self.facts.get("changed_elements")
        table = counts if isinstance(counts, dict) else {}
        return {name: count for name, count in table.items() if is_count(count)}

    def locate(self, name: str) -> str:
        """Returns where the change of a tensor is, for errors."""
        return f"{posixpath.join(self.location, self.tensors[name].path)}, tensor {name!r}"

    def open_change(self, name: str, size_bytes: int) -> Decoder:
        """Opens the change of a tensor of so many bytes."""
        tensor = self.tensors[name]
        read = read_from(self.source, tensor.path, tensor.start)
        return open_decoder(
            *(self.head.encoding, read, tensor.size_bytes, size_bytes), where=self.locate(name)
        )


def is_delta(place: PathLike) -> bool:
    """Returns whether the folder at a place has the index of a delta; False if it has none."""
    place = place_of(place)
    if not is_url(place) and not local_path(place).is_dir():
        return False
    with suppress(CkptkitError), open_source(place) as source:
        metadata, _ = read_index_document(source, INDEX_PATH)
        return ENCODING_KEY in metadata
    return False


@contextmanager
def open_delta(place: PathLike) -> Iterator[OpenedDelta]:
    """Opens a delta and checks its index against the headers of its files; reads no changes."""
    place = place_of(place)
    if not is_url(place) and not local_path(place).is_dir():
        text, hint = absent_folder(place, _NAME_A_FOLDER)
        raise NotACheckpointError(text, where=str(place), hint=hint)
    with open_source(place) as source:
        yield read_delta(source, str(place))


def read_delta(source: Source, location: str) -> OpenedDelta:
    """Reads the index of a delta and the headers of its files."""
    where = posixpath.join(location, INDEX_PATH)
    try:
        metadata, weight_map = read_index_document(source, INDEX_PATH)
    except MissingFileError as error:
        raise NotACheckpointError(
            f"holds no {INDEX_PATH!r}, which every delta has",
            where=location,
            hint=_NAME_A_FOLDER,
        ) from error
    if ENCODING_KEY not in metadata:
        raise NotACheckpointError(
            f"the index has no {ENCODING_KEY!r}: this is a model and not a delta",
            where=where,
            hint="name the model first: ckptkit delta apply BASE DELTA... OUT",
        )
    head = DeltaHead.parse(metadata, where)
    files = [source.stat(path) for path in sorted(set(weight_map.values()))]
    tensors = {}
    in_headers: dict[str, str] = {}
    for file in files:
        header = read_header(source, file)
        for stored in header.tensors:
            other = in_headers.get(stored.name)
            if other is not None:
                raise FormatError(
                    f"tensor {stored.name!r} is in {other!r} and in {file.path!r}",
                    where=location,
                    hint=HINT,
                )
            checksum = header.metadata.get(stored.name, "")
            tensors[stored.name] = _check_tensor(stored, file.path, checksum, location)
            in_headers[stored.name] = file.path
    check_weight_map(weight_map, in_headers, where=location)
    manifest = None
    with suppress(MissingFileError):
        manifest = read_manifest(source)
    if manifest is not None and manifest.kind != DELTA:
        raise FormatError(
            f"the manifest is of kind {manifest.kind!r:.100} where {DELTA!r} was expected",
            where=location,
            hint=HINT,
        )
    return OpenedDelta(location, source, head, tensors, (source.stat(INDEX_PATH), *files), manifest)


def _check_tensor(stored: HeaderTensor, path: str, checksum: str, location: str) -> DeltaTensor:
    where = f"{posixpath.join(location, path)}, tensor {stored.name!r}"
    if stored.dtype.name != "uint8" or len(stored.shape) != 1:
        raise FormatError(
            f"is {stored.dtype.name} {list(stored.shape)} where a vector of uint8 was expected",
            where=where,
            hint=HINT,
        )
    if not re.fullmatch(r"[0-9a-f]{8,128}", checksum):
        raise FormatError("has no checksum in the header of its file", where=where, hint=HINT)
    return DeltaTensor(stored.name, path, stored.start, stored.stop, checksum)


def version_of_folder(place: PathLike) -> int | None:
    """Returns the version that the name of a folder says; None for other names.

    >>> version_of_folder("deltas/weight_v000012"), version_of_folder("deltas/12")
    (12, None)
    """
    match = _FOLDER.fullmatch(posixpath.basename(str(place).rstrip("/")))
    return int(match[1]) if match else None


def name_version(version: int) -> str:
    """Returns the name of a version's folder.

    >>> name_version(12)
    'weight_v000012'
    """
    return f"weight_v{version:06d}"


def name_files(count: int) -> list[str]:
    """Names the files of a delta, numbered from 0 as slime numbers them."""
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(count)]


def make_header(tensors: Sequence[tuple[str, int]], checksums: Mapping[str, str]) -> bytes:
    """Returns the header of a file, with its length before it."""
    document: dict[str, Any] = {
        _METADATA_KEY: {name: checksums[name] for name, _ in tensors},
    }
    at = 0
    for name, size in tensors:
        document[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
