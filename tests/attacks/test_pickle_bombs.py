"""Pickles that are small on the disk and grow without bound where they are executed."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.formats.dcp.metadata import ALLOWED, parse_metadata
from ckptkit.formats.pickle.pickles import parse_pickle, walk_values
from tests.attacks.archives import archive_with
from tests.sampled import sampled

Copied = Callable[..., Path]
Refusal = Callable[..., CkptkitError]
DOUBLED = b"]" + b"".join(b"2\x86" for _ in range(60))  # a tuple of itself and itself, 60 times
BOMBS: dict[str, bytes] = {
    "a memo slot of 2 GiB": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a memo slot in decimal": b"\x80\x02Np99999999999999999999\n.",
    "doubled 60 times": b"\x80\x02" + DOUBLED + b".",
    "a frame beyond the end": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "a frame of 2^64 - 1": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "a string of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "bytes of 2^40": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
    "an array of 2^40": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",
    "an integer of 2^31 bytes": b"\x80\x02\x8b" + struct.pack("<I", 2**31 - 1) + b"\xff.",
    "an integer of 100,000 digits": b"I" + b"9" * 100_000 + b"\n.",
    "nested 60,000 deep": b"\x80\x02" + b"]" * 60_000 + b"a" * 59_999 + b".",
    "marks without an end": b"(" * 200_000,
    "a list that contains itself": b"\x80\x02]q\x00h\x00a.",
    "objects nested 60,000 deep": b"\x80\x02cm\nC\nq\x00"
    + b"h\x00(" * 60_000
    + b"t\x81" * 60_000
    + b".",
    "an object that is its own state": b"\x80\x02cm\nC\n)\x81q\x00h\x00b.",
    "an object doubled 40 times": b"\x80\x02cm\nC\nq\x00)\x81"
    + b"q\x01h\x00h\x01h\x01\x86\x81" * 40
    + b".",
    "arguments that are copied": b"\x80\x02("
    + b"N" * 20_000
    + b"tq\x00"
    + b"cm\nf\nh\x00R" * 9_000
    + b".",
    "a key that hashes slowly": b"\x80\x02}" + b"K\x01" * 2 + b"\x86" * 1 + b"2" * 5000 + b".",
}

LARGE_BOMBS = (
    *("objects nested 60,000 deep", "nested 60,000 deep", "arguments that are copied"),
    "marks without an end",
)
QUICK_BOMBS = [kind for kind in BOMBS if kind not in LARGE_BOMBS]
MANY = 100_000
GETATTR = b"c__builtin__\ngetattr\n"
ENCODE = (
    b"c_codecs\nencode\nq\x00(X\x40\x42\x0f\x00"
    + b"x" * 1_000_000
    + b"X\x06\x00\x00\x00latin1tq\x01"
)
FLOODS = (  # too many to be converted each, as the bombs are
    b"(" * MANY,
    b"]" * MANY,
    b"}" * MANY,
    b"N" + b"\x85" * MANY + b".",  # a deep tuple
    b"](" * MANY,
    b"]" * MANY + b"a" * (MANY - 1) + b".",  # a deep list
    b"]q\x00" + b"h\x00a" * MANY + b".",  # a list that holds itself
    b"}N" + b"\x85" * MANY + b"Ns.",  # a deep tuple as a key
    b"cgeometry\nPoint\n)\x81" + b"N)\x81b" * MANY,
    b"]\x94]\x94" + b"h\x00h\x01ah\x00ah\x000" * 20_000,
    b"X\x40\x42\x0f\x00" + b"x" * 1_000_000 + b"\x94" + b"h\x00" * 100_000 + b".",
    b"X\x40\x42\x0f\x00" + b"x" * 1_000_000,
    b"\x8b\x00\x04\x00\x00" + b"\x7f" * 1024 + b"\x94" + b"h\x00" * 100_000 + b".",
    b"}(" + b"".join(b"J" + struct.pack("<i", i << 13) + b"N" for i in range(50_000)) + b"u.",
    b"cgeometry\nPoint\n\x94" + b"h\x00(" * MANY + b"t\x81" * MANY + b".",  # deep objects
    b"cgeometry\nPoint\n)\x81" + b"Na" * MANY + b".",
    b"(" + b"N" * MANY + b"tq\x00(" + b"cg\nP\nh\x00R" * 10_000 + b"t.",  # shared arguments
    b"(" + b"N" * MANY + b"tq\x00(" + b"ccopyreg\n__newobj__\nh\x00R" * 10_000 + b"t.",
    ENCODE + b"(" + b"h\x00h\x01R" * 100_000 + b"t.",  # the same bytes over and over
    GETATTR + b"q\x00(cg\nP\nq\x01" + b"h\x00h\x01X\x01\x00\x00\x00a\x86Rq\x01" * 20_000 + b"t.",
)
QUICK_FLOODS = (0, 1, 2, 3, 8, 11, 13)


@pytest.mark.parametrize("number", sampled(range(len(FLOODS)), QUICK_FLOODS))
def test_a_flood_of_opcodes_takes_a_multiple_of_its_size(
    number: int, bounded: Callable[..., Any]
) -> None:
    data = FLOODS[number]
    with bounded(seconds=20, most_bytes=200 * len(data) + 1_000_000), suppress(InputError):
        parse_pickle(data, {}, where="x")


@pytest.mark.parametrize("kind", sampled(BOMBS, QUICK_BOMBS))
def test_a_bomb_takes_no_more_than_a_multiple_of_its_size(
    kind: str, bounded: Callable[..., Any]
) -> None:
    data = BOMBS[kind]
    with bounded(seconds=10, most_bytes=300 * len(data) + (2 << 20)):
        for allowed in (ALLOWED, {}):
            try:
                value = parse_pickle(data, allowed, where="x")
                for _ in walk_values(value, limit=10_000, where="x"):
                    pass
            except InputError:
                continue
        with pytest.raises(InputError):
            parse_metadata(data, where="x")


@pytest.mark.parametrize("kind", sampled(BOMBS, QUICK_BOMBS))
def test_as_metadata_or_a_torch_file_it_is_refused(
    kind: str, copied: Copied, source: Path, out: Path, bounded: Callable[..., Any]
) -> None:
    checkpoint = copied("fsdp2_hsdp")
    (checkpoint / ".metadata").write_bytes(BOMBS[kind])
    (source / "pytorch_model.bin").write_bytes(archive_with(BOMBS[kind]))
    import ckptkit

    with bounded(seconds=10, most_bytes=64 << 20):
        for place in (checkpoint, source):
            with pytest.raises(CkptkitError):
                ckptkit.consolidate(place, out)
    assert list(out.parent.iterdir()) == []


def keys_of(numbers: list[int], count: int) -> bytes:
    """Pickles a dictionary of tuples of numbers; to make the dictionary itself takes long."""
    pickled = [pickle.dumps(number, 2)[2:-1] for number in numbers]
    items = [b"(%btN" % b"".join(one) for one in islice(product(pickled, repeat=5), count)]
    batches = (b"".join(items[at : at + 1000]) for at in range(0, count, 1000))
    return b"\x80\x02}" + b"".join(b"(%bu" % batch for batch in batches) + b"."


@pytest.mark.slow
def test_tuples_that_hash_alike_are_counted(bounded: Callable[..., Any]) -> None:
    """Hashes of numbers are known beforehand: with tuples of them, a dictionary becomes slow."""
    alike = [number * (2**61 - 1) for number in range(8)]  # all hash to 0
    few = pickle.loads(keys_of(alike, 50))  # noqa: S301, TID251 - made right here
    assert few == dict.fromkeys(islice(product(alike, repeat=5), 50))
    data = keys_of(alike, 20_000)
    with bounded(seconds=20, most_bytes=64 << 20):
        assert len(parse_pickle(data, {}, where="x")) == 20_000  # type: ignore[arg-type]


def test_so_are_numbers(bounded: Callable[..., Any]) -> None:
    integers = pickle.dumps(dict.fromkeys(n * (2**61 - 1) for n in range(2000)), 4)
    with bounded(seconds=5, most_bytes=64 << 20):
        assert len(parse_pickle(integers, {}, where="x")) == 2000  # type: ignore[arg-type]
