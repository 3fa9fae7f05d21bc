"""What the training process and its writer say to each other: framed JSON over a socket.

A frame is the length of its text in 4 little-endian bytes, then the text. Descriptors travel
beside the frame that announces them.

What is asked of the process that drains a node's own disk.

What is asked of the process that brings steps from a node's own disk to an object store.
"""

from __future__ import annotations

import base64
import json
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Drain:
    """Asks for the files that some ranks wrote to be copied to another place, and made durable.

    Attributes:
        attempt: Names the attempt in answers.
        folder: Where they lie, absolute.
        target: Where they go, absolute: the working folder of all ranks.
        records: The ranks' records, relative to the folder; they name the files, and go last.
        further: Files that no record names, relative to the folder; they go to `BESIDE` in the
            target.
        earlier: A step that was drained and committed before, absolute; empty for none. Files that
            several steps have in common here are linked from there.
    """

    attempt: str
    folder: str
    target: str
    records: tuple[str, ...]
    further: tuple[str, ...] = ()
    earlier: str = ""


@dataclass(frozen=True, slots=True)
class Remote:
    """A run in an object store.

    Attributes:
        url: Of the run, without a slash at its end.
        options: What fsspec is given for it; secrets, and therefore in no `repr`.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Upload:
    """Asks for the files that some ranks wrote to be put into a run's step.

    Attributes:
        attempt: Names the attempt in answers.
        remote: The run.
        step: The name of the step's folder there.
        folder: Where the files lie, absolute.
        records: The ranks' records, relative to the folder; they name the files, and go last.
        further: Files that no record names, relative to the folder; they go as they are.
        earlier: The folder of a step of the run that was uploaded before, empty for none. Files
            that several steps have in common here are copied from there by the store itself.
    """

    attempt: str
    remote: Remote
    step: str
    folder: str
    records: tuple[str, ...]
    further: tuple[str, ...] = ()
    earlier: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """Asks for a step of which all files are uploaded to be made whole, the manifest last.

    Attributes:
        attempt: Names the attempt in answers.
        remote: The run.
        step: The name of the step's folder there.
        job: The nonce that the run's mark has to have: that of the last job that opened it.
        proofs: One per rank.
        manifest: The manifest's document, to which the files are added; those that it lists
            already were uploaded too.
        beside: A local folder, absolute, whose files belong into the step; empty for none.
        remove: Names of steps that go once the new one is whole.
        given_up: Names of steps of which uploads failed: what is left of them goes, too, unless
            they have become whole since.
        scratch: A local folder, absolute, for what is put together before it is uploaded.
        visible_seconds: How long to wait for what other nodes have uploaded to become visible.
    """

    attempt: str
    remote: Remote
    step: str
    job: str
    proofs: tuple[Proof, ...]
    manifest: Mapping[str, Any]
    beside: str = ""
    remove: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    scratch: str = ""
    visible_seconds: float = 60.0


_LENGTH = struct.Struct("<I")
_MAX_DESCRIPTORS = 4
_AT_ONCE = 256  # items put into text while other threads wait
_Item = TypeVar("_Item")


class Fixed(tuple[_Item, ...]):  # noqa: SLOT001  tuples of any length have no slots to add
    """Values that travel in one message after another, and are put into text only once."""

    _text: bytes | None = None

    @property
    def text(self) -> bytes:
        """Their JSON, which may be made in one thread while another one trains."""
        if self._text is None:
            parts = [
                _json(self[start : start + _AT_ONCE])[1:-1]
                for start in range(0, len(self), _AT_ONCE)
            ]
            self._text = b"[" + b",".join(parts) + b"]"
        return self._text


@dataclass(frozen=True, slots=True)
class Buffer:
    """Announces the shared memory that later jobs refer to; its descriptor comes along."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Blob:
    """The data of one archive inside an image.

    Attributes:
        start: First byte of the data in the shared buffer.
        stop: First byte after it.
        crc_at: Where in the buffer the four bytes of its CRC-32 belong.
    """

    start: int
    stop: int
    crc_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """A file whose bytes lie ready in the shared buffer but for the checksums.

    Attributes:
        path: Relative to the attempt's folder.
        start: First byte in the buffer, a multiple of 4096.
        size_bytes: Length of the file.
        blobs: What is to be summed up, in order.
    """

    path: str
    start: int
    size_bytes: int
    blobs: tuple[Blob, ...]


@dataclass(frozen=True, slots=True)
class Inline:
    """A small file whose bytes travel in the message."""

    path: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Link:
    """A file that several attempts have in common, under two names.

    Attributes:
        path: Relative to the attempt's folder.
        kept: Its name outside of all attempts and steps, absolute.
        size_bytes: Length of the file.
    """

    path: str
    kept: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Asks for the files of one wave of an attempt to be written and made durable.

    Attributes:
        attempt: Names the attempt in answers.
        folder: The attempt's working folder, absolute; made when it is not there.
        images: Files to write from the buffer.
        inline: Files to write from this message.
        record: The rank's record (see `ckptkit.writer.record`) with the last wave, else None;
            the writer adds what it knows of the files of all waves, and writes it last.
        record_path: Where the record goes, relative to the folder.
        links: Files that are there under their other name, and are given the one in the folder.
        keeps: Files among the images that are given the other name as well, once they are
            durable; where that is refused, the answer says so.
        ranges: First byte in the buffer, and the one after the last, of what the answer has to
            sum up where files were kept.
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


