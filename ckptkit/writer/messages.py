"""The messages between a training process and its writer: framed JSON over a socket.

A frame is the length of its text in 4 little-endian bytes, then the text. Descriptors travel with
the frame that announces them.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct, field


class Drain(Struct, frozen=True):
    """Requests a durable copy of the files that some ranks wrote.

    Attributes:
        attempt: Names the attempt in answers.
        folder: The source, absolute.
        target: The working folder of all ranks, absolute.
        records: The ranks' records, relative to the folder; they name the files, and are copied
            last.
        further: Files that no record names, relative to the folder; they are copied to `BESIDE` in
            the target.
        earlier: A step that was drained and committed before, absolute; empty for none. Files that
            several steps share here are linked from there.
    """

    attempt: str
    folder: str
    target: str
    records: tuple[str, ...]
    further: tuple[str, ...] = ()
    earlier: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """A run in an object store.

    Attributes:
        url: Of the run, without a slash at its end.
        options: Options of fsspec; they may be secrets, so no `repr` shows them.
    """

    url: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)


class UploadFiles(Struct, frozen=True):
    """Requests the upload of the files that some ranks wrote of a step.

    Attributes:
        attempt: Names the attempt in answers.
        remote: The run.
        step: The name of the step's folder there.
        folder: The source, absolute.
        records: The ranks' records, relative to the folder; they name the files, and are uploaded
            last.
        further: Files that no record names, relative to the folder.
        earlier: The folder of a step of the run that was uploaded before, empty for none. Files
            that several steps share here are copied from there by the store itself.
    """

    attempt: str
    remote: Remote
    step: str
    folder: str
    records: tuple[str, ...]
    further: tuple[str, ...] = ()
    earlier: str = ""


class FinishUpload(Struct, frozen=True):
    """Requests the completion of a step whose files are all uploaded, the manifest last.

    Attributes:
        attempt: Names the attempt in answers.
        remote: The run.
        step: The name of the step's folder there.
        job: The nonce that the run's mark must have: that of the last job that opened it.
        proofs: One per rank.
        manifest: The manifest's document, to which the files are added; those that it lists
            already were uploaded too.
        beside: A local folder, absolute, whose files belong to the step; empty for none.
        remove: Names of steps to remove once the new one is complete.
        given_up: Names of steps whose uploads failed; their remains are removed too, unless they
            have been completed since.
        scratch: A local folder, absolute, for temporary files.
        visible_seconds: How long to wait until uploads of other nodes become visible.
    """

    attempt: str
    remote: Remote
    step: str
    job: str
    proofs: tuple[RecordProof, ...]
    manifest: Mapping[str, Any]
    beside: str = ""
    remove: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    scratch: str = ""
    visible_seconds: float = 60.0


_LENGTH = struct.Struct("<I")
_MAX_DESCRIPTORS = 4
_AT_ONCE = 256  # items serialised in one call, during which other threads wait
_Item = TypeVar("_Item")


class Fixed(tuple[_Item, ...]):  # noqa: SLOT001  tuples of any length have no slots to add
    """Values that are sent in many messages and serialised once."""

    _text: bytes | None = None

    @property
    def text(self) -> bytes:
        """Their JSON, made in small parts so that the training thread is not held up."""
        if self._text is None:
            parts = [
                _JSON.encode(self[start : start + _AT_ONCE])[1:-1].encode()
                for start in range(0, len(self), _AT_ONCE)
            ]
            self._text = b"[" + b",".join(parts) + b"]"
        return self._text


class Buffer(Struct, frozen=True):
    """Announces the shared memory that later requests refer to; its descriptor is attached."""

    size_bytes: int


class ArchiveData(Struct, frozen=True):
    """The data of one tensor's archive inside an image.

    Attributes:
        start: First byte of the data in the shared buffer.
        stop: First byte after it.
        crc_at: Offsets in the buffer of the four-byte fields for its CRC-32.
    """

    start: int
    stop: int
    crc_at: tuple[int, ...]


class Image(Struct, frozen=True):
    """A file whose bytes are in the shared buffer, except for the checksums.

    Attributes:
        path: Relative to the attempt's folder.
        start: First byte in the buffer, a multiple of 4096.
        size_bytes: Length of the file.
        archives: What to checksum, in order.
    """

    path: str
    start: int
    size_bytes: int
    archives: tuple[ArchiveData, ...]


class Inline(Struct, frozen=True):
    """A small file whose content is part of the message."""

    path: str
    data: bytes


class Link(Struct, frozen=True):
    """A file that several attempts share.

    Attributes:
        path: Relative to the attempt's folder.
        kept: Its second name, outside of all attempts and steps, absolute.
        size_bytes: Length of the file.
    """

    path: str
    kept: str
    size_bytes: int


class Persist(Struct, frozen=True):
    """Requests a durable write of the files of one wave of an attempt.

    Attributes:
        attempt: Names the attempt in answers.
        folder: The attempt's working folder, absolute; created if it does not exist.
        images: Files to write from the buffer.
        inline: Files to write from this message.
        record: The rank's record (see `ckptkit.writer.record`) with the last wave, else None;
            the writer adds the files of all waves, and writes it last.
        record_path: Of the record, relative to the folder.
        links: Kept files to link into the folder.
        keeps: Files among the images to keep under their second name once they are durable; the
            answer says whether that was refused.
        ranges: Start and stop, in bytes of the buffer, of what the answer has to checksum if files
            were kept.
        replicas: Start and stop, in bytes of the buffer, of what the record has to checksum.
    """

    attempt: str
    folder: str
    images: tuple[Image, ...]
    inline: tuple[Inline, ...] = ()
    record: Mapping[str, Any] | None = None
    record_path: str = ""
    links: tuple[Link, ...] = ()
    keeps: tuple[Link, ...] = ()
    ranges: Sequence[tuple[int, int]] = ()
    replicas: Sequence[tuple[int, int]] = ()


class RecordProof(Struct, frozen=True):
    """Size and checksum of a rank's record, by which a reader checks that it is complete."""

    rank: int
    path: str
    size_bytes: int
    crc32: int


