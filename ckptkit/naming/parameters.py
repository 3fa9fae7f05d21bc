"""The parameters of the model that a configuration describes, in the order of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CannotPlanError
from ckptkit.naming.models import build_model


def listed_parameters(config: Mapping[str, Any], live: list[str]) -> list[dict[str, Any]]:
    """Returns names and shape of every parameter, tied ones once with all their names.

    Args:
        config: A parsed `config.json`.
        live: Names that the checkpoint tells; they choose the class where `config` does not.

    Raises:
        CannotPlanError: If a parameter is not stored row by row.
    """
    model = build_model(config, live)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    found: dict[int, dict[str, Any]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_contiguous():
            raise CannotPlanError(f"parameter {name!r} is not stored row by row")
        entry = found.setdefault(id(parameter), {"names": [], "shape": list(parameter.shape)})
        entry["names"].append(name)
    return list(found.values())
