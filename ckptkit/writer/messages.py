"""The messages between a training process and its writer: framed JSON over a socket.

A frame is the length of its text in 4 little-endian bytes, then the text. Descriptors travel with
the frame that announces them. In all messages `attempt` names the save in answers, folders are
absolute, and paths of files are relative to them.
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

from msgspec import Struct, convert, field

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


class Buffer(Struct, frozen=True, tag=True, tag_field="kind"):
    """Announces the shared memory that later requests refer to; its descriptor is attached."""

    size_bytes: int


class ArchiveData(Struct, frozen=True):
    """The data of one tensor's archive inside an image: bytes [start, stop) of the buffer."""

    start: int
    stop: int
    crc_at: tuple[int, ...]  # offsets in the buffer of the four-byte fields for its CRC-32


class Image(Struct, frozen=True):
    """A file whose bytes are in the shared buffer, except for the checksums."""

    path: str
    start: int  # first byte in the buffer, a multiple of 4096
    size_bytes: int
    archives: tuple[ArchiveData, ...]  # what to checksum, in order
    summed: bool = False  # whether the record has the CRC-32 of all its bytes


class Inline(Struct, frozen=True):
    """A small file whose content is part of the message."""

    path: str
    data: bytes


class Link(Struct, frozen=True):
    """A file that several saves share."""

    path: str
    kept: str  # its second name, outside of all working folders and steps, absolute
    size_bytes: int


class Persist(Struct, frozen=True, tag=True, tag_field="kind"):
    """Requests a durable write of the files of one wave of a save."""

    attempt: str
    folder: str  # the working folder; created if it does not exist
    images: tuple[Image, ...]
    inline: tuple[Inline, ...] = ()
    # See `ckptkit.writer.record`. It comes with the last wave; the writer adds the files of all
    # waves, and writes it last.
    record: Mapping[str, Any] | None = None
    record_path: str = ""
    links: tuple[Link, ...] = ()  # kept files to link into the folder
    # Files among the images to keep under their second name once they are durable; the answer says
    # whether that was refused.
    keeps: tuple[Link, ...] = ()
    # Start and stop in the buffer: of what the answer has to checksum if files were kept, and of
    # what the record has to.
    ranges: tuple[tuple[int, int], ...] = ()
    replicas: tuple[tuple[int, int], ...] = ()
    waves_before: int = 0  # waves of this save that this writer has written


class RecordProof(Struct, frozen=True):
    """Size and checksum of a rank's record, by which a reader checks that it is complete."""

    rank: int
    path: str
    size_bytes: int
    crc32: int


class Commit(Struct, frozen=True, tag=True, tag_field="kind"):
    """Requests the merge and the commit of a save that all ranks have written."""

    attempt: str
    folder: str  # the working folder that all ranks wrote into
    final: str  # the step's directory
    proofs: tuple[RecordProof, ...]  # one per rank
    manifest: Mapping[str, Any]  # to which the files are added
    beside: str = ""  # a folder whose files are copied into the step; empty for none
    remove: tuple[str, ...] = ()  # older steps to remove once the new one is durable
    visible_seconds: float = 60.0  # how long to wait until files of other ranks become visible
    # Whether files of others may be in the directory, and stay there. Leftovers of its name go.
    shared: bool = False
    # The ranks with a proof if these are not all: their files become a node's copy of the step,
    # which keeps their records and is not merged.
    node_ranks: tuple[int, ...] = ()


class Discard(Struct, frozen=True, tag=True, tag_field="kind"):
    """Requests the removal of the working folder of a failed save."""

    attempt: str
    folder: str


class Drain(Struct, frozen=True, tag=True, tag_field="kind"):
    """Requests a durable copy of the files that some ranks wrote."""

    attempt: str
    folder: str
    target: str  # the working folder of all ranks
    records: tuple[str, ...]  # of the ranks; they name the files, and are copied last
    further: tuple[str, ...] = ()  # files that no record names, copied to `BESIDE` in the target
    # A step that was drained and committed before, empty for none: files that several steps share
    # here are linked from there.
    earlier: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """A run in an object store: its URL without a slash at its end, and options of fsspec.

    These may be secrets, so no `repr` shows them.
    """

    url: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)


class UploadFiles(Struct, frozen=True, tag=True, tag_field="kind"):
    """Requests the upload of the files that some ranks wrote of a step; see `Drain`."""

    attempt: str
    remote: Remote
    step: str  # the name of the step's folder there
    job: str  # see `FinishUpload`
    folder: str
    records: tuple[str, ...]
    further: tuple[str, ...] = ()
    earlier: str = ""  # the name of a step's folder; the store copies shared files itself


class FinishUpload(Struct, frozen=True, tag=True, tag_field="kind"):
    """Requests the completion of a step whose files are uploaded, the manifest last; see `Commit`.

    Files that the manifest lists already were uploaded too.
    """

    attempt: str
    remote: Remote
    step: str
    # The nonce that the run's mark must have: that of the last job that opened it. Empty where the
    # step belongs to no run: then other files may be in its folder, and stay there.
    job: str
    proofs: tuple[RecordProof, ...]
    manifest: Mapping[str, Any]
    beside: str = ""
    remove: tuple[str, ...] = ()  # names of steps
    # Names of steps whose uploads failed: their remains are removed too, unless they have been
    # completed since.
    given_up: tuple[str, ...] = ()
    scratch: str = ""  # a local folder for temporary files
    visible_seconds: float = 60.0


class WriteProgress(Struct, frozen=True, tag=True, tag_field="kind"):
    """Reports that the writer is alive and how many bytes of the save are written."""

    attempt: str
    written_bytes: int


class Written(Struct, frozen=True, tag=True, tag_field="kind"):
    """Answers `Persist`, `Drain` and `UploadFiles`: everything in it is durable."""

    attempt: str
    size_bytes: int  # written by this request
    seconds: float
    cpu_seconds: float
    proof: RecordProof | None = None  # where the request had a record
    notes: tuple[str, ...] = ()  # what the user should know, such as that direct I/O was refused
    linked_bytes: int = 0  # of files that were linked instead of written
    kept: bool = True  # whether all files to keep were kept
    sums: tuple[int, ...] = ()  # CRC-32 of each requested range; empty if files were not kept


class StepCommitted(Struct, frozen=True, tag=True, tag_field="kind"):
    """Answers `Commit` and `FinishUpload`."""

    attempt: str
    size_bytes: int  # of all files of the step
    seconds: float
    removed: tuple[str, ...] = ()  # the older steps that were removed
    notes: tuple[str, ...] = ()
    # What could not be saved with the step, by the user's name, and why.
    lost: Mapping[str, str] = field(default_factory=dict)


class Failed(Struct, frozen=True, tag=True, tag_field="kind"):
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
        message: Message = convert(json.loads(text), Message)
        return message

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
