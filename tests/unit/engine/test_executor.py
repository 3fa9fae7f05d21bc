"""Tensors in every kind of split, assembled by the executor and compared with numpy."""

from __future__ import annotations

import io
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptkit.core.checksums import digest_of
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import ChecksumError, FormatError, NoSpaceError, TruncatedFileError
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Container,
    Fqn,
    Key,
    Record,
    RecordTable,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.engine.checksum_tracker import OpenRecord
from ckptkit.engine.executor import ExecutionSettings, Executor
from ckptkit.engine.kernels import make_products
from ckptkit.engine.outcome import BytesWritten, Digests, Event, Outcome, Started, ignore
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.engine.segment_reader import Inputs
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import find_problems_by_key
from ckptkit.plan.layouts.hf import layout_hf_weights
from ckptkit.plan.layouts.torch import layout_dcp, layout_torch_full
from ckptkit.plan.plan import SOURCE, Plan, Share, tasks_of
from ckptkit.plan.selection import DTypePolicy
from ckptkit.storage.overlay import MemorySource
from tests.memory_target import MemoryTarget
from tests.property.examples import examples
from tests.sampled import sampled

Array = NDArray[Any]
WEIGHTS = "model.safetensors"


@dataclass
class Shelf:
    """A source in the making: tensors are cut, and their pieces put into files."""

    checksums: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    tensors: dict[Key, TensorEntry] = field(default_factory=dict)

    def store(self, data: bytes, container: Container = "raw") -> int:
        """Puts bytes into a file of their own, behind some others; returns the record."""
        path = f"__{len(self.files)}_0.distcp"
        start = 3 * len(self.files)
        self.files[path] = bytes(start) + data + b"tail"
        crc = zlib.crc32(data) if self.checksums and container == "raw" else None
        self.records.append(Record(len(self.files) - 1, start, start + len(data), container, crc))
        return len(self.records) - 1

    def add(self, name: str, array: Array, chunks: list[Chunk]) -> None:
        entry = TensorEntry(
            Key(name),
            (name,),
            Fqn(name),
            "",
            "model",
            dtype_named(array.dtype.name),
            array.shape,
            ChunkTable.of(chunks, array.ndim),
        )
        self.tensors[entry.key] = entry

    def origin(self) -> Origin:
        source = MemorySource(self.files)
        files = [source.stat(path) for path in self.files]
        index = TensorIndex("test", files, RecordTable.of(self.records), self.tensors)
        assert not list(find_problems_by_key(index, index.tensors.values()))
        return Origin(SOURCE, source, index)


def run(
    origin: Origin,
    *,
    workers: int = 1,
    layout: Any = layout_hf_weights,
    listener: Any = ignore,
    target: MemoryTarget | None = None,
    **options: Any,
) -> tuple[dict[str, bytes], Digests]:
    request = ConsolidateRequest(**options)
    policy = DTypePolicy(request.dtype, request.keep_dtype)
    products = make_products(list(origin.index.tensors.values()), policy, {})
    plan = Plan(tuple(layout(products, request.max_file_bytes)), {})
    target = target or MemoryTarget()
    executor = Executor(
        plan, Inputs({SOURCE: origin}, {}), target, ExecutionSettings(workers), listener
    )
    digests = executor.run()
    target.commit(plan.files[-1].path)
    return target.files, digests


def written(origin: Origin, **options: Any) -> dict[str, Array]:
    found: dict[str, Array] = safetensors.numpy.load(run(origin, **options)[0][WEIGHTS])
    return found


