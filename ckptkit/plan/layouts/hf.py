"""The weights of a Hugging Face folder: safetensors files and their index.

Sources: the safetensors format description; huggingface_hub `split_torch_state_dict_into_shards`
for file names and the index.

The index of weights that are split over several files.

Source: huggingface_hub `split_torch_state_dict_into_shards`; Transformers fails without the key
`metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ckptkit.core.errors import CannotPlanError
from ckptkit.core.object_parts import MIN_PART_BYTES
from ckptkit.plan.plan import (
    Body,
    Literal,
    OutputFile,
    Product,
    TensorSpec,
    contiguous,
    name_order,
    numbered,
    split_by_size,
)


def index_file(path: str, names: Sequence[str], groups: Sequence[Sequence[Product]]) -> OutputFile:
    """Returns the index `path`, which says in which file of `names` each tensor lies."""
    specs = [product.spec for group in groups for product in group]
    document = {
        "metadata": {
            "total_parameters": sum(spec.elements for spec in specs),
            "total_size": sum(spec.size_bytes for spec in specs),
        },
        "weight_map": {
            product.spec.name: name
            for name, group in zip(names, groups, strict=True)
            for product in group
        },
    }
    data = (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    return contiguous(path, [(len(data), Literal(data), None)])


STEM = "model"
ADAPTER_STEM = "adapter_model"
SINGLE_NAME = f"{STEM}.safetensors"
INDEX_NAME = f"{SINGLE_NAME}.index.json"
DATA_ALIGNMENT = 4096
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_METADATA_KEY = "__metadata__"  # what a header calls its own facts; no tensor may be named so
_METADATA = {"format": "pt"}


def layout_hf_weights(products: Sequence[Product], max_file_bytes: int) -> list[OutputFile]:
    """Lays tensors out as `model.safetensors`, or as several files with an index.

    Files are filled in the order of the names, numbers in them by their value: what lies where
    depends on the model alone, and not on which rank came first to save which tensor.

    Returns:
        The weight files, and their index where there are several.
    """
    ordered = sorted(products, key=lambda product: name_order(product.spec.name))
    groups = split_by_size(ordered, max_file_bytes)
    names = numbered(STEM, "safetensors", len(groups))
    return layout_hf_files(list(zip(names, groups, strict=True)))


def layout_hf_files(groups: Sequence[tuple[str, Sequence[Product]]]) -> list[OutputFile]:
    """Lays tensors out in files of which it is settled what each holds.

    Args:
        groups: `(name of the file, its tensors)`.

    Returns:
        The weight files, and their index unless all lies in `model.safetensors`.
    """
    files = [_weights_file(*group) for group in groups]
    names = [name for name, _ in groups]
    if names != [SINGLE_NAME]:
        files.append(index_file(INDEX_NAME, names, [products for _, products in groups]))
    return files


def layout_adapter(products: Sequence[Product]) -> OutputFile:
    """Lays the tensors of an adapter out as PEFT reads them: always one file."""
    return _weights_file(f"{ADAPTER_STEM}.safetensors", products)


def _weights_file(path: str, products: Sequence[Product]) -> OutputFile:
    ordered = sorted(products, key=_order)
    header = _header(path, [product.spec for product in ordered])
    bodies: list[tuple[int, Body, TensorSpec | None]] = [(len(header), Literal(header), None)]
    bodies += [(product.spec.size_bytes, product.body, product.spec) for product in ordered]
    return contiguous(path, bodies)


def _order(product: Product) -> tuple[int, bool, str]:
    """Puts larger item sizes first, which aligns every tensor without holes, as the format demands.

    Of one item size, those come first that are too small for a part of an object: together they
    make one part that is sent, and what a store can copy by itself is not interrupted by them.
    """
    spec = product.spec
    return -spec.dtype.itemsize, spec.size_bytes >= MIN_PART_BYTES, spec.name


def _header(path: str, specs: Sequence[TensorSpec]) -> bytes:
    document: dict[str, object] = {_METADATA_KEY: _METADATA}
    at = 0
    for spec in specs:
        refusal = ""
        if spec.dtype.safetensors is None:
            refusal = f"dtype {spec.dtype.name} has no name in safetensors"
        elif spec.name == _METADATA_KEY:
            refusal = "safetensors keeps this name for the metadata of a file"
        if refusal:
            raise CannotPlanError(
                refusal,
                where=f"tensor {spec.name!r}",
                hint="leave the tensor out with --exclude",
            )
        document[spec.name] = {
            "dtype": spec.dtype.safetensors,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.size_bytes],
        }
        at += spec.size_bytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % DATA_ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise CannotPlanError(
            f"a header of {len(text):,} bytes is over the limit of {_MAX_HEADER_BYTES:,}",
            where=path,
            hint="write more, smaller files with --max-shard-size",
        )
    return len(text).to_bytes(8, "little") + text
