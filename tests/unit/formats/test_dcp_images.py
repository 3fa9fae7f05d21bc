"""`.distcp` files with a safetensors image that does not hold what `.metadata` says."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

import ckptkit
from ckptkit.core.errors import FormatError, IncompleteCheckpointError, InputError, UnsupportedError

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
CASE = FIXTURES / "dcp_images_fsdp2" / "checkpoint"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(CASE, tmp_path / "run")
    return tmp_path / "run"


def consolidated(source: Path, out: Path) -> dict[str, torch.Tensor]:
    ckptkit.consolidate(source, out, names="live")
    return load_file(out / "model.safetensors")


def image_of(data: bytes) -> tuple[int, int, dict[str, Any]]:
    """Where the image of a data file begins, where its tensors do, and its header."""
    start = data.rfind(b"PK\5\6") + 22 if b"PK\5\6" in data else 0
    (length,) = struct.unpack_from("<Q", data, start)
    return start, start + 8 + length, json.loads(data[start + 8 : start + 8 + length])


def with_header(file: Path, change: dict[str, Any]) -> None:
    data = file.read_bytes()
    start, tensors, header = image_of(data)
    raw = json.dumps(header | change).encode()
    file.write_bytes(data[:start] + struct.pack("<Q", len(raw)) + raw + data[tensors:])


def test_bytes_after_the_image_are_refused(run: Path) -> None:
    file = run / "__1_0.distcp"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(FormatError, match="belong to no tensor"):
        ckptkit.inspect(run)


def test_an_image_of_another_save_is_refused(run: Path) -> None:
    shutil.copy(run / "__0_0.distcp", run / "__1_0.distcp")
    with pytest.raises(InputError):
        ckptkit.inspect(run)


@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        ({"__metadata__": {}}, UnsupportedError, "no 'DCP_SHARDING_INFO'"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "{}"}}, UnsupportedError, "'DCP_VERSION' is None"),
    ],
)
def test_an_image_that_does_not_say_where_its_pieces_belong_is_refused(
    change: dict[str, Any], error: type[InputError], found: str, run: Path
) -> None:
    with_header(run / "__1_0.distcp", change)
    with pytest.raises(error, match=found):
        ckptkit.inspect(run)


def test_another_dtype_than_in_metadata_is_refused(run: Path) -> None:
    file = run / "__0_0.distcp"
    _, _, header = image_of(file.read_bytes())
    name, fields = next((n, f) for n, f in header.items() if f.get("dtype") == "F32" and f["shape"])
    with_header(file, {name: fields | {"dtype": "I32"}})
    with pytest.raises(FormatError, match=r"holds int32 .* against float32"):
        ckptkit.inspect(run)


def test_another_place_than_in_metadata_is_refused(run: Path, tmp_path: Path) -> None:
    file = run / "__1_0.distcp"
    _, _, header = image_of(file.read_bytes())
    texts = header["__metadata__"]
    places = json.loads(texts["DCP_SHARDING_INFO"])
    places["model.embed.weight"]["saved_offsets"] = [0, 0]
    with_header(file, {"__metadata__": texts | {"DCP_SHARDING_INFO": json.dumps(places)}})
    with pytest.raises(IncompleteCheckpointError, match=r"in its place is that from \[0, 0\] on"):
        consolidated(run, tmp_path / "out")


class _TwoPieces(dcp.DefaultSavePlanner):
    """Makes one rank write a tensor in two pieces, as a ShardedTensor with two shards does."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        (item,) = plan.items
        whole = item.tensor_data
        assert whole is not None
        items = [
            type(item)(
                index=MetadataIndex("model.w", torch.Size([row]), row),
                type=WriteItemType.SHARD,
                tensor_data=type(whole)(
                    ChunkStorageMetadata(torch.Size([row]), torch.Size([1])),
                    whole.properties,
                    whole.size,
                ),
            )
            for row in (0, 1)
        ]
        return type(plan)(items, plan.storage_data, plan.planner_data)

    def resolve_data(self, write_item: Any) -> Any:
        row = write_item.index.offset[0]
        return torch.tensor([1.0, 2.0])[row : row + 1].clone()


@pytest.mark.filterwarnings("ignore")
def test_a_piece_that_torch_overwrote_in_its_file_is_missed(tmp_path: Path) -> None:
    """Torch keeps the pieces of a file by name, so of two of one name the first is lost."""
    writer = FileSystemWriter(
        tmp_path / "run", serialization_format=SerializationFormat.SAFETENSORS
    )
    state = {"model": {"w": torch.tensor([1.0, 2.0])}}
    dcp.save(state, storage_writer=writer, planner=_TwoPieces(), no_dist=True)
    with pytest.raises(IncompleteCheckpointError, match=r"piece from \[0\] on is not in"):
        consolidated(tmp_path / "run", tmp_path / "out")
