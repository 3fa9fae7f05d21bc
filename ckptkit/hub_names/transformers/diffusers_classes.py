"""What the installed diffusers would report of loading tensors that have names and shapes alone.

Source: diffusers 0.42, `ModelMixin.from_pretrained`: names are those of the class, none is renamed,
and only the patterns of `_keys_to_ignore_on_load_unexpected` may be left over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import diffusers
import torch

from ckptkit.core.errors import CannotPlanError
from ckptkit.core.model_configs import class_of
from ckptkit.hub_names.known_models import find_prefix
from ckptkit.plan.load_report import LoadReport, LoadRequest, Mismatch

_LONGEST = 300  # characters of what another library says


def report_on_diffusers(request: LoadRequest) -> LoadReport:
    """Reports what loading tensors of these names and shapes would miss, or not use.

    `request`: the configuration, and the tensors.
    """
    name = class_of(request.config)
    model = _build(name, request.config)
    own = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    given = {key: shape for key, (_, shape) in request.tensors.items()}
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]  # noqa: SLF001
    unexpected = [
        key
        for key in given
        if key not in own | dict.fromkeys(request.left_out, ())
        and not any(pattern.search(key) for pattern in ignored)
    ]
    return LoadReport(
        model=f"{name} of diffusers {diffusers.__version__}",
        given=len(given) - len(request.left_out),
        missing=tuple(sorted(own.keys() - given.keys())),
        unexpected=tuple(sorted(unexpected)),
        mismatched=tuple(
            Mismatch(key, str(list(shape)), str(list(own[key])))
            for key, shape in given.items()
            if key in own and own[key] != shape and key not in request.left_out
        ),
        prefix=find_prefix(unexpected, own),
    )


def _build(name: str, config: Mapping[str, Any]) -> Any:
    found: Any = getattr(diffusers, name, None)
    build = getattr(found, "from_config", None)
    if build is None or not issubclass(found, diffusers.ModelMixin):
        raise CannotPlanError(f"diffusers {diffusers.__version__} has no model class {name!r}")
    try:
        with torch.device("meta"):
            return build(dict(config))
    except Exception as error:  # each class checks its configuration in its own way
        said = " ".join(str(error).split())
        raise CannotPlanError(
            f"diffusers {diffusers.__version__} refuses config.json: {said[:_LONGEST]}"
        ) from error
