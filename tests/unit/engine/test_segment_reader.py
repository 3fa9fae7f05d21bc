"""Planned files that are read without being written have the bytes that are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import ckptkit
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.engine.kernels import Preparations
from ckptkit.engine.segment_reader import SegmentReader
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.plan import OutputFile

LARGE = 5 << 20  # elements: more than one leaf, of float32 and of bfloat16


class Folder:
    """A planned folder with its reader, and the same folder as it is written."""

    def __init__(self, reader: SegmentReader, files: tuple[OutputFile, ...], out: Path) -> None:
        self.reader = reader
        self.files = files
        self.out = out

    def read(self, file: OutputFile, start: int, stop: int) -> bytes:
        target = bytearray(stop - start)
        self.reader.fill_range(file, start, stop, memoryview(target))
        return bytes(target)


@pytest.fixture(scope="module", params=["keep", "bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Folder]:
    """A folder of two files of weights, a tensor without elements and a scalar among them."""
    base = tmp_path_factory.mktemp("planned")
    src, out = base / "src", base / "out"
    src.mkdir()
    random = np.random.default_rng(7)
    tensors = {
        "a.empty": np.zeros((0, 3), np.float32),
        "b.scalar": np.array(2.5, np.float32),
        "c.large": random.standard_normal((LARGE // 64, 64), np.float32),
        "d.half": random.standard_normal(33).astype(ml_dtypes.bfloat16),
        "e.double": random.standard_normal((7, 5)),
    }
    save_file(tensors, src / "model.safetensors")
    (src / "config.json").write_text(json.dumps({"hidden_size": 64}))
    most_bytes = LARGE * 2 + 100
    ckptkit.consolidate(src, out, dtype=request.param, max_shard_size=most_bytes)
    asked = ConsolidateRequest(dtype=request.param, max_file_bytes=most_bytes)
    job = ConversionJob(src, base / "unwritten", asked)
    with job.plan_output() as planned, Preparations() as preparations:
        yield Folder(SegmentReader(planned.inputs, preparations), planned.plan.files, out)


def test_whole_files_are_those_that_are_written(folder: Folder) -> None:
    assert len(folder.files) >= 4
    for file in folder.files:
        assert folder.read(file, 0, file.size_bytes) == (folder.out / file.path).read_bytes()


@given(data=st.data())
def test_any_range_is_that_of_the_written_file(folder: Folder, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(folder.files))
    edges = sorted(
        {
            near
            for segment in file.segments
            for edge in (segment.start, segment.stop, segment.start + LEAF_BYTES)
            for near in (edge - 1, edge, edge + 1, edge + 3)
            if 0 <= near <= file.size_bytes
        }
    )
    places = st.integers(0, file.size_bytes) | st.sampled_from(edges)
    start, stop = sorted((data.draw(places), data.draw(places)))
    with (folder.out / file.path).open("rb") as written:
        written.seek(start)
        assert folder.read(file, start, stop) == written.read(stop - start)
