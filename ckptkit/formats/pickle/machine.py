"""The stack machine of the pickle parser: it turns opcodes into inert values and runs nothing.

Source: CPython's Lib/pickletools.py, which specifies every opcode, protocols 0 to 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    LimitError,
    TruncatedFileError,
    UnsafePickleError,
)
from ckptkit.core.text import quote

MAX_INT_BYTES = 1024  # python prints integers of up to 4,300 digits only
MAX_KEY_ITEMS = 64
MAX_KEY_BITS = 64  # longer integers can be made to collide as well
# Hashes of numbers are not salted, so tuples can be made to collide: k keys cost up to k² steps.
MAX_TUPLE_KEYS = 10_000
HIGHEST_PROTOCOL = 5
_SCALARS = frozenset({str, bytes, bool, float, type(None)})
_INTEGER = re.compile(rb"[+-]?\d{1,2000}")
_UNSET = object()


class ByIdentity:
    """Base of the values that a dictionary may have as keys because they hash by identity."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names; it is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class InertObject(ByIdentity):
    """An instance of a class, represented by its parts.

    Attributes:
        cls: The class.
        args: The arguments of its constructor.
        state: The state that BUILD set; None before that.
    """

    cls: Global
    args: tuple[object, ...] = field(repr=False)
    state: object = field(default=None, repr=False)


class InertDict(dict[Any, Any]):
    """An instance of a dict class; `attributes` is the state that BUILD set."""

    __slots__ = ("attributes",)

    def __init__(self) -> None:
        super().__init__()
        self.attributes: dict[Any, Any] = {}


