"""Staging a rank's state: every byte, in files that stock torch reads."""

from __future__ import annotations

import copy
import math
import mmap
import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit.core.errors import NoSpaceError
from ckptkit.core.index import Box
from ckptkit.training.save import staging
from ckptkit.training.save.file_layout import SavePlan, plan_save
from ckptkit.training.save.saver import record_of
from ckptkit.training.save.staging import (
    MemoryPlaces,
    SharedBuffer,
    Stager,
    copy_through_host,
    is_plain,
    measure_copy_limit,
)
from ckptkit.training.state.memory_changes import call_before_changes
from ckptkit.training.state.pieces import Holdings, ObjectValue, Piece
from tests.files import mounted, tmpfs
from tests.unit.training.builders import stock_load, whole_piece

UNIT = "model_0"
# `dcp.load` warns where it is told `no_dist=True`.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    made = SharedBuffer()
    yield made
    made.close()


@pytest.fixture
def stager(buffer: SharedBuffer) -> Iterator[Stager]:
    made = Stager(buffer)
    yield made
    made.close()


def persist(plan: SavePlan, wave: int, buffer: SharedBuffer, folder: Path) -> None:
    """Does what the writer process does with a wave."""
    for image in plan.images[wave]:
        for blob in image.archives:
            crc = zlib.crc32(buffer.memory[blob.start : blob.stop]).to_bytes(4, "little")
            for at in blob.crc_at:
                buffer.memory[at : at + 4] = crc
        path = folder / image.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.memory[image.start : image.start + image.size_bytes])


def save(
    stager: Stager, buffer: SharedBuffer, plan: SavePlan, pieces: Sequence[Piece], folder: Path
) -> None:
    for wave in range(len(plan.images)):
        stager.stage(plan, pieces, wave).wait()
        persist(plan, wave, buffer, folder)