@dataclass(frozen=True, slots=True)
class Proof:
    """What a rank tells of its record, so that whoever reads it knows that it is whole."""

    rank: int
    path: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Asks for a finished attempt to be merged and made visible.

    Attributes:
        attempt: Names the attempt in answers.
        folder: The working folder that all ranks wrote into.
        final: The step's directory, absolute.
        proofs: One per rank.
        manifest: The manifest's document, to which the files are added.
        beside: A folder, absolute, whose files are copied into the step; empty for none.
        remove: Older steps, absolute, that go once the new one is durable.
        visible_seconds: How long to wait for other ranks' files to become visible.
        node_ranks: The ranks that gave proof, where these are not all: their files become a
            node's copy of the step, which keeps their records, and is not merged.
    """

    attempt: str
    folder: str
    final: str
    proofs: tuple[Proof, ...]
    manifest: Mapping[str, Any]
    beside: str = ""
    remove: tuple[str, ...] = ()
    visible_seconds: float = 60.0
    node_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """Asks for the working folder of a failed attempt to be removed, this rank's files or all."""

    attempt: str
    folder: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Says that the writer is alive and how many bytes of the attempt are written."""

    attempt: str
    written_bytes: int


@dataclass(frozen=True, slots=True)
class Written:
    """Answers `Persist`: everything in it is durable.

    Attributes:
        attempt: That of the request.
        size_bytes: Bytes written by this request.
        seconds: Time it took.
        cpu_seconds: Processor time it took.
        proof: Of the record, where the request had one.
        notes: What the user should know, such as that direct I/O was refused.
        linked_bytes: Bytes of the files that were linked, and not written.
        kept: Whether all files that were to be kept are.
        sums: The CRC-32 of each range that was asked for; none where they are not.
    """

    attempt: str
    size_bytes: int
    seconds: float
    cpu_seconds: float
    proof: Proof | None = None
    notes: tuple[str, ...] = ()
    linked_bytes: int = 0
    kept: bool = True
    sums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """Answers `Commit`.

    Attributes:
        attempt: That of the request.
        size_bytes: Bytes of all files of the step.
        seconds: Time it took.
        removed: The older steps that are gone.
        notes: What the user should know.
        lost: What could not be saved with the step, by the user's name, and why.
    """

    attempt: str
    size_bytes: int
    seconds: float
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """Answers any request that could not be done; `error` is `CkptkitError.to_json()`."""

    attempt: str
    error: Mapping[str, Any]


Request = Buffer | Persist | Commit | Discard | Drain | Upload | Finish
Answer = Progress | Written | Committed | Failed
Message = Request | Answer
_NESTED: Mapping[str, Any] = {
    "images": lambda items: tuple(Image(**_tupled(i, blobs=_blobs)) for i in items),
    "inline": lambda items: tuple(Inline(i["path"], base64.b64decode(i["data"])) for i in items),
    "proofs": lambda items: tuple(Proof(**i) for i in items),
    "proof": lambda item: item and Proof(**item),
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
    "sums": tuple,
}
_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Buffer, Persist, Commit, Discard, Drain, Upload, Finish),
        *(Progress, Written, Committed, Failed),
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
        """Returns the next message, or None when the other end is gone."""
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
    """Returns the fields, not copied: a record may be large, and training goes on meanwhile."""
    return {item.name: getattr(value, item.name) for item in fields(value)}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=_plain).encode()


def _texts(document: dict[str, Any]) -> list[bytes]:
    """Returns the JSON of a document, in parts, of which those that are fixed are not copied."""
    mark = secrets.token_hex(16)  # no name or value of the user's can hold it
    fixed: list[bytes] = []

    def marked(value: object) -> object:
        if isinstance(value, Fixed):
            fixed.append(value.text)
            return mark
        if isinstance(value, dict):
            return {key: marked(entry) for key, entry in value.items()}
        return value

    rest = _json(marked(document)).split(f'"{mark}"'.encode())
    return [part for pair in zip(rest, [*fixed, b""], strict=True) for part in pair]


def _plain(value: object) -> str | dict[str, Any]:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if is_dataclass(value):
        return _fields(value)
    raise TypeError(f"{type(value).__name__} does not travel in a message")


def _tupled(document: Mapping[str, Any], **convert: Any) -> dict[str, Any]:
    return {
        key: convert[key](value) if key in convert else value for key, value in document.items()
    }


def _blobs(items: Sequence[Mapping[str, Any]]) -> tuple[Blob, ...]:
    return tuple(Blob(i["start"], i["stop"], tuple(i["crc_at"])) for i in items)
