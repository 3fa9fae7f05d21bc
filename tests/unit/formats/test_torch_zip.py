"""Locating a tensor in what `torch.save` writes, and refusing everything else."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.serialization import set_crc32_options

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    InputError,
    TruncatedFileError,
    UnsupportedError,
)
from ckptkit.formats.pickle.torch_values import StorageRef, TensorRef, parse_values
from ckptkit.formats.pickle.torch_zip import (
    WINDOW_BYTES,
    Payload,
    TensorCache,
    locate_tensor,
    open_archive,
)

Reads = list[tuple[int, int]]
END64_BYTES = 56 + 20 + 22


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def reader(blob: bytes) -> Callable[[int, int], bytes]:
    def read(start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(blob)
        return blob[start:stop]

    return read


def located(blob: bytes, **options: TensorCache) -> Payload:
    return locate_tensor(reader(blob), len(blob), where="x.distcp", **options)


def rebuilt(blob: bytes, payload: Payload) -> torch.Tensor:
    """Reads the tensor from its place, in torch's own terms."""
    storage = torch.frombuffer(bytearray(blob[payload.start : payload.stop]), dtype=torch.uint8)
    typed = storage.view(getattr(torch, payload.dtype.name))
    return typed.as_strided(payload.shape, payload.strides, payload.storage_offset)


def assert_found(tensor: torch.Tensor) -> Payload:
    blob = saved(tensor)
    payload = located(blob)
    assert payload.dtype.name == str(tensor.dtype).removeprefix("torch.")
    assert payload.shape == tuple(tensor.shape)
    assert payload.row_major == tensor.is_contiguous()
    assert payload.crc32 == zlib.crc32(blob[payload.start : payload.stop])
    if tensor.numel():
        raw = rebuilt(blob, payload).contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(raw, tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return payload


@contextmanager
def checksums_off() -> Iterator[None]:
    set_crc32_options(compute_crc32=False)
    try:
        yield
    finally:
        set_crc32_options(compute_crc32=True)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_dtype_is_found_where_torch_put_it(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    assert_found(raw.view(dtype).reshape(2, 3))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0),
        torch.zeros(3, 0, 5, dtype=torch.bfloat16),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(10.0)[3:7],
        torch.arange(10.0)[1::3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(5000.0).reshape(1, 5000),
        torch.zeros([1] * 20),
        torch.nn.Parameter(torch.arange(4.0)),
        torch.arange(4.0).requires_grad_(),
    ],
    ids=lambda tensor: f"{list(tensor.shape)}-{tensor.stride()}",
)
def test_every_kind_of_view_is_found(tensor: torch.Tensor) -> None:
    assert_found(tensor)


def test_a_parameter_with_attributes_is_found() -> None:
    parameter = torch.nn.Parameter(torch.arange(4.0))
    parameter.tag = "x"  # type: ignore[attr-defined]
    assert located(saved(parameter)).shape == (4,)


def test_a_small_view_of_a_large_storage_names_the_whole_storage() -> None:
    payload = assert_found(torch.arange(1000.0)[10:12])
    assert (payload.stop - payload.start, payload.storage_offset) == (4000, 10)


def test_a_large_archive_takes_two_reads_and_a_small_one_takes_one() -> None:
    for elements, expected in ((8, 1), (100_000, 2)):
        blob = saved(torch.zeros(elements))
        reads: Reads = []

        def read(start: int, stop: int, blob: bytes = blob, reads: Reads = reads) -> bytes:
            reads.append((start, stop))
            return blob[start:stop]

        locate_tensor(read, len(blob), where="x")
        assert len(reads) == expected
        assert all(stop - start <= 2 * WINDOW_BYTES for start, stop in reads)


def test_more_is_read_where_the_windows_do_not_hold_it() -> None:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w") as archive,
        zipfile.ZipFile(io.BytesIO(one_tensor())) as old,
    ):
        archive.writestr("archive/padding", bytes(3 * WINDOW_BYTES))
        for name in old.namelist():
            archive.writestr(name, old.read(name))
        archive.writestr("archive/more", bytes(3 * WINDOW_BYTES))
    assert torch.equal(rebuilt(buffer.getvalue(), located(buffer.getvalue())), torch.arange(8.0))


