"""Reads pickles without running them: opcodes are interpreted here, and nothing is imported.

A global that is not on the caller's list is refused at once. One that is on it is only a name:
what the pickle does with it is done by the caller's own function, on inert values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptkit.core.errors import UnsafePickleError
from ckptkit.formats.pickle_machine import (
    ByIdentity,
    Global,
    InertDict,
    InertObject,
    Machine,
    shown,
)
from ckptkit.formats.pickle_opcodes import OPCODES, with_handlers

__all__ = [
    "OPCODES",
    "Builder",
    "ByIdentity",
    "Global",
    "InertDict",
    "InertObject",
    "Machine",
    "inert_class",
    "ordered_dict",
    "parse_first_pickle",
    "parse_pickle",
    "shown",
    "with_handlers",
]

Builder = Callable[..., object]


def parse_pickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], object],
    *,
    where: str,
    persistent: Callable[[object], object] | None = None,
) -> object:
    """Parses a pickle of protocol 0 to 5 into plain and inert values.

    The result is made of None, bool, int, float, str, bytes, tuple, list and dict, of `Global`,
    and of what `allowed` and `persistent` give. Lists and dictionaries may contain themselves,
    and shared parts may make the result exponentially larger to walk than `data` is long, so
    walk it with a budget and without recursion, and do not compare, hash or print it whole.
    Integers have at most 1,024 bytes. Dictionary keys are scalars or short tuples of them.

    Args:
        data: The whole pickle; bytes after its end are refused.
        allowed: What each global that the pickle may name, by module and name, stands for. A
            callable stays inert when named (a `Global` takes its place) and is called with
            the pickle's arguments where the pickle calls or instantiates the global. It has to
            check them: anything in the list above may come, in any number. It should do work
            and take memory in proportion to their number, not to the size of what they hold.
            Anything else takes the global's place as a value.
        where: The file, for messages.
        persistent: Maps a persistent id to a value; None where none may occur.

    Returns:
        The value. Parsing takes time and memory within a multiple of the length of `data`.

    Raises:
        UnsafePickleError: If the pickle names a global that is not allowed, calls what is not
            to be called, or uses an opcode that no checkpoint needs.
        TruncatedFileError: If it ends too early.
        FormatError: If it is malformed; the message has the byte position.
        LimitError: If it could only have been made to exhaust time.
    """
    return Machine(data, allowed, OPCODES, where=where, persistent=persistent).run()


def parse_first_pickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], object],
    *,
    where: str,
    persistent: Callable[[object], object] | None = None,
) -> tuple[object, int]:
    """Parses the pickle at the start of `data`, after which anything may follow.

    Takes and raises the same as `parse_pickle`.

    Returns:
        The value, and the position of the first byte after the pickle.
    """
    return Machine(data, allowed, OPCODES, where=where, persistent=persistent).run_first()


def inert_class(module: str, name: str) -> Builder:
    """Makes a builder for a class without constructor arguments, such as a dataclass.

    Pickles give such objects their fields afterwards, as state.

    Returns:
        A function that makes an `InertObject`.
    """
    cls = Global(module, name)

    def build(*args: object) -> InertObject:
        if args:
            raise UnsafePickleError(f"{shown(name)} is made from {len(args)} arguments, not none")
        return InertObject(cls, ())

    return build


def ordered_dict(*args: object) -> InertDict:
    """Stands for `collections.OrderedDict()`, whose items and attributes come afterwards.

    Returns:
        An empty dictionary that can take them.

    Raises:
        UnsafePickleError: If it is called with arguments, as no pickle by python 3 does.
    """
    if args:
        raise UnsafePickleError(f"'OrderedDict' is made from {len(args)} arguments, not none")
    return InertDict()
