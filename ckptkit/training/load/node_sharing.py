"""Memory that the processes of one user on one node share while they load from one URL.

The memory has no name in any file system: it is a `memfd`, which one of the processes makes and
hands to the others through an abstract socket. Both are gone when the last process ends, however it
ends, and no other user is given the memory. It holds blocks of bytes that one process has
downloaded and others want, and of each process what it wants and what it has already.

Nothing waits for a process that has ended: locks on bytes of the memory, which the kernel releases
with their process, show which processes are alive. They are tried, for a second at most.

Each rank says which parts of a remote source it wants, and takes from the memory of the node what
another one has downloaded. Ranks that want the same part of a record make the same requests for it,
so a request is the unit that is shared. A rank waits for another only for a bounded time, and then
downloads for itself; what it gets from another is compared with the checksum of what that one has
downloaded, and goes through the same proofs as what it downloads.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import threading
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from hashlib import blake2b

import numpy as np
from msgspec import Struct

from ckptkit.core.crc import crc32
from ckptkit.core.geometry import widen
from ckptkit.core.index import FileRange, FileRef, TensorIndex
from ckptkit.core.text import Closing
from ckptkit.engine.box_reads import SpanRead
from ckptkit.engine.locate import list_stored
from ckptkit.engine.reader import SHORT_REMOTE_RUN_BYTES, ChunkRead
from ckptkit.storage.base import Source

if sys.platform != "win32":
    import fcntl

HEAP_BYTES = 64 << 20
"""Most bytes of blocks that the processes of a node share at a time."""

_FORM = "ckptkit node memory 1"  # of the layout below; part of the address
_UNIT_BYTES = 64 << 10
_MOST_MEMBERS = 64  # the bits of `takers`
_MOST_BLOCKS = HEAP_BYTES // _UNIT_BYTES
_MOST_LISTED = 1 << 17  # of what a member wants, and of what it has
_FREE, _FILLING, _FULL = range(3)  # states of a block
_ABSENT, _OPENING, _READING = range(3)  # states of a member
_MEMBER = np.dtype([("joined", "<u8"), ("state", "<u8"), ("listed", "<u8", 2)])
_BLOCK = np.dtype(
    [
        ("key", "<u8", 2),
        ("takers", "<u8"),
        ("size", "<u8"),
        ("unit", "<u4"),
        ("crc", "<u4"),
        ("owner", "<u4"),
        ("state", "<u2"),
        ("is_spare", "<u2"),
    ]
)
_MEMBERS_AT = mmap.PAGESIZE
_BLOCKS_AT = _MEMBERS_AT + _MOST_MEMBERS * _MEMBER.itemsize
_LISTS_AT = -(-(_BLOCKS_AT + _MOST_BLOCKS * _BLOCK.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
_HEAP_AT = _LISTS_AT + _MOST_MEMBERS * 2 * _MOST_LISTED * 8
_SIZE_BYTES = _HEAP_AT + HEAP_BYTES  # pages that nothing is written to take no memory
_TABLE_LOCK, _FIRST_MEMBER_LOCK = 0, 1  # bytes that are locked
_LOCK_SECONDS = 1.0
_JOIN_SECONDS = 1.0
_PAUSE_SECONDS = 0.001
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid, as SO_PEERCRED returns them


class BlockStatus(Enum):
    THERE = auto()  # it can be copied
    OWN = auto()  # this process is to download it for all
    AWAITED = auto()  # another process downloads it
    NO_ROOM = auto()  # others want it, and there is no room for it
    UNSHARED = auto()  # this process is to download it for itself


class BlockKey(Struct, frozen=True):
    """A byte range of one version of a file, and who wants it."""

    digest: bytes  # 16 bytes that differ for other ranges, files and versions
    size_bytes: int
    # those that a process has to have announced, all of them, to want the range
    wants: tuple[int, ...]
    is_spare: bool = False  # whether it makes room for other blocks before all have taken it

    @property
    def words(self) -> tuple[int, int]:
        return struct.unpack("<QQ", self.digest)


class NodeMemory(Closing):
    """The shared memory as a member has it; made by `join_node`. Its threads share it."""

    def __init__(self, descriptor: int, listener: socket.socket | None) -> None:
        self._descriptor, self._listener = descriptor, listener
        self._own = -1
        self._is_usable = True
        self._lock = threading.Lock()
        self._wants: dict[int, tuple[int, frozenset[int]]] = {}  # of other members
        self._distrusted: set[int] = set()
        self._sender: threading.Thread | None = None
        memory = mmap.mmap(descriptor, _SIZE_BYTES)
        self._changes = np.frombuffer(memory, "<u8", 1)
        self._members = np.frombuffer(memory, _MEMBER, _MOST_MEMBERS, _MEMBERS_AT)
        self._blocks = np.frombuffer(memory, _BLOCK, _MOST_BLOCKS, _BLOCKS_AT)
        lists = np.frombuffer(memory, "<u8", _MOST_MEMBERS * 2 * _MOST_LISTED, _LISTS_AT)
        self._lists = lists.reshape(_MOST_MEMBERS, 2, _MOST_LISTED)
        self._heap = np.frombuffer(memory, np.uint8, HEAP_BYTES, _HEAP_AT)
        if listener is not None:
            self._sender = threading.Thread(
                target=_send_to_all, args=(listener, descriptor), name="ckptkit-node", daemon=True
            )
            self._sender.start()

    @property
    def changes(self) -> int:
        """Grows when a block is there, or makes room."""
        return int(self._changes[0])

    def enter(self) -> bool:
        """Becomes a member; returns whether there was a place."""
        with self._table() as is_locked:
            for number in range(_MOST_MEMBERS) if is_locked else ():
                if not self._is_absent(number) or not _try_lock(
                    self._descriptor, _FIRST_MEMBER_LOCK + number
                ):
                    continue
                member = self._members[number]
                member["listed"] = 0
                member["joined"] += 1
                member["state"] = _OPENING
                self._own = number
                return True
        return False

    def announce(self, wants: Collection[int], *, wait_seconds: float) -> None:
        """Says what this process wants, and waits for those that have not said it yet."""
        listed = np.array(sorted(wants), "<u8")[:_MOST_LISTED]
        self._lists[self._own, 0, : len(listed)] = listed
        until = time.monotonic() + wait_seconds
        with self._table() as is_locked:
            if is_locked:
                self._members[self._own]["listed"] = len(listed), 0
                self._members[self._own]["state"] = _READING
        while self._is_usable and time.monotonic() < until:
            with self._table() as is_locked:
                opening = np.flatnonzero(self._members["state"] == _OPENING).tolist()
                if not is_locked or all(map(self._is_absent, opening)):
                    return
            time.sleep(_PAUSE_SECONDS)

    def find_takers(self, block: BlockKey) -> list[int]:
        """Returns the other members that want a block, whether they have it already or not."""
        if not self._is_usable:
            return []
        found = []
        for number in np.flatnonzero(self._members["state"] == _READING).tolist():
            if number == self._own:
                continue
            joined = int(self._members["joined"][number])
            known, wants = self._wants.get(number, (-1, frozenset()))
            if known != joined:
                count = min(int(self._members["listed"][number, 0]), _MOST_LISTED)
                wants = frozenset(self._lists[number, 0, :count].tolist())
                self._wants[number] = joined, wants
            if wants.issuperset(block.wants):
                found.append(number)
        return found

    def ask(self, blocks: Sequence[BlockKey], *, most_claims: int) -> list[BlockStatus]:
        """Says what becomes of blocks; those that are `OWN` have to be published or given up."""
        statuses: list[BlockStatus] = []
        with self._table() as is_locked:
            for block in blocks:
                status = self._ask_for(block, most_claims) if is_locked else BlockStatus.UNSHARED
                most_claims -= status is BlockStatus.OWN
                statuses.append(status)
        return statuses

    def _ask_for(self, block: BlockKey, most_claims: int) -> BlockStatus:
        row = self._find(block)
        if row is not None:
            if self._blocks["state"][row] == _FULL:
                return BlockStatus.THERE
            owner = int(self._blocks["owner"][row])
            if not self._is_absent(owner):
                is_trusted = owner not in self._distrusted
                return BlockStatus.AWAITED if is_trusted else BlockStatus.UNSHARED
            self._blocks["state"][row] = _FREE
        if not self._missing(block):
            return BlockStatus.UNSHARED
        if most_claims < 1:
            return BlockStatus.AWAITED
        return BlockStatus.OWN if self._claim(block) else BlockStatus.NO_ROOM

    def take(self, block: BlockKey, target: memoryview) -> bool:
        """Copies a block; returns whether its checksum is that of the process that read it."""
        with self._table() as is_locked:
            row = self._find(block) if is_locked else None
            if row is None or self._blocks["state"][row] != _FULL:
                return False
            start, crc = int(self._blocks["unit"][row]) * _UNIT_BYTES, self._blocks["crc"][row]
        # Without the lock: if the block makes room for another meanwhile, the checksum differs.
        np.copyto(np.frombuffer(target, np.uint8), self._heap[start : start + block.size_bytes])
        return int(crc) == crc32(target)

    def publish(self, block: BlockKey, data: memoryview) -> None:
        """Puts a claimed block where the others find it."""
        row = self._row_of_own(block)
        if row is None:
            return
        start, crc = int(self._blocks["unit"][row]) * _UNIT_BYTES, crc32(data)
        np.copyto(self._heap[start : start + block.size_bytes], np.frombuffer(data, np.uint8))
        with self._table() as is_locked:
            if is_locked:
                takers = self._missing(block)
                self._blocks["takers"][row] = sum(1 << number for number in takers)
                self._blocks["crc"][row] = crc
                self._blocks["state"][row] = _FULL if takers else _FREE
                self._changes += np.uint64(1)

    def give_up(self, block: BlockKey) -> None:
        """Leaves a claimed block to the others."""
        row = self._row_of_own(block)
        if row is not None:
            self._blocks["state"][row] = _FREE
            self._changes += np.uint64(1)

    def finish(self, blocks: Sequence[BlockKey]) -> None:
        """Says that this process has blocks, so that they are not kept for it."""
        with self._table() as is_locked:
            count = int(self._members["listed"][self._own, 1]) if is_locked else _MOST_LISTED
            for block in blocks[: _MOST_LISTED - count]:
                self._lists[self._own, 1, count] = block.words[0]
                count += 1
                row = self._find(block)
                if row is not None and self._blocks["state"][row] == _FULL:
                    self._drop_taker(row, self._own)
            if is_locked:
                self._members["listed"][self._own, 1] = count

    def distrust_owner(self, block: BlockKey) -> None:
        """Does not wait any more for the member that has claimed a block."""
        with self._table() as is_locked:
            row = self._find(block) if is_locked else None
            if row is not None and self._blocks["state"][row] == _FILLING:
                self._distrusted.add(int(self._blocks["owner"][row]))

    def close(self) -> None:
        """Leaves the others alone, with what they have of the memory."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            if self._sender is not None:
                self._sender.join()
            self._listener.close()
        if self._own >= 0:
            with self._table() as is_locked:
                if is_locked:
                    self._remove(self._own)
        self._is_usable = False
        os.close(self._descriptor)

    @contextmanager
    def _table(self) -> Iterator[bool]:
        """Locks the tables; yields whether that was possible, and ends all sharing if not."""
        with self._lock:
            until = time.monotonic() + _LOCK_SECONDS
            while self._is_usable and not _try_lock(self._descriptor, _TABLE_LOCK):
                if time.monotonic() > until:
                    self._is_usable = False
                time.sleep(_PAUSE_SECONDS / 10)
            if not self._is_usable:
                yield False
                return
            try:
                yield True
            finally:
                _set_lock(self._descriptor, _TABLE_LOCK, fcntl.F_UNLCK)

    def _is_absent(self, number: int) -> bool:
        """Whether there is no such member; removes one whose process has ended."""
        if number == self._own:
            return False
        if self._members["state"][number] == _ABSENT:
            return True
        if not _try_lock(self._descriptor, _FIRST_MEMBER_LOCK + number):
            return False
        self._remove(number)
        _set_lock(self._descriptor, _FIRST_MEMBER_LOCK + number, fcntl.F_UNLCK)
        return True

    def _remove(self, number: int) -> None:
        blocks = self._blocks
        blocks["state"][(blocks["state"] == _FILLING) & (blocks["owner"] == number)] = _FREE
        for row in np.flatnonzero(blocks["state"] == _FULL).tolist():
            self._drop_taker(row, number)
        self._members["state"][number] = _ABSENT
        self._changes += np.uint64(1)

    def _drop_taker(self, row: int, number: int) -> None:
        left = int(self._blocks["takers"][row]) & ~(1 << number)
        self._blocks["takers"][row] = left
        if not left:
            self._blocks["state"][row] = _FREE
            self._changes += np.uint64(1)

    def _find(self, block: BlockKey) -> int | None:
        blocks = self._blocks
        first, second = block.words
        found = np.flatnonzero((blocks["key"][:, 0] == first) & (blocks["state"] != _FREE))
        rows = (row for row in found.tolist() if blocks["key"][row, 1] == second)
        return next(rows, None)

    def _row_of_own(self, block: BlockKey) -> int | None:
        with self._table() as is_locked:
            row = self._find(block) if is_locked else None
            if row is not None and self._blocks["owner"][row] == self._own:
                return row
        return None

    def _missing(self, block: BlockKey) -> list[int]:
        """Returns the other members that want a block and do not have it."""
        missing, first = [], block.words[0]
        for number in self.find_takers(block):
            count = min(int(self._members["listed"][number, 1]), _MOST_LISTED)
            if first not in self._lists[number, 1, :count]:
                missing.append(number)
        return missing

    def _claim(self, block: BlockKey) -> bool:
        """Gives a block room, of members that have ended or of spare blocks if need be."""
        free = np.flatnonzero(self._blocks["state"] == _FREE)
        unit = self._find_room(block.size_bytes)
        if unit is None:
            for number in range(_MOST_MEMBERS):
                self._is_absent(number)
            spare = (self._blocks["state"] == _FULL) & (self._blocks["is_spare"] == 1)
            self._blocks["state"][spare] = _FREE
            unit = self._find_room(block.size_bytes)
        if unit is None or not len(free):
            return False
        row = int(free[0])
        self._blocks["key"][row] = block.words
        self._blocks["size"][row], self._blocks["unit"][row] = block.size_bytes, unit
        self._blocks["owner"][row], self._blocks["is_spare"][row] = self._own, block.is_spare
        self._blocks["state"][row] = _FILLING
        return True

    def _find_room(self, size_bytes: int) -> int | None:
        """Returns the first unit of a free part of the heap; None if there is none."""
        used = self._blocks[self._blocks["state"] != _FREE]
        at, needed = 0, -(-size_bytes // _UNIT_BYTES)
        for row in used[np.argsort(used["unit"])]:
            if int(row["unit"]) - at >= needed:
                return at
            at = int(row["unit"]) + -(-int(row["size"]) // _UNIT_BYTES)
        return at if _MOST_BLOCKS - at >= needed else None


def join_node(name: str) -> NodeMemory | None:
    """Joins the processes of this user on this node that load from one place.

    Returns None where it cannot be had, as on other systems than Linux.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    text = f"{_FORM} {os.geteuid()} {name}"
    address = "\0ckptkit-" + blake2b(text.encode(), digest_size=16).hexdigest()
    until = time.monotonic() + _JOIN_SECONDS
    while time.monotonic() < until:
        with suppress(OSError, struct.error):
            memory = _receive(address) or _make(address)
            if memory is None:
                time.sleep(_PAUSE_SECONDS)  # another process was faster, and is about to listen
                continue
            if memory.enter():
                return memory
            memory.close()
        return None
    return None


def _receive(address: str) -> NodeMemory | None:
    """Returns the memory of the process that listens; None without one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_JOIN_SECONDS)
        try:
            client.connect(address)
            if _user_of(client) != os.geteuid():
                raise PermissionError("a process of another user listens")
            _, descriptors, _, _ = socket.recv_fds(client, 1, 1)
        except (ConnectionRefusedError, ConnectionResetError):  # there is none, or it ended now
            return None
    try:
        for descriptor in descriptors:
            # Memory that its maker can shorten would end this process with a signal.
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & fcntl.F_SEAL_SHRINK and os.fstat(descriptor).st_size == _SIZE_BYTES:
                return _open(descriptor, None)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    raise ConnectionError("no memory of the expected size was sent")


def _make(address: str) -> NodeMemory | None:
    """Returns new memory, which is sent to others that ask; None if another process was faster."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        descriptor = os.memfd_create("ckptkit-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as closing:
            closing.callback(os.close, descriptor)
            os.ftruncate(descriptor, _SIZE_BYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            try:
                listener.bind(address)
            except OSError:
                return None
            listener.listen(_MOST_MEMBERS)
            memory = _open(descriptor, listener)
        stack.pop_all()
        return memory


def _send_to_all(listener: socket.socket, descriptor: int) -> None:
    """Sends a descriptor to each process of this user that connects, until the socket is closed."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        with client, suppress(OSError):
            client.settimeout(_JOIN_SECONDS)
            if _user_of(client) == os.geteuid():
                socket.send_fds(client, [b"\0"], [descriptor])


def _user_of(connection: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return int(user)


def _open(descriptor: int, listener: socket.socket | None) -> NodeMemory:
    """Opens memory once more: locks of a descriptor that was sent are those of its sender too."""
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return NodeMemory(own, listener)
    except BaseException:
        os.close(own)
        raise


def _try_lock(descriptor: int, byte: int) -> bool:
    try:
        _set_lock(descriptor, byte, fcntl.F_WRLCK)
    except OSError:
        return False
    return True


def _set_lock(descriptor: int, byte: int, kind: int) -> None:
    """Locks or unlocks a byte for one open file description; the kernel ends it with that.

    Source:
        "Open file description locks (non-POSIX)" in fcntl(2).
    """
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


_BLOCK_BYTES = 16 << 20  # larger requests are not shared
_SPARE_BYTES = 256 << 10  # smaller requests are not kept until all have taken them
_START_SECONDS = 2.0  # in which ranks that have opened the source say what they want
_ROOM_SECONDS = 5.0  # without progress, after which a rank does not wait for room any more
_OWNER_SECONDS = 15.0  # after which it does not wait any more for a rank that downloads
_ADVANCE_SECONDS = 0.002
_LOOK_SECONDS = 0.1  # after which it looks whether a rank that it waits for has ended

Wants = Mapping[str, Sequence[tuple[int, int, int]]]
"""By file, the records that something is read of: start, stop, and a digest of what."""
_Read = tuple[BlockKey, FileRange, memoryview]


class SharedSource(Source):
    """A source that is read as before, and takes from other ranks what they have of it."""

    def __init__(self, source: Source, node: NodeMemory | None) -> None:
        self.location = source.location
        self._taken: deque[int] = deque()  # lengths; threads append
        self._source, self._node = source, node
        self.is_remote = source.is_remote
        self._wants: Wants = {}
        self._identities: dict[str, str] = {}
        self._waits_for_room = True

    @property
    def bytes_shared(self) -> int:
        return sum(self._taken)

    def announce(
        self, index: TensorIndex, chunks: Iterable[ChunkRead], spans: Iterable[SpanRead]
    ) -> None:
        """Says what this rank is going to read, and waits a little for what the others say."""
        if self._node is None or not self.is_remote:
            return
        self._wants = wants = _list_wants(index, chunks, spans)
        digests = {digest for records in wants.values() for _, _, digest in records}
        self._node.announce(digests, wait_seconds=_START_SECONDS)

    def walk(self, depth: int) -> Iterator[str]:
        return self._source.walk(depth)

    def stat(self, path: str) -> FileRef:
        return self._source.stat(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        return self._source.read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        if self._node is None or not target.nbytes:
            self._source.read_into(path, start, target)
        else:
            self.fetch([(FileRange(path, start, start + target.nbytes), target.cast("B"))])

    def prefetch(self, ranges: Collection[FileRange]) -> None:
        self._source.prefetch(ranges)

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        own, shared = [], list[_Read]()
        for wanted, view in reads:
            block = self._block_of(wanted)
            if block is None:
                own.append((wanted, view))
            else:
                shared.append((block, wanted, view))
        self._source.fetch(own)
        node, progress = self._node, time.monotonic()
        while node is not None and shared:
            count, seen = len(shared), node.changes
            shared = self._advance(node, shared)
            now = time.monotonic()
            if len(shared) < count:
                progress = now
                continue
            # Without progress for so long, it does not wait for what it waited for.
            if now - progress > _ROOM_SECONDS:
                self._waits_for_room = False
            for block, _, _ in shared if now - progress > _OWNER_SECONDS else ():
                node.distrust_owner(block)
            while node.changes == seen and time.monotonic() < now + _LOOK_SECONDS:
                time.sleep(_ADVANCE_SECONDS)

    def _block_of(self, wanted: FileRange) -> BlockKey | None:
        """Returns what a range is known as in the node's memory; None if it is not shared."""
        records = self._wants.get(wanted.path, ())
        if self._node is None or not records or wanted.size_bytes > _BLOCK_BYTES:
            return None
        at = max(bisect_right(records, wanted.start, key=lambda record: record[0]) - 1, 0)
        digests = []
        for start, stop, digest in records[at:]:
            if start >= wanted.stop:
                break
            if wanted.start < stop:
                digests.append(digest)
        if not digests:
            return None
        if wanted.path not in self._identities:
            self._identities[wanted.path] = self._source.stat(wanted.path).identity
        text = repr((wanted.path, self._identities[wanted.path], wanted.start, wanted.stop))
        key = blake2b(text.encode(), digest_size=16).digest()
        # Which small records are read together may differ from rank to rank: others may never ask.
        is_spare = len(digests) > 1 or wanted.size_bytes < _SPARE_BYTES
        return BlockKey(key, wanted.size_bytes, tuple(digests), is_spare)

    def _advance(self, node: NodeMemory, reads: Sequence[_Read]) -> list[_Read]:
        """Takes or downloads some of the blocks, and returns those that are left."""
        claimed: list[_Read] = []
        own: list[_Read] = []
        left: list[_Read] = []
        taken: list[BlockKey] = []
        takers = min(len(node.find_takers(block)) for block, _, _ in reads)
        blocks = [block for block, _, _ in reads]
        statuses = node.ask(blocks, most_claims=-(-len(reads) // (takers + 1)))
        for read, status in zip(reads, statuses, strict=True):
            block, _, view = read
            if status is BlockStatus.THERE and node.take(block, view):
                taken.append(block)
            elif status is BlockStatus.OWN:
                claimed.append(read)
            elif status is BlockStatus.AWAITED or (
                status is BlockStatus.NO_ROOM and self._waits_for_room
            ):
                left.append(read)
            else:
                own.append(read)
        self._taken.extend(block.size_bytes for block in taken)
        if taken:  # before the downloads, so that there is room for others
            node.finish(taken)
        try:
            self._source.fetch([(wanted, view) for _, wanted, view in (*claimed, *own)])
        except BaseException:
            for block, _, _ in claimed:
                node.give_up(block)
            raise
        for block, _, view in claimed:
            node.publish(block, view)
        if claimed or own:
            node.finish([block for block, _, _ in (*claimed, *own)])
        return left


def _list_wants(
    index: TensorIndex, chunks: Iterable[ChunkRead], spans: Iterable[SpanRead]
) -> Wants:
    """Returns what is read of each record, so that ranks which read the same can see that."""
    parts: dict[int, list[str]] = defaultdict(list)
    for read in chunks:
        short = SHORT_REMOTE_RUN_BYTES // read.entry.stored_dtype.itemsize
        for overlap, _ in read.targets:
            box = overlap.source
            if read.chunks.strides.get(read.row) is None:
                box = widen(box, overlap.chunk, short)  # what is read, as `TensorReader` does it
            parts[read.record].append(f"{read.entry.key!r} {read.row} {box}")
    for span in spans:
        for key in list_stored(index, span.entry.key):
            for record in set(index.tensors[key].chunks.record.tolist()):
                parts[record].append(f"{span.entry.key!r} {span.box}")
    wants: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, texts in parts.items():
        record, file = index.records[number], index.files[index.records[number].file]
        text = repr((file.path, file.identity, record.start, record.stop, sorted(texts)))
        digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        wants[file.path].append((record.start, record.stop, digest))
    return {path: sorted(records) for path, records in wants.items()}