def test_switched_off_checksums_are_none() -> None:
    with checksums_off():
        blob = saved(torch.arange(8.0))
    payload = located(blob)
    assert payload.crc32 is None
    assert torch.equal(rebuilt(blob, payload), torch.arange(8.0))


def test_an_empty_record_keeps_its_checksum_of_zero() -> None:
    assert located(saved(torch.zeros(0))).crc32 == 0


def test_equal_pickles_are_parsed_once_and_few_are_kept() -> None:
    cache = TensorCache(limit=2)
    first = located(saved(torch.zeros(3)), cache=cache)
    assert located(saved(torch.ones(3)), cache=cache).shape is first.shape
    for elements in range(1, 6):
        assert located(saved(torch.zeros(elements)), cache=cache).shape == (elements,)
    assert len(cache._tensors) <= 2


def test_objects_come_back_inert() -> None:
    value = {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "names": ["a", "b"],
        "none": None,
        "n": 2**70,
    }
    blob = saved(value)
    assert read_object(blob) == value


def read_object(blob: bytes) -> object:
    return parse_values(open_archive(reader(blob), len(blob), where="x").pickle(), where="x")


def test_a_tensor_inside_an_object_comes_back_as_a_reference() -> None:
    blob = saved([torch.zeros(2, 3)])
    found = read_object(blob)
    float32 = BY_NAME["float32"]
    assert found == [TensorRef(StorageRef("0", float32, 6), float32, (2, 3), (3, 1), 0)]


# ---------------------------------------------------------------- refused by name


def one_tensor() -> bytes:
    return saved(torch.arange(8.0))


def test_two_tensors_are_not_one() -> None:
    with pytest.raises(FormatError, match=r"^x\.distcp: archive does not hold one tensor\n"):
        located(saved([torch.zeros(1), torch.zeros(1)]))


def test_lazily_conjugated_and_negated_tensors_are_refused() -> None:
    for tensor in (
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(2)),
    ):
        with pytest.raises(UnsupportedError, match="its bytes are not its values"):
            located(saved(tensor))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_dtype_that_is_not_modelled_is_named() -> None:
    with pytest.raises(UnsupportedError, match="dtype 'complex32', which is not"):
        located(
            saved(
                torch.zeros(2, dtype=torch.uint8).view(torch.uint8).new_zeros(2).to(torch.complex32)
            )
        )


def test_torchscript_is_refused_by_name() -> None:
    blob = repacked(one_tensor(), {"archive/constants.pkl": b"x"})
    with pytest.raises(UnsupportedError, match="holds a TorchScript program"):
        located(blob)


@pytest.mark.parametrize(
    ("order", "error"),
    [(b"big", UnsupportedError), (b"middle", FormatError), (b"", FormatError)],
)
def test_other_byte_orders_are_refused(order: bytes, error: type[CkptkitError]) -> None:
    with pytest.raises(error):
        located(repacked(one_tensor(), {"archive/byteorder": order}))


def test_an_archive_without_a_byte_order_is_little_endian() -> None:
    blob = repacked(one_tensor(), {"archive/byteorder": None})
    assert torch.equal(rebuilt(blob, located(blob)), torch.arange(8.0))


