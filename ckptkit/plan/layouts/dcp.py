"""`pytorch_model_fsdp_0/`: a model as torch.distributed.checkpoint and accelerate write it."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, StoredTensor, metadata_pickle
from ckptkit.plan.layouts.torch import archive_of_one
from ckptkit.plan.layouts.zip import Row
from ckptkit.plan.plan import Literal, OutputFile, Product, contiguous, split_by_size

FOLDER = "pytorch_model_fsdp_0"
CONTAINER = "model"


def layout_dcp(products: Sequence[Product], max_file_bytes: int) -> list[OutputFile]:
    """Lays tensors out so that `dcp.load` and `accelerator.load_state` read them.

    Keys are `model.` and the name; every tensor is one chunk, which any number of ranks may
    load their parts of.

    Returns:
        The data files, and `.metadata`.
    """
    files, stored = [], []
    for number, group in enumerate(split_by_size(products, max_file_bytes)):
        name = f"__0_{number}.distcp"
        rows: list[Row] = []
        at = 0
        for product in group:
            parts = archive_of_one(product, len(rows))
            stored.append(_stored(product, name, at, parts.size_bytes))
            rows += parts.rows
            at += parts.size_bytes
        files.append(contiguous(f"{FOLDER}/{name}", rows))
    metadata = metadata_pickle(stored, [])
    row = (len(metadata), Literal(metadata), None)
    files.append(contiguous(f"{FOLDER}/{METADATA_NAME}", [row]))
    return files


def _stored(product: Product, file: str, start: int, length: int) -> StoredTensor:
    spec = product.spec
    whole = ((0,) * len(spec.shape), spec.shape, file, start, length)
    return StoredTensor((CONTAINER, spec.name), spec.dtype.name, spec.shape, (whole,))