def put_metadata(folder: Path, unit: dict[str, Any]) -> None:
    """Does what the commit does with the record of a single rank."""
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    keys = [".".join(map(str, tensor["path"])) for tensor in unit["tensors"]]
    for key, tensor in zip(keys, unit["tensors"], strict=True):
        properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
        state[key] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), [])
    for number, offsets, sizes, file, start, length in unit["chunks"]:
        key, at = keys[number], torch.Size(offsets)
        state[key].chunks.append(ChunkStorageMetadata(at, torch.Size(sizes)))
        info = _StorageInfo(unit["data_files"][file], start, length)
        storage[MetadataIndex(key, at)] = info
    for path, file, start, length in unit["objects"]:
        key = ".".join(map(str, path))
        state[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(unit["data_files"][file], start, length)
    metadata = Metadata(state, storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def load(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    dcp.load(like, checkpoint_id=folder, no_dist=True)
    return like


def archives(folder: Path, unit: dict[str, Any]) -> Iterator[tuple[list[int], bytes]]:
    for _, _, sizes, file, start, length in unit["chunks"]:
        data = (folder / unit["data_files"][file]).read_bytes()
        yield sizes, data[start : start + length]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether two tensors have the same bits, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    flat = [
        t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)
    ]
    return torch.equal(*flat)


DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64", "complex128", "int64", "int32", "int16",
    "int8", "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def varied() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    tensors = {name: random_bits(getattr(torch, name), 3, 5) for name in DTYPES}
    base = torch.randn(6, 8, 4)
    return tensors | {
        "bool": torch.rand(7) > 0.5,
        "scalar": torch.tensor(3.5),
        "one": torch.ones(1, 1, 1),
        "transposed": base[0].t(),
        "permuted": base.permute(2, 0, 1),
        "column": base[:, 3],
        "stepped": torch.arange(20)[::3],
        "expanded": torch.randn(4, 1).expand(4, 3),
        "offset": torch.randn(100)[7:29].view(2, 11),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "nothing": torch.empty(0, 4),
    }


def test_every_dtype_and_stride_comes_back_from_stock_torch_bit_by_bit(
    stager: Stager, buffer: SharedBuffer, tmp_path: Path
) -> None:
    tensors = varied()
    pieces = [whole_piece(name, tensor) for name, tensor in tensors.items()]
    plan = plan_save(pieces, [True] * len(pieces), rank=0)
    save(stager, buffer, plan, pieces, tmp_path)
    objects = [ObjectValue(UNIT, ("lr",), 0.1), ObjectValue(UNIT, ("names",), ["a", "b"])]
    record, files = record_of(
        plan, Holdings((), tuple(objects)), rank=0, world_size=1, attempt="a", step=1
    )
    (tmp_path / files[0].path).write_bytes(files[0].data)
    unit = record["units"][UNIT]
    folder = tmp_path / UNIT
    put_metadata(folder, unit)

    like: dict[str, Any] = {
        f"model.{name}": torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()
    }
    found = load(folder, like | {"lr": None, "names": None})
    for name, tensor in tensors.items():
        assert same(found[f"model.{name}"], tensor.detach()), name
    assert found["lr"] == 0.1
    assert found["names"] == ["a", "b"]
    assert plan.data_bytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_what_changes_after_staging_does_not_reach_the_buffer(
    stager: Stager, buffer: SharedBuffer
) -> None:
    tensors = varied()
    pieces = [whole_piece(name, tensor) for name, tensor in tensors.items()]
    plan = plan_save(pieces, [True] * len(pieces), rank=0)
    stager.stage(plan, pieces)
    before = bytes(buffer.memory)
    for tensor in tensors.values():
        storage = tensor.detach().untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xA5)
        assert not tensor.numel() or storage[0] == 0xA5
    assert bytes(buffer.memory) == before


def test_several_places_of_one_local_become_an_archive_each(
    stager: Stager, buffer: SharedBuffer, tmp_path: Path
) -> None:
    full = torch.randn(4, 6)
    places = (Box((0, 4), (1, 2)), Box((1, 0), (2, 6)), Box((3, 0), (1, 3)))
    rest = (Box((0, 0), (1, 4)), Box((3, 3), (1, 3)))
    flat = full.view(-1)
    pieces = [
        Piece(UNIT, ("w",), (4, 6), places, flat[4:21]),
        Piece(UNIT, ("w",), (4, 6), rest, torch.cat([flat[:4], flat[21:]])),
    ]
    plan = plan_save(pieces, [True, True], rank=0)
    save(stager, buffer, plan, pieces, tmp_path)
    unit = dict(plan.record_units[UNIT])
    assert len(unit["tensors"]) == 1
    assert [chunk[1:3] for chunk in unit["chunks"]] == [
        [list(box.offsets), list(box.sizes)] for box in (*places, *rest)
    ]
    put_metadata(tmp_path / UNIT, unit)
    assert same(load(tmp_path / UNIT, {"w": torch.zeros(4, 6)})["w"], full)


def test_a_plan_serves_many_saves_and_another_plan_replaces_it(
    stager: Stager, buffer: SharedBuffer, tmp_path: Path
) -> None:
    local = torch.zeros(3, 5)
    small = [whole_piece("w", local)]
    plan = plan_save(small, [True], rank=0)
    for value in (1.0, 2.0):
        local.fill_(value)
        save(stager, buffer, plan, small, tmp_path)
        ((_, data),) = archives(tmp_path / UNIT, dict(plan.record_units[UNIT]))
        assert same(stock_load(data), local)
    larger = [whole_piece("w", torch.randn(700, 900)), whole_piece("b", local)]
    other = plan_save(larger, [True, True], rank=0)
    first = buffer.descriptor
    save(stager, buffer, other, larger, tmp_path)
    assert buffer.descriptor != first
    found = [
        stock_load(data) for _, data in archives(tmp_path / UNIT, dict(other.record_units[UNIT]))
    ]
    assert all(same(a, piece.local) for a, piece in zip(found, larger, strict=True))
    save(stager, buffer, plan, small, tmp_path)
    ((_, data),) = archives(tmp_path / UNIT, dict(plan.record_units[UNIT]))
    assert same(stock_load(data), local)


def test_a_plan_is_loaded_again_after_its_memory_was_given_back(
    stager: Stager, buffer: SharedBuffer, tmp_path: Path
) -> None:
    pieces = [whole_piece("w", torch.randn(3, 5))]
    plan = plan_save(pieces, [True], rank=0)
    stager.stage(plan, pieces)
    buffer.close()
    save(stager, buffer, plan, pieces, tmp_path)
    ((_, data),) = archives(tmp_path / UNIT, dict(plan.record_units[UNIT]))
    assert same(stock_load(data), pieces[0].local)


def test_a_state_on_several_devices_is_copied_piece_by_piece(
    stager: Stager, buffer: SharedBuffer, tmp_path: Path
) -> None:
    tensors = varied()
    pieces = [whole_piece(name, tensor) for name, tensor in tensors.items()]
    plan = plan_save(pieces, [True] * len(pieces), rank=0)
    plan = replace(plan, devices=(torch.device("cpu"), torch.device("xpu", 0)))
    save(stager, buffer, plan, pieces, tmp_path)
    found = [
        stock_load(data) for _, data in archives(tmp_path / UNIT, dict(plan.record_units[UNIT]))
    ]
    assert all(same(a, b.detach()) for a, b in zip(found, tensors.values(), strict=True))


def test_nothing_to_write_needs_no_memory(stager: Stager, buffer: SharedBuffer) -> None:
    pieces = [whole_piece("w", torch.ones(3))]
    plan = plan_save(pieces, [False], rank=1)
    stager.stage(plan, pieces).wait()
    assert plan.images == ((),)
    assert plan.buffer_bytes == buffer.size_bytes == 0
    assert list(plan.record_units[UNIT]["expected"]) == [["model", "w"]]


def test_a_step_joins_the_copies_until_the_guard_is_removed(
    stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pieces = [whole_piece("w", model.weight)]
    staged = stager.stage(plan_save(pieces, [True], rank=0), pieces)
    joined: list[int] = []
    monkeypatch.setattr(type(staged), "join", lambda _: joined.append(1))
    remove = call_before_changes(stager.join, [model])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(joined) == 1
    model.load_state_dict(model.state_dict())
    assert len(joined) == 2
    remove()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    assert len(joined) == 2


def test_a_guarded_model_can_be_copied_and_stored(stager: Stager, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    remove = call_before_changes(stager.join, [model])
    torch.save(model, tmp_path / "model.pt")
    assert b"ckptkit" not in (tmp_path / "model.pt").read_bytes()
    stored = torch.load(tmp_path / "model.pt", weights_only=False)  # noqa: TID251  the oracle
    for copied in (copy.deepcopy(model), stored):
        copied.load_state_dict(model.state_dict())
        assert torch.equal(copied.weight, model.weight)
    remove()


@pytest.mark.parametrize("name", ["transposed", "permuted", "column", "stepped", "expanded",
                                  "conjugate", "negative", "channels_last"])  # fmt: skip
def test_a_scattered_tensor_is_put_into_order_on_the_host(name: str) -> None:
    source = varied()[name]
    assert not is_plain(source)
    target = torch.zeros(source.shape, dtype=source.dtype)
    copy_through_host(target, source)
    assert same(target, source)


def test_the_copy_limit_is_a_rate_and_unknown_without_memory(buffer: SharedBuffer) -> None:
    assert measure_copy_limit(buffer) == 0
    buffer.reserve(8 << 20)
    assert 1e8 < measure_copy_limit(buffer) < 1e12
    assert buffer.reserve(9 << 20)


class OnDevice(torch.Tensor):
    """A tensor on the CPU that takes what is asked of one on a CUDA device."""

    def record_stream(self, stream: Any) -> None:
        stream.log.append("record")


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for the event of {event.name}")

    def record_event(self, event: FakeEvent) -> FakeEvent:
        self.log.append("event")
        event.name, event.log = self.name, self.log
        return event


class FakeEvent:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking  # the thread that waits takes no processor time
        self.name = ""
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("host waits")

    def query(self) -> bool:
        return False


def test_copies_from_a_device_run_beside_the_computation_in_the_right_order(
    buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    copies = Stager(buffer, pin=False)
    current = FakeStream("current", log)
    copies._streams[torch.device("cpu")] = FakeStream("side", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    capturing: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    sources = [torch.randn(3, 4).as_subclass(OnDevice) for _ in range(3)]
    sources.append(torch.randn(4, 3).t().as_subclass(OnDevice))
    targets = [torch.zeros(3, 4) for _ in sources]
    pairs = list(zip(targets, sources, strict=True))
    staged = copies._copy_from_devices(pairs[:1], pairs[1:])
    expected = ["side waits for current", "record", "current waits for side", "record", "record"]
    assert log == [*expected, "event"]
    assert all(torch.equal(target, source) for target, source in pairs)
    capturing.append(True)
    staged.join()
    assert log[-1] == "event"  # a graph must not wait for work that was not captured
    capturing.clear()
    staged.join()
    staged.wait()
    assert log[len(expected) + 1 :] == ["current waits for the event of side", "host waits"]


def test_replays_of_graphs_wait_as_steps_of_optimizers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a replay may be a step of an optimizer, and calls no hook of it."""
    replayed: list[object] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed.append)
    log: list[str] = []

    class Copies:
        def join(self) -> None:
            log.append(f"join after {len(replayed)}")

    ours, others = Copies(), Copies()
    undo, undo_others = (call_before_changes(copies.join, []) for copies in (ours, others))
    torch.cuda.CUDAGraph.replay("graph")  # type: ignore[arg-type]
    assert (log, replayed) == (["join after 0"] * 2, ["graph"])
    undo_others()
    torch.cuda.CUDAGraph.replay("graph")  # type: ignore[arg-type]
    assert log[2:] == ["join after 1"]
    undo()
    torch.cuda.CUDAGraph.replay("graph")  # type: ignore[arg-type]
    assert (len(log), len(replayed)) == (3, 3)


class FakeRuntime:
    """What `torch.cuda.cudart` gives."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.pinned: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert (size, flags) == (64, 1)
        if self.status == 0:
            self.pinned.append(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.pinned.remove(address)


@pytest.mark.parametrize("status", [0, 2])
def test_memory_is_pinned_once_or_a_warning_says_why_not(
    status: int,
    buffer: SharedBuffer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = FakeRuntime(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream("side", []))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    copies = Stager(buffer)
    copies._base = memory = torch.empty(64, dtype=torch.uint8)
    copies._pin([])
    assert not runtime.pinned
    for _ in range(2):
        copies._pin([torch.device("cuda", 0)])
        assert runtime.pinned == ([memory.data_ptr()] if status == 0 else [])
    assert [r.getMessage()[:70] for r in caplog.records] == (
        []
        if status == 0
        else ["the staging buffer of 0 MB cannot be pinned (cudaHostRegister: error 2"]
    )
    copies.close()
    assert not runtime.pinned


MIB = 1 << 20


def only(memory_folder: Path | None = None, disk_folder: Path | None = None) -> MemoryPlaces:
    return MemoryPlaces(anonymous=False, memory_folder=memory_folder, disk_folder=disk_folder)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder in memory with room for 4 MiB, like Docker's /dev/shm has for 64."""
    with mounted(tmp_path / "shm", *tmpfs("4m")) as folder:
        yield folder


def reads_the_same(buffer: SharedBuffer) -> bool:
    """Tells whether somebody who has only the descriptor sees what is written."""
    buffer.memory[-5:] = b"hello"
    with mmap.mmap(buffer.descriptor, buffer.size_bytes, prot=mmap.PROT_READ) as other:
        return other[-5:] == b"hello"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_without_a_name_is_taken_first_and_is_there_at_once(buffer: SharedBuffer) -> None:
    before = resident_bytes()
    assert buffer.reserve(16 * MIB)
    assert resident_bytes() - before >= 16 * MIB
    assert (buffer.kind, buffer.note, buffer.size_bytes) == ("memfd", "", 16 * MIB)
    assert not os.get_inheritable(buffer.descriptor)
    assert reads_the_same(buffer)
    buffer.close()
    assert resident_bytes() - before < 8 * MIB


def test_pages_are_touched_one_by_one_where_the_kernel_cannot_do_it_at_once(
    buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_POPULATE_WRITE", 9999)
    before = resident_bytes()
    buffer.reserve(16 * MIB)
    assert resident_bytes() - before >= 16 * MIB


def test_a_folder_in_memory_is_taken_where_nameless_memory_is_refused(tmp_path: Path) -> None:
    buffer = SharedBuffer(only(memory_folder=tmp_path))
    buffer.reserve(1)
    assert (buffer.kind, buffer.note) == ("shm", "")
    assert buffer.size_bytes == mmap.PAGESIZE
    assert reads_the_same(buffer)
    assert list(tmp_path.iterdir()) == []
    buffer.close()


def test_a_file_on_disk_is_taken_where_memory_is_too_small_and_that_is_said(
    small_memory: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    buffer = SharedBuffer(only(memory_folder=small_memory, disk_folder=disk))
    buffer.reserve(8 * MIB)
    assert buffer.kind == "file"
    assert buffer.note == (
        f"'{small_memory}' has 4 MB free, where 8 MB are needed:"
        f" staging in a file under '{disk}', slower"
    )
    assert reads_the_same(buffer)
    assert list(disk.iterdir()) == []
    buffer.close()


def test_a_file_on_disk_needs_no_folder_in_memory(tmp_path: Path) -> None:
    buffer = SharedBuffer(only(memory_folder=tmp_path / "absent", disk_folder=tmp_path))
    buffer.reserve(MIB)
    assert buffer.kind == "file"
    assert buffer.note.startswith(f"'{tmp_path}/absent' cannot be used (no such file or directory)")
    buffer.close()


def test_too_little_room_everywhere_is_an_error_and_no_signal(small_memory: Path) -> None:
    buffer = SharedBuffer(only(disk_folder=small_memory))
    with pytest.raises(NoSpaceError, match=r"has 4 MB free, where 8 MB are needed") as caught:
        buffer.reserve(8 * MIB)
    assert "staging_limit" in caught.value.hint
    assert (buffer.descriptor, buffer.size_bytes) == (-1, 0)
    assert buffer.reserve(2 * MIB)
    buffer.close()


def test_more_than_the_machine_has_is_refused_before_anything_is_taken(
    buffer: SharedBuffer,
) -> None:
    with pytest.raises(NoSpaceError, match="MB of memory are needed for staging, and") as caught:
        buffer.reserve(1 << 50)
    assert "staging_limit" in caught.value.hint


def test_growing_replaces_the_memory_and_its_descriptor(buffer: SharedBuffer) -> None:
    buffer.reserve(MIB)
    first = buffer.descriptor
    assert not buffer.reserve(MIB // 2)
    assert buffer.descriptor == first
    assert buffer.reserve(2 * MIB)
    assert buffer.descriptor != first
    assert buffer.size_bytes == 2 * MIB
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    assert reads_the_same(buffer)


def test_a_descriptor_is_never_used_for_other_memory(buffer: SharedBuffer) -> None:
    seen = []
    for size in range(1, 6):
        buffer.reserve(size * MIB)
        seen.append(buffer.descriptor)
    assert len(set(seen)) == 5


def test_memory_that_somebody_still_holds_is_given_back_all_the_same(buffer: SharedBuffer) -> None:
    before = resident_bytes()
    buffer.reserve(64 * MIB)
    held = memoryview(buffer.memory)[:4]
    buffer.reserve(65 * MIB)
    assert resident_bytes() - before < 80 * MIB
    buffer.close()
    assert resident_bytes() - before < 16 * MIB
    del held


def test_a_forked_child_does_not_get_the_memory(buffer: SharedBuffer) -> None:
    buffer.reserve(MIB)
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    (number,) = [n for n, text in enumerate(mappings) if "memfd:ckptkit" in text]
    assert "dc" in mappings[number + 1].splitlines()[0].split()  # "do not copy on fork"
