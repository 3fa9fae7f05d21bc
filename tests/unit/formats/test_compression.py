"""Chunks that are zstd streams: decoded once, in bounded memory, and never believed."""

from __future__ import annotations

import io
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from msgspec.structs import replace
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    SerializationFormat,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckptkit
from ckptkit.conversion.job import run_job
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    InputError,
    LimitError,
    NoSpaceError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import Key, Span
from ckptkit.core.threads import memory_in_use_bytes
from ckptkit.engine import decompress as streams
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.formats.dcp.compression import ZstdContent, decompress
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.plan import TASK_BYTES, Share
from tests.contract.fault_bench import hostile_pickles, room_for_pickle, with_pickle
from tests.files_in_memory import saved

DESCRIPTOR = "stream.zstd/1"


def compressed(data: bytes, level: int = 3) -> bytes:
    """As torch does it: a stream of which the length is not known before."""
    out = io.BytesIO()
    with zstandard.ZstdCompressor(level=level).stream_writer(out, closefd=False) as writer:
        writer.write(data)
    return out.getvalue()


class Made:
    """A DCP folder of one tensor, its pieces as streams of our choice."""

    def __init__(self, folder: Path, whole: torch.Tensor, axis: int = 0, count: int = 1) -> None:
        self.folder, self.whole = folder, whole
        self.pieces = torch.tensor_split(whole, count, dim=axis) if whole.ndim else (whole,)
        self.axis = axis
        self.descriptors: list[str] | None = [DESCRIPTOR]
        self.streams = [compressed(saved(piece.clone())) for piece in self.pieces]

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        chunks, stored, at = [], {}, 0
        for number, (piece, stream) in enumerate(zip(self.pieces, self.streams, strict=True)):
            offsets = [0] * piece.ndim
            if piece.ndim:
                offsets[self.axis] = at
                at += piece.shape[self.axis]
            (self.folder / f"__{number}_0.distcp").write_bytes(stream)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), piece.shape))
            info = _StorageInfo(f"__{number}_0.distcp", 0, len(stream), self.descriptors)
            stored[MetadataIndex("model.w", torch.Size(offsets), number)] = info
        properties = TensorProperties(dtype=self.whole.dtype)
        entry = TensorStorageMetadata(properties, self.whole.shape, chunks)
        metadata = Metadata({"model.w": entry}, {"model.w": ("model", "w")}, stored)
        (self.folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return self.folder

    def refused(self, error: type[CkptkitError], found: str) -> CkptkitError:
        with pytest.raises(error, match=found) as caught:
            ckptkit.consolidate(self.write(), self.folder.parent / "out", names="live")
        assert not (self.folder.parent / "out").exists()
        assert not ckptkit.verify(self.folder).ok
        return caught.value

    def consolidated(self, **options: Any) -> torch.Tensor:
        out = self.folder.parent / f"out{len(list(self.folder.parent.iterdir()))}"
        ckptkit.consolidate(self.write(), out, names="live", **options)
        return load_file(out / "model.safetensors")["w"]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def small(tmp_path: Path) -> Made:
    return Made(tmp_path / "run", noise(7, 5), count=2)


def test_streams_of_every_level_and_in_several_frames_are_read(tmp_path: Path) -> None:
    whole = noise(64, 33)
    for level in (-5, 1, 19):
        made = Made(tmp_path / f"level{level}", whole)
        made.streams = [compressed(saved(whole), level)]
        assert torch.equal(made.consolidated(), whole)
    made = Made(tmp_path / "frames", whole)
    data = saved(whole)
    made.streams = [b"".join(compressed(data[at : at + 999]) for at in range(0, len(data), 999))]
    assert torch.equal(made.consolidated(), whole)


def test_numbers_and_tensors_that_are_stored_by_columns_are_read(tmp_path: Path) -> None:
    assert Made(tmp_path / "number", torch.tensor(2.5)).consolidated().item() == 2.5
    turned = Made(tmp_path / "turned", noise(300, 200))
    turned.streams = [compressed(saved(turned.whole.t().contiguous().t()))]
    assert torch.equal(turned.consolidated(), turned.whole)


def test_a_large_chunk_that_is_stored_by_columns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MOST_TURNED_BYTES", 1000)
    turned = Made(tmp_path / "turned", noise(300, 200))
    turned.streams = [compressed(saved(turned.whole.t().contiguous().t()))]
    turned.refused(UnsupportedError, "not stored row by row")


@pytest.mark.parametrize(("axis", "count"), [(0, 1), (0, 3), (1, 5)])
def test_each_chunk_is_decoded_once_however_many_tasks_need_it(
    axis: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path / "run", noise(3000, 801), axis, count)
    decoded: list[int] = []
    original = streams.DecodedRecords.keep

    def keep(self: streams.DecodedRecords, key: tuple[int, int], block: bytes) -> None:
        original(self, key, block)
        decoded.append(len(block))

    monkeypatch.setattr(streams.DecodedRecords, "keep", keep)
    assert torch.equal(made.consolidated(workers=3), made.whole)
    assert sum(decoded) == made.whole.nbytes


@pytest.mark.parametrize("limit", ["decoders", "blocks"])
def test_what_was_let_go_is_decoded_again_and_is_the_same(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "decoders":
        monkeypatch.setattr(streams, "MOST_DECODERS", 2)
    else:
        monkeypatch.setattr(streams, "KEPT_BYTES", streams.BLOCK_BYTES)
    made = Made(tmp_path / "run", noise(1200, 701), 1, 5)
    assert torch.equal(made.consolidated(workers=3), made.whole)


def test_spans_in_any_order_and_from_many_threads_are_right(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", noise(500, 700), count=2)
    expected = made.whole.flatten().numpy()
    wrong: list[Span] = []
    with open_checkpoint(made.write()) as checkpoint:
        origin = Origin("source", checkpoint.source, checkpoint.index)

        def read(seed: int) -> None:
            chances, reader = random.Random(seed), TensorReader(origin)  # noqa: S311
            for _ in range(20):
                start = chances.randrange(len(expected) - 1)
                span = Span(start, min(len(expected), start + chances.randrange(1, 90_000)))
                found = np.empty(span.stop - span.start, np.float32)
                reader.fill(Key("model.w"), span, found.view(np.uint8).data)
                if not np.array_equal(found, expected[span.start : span.stop]):
                    wrong.append(span)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        origin.checksums.finish()
    assert not wrong


def test_what_was_read_in_part_is_proven_to_its_end(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", noise(800, 500))
    data = bytearray(saved(made.whole))
    data[-5000] ^= 1
    made.streams = [compressed(bytes(data))]
    with open_checkpoint(made.write()) as checkpoint:
        origin = Origin("source", checkpoint.source, checkpoint.index)
        TensorReader(origin).fill(Key("model.w"), Span(0, 2), memoryview(bytearray(8)))
        with pytest.raises(ChecksumError, match="decompressed data have CRC-32"):
            origin.checksums.finish()
        origin.checksums.finish()


def test_a_flipped_bit_in_what_is_decoded_is_refused(small: Made) -> None:
    data = bytearray(saved(small.pieces[1].clone()))
    data[750] ^= 4
    small.streams = [small.streams[0], compressed(bytes(data))]
    small.refused(ChecksumError, "decompressed data have CRC-32")


def test_streams_cut_short_or_followed_by_something_are_refused(small: Made) -> None:
    whole = small.streams[1]
    for keep in (len(whole) - 1, len(whole) // 2, 20):
        small.streams[1] = whole[:keep]
        small.refused(InputError, ".")
    small.streams[1] = whole + b"rubbish"
    small.refused(FormatError, "zstd stream is damaged")
    small.streams[1] = whole + compressed(b"x" * (1 << 20))
    small.refused(LimitError, "more than 65,536 bytes follow the data")
    small.streams[1] = whole + compressed(b"x" * 100)
    small.refused(InputError, ".")


@pytest.mark.parametrize(
    ("content", "error", "found"),
    [
        (b"", FormatError, "not with 'data.pkl'"),
        (b"PK\3\4", FormatError, "not with 'data.pkl'"),
        (b"\0" * 100_000, FormatError, "not with 'data.pkl'"),
        (saved(noise(3, 5)), FormatError, r"holds float32 \[3, 5\] against float32 \[4, 5\]"),
        (saved(noise(4, 5).double()), FormatError, "holds float64"),
        (saved(noise(9, 5)[:4]), FormatError, "saves no more than a tensor uses"),
    ],
)
def test_a_stream_of_something_else_is_refused(
    content: bytes, error: type[InputError], found: str, small: Made
) -> None:
    small.streams[0] = compressed(content)
    small.refused(error, found)


def test_what_is_no_stream_is_refused(small: Made) -> None:
    small.streams[0] = saved(small.pieces[0].clone())
    small.refused(FormatError, "no zstd stream begins here")


def test_a_window_that_takes_much_memory_is_refused(small: Made) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    out = io.BytesIO()
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with compressor.stream_writer(out, closefd=False) as writer:
        writer.write(saved(small.pieces[0].clone()))
    small.streams[0] = out.getvalue()
    small.refused(LimitError, "needs a window of 134,217,728 bytes")


def test_a_bomb_is_decoded_no_further_than_its_place() -> None:
    bomb = compressed(b"\0" * (256 << 20))
    assert len(bomb) < 64 << 10
    read: Callable[[int, int], bytes] = lambda start, stop: bomb[start:stop]  # noqa: E731
    with pytest.raises(LimitError, match="become more than 1,000,000"):
        decompress(read, len(bomb), most_bytes=1_000_000, where="bomb")
    content = ZstdContent(read, len(bomb), where="bomb")
    assert content.read(10) == b"\0" * 10


def test_a_hostile_pickle_in_a_stream_is_refused(
    small: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    archive = saved(small.pieces[0].clone())
    for kind, hostile in hostile_pickles("trace", room_for_pickle(archive, archive)).items():
        small.streams[0] = compressed(with_pickle(archive, hostile))
        expected = UnsafePickleError if kind.startswith("runs") else InputError
        small.refused(expected, ".")
    assert not (tmp_path / "trace").exists()


def test_archives_without_checksums_are_read_and_told_of(small: Made) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        small.streams = [compressed(saved(piece.clone())) for piece in small.pieces]
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(small.consolidated(), small.whole)
    assert ckptkit.verify(small.folder).unverified == ("w",)


@pytest.mark.parametrize(
    "descriptors", [["mine.crypt/1"], [DESCRIPTOR, "mine.crypt/1"], ["stream.zstd/2"]]
)
def test_other_extensions_are_refused_by_name(descriptors: list[str], small: Made) -> None:
    small.descriptors = descriptors
    small.refused(UnsupportedError, descriptors[-1])
    assert ckptkit.inspect(small.folder).problems


def test_memory_for_decoding_is_reckoned_with(tmp_path: Path) -> None:
    folder = Made(tmp_path / "run", noise(3000, 1001), 1, 40).write()
    with open_checkpoint(folder) as checkpoint:
        needed = streams.decoding_bytes(checkpoint.index)
    assert 3000 * 1001 * 4 < needed < 200 << 20
    limit = memory_in_use_bytes() + needed // 2
    with pytest.raises(NoSpaceError, match="in use with the plan"):
        ckptkit.consolidate(folder, tmp_path / "out", memory_limit=limit)


class _Reversed(StreamTransformExtension):
    """An extension of somebody's own."""

    @staticmethod
    def registry_name() -> str:
        return "mine.nothing"

    @staticmethod
    def from_descriptor(version: str) -> _Reversed:  # noqa: ARG004
        return _Reversed()

    def get_descriptor(self) -> str:
        return "mine.nothing/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:  # noqa: A002
        return input


def test_objects_that_torch_compressed_are_checked(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(tmp_path / "run", _extensions=[ZStandard()])
        state = {"model": {"w.weight": noise(3, 4)}, "note": {"text": "x" * 500}}
        dcp.save(state, storage_writer=writer, no_dist=True)
        other = FileSystemWriter(tmp_path / "other", _extensions=[_Reversed()])
        dcp.save(state, storage_writer=other, no_dist=True)
    found = ckptkit.verify(tmp_path / "run")
    assert found.ok
    assert found.proven == ("objects beside the tensors that have their CRC-32: 1",)
    problems = ckptkit.inspect(tmp_path / "other").problems
    assert ["mine.nothing/1" in problem.message for problem in problems] == [True]
    with open_checkpoint(tmp_path / "run") as checkpoint:
        (blob,) = checkpoint.index.values.values()
    file = tmp_path / "run" / blob.path
    data = bytearray(file.read_bytes())
    data[(blob.start + blob.stop) // 2] ^= 16
    file.write_bytes(data)
    assert not ckptkit.verify(tmp_path / "run").ok


def test_images_that_torch_would_compress_are_refused_by_name(tmp_path: Path) -> None:
    """Torch writes an empty stream for each tensor then, and the image uncompressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(
            tmp_path / "run",
            _extensions=[ZStandard()],
            serialization_format=SerializationFormat.SAFETENSORS,
        )
        state = {"model": {"a.weight": noise(30, 4), "b.weight": noise(30, 4)}}
        dcp.save(state, storage_writer=writer, no_dist=True)
    with pytest.raises(UnsupportedError, match="together with an extension is not read"):
        ckptkit.inspect(tmp_path / "run")


def test_slices_share_a_compressed_chunk_and_each_proves_it(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", noise(3000, 1001))
    assert made.whole.nbytes > TASK_BYTES
    out = tmp_path / "out"
    job = ConversionJob(made.write(), out, ConsolidateRequest(names="live"))
    assert [run_job(replace(job, share=Share(n, 2))).manifest is None for n in (1, 0)] == [
        True,
        False,
    ]
    assert torch.equal(load_file(out / "model.safetensors")["w"], made.whole)
    data = bytearray(saved(made.whole))
    data[-2000] ^= 1  # the first slice writes nothing of it
    made.streams = [compressed(bytes(data))]
    job = ConversionJob(made.write(), tmp_path / "never", ConsolidateRequest(names="live"))
    for number in (0, 1):
        with pytest.raises(ChecksumError, match="decompressed data"):
            run_job(replace(job, share=Share(number, 2)))
