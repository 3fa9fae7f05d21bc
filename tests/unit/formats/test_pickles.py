"""Pickles are parsed into inert values; what only an attack names is refused, cheaply."""

from __future__ import annotations

import enum
import fractions
import functools
import pathlib
import pickle
import re
import struct
from collections import OrderedDict
from typing import Any, Self

import pytest

from ckptkit.core.errors import FormatError, UnsafePickleError
from ckptkit.formats.pickle.machine import Global, InertDict, InertKey, InertObject, class_of
from ckptkit.formats.pickle.pickles import ordered_dict, parse_pickle
from tests.sampled import sampled

PROTOCOLS = [0, 1, 2, 3, 4, 5]
POINT = Global("geometry", "Point")
ALLOWED = {
    ("geometry", "ORIGIN"): (0, 0),
    ("collections", "OrderedDict"): ordered_dict,
    ("torch", "Size"): tuple,
}


def parse(data: bytes) -> Any:
    return parse_pickle(data, ALLOWED, where="a.pkl")


@pytest.mark.parametrize("protocol", sampled(PROTOCOLS, [2, 4]))
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


def test_a_class_becomes_an_inert_object() -> None:
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


def test_a_refusal_says_where_and_what_to_do() -> None:
    with pytest.raises(UnsafePickleError) as caught:
        parse(b"\x80\x04\x8c\x02os\x8c\x06system\x93.")
    assert str(caught.value) == (
        "a.pkl: byte 14: pickle names 'os.system', which runs code, or reaches files or the"
        " network, where a pickle is executed"
    )
    assert "nothing was imported or called" in caught.value.hint


@pytest.mark.parametrize(
    "name",
    [
        ("torch", "os.system"),  # through a module that another one imports
        ("library", "helpers.builtins.eval"),
        ("numpy.testing._private.utils", "runstring"),
        ("importlib", "import_module"),
        ("torch.hub", "load"),
        ("_pickle", "loads"),
        ("io", "open"),
    ],
)
def test_what_does_harm_is_found_below_other_names(name: tuple[str, str]) -> None:
    with pytest.raises(UnsafePickleError, match="names"):
        parse(f"c{name[0]}\n{name[1]}\n.".encode())


@pytest.mark.parametrize(
    "data",
    [
        b"ctorch\nSize\n(K\x01tR.",  # tuple(1)
        b"ctorch\nSize\n(K\x01K\x02tR.",
        b"cgeometry\nORIGIN\n)R.",  # a value is not a function
        b"cgeometry\nPoint\nK\x01R.",  # arguments are no tuple
        b"X\x01\x00\x00\x00a)R.",
        b")}b.",  # a state for a tuple
        b"cgeometry\nPoint\n)\x81}b}b.",  # a second state
        b"c__builtin__\ngetattr\n(c__builtin__\nlist\nK\x01tR.",
        b"ccopy_reg\n_reconstructor\n)R.",
        b"(o.",
    ],
)
def test_misuse_of_names_is_refused(data: bytes) -> None:
    with pytest.raises(UnsafePickleError):
        parse(data)


class Outer:
    class Mode(enum.Enum):
        FAST = 1

    def method(self) -> None: ...


class Lists(list[Any]):
    pass


class Dicts(dict[Any, Any]):
    pass


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


class WithKeywords:
    sum: int

    def __getnewargs_ex__(self) -> tuple[tuple[int, ...], dict[str, int]]:
        return (1,), {"b": 2}

    def __new__(cls, first: int, b: int) -> Self:
        made = super().__new__(cls)
        made.sum = first + b
        return made


class Reduced:
    """Has all parts that `__reduce__` may return."""

    def __reduce__(self) -> Any:
        return Reduced, (), {"state": 1}, iter([2, 3]), iter([("key", 4)])


HERE = __name__


