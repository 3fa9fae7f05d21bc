"""The pickles of `torch.save`, written opcode by opcode so that torch is not needed.

Sources: pickletools for the opcodes; torch/_utils.py `_rebuild_tensor_v2`, `_rebuild_tensor_v3`
and torch/serialization.py `persistent_id` for what they say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from ckptkit.core.geometry import row_major_strides
from ckptkit.core.index import Shape
from ckptkit.planning.plan import TensorSpec

_PROTOCOL_2 = b"\x80\x02"
_STOP = b"."


def global_name(module: str, name: str) -> bytes:
    """Pushes a global."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    """Pushes a string."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    """Pushes an int that is not negative."""
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(values: Shape) -> bytes:
    """Pushes a tuple of ints."""
    return sequence(map(integer, values))


def sequence(items: Iterable[bytes]) -> bytes:
    """Pushes a tuple."""
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, arguments: bytes) -> bytes:
    """Pushes what a function returns for a tuple of arguments."""
    return function + arguments + b"R"


def mapping(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Pushes a dictionary."""
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def tensor(spec: TensorSpec, storage: str) -> bytes:
    """Pushes a dense tensor that fills the storage record `data/{storage}`."""
    dtype = spec.dtype
    name = dtype.storage or "UntypedStorage"
    module = "torch" if dtype.storage else "torch.storage"
    length = spec.elements if dtype.storage else spec.size_bytes
    identity = sequence(
        [text("storage"), global_name(module, name), text(storage), text("cpu"), integer(length)]
    )
    arguments = [
        identity + b"Q",
        integer(0),
        numbers(spec.shape),
        numbers(row_major_strides(spec.shape)),
        b"\x89",
        call(global_name("collections", "OrderedDict"), b")"),
    ]
    if dtype.storage:
        return call(global_name("torch._utils", "_rebuild_tensor_v2"), sequence(arguments))
    arguments.append(global_name("torch", dtype.name))
    return call(global_name("torch._utils", "_rebuild_tensor_v3"), sequence(arguments))


def pickled(value: bytes) -> bytes:
    """Wraps pushed opcodes into a whole pickle."""
    return _PROTOCOL_2 + value + _STOP


def state_dict_pickle(specs: Sequence[TensorSpec]) -> bytes:
    """Returns `data.pkl` of a state dict whose tensors lie in the records 0, 1 and so on."""
    items = [(text(spec.name), tensor(spec, str(i))) for i, spec in enumerate(specs)]
    return pickled(mapping(items))


def tensor_pickle(spec: TensorSpec) -> bytes:
    """Returns `data.pkl` of a single tensor in the record 0."""
    return pickled(tensor(spec, "0"))
