"""A file of a store that takes bytes in order gets them so."""

from __future__ import annotations

import threading

from ckptkit.storage.remote.stream_target import PendingMemory, Stream


class Written:
    """A file that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""
        self.ends: list[str] = []
        self.closed = False

    def write(self, data: memoryview | bytes) -> None:
        self.data += bytes(data)

    def close(self) -> None:
        self.ends.append("closed")

    def commit(self) -> None:
        self.ends.append("committed")

    def discard(self) -> None:
        self.ends.append("discarded")


def test_a_stream_gets_its_bytes_in_order_and_early_ones_wait_in_bounded_memory() -> None:
    file, room = Written(), PendingMemory(limit_bytes=6)
    stream = Stream(lambda: file, 12, room)
    stream.write(3, memoryview(b"def"))
    stream.write(6, memoryview(b"ghi"))
    assert (file.data, room.left_bytes) == (b"", 0)
    late = threading.Thread(target=stream.write, args=(9, memoryview(b"jkl")))
    late.start()
    stream.write(0, memoryview(b"abc"))
    late.join()
    assert (file.data, room.left_bytes) == (b"abcdefghijkl", 6)
    stream.publish()
    assert file.ends == ["closed", "committed"]


def test_who_waits_for_bytes_that_will_not_come_is_let_go() -> None:
    file, room = Written(), PendingMemory(limit_bytes=2)
    stream = Stream(lambda: file, 12, room)
    late = threading.Thread(target=stream.write, args=(3, memoryview(b"def")))
    late.start()
    room.give_up()
    late.join()
    stream.write(0, memoryview(b"abc"))
    assert not stream.is_whole
    assert file.data == b""
    stream.discard()
    assert file.ends == []
