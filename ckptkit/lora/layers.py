"""The tensors of an adapter, grouped by the weight of the base that they change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct

from ckptkit.core.errors import AdapterError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.lora.config import PEFT_PREFIX, Adapter
from ckptkit.lora.dialects import (
    BASE_LAYER,
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TOKENS,
    make_plain_name,
)

_MATRIX = 2
_PARTS = {
    f"{LORA_A}.weight": "down",
    f"{LORA_B}.weight": "up",
    f"{LORA_B}.bias": "up_bias",
    EMBEDDING_A: "down",
    EMBEDDING_B: "up",
    MAGNITUDE: "magnitude",
}
_OUTPUT = f".{BASE_LAYER}.out_proj"
_LONGEST = 2  # segments of a key of `_PARTS`


class LoraLayer(Struct, frozen=True):
    """The low-rank factors of one weight of the base.

    Attributes:
        module: The path in the base model of the module with the weight.
        level: How many `base_layer` segments precede the factors: they wrap the same module
            several times where several of its parameters are targeted.
        down: The factor next to the input: [rank, in], for convolutions [rank, in, ...], for
            embeddings [rank, rows], for parameters of E experts [E * rank, in].
        up: The factor next to the output: [out, rank], for convolutions of G groups
            [out, rank / G, 1, ...], for parameters of E experts [out, rank * E].
        is_embedding: Whether the weight is that of an embedding.
        up_bias: The bias of `up`, or None.
        magnitude: DoRA's magnitudes, or None.
        names: The names of all of them in the adapter's file.
        owner: The module that a configuration names: `module`, but for the output of torch's
            MultiheadAttention, which PEFT adapts with its parent.
    """

    module: str
    level: int
    down: TensorEntry
    up: TensorEntry
    is_embedding: bool
    up_bias: TensorEntry | None
    magnitude: TensorEntry | None
    names: tuple[Fqn, ...]
    owner: str

    @property
    def times(self) -> int:
        """How many times PEFT adds the product: twice in the output of MultiheadAttention.

        Source: peft 0.21, `MultiheadAttention.merge`, which its `forward` calls as well.
        """
        return 1 if self.owner == self.module else 2

    @property
    def groups(self) -> int:
        """The number of groups of a convolution; 1 of all other layers."""
        return self.inner // self.up.shape[1] if self.is_convolution else 1

    @property
    def is_convolution(self) -> bool:
        return len(self.down.shape) > _MATRIX

    @property
    def inner(self) -> int:
        return self.down.shape[0]

    @property
    def shape(self) -> Shape:
        """The weight's shape as [out, in, ...]; that of an embedding is [rows, features]."""
        if self.is_embedding:
            return (self.down.shape[1], self.up.shape[0])
        return (self.up.shape[0], *self.down.shape[1:])


class AdapterTable(Struct, frozen=True):
    """Every tensor of an adapter, once.

    Attributes:
        layers: Low-rank factors.
        tokens: Rows that replace rows of embeddings, by the embedding's path in the base.
        whole: Tensors that replace tensors of the base, by their names in the adapter's file.
    """

    layers: tuple[LoraLayer, ...]
    tokens: Mapping[str, TensorEntry]
    whole: Mapping[Fqn, TensorEntry]


def build_table(tensors: Mapping[Fqn, TensorEntry]) -> AdapterTable:
    """Groups the tensors of an adapter, given by the names of its file."""
    factors: dict[str, dict[str, Fqn]] = defaultdict(dict)
    tokens: dict[str, TensorEntry] = {}
    whole: dict[Fqn, TensorEntry] = {}
    for name, entry in tensors.items():
        module, part = _split(name)
        if part:
            factors[module][part] = name
        elif name.rpartition(".")[2] == TOKENS:
            tokens[make_plain_name(name.rpartition(".")[0])] = entry
        else:
            whole[name] = entry
    layers = tuple(_make_layer(module, parts, tensors) for module, parts in factors.items())
    return AdapterTable(layers, tokens, whole)


def find_linear_shapes(adapter: Adapter) -> dict[str, Shape]:
    """Returns the shapes [out, in] of the linear weights that an adapter changes, by name."""
    return {
        f"{layer.module}.weight": layer.shape
        for layer in build_table(adapter.tensors).layers
        if not (layer.is_embedding or layer.is_convolution or layer.level)
    }


def _split(name: str) -> tuple[str, str]:
    """Splits a name into module and part; the part is empty for what is no factor."""
    segments = name.split(".")
    for length in range(1, _LONGEST + 1):
        part = _PARTS.get(".".join(segments[-length:]))
        if part is not None:
            return ".".join(segments[:-length]), part
    return name, ""


def _make_layer(
    module: str, parts: Mapping[str, Fqn], tensors: Mapping[Fqn, TensorEntry]
) -> LoraLayer:
    missing = [factor for factor, part in (("A", "down"), ("B", "up")) if part not in parts]
    if missing:
        there = next(iter(parts.values()))
        raise AdapterError(
            f"{there!r} was found without LoRA's factor {missing[0]} of the same module",
            where=f"module {make_plain_name(module)!r}",
            hint="the save was cut short or lost tensors; take another checkpoint",
        )
    entries = {part: tensors[name] for part, name in parts.items()}
    layer = LoraLayer(
        module=make_plain_name(module),
        level=module.removeprefix(PEFT_PREFIX).split(".").count(BASE_LAYER),
        down=entries["down"],
        up=entries["up"],
        is_embedding=parts["down"].endswith(EMBEDDING_A),
        up_bias=entries.get("up_bias"),
        magnitude=entries.get("magnitude"),
        names=tuple(parts.values()),
        owner=make_plain_name(module.removesuffix(_OUTPUT) if module.endswith(_OUTPUT) else module),
    )
    down, up = layer.down.shape, layer.up.shape
    same = len(down) == len(up) >= _MATRIX and 0 not in (*down, *up)
    groups = down[0] // up[1] if same and len(down) > _MATRIX else 1
    if not same or down[0] != groups * up[1] or up[0] % groups:
        raise AdapterError(
            f"LoRA's factor A of shape {list(down)} was found with a B of shape {list(up)}; the"
            " rows of A have to be as many as the columns of B",
            where=f"module {layer.module!r}",
            hint="the factors are pieces of sharded tensors, or of different adapters",
        )
    for what, entry in (("bias", layer.up_bias), ("magnitude", layer.magnitude)):
        if entry is not None and entry.elements != up[0]:
            raise AdapterError(
                f"a {what} of shape {list(entry.shape)} was found with a B of shape {list(up)}",
                where=f"module {layer.module!r}",
            )
    return layer
