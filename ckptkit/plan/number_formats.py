"""The schemes that models are published packed in, a row each, and how names find what they pack.

A scheme says how the tensors of a packed weight are called, which numbers they hold, and where the
library that owns the format rounds; `ckptkit.engine.packed_numbers` has a kernel for each number
format. What a configuration says of blocks and groups is read by `ckptkit.plan.packing_settings`.

Endings of names stand behind the name of the unpacked weight: `_scale` of `x.weight` is
`x.weight_scale`, and `.scales`, which begins with a dot, replaces `.weight`.

Source: transformers 5.23, `integrations/finegrained_fp8.py` (`Fp8Dequantize`) and
`integrations/mxfp4.py` (`_convert_moe_packed_tensors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import TensorEntry

Order = Literal["plain", "awq"]


class Scheme(Struct, frozen=True, kw_only=True):
    """How weights are packed, and how their files and their configuration say so."""

    title: str
    method: str  # `quant_method` of the configuration
    calls: tuple[str, ...] = ()  # what else it calls the scheme; none where it says nothing
    packed: str = ""  # the ending of the packed tensor; empty where it has the weight's own name
    numbers: Mapping[str, str]  # the number format of its elements, by their stored type
    # Endings of what is stored with it. A scale has one of several names.
    scale: tuple[str, ...]
    scales: Mapping[str, str] = {}  # number formats of scales that are no plain floats, by type
    total: str = ""  # one further scale for all elements
    total_divides: bool = False  # whether blocks' scales are divided by it, and not multiplied
    zero: str = ""  # what is subtracted from the numbers of a block
    index: str = ""  # the block of each column, where blocks are not in order
    is_centred: bool = False  # whether half of the numbers' range stands for zero
    shape: str = ""  # the shape of the weight
    state: tuple[str, ...] = ()  # a document that says how it is packed; one of several names
    rest: tuple[str, ...] = ()  # what else is stored with it
    needs: tuple[str, ...] = ("scale",)  # fields of those that no weight is without
    foreign: tuple[str, ...] = ()  # endings of what changes the layer too, and is not modelled
    # What the elements are rounded to before any cast: a type, that of the scales (`scale`), or
    # the one that the user asks for (`asked`), to which scales are rounded as well.
    result: str = "float32"
    # The rows and columns of the packed tensor that share a scale, where the format fixes them;
    # None where the configuration has them.
    blocks: tuple[int, int] | None = None
    has_rest: bool = False  # whether a last group of columns, or of rows, may be short
    columns: int = 1  # how many of the last dimensions of the packed tensor are its columns
    is_transposed: bool = False  # whether rows of the packed tensor are columns of the weight
    packs_rows: bool = False  # whether the numbers of one word belong to rows below each other
    order: Order = "plain"  # of the numbers in a word


BITSANDBYTES = "bitsandbytes"
_EXPONENTS = {"uint8": "e8m0", "float8_e8m0fnu": "e8m0"}
_FLOAT8 = {"float8_e4m3fn": "float8_e4m3fn"}
SCHEMES = (
    Scheme(
        title="fine-grained FP8",
        method="fp8",
        numbers=_FLOAT8,
        scale=("_scale_inv", ".scale", ".qscale_weight"),
        scales=_EXPONENTS,
    ),
    Scheme(
        title="FP4 experts of fine-grained FP8",
        method="fp8",
        calls=("fp4",),
        numbers={"int8": "e2m1"},
        scale=("_scale_inv", ".scale"),
        scales=_EXPONENTS,
        blocks=(1, 32),
    ),
    Scheme(
        title="MXFP4",
        method="mxfp4",
        packed="_blocks",
        numbers={"uint8": "e2m1"},
        scale=("_scales",),
        scales=_EXPONENTS,
        columns=2,
        blocks=(1, 32),
        is_transposed=True,
    ),
    Scheme(
        title="compressed-tensors, a number a byte",
        method="compressed-tensors",
        calls=("naive-quantized", "float-quantized", "int-quantized"),
        numbers={**_FLOAT8, "int8": "int8"},
        scale=("_scale",),
        zero="_zero_point",
        index="_g_idx",
        result="scale",
    ),
    Scheme(
        title="compressed-tensors pack-quantized",
        method="compressed-tensors",
        calls=("pack-quantized",),
        packed="_packed",
        numbers={"int32": "uint{bits}"},
        scale=("_scale",),
        zero="_zero_point",
        index="_g_idx",
        shape="_shape",
        needs=("scale", "shape"),
        is_centred=True,
        result="scale",
    ),
    Scheme(
        title="compressed-tensors NVFP4",
        method="compressed-tensors",
        calls=("nvfp4-pack-quantized",),
        packed="_packed",
        numbers={"uint8": "e2m1"},
        scale=("_scale",),
        scales=_FLOAT8,
        total="_global_scale",
        needs=("scale", "total"),
        total_divides=True,
        result="bfloat16",
    ),
    Scheme(
        title="compressed-tensors MXFP4",
        method="compressed-tensors",
        calls=("mxfp4-pack-quantized",),
        packed="_packed",
        numbers={"uint8": "e2m1"},
        scale=("_scale",),
        scales=_EXPONENTS,
        result="bfloat16",
    ),
    Scheme(
        title="compressed-tensors MXFP8",
        method="compressed-tensors",
        calls=("mxfp8-quantized",),
        numbers=_FLOAT8,
        scale=("_scale",),
        scales=_EXPONENTS,
        result="bfloat16",
    ),
    Scheme(
        title="ModelOpt FP8",
        method="modelopt",
        calls=("FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
        numbers=_FLOAT8,
        scale=("_scale",),
        foreign=(".pre_quant_scale",),
        result="asked",
    ),
    Scheme(
        title="ModelOpt NVFP4",
        method="modelopt",
        calls=("NVFP4",),
        numbers={"uint8": "e2m1 with one zero"},
        scale=("_scale",),
        scales=_FLOAT8,
        total="_scale_2",
        needs=("scale", "total"),
        blocks=(1, 16),
    ),
    Scheme(
        title="GPTQ",
        method="gptq",
        calls=("gptq", "gptq_v2"),
        packed=".qweight",
        numbers={"int32": "uint{bits}"},
        scale=(".scales",),
        zero=".qzeros",
        needs=("scale", "zero"),
        index=".g_idx",
        result="scale",
        has_rest=True,
        is_transposed=True,
        packs_rows=True,
    ),
    Scheme(
        title="AWQ",
        method="awq",
        calls=("gemm",),
        packed=".qweight",
        numbers={"int32": "uint{bits}"},
        scale=(".scales",),
        zero=".qzeros",
        needs=("scale", "zero"),
        result="scale",
        is_transposed=True,
        order="awq",
    ),
    Scheme(
        title="torchao",
        method="torchao",
        calls=("Int8Tensor", "Float8Tensor"),
        packed="._weight_qdata",
        numbers={**_FLOAT8, "int8": "int8"},
        scale=("._weight_scale",),
        zero="._weight_zero_point",
        foreign=("._weight_act_pre_scale",),
    ),
    # `ckptkit.engine.bitsandbytes` knows what these numbers are: it has kernels of its own.
    Scheme(
        title="bitsandbytes, 8 bits",
        method=BITSANDBYTES,
        calls=("load_in_8bit",),
        numbers={"int8": "int8"},
        scale=(".SCB",),
        rest=(".weight_format",),
    ),
    Scheme(
        title="bitsandbytes, 4 bits",
        method=BITSANDBYTES,
        calls=("load_in_4bit",),
        numbers=dict.fromkeys(
            ("uint8", "int8", "bfloat16", "float16", "float32", "float64"), "nf4 or fp4"
        ),
        scale=(".weight.absmax",),
        state=(
            ".weight.quant_state.bitsandbytes__nf4",
            ".weight.quant_state.bitsandbytes__fp4",
        ),
        rest=(".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"),
        needs=("scale", "state"),
    ),
)
METHODS = frozenset(scheme.method for scheme in SCHEMES)
UNPACKED_AHEAD = METHODS - {BITSANDBYTES}
"""What a merge unpacks as it opens a model; it compares bitsandbytes' weights with the original."""

