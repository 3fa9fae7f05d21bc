"""Filling live tensors from the chunks that real frameworks wrote; joining what ranks prove."""

from __future__ import annotations

import math
import random
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from ckptkit.core.errors import ChecksumError, IncompleteCheckpointError, ResumeError
from ckptkit.core.geometry import slabs
from ckptkit.core.index import Box, Span, TensorIndex
from ckptkit.engine.checksum_tracker import NumberedRecord, OpenRecord
from ckptkit.formats.registry import find_candidates, read_index
from ckptkit.storage.local.source import LocalSource
from ckptkit.training.load import load_pieces as proofs
from ckptkit.training.load.load_pieces import (
    cross_check,
    load_pieces,
    pack,
    table_of,
    unexpected_keys,
    unpack,
)
from ckptkit.training.state.pieces import Piece
from tests.sampled import sampled

Cut = Callable[[str, torch.Tensor, int, int], Piece]
WORLDS = (1, 2, 3, 5)
CASES = ("dcp_dtypes_and_layouts", "fsdp2_tensor_parallel", "fsdp1_full_shard_flat", "fsdp2_hsdp")


_OPEN: list[LocalSource] = []


@pytest.fixture(autouse=True)
def closed_sources() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def source_of(folder: Path) -> LocalSource:
    _OPEN.append(LocalSource(folder))
    return _OPEN[-1]


class Opened:
    """A checkpoint, with the whole tensors that it holds."""

    def __init__(self, folder: Path, truth: dict[str, torch.Tensor]) -> None:
        self.source = source_of(folder)
        (candidate,) = find_candidates(self.source)
        self.index: TensorIndex = read_index(self.source, candidate)
        self.truth = {
            entry.key: truth[entry.name]
            for entry in self.index.tensors.values()
            if entry.name in truth and entry.part != "optimizer"
        }
        assert self.truth


def open_case(folder: Path) -> Opened:
    return Opened(folder / "checkpoint", load_file(folder / "truth.safetensors"))


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Opened:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every save outside a process group
        dcp.save({"model": tensors}, checkpoint_id=str(folder), no_dist=True)
    return Opened(folder, tensors)


def piece(key: str, whole: torch.Tensor, places: tuple[Box, ...], local: torch.Tensor) -> Piece:
    return Piece("", tuple(key.split(".")), tuple(whole.shape), places, local)


def rows_of(key: str, whole: torch.Tensor, rank: int, world: int) -> Piece:
    """As FSDP2 cuts a tensor: rows, the last ranks may get none."""
    if not whole.shape:
        return piece(key, whole, (Box((), ()),), torch.empty_like(whole))
    chunks = whole.chunk(world)
    local = torch.empty_like(chunks[rank]) if rank < len(chunks) else whole[:0].clone()
    start = sum(len(chunk) for chunk in chunks[:rank])
    place = Box((start, *(0,) * (whole.dim() - 1)), tuple(local.shape))
    return piece(key, whole, (place,) if local.numel() else (), local)


def interval_of(key: str, whole: torch.Tensor, rank: int, world: int) -> Piece:
    """As FSDP1 cuts a tensor: a range of its elements, wherever rows end."""
    count = math.ceil(whole.numel() / world)
    span = Span(min(rank * count, whole.numel()), min((rank + 1) * count, whole.numel()))
    local = torch.empty(span.stop - span.start, dtype=whole.dtype)
    places = tuple(slabs(span, tuple(whole.shape)))
    return piece(key, whole, places, local.reshape(places[0].sizes) if len(places) == 1 else local)


