"""The stack machine of the pickle parser: it turns opcodes into inert values and runs nothing.

A global is a name here, and where a pickle calls one that the caller of the parser does not model,
the call is kept as the name and its arguments: checkpoints hold objects of any code beside the
weights. Refused are names that only an attack has a use for.

Source: CPython's Lib/pickletools.py, which specifies every opcode, protocols 0 to 5; Lib/copyreg.py
for the functions that protocols below 2 call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import CkptkitError, FormatError, TruncatedFileError, UnsafePickleError
from ckptkit.core.text import quote

MAX_INT_BYTES = 1024  # python prints integers of up to 4,300 digits only
MAX_KEY_ITEMS = 64
MAX_KEY_BITS = 64  # longer integers can be made to collide as well
# Hashes of numbers are not salted, so tuples can be made to collide: k keys cost up to k² steps.
MAX_TUPLE_KEYS = 10_000
HIGHEST_PROTOCOL = 5
_MAX_NAME_CHARACTERS = 500
_MOST_ARGUMENTS = 16  # of the functions in a table
_SCALARS = frozenset({str, bytes, bool, float, type(None)})
_INTEGER = re.compile(rb"[+-]?\d{1,2000}")
_UNSET = object()
# Modules that run commands or code, or reach files or the network, and have no class of which
# checkpoints hold instances; with all that is below them.
_HARMFUL_MODULES = frozenset(
    {
        *("os", "posix", "nt", "sys", "subprocess", "_posixsubprocess", "_winapi", "popen2", "pty"),
        *("shutil", "tempfile", "fileinput", "importlib", "imp", "_imp", "_frozen_importlib"),
        *("_frozen_importlib_external", "zipimport", "runpy", "pkgutil", "codeop", "marshal"),
        *("pickle", "_pickle", "cPickle", "shelve", "pdb", "bdb", "cProfile", "timeit", "doctest"),
        *("pydoc", "webbrowser", "ctypes.util", "cffi", "_cffi_backend", "socket", "_socket"),
        *("ssl", "_ssl", "socketserver", "SocketServer", "http.client", "http.server", "httplib"),
        *("urllib.request", "urllib2", "ftplib", "smtplib", "poplib", "imaplib", "telnetlib"),
        *("nntplib", "xmlrpc", "xmlrpclib", "asyncore", "asyncio.subprocess", "logging.config"),
        *("multiprocessing.util", "pip._internal", "ensurepip", "venv", "distutils.core"),
        *("distutils.spawn", "lib2to3", "idlelib", "rlcompleter", "faulthandler"),
        *("_xxsubinterpreters", "numpy.testing", "numpy.f2py", "numpy.distutils"),
        *("numpy.lib.npyio", "numpy.lib._npyio_impl", "torch.hub", "torch.jit", "torch.package"),
        *("torch.utils.cpp_extension", "torch.utils.model_zoo"),
    }
)
_BUILTINS = (
    "eval exec execfile compile __import__ open file input raw_input apply reload breakpoint"
    " globals locals vars getattr setattr delattr help exit quit"
)
# Of modules that hold other things too.
_HARMFUL_NAMES: Mapping[str, frozenset[str]] = {
    module: frozenset(names.split())
    for modules, names in (
        ("builtins __builtin__", _BUILTINS),
        ("io _io", "open open_code FileIO"),
        ("torch torch.serialization cloudpickle dill dill._dill joblib yaml", "load loads"),
        ("numpy", "load loadtxt genfromtxt fromfile"),
        ("ctypes", "CDLL PyDLL WinDLL OleDLL cdll pydll windll oledll pythonapi"),
        ("code", "interact InteractiveConsole InteractiveInterpreter"),
        ("codecs", "open"),
        ("commands", "getoutput getstatusoutput"),
        ("platform", "popen"),
        ("profile", "run runctx Profile"),
        ("torch.utils.collect_env", "run"),
        ("trace", "Trace"),
        ("urllib", "urlopen urlretrieve"),
    )
    for module in modules.split()
}


class ByIdentity:
    """Base of the values that a dictionary may have as keys because they hash by identity."""

    __slots__ = ()


class Global(Struct, frozen=True):
    """A class or function that a pickle names; it is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class InertObject(ByIdentity, Struct, eq=False):
    """An instance of a class, or what a function returned, represented by its parts."""

    cls: Global
    args: tuple[object, ...]
    state: object = None  # what BUILD set; None before that
    items: list[Any] | None = None  # what was appended, or keys and values that alternate


