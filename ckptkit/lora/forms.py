"""How the factors of a LoRA lie in the weight that they were trained for: told by shapes.

Where shapes leave two ways open (square weights) the model's class decides, which its
`model_type` stands for, and then the configuration.

Source: peft 0.21, `Linear`, `Embedding`, `_ConvNd` and `ParamWrapper` in `tuners/lora/layer.py`;
transformers 5.23 for the classes that use `Conv1D` and `is_transposed` experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Shape
from ckptkit.lora.changes import Form

_MATRIX = 2
_EXPERTS = 3
# Model types with Transformers' Conv1D, which stores [in, out], and what such modules are called.
_CONV1D_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
_CONV1D_NAMES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
# Model types whose fused experts are stored as [experts, in, out].
_TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "openai_privacy_filter", "aria", "aria_text"})


@dataclass(frozen=True, slots=True)
class Factors:
    """Shapes to be fitted, and what is known besides.

    Attributes:
        weight: Shape of the weight.
        down: Shape of A.
        up: Shape of B.
        rank: That the configuration gives the module.
        module: Its path.
        fan_in_fan_out: What the configuration says; PEFT's versions set it by the last module.
        is_old: Whether PEFT before 0.19 wrote the adapter, which took every fused weight of experts
            for [experts, in, out].
        model_types: Of the model and what is nested in it.
        where: What to call the adapter in errors.
    """

    weight: Shape
    down: Shape
    up: Shape
    rank: int
    module: str
    fan_in_fan_out: bool
    is_old: bool
    model_types: frozenset[str]
    where: str


def form_of(factors: Factors) -> Form:
    """Tells how the factors lie in the weight."""
    if len(factors.down) > _MATRIX:
        return _convolution(factors)
    if len(factors.down) != _MATRIX or len(factors.up) != _MATRIX:
        raise misfit(factors)
    if len(factors.weight) == _EXPERTS:
        return _experts(factors)
    return _linear(factors)


def embedding_form(factors: Factors) -> Form:
    """Checks the factors of an embedding: A is [rank, vocabulary], B [dimension, rank]."""
    _check_rank(factors, factors.rank)
    if factors.weight != (*factors.down[1:], *factors.up[:1]):
        raise misfit(factors)
    return "embedding"


def _linear(factors: Factors) -> Form:
    _check_rank(factors, factors.rank)
    out_in = (factors.up[0], factors.down[1])
    straight, crossed = factors.weight == out_in, factors.weight == out_in[::-1]
    if not (straight or crossed):
        raise misfit(factors)
    if straight and crossed:
        crossed = _is_conv1d(factors)
    return "transposed" if crossed else "linear"


def _is_conv1d(factors: Factors) -> bool:
    if factors.model_types:
        return is_conv1d(factors.module, factors.model_types)
    return factors.fan_in_fan_out


def is_conv1d(module: str, model_types: frozenset[str]) -> bool:
    return bool(model_types & _CONV1D_TYPES) and module.rpartition(".")[2] in _CONV1D_NAMES


def _convolution(factors: Factors) -> Form:
    apart, rest = divmod(factors.down[0], factors.up[1])
    if apart > 1 and not rest:
        raise _without_merged_form(factors, apart)
    _check_rank(factors, factors.rank)
    out, inside, kernel = factors.up[0], factors.down[1], factors.down[2:]
    if factors.weight == (out, inside, *kernel) and all(size == 1 for size in factors.up[2:]):
        return "conv"
    groups, rest = divmod(inside, factors.weight[1] if len(factors.weight) > 1 else inside + 1)
    if groups > 1 and not rest and factors.weight[:1] == (out,) and factors.weight[2:] == kernel:
        raise _without_merged_form(factors, groups)
    raise misfit(factors)


def _without_merged_form(factors: Factors, groups: int) -> RefusedError:
    return RefusedError(
        f"module {factors.module!r} is a convolution of {groups} groups, whose LoRA has no"
        " merged form: each group of outputs sees all inputs through it",
        where=factors.where,
        hint="keep this adapter apart from its base; PEFT does not merge it either",
    )


def _experts(factors: Factors) -> Form:
    experts = factors.weight[0]
    _check_rank(factors, factors.rank * experts)
    out_in = (factors.up[0], factors.down[1])
    straight, crossed = factors.weight[1:] == out_in, factors.weight[1:] == out_in[::-1]
    if not (straight or crossed):
        raise misfit(factors)
    if straight and crossed:
        crossed = factors.is_old or bool(factors.model_types & _TRANSPOSED_EXPERTS)
    return "experts_transposed" if crossed else "experts"


def _check_rank(factors: Factors, expected: int) -> None:
    found = (factors.down[0], factors.up[1] if len(factors.up) > 1 else 0)
    if found == (expected, expected):
        return
    if found[0] == found[1]:
        raise RefusedError(
            f"module {factors.module!r} has factors of rank {found[0]} against {expected} by the"
            " configuration, which would give them another scaling",
            where=factors.where,
            hint="pass the configuration that the adapter was trained with as --adapter-config",
        )
    raise misfit(factors)


def misfit(factors: Factors) -> RefusedError:
    """Returns the error that says which shapes do not fit."""
    return RefusedError(
        f"module {factors.module!r} has A of shape {list(factors.down)} and B of shape"
        f" {list(factors.up)}, which do not fit a base weight of shape {list(factors.weight)}",
        where=factors.where,
        hint="the adapter was trained on another base model; pass that one with --base",
    )