@pytest.mark.parametrize("protocol", sampled(PROTOCOLS, [2, 4]))
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Outer.Mode.FAST, f"{HERE}.Outer.Mode"),
        (Outer(), f"{HERE}.Outer"),
        (Outer().method, "builtins.getattr"),
        (Lists([1, 2]), f"{HERE}.Lists"),
        (Dicts(a=1), f"{HERE}.Dicts"),
        (Slotted(), f"{HERE}.Slotted"),
        (WithKeywords(1, b=2), f"{HERE}.WithKeywords"),
        (Reduced(), f"{HERE}.Reduced"),
        (functools.partial(int, "7", base=8), "functools.partial"),
        (re.compile("a+"), "re._compile"),
        (pathlib.PurePosixPath("a/b"), f"{pathlib.PurePosixPath.__module__}.PurePosixPath"),
        (fractions.Fraction(1, 3), "fractions.Fraction"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_of_any_class_are_kept_by_the_name_of_it(
    protocol: int, value: object, name: str
) -> None:
    if protocol < 2 and isinstance(value, Slotted | WithKeywords):
        pytest.skip("python pickles these with protocol 2 and later")
    found = parse(pickle.dumps({"before": 1, "object": value, "after": [value]}, protocol))
    assert (found["before"], found["after"]) == (1, [found["object"]])
    assert isinstance(found["object"], InertObject)
    assert name in {str(found["object"].cls), str(class_of(found["object"]))}


def test_all_parts_of_an_object_are_kept() -> None:
    found = parse(pickle.dumps(Reduced(), 2))
    assert (found.args, found.state, found.items) == ((), {"state": 1}, [2, 3, "key", 4])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sets_are_kept_by_their_members(protocol: int) -> None:
    for value in ({1, 2}, frozenset([1, 2])):
        found = parse(pickle.dumps(value, protocol))
        assert found.cls.name == type(value).__name__
        assert sorted(found.args[0]) == [1, 2]
    assert parse(b"\x8f\x94(K\x01\x90(K\x02\x90.").args == ([1, 2],)


@pytest.mark.parametrize(
    "data",
    [
        b"(K\x01igeometry\nPoint\n.",  # INST
        b"(cgeometry\nPoint\nK\x01o.",  # OBJ
        b"cgeometry\nPoint\n(K\x01t\x81.",
        b"cgeometry\nPoint\n(K\x01t}\x92.",  # NEWOBJ_EX without keywords
    ],
)
def test_every_way_to_make_an_object_gives_the_same(data: bytes) -> None:
    found = parse(data)
    assert (found.cls, found.args) == (POINT, (1,))


def test_a_number_for_a_class_is_kept() -> None:
    for data in (b"\x82\x07)R.", b"\x83\x07\x00)R.", b"\x84\x07\x00\x00\x00)R."):
        assert str(parse(data).cls) == "copyreg.extension 7"


def test_what_an_object_returns_is_an_object() -> None:
    found = parse(b"cfunctools\npartial\n(cgeometry\nPoint.__new__\ntR)R.")
    assert class_of(found) == POINT
    assert str(parse(b"cgeometry\nmake\n)R)R.").cls) == "geometry.make"


def test_an_object_is_named_by_its_class_also_where_a_method_made_it() -> None:
    made = InertObject(Global("library", "Tensor._make"), ())
    assert str(class_of(made)) == "library.Tensor"
    array = InertObject(Global("numpy", "_reconstruct"), (Global("numpy", "ndarray"), (0,)))
    assert str(class_of(array)) == "numpy.ndarray"


def test_bytes_below_protocol_3_are_encoded_once_for_each_text() -> None:
    data = b"c_codecs\nencode\nq\x00(X\x01\x00\x00\x00\x7aX\x06\x00\x00\x00latin1tq\x01R"
    found = parse(b"(" + data + b"h\x00h\x01Rt.")
    assert found == (b"z", b"z")
    assert found[0] is found[1]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"Pid\n.", "PERSID"),
        (b"\x97.", "NEXT_BUFFER"),
        (b"C\x00\x98.", "READONLY_BUFFER"),
        (b"S'a'\n.", "STRING"),
    ],
)
def test_opcodes_that_no_checkpoint_needs_are_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(UnsafePickleError, match=f"opcode {name},"):
        parse(data)


@pytest.mark.parametrize(
    "key",
    [b"})\x85\x85Ns.", b"}\x8a\x0a" + b"\x01" * 10 + b"Ns.", b"}cgeometry\nPoint\n)\x81\x85Ns."],
)
def test_keys_that_hash_slowly_or_not_at_all_are_kept_by_identity(key: bytes) -> None:
    (found,) = parse(key)
    assert isinstance(found, InertKey | tuple)
    hash(found)


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
        (b"}]Ns.", "list cannot be"),
        (b"}}Ns.", "dict cannot be"),
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
