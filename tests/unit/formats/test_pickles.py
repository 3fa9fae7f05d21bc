"""Pickles are parsed into inert values; hostile ones are refused cheaply."""

from __future__ import annotations

import os
import pickle
import struct
import time
import tracemalloc
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import pytest

from ckptkit.core.errors import FormatError, LimitError, TruncatedFileError, UnsafePickleError
from ckptkit.formats.pickle.machine import (
    Global,
    InertDict,
    InertObject,
)
from ckptkit.formats.pickle.pickles import (
    inert_class,
    ordered_dict,
    parse_pickle,
)

PROTOCOLS = [0, 1, 2, 3, 4, 5]
POINT = Global("geometry", "Point")
ALLOWED = {
    ("geometry", "Point"): inert_class("geometry", "Point"),
    ("geometry", "ORIGIN"): (0, 0),
    ("collections", "OrderedDict"): ordered_dict,
    ("torch", "Size"): tuple,
}


def parse(data: bytes) -> Any:
    return parse_pickle(data, ALLOWED, where="a.pkl")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        255,
        256,
        65_536,
        2**31,
        -(2**31) - 1,
        2**63,
        10**500,
        1.5,
        float("inf"),
        "",
        "text",
        "naïve ✓ 😀",
        "x" * 300,
        (),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
        [],
        [1],
        list(range(2500)),
        {},
        {"a": 1},
        {i: str(i) for i in range(2500)},
        {(1, "a"): None, None: (), 1.5: "x", True: 2},
        {"nested": [{"a": ({"b": [()]},)}]},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_plain_values_come_back_equal(protocol: int, value: object) -> None:
    assert parse(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_bytes_come_back_equal(protocol: int) -> None:
    value = [b"", b"x", b"y" * 300, b"z" * 70_000]
    assert parse(pickle.dumps(value, protocol)) == value
    assert parse(pickle.dumps(bytearray(b"abc"), 5)) == b"abc"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_cyclic_values_stay_shared(protocol: int) -> None:
    inner = ["x"]
    cyclic: list[Any] = [inner, inner]
    cyclic.append(cyclic)
    found = parse(pickle.dumps(cyclic, protocol))
    assert found[0] is found[1]
    assert found[2] is found


def test_an_ordered_dict_keeps_items_and_attributes() -> None:
    value = OrderedDict(weight=1)
    value._metadata = OrderedDict(version=2)  # type: ignore[attr-defined]
    found = parse(pickle.dumps(value, 2))
    assert isinstance(found, InertDict)
    assert found == {"weight": 1}
    assert found.attributes == {"_metadata": {"version": 2}}


def test_an_allowed_class_becomes_an_inert_object() -> None:
    found = parse(b"\x80\x02cgeometry\nPoint\n)\x81}X\x01\x00\x00\x00xK\x07sb.")
    assert isinstance(found, InertObject)
    assert (found.cls, found.args, found.state) == (POINT, (), {"x": 7})


def test_a_named_class_is_a_name_and_a_named_value_is_that_value() -> None:
    assert parse(b"cgeometry\nPoint\n.") == POINT
    assert parse(b"cgeometry\nORIGIN\n.") == (0, 0)


def test_persistent_ids_go_to_the_callers_function() -> None:
    data = b"\x80\x02(X\x01\x00\x00\x00aK\x01tQ."
    assert parse_pickle(data, {}, where="", persistent=lambda identity: [identity]) == [("a", 1)]
    with pytest.raises(UnsafePickleError, match="refers to something outside itself"):
        parse(data)


class _Runs:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "system"), (eval, "eval"), (__import__, "__import__"), (getattr, "getattr")],  # noqa: S307
)
def test_a_global_outside_the_list_is_refused_by_name(
    protocol: int, function: Any, name: str
) -> None:
    with pytest.raises(UnsafePickleError, match=rf"names '\w+\.{name}'"):
        parse(pickle.dumps(_Runs(function, "touch /tmp/never"), protocol))