def column_of(key: str, whole: torch.Tensor, rank: int, world: int) -> Piece:
    """As tensor parallelism cuts a tensor, into memory that is not contiguous."""
    if whole.dim() < 2 or whole.shape[-1] < world:
        return rows_of(key, whole, rank, world)
    chunks = whole.chunk(world, dim=-1)
    if rank >= len(chunks):
        return piece(key, whole, (), whole[:0].clone())
    start = sum(chunk.shape[-1] for chunk in chunks[:rank])
    local = torch.empty_like(whole)[..., : chunks[rank].shape[-1]]
    place = Box((*(0,) * (whole.dim() - 1), start), tuple(local.shape))
    return piece(key, whole, (place,), local)


def expected(found: Piece, whole: torch.Tensor) -> torch.Tensor:
    parts = [
        whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))].reshape(-1)
        for b in found.places
    ]
    return torch.cat(parts) if parts else whole.reshape(-1)[:0]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", sampled([rows_of, interval_of, column_of], [column_of]))
def test_any_cut_of_any_checkpoint_is_filled_bit_for_bit(
    real_checkpoints: Path, case: str, cut: Cut
) -> None:
    opened = open_case(real_checkpoints / case)
    for world in WORLDS:
        partial: list[NumberedRecord] = []
        for rank in range(world):
            pieces = [cut(key, whole, rank, world) for key, whole in opened.truth.items()]
            report = load_pieces(opened.index, opened.source, pieces)
            partial += report.partial
            for found, whole in zip(pieces, opened.truth.values(), strict=True):
                assert torch.equal(raw(found.local), raw(expected(found, whole))), found.key
        assert cross_check([table_of(partial)], str) == 0


def test_strided_and_transposed_memory_is_filled_in_place(tmp_path: Path) -> None:
    whole = torch.randn(40, 30)
    opened = saved(tmp_path / "c", {"w": whole, "t": whole.t()})
    local = torch.zeros(30, 40).t()
    other = torch.zeros(30, 40, 2)[:, :, 1]
    address = local.data_ptr()
    load_pieces(
        opened.index,
        opened.source,
        [
            piece("model.w", whole, (Box((0, 0), (40, 30)),), local),
            piece("model.t", whole.t(), (Box((0, 0), (30, 40)),), other),
        ],
    )
    assert torch.equal(local, whole)
    assert torch.equal(other, whole.t())
    assert local.data_ptr() == address


def test_a_rank_reads_hardly_more_than_it_needs(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(250, 300) for i in range(8)}
    tensors |= {f"step{i}": torch.tensor(float(i)) for i in range(40)}
    opened = saved(tmp_path / "c", tensors)
    for rank in range(3):
        pieces = [rows_of(f"model.{name}", t, rank, 3) for name, t in tensors.items()]
        report = load_pieces(opened.index, opened.source, pieces)
        scalars = 40 * 1_600  # a blob of one number is some 1.3 KB of headers
        assert report.bytes_read <= 1.05 * (report.bytes_needed + scalars)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_a_whole_blob_is_found_by_the_rank_itself(tmp_path: Path) -> None:
    opened = saved(tmp_path / "c", {"w": torch.randn(300, 300)})
    _flip(tmp_path / "c/__0_0.distcp", 100_000)
    with pytest.raises(ChecksumError, match=r"__0_0\.distcp, tensor 'model\.w'"):
        load_pieces(opened.index, opened.source, [rows_of("model.w", torch.empty(300, 300), 0, 1)])


