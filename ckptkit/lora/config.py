"""The configuration of a LoRA adapter, parsed and checked; and the adapter with its tensors.

Source: peft 0.21, `tuners/lora/config.py` for the options and their defaults,
`tuners/lora/model.py` and `utils/other.py` for how ranks and alphas are looked up, and the files
that versions from 0.2 on have written.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard, TypeVar, get_args

from msgspec import Struct, ValidationError, convert

from ckptkit.core.errors import FormatError, LimitError, UnsupportedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.core.text import quote
from ckptkit.plan.weight_kinds import advice_on, refusal_of

# A brace that begins no repetition is a character to `re`, and an approximate match to `regex`.
_BRACES = re.compile(r"\\N\{[^}]*\}|\\.|\{(?:\d+(?:,\d*)?|,\d*)\}|\{", re.DOTALL)
_MOST_SECONDS = 1.0
# An expression without any of these is compared with a name in one way only.
_REPEATS = frozenset("*+?{|")


def match_expression(expression: str, name: str, form: str = "{}") -> re.Match[str] | None:
    """Matches the beginning of a name, within a second.

    `form` is what PEFT puts around the expression, without repetitions that nest with it.
    """
    whole = form.replace("{}", expression)
    if _REPEATS.isdisjoint(expression):
        return re.match(whole, name)
    import regex  # late: few configurations have more than names

    whole = form.replace("{}", _BRACES.sub(_escape, expression))
    try:
        found: Any = regex.match(whole, name, timeout=_MOST_SECONDS)
    except TimeoutError as error:
        raise LimitError(
            f"the expression {quote(expression)} takes longer than {_MOST_SECONDS:g} s to compare"
            f" with the module {quote(name)}",
            where="adapter_config.json",
            hint="write it without repetitions inside repetitions, or list the modules",
        ) from error
    return found  # type: ignore[no-any-return]  # its objects have the methods of `re`


def _escape(found: re.Match[str]) -> str:
    return rf"\{found[0]}" if found[0] == "{" else found[0]


ALPHA, RSLORA = "lora_alpha", "use_rslora"
RANK, TASK = "r", "task_type"
MAKE_CONFIG = 'the training script makes one: model.peft_config["default"].save_pretrained(DIR)'
# Every option of `LoraConfig` that is read here or has no meaning after training.
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
_Value = TypeVar("_Value")


class _Document(Struct, frozen=True):
    """The content of a configuration, whose options are checked as they are read."""

    options: Mapping[str, Any]
    where: str

    def number(self, key: str, default: float) -> float:
        value: float = self.options.get(key, default)
        if not is_finite(value):
            raise self.wrong(key, value, "a number")
        return value

    def flag(self, key: str) -> bool:
        return bool(self._convert(key, bool | None, "true or false"))

    def text(self, key: str) -> str | None:
        return self._convert(key, str | None, "a text") or None

    def texts(self, key: str) -> tuple[str, ...] | None:
        found: tuple[str, ...] | None = self._convert(
            key, tuple[str, ...] | None, "a list of texts"
        )
        return found

    def _convert(self, key: str, kind: Any, expected: str) -> Any:
        value = self.options.get(key)
        try:
            return convert(value, kind)
        except ValidationError:
            raise self.wrong(key, value, expected) from None

    def patterns(self, key: str) -> str | tuple[str, ...] | None:
        """Returns a regular expression, a list of names, or None."""
        value = self.options.get(key)
        if isinstance(value, str):
            self._check_pattern(value, key)
            return value
        return self.texts(key)

    def expressions(self, key: str) -> tuple[str, ...]:
        """Returns names that PEFT reads as regular expressions; a single one need not be a list."""
        value = self.patterns(key) or ()
        patterns = (value,) if isinstance(value, str) else value
        for pattern in patterns:
            self._check_pattern(pattern, key, is_embedded=True)
        return patterns

    def numbers_by_pattern(self, key: str) -> dict[str, float]:
        value = self.options.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        for pattern, number in value.items():
            self._check_pattern(pattern, key, is_embedded=True)
            if not is_finite(number):
                raise self.wrong(f"{key}[{pattern}]", number, "a number")
        return dict(value)

    def ranks_by_pattern(self, key: str) -> dict[str, int]:
        numbers = self.numbers_by_pattern(key)
        for pattern, value in numbers.items():
            if not is_dimension(value):
                raise self.wrong(f"{key}[{pattern}]", value, "a positive whole number")
        return {pattern: int(value) for pattern, value in numbers.items()}

    def indices(self, key: str) -> tuple[int, ...] | None:
        value = self.options.get(key)
        if value is None or value == []:
            return None
        return self._check_numbers(value if isinstance(value, list) else [value], key)

    def token_rows(self, key: str) -> dict[str, tuple[int, ...]]:
        """Returns the trained rows of embeddings, by the name of the embedding."""
        value = self.options.get(key)
        if not value:
            return {}
        if isinstance(value, Mapping):
            return {str(name): self._check_numbers(rows, key) for name, rows in value.items()}
        return {_INPUT_EMBEDDING: self._check_numbers(value, key)}

    def wrong(self, key: str, value: Any, expected: str) -> FormatError:
        return FormatError(
            f"{key!r} is {str(value)[:80]!r} against {expected}",
            where=self.where,
            hint="compare it with the adapter_config.json that PEFT writes",
        )

    def _check_pattern(self, pattern: str, key: str, *, is_embedded: bool = False) -> None:
        """Refuses what is no regular expression.

        `is_embedded` says that PEFT embeds it in a larger one, in which flags may not follow.
        """
        try:
            re.compile(pattern)
            re.compile(rf"(.*\.)?({pattern})$" if is_embedded else pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise FormatError(
                f"{key!r} has {pattern[:80]!r}, which is no regular expression: {error}",
                where=self.where,
            ) from error

    def _check_numbers(self, value: Any, key: str) -> tuple[int, ...]:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not all(type(item) is int and item >= 0 for item in value):
            raise self.wrong(key, value, "whole numbers")
        return tuple(value)


def is_dimension(value: object) -> TypeGuard[int]:
    """Says whether a parsed value can be the length of a dimension, which is at least 1."""
    return type(value) is int and 0 < value < 1 << 63


def is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # JSON has whole numbers of any size


Bias = Literal["none", "all", "lora_only"]
ALL_LINEAR = "all-linear"
"""Stands for every linear module but the output; resolved before PEFT saves a configuration."""

PEFT_PREFIX = "base_model.model."
"""The prefix of PEFT before the names of a model."""

# Initializations that do not change the base model; every other one writes into it.
_CLEAN_STARTS = {"gaussian", "eva", "orthogonal"}
# Options that are modelled only if they are empty: each changes the meaning of an adapter's
# tensors, or which tensors there are.
_NOT_MODELLED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"),
    *("megatron_config", "monteclora_config", "use_bdlora", "use_qalora"),
)


EMBEDDINGS = frozenset(("embed_tokens", "lm_head"))  # PEFT's `EMBEDDING_LAYER_NAMES`


class LoraSettings(Struct, frozen=True, kw_only=True):
    """The configuration of a LoRA adapter, as `adapter_config.json` holds it."""

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]  # by regular expression, in the order of the file
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...] | None  # an expression, or ends of names
    target_parameters: tuple[str, ...]  # ends of names, such as those of fused experts
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: tuple[int, ...] | None  # None for all
    layers_pattern: tuple[str, ...]  # names of the lists of layers
    modules_to_save: tuple[str, ...]  # ends of the names of modules that were trained whole
    # By embedding; an empty name is the input embedding.
    trainable_token_indices: Mapping[str, tuple[int, ...]]
    bias: Bias  # which biases of the base were trained
    lora_bias: bool  # the up-projections have biases
    fan_in_fan_out: bool  # targeted weights are stored as [in, out]
    init_lora_weights: str | bool
    ensure_weight_tying: bool
    base_model_name_or_path: str | None
    revision: str | None  # the commit of the base
    task_type: str | None
    peft_version: str | None  # None before 0.18
    document: Mapping[str, Any]  # the parsed file

    @property
    def shares_with_tied(self) -> bool:
        """Whether modules that are tied to the embedding have the update of that, too.

        PEFT looks at the names in the settings, so that GPT-2's `wte` shares nothing.

        Source: peft 0.21, tuners/tuners_utils.py (`_check_tied_modules`), utils/constants.py.
        """
        targets = self.target_modules
        if isinstance(targets, str):
            is_named = any(match_expression(targets, name) for name in EMBEDDINGS)
        else:
            is_named = any(target.rpartition(".")[2] in EMBEDDINGS for target in targets or ())
        is_saved = any(name.rpartition(".")[2] in EMBEDDINGS for name in self.modules_to_save)
        return self.ensure_weight_tying and (is_named or is_saved)

    @classmethod
    def parse(cls, document: Mapping[str, Any], *, where: str = "") -> LoraSettings:
        """Parses the content of `adapter_config.json` of any PEFT version.

        Missing keys have PEFT's defaults. Unknown keys are ignored where they are empty.
        """
        _refuse_unmodelled(document, where)
        parsed = _Document(document, where)
        rank, bias = document.get("r", 8), document.get("bias", "none")
        if not is_dimension(rank):
            raise parsed.wrong("r", rank, "a positive whole number")
        if bias not in get_args(Bias):
            raise parsed.wrong("bias", bias, "'none', 'all' or 'lora_only'")
        start = document.get("init_lora_weights", True)
        if start is not None and not isinstance(start, (str, bool)):
            raise parsed.wrong("init_lora_weights", start, "true, false or a name")
        return cls(
            r=rank,
            lora_alpha=parsed.number("lora_alpha", 8),
            use_rslora=parsed.flag("use_rslora"),
            use_dora=parsed.flag("use_dora"),
            rank_pattern=parsed.ranks_by_pattern("rank_pattern"),
            alpha_pattern=parsed.numbers_by_pattern("alpha_pattern"),
            target_modules=parsed.patterns("target_modules"),
            target_parameters=parsed.texts("target_parameters") or (),
            exclude_modules=parsed.patterns("exclude_modules"),
            layers_to_transform=parsed.indices("layers_to_transform"),
            layers_pattern=parsed.expressions("layers_pattern"),
            modules_to_save=parsed.expressions("modules_to_save"),
            trainable_token_indices=parsed.token_rows("trainable_token_indices"),
            bias=bias,
            lora_bias=parsed.flag("lora_bias"),
            fan_in_fan_out=parsed.flag("fan_in_fan_out"),
            init_lora_weights=False if start is None else start,
            ensure_weight_tying=parsed.flag("ensure_weight_tying"),
            base_model_name_or_path=parsed.text("base_model_name_or_path"),
            revision=parsed.text("revision"),
            task_type=parsed.text("task_type"),
            peft_version=parsed.text("peft_version"),
            document=document,
        )

    @property
    def changes_base(self) -> bool:
        """Whether PEFT changed the base's weights when it initialized the adapter (PiSSA, ...)."""
        start = self.init_lora_weights
        return isinstance(start, str) and start.lower() not in _CLEAN_STARTS

    def rank(self, module: str) -> int:
        """Returns the rank of a module, or of a targeted parameter, by its path in the base.

        PEFT's prefix may precede the path.
        """
        return find_match(self.rank_pattern, module, self.r)

    def alpha(self, module: str) -> float:
        return find_match(self.alpha_pattern, module, self.lora_alpha)

    def scaling(self, module: str) -> float:
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)


