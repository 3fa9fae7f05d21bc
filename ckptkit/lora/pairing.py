"""The changes that an adapter makes to the tensors of its base, from names and shapes alone.

Everything that an adapter has is used exactly once, or refused: a tensor that would be ignored is a
part of the training that would be lost. How factors are stored in a weight follows from shapes;
where shapes leave two ways open (square weights), the model's class decides, which `model_type`
stands for, and then the configuration.

Source: peft 0.21, `inject_adapter` and `_inject_parameters` in `tuners/tuners_utils.py` for how
targets are found and nested, `set_additional_trainable_modules` in `utils/other.py`; `Linear`,
`Embedding`, `_ConvNd` and `ParamWrapper` in `tuners/lora/layer.py`; transformers 5.23 for the
classes that use `Conv1D` and `is_transposed` experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple, TypeVar

from ckptkit.consumers.class_facts import find_text_model as find_auto_class
from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.hub_names.known_models import BASE_PREFIXES, determine_need
from ckptkit.lora.changes import (
    AdapterSource,
    BiasChange,
    Change,
    Form,
    LowRankChange,
    Replacement,
    TokenRowsChange,
)
from ckptkit.lora.config import EXPERTS_BY_CLASS, Adapter, parse_version
from ckptkit.lora.dialects import (
    LoraLayer,
    build_table,
    is_frozen_name,
    is_input_embedding,
    make_plain_name,
)
from ckptkit.lora.inference import find_target_parameters, fits_target, is_conv1d, is_saved
from ckptkit.plan.vocabulary import is_head

_Value = TypeVar("_Value")
Shapes = Mapping[Fqn, Shape]
_ATTENTION = "in_proj_weight"  # the target in torch's MultiheadAttention
_INSIDE_ANOTHER = "language_model"  # in the names of text models in classes of multimodal ones
_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
_FUSED = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_OF_TEXT_ALONE = ("", "model.")  # what names of text models begin with that are no part of another
_TEXT_CLASS = "ForCausalLM"
_LISTED = 5
_EXPERTS = 3
# Model types whose fused experts are stored as [experts, in, out].
_TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "openai_privacy_filter", "aria", "aria_text"})
_MOST_NESTED = 4  # real layers have two fused parameters, and biases, which are no targets
# The first of fused experts in every class of Transformers, where shapes do not distinguish them.
_DEFINED_FIRST = "gate_up_proj"
_OTHER_BASE = "the adapter was trained on another base model; pass that one with --base"
_OTHER_CONFIG = "pass the configuration that the adapter was trained with as --adapter-config"


class Renaming(NamedTuple):
    """What names of an adapter begin with, and the same names in its base; often both empty."""

    own: str = ""
    base: str = ""

    def to_base(self, name: str) -> Fqn:
        """Returns a name of the adapter as the base has it."""
        inside = name.startswith(self.own)
        return Fqn(self.base + name.removeprefix(self.own) if inside else name)

    def to_adapter(self, names: Mapping[Fqn, _Value]) -> dict[Fqn, _Value]:
        """Returns values by names of the base under those of the adapter."""
        others = {name: value for name, value in names.items() if not name.startswith(self.base)}
        moved = {
            Fqn(self.own + name.removeprefix(self.base)): value
            for name, value in names.items()
            if name not in others
        }
        return others | moved

    def is_of_adapted(self, name: str) -> bool:
        """Returns whether the model that was trained has a tensor of the base."""
        return name.startswith(self.base) or (not name.startswith(self.own) and is_head(name))


SAME_NAMES = Renaming()


def list_owners(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def find_text_model(
    modules: Collection[str], owners: Collection[str], config: Mapping[str, Any] | None
) -> Renaming | None:
    """Finds the text model of a multimodal base for an adapter that was trained on it alone.

    It is the one with the input embedding: towers for images may have layers of the same names.
    Files of some multimodal models, such as Qwen2.5-VL's, have the names of the text model alone.
    None where there is no such model, or where more than one fits. `owners` are the modules of the
    base that have tensors.
    """
    if not isinstance((config or {}).get("text_config"), Mapping):
        return None
    missing = [module for module in modules if module not in owners]
    within = [module for module in modules if not is_head(f"{module}.weight")]
    homes = {owner.rpartition(".")[0] for owner in owners if is_input_embedding(owner)} - {""}
    if not missing:
        fitting = {
            Renaming(f"{home}.", f"{home}.") for home in homes if _INSIDE_ANOTHER not in home
        }
        found = [r for r in fitting if all(module.startswith(r.own) for module in within)]
    else:
        starts = [missing[0][: dot.end()] for dot in re.finditer(r"^|\.", missing[0])]
        fitting = {Renaming(start, f"{home}.") for home in homes for start in starts}
        found = [r for r in fitting if all(module.startswith(r.own) for module in missing)]
        found = [r for r in found if all(r.to_base(module) in owners for module in missing)]
    return found[0] if len(found) == 1 else None


def find_lost(
    modules: Sequence[str], names: Collection[str], config: Mapping[str, Any] | None
) -> Sequence[str] | None:
    """Returns modules of an adapter that its base lacks; None where that cannot be said.

    `names` are those of the base's files.
    """
    owners = list_owners(names)
    parts = [owner.split(".") for owner in owners]
    # With the modules around them, which PEFT compares too.
    held = {".".join(path[:stop]) for path in parts for stop in range(1, len(path) + 1)}
    missing = [module for module in modules if module not in held]
    is_converted = determine_need(config, has_base=True).kind == "ask"
    single = {m for m in modules if is_converted and _SINGLE_EXPERT.search(m) is not None}
    if single:
        # Transformers has them in one parameter: PEFT 0.21 joins the factors of all experts, for
        # some families.
        return sorted(single) if _are_some_experts(single, owners) else None
    if not missing or find_text_model(modules, owners, config) is not None:
        return ()
    if is_converted or not names:
        return None  # files and memory may have other names
    known = {f"{prefix}.{owner}" for prefix in BASE_PREFIXES for owner in owners}
    known |= {
        o.removeprefix(f"{p}.") for o in owners for p in BASE_PREFIXES if o.startswith(f"{p}.")
    }
    return tuple(m for m in missing if m not in known)


def _are_some_experts(modules: Collection[str], owners: Collection[str]) -> bool:
    """Returns whether an adapter has one of several experts, or of gate and up, alone."""
    needed = {_SINGLE_EXPERT.sub(".experts.*.", module) for module in modules}
    parts = [module.rpartition(".") for module in needed]
    needed |= {f"{home}.{_FUSED[name]}" for home, _, name in parts if name in _FUSED}
    stored = (owner for owner in owners if _SINGLE_EXPERT.search(owner) is not None)
    return any(o not in modules and _SINGLE_EXPERT.sub(".experts.*.", o) in needed for o in stored)


def find_of_text(
    modules: Sequence[str], names: Collection[str], config: Mapping[str, Any] | None
) -> Sequence[str]:
    """Returns modules that are those of the text model alone where the base is a multimodal one.

    `AutoModelForCausalLM` gives the text model for some multimodal configurations, and PEFT then
    places them. `names` are those of the base's files.
    """
    text = find_text_model(modules, list_owners(names), config)
    given = find_auto_class(str((config or {}).get("model_type")))
    if text is None or text.own not in _OF_TEXT_ALONE or given.endswith(_TEXT_CLASS):
        return ()
    # Files of some families have the names of the text model, and memory has others.
    if text.own == text.base and determine_need(config, has_base=True).kind != "ask":
        return ()
    return [module for module in modules if module.startswith(text.own)]


def find_changes(
    adapter: Adapter,
    shapes: Shapes,
    source: AdapterSource,
    *,
    model_types: frozenset[str] = frozenset(),
    weight: float = 1.0,
) -> list[Change]:
    """Returns what an adapter changes; the changes of one tensor are in the order of merging.

    `shapes` are those of the base's tensors by live name; for `model_types` see `find_model_types`.
    `weight` is multiplied with the scaling of low-rank updates.
    """
    return _Pairing(adapter, shapes, source, model_types, weight).run()


class _Pairing:
    def __init__(
        self,
        adapter: Adapter,
        shapes: Shapes,
        source: AdapterSource,
        model_types: frozenset[str],
        weight: float,
    ) -> None:
        self._settings = adapter.settings
        self._table = build_table(adapter.tensors)
        self._of_base = shapes
        self._shapes = dict(shapes)  # with those of replaced tensors
        self._source = source
        self._model_types = model_types
        self._weight = weight

    def run(self) -> list[Change]:
        replaced = [self._replace(name, entry) for name, entry in self._table.whole.items()]
        # The adapter's embedding replaces that of the base, which may have fewer rows.
        self._shapes |= {change.weight: change.tensor.shape for change in replaced}
        by_module: dict[str, list[LoraLayer]] = {}
        for layer in self._table.layers:
            by_module.setdefault(layer.module, []).append(layer)
        unknown = [m for m in self._table.tokens if Fqn(f"{m}.weight") not in self._shapes]
        updates: list[Change] = []
        for module, layers in by_module.items():
            changes = list(self._update(module, layers))
            updates += changes
            if not changes:
                unknown.append(module)
        if unknown:
            more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
            raise self._make_error(
                f"the base has no weight for {len(unknown)} modules of the adapter:"
                f" {', '.join(unknown[:_LISTED])}{more}",
                _OTHER_BASE,
            )
        rows = [self._replace_rows(module, entry) for module, entry in self._table.tokens.items()]
        return [*replaced, *updates, *rows]

    # --- whole tensors ---

    def _replace(self, file_name: Fqn, entry: TensorEntry) -> Replacement:
        name = Fqn(make_plain_name(file_name))
        module = name.rpartition(".")[0]
        shape = self._of_base.get(name)
        is_trained = is_saved(self._settings.modules_to_save, module)
        if shape is None and not is_trained:
            raise self._make_error(
                f"tensor {name!r} is neither in the base model nor in one of 'modules_to_save'",
                _OTHER_BASE,
            )
        # A vocabulary, or a head that was initialized anew, may have another number of rows.
        may_differ = is_trained or len(entry.shape) > 1
        if shape is not None and (
            shape[1:] != entry.shape[1:] or not (may_differ or shape == entry.shape)
        ):
            raise self._make_error(
                f"tensor {name!r} has shape {list(entry.shape)}, expected {list(shape)} as in the"
                " base",
                _OTHER_BASE,
            )
        return Replacement(self._source, name, module, entry, is_frozen_name(file_name))

    # --- wrapped modules ---

    def _update(self, module: str, layers: Sequence[LoraLayer]) -> Iterator[Change]:
        for layer, weight in self._find_weights(module, layers):
            yield self._update_weight(layer, weight)
            if layer.up_bias is None:
                continue
            name, bias = Fqn(f"{module}.bias"), layer.up_bias
            shape = self._shapes.get(name)
            if shape is None:
                raise self._make_error(
                    f"module {module!r} has a bias in the adapter and none in the base, so it has"
                    " no merged form",
                    "keep this adapter apart from its base; PEFT does not merge it either",
                )
            if shape != bias.shape:
                raise self._make_error(
                    f"module {module!r} has lora_B.bias of shape {list(bias.shape)} against"
                    f" {list(shape)} in the base",
                    _OTHER_BASE,
                )
            scaling = self._settings.scaling(module) * self._weight
            yield BiasChange(self._source, name, module, bias, scaling)

    def _find_weights(
        self, module: str, layers: Sequence[LoraLayer]
    ) -> list[tuple[LoraLayer, Fqn]]:
        """Returns the weight that each wrapper of a module wraps, if there is one."""
        if len(layers) == 1:
            for name in ("weight", _ATTENTION):
                weight = Fqn(f"{module}.{name}")
                if weight in self._shapes:
                    return [(layers[0], weight)]
        own = [n.rpartition(".")[2] for n in self._shapes if n.rpartition(".")[0] == module]
        names = find_target_parameters(self._settings, module, own) if own else []
        targets = [Fqn(f"{module}.{name}") for name in dict.fromkeys(names)]
        if not targets or len(targets) > _MOST_NESTED:
            return []
        if len(targets) != len(layers):
            raise self._make_error(
                f"module {module!r} has LoRAs of {len(layers)} parameters, and the configuration"
                f" targets {len(targets)}: {', '.join(names)}",
                _OTHER_CONFIG,
            )
        return self._assign(sorted(layers, key=lambda layer: -layer.level), targets)

    def _assign(
        self, innermost_first: Sequence[LoraLayer], targets: Sequence[Fqn]
    ) -> list[tuple[LoraLayer, Fqn]]:
        """Assigns to each wrapper the parameter that its factors fit.

        A wrapper's name does not contain its parameter. PEFT wraps parameters in the order in which
        the class defines them, the first innermost.
        """
        fitting = []
        error: CkptkitError | None = None
        ordered = sorted(targets, key=lambda name: not name.endswith(_DEFINED_FIRST))
        for order in permutations(ordered):
            pairs = list(zip(innermost_first, order, strict=True))
            try:
                for layer, weight in pairs:
                    self._determine_form(layer, weight, weight)
            except RefusedError as misfit:
                error = error or misfit
            else:
                fitting.append(pairs)
        if not fitting and error is not None:
            raise error
        if len(fitting) > 1 and not ordered[0].endswith(_DEFINED_FIRST):
            raise self._make_error(
                "neither names nor shapes show which LoRA belongs to which of"
                f" {', '.join(targets)}",
                "merge this adapter with PEFT",
            )
        return fitting[0]

    def _update_weight(self, layer: LoraLayer, weight: Fqn) -> LowRankChange:
        is_parameter = any(fits_target(name, weight) for name in self._settings.target_parameters)
        key = weight if is_parameter else layer.owner
        form = self._determine_form(layer, weight, key)
        if is_parameter and form == "linear":
            form = "parameter"
        if (layer.magnitude is not None) != self._settings.use_dora:
            article, value = ("a", "false") if layer.magnitude is not None else ("no", "true")
            raise self._make_error(
                f"module {key!r} has {article} lora_magnitude_vector, and the configuration says"
                f" 'use_dora': {value}",
                _OTHER_CONFIG,
            )
        return LowRankChange(
            source=self._source,
            weight=weight,
            module=weight if is_parameter else layer.module,
            form=form,
            down=layer.down,
            up=layer.up,
            magnitude=layer.magnitude,
            rank=self._settings.rank(key),
            scaling=self._settings.scaling(key) * self._weight * layer.times,
        )

    def _determine_form(self, layer: LoraLayer, weight: Fqn, module: str) -> Form:
        """Determines how the product of factors is stored in the weight.

        `module` is the path by which the configuration has its rank.
        """
        shape, down, up = self._shapes[weight], layer.down.shape, layer.up.shape
        rank, types, settings = self._settings.rank(module), self._model_types, self._settings
        out_in = (up[0], down[1])
        misfit = self._make_error(
            f"module {module!r} has A of shape {list(down)} and B of shape {list(up)}, which do not"
            f" fit a base weight of shape {list(shape)}",
            _OTHER_BASE,
        )
        is_convolution = layer.is_convolution and not layer.is_embedding
        groups, rest = divmod(down[0], up[1]) if is_convolution else (1, 0)
        if groups > 1 and not rest:
            raise self._make_group_error(module, groups)
        are_experts = len(shape) == _EXPERTS and not (is_convolution or layer.is_embedding)
        expected = rank * shape[0] if are_experts else rank
        if down[0] != up[1]:
            raise misfit
        if down[0] != expected:
            raise self._make_error(
                f"module {module!r} has factors of rank {down[0]}, expected {expected} by the"
                " configuration, which would give them another scaling",
                _OTHER_CONFIG,
            )
        if layer.is_embedding:  # A is [rank, vocabulary], B [dimension, rank]
            if shape != (*down[1:], *up[:1]):
                raise misfit
            return "embedding"
        if is_convolution:
            if shape == (*out_in, *down[2:]) and all(size == 1 for size in up[2:]):
                return "conv"
            groups, rest = divmod(down[1], shape[1] if len(shape) > 1 else down[1] + 1)
            if groups > 1 and not rest and (*shape[:1], *shape[2:]) == (up[0], *down[2:]):
                raise self._make_group_error(module, groups)
            raise misfit
        own = shape[1:] if are_experts else shape
        straight, crossed = own == out_in, own == out_in[::-1]
        if not (straight or crossed):
            raise misfit
        if are_experts:
            if straight and crossed:
                # For PEFT before 0.19 every fused weight of experts was [experts, in, out].
                is_old = parse_version(settings.peft_version) < EXPERTS_BY_CLASS
                crossed = is_old or bool(types & _TRANSPOSED_EXPERTS)
            return "experts_transposed" if crossed else "experts"
        if straight and crossed:  # PEFT sets the option by the last module
            crossed = is_conv1d(module, types) if types else settings.fan_in_fan_out
        return "transposed" if crossed else "linear"

    def _make_group_error(self, module: str, groups: int) -> RefusedError:
        return self._make_error(
            f"module {module!r} is a convolution of {groups} groups, whose LoRA has no"
            " merged form: each group of outputs depends on all inputs through it",
            "keep this adapter apart from its base; PEFT does not merge it either",
        )

    # --- trained tokens ---

    def _replace_rows(self, module: str, rows: TensorEntry) -> TokenRowsChange:
        weight = Fqn(f"{module}.weight")
        shape = self._shapes[weight]
        options = self._settings.trainable_token_indices
        named = (own for name, own in options.items() if name and fits_target(name, module))
        indices = next(named, options.get("", ()))
        fits = len(shape) == len(rows.shape) and shape[1:] == rows.shape[1:]
        if not fits or len(indices) != rows.shape[0]:
            raise self._make_error(
                f"module {module!r} has trained rows of shape {list(rows.shape)} against"
                f" {len(indices)} 'trainable_token_indices' in a weight of shape {list(shape)}",
                _OTHER_CONFIG,
            )
        if max(indices, default=0) >= shape[0]:
            raise self._make_error(
                f"row {max(indices)} of module {module!r} was trained, and the base has {shape[0]}"
                " rows",
                "the vocabulary was made larger before training; pass that model with --base",
            )
        return TokenRowsChange(self._source, weight, module, rows, indices)

    # --- refusals ---

    def _make_error(self, message: str, hint: str) -> RefusedError:
        return RefusedError(message, where=self._source.where, hint=hint)
