"""LoRA factors of experts, of each expert alone or of all in one parameter; without I/O.

A layout has `down` [rank, in] and `up` [out, rank] for each matrix of each expert, or for a
parameter of all experts A [experts * rank, in] and B [out, rank * experts]. In the columns of B
the expert is the fastest index. A parameter `gate_up_proj` has one A for both of its matrices:
where these have their own, the factors stand in blocks, and the rank is the sum of both. Neither
that nor zeros for a larger rank change a product.

Source: peft 0.21, `ParamWrapper` in `tuners/lora/layer.py` and
`utils/transformers_weight_conversion.py`; vllm 0.33, `_stack_moe_lora_weights` in
`lora/model_manager.py` and `pack_moe` in `lora/lora_weights.py`, `is_3d_moe_weight` of
`model_executor/models`; transformers 5.23, `conversion_mapping.py`, `use_experts_implementation`;
sglang 0.5.23, `srt/lora/lora.py` and `mem_pool.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import AdapterError, RefusedError
from ckptkit.core.geometry import Arrangement, join
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.text import quote
from ckptkit.lora.config import EXPERTS_BY_CLASS, LoraSettings, parse_version
from ckptkit.lora.dialects import LoraLayer
from ckptkit.lora.inference import find_target_parameters

GATE, UP, DOWN = range(3)
GATE_UP, DOWN_PROJ = "gate_up_proj", "down_proj"
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SINGLE = re.compile(
    r"(?P<home>.+)\.experts\.(?P<expert>\d{1,6})\.(?P<matrix>gate_proj|up_proj|down_proj|w[123])"
)
_MATRICES = {"gate_proj": GATE, "w1": GATE, "up_proj": UP, "w3": UP, "down_proj": DOWN, "w2": DOWN}
_ROUTERS = frozenset({"gate", "router"})
_OTHER_BASE = "the adapter was trained on another base model; pass that one with --base"


class ExpertForm(Struct, frozen=True):
    """How models have their experts: in memory, and by the names of single ones."""

    home: str = "mlp"  # the module around `experts` in Transformers 5
    stored: str = "mlp"  # the same in names of single experts, and in vLLM
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_interleaved: bool = False  # whether rows of gate and up alternate in one parameter
    is_transposed: bool = False  # whether parameters are [experts, in, out]
    is_fused_in_vllm: bool = False  # whether vLLM takes factors of all experts in two tensors
    # Whether PEFT 0.21 takes names of other layers, such as `gate_proj`, for those of experts.
    # Source: its `_convert_peft_config_moe`, which applies to types that share another's names.
    is_named_as_dense: bool = False


_PLAIN = ExpertForm(is_named_as_dense=True)
_MIXTRAL = ExpertForm(stored="block_sparse_moe", matrices=("w1", "w3", "w2"))
_FUSED = ExpertForm(is_fused_in_vllm=True)
_FORMS: Mapping[str, ExpertForm] = {
    **dict.fromkeys(("mixtral", "minimax_m2"), _MIXTRAL),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo"), _PLAIN),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "olmoe", "qwen3_moe"), _PLAIN),
    **dict.fromkeys(("qwen3_next",), _PLAIN),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _FUSED),
    "qwen2_moe": ExpertForm(),
    "gpt_oss": ExpertForm(is_interleaved=True, is_transposed=True, is_fused_in_vllm=True),
}


class Factors(Struct, frozen=True):
    """Those of one matrix of one expert."""

    down: Arrangement  # [rank, in]
    up: Arrangement  # [out, rank]
    scaling: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def padded(self, rank: int) -> Factors:
        return replace(self, down=self.down.padded(0, rank), up=self.up.padded(1, rank))


class Experts(Struct, frozen=True):
    """The factors of the experts of one layer."""

    home: str  # the module around `experts`, in memory
    count: int
    hidden: int  # the width of the model
    width: int  # of one expert
    factors: Mapping[tuple[int, int], Factors]  # by matrix and expert

    def shape(self, matrix: int) -> tuple[int, int]:
        """Returns the shape [out, in] of a matrix."""
        shape = (self.width, self.hidden)
        return shape[::-1] if matrix == DOWN else shape


class Target(Struct, frozen=True):
    """A module or parameter of the new layout."""

    pattern: str  # that a configuration names its rank by
    rank: int
    scaling: float
    # By the names of a PEFT file; several where the pattern is that of all experts.
    tensors: Mapping[Fqn, Arrangement]
    factors: Mapping[Fqn, float]  # what single sources are multiplied by; powers of two


def find_form(model_types: Sequence[str], layers: Sequence[LoraLayer], *, where: str) -> ExpertForm:
    """Finds how a model has its experts: by its types, or by the names of single experts."""
    for model_type in model_types:
        if model_type in _FORMS:
            return _FORMS[model_type]
    if model_types:
        raise RefusedError(
            f"the layouts of experts are not known for the model type {quote(model_types[0])}:"
            f" known are {', '.join(sorted(_FORMS))}",
            where=where,
            hint="`ckptkit adapter merge` makes a model of the adapter and its base",
        )
    named = [match for layer in layers if (match := _SINGLE.fullmatch(layer.module)) is not None]
    if not named:
        raise RefusedError(
            "names of factors of all experts in one parameter do not show which rows are of the"
            " gate, and no configuration of the model was found",
            where=where,
            hint="pass the model that the adapter was trained on with --base",
        )
    for form in (_PLAIN, _MIXTRAL):
        if all(
            match["home"].endswith(f".{form.stored}") and match["matrix"] in form.matrices
            for match in named
        ):
            return form
    raise RefusedError(
        f"names such as {quote(named[0][0])} do not show how the model has its experts, and no"
        " configuration of it was found",
        where=where,
        hint="pass the model that the adapter was trained on with --base",
    )


def is_of_experts(layer: LoraLayer) -> bool:
    return _SINGLE.fullmatch(layer.module) is not None or layer.module.endswith(".experts")


def is_router(module: str, homes: Mapping[str, Experts]) -> bool:
    """Returns whether a module, by its name in memory, chooses among adapted experts."""
    home, _, name = module.rpartition(".")
    return name in _ROUTERS and home in homes


def rename(module: str, form: ExpertForm, *, is_stored: bool) -> str:
    """Returns the name of a module in memory, or among single experts."""
    old, new = (form.home, form.stored) if is_stored else (form.stored, form.home)
    return ".".join(new if part == old and old != new else part for part in module.split("."))


def collect(
    layers: Sequence[LoraLayer],
    settings: LoraSettings,
    form: ExpertForm,
    config: Mapping[str, object],
    *,
    where: str,
) -> dict[str, Experts]:
    """Sorts the factors of experts by layer.

    `config` is the part of the base's configuration that has experts; empty where it is not known.
    """
    known = next((n for key in _COUNTS if isinstance(n := config.get(key), int)), None)
    found: dict[str, dict[tuple[int, int], Factors]] = {}
    counts: dict[str, int] = {}
    fused: dict[str, list[LoraLayer]] = {}
    for layer in layers:
        if layer.magnitude is not None or layer.up_bias is not None:
            what = "the magnitudes of DoRA" if layer.magnitude is not None else "biases"
            raise RefusedError(
                f"module {layer.module!r} has {what}, which factors of all experts in one"
                " parameter, and vLLM, do not have",
                where=where,
                hint="`ckptkit adapter merge` makes a model of the adapter and its base",
            )
        match = _SINGLE.fullmatch(layer.module)
        if match is None:
            fused.setdefault(layer.module, []).append(layer)
            continue
        home, expert = rename(match["home"], form, is_stored=False), int(match["expert"])
        down, up = _whole(layer.down), _whole(layer.up)
        own = Factors(down, up, settings.scaling(layer.owner))
        key = (_MATRICES[match["matrix"]], expert)
        if key in found.setdefault(home, {}):
            raise AdapterError(f"module {layer.module!r} has two names in the adapter", where=where)
        found[home][key] = own
        counts[home] = max(counts.get(home, 0), expert + 1)
    hidden = config.get("hidden_size")
    for module, own_layers in fused.items():
        home = module.removesuffix(".experts")
        if home in found:
            raise AdapterError(
                f"module {module!r} has factors of all experts in one parameter, and of single"
                " ones too, which may be two adapters",
                where=where,
            )
        found[home] = {}
        for name, layer in _pair(module, own_layers, settings, where):
            path = f"{module}.{name}"
            rank = settings.rank(path)
            count, rest = divmod(layer.inner, rank)
            if rest or counts.setdefault(home, count) != count:
                raise AdapterError(
                    f"module {path!r} has factors of {layer.inner} rows, expected a multiple of"
                    f" {rank}, the rank in the configuration, for each expert",
                    where=where,
                    hint="pass the configuration that the run used with --adapter-config",
                )
            is_swapped = _is_swapped(layer, name, settings, form, hidden)
            for expert, pair in enumerate(_cut(layer, rank, count)):
                down, up = (one.permuted((1, 0)) for one in pair[::-1]) if is_swapped else pair
                for matrix, rows in _split_rows(up, name, form):
                    scaling = settings.scaling(path)
                    found[home][matrix, expert] = Factors(down, rows, scaling)
    for home, count in counts.items():
        if home in {module.removesuffix(".experts") for module in fused} and known not in {
            None,
            count,
        }:
            raise _make_count_error(home, count, known or 0, where)
    return {
        home: _check(home, own, known or counts[home], config, where) for home, own in found.items()
    }


def _make_count_error(home: str, count: int, known: int, where: str) -> AdapterError:
    return AdapterError(
        f"the adapter has factors of {count} experts of {home!r}, and the base has {known}",
        where=where,
        hint=_OTHER_BASE,
    )


def _whole(entry: TensorEntry) -> Arrangement:
    return Arrangement.of(Fqn(entry.key), entry.shape)


def _pair(
    module: str, layers: Sequence[LoraLayer], settings: LoraSettings, where: str
) -> list[tuple[str, LoraLayer]]:
    """Returns the factors of each targeted parameter; the innermost wrapper has the first."""
    names = find_target_parameters(settings, module)
    names = sorted({*names}, key=lambda name: name != GATE_UP)
    if len(names) != len(layers) or not {*names} <= {GATE_UP, DOWN_PROJ}:
        raise RefusedError(
            f"module {module!r} has LoRAs of {len(layers)} parameters, and the configuration"
            f" targets {', '.join(names) or 'none'}; {GATE_UP} and {DOWN_PROJ} can be converted",
            where=where,
            hint="pass the configuration that the run used with --adapter-config",
        )
    return list(zip(names, sorted(layers, key=lambda layer: -layer.level), strict=True))


def _cut(layer: LoraLayer, rank: int, count: int) -> Iterator[tuple[Arrangement, Arrangement]]:
    down = _whole(layer.down).viewed((count, rank, layer.down.shape[1]))
    up = _whole(layer.up).viewed((layer.up.shape[0], rank, count))
    for expert in range(count):
        yield down.selected(0, expert), up.selected(2, expert)


def _is_swapped(
    layer: LoraLayer, name: str, settings: LoraSettings, form: ExpertForm, hidden: object
) -> bool:
    """Returns whether A has the outputs and B the inputs, as in PEFT before 0.19 for [out, in]."""
    if form.is_transposed:
        return False
    of_inputs, of_outputs = layer.down.shape[1], layer.up.shape[0]
    if of_inputs != of_outputs and isinstance(hidden, int):
        return (of_outputs if name == GATE_UP else of_inputs) == hidden
    return parse_version(settings.peft_version) < EXPERTS_BY_CLASS


def _split_rows(up: Arrangement, name: str, form: ExpertForm) -> Iterator[tuple[int, Arrangement]]:
    if name == DOWN_PROJ:
        yield DOWN, up
        return
    width, rank = up.shape[0] // 2, up.shape[1]
    for matrix in (GATE, UP):
        if form.is_interleaved:
            yield matrix, up.viewed((width, 2, rank)).selected(1, matrix)
        else:
            yield matrix, up.sliced(0, width * matrix, width * (matrix + 1))


def _check(
    home: str,
    factors: Mapping[tuple[int, int], Factors],
    count: int,
    config: Mapping[str, object],
    where: str,
) -> Experts:
    (matrix, _), first = next(iter(factors.items()))
    sizes = (first.down.shape[1], first.up.shape[0])
    hidden, width = sizes[::-1] if matrix == DOWN else sizes
    widths = [config.get(key) for key in ("moe_intermediate_size", "intermediate_size")]
    known_width = next((size for size in widths if isinstance(size, int)), width)
    known = config.get("hidden_size")
    experts = Experts(home, count, known if isinstance(known, int) else hidden, known_width, {})
    layers, number = config.get("num_hidden_layers"), re.search(r"layers\.(\d+)\.", f"{home}.")
    if isinstance(layers, int) and number is not None and int(number[1]) >= layers:
        raise AdapterError(
            f"the adapter has factors of {home!r}, and the base has {layers} layers",
            where=where,
            hint=_OTHER_BASE,
        )
    held = {expert for _, expert in factors}
    is_known = any(isinstance(config.get(key), int) for key in _COUNTS)
    if max(held) >= count:
        raise _make_count_error(home, max(held) + 1, count, where)
    if not is_known and len(held) != count:
        raise RefusedError(
            f"the adapter has factors of {len(held)} experts of {home!r}, up to number"
            f" {max(held)}, and nothing shows how many there are",
            where=where,
            hint="pass the model that the adapter was trained on with --base",
        )
    for (matrix, expert), own in factors.items():
        shape = (own.up.shape[0], own.down.shape[1])
        if shape != experts.shape(matrix):
            raise AdapterError(
                f"the factors of expert {expert} of {home!r} are for a matrix of shape"
                f" {list(shape)}, expected {list(experts.shape(matrix))}",
                where=where,
                hint=_OTHER_BASE,
            )
    return replace(experts, factors=factors)


def separate_blocks(experts: Experts) -> Experts:
    """Takes factors of gate and up that stand in blocks apart; the caller has seen the zeros."""
    factors = dict(experts.factors)
    for (matrix, expert), own in experts.factors.items():
        half = own.rank // 2
        if matrix == DOWN:
            continue
        start = half * matrix
        down, up = own.down.sliced(0, start, start + half), own.up.sliced(1, start, start + half)
        factors[matrix, expert] = replace(own, down=down, up=up)
    return replace(experts, factors=factors)


def make_parameters(
    experts: Experts, form: ExpertForm, *, is_one_down: bool, fill: bool, where: str
) -> Iterator[Target]:
    """Yields the factors of all experts, in one parameter each.

    `is_one_down`: whether gate and up have the same A. `fill`: whether both parameters are made.
    """
    held = {matrix for matrix, _ in experts.factors}
    parameters = [(GATE_UP, (GATE, UP)), (DOWN_PROJ, (DOWN,))]
    made = [(name, own) for name, own in parameters if fill or held & {*own}]
    for name, matrices in made:
        scaling, factors = _choose_scaling(experts, matrices, where)
        each: list[tuple[Arrangement, Arrangement]] = []
        for expert in range(experts.count):
            own = [experts.factors.get((matrix, expert)) for matrix in matrices]
            each.append(_fuse(experts, own, matrices, form, is_one_down=is_one_down))
        rank = max(1, *(down.shape[0] for down, _ in each))
        downs = [down.padded(0, rank) for down, _ in each]
        ups = [up.padded(1, rank).unsqueezed(2) for _, up in each]
        stacked = join(ups, 2)
        module = f"{experts.home}.experts"
        inner = ".base_layer" if name == GATE_UP and len(made) > 1 else ""
        yield Target(
            f"{module}.{name}",
            rank,
            scaling,
            {
                Fqn(f"{module}{inner}.lora_A.weight"): join(downs, 0),
                Fqn(f"{module}{inner}.lora_B.weight"): stacked.viewed(
                    (stacked.shape[0], rank * experts.count)
                ),
            },
            factors,
        )


def _fuse(
    experts: Experts,
    own: Sequence[Factors | None],
    matrices: Sequence[int],
    form: ExpertForm,
    *,
    is_one_down: bool,
) -> tuple[Arrangement, Arrangement]:
    """Returns the factors of one expert for the rows of one or two matrices."""
    there = [factors for factors in own if factors is not None]
    sizes = [experts.shape(matrix) for matrix in matrices]
    if not there:
        rows = sum(size[0] for size in sizes)
        return Arrangement((0, sizes[0][1]), ()), Arrangement((rows, 0), ())
    is_shared = len(there) == 1 or is_one_down
    down = there[0].down if is_shared else join([factors.down for factors in there], 0)
    ups = []
    before = 0
    for factors, (rows, _) in zip(own, sizes, strict=True):
        if factors is None:
            ups.append(Arrangement((rows, down.shape[0]), ()))
            continue
        blocks = [Arrangement((rows, before), ()), factors.up] if before else [factors.up]
        ups.append(join(blocks, 1).padded(1, down.shape[0]))
        before += 0 if is_shared else factors.rank
    if len(ups) > 1 and form.is_interleaved:
        pairs = join([up.unsqueezed(1) for up in ups], 1)
        return down, pairs.viewed((2 * experts.width, down.shape[0]))
    return down, join(ups, 0)


def make_modules(experts: Experts, form: ExpertForm, *, where: str) -> Iterator[Target]:
    """Yields the factors of each matrix, apart for each expert."""
    home = rename(experts.home, form, is_stored=True)
    for matrix, name in enumerate(form.matrices):
        own = {e: f for (m, e), f in experts.factors.items() if m == matrix}
        rank = max((factors.rank for factors in own.values()), default=0)
        rank = rank or max(factors.rank for factors in experts.factors.values())
        out, inner = experts.shape(matrix)
        tensors: dict[Fqn, Arrangement] = {}
        scaling, multiplied = _choose_scaling(experts, (matrix,), where)
        for expert in range(experts.count):
            factors = own.get(expert)
            if factors is None:
                down, up = Arrangement((rank, inner), ()), Arrangement((out, rank), ())
            else:
                factors = factors.padded(rank)
                down, up = factors.down, factors.up
            module = f"{home}.experts.{expert}.{name}"
            tensors[Fqn(f"{module}.lora_A.weight")] = down
            tensors[Fqn(f"{module}.lora_B.weight")] = up
        pattern = rf"{re.escape(home)}\.experts\.\d+\.{name}"
        yield Target(pattern, rank, scaling, tensors, multiplied)


def _choose_scaling(
    experts: Experts, matrices: Sequence[int], where: str
) -> tuple[float, dict[Fqn, float]]:
    """Returns the scaling of factors that share one, and what makes up for others.

    Multiplying by a power of two does not round.
    """
    own = [(key, f) for key, f in experts.factors.items() if key[0] in matrices]
    scaling = max((f.scaling for _, f in own), key=abs, default=1.0)
    factors: dict[Fqn, float] = {}
    for (_, expert), found in own:
        if found.scaling == scaling:
            continue
        ratio = found.scaling / scaling
        if abs(math.frexp(ratio)[0]) != 0.5 or ratio * scaling != found.scaling:  # noqa: PLR2004
            raise RefusedError(
                f"expert {expert} of {experts.home!r} has the scaling {found.scaling:g} against"
                f" {scaling:g} of others, and the layout has one for all of them",
                where=where,
                hint="train them with one alpha / rank, or `ckptkit adapter merge` the adapter",
            )
        factors |= {name: ratio for name, _ in found.up.parts}
    return scaling, factors
