"""Which parameters of a base the factors of an adapter are for, told from shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from ckptkit.adapters.layers import LoraLayer
from ckptkit.core.errors import CannotPlanError
from ckptkit.core.index import Fqn, Shape, TensorEntry

_EXPERTS = "experts"  # what Transformers calls modules whose parameters hold all experts
_MATRIX = 2


def is_of_parameter(layer: LoraLayer) -> bool:
    """Tells from names alone whether factors are for a parameter and not for a module."""
    return layer.level > 0 or layer.module.rpartition(".")[2] == _EXPERTS


def fits_experts(layer: LoraLayer, experts: int, shape: Shape) -> bool:
    """Tells whether factors can be those of a parameter.

    Args:
        layer: The factors.
        experts: How many experts they are for.
        shape: Of the parameter: [experts, in, out] or [experts, out, in], or a matrix.
    """
    sizes = (layer.up.shape[0], layer.down.shape[1])
    if len(shape) == _MATRIX:
        return experts == 1 and shape in {sizes, sizes[::-1]}
    return shape in {(experts, *sizes), (experts, *sizes[::-1])}


def inferred_parameters(
    layers: Iterable[LoraLayer], base: Mapping[Fqn, TensorEntry], *, where: str
) -> dict[str, int]:
    """Returns the parameters that are targeted, each with the rank of its factors.

    Args:
        layers: The factors of an adapter, those of modules among them.
        base: The tensors of the base by their plain names; empty where it is elsewhere.
        where: The checkpoint, for errors.

    Raises:
        CannotPlanError: If shapes do not tell which parameters they are.
    """
    groups: dict[str, list[LoraLayer]] = defaultdict(list)
    for layer in layers:
        if is_of_parameter(layer):
            groups[layer.module].append(layer)
    found: dict[str, int] = {}
    for module, group in groups.items():
        fitting = _fitting(module, group, base)
        if len(fitting) != len(group):
            raise CannotPlanError(
                f"module {module!r} has factors for {len(group)} of its parameters, and their"
                " shapes do not tell for which",
                where=where,
                hint="pass the adapter_config.json of the run with --adapter-config",
            )
        found |= fitting
    return found


def _fitting(
    module: str, group: Iterable[LoraLayer], base: Mapping[Fqn, TensorEntry]
) -> dict[str, int]:
    """Returns the parameters of a module that some factors fit, with the rank of those."""
    found = {}
    for name, entry in base.items():
        if name.rpartition(".")[0] == module and len(entry.shape) > 1:
            experts = entry.shape[0] if len(entry.shape) > _MATRIX else 1
            for layer in group:
                if not layer.inner % experts and fits_experts(layer, experts, entry.shape):
                    found[str(name)] = layer.inner // experts
    return found


def shortest_names(meant: Collection[str], present: Collection[str]) -> list[str]:
    """Returns names that mean the given paths and no others of those that are there.

    The last segment of a path stands for all that end in it where the base shows that there
    are no others.
    """
    others = {_last(path) for path in present if path not in meant}
    is_whole = all(path in present for path in meant)
    return sorted(
        {_last(path) if is_whole and _last(path) not in others else path for path in meant}
    )


def _last(path: str) -> str:
    return path.rpartition(".")[2]
