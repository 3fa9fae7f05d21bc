"""`pytorch_model.bin`: a full state dict as `torch.save` writes it.

Source: torch.save of 2.13 for the records; Transformers for the names of sharded files.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.layouts.torch_pickles import state_dict_pickle, tensor_pickle
from ckptkit.layouts.weight_index import index_file
from ckptkit.layouts.zip_parts import ZipParts
from ckptkit.planning.files import numbered, split_by_size
from ckptkit.planning.plan import OutputFile, Product, contiguous

INDEX_NAME = "pytorch_model.bin.index.json"


def layout_torch_full(products: Sequence[Product], max_file_bytes: int) -> list[OutputFile]:
    """Lays tensors out as `pytorch_model.bin`, or as several files with an index.

    `torch.load(weights_only=True)` opens each file as a dictionary of tensors.

    Returns:
        The weight files, and their index where there are several.
    """
    groups = split_by_size(products, max_file_bytes)
    names = numbered("pytorch_model", "bin", len(groups))
    files = [
        contiguous(name, archive_of(group, prefix=name.rpartition(".")[0]).rows)
        for name, group in zip(names, groups, strict=True)
    ]
    if len(files) > 1:
        files.append(index_file(INDEX_NAME, names, groups))
    return files


def archive_of(products: Sequence[Product], *, prefix: str) -> ZipParts:
    """Returns the archive of a state dict."""
    parts = ZipParts(prefix)
    parts.add_bytes("data.pkl", state_dict_pickle([product.spec for product in products]))
    _add_all(parts, products)
    return parts


def archive_of_one(product: Product, first_segment: int) -> ZipParts:
    """Returns the archive of a single tensor, as it lies in a `.distcp` file."""
    parts = ZipParts("archive", first_segment)
    parts.add_bytes("data.pkl", tensor_pickle(product.spec))
    _add_all(parts, [product])
    return parts


def _add_all(parts: ZipParts, products: Sequence[Product]) -> None:
    parts.add_bytes("byteorder", b"little")
    for number, product in enumerate(products):
        parts.add_tensor(f"data/{number}", product.spec, product.body)
    parts.add_bytes("version", b"3\n")
    parts.finish()
