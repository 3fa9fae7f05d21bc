"""Pickles written opcode by opcode, with nothing but the standard library.

Source: CPython's Lib/pickletools.py, which specifies every opcode.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_PROTOCOL_2 = b"\x80\x02"
_STOP = b"."


def push_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def push_text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def push_int(value: int) -> bytes:
    """Pushes an int; one that is not negative in as few bytes as python's pickler."""
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if 0 <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    width = value.bit_length() // 8 + 1
    return b"\x8a%c" % width + value.to_bytes(width, "little", signed=True)


def push_scalar(value: object) -> bytes:
    """Pushes a number, a text or None."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return push_int(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return push_text(value)
    raise TypeError(f"{type(value).__name__} is no plain value")


def push_list(values: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(values) + b"e"


def push_tuple(values: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(values) + b"t"


def push_call(function: bytes, arguments: bytes) -> bytes:
    return function + arguments + b"R"


def push_dict(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def make_pickle(value: bytes) -> bytes:
    return _PROTOCOL_2 + value + _STOP