class Commit(Struct, frozen=True):
    """Requests the merge and the commit of an attempt that all ranks have written.

    Attributes:
        attempt: Names the attempt in answers.
        folder: The working folder that all ranks wrote into.
        final: The step's directory, absolute.
        proofs: One per rank.
        manifest: The manifest's document, to which the files are added.
        beside: A folder, absolute, whose files are copied into the step; empty for none.
        remove: Older steps, absolute, to remove once the new one is durable.
        visible_seconds: How long to wait until files of other ranks become visible.
        node_ranks: The ranks with a proof if these are not all: their files become a node's copy
            of the step, which keeps their records and is not merged.
    """

    attempt: str
    folder: str
    final: str
    proofs: tuple[RecordProof, ...]
    manifest: Mapping[str, Any]
    beside: str = ""
    remove: tuple[str, ...] = ()
    visible_seconds: float = 60.0
    node_ranks: tuple[int, ...] = ()


class Discard(Struct, frozen=True):
    """Requests the removal of the working folder of a failed attempt."""

    attempt: str
    folder: str


class WriteProgress(Struct, frozen=True):
    """Reports that the writer is alive and how many bytes of the attempt are written."""

    attempt: str
    written_bytes: int


class Written(Struct, frozen=True):
    """Answers `Persist`: everything in it is durable.

    Attributes:
        attempt: That of the request.
        size_bytes: Bytes written by this request.
        seconds: Time it took.
        cpu_seconds: Processor time it took.
        proof: Of the record, where the request had one.
        notes: What the user should know, such as that direct I/O was refused.
        linked_bytes: Bytes of the files that were linked instead of written.
        kept: Whether all files to keep were kept.
        sums: The CRC-32 of each requested range; empty if the files were not kept.
    """

    attempt: str
    size_bytes: int
    seconds: float
    cpu_seconds: float
    proof: RecordProof | None = None
    notes: tuple[str, ...] = ()
    linked_bytes: int = 0
    kept: bool = True
    sums: tuple[int, ...] = ()


class StepCommitted(Struct, frozen=True):
    """Answers `Commit`.

    Attributes:
        attempt: That of the request.
        size_bytes: Bytes of all files of the step.
        seconds: Time it took.
        removed: The older steps that were removed.
        notes: What the user should know.
        lost: What could not be saved with the step, by the user's name, and why.
    """

    attempt: str
    size_bytes: int
    seconds: float
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)