@pytest.mark.parametrize(
    "before_after",
    [
        (b"K\x08\x85", b"K\x09\x85"),  # one element more than the storage has
        (b"cpuq\x04K\x08", b"cpuq\x04K\x07"),  # storage shorter than its record
        (b"cpuq\x04K\x08", b"cpuq\x04K\x09"),  # storage longer than its record
        (b"QK\x00", b"QK\x01"),  # starts one element later
        (b"torch\nFloatStorage", b"torch\nDoubleStorage"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"),  # another storage's name
        (b"X\x07\x00\x00\x00storage", b"X\x07\x00\x00\x00Storage"),
    ],
    ids=str,
)
def test_a_pickle_that_contradicts_the_record_is_refused(
    before_after: tuple[bytes, bytes],
) -> None:
    before, after = before_after
    pickle = pickle_of(one_tensor())
    assert pickle.count(before) == 1
    with pytest.raises(FormatError):
        located(repacked(one_tensor(), {"archive/data.pkl": pickle.replace(before, after)}))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        (b"J\xff\xff\xff\xff", b"K\x01"),
        (b"K\x08", b"J\xff\xff\xff\xff"),
        (b"\x8a\x09" + bytes(8) + b"\x01", b"K\x00"),  # 2**64 times the same element
        (b"\x8a\x08" + bytes(7) + b"\x40", b"K\x00"),  # 2**62 times four bytes
        (b"K\x01", b"\x8a\x08" + bytes(7) + b"\x40"),
        (b"\x88", b"K\x01"),
        (b"N", b"K\x01"),
        (b"K\x08", b"K\x01K\x01"),
    ],
)
def test_impossible_sizes_and_strides_are_refused(shape: bytes, strides: bytes) -> None:
    pickle = pickle_of(one_tensor())
    old = b"K\x08\x85q\x06K\x01\x85"
    assert old in pickle
    forged = pickle.replace(old, b"(" + shape + b"tq\x06(" + strides + b"t")
    with pytest.raises(FormatError):
        located(repacked(one_tensor(), {"archive/data.pkl": forged}))


# ---------------------------------------------------------------- damage


def pickle_of(blob: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        return archive.read("archive/data.pkl")


def repacked(blob: bytes, changes: dict[str, bytes | None], method: int = 0) -> bytes:
    """Writes the records anew with Python's own zip writer; None drops one."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(blob)) as old,
        zipfile.ZipFile(buffer, "w", method) as new,
    ):
        records = {name: old.read(name) for name in old.namelist()} | changes
        for name, data in records.items():
            if data is not None:
                new.writestr(name, data)
    return buffer.getvalue()


def test_every_truncation_is_refused() -> None:
    blob = one_tensor()
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            located(blob[:length])


def test_a_truncated_archive_says_so() -> None:
    with pytest.raises(
        TruncatedFileError,
        match=r"^x\.distcp: zip archive has no end record in the last bytes of its 1,000\n",
    ):
        located(one_tensor()[:1000])


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flip_outside_the_data_is_refused_or_changes_nothing(mask: int) -> None:
    blob = one_tensor()
    truth = located(blob)
    for position in (*range(truth.start), *range(truth.stop, len(blob))):
        damaged = bytearray(blob)
        damaged[position] ^= mask
        try:
            found = located(bytes(damaged))
        except InputError:
            continue
        stored = zlib.crc32(damaged[found.start : found.stop])
        if found != truth:  # then at least the copy has to notice
            assert found.crc32 not in {None, stored}, position


def test_a_flip_in_the_pickle_is_a_checksum_error() -> None:
    blob = bytearray(one_tensor())
    blob[70] ^= 1
    with pytest.raises(ChecksumError, match=r"'archive/data\.pkl' has CRC-32 0x"):
        located(bytes(blob))


def test_the_two_end_records_have_to_agree() -> None:
    blob = bytearray(one_tensor())
    assert blob[-END64_BYTES : -END64_BYTES + 4] == b"PK\6\6"
    blob[-14] ^= 1  # the count in the short one
    blob[-12] ^= 1
    with pytest.raises(FormatError, match="the two end records of the zip archive disagree"):
        located(bytes(blob))


def test_a_local_header_that_disagrees_is_refused() -> None:
    blob = bytearray(one_tensor())
    header = located(bytes(blob)).start
    name = bytes(blob).rindex(b"archive/data/0", 0, header)
    blob[name] ^= 1
    with pytest.raises(FormatError, match="local header of 'archive/data/0' contradicts"):
        located(bytes(blob))
