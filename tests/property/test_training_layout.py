"""Any pieces, cut by any limit: every byte has one place, and comes back."""

from __future__ import annotations

import dataclasses
import math
import zipfile
import zlib
from collections import defaultdict
from io import BytesIO
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptkit.core.index import Box
from ckptkit.training.save.file_layout import MIN_LIMIT_BYTES, SavePlan, plan_save
from ckptkit.training.save.staging import SharedBuffer, Stager
from ckptkit.training.state.memory_changes import watched_by
from ckptkit.training.state.pieces import Piece
from tests.property.examples import examples

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn]
SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([[300_000], [3, 200_000], [700, 500], [2, 3, 150_000], [1, 1, 999_999]]),
)
TENSORS = st.tuples(
    SHAPES, st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.sampled_from(["", "a", "b"])
)


def stock_load(data: bytes) -> Any:
    return torch.load(BytesIO(data), weights_only=True)  # noqa: TID251  torch is the oracle


def make(number: int, shape: list[int], dtype: torch.dtype, turned: bool, unit: str) -> Piece:
    size = math.prod(shape) * dtype.itemsize
    bits = (torch.arange(size) * (number + 3) % 251).to(torch.uint8)
    flat = (bits & 1 if dtype is torch.bool else bits).view(dtype)
    local = (
        flat.view(shape[::-1]).permute(list(range(len(shape)))[::-1])
        if turned
        else flat.view(shape)
    )
    full = tuple(local.shape)
    shifted = tuple(size + 7 for size in full)  # the piece lies somewhere in a larger tensor
    place = Box(tuple(7 for _ in full), full)
    return Piece(unit, ("w", number), shifted, (place,) if local.numel() else (), local)


def collect(
    plan: SavePlan, pieces: list[Piece], stager: Stager, buffer: SharedBuffer
) -> dict[str, bytearray]:
    files: dict[str, bytearray] = {}
    for wave, images in enumerate(plan.images):
        stager.stage(plan, pieces, wave).wait()
        at = 0
        for image in images:
            assert image.start >= at
            assert image.start % 4096 == 0
            for blob in image.archives:
                assert image.start < blob.start < blob.stop < image.start + image.size_bytes
                crc = zlib.crc32(buffer.memory[blob.start : blob.stop]).to_bytes(4, "little")
                for place in blob.crc_at:
                    buffer.memory[place : place + 4] = crc
            at = image.start + image.size_bytes
            assert image.path not in files
            files[image.path] = bytearray(buffer.memory[image.start : at])
        assert at <= plan.buffer_bytes
        see_parts(plan, pieces, wave, stager, buffer)
    return files


def see_parts(
    plan: SavePlan, pieces: list[Piece], wave: int, stager: Stager, buffer: SharedBuffer
) -> None:
    """Each part of a frozen weight, wherever it is cut, is fetched to where it was staged."""
    for sample in plan.samples[wave]:
        staged = bytes(buffer.memory[sample.step.start : sample.step.end])
        buffer.memory[sample.step.start : sample.step.end] = bytes(len(staged))
        steps = [sample.part(number) for number in range(len(sample))]
        found = stager.fetch(plan, pieces, steps)
        assert [
            (step.start, step.start + len(data)) for step, data in zip(steps, found, strict=True)
        ] == list(sample.ranges())
        assert b"".join(found) == staged


def see_frozen_apart(plan: SavePlan, pieces: list[Piece]) -> None:
    """Files hold frozen weights or others, and the others come first."""
    written = [image.path for wave in plan.images for image in wave]
    trained = [image.path for wave in plan.trained for image in wave]
    assert trained == written[: len(trained)]
    assert len(plan.trained) >= 1
    steps = {step.piece for wave in plan.samples for step in (sample.step for sample in wave)}
    assert plan.frozen_bytes == sum(
        (step.end - step.start)
        for wave, samples in zip(plan.copies, plan.samples, strict=True)
        for step in wave[len(wave) - len(samples) :]
    )
    assert all(pieces[number].frozen for number in steps)
    for unit, record in plan.record_units.items():
        for number, *_, file, _, _ in record["chunks"]:
            piece = pieces[record["tensors"][number]["path"][1]]
            path = record["data_files"][file]
            assert ((f"{unit}/{path}" if unit else path) in trained) != piece.frozen


@settings(max_examples=examples(25), deadline=None)
@given(
    tensors=st.lists(TENSORS, max_size=12),
    limited=st.booleans(),
    frozen=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_what_is_laid_out_comes_back(
    tensors: list[tuple[list[int], torch.dtype, bool, bool, str]],
    limited: bool,
    frozen: list[bool],
) -> None:
    pieces = [
        make(number, shape, dtype, turned, unit)
        for number, (shape, dtype, turned, _, unit) in enumerate(tensors)
    ]
    held = nn.Parameter(torch.zeros(1), requires_grad=False)
    pieces = [
        dataclasses.replace(piece, watched=watched_by(held)) if cold else piece
        for piece, cold in zip(pieces, frozen, strict=False)
    ]
    owned = [own for _, _, _, own, _ in tensors]
    limit = MIN_LIMIT_BYTES if limited else None
    plan = plan_save(pieces, owned, rank=0, limit_bytes=limit)
    assert limit is None or plan.buffer_bytes <= limit
    see_frozen_apart(plan, pieces)
    buffer = SharedBuffer()
    stager = Stager(buffer)
    files = collect(plan, pieces, stager, buffer)
    stager.close()
    buffer.close()

    found = {n: torch.zeros_like(piece.local) for n, piece in enumerate(pieces)}
    filled: dict[int, int] = defaultdict(int)
    for unit, record in plan.record_units.items():
        for number, offsets, sizes, file, start, length in record["chunks"]:
            path = record["data_files"][file]
            data = bytes(files[f"{unit}/{path}" if unit else path][start : start + length])
            assert zipfile.ZipFile(BytesIO(data)).testzip() is None
            part = stock_load(data)
            assert list(part.shape) == sizes
            target = found[record["tensors"][number]["path"][1]]
            for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                target = target.narrow(axis, offset - 7, size)
            target.copy_(part)
            filled[record["tensors"][number]["path"][1]] += part.numel()
    for number, (piece, own) in enumerate(zip(pieces, owned, strict=True)):
        assert filled[number] == (piece.elements if own else 0)
        if own and piece.elements:
            expected = piece.local.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(found[number].contiguous().view(-1).view(torch.uint8), expected)
