"""The states of an optimizer, as `optimizer.bin` or in `optimizer_0/`.

`optimizer.bin` is the FULL state dict of FSDP: `state` by the names of parameters and what is kept
of each, and `param_groups`. `optimizer_0/` is what accelerate writes with SHARDED_STATE_DICT.

Source: accelerate/utils/fsdp_utils.py (`save_fsdp_optimizer`), torch.save of 2.13,
torch/distributed/checkpoint/_traverse.py for the paths of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.core.index import KeyPath
from ckptkit.plan.layouts.dcp_metadata import (
    METADATA_NAME,
    StoredObject,
    StoredTensor,
    metadata_pickle,
)
from ckptkit.plan.layouts.opcodes import pickled
from ckptkit.plan.layouts.torch import Stored, archive_of_one, value_opcodes
from ckptkit.plan.layouts.zip import Row, ZipParts
from ckptkit.plan.optimizer import OPTIMIZER, OptimizerStates, StateTensor
from ckptkit.plan.plan import Literal, OutputFile, contiguous, split_by_size

FILE = "optimizer.bin"
FOLDER = "optimizer_0"
_LISTS = ("param_groups",)  # where keys that are numbers are positions


def layout_optimizer_file(states: OptimizerStates) -> OutputFile:
    """Lays the states out as one file that `torch.load(weights_only=True)` opens."""
    tree: dict[Any, Any] = {}
    for number, tensor in enumerate(states.tensors):
        _put(tree, tensor.path, Stored(tensor.product.spec, str(number)))
    for path, value in states.values.items():
        _put(tree, path, value)
    parts = ZipParts("optimizer")
    parts.add_bytes("data.pkl", pickled(value_opcodes(_with_lists(tree))))
    parts.add_bytes("byteorder", b"little")
    for number, tensor in enumerate(states.tensors):
        product = tensor.product
        parts.add_tensor(f"data/{number}", product.spec, product.body)
    parts.add_bytes("version", b"3\n")
    parts.finish()
    return contiguous(FILE, parts.rows)


def layout_optimizer_folder(states: OptimizerStates, max_file_bytes: int) -> list[OutputFile]:
    """Lays the states out so that `dcp.load` and `accelerator.load_state` read them.

    Returns:
        The data files, and `.metadata`.
    """
    by_name = {tensor.product.spec.name: tensor for tensor in states.tensors}
    files: list[OutputFile] = []
    tensors: list[StoredTensor] = []
    objects: list[StoredObject] = []
    groups = split_by_size([tensor.product for tensor in states.tensors], max_file_bytes)
    for number, group in enumerate(groups or [[]]):
        name = f"__0_{number}.distcp"
        rows: list[Row] = []
        at = 0
        for product in group:
            parts = archive_of_one(product, len(rows))
            tensors.append(_stored(by_name[product.spec.name], name, at, parts.size_bytes))
            rows += parts.rows
            at += parts.size_bytes
        for path, value in states.values.items() if number == 0 else ():
            parts = _archive_of_value(value, len(rows))
            objects.append(StoredObject((OPTIMIZER, *path), name, at, parts.size_bytes))
            rows += parts.rows
            at += parts.size_bytes
        files.append(contiguous(f"{FOLDER}/{name}", rows))
    metadata = metadata_pickle(tensors, objects)
    row = (len(metadata), Literal(metadata), None)
    files.append(contiguous(f"{FOLDER}/{METADATA_NAME}", [row]))
    return files


def _stored(tensor: StateTensor, file: str, start: int, length: int) -> StoredTensor:
    spec = tensor.product.spec
    whole = ((0,) * len(spec.shape), spec.shape, file, start, length)
    return StoredTensor((OPTIMIZER, *tensor.path), spec.dtype.name, spec.shape, (whole,))


def _archive_of_value(value: Any, first_segment: int) -> ZipParts:
    parts = ZipParts("archive", first_segment)
    parts.add_bytes("data.pkl", pickled(value_opcodes(value)))
    parts.add_bytes("byteorder", b"little")
    parts.add_bytes("version", b"3\n")
    parts.finish()
    return parts


def _put(tree: dict[Any, Any], path: KeyPath, value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def _with_lists(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    made = dict(tree)
    for key in _LISTS:
        inside = made.get(key)
        if isinstance(inside, dict) and set(inside) == set(range(len(inside))):
            made[key] = _in_order(inside)
    return made


def _in_order(inside: Mapping[int, Any]) -> Sequence[Any]:
    return [inside[position] for position in range(len(inside))]