def cut(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    edges = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    return list(zip([0, *edges], [*edges, size], strict=True))  # some pieces may be empty


def grid(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Cuts every dimension, and takes the blocks of the grid."""
    boxes = [Box((), ())]
    for size in shape:
        intervals = cut(draw, size) if draw(st.booleans()) else [(0, size)]
        boxes = [
            Box((*box.offsets, low), (*box.sizes, high - low))
            for box in boxes
            for low, high in intervals
        ]
    return boxes


def block_of(array: Array, box: Box) -> Array:
    return array[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]


def put_box(draw: st.DrawFn, shelf: Shelf, array: Array, box: Box) -> Chunk:
    """Stores a block row-major, or in another order of dimensions, behind a gap."""
    block = block_of(array, box)
    gap = draw(st.integers(0, 2)) * array.itemsize
    order = draw(st.permutations(range(array.ndim)))
    stored = np.ascontiguousarray(block.transpose(order))
    strides: tuple[int, ...] | None = None
    if list(order) != sorted(order) and block.size:
        steps = [step // array.itemsize for step in stored.strides]
        strides = tuple(steps[order.index(axis)] for axis in range(array.ndim))
    record = shelf.store(bytes(gap) + stored.tobytes() + bytes(gap))
    return Chunk(box, record, gap, strides)


def put_span(shelf: Shelf, array: Array, span: Span) -> Chunk:
    return Chunk(span, shelf.store(array.reshape(-1)[span.start : span.stop].tobytes()), 0)


@st.composite
def shelves(draw: st.DrawFn) -> tuple[Shelf, dict[str, Array]]:
    shelf, truth = Shelf(checksums=draw(st.booleans())), {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = draw(st.sampled_from(["float32", "int8", "float64", "int16", "bool"]))
        count = int(np.prod(shape, dtype=int))
        values = np.random.default_rng(number).integers(0, 2, count) * (number + 1)
        array = (values + np.arange(count)).astype(dtype).reshape(shape)
        if draw(st.booleans()):
            spans = [Span(*pair) for pair in cut(draw, count)]
            chunks = [put_span(shelf, array, span) for span in spans]
        else:
            boxes = grid(draw, shape)
            boxes += draw(st.lists(st.sampled_from(boxes), max_size=2))  # replicas
            chunks = [put_box(draw, shelf, array, box) for box in boxes]
        name = f"tensor.{number}"
        shelf.add(name, array, list(draw(st.permutations(chunks))))
        truth[name] = array
    return shelf, truth


@settings(max_examples=examples(300))
@given(shelves(), st.integers(1, 2))
def test_any_split_is_assembled_to_the_bytes_of_the_truth(
    case: tuple[Shelf, dict[str, Array]], workers: int
) -> None:
    shelf, truth = case
    found = written(shelf.origin(), workers=workers)
    assert found.keys() == truth.keys()
    for name, array in truth.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes(), name


@settings(max_examples=examples(120))
@given(shelves(), st.integers(0, 200), st.integers(1, 200))
def test_any_range_of_a_tensor_can_be_read_alone(
    case: tuple[Shelf, dict[str, Array]], first: int, length: int
) -> None:
    shelf, truth = case
    reader = TensorReader(shelf.origin())
    for name, array in truth.items():
        start = min(first, array.size)
        stop = min(start + length, array.size)
        target = bytearray((stop - start) * array.itemsize)
        reader.fill(Key(name), Span(start, stop), memoryview(target))
        assert bytes(target) == array.reshape(-1)[start:stop].tobytes()


@settings(max_examples=examples(120))
@given(shelves(), st.randoms())
def test_a_damaged_byte_is_an_error_or_was_not_part_of_any_tensor(
    case: tuple[Shelf, dict[str, Array]], chance: Any
) -> None:
    shelf, truth = case
    path = chance.choice(sorted(shelf.files))
    data = bytearray(shelf.files[path])
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    has_checksum = all(record.crc32 is not None for record in shelf.records)
    shelf.files[path] = bytes(data)
    try:
        found = {name: array.tobytes() for name, array in written(shelf.origin()).items()}
    except ChecksumError as error:
        assert has_checksum, error  # noqa: PT017 - one of two good ends
        return
    assert not has_checksum or found == {name: array.tobytes() for name, array in truth.items()}


def simple(rows: int = 6, *, dtype: str = "float32", checksums: bool = True) -> tuple[Shelf, Array]:
    """A tensor cut in two by rows."""
    shelf, array = Shelf(checksums), np.arange(rows * 4).reshape(rows, 4).astype(dtype)
    half = rows // 2
    chunks = [
        Chunk(Box((low, 0), (high - low, 4)), shelf.store(array[low:high].tobytes()), 0)
        for low, high in ((0, half), (half, rows))
    ]
    shelf.add("w", array, chunks)
    return shelf, array


# Archives of torch


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(4, 3).t(),
        torch.arange(40.0)[5:17].reshape(3, 4),
        torch.arange(24.0).reshape(3, 8)[:, ::2],
        torch.arange(4.0).expand(3, 4),
    ],
    ids=["dense", "transposed", "offset", "strided", "expanded"],
)
def test_a_tensor_inside_an_archive_is_found_and_checked(tensor: torch.Tensor) -> None:
    shelf = Shelf()
    chunk = Chunk(Box((0, 0), (3, 4)), shelf.store(saved(tensor), "torch_zip"))
    shelf.add("w", tensor.contiguous().numpy(), [chunk])
    assert np.array_equal(written(shelf.origin())["w"], tensor.numpy())
    path = next(iter(shelf.files))
    position = shelf.files[path].index(np.float32(2).tobytes() + np.float32(3).tobytes())
    data = bytearray(shelf.files[path])
    data[position] ^= 1
    shelf.files[path] = bytes(data)
    with pytest.raises(ChecksumError):
        run(shelf.origin())


@pytest.mark.parametrize("tensor", [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.int32)])
def test_an_archive_of_another_tensor_than_the_index_says_is_refused(tensor: torch.Tensor) -> None:
    shelf = Shelf()
    chunk = Chunk(Box((0, 0), (3, 4)), shelf.store(saved(tensor), "torch_zip"))
    shelf.add("w", np.zeros((3, 4), np.float32), [chunk])
    with pytest.raises(FormatError, match=r"holds .* against float32 \[3, 4\]") as caught:
        run(shelf.origin())
    assert "tensor 'w'" in caught.value.where


# Large tensors


def test_a_column_split_of_many_leaves_is_assembled() -> None:
    array = np.arange(5_000 * 1_200, dtype=np.float32).reshape(5_000, 1_200)
    shelf = Shelf()
    boxes = [Box((0, low), (5_000, 400)) for low in range(0, 1_200, 400)]
    shelf.add("w", array, [Chunk(b, shelf.store(block_of(array, b).tobytes()), 0) for b in boxes])
    files, digests = run(shelf.origin(), workers=3)
    assert safetensors.numpy.load(files[WEIGHTS])["w"].tobytes() == array.tobytes()
    assert len(digests.tensors["w"]) == -(-array.nbytes // LEAF_BYTES)
    assert digests.of_tensor("w") == digest_of(memoryview(array.tobytes()))


# Casts, digests, checksums and progress


def test_digests_do_not_depend_on_workers_layout_or_file_size() -> None:
    digests = {
        run(simple(3_000)[0].origin(), workers=workers, layout=layout, max_file_bytes=size)[
            1
        ].of_tensor("w")
        for workers, layout, size in (
            (1, layout_hf_weights, 10**9),
            (3, layout_hf_weights, 100),
            (2, layout_torch_full, 10**9),
        )
    }
    assert digests == {digest_of(memoryview(simple(3_000)[1].tobytes()))}


def test_what_had_no_checksum_is_named_as_unverified() -> None:
    for checksums in (True, False):
        origin = simple(checksums=checksums)[0].origin()
        run(origin)
        assert origin.unverified == (set() if checksums else {"w"})


def test_a_record_of_which_only_a_part_is_used_is_proven_whole() -> None:
    shelf = Shelf()
    data = bytearray(np.arange(8, dtype=np.float32).tobytes())
    record = shelf.store(bytes(data))
    shelf.add("w", np.arange(2, 4, dtype=np.float32), [Chunk(Box((0,), (2,)), record, 8)])
    assert written(shelf.origin())["w"].tolist() == [2.0, 3.0]
    (path,) = shelf.files
    shelf.files[path] = shelf.files[path][:-5] + b"\xff" + shelf.files[path][-4:]
    with pytest.raises(ChecksumError):
        run(shelf.origin())


def test_progress_adds_up_to_what_was_announced() -> None:
    events: list[Event] = []
    shelf, array = simple(50)
    shelf.add("v", array[0], [Chunk(Box((0,), (4,)), shelf.store(array[0].tobytes()), 0)])
    files, _ = run(shelf.origin(), listener=events.append, max_file_bytes=100)
    sizes = {path: len(data) for path, data in files.items()}
    assert events[0] == Started(sum(sizes.values()), tuple(sizes.items()))
    written_bytes = sum(e.size_bytes for e in events if isinstance(e, BytesWritten))
    assert written_bytes == sum(map(len, files.values()))
    index = json.loads(files["model.safetensors.index.json"])
    assert set(index["weight_map"].values()) < set(files)


# Parts of a plan


def in_parts(
    shelf: Shelf, count: int, order: list[int], *, layout: Any = layout_hf_weights, **options: Any
) -> tuple[dict[str, bytes], Outcome]:
    """Runs each share as another process would, and completes what they leave."""
    request = ConsolidateRequest(**options)
    target = MemoryTarget()

    def executor() -> tuple[Executor, Plan]:
        origin = shelf.origin()
        policy = DTypePolicy(request.dtype, request.keep_dtype)
        products = make_products(list(origin.index.tensors.values()), policy, {})
        plan = Plan(tuple(layout(products, request.max_file_bytes)), {})
        inputs = Inputs({SOURCE: origin}, {})
        return Executor(plan, inputs, target, ExecutionSettings(1), ignore), plan

    last, plan = executor()
    last.create_files()
    whole = Outcome()
    for number in order:
        one, own_plan = executor()
        outcome = one.run_part(tasks_of(own_plan, Share(number, count)))
        whole.add(Outcome.from_json(json.loads(json.dumps(outcome.to_json()))))
    last.complete(whole)
    target.commit(plan.files[-1].path)
    return target.files, whole


@settings(max_examples=examples(160))
@given(shelves(), st.integers(1, 4), st.randoms(), st.booleans())
def test_parts_in_any_order_come_to_the_same_as_the_whole(
    case: tuple[Shelf, dict[str, Array]], count: int, chance: Any, as_archive: bool
) -> None:
    shelf, _ = case
    layout = layout_torch_full if as_archive else layout_hf_weights
    options: dict[str, Any] = {"layout": layout, "max_file_bytes": 40}
    order = list(range(count))
    chance.shuffle(order)
    origin = shelf.origin()
    files, digests = run(origin, **options)
    found, outcome = in_parts(shelf, count, order, **options)
    assert found == files
    assert outcome.digests == digests
    assert outcome.unverified.get(SOURCE, set()) == origin.unverified


def two_halves() -> tuple[Shelf, Array]:
    """A tensor of two leaves and a bit, all of it one record."""
    array = np.arange(5 << 20, dtype=np.float32).reshape(5, 1 << 20)
    shelf = Shelf()
    shelf.add("w", array, [Chunk(Box((0, 0), array.shape), shelf.store(array.tobytes()), 0)])
    return shelf, array


@pytest.mark.parametrize(
    "layout", sampled([layout_hf_weights, layout_torch_full, layout_dcp], [layout_dcp])
)
def test_tasks_that_share_a_record_and_a_checksum_come_to_the_same_apart(layout: Any) -> None:
    shelf, _ = two_halves()
    files, digests = run(shelf.origin(), layout=layout, workers=2)
    found, outcome = in_parts(shelf, 3, [2, 0, 1], layout=layout)
    assert found == files
    assert outcome.digests == digests


def test_damage_is_found_in_a_record_of_which_each_part_read_a_piece() -> None:
    shelf, _ = two_halves()
    (path,) = shelf.files
    data = bytearray(shelf.files[path])
    data[len(data) // 2] ^= 1
    shelf.files[path] = bytes(data)
    with pytest.raises(ChecksumError):
        in_parts(shelf, 3, [0, 1, 2])


def test_an_output_of_which_a_part_is_missing_is_not_completed() -> None:
    with pytest.raises(ValueError, match="no part has written all of tensor 'w'"):
        in_parts(two_halves()[0], 3, [0, 2])


def test_processes_that_found_different_records_are_not_joined() -> None:
    first, second = (Outcome(), Outcome())
    for outcome, stop in ((first, 100), (second, 99)):
        record = OpenRecord(0, stop, 1, "f, tensor 'w'", ((0, 4, 1),))
        outcome.open_records = {SOURCE: {0: record}}
    with pytest.raises(ChecksumError, match="one process found bytes"):
        first.add(second)


class CountedWrites(MemoryTarget):
    """Counts how often each byte is written."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, NDArray[np.int8]] = {}

    def create(self, path: str, size_bytes: int) -> None:
        super().create(path, size_bytes)
        self.times[path] = np.zeros(size_bytes, np.int8)

    def write(self, path: str, start: int, data: memoryview) -> None:
        super().write(path, start, data)
        self.times[path][start : start + data.nbytes] += 1


@pytest.mark.parametrize("layout", [layout_hf_weights, layout_torch_full, layout_dcp])
def test_every_byte_is_written_once(layout: Any) -> None:
    shelf, array = two_halves()
    for name in ("a", "b"):
        shelf.add(name, array[0, :9], [put_span(shelf, array[0, :9], Span(0, 9))])
    target = CountedWrites()
    run(shelf.origin(), layout=layout, workers=3, target=target)
    assert target.times
    assert all((times == 1).all() for times in target.times.values())


def test_an_error_of_one_worker_wakes_the_one_that_waits_for_its_checksum() -> None:
    shelf, _ = two_halves()
    origin = shelf.origin()
    (path,) = shelf.files
    shelf.files[path] = shelf.files[path][: 12 << 20]  # the second of three tasks cannot be read
    with pytest.raises(TruncatedFileError):
        run(origin, layout=layout_torch_full, workers=3)


# Failures


def test_a_target_without_room_stops_the_run_and_shows_nothing() -> None:
    target = MemoryTarget(room_bytes=100)
    with pytest.raises(NoSpaceError):
        run(simple()[0].origin(), target=target)
    assert target.files == {}