class Failed(Struct, frozen=True):
    """Answers any request that failed; `error` is `CkptkitError.to_json()`."""

    attempt: str
    error: Mapping[str, Any]


class ByteCounter:
    """How far a request is: one thread counts, another one reports it."""

    __slots__ = ("done_bytes",)

    def __init__(self) -> None:
        self.done_bytes = 0


Request = Buffer | Persist | Commit | Discard | Drain | UploadFiles | FinishUpload
Answer = WriteProgress | Written | StepCommitted | Failed
Message = Request | Answer
_NESTED: Mapping[str, Any] = {
    "images": lambda items: tuple(Image(**_tupled(i, archives=_archives)) for i in items),
    "inline": lambda items: tuple(Inline(i["path"], base64.b64decode(i["data"])) for i in items),
    "proofs": lambda items: tuple(RecordProof(**i) for i in items),
    "proof": lambda item: item and RecordProof(**item),
    "remote": lambda item: Remote(**item),
    "remove": tuple,
    "removed": tuple,
    "records": tuple,
    "further": tuple,
    "given_up": tuple,
    "node_ranks": tuple,
    "notes": tuple,
    "links": lambda items: tuple(Link(**i) for i in items),
    "keeps": lambda items: tuple(Link(**i) for i in items),
    "ranges": lambda items: tuple(map(tuple, items)),
    "replicas": lambda items: tuple(map(tuple, items)),
    "sums": tuple,
}
_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Buffer, Persist, Commit, Discard, Drain, UploadFiles, FinishUpload),
        *(WriteProgress, Written, StepCommitted, Failed),
    )
}


class Channel:
    """One end of the connection; a thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._descriptors: list[int] = []

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Sends one message."""
        first, *others = _texts({"kind": type(message).__name__} | _fields(message))
        frame = _LENGTH.pack(len(first) + sum(map(len, others))) + first
        if descriptors:
            sent = socket.send_fds(self._connection, [frame], list(descriptors))
            frame = frame[sent:]
        for part in (frame, *others):  # not joined: other threads would wait for the copy
            self._connection.sendall(part)

    def receive(self) -> Message | None:
        """Returns the next message, None if the other end has closed the connection."""
        head = self._exactly(_LENGTH.size)
        text = head and self._exactly(_LENGTH.unpack(head)[0])
        if not text:
            return None
        document = json.loads(text)
        kind = _KINDS[document.pop("kind")]
        return kind(**_tupled(document, **_NESTED))

    def take_descriptor(self) -> int:
        """Returns a descriptor that came with a message received before."""
        return self._descriptors.pop(0)

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._connection, min(count - len(parts), 1 << 20), _MAX_DESCRIPTORS
                )
            except ConnectionError:
                return b""
            self._descriptors += descriptors
            if not data:
                return b""
            parts += data
        return bytes(parts)


def _fields(value: Any) -> dict[str, Any]:
    """Returns the fields without copies, since a record may be large and training continues."""
    return {name: getattr(value, name) for name in type(value).__match_args__}


def _texts(document: dict[str, Any]) -> list[bytes]:
    """Returns the JSON of a document in parts, so that the fixed ones are not copied."""
    mark = secrets.token_hex(16)  # no name or value of the user contains it
    fixed: list[bytes] = []

    def marked(value: object) -> object:
        if isinstance(value, Fixed):
            fixed.append(value.text)
            return mark
        if isinstance(value, dict):
            return {key: marked(entry) for key, entry in value.items()}
        return value

    rest = _JSON.encode(marked(document)).encode().split(f'"{mark}"'.encode())
    return [part for pair in zip(rest, [*fixed, b""], strict=True) for part in pair]


def _plain(value: object) -> str | dict[str, Any]:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(type(value), "__match_args__"):
        return _fields(value)
    raise TypeError(f"{type(value).__name__} cannot be sent in a message")


_JSON = json.JSONEncoder(separators=(",", ":"), default=_plain)


def _tupled(document: Mapping[str, Any], **convert: Any) -> dict[str, Any]:
    return {
        key: convert[key](value) if key in convert else value for key, value in document.items()
    }


def _archives(items: Sequence[Mapping[str, Any]]) -> tuple[ArchiveData, ...]:
    return tuple(ArchiveData(i["start"], i["stop"], tuple(i["crc_at"])) for i in items)
