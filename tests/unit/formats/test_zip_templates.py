"""Archives that are told by their likeness to an earlier one, against parsing each of them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import pytest
import torch

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import InputError
from ckptkit.formats.pickle import torch_zip
from ckptkit.formats.pickle.torch_zip import Payload, TensorCache, locate_tensor
from ckptkit.training.save.file_layout import archive_of_tensor

Make = Callable[[torch.Tensor], bytes]


def by_torch(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def by_ckptkit(tensor: torch.Tensor) -> bytes:
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    archive = archive_of_tensor(dtype, tuple(tensor.shape))
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    whole = bytearray(archive.head + data + archive.tail)[: archive.size_bytes]
    for at in archive.crc_at:
        struct.pack_into("<I", whole, at, zlib.crc32(data))
    return bytes(whole)


def located(blob: bytes, cache: TensorCache | None = None) -> Payload:
    return locate_tensor(lambda a, b: blob[a:b], len(blob), where="x", cache=cache)


def outcome(blob: bytes, cache: TensorCache | None = None) -> object:
    try:
        return located(blob, cache)
    except InputError as error:
        return type(error), error.message


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the archives that were parsed."""
    found: list[int] = []
    parse = torch_zip.read_directory

    def counted(read: Callable[[int, int], bytes], size_bytes: int, *, where: str) -> object:
        found.append(size_bytes)
        return parse(read, size_bytes, where=where)

    monkeypatch.setattr(torch_zip, "read_directory", counted)
    return found


@pytest.mark.parametrize("make", [by_torch, by_ckptkit])
@pytest.mark.parametrize("shape", [(), (3,), (40, 100)])
def test_archives_that_differ_in_their_values_are_parsed_once(
    make: Make, shape: tuple[int, ...], parsed: list[int]
) -> None:
    blobs = [make(torch.full(shape, float(value))) for value in range(5)]
    cache = TensorCache()
    assert [located(blob, cache) for blob in blobs] == [located(blob) for blob in blobs]
    assert len(parsed) == 1 + len(blobs)
    payload = located(blobs[4], cache)
    assert payload.crc32 == zlib.crc32(blobs[4][payload.start : payload.stop])


@pytest.mark.parametrize("make", [by_torch, by_ckptkit])
@pytest.mark.parametrize("shape", [(5,), (40, 100)])
def test_any_changed_byte_has_the_same_effect_as_when_each_archive_is_parsed(
    make: Make, shape: tuple[int, ...]
) -> None:
    blob = make(torch.arange(float(torch.Size(shape).numel())).reshape(shape))
    payload = located(blob)
    cache = TensorCache()
    located(make(torch.zeros(shape)), cache)
    around = [*range(payload.start), *range(payload.stop, len(blob))]
    assert len(around) > 800
    for position in around:
        for mask in (0x01, 0x80, 0xFF):
            changed = bytearray(blob)
            changed[position] ^= mask
            assert outcome(bytes(changed), cache) == outcome(bytes(changed)), position


@pytest.mark.parametrize("make", [by_torch, by_ckptkit])
def test_a_byte_more_or_less_is_no_likeness(make: Make) -> None:
    blob = make(torch.ones(40, 100))
    cache = TensorCache()
    located(make(torch.zeros(40, 100)), cache)
    for changed in (blob[:-1], blob[1:], blob + b"\0", b"\0" + blob):
        assert outcome(changed, cache) == outcome(changed)
        assert not isinstance(outcome(changed, cache), Payload)


def test_shapes_of_one_size_are_told_apart(parsed: list[int]) -> None:
    shapes = [(40, 100), (100, 40), (20, 200), (4000,)]
    cache = TensorCache()
    for _ in range(3):
        for shape in shapes:
            assert located(by_ckptkit(torch.ones(shape)), cache).shape == shape
    assert len(parsed) == len(shapes)


def test_a_checksum_that_was_not_stored_stays_unknown() -> None:
    blob = by_ckptkit(torch.ones(40, 100))
    crc32 = located(blob).crc32
    assert crc32 is not None
    cache = TensorCache()
    located(blob, cache)
    without = blob.replace(struct.pack("<I", crc32), bytes(4))
    assert located(without, cache).crc32 is None is located(without).crc32


def test_as_many_sizes_are_remembered_as_the_limit_says() -> None:
    cache = TensorCache(limit=2)
    for elements in range(1, 9):
        assert located(by_ckptkit(torch.ones(elements)), cache).shape == (elements,)
        assert len(cache._archives) <= 2
