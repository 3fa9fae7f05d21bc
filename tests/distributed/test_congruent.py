"""Weights of a step lie where a model folder has them, modulo a block."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

import ckptkit

SCRIPT = Path(__file__).with_name("congruent_run.py")
CASES = (
    *("fsdp2", "hsdp", "fsdp1_flat", "fsdp1_orig", "ddp"),
    *("waves", "frozen", "mixed", "tied", "llama"),
)
BLOCK_BYTES, LARGE_BYTES = 4096, 64 << 10

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(
    run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Saves a case on four ranks, once for all tests."""
    folder: Path = tmp_path_factory.mktemp("congruent")

    def save(case: str) -> Path:
        place = folder / f"save_{case}"
        if not place.exists():
            run_ranks(SCRIPT, 4, folder, f"save:{case}")
        return place

    return save


STEP = Path("run/checkpoint-1/pytorch_model_fsdp_0")


class Stored(NamedTuple):
    """A piece of a weight, as stock torch finds it."""

    names: list[str]  # several of a tied weight
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # its first byte in its file
    size_bytes: int


def stored_pieces(step: Path) -> list[Stored]:
    metadata = FileSystemReader(step).read_metadata()
    found: dict[tuple[str, int], Stored] = {}
    for index, info in metadata.storage_data.items():
        name, place = index.fqn.removeprefix("model."), (info.relative_path, info.offset)
        if place in found:
            found[place].names.append(name)
            continue
        tensor: Any = metadata.state_dict_metadata[index.fqn]
        (chunk,) = [one for one in tensor.chunks if one.offsets == index.offset]
        data = (step / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            member = archive.getinfo("archive/data/0")
        header = data[member.header_offset : member.header_offset + 30]
        start = member.header_offset + 30 + sum(struct.unpack("<2H", header[26:30]))
        bounds = tuple(chunk.offsets), tuple(chunk.sizes)
        found[place] = Stored([name], *bounds, info.offset + start, member.file_size)
    return list(found.values())


def starts_in(file: Path) -> dict[str, tuple[list[int], int]]:
    """Returns shape and first byte of each tensor of a file of safetensors."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {k: (v["shape"], 8 + length + v["data_offsets"][0]) for k, v in header.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("fsdp2")
def test_large_pieces_lie_in_the_step_where_the_folder_has_them_modulo_a_block(
    case: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    step = saved(case) / STEP
    ckptkit.consolidate(step.parent, tmp_path / "out", share="never")
    truth = load_file(saved(case) / "truth.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, truth[name]) for name, value in written.items())
    folder = starts_in(tmp_path / "out" / "model.safetensors")
    pieces, congruent = stored_pieces(step), 0
    for piece in pieces:
        places = [folder[name] for name in piece.names if name in folder]
        if piece.size_bytes < LARGE_BYTES or not places:
            continue
        differences = []
        for shape, at in places:
            row_bytes = piece.size_bytes // piece.sizes[0]
            assert list(piece.sizes[1:]) == shape[1:], piece.names
            differences.append(at + piece.offsets[0] * row_bytes - piece.start)
        # Where both names of a tied weight are in the folder, one is copied.
        assert any(one % BLOCK_BYTES == 0 for one in differences), piece.names
        congruent += piece.size_bytes
    total = sum(piece.size_bytes for piece in pieces)
    assert congruent > 0.8 * total, "most bytes have to be in large pieces"
    # The headers of an archive come on top.
    padding = sum(path.stat().st_size for path in step.glob("*.distcp")) - total
    assert padding < len(pieces) * (BLOCK_BYTES + 2048)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("fsdp2")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_loads_a_step_that_was_placed_so(
    case: str, saved: Callable[[str], Path]
) -> None:
    truth = load_file(saved(case) / "truth.safetensors")
    loaded: dict[str, Any] = {f"model.{name}": torch.zeros_like(t) for name, t in truth.items()}
    dcp.load(loaded, checkpoint_id=saved(case) / STEP)
    for name, value in truth.items():
        assert torch.equal(loaded[f"model.{name}"], value), name
