"""What flat parameters are made of, worked out from the parameters of the model itself.

FSDP1 takes the parameters of a module in the order of its modules, without those that wrapped
modules below it have already, and puts them one after another. With `use_orig_params=True` each
begins at a multiple of 16 bytes of the element type of the computation, and the whole is padded
to a multiple of the ranks. The flat parameters' own names tell which modules were wrapped.

Source: torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`), torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import CannotPlanError
from ckptkit.core.index import Shape
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.ranks.flat import FLAT, FlatMember, FlatVector, flat_name

_ALIGNMENTS = (1, 2, 4, 8, 16)  # elements: not at all, or 16 bytes of 8 to 1
_HINT = (
    "give the config.json that the trained model has, from the folder it was loaded from; if its"
    " modules were changed, call `ckptkit.training.write_flat_layout` in the training script"
)


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter of a model: its names, the first one first, and its shape."""

    names: tuple[str, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class _Unit:
    path: str
    elements: int
    parameters: tuple[ModelParameter, ...]


def vectors_of(
    parameters: Sequence[ModelParameter],
    flat: Mapping[str, int],
    world_size: int,
    slices: Mapping[str, tuple[int, int]],
) -> list[FlatVector]:
    """Returns what flat parameters are made of.

    Args:
        parameters: Of the model, in the order of its modules, but for those that the checkpoint
            has on their own.
        flat: The flat parameters, by name, with their lengths in elements.
        world_size: The number of ranks of the run.
        slices: Where parameters lie in their flat ones, as far as the checkpoint tells.

    """
    units = [
        _Unit(_path(name), elements, tuple(inside))
        for (name, elements), inside in zip(
            flat.items(), _shared_out(parameters, list(flat)), strict=True
        )
    ]
    found: dict[tuple[FlatVector, ...], None] = {}
    for alignment in _ALIGNMENTS:
        vectors = tuple(_vector(unit, alignment) for unit in units)
        if all(_fits(vector, alignment, world_size, slices) for vector in vectors):
            found[vectors] = None
    if not found:
        raise _misfit(units)
    if len(found) > 1:
        raise CannotPlanError(
            f"parameters can lie in {len(found)} ways in flat ones of these lengths, and nothing"
            " tells in which",
            where="--model-config",
            hint=_HINT,
        )
    return list(next(iter(found)))


def _path(name: str) -> str:
    return name.removesuffix(FLAT).removesuffix(".")


def _shared_out(
    parameters: Sequence[ModelParameter], flat: Sequence[str]
) -> list[list[ModelParameter]]:
    """Gives each parameter to the innermost wrapped module that it is in."""
    paths = [_path(name) for name in flat]
    inside: list[list[ModelParameter]] = [[] for _ in flat]
    for parameter in parameters:
        name = parameter.names[0]
        homes = [path for path in paths if not path or name.startswith(f"{path}.")]
        if not homes:
            raise CannotPlanError(
                f"parameter {shown(name)} of the model is in none of {len(flat)} flat parameters,"
                " and not on its own in the checkpoint",
                where="--model-config",
                hint=_HINT,
            )
        inside[paths.index(max(homes, key=len))].append(parameter)
    return inside


def _vector(unit: _Unit, alignment: int) -> FlatVector:
    return FlatVector(
        flat_name(unit.path), unit.elements, tuple(_members(unit.parameters, alignment))
    )


def _members(parameters: Sequence[ModelParameter], alignment: int) -> Iterator[FlatMember]:
    at = 0
    for parameter in parameters:
        start = -(-at // alignment) * alignment
        yield FlatMember(parameter.names, parameter.shape, start)
        at = start + math.prod(parameter.shape)


def _fits(
    vector: FlatVector,
    alignment: int,
    world_size: int,
    slices: Mapping[str, tuple[int, int]],
) -> bool:
    """Tells whether a vector has the length, and its members the places, that were found."""
    end = vector.members[-1].stop if vector.members else 0
    told = (slices.get(m.names[0], (m.start, m.stop)) == (m.start, m.stop) for m in vector.members)
    if not all(told):
        return False
    if end == vector.elements:
        return True
    # Only aligned vectors are padded at the end, to a multiple of those that share them.
    ranks = (n for n in range(2, world_size + 1) if world_size % n == 0)
    return alignment > 1 and any(-(-end // n) * n == vector.elements for n in ranks)


def _misfit(units: Sequence[_Unit]) -> CannotPlanError:
    def total(unit: _Unit) -> int:
        return sum(math.prod(parameter.shape) for parameter in unit.parameters)

    worst = max(units, key=lambda unit: abs(unit.elements - total(unit)))
    name = flat_name(worst.path)
    return CannotPlanError(
        f"{shown(name)} has {worst.elements:,} elements, and the {len(worst.parameters)}"
        f" parameters of the model that would be in it have {total(worst):,}: sizes do not add up",
        where="--model-config",
        hint=_HINT,
    )