def class_of(value: InertObject | Global) -> Global:
    """Returns the class of an object, which a function of the class may have made, or another."""
    cls = value.cls if isinstance(value, InertObject) else value
    steps = cls.name.split(".")
    while len(steps) > 1 and not steps[-1][:1].isupper():
        steps.pop()
    first = value.args[0] if isinstance(value, InertObject) and value.args else None
    if isinstance(first, Global) and not steps[-1][:1].isupper():
        return first
    return Global(cls.module, ".".join(steps))


class InertKey(ByIdentity, Struct, frozen=True, eq=False):
    """A key of a dictionary that is not hashed by its value, which may take any time."""

    value: object


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
        "encoded",
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
        self.encoded: dict[int, tuple[str, bytes]] = {}
        self.tuple_keys = 0
        self.running = True

    def run(self) -> object:
        value, end = self.run_first()
        if end != len(self.data):
            left = len(self.data) - end
            raise self.malformed(f"pickle ends {left:,} bytes before its file does")
        return value

    def run_first(self) -> tuple[object, int]:
        """Executes a pickle that other bytes may follow."""
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
            hint="nothing was imported or called; do not load the file with a tool that executes"
            " pickles",
        )

    def cut_short(self) -> TruncatedFileError:
        return TruncatedFileError(
            f"pickle ends at byte {len(self.data):,}, in the middle of a value",
            where=self.place(),
            hint="the copy was cut short; compare its size with the source's",
        )

    def take(self, count: int) -> bytes:
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
        if not _INTEGER.fullmatch(line):
            raise self.malformed("integer is not in decimal digits, or too long")
        return int(line)

    def pop(self) -> object:
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
        if self.filled == len(self.memo):
            self.memo.append(self.top())
            self.filled += 1
        else:
            self.store(self.filled)

    def store(self, slot: int) -> None:
        if slot > len(self.data):
            raise self.malformed(f"memo slot {slot:,} is beyond anything a pickle can fill")
        missing = slot + 1 - len(self.memo)
        if missing > 0:
            self.memo.extend([_UNSET] * missing)
        self.filled += self.memo[slot] is _UNSET
        self.memo[slot] = self.top()

    def fetch(self, slot: int) -> object:
        value = self.memo[slot] if slot < len(self.memo) else _UNSET
        if value is _UNSET:
            raise self.malformed(f"memo slot {slot:,} is empty")
        return value

    def name(self, module: object, name: object) -> object:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.malformed("name of a global is not a string")
        value = self.allowed.get((module, name), _UNSET)
        if value is not _UNSET and not callable(value):
            return value
        if value is _UNSET and (module, name) not in _FUNCTIONS and is_harmful(module, name):
            raise self.unsafe(
                f"pickle names {quote(f'{module}.{name}')}, which runs code, or reaches files or"
                " the network, where a pickle is executed"
            )
        return self.globals.setdefault((module, name), Global(module, name))

    def call(self, function: object, args: object) -> object:
        """Returns the value that represents the result of calling a global, or another object."""
        if not isinstance(function, Global | InertObject) or not isinstance(args, tuple):
            raise self.unsafe("pickle calls something that is neither a function nor a class")
        if isinstance(function, InertObject):
            # Below protocol 4 a class that takes keywords is called as a `functools.partial`.
            first = function.args[0] if function.args else None
            cls = first if isinstance(first, Global) else function.cls
            return InertObject(cls, (function, args))
        name = (function.module, function.name)
        builder = self.allowed.get(name)
        try:
            if callable(builder) and len(args) <= _MOST_ARGUMENTS:  # they are copied
                return builder(*args)
            if name in _FUNCTIONS:
                return _FUNCTIONS[name](self, args)
        except CkptkitError as error:
            raise error.located(self.place()) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise self.unsafe(
                f"pickle calls {quote(str(function))} with arguments that it does not take"
            ) from error
        if callable(builder):
            raise self.malformed(f"{quote(str(function))} is called with {len(args):,} arguments")
        return InertObject(function, args)

    def refer(self, identity: object) -> object:
        if self.persistent is None:
            raise self.unsafe("pickle refers to something outside itself")
        try:
            return self.persistent(identity)
        except CkptkitError as error:
            raise error.located(self.place()) from error

    def build(self, target: object, state: object) -> None:
        if isinstance(target, InertObject) and target.state is None:
            target.state = state
        elif isinstance(target, InertDict) and isinstance(state, dict):
            target.attributes = state
        elif not (isinstance(target, dict) and isinstance(state, dict)):
            raise self.unsafe("pickle sets the state of something that has none to be set")

    def extend(self, target: object, items: list[Any]) -> None:
        if isinstance(target, InertObject):
            target.items = target.items or []
            target.items += items
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise self.malformed("pickle appends to something that is not a list")

    def update(self, target: object, items: list[Any]) -> None:
        """Adds keys and values, which alternate, to a dictionary."""
        if len(items) % 2:
            raise self.malformed("pickle gives a dictionary a key without a value")
        if isinstance(target, InertObject):
            self.extend(target, items)
            return
        if not isinstance(target, dict):
            raise self.malformed("pickle sets items of something that is not a dictionary")
        keys = [key if type(key) is str else self.key(key) for key in items[::2]]
        size = len(target) + len(keys)
        target.update(zip(keys, items[1::2], strict=True))
        if len(target) != size:
            raise self.malformed("pickle gives a dictionary the same key twice")

    def key(self, key: object) -> object:
        """Returns a key as it is, or by identity if its hash could recurse, fail or collide."""
        if isinstance(key, list | dict):
            raise self.malformed(f"a {type(key).__name__} cannot be a dictionary key")
        if not isinstance(key, tuple):
            return key if _is_simple_key(key) else InertKey(key)
        self.tuple_keys += 1
        is_simple = self.tuple_keys <= MAX_TUPLE_KEYS and len(key) <= MAX_KEY_ITEMS
        return key if is_simple and all(map(_is_simple_key, key)) else InertKey(key)


