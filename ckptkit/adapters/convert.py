"""`ckptkit.convert_adapter`: LoRA of experts in another layout, that of PEFT or that of vLLM.

Every product of factors stays what it is. Source: `ckptkit/lora/experts.py`; vllm 0.33,
`lora/peft_helper.py` for what it refuses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.extract import plan_adapter, write_adapter
from ckptkit.adapters.sources import (
    AdapterRequest,
    OpenedAdapter,
    open_adapter,
    read_base_config,
)
from ckptkit.conversion.source.model_folders import read_names
from ckptkit.conversion.source.paths import find_model
from ckptkit.conversion.write import PlannedOutput
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.errors import AdapterError, CkptkitError, RefusedError
from ckptkit.core.geometry import Arrangement, flat_offset, row_major_strides
from ckptkit.core.index import Fqn, Span, TensorEntry
from ckptkit.core.manifest import Manifest
from ckptkit.core.model_configs import list_model_types
from ckptkit.core.text import list_first
from ckptkit.engine.kernels import ConstantKernel, copy_tile
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.lora.config import EXPERTS_BY_CLASS, PEFT_PREFIX, parse_version
from ckptkit.lora.dialects import LoraLayer, build_table
from ckptkit.lora.experts import (
    DOWN,
    GATE,
    UP,
    ExpertForm,
    Experts,
    Target,
    collect,
    find_form,
    is_of_experts,
    is_router,
    make_modules,
    make_parameters,
    rename,
    separate_blocks,
)
from ckptkit.lora.inference import fits_target
from ckptkit.options import AdapterLayout, Resources, check_choice
from ckptkit.plan.plan import (
    SOURCE,
    Compute,
    Copy,
    Demand,
    Kernel,
    Product,
    Reading,
    TensorSpec,
)
from ckptkit.storage.places import PathLike

_WITH_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Options that name modules or layers, which are named anew.
_BY_PATH = frozenset(
    {"target_modules", "target_parameters", "rank_pattern", "alpha_pattern", "exclude_modules"}
    | {"layers_to_transform", "layers_pattern"}
)
_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})
_OF_ONE_EXPERT = 3  # segments of a name, such as `experts.0.gate_proj`
_WHOLE_IN_VLLM = frozenset({"score", "classifier"})
_KEEP = "keep the adapter as it is, or `ckptkit adapter merge` it into its base"


class FactorKernel(Kernel, Struct, frozen=True):
    """A factor that is made of parts of others; it reads these whole, and shares them."""

    arrangement: Arrangement
    sources: Mapping[Fqn, TensorEntry]
    factors: Mapping[Fqn, float]  # that sources are multiplied by; powers of two

    @property
    def is_ready(self) -> bool:
        return False

    def prepare(self, out: TensorSpec, reading: Reading) -> Kernel:
        def read(entry: TensorEntry) -> NDArray[Any]:
            return reading.read_shared(Demand(SOURCE, entry.key, Span(0, entry.elements)))

        values = {name: read(entry) for name, entry in self.sources.items()}
        for name, factor in self.factors.items():
            if name in values:
                values[name] = _multiply(values[name], factor, out.name)
        made = gather(self.arrangement, values, numpy_dtype(out.dtype))
        return ConstantKernel(made.reshape(-1))


def gather(
    arrangement: Arrangement, sources: Mapping[Fqn, NDArray[Any]], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Returns a tensor that is made of parts of others, which are one-dimensional."""
    made = np.zeros(math.prod(arrangement.shape), dtype)
    strides = row_major_strides(arrangement.shape)
    for name, tile in arrangement.parts:
        source = sources[name][tile.corners[1][0] :]
        copy_tile(tile, source, made[flat_offset(tile.corners[0], strides) :], strides)
    return made.reshape(arrangement.shape)


def _multiply(values: NDArray[Any], factor: float, name: Fqn) -> NDArray[Any]:
    made = (values.astype(np.float64) * factor).astype(values.dtype)
    if not np.array_equal(made.astype(np.float64), values.astype(np.float64) * factor):
        raise RefusedError(
            f"factors of tensor {name!r} are too small to be multiplied by {factor:g} exactly,"
            " which one scaling of all experts needs",
            hint=_KEEP,
        )
    return made


def run_conversion(
    src: PathLike,
    out: PathLike,
    request: AdapterRequest,
    *,
    to: AdapterLayout,
    overwrite: bool = False,
    listener: Listener = ignore,
) -> tuple[Manifest, OpenedAdapter]:
    """Writes an adapter in another layout into the directory `out`, whole or not at all."""
    prepared = prepare_conversion(src, out, request, to, Resources())
    return write_adapter(prepared, src, out, request, overwrite=overwrite, listener=listener)