UNUSED = (
    *("activation_scale", "input_scale", "input_zero_point", "input_global_scale"),
    *("output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale", "k_zero_point"),
    *("v_zero_point", "_weight_act_quant_scale", "_weight_act_quant_zero_point"),
)
"""The last segments of names of what only computing with packed numbers needs."""
_WEIGHT = ".weight"
_ROLES = ("scale", "total", "zero", "index", "shape", "state")


class PackedGroup(Struct, frozen=True):
    """The tensors that one weight is packed in."""

    name: str  # of the weight
    scheme: Scheme
    packed: TensorEntry
    # By the field of `Scheme` that has their ending; those of `rest` by their ending.
    companions: Mapping[str, TensorEntry]

    @property
    def entries(self) -> list[TensorEntry]:
        return [self.packed, *self.companions.values()]


class Packing(Struct, frozen=True):
    """What is packed of a model."""

    groups: Sequence[PackedGroup] = ()
    unused: Sequence[TensorEntry] = field(default_factory=list)  # what unpacked weights do not need


def place(weight: str, ending: str) -> str:
    """Returns the name of what is stored for a weight.

    >>> place("q_proj.weight", "_scale"), place("q_proj.weight", ".scales")
    ('q_proj.weight_scale', 'q_proj.scales')
    """
    return weight.removesuffix(_WEIGHT) + ending if ending.startswith(".") else weight + ending