def test_a_refusal_says_where_and_what_to_do() -> None:
    with pytest.raises(UnsafePickleError) as caught:
        parse(b"\x80\x04\x8c\x02os\x8c\x06system\x93.")
    assert str(caught.value) == (
        "a.pkl: byte 14: pickle names 'os.system', which is not on the list of what a checkpoint"
        " may name"
    )
    assert "nothing was imported or called" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"cgeometry\nPoint\n(K\x01tR.",  # arguments for a class without any
        b"ccollections\nOrderedDict\n(]tR.",
        b"ctorch\nSize\n(K\x01tR.",  # tuple(1)
        b"ctorch\nSize\n(K\x01K\x02tR.",
        b"cgeometry\nORIGIN\n)R.",  # a value is not a function
        b"cgeometry\nPoint\nK\x01R.",  # arguments are no tuple
        b"X\x01\x00\x00\x00a)R.",
        b")}b.",  # a state for a tuple
        b"cgeometry\nPoint\n)\x81}b}b.",  # a second state
    ],
)
def test_misuse_of_allowed_names_is_refused(data: bytes) -> None:
    with pytest.raises(UnsafePickleError):
        parse(data)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"Pid\n.", "PERSID"),
        (b"(ios\nsystem\n.", "INST"),
        (b"(cgeometry\nPoint\no.", "OBJ"),
        (b"\x82\x01.", "EXT1"),
        (b"\x83\x01\x00.", "EXT2"),
        (b"\x84\x01\x00\x00\x00.", "EXT4"),
        (b"\x97.", "NEXT_BUFFER"),
        (b"C\x00\x98.", "READONLY_BUFFER"),
        (b"\x8f.", "EMPTY_SET"),
        (b"(\x91.", "FROZENSET"),
        (b"S'a'\n.", "STRING"),
        (b"cgeometry\nPoint\n)}\x92.", "NEWOBJ_EX"),
    ],
)
def test_opcodes_that_no_checkpoint_needs_are_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(UnsafePickleError, match=f"opcode {name},"):
        parse(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff.", "0xff is no pickle opcode"),
        (b"\x80\x06N.", "protocol 6 is not known"),
        (b".", "empty stack"),
        (b"0.", "empty stack"),
        (b"\x85.", "empty stack"),
        (b"N(0.", None),
        (b"Nt.", "mark that it did not set"),
        (b"NN.", "values left over"),
        (b"(N.", "values left over"),
        (b"N.N", "1 bytes before its file does"),
        (b"h\x00.", "memo slot 0 is empty"),
        (b"g-1\n.", "negative"),
        (b"I1_0\n.", "decimal digits"),
        (b"L" + b"9" * 5000 + b"L\n.", "too long"),
        (b"F1.x\n.", "not a decimal number"),
        (b"\x8b" + struct.pack("<I", 2**31) + b"xx.", "longer than any real one"),
        (b"\x8c\x02\xff\xfe.", "not utf-8"),
        (b"\x8c\x03\xed\xa0\x80.", "not utf-8"),  # a lone surrogate
        (b"V\\ud800\n.", "not raw-unicode-escape"),
        (b"NNa.", "not a list"),
        (b"N(Ne.", "not a list"),
        (b"NNNs.", "not a dictionary"),
        (b"}(Nu.", "key without a value"),
        (b"}(K\x01NK\x01Nu.", "same key twice"),
        (b"}]Ns.", "list of this kind"),
        (b"}}Ns.", "dict of this kind"),
        (b"})\x85\x85Ns.", "tuple of this kind"),
        (b"}\x8a\x0a" + b"\x01" * 10 + b"Ns.", "int of this kind"),
        (b"K\x01K\x02\x93.", "not a string"),
    ],
)
def test_malformed_pickles_are_refused_with_a_position(data: bytes, message: str | None) -> None:
    if message is None:
        assert parse(data) is None
        return
    with pytest.raises(FormatError, match=message) as caught:
        parse(data)
    assert caught.value.where.startswith("a.pkl: byte ")


def test_a_pickle_cut_anywhere_is_refused() -> None:
    for protocol in PROTOCOLS:
        data = pickle.dumps({"a": [1, 2.5, (3, "x" * 300), 2**70], "b": {"c": None}}, protocol)
        for length in range(len(data)):
            with pytest.raises(FormatError):
                parse(data[:length])


def test_a_length_beyond_the_end_is_refused_before_anything_is_allocated() -> None:
    for opcode, width in ((b"X", 4), (b"\x8d", 8), (b"B", 4), (b"\x8e", 8), (b"\x95", 8)):
        with pytest.raises(TruncatedFileError):
            parse(opcode + (2**31).to_bytes(width, "little") + b"x.")


@pytest.mark.parametrize(
    "data",
    [
        b"Nr" + struct.pack("<I", 2**31) + b".",
        b"Np2147483648\n.",
        b"Nr\xff\xff\xff\xff.",
    ],
)
def test_a_large_memo_slot_allocates_nothing(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(FormatError, match="beyond anything"):
        parse(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


MANY = 100_000


@pytest.mark.parametrize(
    "data",
    [
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
    ],
    ids=range(14),
)
def test_hostile_pickles_take_bounded_time_and_memory(data: bytes) -> None:
    tracemalloc.start()
    began = time.perf_counter()
    with suppress(FormatError, UnsafePickleError):
        parse(data)
    seconds = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * len(data) + 1_000_000
    assert seconds < 20


def test_the_number_of_tuple_keys_is_limited() -> None:
    keys = b"".join(b"J" + struct.pack("<i", i) + b"\x85N" for i in range(10_001))
    with pytest.raises(LimitError, match="more than 10,000"):
        parse(b"}(" + keys + b"u.")
