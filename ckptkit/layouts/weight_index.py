"""The index of weights that are split over several files.

Source: huggingface_hub `split_torch_state_dict_into_shards`; Transformers fails without the key
`metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ckptkit.planning.plan import Literal, OutputFile, Product, contiguous


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
