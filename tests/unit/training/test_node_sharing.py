"""Members of a node that share what they download; here all of them are in one process."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import pytest

from ckptkit.core.index import FileRange, FileRef
from ckptkit.storage.overlay import MemorySource
from ckptkit.training.load import node_sharing
from ckptkit.training.load.node_sharing import (
    HEAP_BYTES,
    BlockKey,
    BlockStatus,
    NodeMemory,
    SharedSource,
    join_node,
)
from tests.sampled import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such memory")
MIB = 1 << 20
Join = Callable[[], NodeMemory]


@pytest.fixture
def join() -> Iterator[Join]:
    name, members = uuid.uuid4().hex, []

    def run() -> NodeMemory:
        member = join_node(name)
        assert member is not None
        members.append(member)
        return member

    yield run
    for member in members:
        if member._is_usable:
            member.close()


class Store(MemorySource):
    """Files of a store, and what was read of them."""

    is_remote = True

    def __init__(self, data: bytes, version: str = "1") -> None:
        super().__init__({"file": data})
        self.reads: list[FileRange] = []
        self._ref = FileRef("file", len(data), version)

    def stat(self, path: str) -> FileRef:  # noqa: ARG002  there is one
        return self._ref

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        for wanted, view in reads:
            self.read_into(wanted.path, wanted.start, view)
            self.reads.append(wanted)

    @property
    def bytes_read(self) -> int:
        return sum(wanted.size_bytes for wanted in self.reads)


def key_of(number: int, size_bytes: int = MIB, *, is_spare: bool = False) -> BlockKey:
    digest = blake2b(bytes([number]), digest_size=16).digest()
    return BlockKey(digest, size_bytes, (1,), is_spare)


def ask(member: NodeMemory, block: BlockKey) -> BlockStatus:
    return member.ask([block], most_claims=1)[0]


def announced(join: Join, count: int) -> list[NodeMemory]:
    members = [join() for _ in range(count)]
    for member in members:
        member.announce({1}, wait_seconds=0)
    return members


def test_a_block_is_taken_by_each_member_and_then_makes_room(join: Join) -> None:
    first, second, third = announced(join, 3)
    block, data = key_of(1), np.random.default_rng(1).bytes(MIB)
    assert ask(first, block) is BlockStatus.OWN
    assert ask(second, block) is BlockStatus.AWAITED
    first.publish(block, memoryview(data))
    first.finish([block])
    for member in (second, third):
        assert ask(member, block) is BlockStatus.THERE
        target = memoryview(bytearray(MIB))
        assert member.take(block, target)
        assert target == data
        member.finish([block])
    assert ask(first, block) is BlockStatus.UNSHARED  # all have it


def test_no_more_is_shared_than_there_is_room_for(join: Join) -> None:
    first, second = announced(join, 2)
    count = HEAP_BYTES // (4 * MIB)
    data = memoryview(bytearray(4 * MIB))
    for number in range(count):
        block = key_of(number, 4 * MIB)
        assert ask(first, block) is BlockStatus.OWN
        first.publish(block, data)
    assert ask(first, key_of(count, 4 * MIB)) is BlockStatus.NO_ROOM
    second.close()
    assert ask(first, key_of(count, 4 * MIB)) is BlockStatus.UNSHARED
    announced(join, 1)
    assert ask(first, key_of(count, 4 * MIB)) is BlockStatus.OWN


def test_spare_blocks_make_room(join: Join) -> None:
    first, _ = announced(join, 2)
    for number in range(HEAP_BYTES // (16 * MIB)):
        block = key_of(number, 16 * MIB, is_spare=True)
        assert ask(first, block) is BlockStatus.OWN
        first.publish(block, memoryview(bytearray(16 * MIB)))
    assert ask(first, key_of(99)) is BlockStatus.OWN


def test_what_a_member_claimed_and_left_is_claimed_by_another(join: Join) -> None:
    first, second, third = announced(join, 3)
    assert ask(first, key_of(1)) is BlockStatus.OWN
    first.give_up(key_of(1))
    assert ask(second, key_of(1)) is BlockStatus.OWN
    second.close()
    assert ask(third, key_of(1)) is BlockStatus.OWN


def test_a_damaged_block_is_not_taken(join: Join) -> None:
    first, second = announced(join, 2)
    assert ask(first, key_of(1)) is BlockStatus.OWN
    first.publish(key_of(1), memoryview(bytes(MIB)))
    second._heap[5_000] ^= 1
    assert not second.take(key_of(1), memoryview(bytearray(MIB)))


def announce(source: SharedSource, size_bytes: int, digest: int = 1, wait_seconds: int = 0) -> None:
    """Says that a member wants all of a file, as one record."""
    if source._node is not None:
        source._wants = {"file": [(0, size_bytes, digest)]}
        source._node.announce({digest}, wait_seconds=wait_seconds)


def read_all(source: SharedSource, size_bytes: int, step: int, target: bytearray) -> None:
    view = memoryview(target)
    parts = [
        (FileRange("file", start, min(start + step, size_bytes)), view[start : start + step])
        for start in range(0, size_bytes, step)
    ]
    for first in range(0, len(parts), 8):
        source.fetch(parts[first : first + 8])


@pytest.mark.parametrize("members", sampled([2, 4], [2]))
def test_a_file_larger_than_the_memory_is_read_once_by_all_together(
    members: int, join: Join
) -> None:
    size, step = HEAP_BYTES + 21 * MIB + 5, 4 * MIB
    data = np.random.default_rng(2).bytes(size)
    store = Store(data)
    sources = [SharedSource(store, join()) for _ in range(members)]
    targets = [bytearray(size) for _ in range(members)]

    def run(number: int) -> None:
        announce(sources[number], size, wait_seconds=2)
        read_all(sources[number], size, step, targets[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(target == data for target in targets)
    assert store.bytes_read == size
    assert sum(source.bytes_shared for source in sources) == (members - 1) * size


def test_another_version_is_never_taken(join: Join) -> None:
    stores = [Store(b"a" * MIB, "1"), Store(b"b" * MIB, "2")]
    sources = [SharedSource(store, join()) for store in stores]
    for source in sources:
        announce(source, MIB)
    for store, source in zip(stores, sources, strict=True):
        target = bytearray(MIB)
        read_all(source, MIB, MIB, target)
        assert target == store.read("file", 0, MIB)
        assert not source.bytes_shared


def test_what_only_one_wants_is_not_shared(join: Join) -> None:
    stores = [Store(bytes(2 * MIB)) for _ in range(2)]
    sources = [SharedSource(store, join()) for store in stores]
    for number, source in enumerate(sources):
        announce(source, 2 * MIB, number)
    for source in sources:
        read_all(source, 2 * MIB, MIB, bytearray(2 * MIB))
    assert [store.bytes_read for store in stores] == [2 * MIB, 2 * MIB]
    assert not sources[1]._node._blocks["key"].any()  # type: ignore[union-attr]


def test_a_failed_download_is_that_of_its_member_alone(join: Join) -> None:
    class Failing(Store):
        def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
            if reads:
                raise OSError("no route")

    sources = [SharedSource(kind(bytes(MIB)), join()) for kind in (Failing, Store)]
    for source in sources:
        announce(source, MIB)
    with pytest.raises(OSError, match="no route"):
        read_all(sources[0], MIB, MIB, bytearray(MIB))
    target = bytearray(b"x" * MIB)
    read_all(sources[1], MIB, MIB, target)
    assert target == bytes(MIB)


def test_a_member_that_downloads_for_ever_is_waited_for_once(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_sharing, "_OWNER_SECONDS", 0.3)
    stuck, _ = announced(join, 2)
    store = Store(bytes(8 * MIB))
    source = SharedSource(store, join())
    announce(source, 8 * MIB)
    for start in range(0, 8 * MIB, MIB):
        block = source._block_of(FileRange("file", start, start + MIB))
        assert block is not None
        assert ask(stuck, block) is BlockStatus.OWN
    read_all(source, 8 * MIB, MIB, bytearray(8 * MIB))
    assert store.bytes_read == 8 * MIB


def test_without_shared_memory_a_source_is_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(38, "not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert join_node(uuid.uuid4().hex) is None
    monkeypatch.delattr(os, "memfd_create")
    assert join_node(uuid.uuid4().hex) is None
    store = Store(bytes(MIB))
    source = SharedSource(store, None)
    announce(source, MIB)
    read_all(source, MIB, MIB, bytearray(MIB))
    assert store.bytes_read == MIB


def ask_as(user: int, name: str) -> int:
    """Returns 1 if a process of a user that claims to be ours is given the memory, else 0."""
    own = os.geteuid()
    child = os.fork()
    if child == 0:
        os.setuid(user)
        os.geteuid = lambda: own
        os._exit(join_node(name) is not None)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_given_no_memory() -> None:
    name = uuid.uuid4().hex
    member = join_node(name)
    assert member is not None
    with member:
        assert ask_as(os.geteuid(), name) == 1
        assert ask_as(65534, name) == 0
