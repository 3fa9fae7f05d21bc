"""What travels between trainer and writer, and what of it is put into text once."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from ckptkit.writer.messages import (
    ArchiveData,
    Buffer,
    Channel,
    Fixed,
    Image,
    Inline,
    Link,
    Message,
    Persist,
    Written,
)

IMAGES = tuple(
    Image(
        f"u/__0_{number}.distcp",
        4096 * number,
        70,
        (ArchiveData(5, 9, (1, 2)), ArchiveData(64, 70, (3,))),
    )
    for number in range(3)
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


def carried(ends: tuple[Channel, Channel], message: Message) -> Message | None:
    sender = threading.Thread(target=ends[0].send, args=(message,))
    sender.start()
    found = ends[1].receive()
    sender.join()
    return found


def test_fixed_values_arrive_like_any_others(ends: tuple[Channel, Channel]) -> None:
    chunks = [[number, [0], [4], 0, 1 << 40, 70] for number in range(1000)]
    units = {
        "a": {"chunks": Fixed(chunks), "objects": [], "none": Fixed()},
        "b\u00e4\0": {"x": Fixed([1])},
    }
    message = Persist(
        "n-1", "/run", Fixed(IMAGES), (Inline("i", b"\0\xff"),), {"units": units}, "r"
    )
    found = carried(ends, message)
    plain = {"a": {"chunks": chunks, "objects": [], "none": []}, "b\u00e4\0": {"x": [1]}}
    assert found == Persist("n-1", "/run", IMAGES, message.inline, {"units": plain}, "r")
    assert carried(ends, Buffer(7)) == Buffer(7)


def test_what_is_to_be_linked_arrives(ends: tuple[Channel, Channel]) -> None:
    links = (Link("u/__0_1.distcp", "/run/.ckptkit/a/__0_1.distcp", 70),)
    message = Persist("n-1", "/run", (), links=links, keeps=links, ranges=Fixed([(0, 9), (9, 10)]))
    plain = Persist("n-1", "/run", (), links=links, keeps=links, ranges=((0, 9), (9, 10)))
    assert carried(ends, message) == plain
    answer = Written("n-1", 1, 2.0, 3.0, linked_bytes=70, kept=False, sums=(5, 6))
    assert carried(ends, answer) == answer


def test_fixed_values_are_put_into_text_once_and_in_small_parts(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    encode = json.JSONEncoder.encode

    def recorded(encoder: json.JSONEncoder, value: object) -> str:
        texts.append(encode(encoder, value))
        return texts[-1]

    monkeypatch.setattr(json.JSONEncoder, "encode", recorded)
    record = {"units": {"u": {"chunks": Fixed([[number, [0], [4]] for number in range(5000)])}}}
    message = Persist("n-1", "/run", Fixed(IMAGES), (), record)
    first = carried(ends, message)
    assert max(map(len, texts)) < 10_000
    texts.clear()
    assert carried(ends, message) == first
    assert len(texts) == 1
    assert len(texts[0]) < 300