def find_packing(entries: Mapping[str, TensorEntry], method: str, *, location: str) -> Packing:
    """Finds what is packed by the schemes of a method; refuses what lacks a part, or is one.

    `entries`: all tensors of one model, by name.
    """
    schemes = [scheme for scheme in SCHEMES if scheme.method == method]
    groups: dict[str, PackedGroup] = {}
    taken: set[str] = set()
    lacking: dict[str, PackedGroup] = {}
    for name, entry in entries.items():
        group = _find_group(name, entry, entries, schemes)
        if group is None:
            continue
        if "scale" in group.companions:
            groups[group.name] = group
            taken |= {str(one.name) for one in group.entries}
        if any(role not in group.companions for role in group.scheme.needs):
            lacking[name] = group
    unused = [entry for name, entry in entries.items() if name.rpartition(".")[2] in UNUSED]
    taken |= {str(entry.name) for entry in unused}
    for name, group in lacking.items():
        if group.name in groups or name not in taken:  # else it is a scale of another weight
            role = next(role for role in group.scheme.needs if role not in group.companions)
            endings = getattr(group.scheme, role)
            missing = place(group.name, endings if isinstance(endings, str) else endings[0])
            raise RefusedError(
                f"tensor {name!r} is packed ({group.scheme.title}), and {missing!r} is missing",
                where=location,
                hint="complete the download: without it the numbers have no meaning",
            )
    for name in entries:
        if name not in taken and _is_companion(name, schemes):
            raise RefusedError(
                f"tensor {name!r} belongs to a packed weight, but to none of the forms of"
                f" {method!r} that can be unpacked: {', '.join(s.title for s in schemes)}",
                where=location,
                hint="complete the download; the library of the format unpacks its other forms",
            )
    return Packing(list(groups.values()), unused)


def _find_group(
    name: str,
    entry: TensorEntry,
    entries: Mapping[str, TensorEntry],
    schemes: Sequence[Scheme],
) -> PackedGroup | None:
    """Returns the weight that a tensor may have the numbers of, by the scheme with its scales."""
    found: list[PackedGroup] = []
    for scheme in schemes:
        if entry.dtype.name in scheme.numbers and name.endswith(scheme.packed):
            stem = name.removesuffix(scheme.packed)
            weight = stem + _WEIGHT if scheme.packed.startswith(".") else stem
            companions = dict(_find_companions(weight, scheme, entries))
            found.append(PackedGroup(weight, scheme, entry, companions))
    if not found:
        return None
    first = found[0]
    whole = [group for group in found if "scale" in group.companions]
    if whole:
        return next((group for group in whole if _has_its_scales(group)), whole[0])
    is_plain = entry.dtype.kind == "float" and entry.dtype.itemsize > 1
    is_other = entry.dtype.kind != "float" and not (first.scheme.packed or name.endswith(_WEIGHT))
    if is_plain or is_other:
        return None  # floats, or whole numbers, of the model itself
    return first


def _find_companions(
    weight: str, scheme: Scheme, entries: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, TensorEntry]]:
    roles = {role: getattr(scheme, role) for role in _ROLES}
    for role, endings in {**roles, **{ending: ending for ending in scheme.rest}}.items():
        for ending in endings if isinstance(endings, tuple) else (endings,):
            entry = entries.get(place(weight, ending)) if ending else None
            if entry is not None:
                yield role, entry
                break


def _has_its_scales(group: PackedGroup) -> bool:
    """Returns whether scales have a type of the scheme, where others have the same names."""
    scheme, scale = group.scheme, group.companions["scale"].dtype
    is_plain = scale.kind == "float" and scale.itemsize > 1
    is_total = bool(scheme.total) == ("total" in group.companions)
    return is_total and (scale.name in scheme.scales or (is_plain and not scheme.total))


def _is_companion(name: str, schemes: Sequence[Scheme]) -> bool:
    for scheme in schemes:
        endings = (*scheme.scale, scheme.total, scheme.zero, scheme.index, scheme.shape)
        endings = (*endings, *scheme.state, *scheme.rest)
        for ending in (*endings, *scheme.foreign, scheme.packed):
            whole = _WEIGHT + ending if ending.startswith("_scale") else ending
            # `.scale` alone can be the parameter of a norm.
            if ending and ending != ".scale" and name.endswith((whole, *_ALWAYS & {ending})):
                return True
    return False


_ALWAYS = frozenset({"_scale_inv", "_scales"})  # endings that nothing else has