@contextmanager
def prepare_conversion(
    src: PathLike, out: PathLike, request: AdapterRequest, to: AdapterLayout, resources: Resources
) -> Iterator[tuple[PlannedOutput, OpenedAdapter]]:
    """Opens an adapter, and plans it in another layout; writes nothing."""
    check_choice("--to", to, get_args(AdapterLayout))
    with ExitStack() as stack:
        found = open_adapter(stack, src, request)
        named = found.adapter.settings.base_model_name_or_path
        config = read_base_config(found.folders, request.base, named) or {}
        converted, products = _Conversion(found, config, to).run(request.base)
        planned = plan_adapter(converted, products, request, "", out, resources)
        yield replace(planned, options={**planned.options, "to": to}), converted


class _Conversion:
    def __init__(self, found: OpenedAdapter, config: Mapping[str, Any], to: AdapterLayout) -> None:
        self._found, self._to, self._config = found, to, config
        self._where = found.opened.path
        self._settings = found.adapter.settings
        self._table = build_table(found.adapter.tensors)
        self._reader = ArrayReader(found.origin)
        self._notes: list[str] = []
        self._present: set[str] = set()  # modules of the base, by the names of its files
        entries = [e for layer in self._table.layers for e in (layer.down, layer.up)]
        self._entries = {Fqn(entry.key): entry for entry in entries}

    def run(self, base: PathLike | None) -> tuple[OpenedAdapter, list[Product]]:
        own = [layer for layer in self._table.layers if is_of_experts(layer)]
        if not own:
            raise RefusedError(
                "the adapter has no factors of experts, and is the same in both layouts",
                where=self._where,
                hint="`ckptkit adapter extract` writes it for PEFT and vLLM",
            )
        self._refuse_what_is_lost()
        form = find_form(list_model_types(self._config), own, where=self._where)
        parts = [self._config, *(p for p in self._config.values() if isinstance(p, Mapping))]
        with_experts = next((p for p in parts if any(key in p for key in _WITH_EXPERTS)), {})
        experts = collect(own, self._settings, form, with_experts, where=self._where)
        experts = {home: self._separate(one) for home, one in experts.items()}
        if base is not None:
            self._compare_with_names(base, experts, form)
        targets = [t for one in experts.values() for t in self._make(one, form)]
        products = [
            self._make_product(name, arrangement, target)
            for target in targets
            for name, arrangement in target.tensors.items()
        ]
        others, modules = self._keep_others(experts, form)
        document = self._make_document(targets, modules, form)
        settings = type(self._settings).parse(document, where=self._where)
        adapter = replace(self._found.adapter, settings=settings)
        count = sum(len(one.factors) for one in experts.values())
        layout = "PEFT's target_parameters" if self._is_fused(form) else "one module per expert"
        self._notes.insert(
            0,
            f"factors of {count:,} matrices of experts in {len(experts):,} layers were converted:"
            f" {layout}",
        )
        notes = (*self._found.notes, *dict.fromkeys(self._notes))
        return replace(self._found, adapter=adapter, notes=notes), [*products, *others]

    def _is_fused(self, form: ExpertForm) -> bool:
        return self._to == "peft" or form.is_fused_in_vllm

    def _refuse_what_is_lost(self) -> None:
        settings, title = self._settings, {"peft": "PEFT", "vllm": "vLLM"}[self._to]
        whole = [name for name in settings.modules_to_save if name not in _WHOLE_IN_VLLM]
        options = {
            "use_dora": settings.use_dora,
            "lora_bias": settings.lora_bias,
            "fan_in_fan_out": settings.fan_in_fan_out,
            f"init_lora_weights={settings.init_lora_weights!r}": settings.changes_base,
        }
        if self._to == "vllm":
            options |= {
                f"modules_to_save {', '.join(whole)}": bool(whole),
                f"bias={settings.bias!r}": settings.bias != "none",
                "trainable_token_indices": bool(self._table.tokens),
            }
        lost = next((option for option, is_set in options.items() if is_set), "")
        if lost:
            raise RefusedError(
                f"the adapter has {lost}, which {title} does not load with factors of experts",
                where=self._where,
                hint=_KEEP,
            )

    def _separate(self, experts: Experts) -> Experts:
        """Takes gate and up apart where their factors stand in blocks of one parameter."""
        pairs = self._list_pairs(experts)
        if not pairs or any(g.down != u.down or g.rank % 2 for g, u in pairs):
            return experts
        values: dict[Fqn, NDArray[Any]] = {}
        half = pairs[0][0].rank // 2
        for gate, up in pairs:
            if (
                self._read(gate.up, values)[:, half:].any()
                or self._read(up.up, values)[:, :half].any()
            ):
                return experts
        return separate_blocks(experts)

    def _list_pairs(self, experts: Experts) -> list[tuple[Any, Any]]:
        held = experts.factors
        return [
            (held[GATE, e], held[UP, e])
            for e in range(experts.count)
            if (GATE, e) in held and (UP, e) in held
        ]

    def _have_one_down(self, experts: Experts) -> bool:
        values: dict[Fqn, NDArray[Any]] = {}
        return all(
            gate.down == up.down
            or (
                gate.rank == up.rank
                and np.array_equal(
                    self._read(gate.down, values).view(np.uint8),
                    self._read(up.down, values).view(np.uint8),
                )
            )
            for gate, up in self._list_pairs(experts)
        )

    def _read(self, arrangement: Arrangement, values: dict[Fqn, NDArray[Any]]) -> NDArray[Any]:
        for name, _ in arrangement.parts:
            if name not in values:
                values[name] = self._reader.read_whole(self._entries[name]).reshape(-1)
        dtype = numpy_dtype(self._entries[arrangement.parts[0][0]].dtype)
        return gather(arrangement, values, dtype)

    def _make(self, experts: Experts, form: ExpertForm) -> list[Target]:
        held = experts.factors
        is_whole = len({matrix for matrix, _ in held}) * experts.count == len(held)
        fill = self._to == "vllm"
        if not is_whole or (fill and len(held) < experts.count * (DOWN + 1)):
            self._notes.append(
                "matrices of experts that the adapter leaves as they are have factors of zeros,"
                " since the layout has all of them"
            )
        if not self._is_fused(form):
            made = list(make_modules(experts, form, where=self._where))
        else:
            is_one = self._have_one_down(experts)
            if not is_one:
                self._notes.append(
                    "gate and up have an A of their own, and one parameter holds both: their"
                    " factors stand in blocks, and the rank is the sum of both"
                )
            made = list(
                make_parameters(experts, form, is_one_down=is_one, fill=fill, where=self._where)
            )
        for matrix in (GATE, UP, DOWN):
            if len({f.rank for (m, _), f in held.items() if m == matrix}) > 1:
                self._notes.append(
                    "ranks of experts differ, and the layout has one: smaller ones are filled"
                    " with zeros"
                )
        return made

    def _make_product(self, name: Fqn, arrangement: Arrangement, target: Target) -> Product:
        sources = {source: self._entries[source] for source, _ in arrangement.parts}
        types = {entry.dtype for entry in sources.values()}
        types = types or {entry.dtype for entry in self._entries.values()}
        if len(types) > 1:
            raise AdapterError(
                f"tensor {name!r} would be made of {list_first(sorted(t.name for t in types))}",
                where=self._where,
                hint="save the factors in one element type",
            )
        factors = target.factors if ".lora_B." in name else {}
        kernel = FactorKernel(arrangement, sources, factors)
        reads = tuple((SOURCE, entry.key) for entry in sources.values())
        spec = TensorSpec(Fqn(PEFT_PREFIX + name), types.pop(), arrangement.shape)
        return Product(spec, Compute(kernel, reads))

    def _keep_others(
        self, experts: Mapping[str, Experts], form: ExpertForm
    ) -> tuple[list[Product], dict[str, tuple[LoraLayer, str]]]:
        """Returns the tensors that no expert has, and the modules of factors by new names."""
        is_stored = not self._is_fused(form)
        tensors = dict(self._found.adapter.tensors)
        tensors |= {second: tensors[first] for second, first in self._found.twice.items()}
        names: dict[Fqn, Fqn] = {}
        modules: dict[str, tuple[LoraLayer, str]] = {}
        for layer in self._table.layers:
            if is_of_experts(layer):
                for name in layer.names:
                    del tensors[name]
                continue
            inside = rename(layer.module, form, is_stored=False)
            is_parameter = is_router(inside, experts)
            module = rename(inside, form, is_stored=True) if is_stored and is_parameter else inside
            modules[module] = (layer, ".weight" if is_parameter else "")
            is_lost = form.is_named_as_dense and layer.module.rpartition(".")[2] in _OF_EXPERTS
            if is_lost and self._to == "peft":
                raise RefusedError(
                    f"the adapter has factors of {layer.module!r}, which is no expert, and PEFT"
                    " 0.21 takes modules of this name in the model for experts, so that it would"
                    " leave it out",
                    where=self._where,
                    hint=_KEEP,
                )
            for name in layer.names:
                names[name] = Fqn(name.replace(layer.module, module, 1))
        renamed = {names.get(name, name): entry for name, entry in tensors.items()}
        products = [
            Product(TensorSpec(name, entry.dtype, entry.shape), Copy(SOURCE, entry.key))
            for name, entry in renamed.items()
        ]
        return products, modules

    def _make_document(
        self,
        targets: Sequence[Target],
        modules: Mapping[str, tuple[LoraLayer, str]],
        form: ExpertForm,
    ) -> dict[str, Any]:
        """Returns the configuration, which gives every product the scaling that it had."""
        settings = self._settings
        is_rslora = settings.use_rslora and self._to == "peft"  # which SGLang does not read
        wanted: dict[str, tuple[int, float]] = {}
        for module, (layer, ending) in modules.items():
            parameter = f"{layer.module}.weight"
            is_parameter = any(fits_target(t, parameter) for t in settings.target_parameters)
            owner = parameter if is_parameter else layer.owner
            key = f"{module}{ending if self._to == 'peft' else ''}"
            kept = (settings.rank(owner), settings.alpha(owner))
            if is_rslora != settings.use_rslora:
                kept = (kept[0], _find_alpha(settings.scaling(owner), kept[0], is_rslora=is_rslora))
            wanted[key] = kept
        for target in targets:
            alpha = _find_alpha(target.scaling, target.rank, is_rslora=is_rslora)
            wanted[target.pattern] = (target.rank, alpha)
        (rank, alpha), _ = Counter(wanted.values()).most_common(1)[0]
        document = {key: v for key, v in settings.document.items() if key not in _BY_PATH}
        document |= {"r": rank, "lora_alpha": _as_integer(alpha)}
        if is_rslora != settings.use_rslora:
            document["use_rslora"] = False
            self._notes.append(
                "rsLoRA's scaling is written as alpha / rank: SGLang 0.5.23 knows no other"
            )
        ranks = {key: r for key, (r, _) in wanted.items() if r != rank}
        alphas = {key: _as_integer(a) for key, (_, a) in wanted.items() if a != alpha}
        if ranks or alphas:
            document |= {"rank_pattern": ranks, "alpha_pattern": alphas}
            if self._to == "vllm":
                self._notes.append(
                    "the configuration has ranks or scalings by module, which vLLM 0.33 reads;"
                    " SGLang 0.5.23 takes one for all modules"
                )
        parameters = [f"{m}{e}" for m, (_, e) in modules.items() if e and self._to == "peft"]
        plain = [m for m, (_, e) in modules.items() if not (e and self._to == "peft")]
        if self._is_fused(form):
            document["target_modules"] = sorted(plain) or None
            document["target_parameters"] = sorted([*parameters, *(t.pattern for t in targets)])
            if parse_version(settings.peft_version) < EXPERTS_BY_CLASS:
                document["peft_version"] = ".".join(map(str, (*EXPERTS_BY_CLASS, 0)))
            if document.get("lora_dropout"):
                document["lora_dropout"] = 0.0
                self._notes.append("lora_dropout is 0: PEFT has none for parameters")
        else:
            experts = {n.rpartition(".lora_")[0] for t in targets for n in t.tensors}
            document["target_modules"] = _shorten({*plain, *experts}, self._present)
        return document

    def _compare_with_names(
        self, base: PathLike, experts: Mapping[str, Experts], form: ExpertForm
    ) -> None:
        """Refuses an adapter of layers that the base does not have."""
        try:
            names = read_names(find_model(base, "--base")[0])
        except CkptkitError:  # then the configuration alone says what there is
            return
        if not names:
            return
        self._present = {name.rpartition(".")[0] for name in names}
        held = {rename(name, form, is_stored=False) for name in names}
        around = {
            ".".join(parts[:stop])
            for parts in (name.split(".") for name in held)
            for stop in range(1, len(parts))
        }
        wanted = [f"{home}.experts" for home in experts]
        wanted += [
            rename(layer.module, form, is_stored=False)
            for layer in self._table.layers
            if not is_of_experts(layer)
        ]
        lost = [module for module in wanted if module not in around]
        if lost:
            raise AdapterError(
                f"the base has no weights of {list_first(lost)}, which the adapter has factors of",
                where=self._where,
                hint="the adapter was trained on another base model; pass that one with --base",
            )


def _shorten(meant: Collection[str], present: Collection[str]) -> list[str]:
    """Returns ends of the paths `meant` that no other module of the base has."""
    lengths = (1, _OF_ONE_EXPERT)

    def end(path: str, length: int) -> str:
        return ".".join(path.split(".")[-length:])

    others = {end(path, length) for path in {*present} - {*meant} for length in lengths}
    return sorted(
        {
            next((e for length in lengths if (e := end(path, length)) not in others), path)
            for path in meant
        }
    )


def _find_alpha(scaling: float, rank: int, *, is_rslora: bool) -> float:
    """Returns the alpha of a scaling, to the last bit where there is one."""
    divisor = math.sqrt(rank) if is_rslora else rank
    alpha = scaling * divisor
    near = (round(alpha), alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    return float(next((one for one in near if one / divisor == scaling), alpha))


def _as_integer(alpha: float) -> float | int:
    return int(alpha) if float(alpha).is_integer() else alpha
