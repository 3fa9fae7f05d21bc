"""The archive of a single tensor, but for its data: what a `.distcp` file consists of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Fqn, Key, Shape
from ckptkit.plan.layouts.torch import archive_of_one
from ckptkit.plan.plan import Copy, Literal, Product, TensorSpec, Trailer

DATA_ALIGNMENT = 64
"""Tensor data begins at multiples of this where the archive does."""

_ARCHIVES = 4096


@dataclass(frozen=True, slots=True)
class TensorArchive:
    """What lies around the data of a tensor.

    Attributes:
        head: The bytes before the data.
        data_bytes: Length of the data.
        tail: The bytes after it, with zeros up to where the next archive may begin. The places
            of the data's checksum hold zeros, which is the checksum of no data.
        size_bytes: Length of the archive, without these zeros.
        crc_at: Where the data's CRC-32 belongs, from the archive's first byte.
    """

    head: bytes
    data_bytes: int
    tail: bytes
    size_bytes: int
    crc_at: tuple[int, ...]

    @property
    def padded_bytes(self) -> int:
        """How many bytes it takes, up to where the next one may begin."""
        return len(self.head) + self.data_bytes + len(self.tail)


@lru_cache(_ARCHIVES)
def archive_of_tensor(dtype: DType, shape: Shape) -> TensorArchive:
    """Returns the archive that stock torch opens as a row-major tensor."""
    spec = TensorSpec(Fqn(""), dtype, shape)
    parts = archive_of_one(Product(spec, Copy("", Key(""))), 0)
    before: list[bytes] = []
    after: list[bytes] = []
    crc_at: list[int] = []
    side, at = before, 0
    for size, body, row_spec in parts.rows:
        if row_spec is not None:
            side = after
        elif isinstance(body, Literal):
            side.append(body.data)
        else:
            assert isinstance(body, Trailer)  # noqa: S101  nothing else has no spec
            side.append(body.template)
            crc_at += [at + position for position, _ in body.fields]
        at += size
    after.append(bytes(-at % DATA_ALIGNMENT))
    return TensorArchive(
        head=b"".join(before),
        data_bytes=spec.size_bytes,
        tail=b"".join(after),
        size_bytes=at,
        crc_at=tuple(crc_at),
    )
