"""The frozen base under an adapter is written once, whatever the model is wrapped in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit

SCRIPT = Path(__file__).with_name("frozen_run.py")
KINDS = ("fsdp2", "fsdp1_flat", "fsdp1_orig", "ddp")


@pytest.mark.distributed
@pytest.mark.slow
def test_later_steps_are_whole_though_only_the_adapter_is_written(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, *(f"base:{kind}" for kind in KINDS), "packed")
    for kind in KINDS:
        older, newer = sorted(
            (tmp_path / f"base_{kind}" / "run").glob("checkpoint-*"),
            key=lambda path: path.stat().st_mtime,
        )
        assert ckptkit.verify(older).ok
        assert ckptkit.verify(newer).ok
        damage(max(older.rglob("*.distcp"), key=lambda path: path.stat().st_size))
        assert not ckptkit.verify(older).ok


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