Handler = Callable[[Machine], None]


def _is_simple_key(key: object) -> bool:
    if type(key) is int:
        return key.bit_length() <= MAX_KEY_BITS
    return type(key) in _SCALARS or isinstance(key, ByIdentity | Global)


def is_harmful(module: str, name: str) -> bool:
    """Returns whether only an attack has a use for a global.

    Names may have dots, and lead through a module into another one that it imports.

    >>> is_harmful("torch", "os.system"), is_harmful("builtins", "eval"), is_harmful("torch", "nn")
    (True, True, False)
    """
    steps = module.split(".")
    if any(".".join(steps[: at + 1]) in _HARMFUL_MODULES for at in range(len(steps))):
        return True
    if name in _HARMFUL_NAMES.get(module, ()):
        return True
    steps = name.split(".")
    return not _HARMFUL_MODULES.isdisjoint(steps[:-1]) or any(
        attribute in _HARMFUL_NAMES.get(step, ()) for step, attribute in pairwise(steps)
    )


def _reconstruct(_: Machine, args: tuple[object, ...]) -> object:
    match args:
        case (Global() as cls, Global(), state):
            return InertObject(cls, () if state is None else (state,))
    raise TypeError(args)


def _get_attribute(machine: Machine, args: tuple[object, ...]) -> object:
    # Python's form of a class in another one below protocol 4, and of a method in all of them.
    match args:
        case (Global(module, name), str(attribute)):
            name = f"{name}.{attribute}"
            if len(name) > _MAX_NAME_CHARACTERS:
                raise machine.malformed("name of a global is longer than any real one")
            return machine.name(module, name)
        case (_, str()):
            return InertObject(Global("builtins", "getattr"), args)
    raise TypeError(args)


def _make(_: Machine, args: tuple[object, ...]) -> object:
    match args:
        case (Global() as cls, *_):
            return InertObject(cls, args)
    raise TypeError(args)


def _encode(machine: Machine, args: tuple[object, ...]) -> object:
    # Python's form of bytes below protocol 3. A text that is encoded again gives the same bytes.
    match args:
        case (str(text), "latin1"):
            _, data = machine.encoded.setdefault(id(text), (text, b""))
            if not data:
                data = text.encode("latin1")
                machine.encoded[id(text)] = text, data
            return data
    raise TypeError(args)


# What pickles call to find or make objects of any class.
_FUNCTIONS: Mapping[tuple[str, str], Callable[[Machine, tuple[object, ...]], object]] = {
    **{
        (module, name): function
        for module in ("copyreg", "copy_reg")
        for name, function in (
            ("_reconstructor", _reconstruct),
            ("__newobj__", _make),
            ("__newobj_ex__", _make),
        )
    },
    **{(module, "getattr"): _get_attribute for module in ("builtins", "__builtin__")},
    ("_codecs", "encode"): _encode,
}
