"""Any changes, in any encodings and any order of blocks, lead to the bytes they were made of."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptkit.deltas.encoding import ChangeStream, Decoder, open_decoder, open_encoder
from ckptkit.deltas.form import Encoding
from ckptkit.deltas.patching import ExpectedChecksum
from tests.small_deltas import HASHES

Bytes = NDArray[np.uint8]


def encode(encoding: Encoding, before: Bytes, after: Bytes, cuts: list[int]) -> bytes:
    """Returns the change between two versions, made block by block."""
    stored: list[bytes] = []
    encoder = open_encoder(encoding, len(before), stored.append, None)
    for start, stop in pairwise(cuts):
        encoder.add(before[start:stop].copy(), after[start:stop])
    encoder.finish()
    encoder.close()
    return b"".join(stored)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Bytes], list[Encoding]]:
    """Draws versions of a tensor's bytes, and the encodings of the changes between them."""
    size = draw(st.integers(1, 400))
    raw = draw(st.binary(min_size=size, max_size=size))
    versions = [np.frombuffer(raw, np.uint8)]
    encodings: list[Encoding] = []
    for _ in range(draw(st.integers(1, 4))):
        changes = draw(st.dictionaries(st.integers(0, size - 1), st.integers(0, 255), max_size=30))
        following = versions[-1].copy()
        for position, value in changes.items():
            following[position] = value
        versions.append(following)
        encodings.append(draw(st.sampled_from(["xor", "overwrite"])))
    return versions, encodings


@given(histories(), st.data())
def test_a_chain_of_changes_leads_to_the_last_version(
    history: tuple[list[Bytes], list[Encoding]], data: st.DataObject
) -> None:
    versions, encodings = history
    size = len(versions[0])

    def draw_cuts() -> list[int]:
        inner = data.draw(st.sets(st.integers(1, size), max_size=6))
        return sorted({0, size, *inner})

    stored = [
        encode(encoding, before, after, draw_cuts())
        for encoding, (before, after) in zip(encodings, pairwise(versions), strict=True)
    ]
    for encoding, content in zip(encodings, stored, strict=True):
        frame = zstandard.get_frame_parameters(content)
        assert encoding == "overwrite" or frame.content_size == size
        assert len(zstandard.ZstdDecompressor().decompress(content)) == frame.content_size

    def open_one(encoding: Encoding, content: bytes) -> Decoder:
        def read(start: int, stop: int) -> bytes:
            return content[start:stop]

        return open_decoder(encoding, read, len(content), size, where="w")

    def open_all() -> list[Decoder]:
        return list(map(open_one, encodings, stored))

    stream = ChangeStream(open_all, size)
    digest = HASHES["xxh3-128"](versions[-1].tobytes())
    checksum = ExpectedChecksum("xxh3-128", digest, size, "w")
    made = versions[0].copy()
    blocks = data.draw(st.permutations(list(pairwise(draw_cuts()))))
    for start, stop in blocks:
        stream.apply(start, made[start:stop])
        checksum.add(start, made[start:stop])
    assert made.tobytes() == versions[-1].tobytes()
    for decoder, encoding in zip(open_all(), encodings, strict=True):
        found = decoder.skim()
        assert found == size if encoding == "xor" else found <= size
