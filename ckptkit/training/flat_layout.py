"""A file beside a checkpoint that tells what FSDP1's flat parameters are made of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist
from torch import nn

from ckptkit.core.arguments import check_names
from ckptkit.core.crc import crc32
from ckptkit.core.errors import UsageError
from ckptkit.core.manifest import FLAT_LAYOUT
from ckptkit.storage.syscalls import detect_capabilities, sync_directory
from ckptkit.training.fsdp1 import flat_units, layout_facts
from ckptkit.training.names import parallel_prefixes
from ckptkit.writer.durable import put_file

_VERSION = 1


@check_names
def write_flat_layout(model: nn.Module, folder: str | os.PathLike[str]) -> Path | None:
    """Writes which parameters the flat parameters of FSDP1 are made of.

    A checkpoint of LOCAL_STATE_DICT holds flat parameters alone, without names or shapes. Call
    this once with the model as it is wrapped, and with the folder that the files of all ranks are
    saved to; `ckptkit consolidate` finds the file there. It may be called on every rank: nothing
    is communicated, and only rank 0 writes.

    Args:
        model: The model, wrapped by FSDP1, by itself or through accelerate.
        folder: Of the checkpoint; made where it is not there.

    Returns:
        The file, or None on other ranks than 0.

    Raises:
        UsageError: If no module is wrapped by FSDP1.
        OSError: If the file cannot be written.
    """
    units = flat_units(model, parallel_prefixes(model))
    if not units:
        raise UsageError(
            "no module of the model is wrapped by FSDP1",
            where="write_flat_layout",
            hint="pass the model that FullyShardedDataParallel, or accelerate's prepare, returned",
        )
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    facts = layout_facts(units)
    document = {
        "layout_version": _VERSION,
        "flat_parameters": facts,
        "crc32": crc32(json.dumps(facts, sort_keys=True).encode()),
    }
    path = Path(folder, FLAT_LAYOUT)
    path.parent.mkdir(parents=True, exist_ok=True)
    _put(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())
    return path


def _put(path: Path, data: bytes) -> None:
    """Puts a file in the place of an earlier one, if there is one, whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)  # of an earlier process of that number, which was killed
    put_file(new, data)
    new.replace(path)
    sync_directory(path.parent, detect_capabilities())
