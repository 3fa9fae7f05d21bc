"""The forms that `--dtype` packs weights in, a row each, and which weights those are.

Weights are rounded alone: no form needs data to calibrate with. Where a configuration says that
activations are rounded too, the library does so while the model runs.

Source: transformers 5.23, `integrations/finegrained_fp8.py` (`Fp8Quantize`) and
`quantizers/base.py` (`get_keys_to_not_convert`); compressed-tensors 0.20, `quant_scheme.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.index import Shape
from ckptkit.plan.number_formats import SCHEMES, Scheme
from ckptkit.plan.packing_settings import WHOLE, Blocks
from ckptkit.plan.plan import TensorSpec, name_order
from ckptkit.plan.vocabulary import is_embedding, is_head

Number = Literal["float8_e4m3fn", "int8", "int4", "e2m1"]


class PackedForm(Struct, frozen=True, kw_only=True):
    """How weights are packed, and what the configuration says of it."""

    scheme: Scheme
    calls: str = ""  # what the configuration calls it
    number: Number
    blocks: Blocks  # the rows and columns that share a scale
    # The type of scales. Where it is that of the weights, the library computes in it throughout.
    scale: Literal["float32", "bfloat16", "float8_e4m3fn", "uint8"]
    weights: Mapping[str, Any] = {}  # what the configuration says besides
    activations: Mapping[str, Any] | None = None
    of_experts: str = ""  # what Transformers makes of experts that are packed so, if it is wrong

    @property
    def needs_live_names(self) -> bool:
        """Whether modules are also listed as in memory: compressed-tensors compares these."""
        return self.scheme.method != "fp8"

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Returns how many rows and columns of blocks a weight has; the last may end short."""
        (rows, columns), (high, wide) = shape, self.blocks
        return -(-rows // high), -(-columns // (wide or columns))

    def make_config(self, kept: Iterable[str]) -> dict[str, Any]:
        """Returns the `quantization_config` of a model; `kept` are modules that are not packed."""
        modules = sorted(set(kept), key=name_order)
        if self.scheme.method == "fp8":
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": list(self.blocks),
                "modules_to_not_convert": modules,
            }
        rest = {"symmetric": True, "dynamic": False}
        group = {
            "targets": ["Linear"],
            "weights": {**self.weights, **rest},
            "input_activations": self.activations,
            "output_activations": None,
            "format": self.calls,
        }
        return {
            "quant_method": self.scheme.method,
            "format": self.calls,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": modules,
        }


_WITHOUT_TOTAL = (
    "transformers 5.23.0 leaves out the scale of the whole weight, and computes something else"
    " without an error"
)


def _scheme(title: str) -> Scheme:
    return next(scheme for scheme in SCHEMES if scheme.title == title)


def _of_bytes(kind: Literal["float", "int"]) -> PackedForm:
    """Returns a form of compressed-tensors with a scale for each row."""
    numbers = {"num_bits": 8, "type": kind}
    return PackedForm(
        scheme=_scheme("compressed-tensors, a number a byte"),
        calls=f"{kind}-quantized",
        number="int8" if kind == "int" else "float8_e4m3fn",
        blocks=(1, WHOLE),
        scale="bfloat16",
        weights={**numbers, "strategy": "channel"},
        activations={**numbers, "strategy": "token", "symmetric": True, "dynamic": True},
        of_experts="transformers 5.23.0 does not load them" if kind == "int" else "",
    )


def _of_e2m1(
    title: str, strategy: str, size: int, scale: Literal["float8_e4m3fn", "uint8"]
) -> PackedForm:
    """Returns a form of compressed-tensors with floats of four bits."""
    scheme = _scheme(title)
    numbers = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": size}
    return PackedForm(
        scheme=scheme,
        calls=scheme.calls[0],
        number="e2m1",
        blocks=(1, size),
        scale=scale,
        weights={**numbers, "scale_dtype": f"torch.{scale}"},
        of_experts=_WITHOUT_TOTAL if scheme.total else "",
    )


FORMS: Mapping[str, PackedForm] = {
    "fp8-block": PackedForm(
        scheme=_scheme("fine-grained FP8"),
        number="float8_e4m3fn",
        blocks=(128, 128),
        scale="float32",
    ),
    "fp8-channel": _of_bytes("float"),
    "int8-channel": _of_bytes("int"),
    "int4-group": PackedForm(
        scheme=_scheme("compressed-tensors pack-quantized"),
        calls="pack-quantized",
        number="int4",
        blocks=(1, 128),
        scale="bfloat16",
        weights={"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    ),
    "nvfp4": _of_e2m1("compressed-tensors NVFP4", "tensor_group", 16, "float8_e4m3fn"),
    "mxfp4": _of_e2m1("compressed-tensors MXFP4", "group", 32, "uint8"),
}
"""By the value of `--dtype`."""
_MATRIX = 2


def find_form(scheme: Scheme, calls: str, blocks: Blocks, shape: Shape) -> PackedForm | None:
    """Returns the form that a weight is packed in; None for one that nothing is packed in.

    `calls`: what the configuration calls it. `blocks`: the rows and columns that share a scale.
    """
    for form in FORMS.values():
        if form.scheme != scheme or form.calls != calls or len(shape) != _MATRIX:
            continue
        high, wide = form.blocks
        if wide == WHOLE:
            return form if blocks == (high, shape[1]) else None
        is_fixed = form.number == "e2m1"
        if blocks == form.blocks or (not is_fixed and (high > 1 or blocks[0] == 1)):
            return replace(form, blocks=blocks)
    return None


UNPACKED = "bfloat16"
"""The type that weights have before they are packed, and that all others are written in."""

# What models compute with few rows, or choose by: embeddings, heads, norms and routers.
_KEPT = re.compile(
    r"(^|\.)([^.]*(embed|norm|router)[^.]*|w[pt]e|relative_attention_bias"
    r"|([^.]*_)?(head|heads|classifier|classification|score|gate|wg)|qa_outputs|cls|pooler)(\.|$)"
)
_WEIGHT = ".weight"


def is_packed(spec: TensorSpec) -> bool:
    """Returns whether a tensor is the weight of a linear layer that forms pack.

    >>> from ckptkit.core.dtypes import BY_NAME
    >>> names = "mlp.gate_proj.weight", "mlp.gate.weight", "lm_head.weight"
    >>> [is_packed(TensorSpec(name, BY_NAME["bfloat16"], (4, 4))) for name in names]
    [True, False, False]
    """
    name, module = spec.name, spec.name.removesuffix(_WEIGHT)
    is_matrix = module != name and len(spec.shape) == _MATRIX and spec.elements > 0
    if not is_matrix or spec.dtype.name != UNPACKED or is_embedding(name) or is_head(name):
        return False
    return _KEPT.search(module) is None


def list_kept(specs: Iterable[TensorSpec], packed: Collection[str]) -> list[str]:
    """Returns the modules with matrices that are not packed, embeddings excepted."""
    names = [
        spec.name
        for spec in specs
        if len(spec.shape) >= _MATRIX and spec.name not in packed and not is_embedding(spec.name)
    ]
    modules = {
        n.removesuffix(_WEIGHT) if n.endswith(_WEIGHT) else n.rpartition(".")[0] for n in names
    }
    # A module with a matrix of its own may have packed ones in it.
    around = {name[:at] for name in packed for at, c in enumerate(name) if c == "."}
    around -= {name.removesuffix(_WEIGHT) for name in packed}
    return [module for module in modules if module and module not in around]