def test_a_flipped_bit_in_a_shared_blob_is_found_by_all_ranks_together(tmp_path: Path) -> None:
    opened = saved(tmp_path / "c", {"w": torch.randn(300, 300)})
    _flip(tmp_path / "c/__0_0.distcp", 100_000)
    partial: list[NumberedRecord] = []
    for rank in range(3):
        found = rows_of("model.w", torch.empty(300, 300), rank, 3)
        partial += load_pieces(opened.index, opened.source, [found]).partial
    sent = [unpack(pack({"u": [one]}, world_size=3)["tables"]["u"]) for one in partial]
    with pytest.raises(ChecksumError, match="blob 0: CRC-32"):
        cross_check(sent, "blob {}".format)
    assert cross_check(sent[:2], str) == 1


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    opened = saved(tmp_path / "c", {"w": torch.ones(4, dtype=torch.bfloat16)})

    def load(key: str, whole: torch.Tensor) -> None:
        load_pieces(opened.index, opened.source, [rows_of(key, whole, 0, 1)])

    with pytest.raises(ResumeError, match=r"model\.w: dtype bfloat16 .* against float32"):
        load("model.w", torch.ones(4))
    with pytest.raises(ResumeError, match=r"model\.w: shape \[4\] .* against \[5\]"):
        load("model.w", torch.ones(5, dtype=torch.bfloat16))
    with pytest.raises(ResumeError, match=r"1 of 1 tensors are not in the checkpoint: 'model\.v'"):
        load("model.v", torch.ones(4, dtype=torch.bfloat16))
    whole = torch.ones(4, dtype=torch.bfloat16, device="meta")
    unmade = piece("model.w", whole, (Box((0,), (4,)),), whole)
    with pytest.raises(ResumeError, match=r"model\.w: is still on the meta device"):
        load_pieces(opened.index, opened.source, [unmade])
    assert unexpected_keys(opened.index, []) == ["model.w"]


def test_a_tied_name_finds_the_tensor_under_its_other_name(tmp_path: Path) -> None:
    whole = torch.randn(6, 2)
    opened = saved(tmp_path / "c", {"embed": whole})
    found = Piece(
        "",
        ("model", "head"),
        (6, 2),
        (Box((0, 0), (6, 2)),),
        torch.empty(6, 2),
        aliases=(("model", "embed"),),
    )
    load_pieces(opened.index, opened.source, [found])
    assert torch.equal(found.local, whole)
    assert not unexpected_keys(opened.index, [found])


def test_large_tensors_are_read_in_runs_by_several_threads(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(1_001 + 700 * i, 700) for i in range(4)}
    opened = saved(tmp_path / "c", tensors)
    pieces = [rows_of(f"model.{name}", t, 1, 2) for name, t in tensors.items()]
    load_pieces(opened.index, opened.source, pieces, threads=3)
    for found, whole in zip(pieces, tensors.values(), strict=True):
        assert torch.equal(found.local, whole.chunk(2)[1])


@pytest.fixture
def damaged(real_checkpoints: Path, tmp_path: Path) -> Path:
    shutil.copytree(real_checkpoints / "fsdp2_plain/checkpoint", tmp_path / "checkpoint")
    shutil.copy(real_checkpoints / "fsdp2_plain/truth.safetensors", tmp_path)
    return tmp_path


def test_a_missing_or_short_file_is_named(damaged: Path) -> None:
    opened = open_case(damaged)
    file = next(iter(sorted((damaged / "checkpoint").rglob("*.distcp"))))
    pieces = [rows_of(key, whole, 0, 1) for key, whole in opened.truth.items()]
    data = file.read_bytes()
    for cut in (None, 100):
        file.unlink(missing_ok=True)
        if cut is not None:
            file.write_bytes(data[:cut])
        opened.source = source_of(damaged / "checkpoint")
        with pytest.raises(Exception, match=file.name):
            load_pieces(opened.index, opened.source, pieces)


def test_a_tensor_with_a_hole_is_refused(tmp_path: Path) -> None:
    opened = saved(tmp_path / "c", {"w": torch.ones(4)})
    entry = opened.index.tensors[next(iter(opened.index.tensors))]
    entry.chunks.sizes[0] = 3
    with pytest.raises(IncompleteCheckpointError, match=r"model\.w: elements .* stored 0 times"):
        load_pieces(opened.index, opened.source, [rows_of("model.w", torch.ones(4), 0, 1)])


DATA = bytes(range(256)) * 20


def blob(number: int, *cuts: tuple[int, int], data: bytes = DATA) -> NumberedRecord:
    parts = tuple((a, b - a, zlib.crc32(data[a:b])) for a, b in cuts)
    return number, OpenRecord(0, len(DATA), zlib.crc32(DATA), "where", parts)


