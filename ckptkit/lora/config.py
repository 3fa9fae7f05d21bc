"""What a PEFT configuration says of a LoRA adapter, checked once.

Source: peft 0.21, `tuners/lora/config.py` for the options and their defaults,
`tuners/lora/model.py` and `utils/other.py` for how ranks and alphas are looked up.

The values of a PEFT configuration by type: JSON in, what was meant out, or an error.

Source: peft 0.21, `LoraConfig`, and the files that versions from 0.2 on have written.

An adapter as the rest of ckptkit sees it: settings, and tensors under the names of its file.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, get_args

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.plan.peft_names import advice_on, refusal_of

# Every option of `LoraConfig` whose values are read here or mean nothing once trained.
_KNOWN = frozenset(
    (
        *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "auto_mapping"),
        *("base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "kasa_config", "layer_replication", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout"),
        *("lora_ga_config", "megatron_config", "megatron_core", "modules_to_save"),
        *("monteclora_config", "peft_type", "peft_version", "qalora_group_size", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters"),
        *("task_type", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora"),
        *("use_rslora", "velora_config"),
    )
)
_INPUT_EMBEDDING = ""


class _Facts(TypedDict):
    """What an error is made from."""

    message: str
    where: str
    hint: str


def known_or_neutral(document: Mapping[str, Any], *, where: str) -> None:
    """Refuses options of which nothing is known but that they are in use."""
    for key, value in document.items():
        if key not in _KNOWN and value not in (None, False, 0, "", [], {}):
            raise UnsupportedError(
                f"the option {key!r} of the adapter's configuration is not known, and is in use",
                where=where,
                hint="pass the run's adapter_config.json with --adapter-config; if this is it and"
                " the option changes no numbers, pass a copy without it",
            )


def whole(document: Mapping[str, Any], key: str, *, default: int, where: str) -> int:
    """Returns a positive whole number."""
    found = document.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise FormatError(**_wrong(key, found, "a positive whole number", where))
    return found


def number(document: Mapping[str, Any], key: str, *, default: float, where: str) -> float:
    """Returns a finite number; whole ones stay whole."""
    found = document.get(key, default)
    if not _is_finite(found):
        raise FormatError(**_wrong(key, found, "a number", where))
    return found  # type: ignore[no-any-return]  # checked above


def switch(document: Mapping[str, Any], key: str, *, where: str) -> bool:
    """Returns a flag; null is off."""
    found = document.get(key)
    if found is not None and not isinstance(found, bool):
        raise FormatError(**_wrong(key, found, "true or false", where))
    return bool(found)


def optional_text(document: Mapping[str, Any], key: str, *, where: str) -> str | None:
    """Returns a text, or None where there is none."""
    found = document.get(key)
    if found is not None and not isinstance(found, str):
        raise FormatError(**_wrong(key, found, "a text", where))
    return found or None


def patterns(document: Mapping[str, Any], key: str, *, where: str) -> str | tuple[str, ...] | None:
    """Returns a regular expression, or a list of names; None where there is none."""
    found = document.get(key)
    if isinstance(found, str):
        check_pattern(found, f"{key!r}", where)
        return found
    return None if found is None else _texts(found, key, where)


def texts(document: Mapping[str, Any], key: str, *, where: str) -> tuple[str, ...]:
    """Returns a list of names; nothing where there is none."""
    found = document.get(key)
    return () if found is None else _texts(found, key, where)


def numbers_by_pattern(document: Mapping[str, Any], key: str, *, where: str) -> dict[str, float]:
    """Returns numbers by regular expression; nothing where there are none."""
    found = document.get(key) or {}
    if not isinstance(found, Mapping):
        raise FormatError(**_wrong(key, found, "an object", where))
    for pattern, value in found.items():
        check_pattern(pattern, f"{key!r}", where, is_embedded=True)
        if not _is_finite(value):
            raise FormatError(**_wrong(f"{key}[{pattern}]", value, "a number", where))
    return dict(found)


def ranks_by_pattern(document: Mapping[str, Any], key: str, *, where: str) -> dict[str, int]:
    """Returns positive whole numbers by regular expression; nothing where there are none."""
    found = numbers_by_pattern(document, key, where=where)
    for pattern, value in found.items():
        if not isinstance(value, int) or value < 1:
            name = f"{key}[{pattern}]"
            raise FormatError(**_wrong(name, value, "a positive whole number", where))
    return {pattern: int(value) for pattern, value in found.items()}


def indices(document: Mapping[str, Any], key: str, *, where: str) -> tuple[int, ...] | None:
    """Returns whole numbers, of which there may be a single one; None where there are none."""
    found = document.get(key)
    if found is None or found == []:
        return None
    return _numbers(found if isinstance(found, list) else [found], key, where)


def token_rows(document: Mapping[str, Any], *, where: str) -> dict[str, tuple[int, ...]]:
    """Returns the rows of embeddings that were trained, by the name of the embedding."""
    key = "trainable_token_indices"
    found = document.get(key)
    if not found:
        return {}
    if isinstance(found, Mapping):
        return {str(name): _numbers(rows, key, where) for name, rows in found.items()}
    return {_INPUT_EMBEDDING: _numbers(found, key, where)}


def check_pattern(pattern: str, what: str, where: str, *, is_embedded: bool = False) -> None:
    """Refuses what is no regular expression.

    Args:
        pattern: The expression.
        what: What to call its place in errors.
        where: What to call its file in errors.
        is_embedded: Whether PEFT puts others around it, which flags must not stand behind.
    """
    try:
        re.compile(pattern)
        re.compile(rf"(.*\.)?({pattern})$" if is_embedded else pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise FormatError(
            f"{what} has {pattern[:80]!r}, which is no regular expression: {error}", where=where
        ) from error


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # JSON has whole numbers of any size


def _texts(found: Any, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise FormatError(**_wrong(key, found, "a list of texts", where))
    return tuple(found)


def _numbers(found: Any, key: str, where: str) -> tuple[int, ...]:
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    if not is_list or not all(type(item) is int and item >= 0 for item in found):
        raise FormatError(**_wrong(key, found, "whole numbers", where))
    return tuple(found)


def _wrong(key: str, found: Any, expected: str, where: str) -> _Facts:
    return {
        "message": f"{key!r} is {str(found)[:80]!r} against {expected}",
        "where": where,
        "hint": "compare it with the adapter_config.json that PEFT writes",
    }


_Value = TypeVar("_Value")
Bias = Literal["none", "all", "lora_only"]
ALL_LINEAR = "all-linear"
"""Stands for every linear module but the output; resolved before PEFT saves a configuration."""

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of a model."""

