"""Folders that torch.distributed.checkpoint and accelerate load: a model's, and an optimizer's.

Source: torch/distributed/checkpoint/_traverse.py for the paths of values; accelerate/utils/
fsdp_utils.py (`save_fsdp_model`, `save_fsdp_optimizer`) for the names with SHARDED_STATE_DICT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.core.index import KeyPath
from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, DcpObject, DcpTensor, make_metadata
from ckptkit.plan.layouts.torch import Row, build_tensor_archive, build_value_archive
from ckptkit.plan.optimizer_states import OPTIMIZER, OptimizerStates
from ckptkit.plan.plan import Literal, OutputFile, Product, lay_out_file, split_by_size

MODEL_FOLDER = "pytorch_model_fsdp_0"
CONTAINER = "model"
OPTIMIZER_FOLDER = "optimizer_0"


def layout_dcp(products: Sequence[Product], max_file_bytes: int) -> list[OutputFile]:
    """Lays tensors out so that `dcp.load` and `accelerator.load_state` read them.

    Keys are `model.` and the name; every tensor is one chunk, which any number of ranks may
    load their parts of.

    Returns:
        The data files, and `.metadata`.
    """
    tensors = [((CONTAINER, product.spec.name), product) for product in products]
    return _lay_out(MODEL_FOLDER, tensors, {}, max_file_bytes)


def layout_optimizer_folder(states: OptimizerStates, max_file_bytes: int) -> list[OutputFile]:
    """Lays the states of an optimizer out so that `dcp.load` and `load_state` read them.

    Returns:
        The data files, and `.metadata`.
    """
    tensors = [((OPTIMIZER, *tensor.path), tensor.product) for tensor in states.tensors]
    values = {(OPTIMIZER, *path): value for path, value in states.values.items()}
    return _lay_out(OPTIMIZER_FOLDER, tensors, values, max_file_bytes)


def _lay_out(
    folder: str,
    tensors: Sequence[tuple[KeyPath, Product]],
    values: Mapping[KeyPath, Any],
    max_file_bytes: int,
) -> list[OutputFile]:
    """Fills data files with tensors, puts the values into the first, and adds `.metadata`."""
    paths = {product.spec.name: path for path, product in tensors}
    files: list[OutputFile] = []
    stored: list[DcpTensor] = []
    objects: list[DcpObject] = []
    groups = split_by_size([product for _, product in tensors], max_file_bytes)
    for number, group in enumerate(groups):
        name = f"__0_{number}.distcp"
        rows: list[Row] = []
        at = 0
        for product in group:
            archive = build_tensor_archive(product, len(rows))
            stored.append(
                _describe(product, paths[product.spec.name], name, at, archive.size_bytes)
            )
            rows += archive.rows
            at += archive.size_bytes
        for path, value in values.items() if number == 0 else ():
            archive = build_value_archive(value, len(rows))
            objects.append(DcpObject(path, name, at, archive.size_bytes))
            rows += archive.rows
            at += archive.size_bytes
        files.append(lay_out_file(f"{folder}/{name}", rows))
    metadata = make_metadata(stored, objects)
    row = (len(metadata), Literal(metadata), None)
    return [*files, lay_out_file(f"{folder}/{METADATA_NAME}", [row])]


def _describe(product: Product, path: KeyPath, file: str, start: int, length: int) -> DcpTensor:
    spec = product.spec
    whole = ((0,) * len(spec.shape), spec.shape, file, start, length)
    return DcpTensor(path, spec.dtype.name, spec.shape, (whole,))
