"""Parses pickles without running them: nothing is imported, and no class or function is called.

Where the pickle calls a global that is in the caller's list, a function of the caller is called
with inert arguments; what it makes of any other is an `InertObject`. Each opcode has a handler
here, but for a few that nothing writes any more, which are refused by name.

Source: CPython's Lib/pickletools.py, which specifies every opcode, protocols 0 to 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from ckptkit.core.errors import FormatError, LimitError
from ckptkit.core.index import KeyPath
from ckptkit.formats.pickle.machine import (
    HIGHEST_PROTOCOL,
    MAX_INT_BYTES,
    Global,
    Handler,
    InertDict,
    InertObject,
    Machine,
)

_FLOAT = struct.Struct(">d")
_REFUSED = {b"P": "PERSID", b"S": "STRING", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER"}


def _protocol(machine: Machine) -> None:
    version = machine.number(1)
    if version > HIGHEST_PROTOCOL:
        raise machine.malformed(f"pickle protocol {version} is not known")


def _frame(machine: Machine) -> None:
    # Frames only help to read ahead; the only check is that a frame does not exceed the data.
    if machine.number(8) > len(machine.data) - machine.pos:
        raise machine.cut_short()


def _stop(machine: Machine) -> None:
    machine.running = False


def _mark(machine: Machine) -> None:
    machine.fence = len(machine.stack)
    machine.marks.append(machine.fence)


def _pop(machine: Machine) -> None:
    if machine.marks and len(machine.stack) == machine.fence:
        machine.pop_mark()
    else:
        machine.pop()


def _constant(value: object) -> Handler:
    return lambda machine: machine.stack.append(value)


def _unsigned(width: int) -> Handler:
    return lambda machine: machine.stack.append(int.from_bytes(machine.take(width), "little"))


def _long(width: int) -> Handler:
    def handler(machine: Machine) -> None:
        size = machine.number(width)
        if size > MAX_INT_BYTES:
            raise machine.malformed(f"integer of {size:,} bytes is longer than any real one")
        machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))

    return handler


def _int_line(machine: Machine) -> None:
    line = machine.line()
    # Before protocol 2, booleans were integers with a leading zero.
    machine.stack.append(line == b"01" if line in {b"00", b"01"} else machine.integer(line))


def _float_line(machine: Machine) -> None:
    try:
        machine.stack.append(float(machine.line()))
    except ValueError:
        raise machine.malformed("float is not a decimal number") from None


def _text(width: int, encoding: str = "utf-8") -> Handler:
    def handler(machine: Machine) -> None:
        data = machine.take(int.from_bytes(machine.take(width), "little"))
        machine.stack.append(machine.text(data, encoding))

    return handler


def _bytes(width: int) -> Handler:
    return lambda machine: machine.stack.append(machine.take(machine.number(width)))


def _tuple_of(count: int) -> Handler:
    def handler(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) - machine.fence < count:
            raise machine.malformed("pickle takes a value from an empty stack")
        stack[-count:] = [tuple(stack[-count:])]

    return handler


def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append({})
    machine.update(machine.top(), items)


def _append(machine: Machine) -> None:
    item = machine.pop()
    machine.extend(machine.top(), [item])


def _appends(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.extend(machine.top(), items)


def _setitem(machine: Machine) -> None:
    value = machine.pop()
    key = machine.pop()
    machine.update(machine.top(), [key, value])


def _setitems(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.update(machine.top(), items)


def _put(width: int) -> Handler:
    return lambda machine: machine.store(machine.number(width))


def _get(width: int) -> Handler:
    def handler(machine: Machine) -> None:
        machine.stack.append(machine.fetch(int.from_bytes(machine.take(width), "little")))

    return handler


def _slot(machine: Machine) -> int:
    slot = machine.integer(machine.line())
    if slot < 0:
        raise machine.malformed("memo slot is negative")
    return slot


def _global_line(machine: Machine) -> None:
    module = machine.text(machine.line())
    machine.stack.append(machine.name(module, machine.text(machine.line())))


def _stack_global(machine: Machine) -> None:
    name = machine.pop()
    machine.stack.append(machine.name(machine.pop(), name))


def _call(machine: Machine) -> None:
    args = machine.pop()
    machine.stack.append(machine.call(machine.pop(), args))


def _call_with_keywords(machine: Machine) -> None:
    keywords, args = machine.pop(), machine.pop()
    machine.stack.append(machine.call(machine.pop(), (args, keywords) if keywords else args))


def _instance(machine: Machine) -> None:
    cls = machine.name(machine.text(machine.line()), machine.text(machine.line()))
    machine.stack.append(machine.call(cls, tuple(machine.pop_mark())))


def _object(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append(machine.call(items[0] if items else None, tuple(items[1:])))


def _extension(width: int) -> Handler:
    def handler(machine: Machine) -> None:
        # A number that a program gave to a class.
        machine.stack.append(machine.name("copyreg", f"extension {machine.number(width)}"))

    return handler


def _set(name: str, items: Callable[[Machine], list[object]]) -> Handler:
    cls = Global("builtins", name)
    return lambda machine: machine.stack.append(InertObject(cls, (items(machine),)))


def _add_items(machine: Machine) -> None:
    items = machine.pop_mark()
    target = machine.top()
    if isinstance(target, InertObject) and target.cls.name == "set" and target.args:
        target = target.args[0]  # a list that only this set has
    machine.extend(target, items)


def _build(machine: Machine) -> None:
    state = machine.pop()
    machine.build(machine.top(), state)


def _refuse(name: str) -> Handler:
    def handler(machine: Machine) -> None:
        raise machine.unsafe(f"pickle uses opcode {name}, which no checkpoint needs")

    return handler


def _unknown(machine: Machine) -> None:
    raise machine.malformed(f"byte 0x{machine.data[machine.at]:02x} is no pickle opcode")


def with_handlers(
    table: tuple[Handler, ...], handlers: Mapping[bytes, Callable[..., None]]
) -> tuple[Handler, ...]:
    """Returns a table of 256 handlers with some of them replaced."""
    changed = list(table)
    for opcode, handler in handlers.items():
        changed[opcode[0]] = handler
    return tuple(changed)


OPCODES = with_handlers(
    (_unknown,) * 256,
    {
        **{opcode: _refuse(name) for opcode, name in _REFUSED.items()},
        b"\x80": _protocol,
        b"\x95": _frame,
        b".": _stop,
        b"(": _mark,
        b"0": _pop,
        b"1": lambda machine: machine.pop_mark(),  # POP_MARK
        b"2": lambda machine: machine.stack.append(machine.top()),  # DUP
        b"N": _constant(None),
        b"\x88": _constant(True),  # noqa: FBT003
        b"\x89": _constant(False),  # noqa: FBT003
        b"I": _int_line,
        b"L": lambda machine: machine.stack.append(
            machine.integer(machine.line().removesuffix(b"L"))
        ),  # LONG
        b"K": _unsigned(1),
        b"M": _unsigned(2),
        b"J": lambda machine: machine.stack.append(
            int.from_bytes(machine.take(4), "little", signed=True)
        ),  # BININT
        b"\x8a": _long(1),
        b"\x8b": _long(4),
        b"F": _float_line,
        b"G": lambda machine: machine.stack.append(_FLOAT.unpack(machine.take(8))[0]),  # BINFLOAT
        b"V": lambda machine: machine.stack.append(
            machine.text(machine.line(), "raw-unicode-escape")
        ),  # UNICODE
        b"X": _text(4),
        b"\x8c": _text(1),
        b"\x8d": _text(8),
        b"T": _text(4, "ascii"),
        b"U": _text(1, "ascii"),
        b"B": _bytes(4),
        b"C": _bytes(1),
        b"\x8e": _bytes(8),
        b"\x96": _bytes(8),
        b")": _constant(()),
        b"\x85": _tuple_of(1),
        b"\x86": _tuple_of(2),
        b"\x87": _tuple_of(3),
        b"t": lambda machine: machine.stack.append(tuple(machine.pop_mark())),  # TUPLE
        b"]": lambda machine: machine.stack.append([]),  # EMPTY_LIST
        b"a": _append,
        b"e": _appends,
        b"l": lambda machine: machine.stack.append(machine.pop_mark()),  # LIST
        b"}": lambda machine: machine.stack.append({}),  # EMPTY_DICT
        b"s": _setitem,
        b"u": _setitems,
        b"d": _dict,
        b"p": lambda machine: machine.store(_slot(machine)),  # PUT
        b"q": _put(1),
        b"r": _put(4),
        b"\x94": lambda machine: machine.memoize(),  # which machines with shortcuts replace
        b"g": lambda machine: machine.stack.append(machine.fetch(_slot(machine))),  # GET
        b"h": _get(1),
        b"j": _get(4),
        b"c": _global_line,
        b"\x93": _stack_global,
        b"i": _instance,
        b"o": _object,
        b"R": _call,
        b"\x81": _call,
        b"\x92": _call_with_keywords,
        b"\x82": _extension(1),
        b"\x83": _extension(2),
        b"\x84": _extension(4),
        b"\x8f": _set("set", lambda _: []),
        b"\x90": _add_items,
        b"\x91": _set("frozenset", Machine.pop_mark),
        b"b": _build,
        b"Q": lambda machine: machine.stack.append(machine.refer(machine.pop())),  # BINPERSID
    },
)

Builder = Callable[..., object]
MAX_DEPTH = 32
MAX_KEY_CHARACTERS = 64  # per byte of the pickle, for all keys of a file together
_SCALARS = frozenset({str, bytes, bool, int, float, type(None)})


def parse_pickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], object],
    *,
    where: str,
    persistent: Callable[[object], object] | None = None,
) -> object:
    """Parses a pickle of protocol 0 to 5 into plain and inert values.

    The result consists of None, bool, int, float, str, bytes, tuple, list, dict, `Global`,
    `InertObject`, and the values of `allowed` and `persistent`. Lists, dictionaries and objects may
    contain themselves, and shared parts may make the result exponentially larger than `data`, so
    walk it with a limit and without recursion (`walk_values`), and never compare, hash or print all
    of it. Integers have at most 1,024 bytes. Dictionary keys are scalars, short tuples of scalars,
    or compared by identity.

    `allowed` maps the module and name of globals to values. A callable is called where the pickle
    calls or instantiates the global, with the pickle's arguments, which it has to check: any number
    of any of the values above. It may keep no copy of them all, and its time and memory must depend
    on their number, not on their size. A callable that is only named is represented by a `Global`,
    as any global that is not here is. Any other value replaces the global. `persistent` maps a
    persistent id to a value; it is None where the pickle may contain none.

    Bytes after the pickle's end are refused. Parsing takes time and memory within a multiple of the
    length of `data`.
    """
    return Machine(data, allowed, OPCODES, where=where, persistent=persistent).run()


def parse_first_pickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], object],
    *,
    where: str,
    persistent: Callable[[object], object] | None,
) -> tuple[object, int]:
    """Parses the pickle at the start of `data`; also returns the first position after it."""
    return Machine(data, allowed, OPCODES, where=where, persistent=persistent).run_first()


def ordered_dict(*args: object) -> InertDict:
    """Represents `collections.OrderedDict()`, whose items and attributes are set afterwards."""
    if args:
        raise FormatError(f"'OrderedDict' is made from {len(args)} arguments, not none")
    return InertDict()


def walk_values(root: object, *, limit: int, where: str) -> Iterator[tuple[KeyPath, object]]:
    """Yields the values in nested containers, at most `limit`, each with the path of keys to it."""
    visited = 0
    waiting: list[tuple[KeyPath, object]] = [((), root)]
    while waiting:
        path, value = waiting.pop()
        visited += 1
        if visited > limit:
            raise LimitError(f"pickle unfolds into more than {limit:,} values", where=where)
        items = _items(value)
        if not items:
            yield path, value
            continue
        if len(path) == MAX_DEPTH:
            raise FormatError(f"containers are nested more than {MAX_DEPTH} deep", where=where)
        if visited + len(waiting) + len(items) > limit:
            raise LimitError(f"pickle unfolds into more than {limit:,} values", where=where)
        waiting += [((*path, key), item) for key, item in reversed(items)]


def _items(value: object) -> list[tuple[str | int, object]]:
    """Returns the items of a container by key; an empty list for any other value."""
    if isinstance(value, dict):
        steps = [
            key if isinstance(key, (str, int)) and not isinstance(key, bool) else _step(key, number)
            for number, key in enumerate(value)
        ]
        return list(zip(steps, value.values(), strict=True))
    # Sequences of plain numbers can be long (the order of a data set), and are kept whole.
    if isinstance(value, (list, tuple)) and not all(type(item) in _SCALARS for item in value):
        return list(enumerate(value))
    return []


def _step(key: object, number: int) -> str:
    """Returns a rare dictionary key as a part of a path; of most, only the position is unique."""
    if key is None or isinstance(key, (bool, float)):
        return repr(key)
    return f"<key {number}>"
