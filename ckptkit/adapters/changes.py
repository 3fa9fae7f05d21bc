"""What an adapter does to the tensors of its base model, one value per change.

Names of tensors and modules are those of the live model, without PEFT's prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptkit.core.index import Fqn, TensorEntry

Form = Literal[
    "linear", "transposed", "embedding", "conv", "parameter", "experts", "experts_transposed"
]
"""How the product of the factors lies in the weight.

`linear`: B·A, as [out, in]; `parameter`: the same, where the parameter itself was targeted.
`transposed`: (B·A)ᵀ, as [in, out], for Transformers' Conv1D. `embedding`: (B·A)ᵀ, as [vocabulary,
dimension]. `conv`: B·A with all but the first dimension of A flattened. `experts`: one B·A per
expert, as [experts, out, in]; `experts_transposed`: as [experts, in, out].
"""


@dataclass(frozen=True, slots=True)
class Source:
    """Which of the adapters that are merged a change stems from.

    Attributes:
        position: Of the adapter, in the order of merging.
        origin: The name under which the plan knows the source of its tensors.
        where: What to call the adapter in errors.
    """

    position: int
    origin: str
    where: str


@dataclass(frozen=True, slots=True)
class LowRank:
    """A product of two factors is added to a weight.

    Attributes:
        source: The adapter.
        weight: The weight.
        module: The module, or the parameter where that was targeted; what patterns name.
        form: How the product lies in the weight.
        down: The factor A: [rank, in], or [experts * rank, in], or [rank, in, *kernel].
        up: The factor B: [out, rank], or [out, rank * experts], or [out, rank, 1, ...].
        magnitude: DoRA's length of each output row, [out] or [1, out, 1, ...]; None for plain
            LoRA.
        rank: Of one product.
        scaling: What the product is multiplied by; the weight given to the adapter is in it.
    """

    source: Source
    weight: Fqn
    module: str
    form: Form
    down: TensorEntry
    up: TensorEntry
    magnitude: TensorEntry | None
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class Shift:
    """The bias of an up-projection, times its scaling, is added to a bias.

    Attributes:
        source: The adapter.
        weight: The bias of the base model.
        module: The module.
        bias: What is added, [out].
        scaling: What it is multiplied by.
    """

    source: Source
    weight: Fqn
    module: str
    bias: TensorEntry
    scaling: float


@dataclass(frozen=True, slots=True)
class Rows:
    """Single rows of a weight are replaced: trained tokens.

    Attributes:
        source: The adapter.
        weight: The weight, [vocabulary, dimension].
        module: The module.
        rows: Their new content, [number of indices, dimension].
        indices: Which rows.
    """

    source: Source
    weight: Fqn
    module: str
    rows: TensorEntry
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A tensor is taken from the adapter as it is, whether or not the base has it.

    Attributes:
        source: The adapter.
        weight: The tensor.
        module: The module.
        tensor: What stands for it.
        frozen: Whether it is what other changes of the adapter were trained upon, and not
            itself trained: the embedding beneath a LoRA of it.
    """

    source: Source
    weight: Fqn
    module: str
    tensor: TensorEntry
    frozen: bool


Change = LowRank | Shift | Rows | Replaced


def tensors_of(change: Change) -> tuple[TensorEntry, ...]:
    """Returns the adapter's tensors that a change uses."""
    if isinstance(change, LowRank):
        factors = (change.down, change.up)
        return factors if change.magnitude is None else (*factors, change.magnitude)
    if isinstance(change, Shift):
        return (change.bias,)
    return (change.rows,) if isinstance(change, Rows) else (change.tensor,)


def is_frozen(change: Change) -> bool:
    """Tells whether a change only puts in place what others were trained upon."""
    return isinstance(change, Replaced) and change.frozen