def checked(*blobs: NumberedRecord) -> int:
    return cross_check([table_of([one]) for one in blobs], "blob {}".format)


def test_parts_that_follow_one_another_prove_a_blob_whoever_read_them() -> None:
    middle = random.Random(3)  # noqa: S311
    cuts = sorted(middle.sample(range(1, len(DATA)), 40))
    parts = list(zip([0, *cuts], [*cuts, len(DATA)], strict=True))
    middle.shuffle(parts)
    singles = [blob(at % 3, part) for at in range(3) for part in parts]
    assert checked(*singles, *singles[:50], blob(5), blob(7, (0, 9))) == 2


def test_overlapping_parts_prove_a_blob_and_gaps_do_not() -> None:
    assert checked(blob(1, (0, 4_000), (4_000, 5_120)), blob(1, (100, 4_000))) == 0
    assert checked(blob(1, (0, 5_120)), blob(1, (7, 90))) == 0
    assert checked(blob(1, (0, 4_000)), blob(1, (4_001, 5_120))) == 1


def test_another_byte_is_found_and_so_is_a_rank_that_reads_differently() -> None:
    other = bytearray(DATA)
    other[4_500] ^= 1
    with pytest.raises(ChecksumError, match="blob 1: CRC-32"):
        checked(blob(1, (0, 4_000)), blob(1, (4_000, 5_120), data=bytes(other)), blob(0))
    for cut in ((4_000, 5_120), (0, 5_120)):
        with pytest.raises(ChecksumError, match="blob 1: two ranks read different bytes"):
            checked(
                blob(1, (0, 4_000), (4_000, 5_120)),
                blob(1, cut, data=bytes(other)),
                blob(1, (3, 9)),
            )


def test_one_limit_holds_for_all_that_a_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(4)  # noqa: S311
    blobs = [
        (
            n,
            OpenRecord(
                *(0, 1 << 40, 1, ""), ((noise.randrange(1 << 40), 5, noise.randrange(1 << 32)),)
            ),
        )
        for n in range(4_000)
    ]
    monkeypatch.setattr(proofs, "_MOST_CHARACTERS", 100_000)
    monkeypatch.setattr(proofs, "_MOST_ROWS", 6_000)
    packed = pack({"a": blobs, "b": blobs, "c": blobs}, world_size=2)
    assert sum(map(len, packed["tables"].values())) <= 50_000
    rows = {name: unpack(text) for name, text in packed["tables"].items()}
    kept = sum(map(len, rows.values()))
    assert 0 < kept <= 3_000
    assert packed["left_out"] == 12_000 - kept
    assert np.array_equal(rows["a"], table_of(blobs)[: len(rows["a"])])


@pytest.mark.slow
def test_what_512_ranks_read_of_a_model_is_joined_within_seconds() -> None:
    world, length = 512, 1_000
    rows = np.zeros((world, 1_000, 6), np.int64)  # 500,000 parts in 1,000 blobs
    zeros = zlib.crc32(bytes(length))
    rows[:, :, 0] = np.arange(1_000)
    rows[:, :, 1:3] = world * length, zlib.crc32(bytes(world * length))
    rows[:, :, 3] = length * np.arange(world)[:, None]
    rows[:, :, 4:] = length, zeros
    began = time.perf_counter()
    assert cross_check(list(rows), str) == 0
    assert time.perf_counter() - began < 10
    rows[300, 700, 5] ^= 8
    with pytest.raises(ChecksumError, match=r"^700: CRC-32"):
        cross_check(list(rows), str)


def test_more_than_can_be_joined_singly_stays_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "_MOST_ROWS_JOINED_SINGLY", 3)
    whole, part = (0, 5_120), (7, 90)
    assert checked(blob(1, whole), blob(1, part), blob(2, whole), blob(2, part)) == 1
