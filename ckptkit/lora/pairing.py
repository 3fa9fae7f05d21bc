"""From an adapter and the shapes of its base to what changes in which tensor; no bytes are read.

Everything an adapter has is used exactly once, or refused: a tensor that would be passed over is
a part of the training that would be lost.

Source: peft 0.21, `inject_adapter` and `_inject_parameters` in `tuners/tuners_utils.py` for how
targets are found and nested, `set_additional_trainable_modules` in `utils/other.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.lora.changes import Change, LowRank, Replaced, Rows, Shift, Source
from ckptkit.lora.config import Adapter
from ckptkit.lora.dialects import is_frozen_name, plain_name
from ckptkit.lora.forms import Factors, embedding_form, form_of
from ckptkit.lora.generations import EXPERTS_BY_CLASS, version_of
from ckptkit.lora.inference import fits_target, is_saved, target_parameters
from ckptkit.lora.layers import LoraLayer, table_of

Shapes = Mapping[Fqn, Shape]
_ATTENTION = "in_proj_weight"  # what PEFT targets in torch's MultiheadAttention
_LISTED = 5
_MOST_NESTED = 4  # real layers have two fused parameters, and biases, which are no targets
# Where shapes tell no fused experts apart: as every class of Transformers defines them.
_DEFINED_FIRST = "gate_up_proj"
_OTHER_BASE = "the adapter was trained on another base model; pass that one with --base"
_OTHER_CONFIG = "pass the configuration that the adapter was trained with as --adapter-config"


@dataclass(frozen=True, slots=True)
class Base:
    """What has to be known of the base model.

    Attributes:
        shapes: Of its tensors, by live name.
        model_types: Of its configuration and what is nested in it; empty where the model's code
            comes with it, or where there is no configuration.
    """

    shapes: Shapes
    model_types: frozenset[str] = frozenset()


def pair(adapter: Adapter, base: Base, source: Source, *, weight: float = 1.0) -> list[Change]:
    """Finds what an adapter changes.

    Args:
        adapter: The adapter.
        base: The model that it is merged into.
        source: Who the changes stem from.
        weight: What the scaling of low-rank updates is multiplied by.

    Returns:
        The changes; those of one tensor are in the order in which they apply.
    """
    return _Pairing(adapter, base, source, weight).run()


class _Pairing:
    def __init__(self, adapter: Adapter, base: Base, source: Source, weight: float) -> None:
        self._settings = adapter.settings
        self._table = table_of(adapter.tensors)
        self._base = base
        self._source = source
        self._weight = weight
        self._shapes = dict(base.shapes)

    def run(self) -> list[Change]:
        replaced = [self._replaced(name, entry) for name, entry in self._table.whole.items()]
        # What the adapter has of an embedding stands for the base's, which may have fewer rows.
        self._shapes |= {change.weight: change.tensor.shape for change in replaced}
        by_module: dict[str, list[LoraLayer]] = {}
        for layer in self._table.layers:
            by_module.setdefault(layer.module, []).append(layer)
        strange = [m for m in self._table.tokens if Fqn(f"{m}.weight") not in self._shapes]
        updates: list[Change] = []
        for module, layers in by_module.items():
            changes = list(self._changes(module, layers))
            updates += changes
            if not changes:
                strange.append(module)
        if strange:
            raise self._unknown_modules(strange)
        rows = [self._rows(module, entry) for module, entry in self._table.tokens.items()]
        return [*replaced, *updates, *rows]

    # --- whole tensors ---

    def _replaced(self, file_name: Fqn, entry: TensorEntry) -> Replaced:
        name = Fqn(plain_name(file_name))
        module = name.rpartition(".")[0]
        shape = self._base.shapes.get(name)
        is_trained = is_saved(self._settings.modules_to_save, module)
        if shape is None and not is_trained:
            raise self._refused(
                f"tensor {name!r} is neither in the base model nor in one of 'modules_to_save'",
                _OTHER_BASE,
            )
        # Rows may be more or fewer: of a vocabulary, or of a head that was made anew.
        may_differ = is_trained or len(entry.shape) > 1
        if shape is not None and (
            shape[1:] != entry.shape[1:] or not (may_differ or shape == entry.shape)
        ):
            raise self._refused(
                f"tensor {name!r} has shape {list(entry.shape)} against {list(shape)} in the base",
                _OTHER_BASE,
            )
        return Replaced(self._source, name, module, entry, is_frozen_name(file_name))

    # --- wrapped modules ---

    def _changes(self, module: str, layers: Sequence[LoraLayer]) -> Iterator[Change]:
        for layer, weight in self._weights(module, layers):
            yield self._low_rank(layer, weight)
            if layer.up_bias is not None:
                yield self._shift(module, layer.up_bias)

    def _weights(self, module: str, layers: Sequence[LoraLayer]) -> list[tuple[LoraLayer, Fqn]]:
        """Finds the weight that each wrapper of a module wraps; nothing where there is none."""
        if len(layers) == 1:
            for name in ("weight", _ATTENTION):
                weight = Fqn(f"{module}.{name}")
                if weight in self._shapes:
                    return [(layers[0], weight)]
        held = [n.rpartition(".")[2] for n in self._shapes if n.rpartition(".")[0] == module]
        names = target_parameters(self._settings, module, held) if held else []
        targets = [Fqn(f"{module}.{name}") for name in dict.fromkeys(names)]
        if not targets or len(targets) > _MOST_NESTED:
            return []
        if len(targets) != len(layers):
            raise self._refused(
                f"module {module!r} has LoRAs of {len(layers)} parameters, and the configuration"
                f" targets {len(targets)}: {', '.join(names)}",
                _OTHER_CONFIG,
            )
        return self._assigned(sorted(layers, key=lambda layer: -layer.level), targets)

    def _assigned(
        self, innermost_first: Sequence[LoraLayer], targets: Sequence[Fqn]
    ) -> list[tuple[LoraLayer, Fqn]]:
        """Gives each wrapper the parameter that its factors fit.

        A wrapper's name does not say which parameter it wraps. PEFT wraps them as the class
        defines them, the first innermost.
        """
        fitting = []
        error: CkptkitError | None = None
        ordered = sorted(targets, key=lambda name: not name.endswith(_DEFINED_FIRST))
        for order in permutations(ordered):
            pairs = list(zip(innermost_first, order, strict=True))
            try:
                for layer, weight in pairs:
                    form_of(self._factors(weight, weight, layer))
            except RefusedError as misfit:
                error = error or misfit
            else:
                fitting.append(pairs)
        if not fitting and error is not None:
            raise error
        if len(fitting) > 1 and not ordered[0].endswith(_DEFINED_FIRST):
            raise self._refused(
                f"which LoRA belongs to which of {', '.join(targets)} is told neither by names nor"
                " by shapes",
                "merge this adapter with PEFT",
            )
        return fitting[0]

    def _factors(self, key: str, weight: Fqn, layer: LoraLayer) -> Factors:
        return Factors(
            weight=self._shapes[weight],
            down=layer.down.shape,
            up=layer.up.shape,
            rank=self._settings.rank(key),
            module=key,
            fan_in_fan_out=self._settings.fan_in_fan_out,
            is_old=version_of(self._settings.peft_version) < EXPERTS_BY_CLASS,
            model_types=self._base.model_types,
            where=self._source.where,
        )

    def _low_rank(self, layer: LoraLayer, weight: Fqn) -> LowRank:
        is_parameter = any(fits_target(name, weight) for name in self._settings.target_parameters)
        key = weight if is_parameter else layer.owner
        factors = self._factors(key, weight, layer)
        form = (embedding_form if layer.is_embedding else form_of)(factors)
        if is_parameter and form == "linear":
            form = "parameter"
        if (layer.magnitude is not None) != self._settings.use_dora:
            found, said = ("a", "false") if layer.magnitude is not None else ("no", "true")
            raise self._refused(
                f"module {key!r} has {found} lora_magnitude_vector, and the configuration says"
                f" 'use_dora': {said}",
                _OTHER_CONFIG,
            )
        return LowRank(
            source=self._source,
            weight=weight,
            module=weight if is_parameter else layer.module,
            form=form,
            down=layer.down,
            up=layer.up,
            magnitude=layer.magnitude,
            rank=factors.rank,
            scaling=self._settings.scaling(key) * self._weight * layer.times,
        )

    def _shift(self, module: str, bias: TensorEntry) -> Shift:
        name = Fqn(f"{module}.bias")
        shape = self._shapes.get(name)
        if shape is None:
            raise self._refused(
                f"module {module!r} was given a bias by the adapter and has none in the base, so"
                " no merged form",
                "keep this adapter beside its base; PEFT does not merge it either",
            )
        if shape != bias.shape:
            raise self._refused(
                f"module {module!r} has lora_B.bias of shape {list(bias.shape)} against"
                f" {list(shape)} in the base",
                _OTHER_BASE,
            )
        scaling = self._settings.scaling(module) * self._weight
        return Shift(self._source, name, module, bias, scaling)

    # --- trained tokens ---

    def _rows(self, module: str, rows: TensorEntry) -> Rows:
        weight = Fqn(f"{module}.weight")
        shape = self._shapes[weight]
        indices = self._indices(module)
        fits = len(shape) == len(rows.shape) and shape[1:] == rows.shape[1:]
        if not fits or len(indices) != rows.shape[0]:
            raise self._refused(
                f"module {module!r} has trained rows of shape {list(rows.shape)} against"
                f" {len(indices)} 'trainable_token_indices' in a weight of shape {list(shape)}",
                _OTHER_CONFIG,
            )
        if max(indices, default=0) >= shape[0]:
            raise self._refused(
                f"module {module!r} was trained in row {max(indices)} against {shape[0]} rows in"
                " the base",
                "the vocabulary was made larger before training; pass that model with --base",
            )
        return Rows(self._source, weight, module, rows, indices)

    def _indices(self, module: str) -> tuple[int, ...]:
        given = self._settings.trainable_token_indices
        named = (rows for name, rows in given.items() if name and fits_target(name, module))
        return next(named, given.get("", ()))

    # --- refusals ---

    def _unknown_modules(self, modules: Sequence[str]) -> RefusedError:
        more = f" and {len(modules) - _LISTED} more" if len(modules) > _LISTED else ""
        return self._refused(
            f"the base has no weight for {len(modules)} modules of the adapter:"
            f" {', '.join(modules[:_LISTED])}{more}",
            _OTHER_BASE,
        )

    def _refused(self, message: str, hint: str) -> RefusedError:
        return RefusedError(message, where=self._source.where, hint=hint)
