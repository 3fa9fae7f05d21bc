"""Shapes that overflow, are negative, or stand for more elements than there are bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

import ckptkit
from ckptkit.core.errors import CkptkitError, FormatError

Copied = Callable[..., Path]
Refusal = Callable[..., CkptkitError]
Changing = Callable[[Path, Callable[[Metadata], None]], None]
SHARDED = "fsdp2_hsdp"


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((2**40, 2**40), "overflows"),
        ((-3, 4), "negative"),
        ((1,) * 5_000, "5,000 dimensions"),
        ((10**9,) * 3, "overflows"),
    ],
)
def test_a_hostile_shape_in_metadata_is_refused(
    shape: tuple[int, ...], told: str, copied: Copied, refusal: Refusal, change_metadata: Changing
) -> None:
    checkpoint = copied(SHARDED)

    def reshape(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.up.weight"].size = torch.Size(shape)  # type: ignore[union-attr]

    change_metadata(checkpoint, reshape)
    error = refusal(checkpoint, FormatError)
    assert "model.up.weight" in str(error)
    assert told in str(error)


SHAPES = (
    [2**63], [2**64], [2**32, 2**32], [2**62, 2, 2], [0, 2**63], [-1], [-2, -3], [10**400],
    [1.0], ["2"], [None], [[2]], {"0": 2}, [2**31] * 64, [1] * 65
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: repr(shape)[:30])
def test_no_shape_of_a_safetensors_file_is_believed(
    shape: Any, source: Path, out: Path, bounded: Callable[..., Any]
) -> None:
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}
    raw = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
    with bounded(seconds=5, most_bytes=32 << 20), pytest.raises(CkptkitError):
        ckptkit.consolidate(source, out)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("size", [2**40, 2**62])
def test_a_large_tensor_of_few_bytes_is_incomplete_and_takes_no_memory(
    size: int, copied: Copied, out: Path, change_metadata: Changing, bounded: Callable[..., Any]
) -> None:
    checkpoint = copied(SHARDED)

    def enlarge(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.up.weight"].size = torch.Size((size,))  # type: ignore[union-attr]

    change_metadata(checkpoint, enlarge)
    with bounded(seconds=10, most_bytes=64 << 20), pytest.raises(CkptkitError):
        ckptkit.consolidate(checkpoint, out)
    assert list(out.parent.iterdir()) == []
