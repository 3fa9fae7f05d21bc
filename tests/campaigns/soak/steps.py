"""The steps of a run at rest, read with torch's own reader and compared with the shadow."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptkit
from tests.campaigns.soak.models import SERIAL, Shadow, Tensors
from tests.object_store import Bucket

MANIFEST = "ckptkit.json"


@dataclass(frozen=True)
class Compared:
    """What came of a comparison."""

    serials: tuple[int, ...]  # of the saves that the step is from; one, if all is well
    size_bytes: int  # what was compared
    wrong: str


def complete_steps(run: Path) -> list[str]:
    """Returns the names of the folders in a run that look whole."""
    return sorted(
        path.name
        for path in (run.iterdir() if run.is_dir() else ())
        if not path.name.startswith(".") and (path / MANIFEST).is_file()
    )


def fetch_run(bucket: Bucket, prefix: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for key in bucket.keys(f"{prefix}/"):
        path = folder / key.removeprefix(f"{prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bucket.get(key))


def number_of(step: Path) -> int:
    source: dict[str, int] = json.loads((step / MANIFEST).read_text())["source"]
    return source["step"]


def compare_step(path: Path, shadow: Shadow) -> Compared:
    """Compares a step with what the shadow has computed for its number, bit by bit."""
    report = ckptkit.verify(path)
    if not report.ok:
        return Compared((), 0, f"{path} does not verify: {report}")
    found = stored_tensors(path)
    stamps = [found.pop(name) for name in list(found) if name.endswith(f".{SERIAL}")]
    serials = {int(one) for stamp in stamps for one in set(stamp.flatten().tolist())}
    truth = shadow.tensors(number_of(path))
    wrong = difference(found, truth)
    if len(serials) != 1:
        wrong = wrong or f"the optimizer is of the saves {sorted(serials)}"
    return Compared(tuple(sorted(serials)), size_of(found), wrong and f"{path.name}: {wrong}")


def stored_tensors(path: Path) -> Tensors:
    """Reads all tensors of a step with stock `dcp.load`, without a process group."""
    found: Tensors = {}
    for metadata in sorted(path.rglob(".metadata")):
        reader = FileSystemReader(metadata.parent)
        stored = reader.read_metadata().state_dict_metadata
        into = {
            name: torch.empty(one.size, dtype=one.properties.dtype)
            for name, one in stored.items()
            if isinstance(one, TensorStorageMetadata)
        }
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            dcp.load(into, storage_reader=reader, no_dist=True)
        found |= into
    return {name: tensor for name, tensor in found.items() if name.startswith(_COMPARED)}


_COMPARED = ("model.", "optimizer.state.")


def difference(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> str:
    """Returns the first difference between two sets of tensors, empty for none."""
    if found.keys() != truth.keys():
        return f"other names: {sorted(found.keys() ^ truth.keys())[:6]}"
    for name, tensor in truth.items():
        other = found[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            return f"{name} is {other.dtype} {tuple(other.shape)}"
        if _bits(other) != _bits(tensor):
            return f"{name} differs"
    return ""


def output_tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def adapter_of(model: Tensors) -> Tensors:
    """Returns the adapter in a model, under the names of its file."""
    return {n.replace(".default.", "."): t for n, t in model.items() if ".lora_" in n}


def size_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