class Machine:
    """Interprets one pickle. Time and memory stay within a multiple of its length.

    `table` has one handler for each of the 256 opcodes. Arguments are those of
    `ckptkit.formats.pickle.pickles.parse_pickle`.
    """

    __slots__ = (
        "allowed",
        "at",
        "data",
        "fence",
        "filled",
        "globals",
        "marks",
        "memo",
        "persistent",
        "pos",
        "running",
        "stack",
        "table",
        "tuple_keys",
        "where",
    )

    def __init__(
        self,
        data: bytes,
        allowed: Mapping[tuple[str, str], object],
        table: tuple[Handler, ...],
        *,
        where: str,
        persistent: Callable[[object], object] | None = None,
    ) -> None:
        self.data = data
        self.allowed = allowed
        self.table = table
        self.where = where
        self.persistent = persistent
        self.pos = 0
        self.at = 0  # of the current opcode
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.fence = 0  # the topmost mark: values below it may not be popped
        self.memo: list[Any] = []
        self.filled = 0  # MEMOIZE stores at the number of slots in use
        self.globals: dict[tuple[str, str], Global] = {}
        self.tuple_keys = 0
        self.running = True

    def run(self) -> object:
        """Executes the pickle.

        Returns:
            Its value.
        """
        value, end = self.run_first()
        if end != len(self.data):
            left = len(self.data) - end
            raise self.malformed(f"pickle ends {left:,} bytes before its file does")
        return value

    def run_first(self) -> tuple[object, int]:
        """Executes a pickle that other bytes may follow.

        Returns:
            Its value, and the position after its last byte.
        """
        data, table, end = self.data, self.table, len(self.data)
        while self.running:
            at = self.at = self.pos
            if at >= end:
                raise self.cut_short()
            self.pos = at + 1
            table[data[at]](self)
        value = self.pop()
        if self.stack or self.marks:
            raise self.malformed("pickle ends with values left over")
        return value, self.pos

    def place(self) -> str:
        return f"{self.where}: byte {self.at:,}" if self.where else f"byte {self.at:,}"

    def malformed(self, message: str) -> FormatError:
        """Returns the error for bytes that are not a pickle as Python writes it."""
        return FormatError(
            message, where=self.place(), hint="the file is damaged; take another copy of it"
        )

    def unsafe(self, message: str) -> UnsafePickleError:
        """Returns the error for a pickle that requests something that ckptkit never does."""
        return UnsafePickleError(
            message,
            where=self.place(),
            hint="nothing was imported or called; such a file was not written by a checkpoint"
            " library alone",
        )

    def cut_short(self) -> TruncatedFileError:
        """Returns the error for a pickle that ends too early."""
        return TruncatedFileError(
            f"pickle ends at byte {len(self.data):,}, in the middle of a value",
            where=self.place(),
            hint="the copy was cut short; compare its size with the source's",
        )

    def take(self, count: int) -> bytes:
        """Returns the next bytes."""
        start = self.pos
        stop = start + count
        if stop > len(self.data):
            raise self.cut_short()
        self.pos = stop
        return self.data[start:stop]

    def number(self, width: int) -> int:
        """Returns the next bytes as an unsigned number, low byte first."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        """Returns the bytes up to the next newline, and skips it."""
        stop = self.data.find(b"\n", self.pos)
        if stop < 0:
            raise self.cut_short()
        start, self.pos = self.pos, stop + 1
        return self.data[start:stop]

    def text(self, data: bytes, encoding: str = "utf-8") -> str:
        """Decodes a string; lone surrogates, which cannot be printed, are refused."""
        try:
            value = data.decode(encoding)
            if encoding == "raw-unicode-escape":
                value.encode()
        except UnicodeError:
            raise self.malformed(f"string is not {encoding}") from None
        return value

    def integer(self, line: bytes) -> int:
        """Reads a decimal integer."""
        if not _INTEGER.fullmatch(line):
            raise self.malformed("integer is not in decimal digits, or too long")
        return int(line)

    def pop(self) -> object:
        """Removes the topmost value from the stack and returns it."""
        if len(self.stack) <= self.fence:
            raise self.malformed("pickle takes a value from an empty stack")
        return self.stack.pop()

    def top(self) -> object:
        """Returns the topmost value and leaves it on the stack."""
        if len(self.stack) <= self.fence:
            raise self.malformed("pickle takes a value from an empty stack")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        """Removes the topmost mark and all values above it, and returns the values."""
        if not self.marks:
            raise self.malformed("pickle goes back to a mark that it did not set")
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        self.fence = self.marks[-1] if self.marks else 0
        return items

    def memoize(self) -> None:
        """Stores the topmost value in the next slot of the memo."""
        if self.filled == len(self.memo):
            self.memo.append(self.top())
            self.filled += 1
        else:
            self.store(self.filled)

    def store(self, slot: int) -> None:
        """Stores the topmost value in a slot of the memo."""
        if slot > len(self.data):
            raise self.malformed(f"memo slot {slot:,} is beyond anything a pickle can fill")
        missing = slot + 1 - len(self.memo)
        if missing > 0:
            self.memo.extend([_UNSET] * missing)
        self.filled += self.memo[slot] is _UNSET
        self.memo[slot] = self.top()

    def fetch(self, slot: int) -> object:
        """Returns the value in a slot of the memo."""
        value = self.memo[slot] if slot < len(self.memo) else _UNSET
        if value is _UNSET:
            raise self.malformed(f"memo slot {slot:,} is empty")
        return value

    def name(self, module: object, name: object) -> object:
        """Returns the value that represents a global."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.malformed("name of a global is not a string")
        value = self.allowed.get((module, name), _UNSET)
        if value is _UNSET:
            raise self.unsafe(
                f"pickle names {quote(f'{module}.{name}')}, which is not on the list of what a"
                " checkpoint may name"
            )
        if not callable(value):
            return value
        return self.globals.setdefault((module, name), Global(module, name))

    def call(self, function: object, args: object) -> object:
        """Returns the value that represents the result of calling a global."""
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise self.unsafe("pickle calls something that is not one of the globals it may name")
        builder = self.allowed.get((function.module, function.name))
        if not callable(builder):
            raise self.unsafe(f"pickle calls {quote(str(function))}, which is not a function")
        try:
            return builder(*args)
        except CkptkitError as error:
            raise error.located(self.place()) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise self.unsafe(
                f"pickle calls {quote(str(function))} with arguments that it does not take"
            ) from error

    def refer(self, identity: object) -> object:
        """Returns the value that represents a persistent id."""
        if self.persistent is None:
            raise self.unsafe("pickle refers to something outside itself")
        try:
            return self.persistent(identity)
        except CkptkitError as error:
            raise error.located(self.place()) from error

    def build(self, target: object, state: object) -> None:
        """Sets the state of an inert object."""
        if isinstance(target, InertObject) and target.state is None:
            target.state = state
        elif isinstance(target, InertDict) and isinstance(state, dict):
            target.attributes = state
        elif not (isinstance(target, dict) and isinstance(state, dict)):
            raise self.unsafe("pickle sets the state of something that has none to be set")

    def extend(self, target: object, items: list[Any]) -> None:
        """Appends to a list."""
        if not isinstance(target, list):
            raise self.malformed("pickle appends to something that is not a list")
        target.extend(items)

    def update(self, target: object, items: list[Any]) -> None:
        """Adds keys and values, which alternate, to a dictionary."""
        if not isinstance(target, dict):
            raise self.malformed("pickle sets items of something that is not a dictionary")
        if len(items) % 2:
            raise self.malformed("pickle gives a dictionary a key without a value")
        keys = items[::2]
        for key in keys:
            if type(key) is not str:
                self.check_key(key)
        size = len(target) + len(keys)
        target.update(zip(keys, items[1::2], strict=True))
        if len(target) != size:
            raise self.malformed("pickle gives a dictionary the same key twice")

    def check_key(self, key: object) -> None:
        """Refuses keys that could make hashing recurse, fail or collide without bound."""
        if isinstance(key, tuple):
            self.tuple_keys += 1
            if self.tuple_keys > MAX_TUPLE_KEYS:
                raise LimitError(
                    f"pickle has more than {MAX_TUPLE_KEYS:,} dictionary keys that are tuples",
                    where=self.place(),
                )
            simple = len(key) <= MAX_KEY_ITEMS and all(map(_is_simple_key, key))
        else:
            simple = _is_simple_key(key)
        if not simple:
            raise self.malformed(f"{type(key).__name__} of this kind cannot be a dictionary key")


Handler = Callable[[Machine], None]


def _is_simple_key(key: object) -> bool:
    if type(key) is int:
        return key.bit_length() <= MAX_KEY_BITS
    return type(key) in _SCALARS or isinstance(key, ByIdentity | Global)
