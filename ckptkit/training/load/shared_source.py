"""A distant source: what several ranks of a node need is downloaded once.

Each rank says which parts it wants, and takes from the memory of the node what another one has
downloaded. Ranks that want the same part of a record make the same requests for it, so a request is
the unit that is shared. A rank waits for another only for a bounded time, and then downloads for
itself; what it gets from another is compared with the checksum of what that one has downloaded, and
goes through the same proofs as what it downloads.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

from ckptkit.core.geometry import widen
from ckptkit.core.index import FileRange, FileRef, Key, TensorIndex
from ckptkit.engine.box_reads import SpanRead
from ckptkit.engine.reader import SHORT_REMOTE_RUN_BYTES, ChunkRead
from ckptkit.storage.base import Source
from ckptkit.training.load.node_memory import BlockKey, BlockStatus, NodeMemory

_BLOCK_BYTES = 16 << 20  # larger requests are not shared
_SPARE_BYTES = 256 << 10  # smaller requests are not kept until all have taken them
_START_SECONDS = 2.0  # in which ranks that have opened the source say what they want
_ROOM_SECONDS = 5.0  # without progress, after which a rank does not wait for room any more
_OWNER_SECONDS = 15.0  # after which it does not wait any more for a rank that downloads
_PAUSE_SECONDS = 0.002
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
        own, shared = [], []
        for wanted, view in reads:
            block = self._block_of(wanted)
            if block is None:
                own.append((wanted, view))
            else:
                shared.append((block, wanted, view))
        self._download(own)
        if self._node is not None and shared:
            self._fill_shared(self._node, shared)

    def _fill_shared(self, node: NodeMemory, reads: list[_Read]) -> None:
        progress = time.monotonic()
        while reads:
            count, seen = len(reads), node.changes
            reads = self._advance(node, reads)
            now = time.monotonic()
            if len(reads) < count:
                progress = now
                continue
            self._lose_patience(node, reads, now - progress)
            while node.changes == seen and time.monotonic() < now + _LOOK_SECONDS:
                time.sleep(_PAUSE_SECONDS)

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
        if taken:
            node.finish(taken)
        self._download_blocks(node, claimed, own)
        return left

    def _download_blocks(
        self, node: NodeMemory, claimed: Sequence[_Read], own: Sequence[_Read]
    ) -> None:
        try:
            self._download([(wanted, view) for _, wanted, view in (*claimed, *own)])
        except BaseException:
            for block, _, _ in claimed:
                node.give_up(block)
            raise
        for block, _, view in claimed:
            node.publish(block, view)
        if claimed or own:
            node.finish([block for block, _, _ in (*claimed, *own)])

    def _download(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        self._source.fetch(reads)

    def _lose_patience(self, node: NodeMemory, left: Sequence[_Read], seconds: float) -> None:
        """Ends waiting after so many seconds without progress; what it waited for is left out."""
        if seconds > _ROOM_SECONDS:
            self._waits_for_room = False
        if seconds > _OWNER_SECONDS:
            for block, _, _ in left:
                node.distrust_owner(block)


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
        for key in _stored_keys(index, span.entry.key):
            for record in set(index.tensors[key].chunks.record.tolist()):
                parts[record].append(f"{span.entry.key!r} {span.box}")
    wants: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, texts in parts.items():
        record, file = index.records[number], index.files[index.records[number].file]
        text = repr((file.path, file.identity, record.start, record.stop, sorted(texts)))
        digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        wants[file.path].append((record.start, record.stop, digest))
    return {path: sorted(records) for path, records in wants.items()}


def _stored_keys(index: TensorIndex, key: Key) -> Iterator[Key]:
    derivation = index.tensors[key].derivation
    if derivation is None:
        yield key
        return
    for _, source in derivation.reads:
        yield from _stored_keys(index, source)
