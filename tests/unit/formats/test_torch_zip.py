"""Locating a tensor in what `torch.save` writes, and refusing everything else."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.serialization import set_crc32_options

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    InputError,
    LimitError,
    TruncatedFileError,
    UnsupportedError,
)
from ckptkit.formats.pickle import torch_zip
from ckptkit.formats.pickle.torch_values import StorageRef, TensorRef, parse_values
from ckptkit.formats.pickle.torch_zip import (
    WINDOW_BYTES,
    Payload,
    TensorCache,
    ZipEntry,
    data_start,
    locate_tensor,
    open_archive,
    read_directory,
)
from ckptkit.training.save.file_layout import archive_of_tensor
from tests.campaigns.fuzz.seeds import strict
from tests.files_in_memory import saved
from tests.sampled import sampled

Reads = list[tuple[int, int]]


def located(blob: bytes, cache: TensorCache | None = None) -> Payload:
    return locate_tensor(strict(blob), len(blob), where="x.distcp", cache=cache)


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
    with zipfile.ZipFile(buffer, "w") as archive, zipfile.ZipFile(io.BytesIO(one_tensor())) as old:
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
    value = {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", "b"], "none": None, "n": 2**70}
    blob = saved(value)
    assert read_object(blob) == value


def read_object(blob: bytes) -> object:
    return parse_values(open_archive(strict(blob), len(blob), where="x").pickle(), where="x")


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
    for tensor in (torch.zeros(2, dtype=torch.complex64).conj(), torch._neg_view(torch.zeros(2))):
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


@pytest.mark.parametrize(
    ("order", "error"), [(b"big", UnsupportedError), (b"middle", FormatError), (b"", FormatError)]
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
def test_a_pickle_that_contradicts_the_record_is_refused(before_after: tuple[bytes, bytes]) -> None:
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
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(buffer, "w", method) as new:
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


@pytest.mark.parametrize("mask", sampled([0x01, 0x80, 0xFF], [0x01]))
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


# ---------------------------------------------------------------- the directory


def archive_of(entries: list[bytes], count: int | None = None, padding: int = 0) -> bytes:
    """Makes an archive of the given directory entries, and no records at all."""
    directory = b"".join(entries)
    number = len(entries) if count is None else count
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, number, number, len(directory), padding, 0)
    return bytes(padding) + directory + end


def entry(
    name: bytes, start: int = 0, size: int = 0, *, extra: bytes = b"", flags: int = 0
) -> bytes:
    head = struct.pack(
        "<4sHHHHIIIIHHHHHII",
        b"PK\1\2",
        *(0, 0, flags, 0, 0),
        *(0, size, size),
        *(len(name), len(extra), 0, 0, 0, 0, start),
    )
    return head + name + extra


def directory(blob: bytes) -> Mapping[str, ZipEntry]:
    return read_directory(strict(blob), len(blob), where="x")


@pytest.mark.parametrize("name", [b"", b"/a", b"../a", b"a/../b", b"a\\b", b"a\0b", b"\xff\xfe"])
def test_names_that_are_no_relative_paths_are_refused(name: bytes) -> None:
    with pytest.raises(FormatError):
        directory(archive_of([entry(name)], padding=100))


def test_equal_names_and_overlapping_records_are_refused() -> None:
    with pytest.raises(FormatError, match="two records are called 'a'"):
        directory(archive_of([entry(b"a"), entry(b"a", 31)], padding=100))
    with pytest.raises(FormatError, match="record 'b' starts at byte 40 but 41 is the first free"):
        directory(archive_of([entry(b"a", 0, 10), entry(b"b", 40)], padding=100))
    with pytest.raises(FormatError, match="records reach byte 131 but the directory starts at 100"):
        directory(archive_of([entry(b"a", 0, 100)], padding=100))
    with pytest.raises(FormatError, match="record 'a' starts at byte 3 but 0"):
        directory(archive_of([entry(b"a", 3)], padding=100))


def test_a_directory_too_large_for_its_records_is_refused_before_it_is_read() -> None:
    blob = archive_of([entry(b"a" * 60_000)], padding=100)

    def read(start: int, stop: int) -> bytes:
        assert stop - start < 1000
        return blob[start:stop]

    with pytest.raises(LimitError, match="directory of 1 records takes 60,046 bytes"):
        read_directory(read, len(blob), where="x")


def test_zip64_sizes_are_taken_from_the_extra_field() -> None:
    large = 5 * 2**30
    extra = struct.pack("<HHQQ", 1, 16, large, large)
    first = entry(b"a", 0, 0xFFFFFFFF, extra=extra, flags=0x808)
    far = large + 31 + 24
    second = entry(b"b", 0xFFFFFFFF, 5, extra=struct.pack("<HHQ", 1, 8, far))
    rows = first + second
    start = far + 31 + 5
    stop = start + len(rows)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(rows), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, stop, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 2, 2, len(rows), 0xFFFFFFFF, 0)
    tail = rows + end64 + locator + end
    local = struct.pack("<4sHHHIIIIHH", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 1, 0) + b"a"

    def read(first: int, last: int) -> bytes:
        return (local if first == 0 else tail[first - start : last - start])[: last - first]

    found = read_directory(read, start + len(tail), where="x")
    assert [(e.header_start, e.size_bytes) for e in found.values()] == [(0, large), (far, 5)]
    assert data_start(read, found["a"], where="x") == 31


@pytest.mark.parametrize("extra", [b"", b"\1\0", struct.pack("<HHQQ", 1, 16, 1, 1), b"\1\0\x08\0x"])
def test_a_damaged_zip64_extra_field_is_refused(extra: bytes) -> None:
    with pytest.raises(FormatError):
        directory(archive_of([entry(b"a", 0xFFFFFFFF, 5, extra=extra)], padding=100))


def test_positions_agree_with_numpy_for_a_checkpoint_of_many_storages() -> None:
    tensors = {str(n): torch.arange(n, n + 5) for n in range(20)}
    blob = saved(tensors)
    entries = directory(blob)
    for number, tensor in enumerate(tensors.values()):
        one = entries[f"archive/data/{number}"]
        start = data_start(strict(blob), one, where="x")
        values = np.frombuffer(blob[start : start + one.size_bytes], np.int64)
        assert values.tolist() == tensor.tolist()


# ---------------------------------------------------------------- archives that are alike

Make = Callable[[torch.Tensor], bytes]


def by_ckptkit(tensor: torch.Tensor) -> bytes:
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    archive = archive_of_tensor(dtype, tuple(tensor.shape))
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    whole = bytearray(archive.head + data + archive.tail)[: archive.size_bytes]
    for at in archive.crc_at:
        struct.pack_into("<I", whole, at, zlib.crc32(data))
    return bytes(whole)


def outcome(blob: bytes, cache: TensorCache | None = None) -> object:
    try:
        return located(blob, cache=cache)
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


@pytest.mark.parametrize("make", [saved, by_ckptkit])
@pytest.mark.parametrize("shape", [(), (3,), (40, 100)])
def test_archives_that_differ_in_their_values_are_parsed_once(
    make: Make, shape: tuple[int, ...], parsed: list[int]
) -> None:
    blobs = [make(torch.full(shape, float(value))) for value in range(5)]
    cache = TensorCache()
    assert [located(blob, cache=cache) for blob in blobs] == [located(blob) for blob in blobs]
    assert len(parsed) == 1 + len(blobs)
    payload = located(blobs[4], cache=cache)
    assert payload.crc32 == zlib.crc32(blobs[4][payload.start : payload.stop])


@pytest.mark.parametrize("make", [saved, by_ckptkit])
@pytest.mark.parametrize("shape", sampled([(5,), (40, 100)], [(5,)]))
def test_any_changed_byte_has_the_same_effect_as_when_each_archive_is_parsed(
    make: Make, shape: tuple[int, ...]
) -> None:
    blob = make(torch.arange(float(torch.Size(shape).numel())).reshape(shape))
    payload = located(blob)
    cache = TensorCache()
    located(make(torch.zeros(shape)), cache=cache)
    around = [*range(payload.start), *range(payload.stop, len(blob))]
    assert len(around) > 800
    for position in around:
        for mask in (0x01, 0x80, 0xFF) if shape == (40, 100) else (0x01,):
            changed = bytearray(blob)
            changed[position] ^= mask
            assert outcome(bytes(changed), cache) == outcome(bytes(changed)), position


@pytest.mark.parametrize("make", [saved, by_ckptkit])
def test_a_byte_more_or_less_is_no_likeness(make: Make) -> None:
    blob = make(torch.ones(40, 100))
    cache = TensorCache()
    located(make(torch.zeros(40, 100)), cache=cache)
    for changed in (blob[:-1], blob[1:], blob + b"\0", b"\0" + blob):
        assert outcome(changed, cache) == outcome(changed)
        assert not isinstance(outcome(changed, cache), Payload)


def test_shapes_of_one_size_are_told_apart(parsed: list[int]) -> None:
    shapes = [(40, 100), (100, 40), (20, 200), (4000,)]
    cache = TensorCache()
    for _ in range(3):
        for shape in shapes:
            assert located(by_ckptkit(torch.ones(shape)), cache=cache).shape == shape
    assert len(parsed) == len(shapes)


def test_a_checksum_that_was_not_stored_stays_unknown() -> None:
    blob = by_ckptkit(torch.ones(40, 100))
    crc32 = located(blob).crc32
    assert crc32 is not None
    cache = TensorCache()
    located(blob, cache=cache)
    without = blob.replace(struct.pack("<I", crc32), bytes(4))
    assert located(without, cache=cache).crc32 is None is located(without).crc32


def test_as_many_sizes_are_remembered_as_the_limit_says() -> None:
    cache = TensorCache(limit=2)
    for elements in range(1, 9):
        assert located(by_ckptkit(torch.ones(elements)), cache=cache).shape == (elements,)
        assert len(cache._archives) <= 2
