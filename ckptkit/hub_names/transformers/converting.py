"""Groups of tensors that conversions of transformers compute with, one group after the other.

The program is told of a model first, and then of groups, a line each; their elements come and
go in files. It ends when nobody speaks to it any more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CkptkitError
from ckptkit.hub_names.names import NamingRequest
from ckptkit.hub_names.transformers.answers import model_of, torch_dtype


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Converts groups until there is no further one.

    Args:
        requests: A naming request, and then groups, one JSON value a line.
        replies: Takes an answer for each group, one JSON value a line.
    """
    model = model_of(NamingRequest.from_json(requests.readline()))
    for line in requests:
        try:
            answer = converted(model, json.loads(line))
        except CkptkitError as error:
            answer = {"error": error.to_json()}
        replies.write(json.dumps(answer).encode() + b"\n")
        replies.flush()


@torch.no_grad()
def converted(model: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Converts one group.

    Args:
        model: The model without weights.
        group: `inputs`, rows of name, element type, shape and file; `outputs`, rows of name and
            file.

    Returns:
        `outputs`, rows of name, element type and shape of what now lies in their files.
    """
    tensors = {name: _mapped(*row) for name, *row in group["inputs"]}
    found = revert_weight_conversion(model, tensors)
    files = dict(group["outputs"])
    for name, tensor in found.items():
        if name in files:
            bare = tensor.contiguous().reshape(-1).view(torch.uint8)
            Path(files[name]).write_bytes(memoryview(bare.numpy()))
    return {
        "outputs": [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in found.items()
        ]
    }


def _mapped(dtype: str, shape: list[int], path: str) -> torch.Tensor:
    """Returns a tensor whose elements lie in a file; changing them leaves the file as it is."""
    kind = dtype_named(dtype)
    size = math.prod(shape) * kind.itemsize
    if not size:
        return torch.empty(shape, dtype=torch_dtype(kind))
    held = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    return held.view(torch_dtype(kind)).reshape(shape)