# Ways of starting that leave the base model as it was; every other one writes into it.
_CLEAN_STARTS = {"gaussian", "eva", "orthogonal"}
# Options that are modelled in none of their values but the empty ones: each changes what the
# tensors of an adapter mean, or which tensors there are.
_NOT_MODELLED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"),
    *("megatron_config", "monteclora_config", "use_bdlora", "use_qalora"),
)

_HINT = "load it with PEFT, and save or merge it there"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The configuration of a LoRA adapter, as `adapter_config.json` holds it.

    Attributes:
        r: The rank of modules that no pattern names.
        lora_alpha: The numerator of the scaling where no pattern names a module.
        use_rslora: Whether the scaling is alpha / sqrt(rank) instead of alpha / rank.
        use_dora: Whether the directions are trained apart from the magnitudes.
        rank_pattern: Ranks by regular expression, in the order of the file.
        alpha_pattern: Alphas by regular expression, in the order of the file.
        target_modules: A regular expression, or ends of module names; None where only
            parameters are targeted.
        target_parameters: Ends of the names of parameters, such as those of fused experts.
        exclude_modules: What `target_modules` does not mean.
        layers_to_transform: The only layers that `target_modules` means; None for all.
        layers_pattern: What the lists of layers are called, for `layers_to_transform`.
        modules_to_save: Ends of the names of modules that were trained as they are.
        trainable_token_indices: Rows by the name of the embedding that were trained; the
            name is empty where the file has a list alone, which means the input embedding.
        bias: Which biases of the base were trained.
        lora_bias: Whether the up-projections have biases.
        fan_in_fan_out: Whether targeted weights are stored as [in, out].
        init_lora_weights: How the adapter was started.
        ensure_weight_tying: Whether tied modules share what was trained for one of them.
        base_model_name_or_path: The base that was trained on, or None.
        revision: The commit of it, or None.
        task_type: PEFT's name for what the model does, or None.
        peft_version: The version that wrote the file; None before 0.18.
        document: The file as it was.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...] | None
    target_parameters: tuple[str, ...]
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    trainable_token_indices: Mapping[str, tuple[int, ...]]
    bias: Bias
    lora_bias: bool
    fan_in_fan_out: bool
    init_lora_weights: str | bool
    ensure_weight_tying: bool
    base_model_name_or_path: str | None
    revision: str | None
    task_type: str | None
    peft_version: str | None
    document: Mapping[str, Any]

    @classmethod
    def parse(cls, document: Mapping[str, Any], *, where: str = "") -> LoraSettings:
        """Reads a configuration of any PEFT version.

        Keys that are missing have PEFT's defaults. Keys that are not known are passed over
        where they hold nothing.

        Args:
            document: The content of `adapter_config.json`.
            where: What to call it in errors.
        """
        _refuse_other_methods(document, where)
        known_or_neutral(document, where=where)
        for option in _NOT_MODELLED:
            if document.get(option):
                raise UnsupportedError(
                    f"the option {option!r} of LoRA is in use, which is not modelled",
                    where=where,
                    hint=_HINT,
                )
        return cls(
            r=whole(document, "r", default=8, where=where),
            lora_alpha=number(document, "lora_alpha", default=8, where=where),
            use_rslora=switch(document, "use_rslora", where=where),
            use_dora=switch(document, "use_dora", where=where),
            rank_pattern=ranks_by_pattern(document, "rank_pattern", where=where),
            alpha_pattern=numbers_by_pattern(document, "alpha_pattern", where=where),
            target_modules=patterns(document, "target_modules", where=where),
            target_parameters=texts(document, "target_parameters", where=where),
            exclude_modules=patterns(document, "exclude_modules", where=where),
            layers_to_transform=indices(document, "layers_to_transform", where=where),
            layers_pattern=_expressions(document, "layers_pattern", where),
            modules_to_save=_expressions(document, "modules_to_save", where),
            trainable_token_indices=token_rows(document, where=where),
            bias=_bias(document, where),
            lora_bias=switch(document, "lora_bias", where=where),
            fan_in_fan_out=switch(document, "fan_in_fan_out", where=where),
            init_lora_weights=_start(document, where),
            ensure_weight_tying=switch(document, "ensure_weight_tying", where=where),
            base_model_name_or_path=optional_text(document, "base_model_name_or_path", where=where),
            revision=optional_text(document, "revision", where=where),
            task_type=optional_text(document, "task_type", where=where),
            peft_version=optional_text(document, "peft_version", where=where),
            document=document,
        )

    @property
    def changes_base(self) -> bool:
        """Whether PEFT wrote into the base's weights when the adapter was started (PiSSA, ...)."""
        start = self.init_lora_weights
        return isinstance(start, str) and start.lower() not in _CLEAN_STARTS

    def rank(self, module: str) -> int:
        """Returns the rank of a module.

        Args:
            module: Its path in the base model; of a targeted parameter, the parameter's. PEFT's
                prefix may stand before it.
        """
        return matching(self.rank_pattern, module, self.r)

    def alpha(self, module: str) -> float:
        return matching(self.alpha_pattern, module, self.lora_alpha)

    def scaling(self, module: str) -> float:
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)


