"""A source that is another one after it was checked: what was checked is what is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.storage.local.source import LocalSource

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CASES = {
    "fsdp2_hsdp": "checkpoint/__0_0.distcp",
    "hf_tied": "checkpoint/model.safetensors",
    "torch_nested": "checkpoint/last.pt",
    "zero1_bf16": "checkpoint/global_step2/mp_rank_00_model_states.pt",
}


def replace_with(file: Path, data: bytes, *, in_place: bool) -> None:
    if in_place:
        with file.open("r+b") as opened:
            opened.write(data)
            opened.truncate(len(data))
        return
    new = file.with_name("new")
    new.write_bytes(data)
    new.rename(file)


def flipped(data: bytes) -> bytes:
    """Bits of the elements, which lie in the middle of a file."""
    changed = bytearray(data)
    for at in range(len(data) // 3, 2 * len(data) // 3, 7):
        changed[at] ^= 0x40
    return bytes(changed)


@pytest.mark.parametrize("fixture", CASES)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "by a rename"])
@pytest.mark.parametrize("change", [flipped, lambda data: data[:-100], lambda data: data + data])
def test_a_file_that_changes_after_its_header_was_read_is_noticed(
    fixture: str, in_place: bool, change: Callable[[bytes], bytes], tmp_path: Path, out: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / fixture, source)
    file = source / CASES[fixture]
    before = file.read_bytes()
    reads = LocalSource.read_into
    done: list[bool] = []

    def change_first(self: LocalSource, path: str, start: int, target: memoryview) -> None:
        if not done:
            done.append(True)
            replace_with(file, change(before), in_place=in_place)
            later = file.stat().st_mtime_ns + 1_000_000_000
            os.utime(file, ns=(later, later))
        reads(self, path, start, target)

    monkeypatch.setattr(LocalSource, "read_into", change_first)
    with pytest.raises(CkptkitError):
        ckptkit.consolidate(source / "checkpoint", out)
    assert done
    assert list(out.parent.iterdir()) == []


def test_a_configuration_that_grows_while_it_is_read_is_cut_off(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, bounded: Callable[..., Any]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "hf_tied" / "checkpoint", source)
    stat = LocalSource.stat

    def grow_after(self: LocalSource, path: str) -> Any:
        found = stat(self, path)
        if path.endswith("config.json"):
            with (source / path).open("ab") as file:
                file.truncate(found.size_bytes + (8 << 20))
        return found

    monkeypatch.setattr(LocalSource, "stat", grow_after)
    with bounded(seconds=60, most_bytes=64 << 20):
        try:
            ckptkit.consolidate(source, out)
        except CkptkitError:
            assert list(out.parent.iterdir()) == []