def find_match(values: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """Returns the value of the first pattern that fits a module's path, or its end.

    Source: peft 0.21, `get_pattern_key`.

    >>> find_match({"self_attn.q_proj": 4, ".*_proj": 16}, "model.layers.0.mlp.up_proj", 8)
    16
    """
    return next(iter(find_matches(values, module)), default)


def find_matches(values: Mapping[str, _Value], module: str) -> list[_Value]:
    """Returns the values of all patterns that fit a module, in order; see `find_match`."""
    path = module.removeprefix(PEFT_PREFIX)
    form = r"(.*\.)?({})$"
    return [value for key, value in values.items() if match_expression(key, path, form)]


def _refuse_unmodelled(document: Mapping[str, Any], where: str) -> None:
    """Refuses other methods, unknown options that are in use, and those that are not modelled."""
    method = document.get("peft_type", "LORA")
    if method != "LORA":
        raise UnsupportedError(
            f"holds an adapter of PEFT's method {quote(str(method))}{refusal_of(str(method))}",
            where=where,
            hint=advice_on(str(method)),
        )
    for key, value in document.items():
        if key not in _KNOWN and value not in (None, False, 0, "", [], {}):
            raise UnsupportedError(
                f"the option {quote(key)} of the adapter's configuration is not known, and is in"
                " use",
                where=where,
                hint="pass the run's adapter_config.json with --adapter-config; if this is it and"
                " the option changes no numbers, pass a copy without it",
            )
    for option in _NOT_MODELLED:
        if document.get(option):
            raise UnsupportedError(
                f"the option {option!r} of LoRA is in use, which is not modelled",
                where=where,
                hint="load it with PEFT, and save or merge it there",
            )


class Adapter(Struct, frozen=True):
    name: str
    settings: LoraSettings
    tensors: Mapping[Fqn, TensorEntry]  # by the names that PEFT's files give them, in natural order

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of its tensors by the same names."""
        return {str(name): entry.shape for name, entry in self.tensors.items()}


EXPERTS_BY_CLASS = (0, 19)
"""Since this version the class of a model decides whether experts are stored as [in, out]."""
NORM_OF_UNMERGED = (0, 21)
"""Since this version DoRA's norms are those of weights without the adapters merged before."""
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})")


def parse_version(text: str | None) -> tuple[int, int]:
    """Parses major and minor number; without a version, as before PEFT 0.18, both are 0.

    >>> parse_version("0.21.2")
    (0, 21)
    """
    match = _VERSION.match(text or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def find_old_alpha(settings: LoraSettings, module: str, rank: int) -> float | None:
    """Returns the alpha of a module by the rule of PEFT before 0.14; None if it is not that old.

    The first pattern of either option that matches was then the key for both. `rank`, that of the
    module's factors, disproves the rule where it gives another rank.

    Source: peft 0.13, `LoraModel._create_and_replace`.
    """
    path = module.removeprefix(PEFT_PREFIX)
    patterns = (*settings.rank_pattern, *settings.alpha_pattern)
    key = next((p for p in patterns if match_expression(p, path, r".*\.{}$")), path)
    if settings.rank_pattern.get(key, settings.r) != rank:
        return None
    return settings.alpha_pattern.get(key, settings.lora_alpha)