def matching(values: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """Returns the value of the first pattern that fits a module's path, or its end.

    Source: peft 0.21, `get_pattern_key`.

    >>> matching({"self_attn.q_proj": 4, ".*_proj": 16}, "model.layers.0.mlp.up_proj", 8)
    16
    """
    return next(iter(all_matching(values, module)), default)


def all_matching(values: Mapping[str, _Value], module: str) -> list[_Value]:
    """Returns the values of all patterns that fit a module, see `matching`, the first first."""
    path = module.removeprefix(PEFT_PREFIX)
    return [value for pattern, value in values.items() if re.match(rf"(.*\.)?({pattern})$", path)]


def _refuse_other_methods(document: Mapping[str, Any], where: str) -> None:
    method = document.get("peft_type", "LORA")
    if method != "LORA":
        raise UnsupportedError(
            f"holds an adapter of PEFT's method {method!r}{refusal_of(str(method))}",
            where=where,
            hint=advice_on(str(method)),
        )


def _expressions(document: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Returns names that PEFT reads as regular expressions, of which there may be one alone."""
    given = patterns(document, key, where=where) or ()
    several = (given,) if isinstance(given, str) else given
    for pattern in several:
        check_pattern(pattern, repr(key), where, is_embedded=True)
    return several


def _bias(document: Mapping[str, Any], where: str) -> Bias:
    found = document.get("bias", "none")
    for choice in get_args(Bias):
        if found == choice:
            kept: Bias = choice
            return kept
    raise FormatError(f"'bias' is {found!r} against 'none', 'all' or 'lora_only'", where=where)


def _start(document: Mapping[str, Any], where: str) -> str | bool:
    found = document.get("init_lora_weights", True)
    if found is None or isinstance(found, (str, bool)):
        return bool(found) if found is None else found
    raise FormatError(
        f"'init_lora_weights' is {found!r} against true, false or a name", where=where
    )


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter of a checkpoint.

    Attributes:
        name: What the run called it, "default" unless it chose a name.
        settings: Its configuration.
        origin: The name under which a plan knows the source of its tensors.
        tensors: Its tensors by the names that PEFT's files give them, such as
            `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, in natural order.
    """

    name: str
    settings: LoraSettings
    origin: str
    tensors: Mapping[Fqn, TensorEntry]
