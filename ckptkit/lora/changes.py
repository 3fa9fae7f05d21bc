"""The changes of adapters to a base model: one value per change, and how several are combined.

Names of tensors and modules are those of the live model, without PEFT's prefix. Then follow the
changes of the configuration: vocabulary, head, class.

Tied embeddings stay tied where both are changed alike. A LoRA of one of two tied names does not
change the other weight: PEFT wraps modules, and the other module still computes with the shared
weight, so that both must be written. PEFT changes both alike for trained tokens and with
`ensure_weight_tying`.

Source: peft 0.21, `set_additional_trainable_modules` and `_get_module_names_tied_with_embedding`
in `utils/other.py`, `_add_targets_to_tie` in `tuners/lora/model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, get_args

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from ckptkit.core.errors import AdapterError, RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.core.model_configs import list_model_types
from ckptkit.lora.config import NORM_OF_UNMERGED, parse_version
from ckptkit.lora.dialects import is_vocabulary
from ckptkit.options import (
    GenerationChoice,
    NotFinite,
    TokenizerOrigin,
    check_choice,
    choose_dtype,
    parse_file_limit,
    parse_not_finite,
)
from ckptkit.plan.packing_settings import CONFIG_KEYS
from ckptkit.plan.ties import Specs, find_absent_tied_names, find_tie_candidates, find_tie_conflicts

Form = Literal[
    "linear", "transposed", "embedding", "conv", "parameter", "experts", "experts_transposed"
]
"""How the product of the factors is stored in the weight.

`linear`: B·A, as [out, in]; `parameter`: the same, where the parameter itself was targeted.
`transposed`: (B·A)ᵀ, as [in, out], for Transformers' Conv1D. `embedding`: (B·A)ᵀ, as [vocabulary,
dimension]. `conv`: B·A with all but the first dimension of A flattened. `experts`: one B·A per
expert, as [experts, out, in]; `experts_transposed`: as [experts, in, out].
"""


class AdapterSource(Struct, frozen=True):
    position: int  # in the order of merging
    origin: str  # the source of its tensors in the plan
    where: str  # its name in errors


class LowRankChange(Struct, frozen=True):
    """Adds a product of two factors to a weight."""

    source: AdapterSource
    weight: Fqn
    module: str  # or the targeted parameter, which patterns match
    form: Form
    down: TensorEntry  # A: [rank, in], [experts * rank, in] or [rank, in, *kernel]
    up: TensorEntry  # B: [out, rank], [out, rank * experts] or [out, rank, 1, ...]
    magnitude: TensorEntry | None  # DoRA's, [out] or [1, out, 1, ...]
    rank: int  # of one product
    scaling: float  # times the weight of the adapter


class BiasChange(Struct, frozen=True):
    """Adds the scaled bias of an up-projection to a bias."""

    source: AdapterSource
    weight: Fqn  # a bias of the base
    module: str
    bias: TensorEntry  # [out]
    scaling: float


class TokenRowsChange(Struct, frozen=True):
    """Replaces single rows of a weight: trained tokens."""

    source: AdapterSource
    weight: Fqn  # [vocabulary, dimension]
    module: str
    rows: TensorEntry  # [len(indices), dimension]
    indices: tuple[int, ...]


class Replacement(Struct, frozen=True):
    """Takes a tensor from the adapter unchanged, whether or not the base has it."""

    source: AdapterSource
    weight: Fqn
    module: str
    tensor: TensorEntry
    frozen: bool  # not trained: the base of other changes, as under a LoRA


Change = LowRankChange | BiasChange | TokenRowsChange | Replacement
Changes = Mapping[Fqn, Sequence[Change]]
"""The changes of each tensor, in order."""


def tensors_of(change: Change) -> tuple[TensorEntry, ...]:
    if isinstance(change, LowRankChange):
        factors = (change.down, change.up)
        return factors if change.magnitude is None else (*factors, change.magnitude)
    if isinstance(change, BiasChange):
        return (change.bias,)
    return (change.rows,) if isinstance(change, TokenRowsChange) else (change.tensor,)


def list_frozen(changes: Iterable[Change]) -> list[Replacement]:
    return [change for change in changes if isinstance(change, Replacement) and change.frozen]


def is_frozen(change: Change) -> bool:
    return isinstance(change, Replacement) and change.frozen


MergeDType = Literal["keep", "float32", "bfloat16", "float16"]
QloraBase = Literal["dequantized", "original"]
MergeNames = Literal["auto", "live"]
NormOf = Literal["base", "running"]


class MergeRequest(Struct, frozen=True, kw_only=True):
    dtype: MergeDType = "keep"
    max_file_bytes: int | None = None  # None for the files of the base
    match_peft: bool = False  # round where `merge_and_unload` rounds, instead of once
    qlora_base: QloraBase | None = None
    double_quant: bool | None = None  # for weights without a quantization state
    allow_other_base: bool = False
    allow_code: bool = False
    names: MergeNames = "auto"
    map: str = "auto"
    model_config: str | None = None
    report: bool = False  # measure norms, which reads the changed weights again
    check: tuple[NotFinite, ...] = ()
    cast_all: bool = False
    generation_config: GenerationChoice = "align"
    tokenizer_from: TokenizerOrigin = "auto"

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Reads the options of a merge as a user passes them; ignores all others."""
        size = options.get("max_shard_size")
        limit = None if size is None else parse_file_limit(size, like=None)
        values = {name: options[name] for name in cls.__struct_fields__ if name in options}
        return cls(**values, max_file_bytes=limit)

    def __post_init__(self) -> None:
        force_setattr(self, "dtype", choose_dtype(self.dtype, get_args(MergeDType)))
        force_setattr(self, "map", str(self.map))
        force_setattr(self, "check", tuple(self.check))
        if self.check:
            force_setattr(self, "check", parse_not_finite(self.check, option="--check"))
        check_choice("--names", self.names, get_args(MergeNames))
        check_choice("--generation-config", self.generation_config, get_args(GenerationChoice))
        check_choice("--tokenizer-from", self.tokenizer_from, get_args(TokenizerOrigin))
        if self.qlora_base is not None:
            check_choice("--qlora-base", self.qlora_base, get_args(QloraBase))

    def changed(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, as JSON values."""
        default = MergeRequest()
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) != getattr(default, name)
        }


def combine_changes(
    adapters: Sequence[Sequence[Change]], weights: Sequence[float]
) -> dict[Fqn, list[Change]]:
    """Joins the changes of all adapters, in order, by the changed tensor."""
    combined: dict[Fqn, list[Change]] = {}
    for changes, weight in zip(adapters, weights, strict=True):
        for change in changes:
            if (
                weight != 1
                and isinstance(change, (TokenRowsChange, Replacement))
                and not is_frozen(change)
            ):
                raise RefusedError(
                    f"the adapter replaces {change.weight!r}, which a weight of {weight:g} does"
                    " not apply to",
                    where=change.source.where,
                    hint="give adapters that train whole modules or tokens the weight 1",
                )
            combined.setdefault(change.weight, []).append(change)
    for own in combined.values():
        _refuse_lost(own)
        _refuse_sums(own)
        # The frozen base of a LoRA comes first, whichever adapter has it.
        own.sort(key=lambda change: not is_frozen(change))
    return combined


def _refuse_lost(changes: Sequence[Change]) -> None:
    whole = [c for c in changes if isinstance(c, Replacement) and not c.frozen]
    rows = [c for c in changes if isinstance(c, TokenRowsChange)]
    others = [c for c in changes if isinstance(c, (LowRankChange, BiasChange))]
    is_own_bias = len(whole) == 1 and all(
        isinstance(c, BiasChange) and c.source == whole[0].source for c in others
    )
    if is_own_bias and not rows:
        return
    if whole and (len(whole) > 1 or rows or others):
        other = next(c for c in changes if c is not whole[0])
        raise RefusedError(
            f"{whole[0].weight!r} is replaced by {whole[0].source.where} and changed by"
            f" {other.source.where} too, so one of them would be lost",
            where=f"tensor {whole[0].weight!r}",
            hint="merge only one adapter that trains this module",
        )
    seen: set[int] = set()
    for change in rows:
        if seen & set(change.indices):
            raise RefusedError(
                f"two adapters train the row {min(seen & set(change.indices))} of"
                f" {change.weight!r}, so one of them would be lost",
                where=change.source.where,
                hint="merge only one adapter that trains this token",
            )
        seen |= set(change.indices)


def _refuse_sums(changes: Sequence[Change], *, are_beneath: bool = False) -> None:
    """Refuses trained tokens with a LoRA, or only with DoRA if they are beneath it."""
    rows = next((c for c in changes if isinstance(c, TokenRowsChange)), None)
    sums = [c for c in changes if isinstance(c, LowRankChange) and (c.magnitude or not are_beneath)]
    if rows is not None and sums:
        raise RefusedError(
            f"{rows.weight!r} has trained tokens and a {'DoRA' if sums[0].magnitude else 'LoRA'};"
            " PEFT does not define their sum",
            where=rows.source.where,
            hint="merge the adapters with PEFT",
        )


def check_used_once(
    tensors: Mapping[Fqn, TensorEntry], changes: Iterable[Change], *, where: str
) -> None:
    """Checks that every tensor of an adapter is used by exactly one of its changes."""
    uses = dict.fromkeys((entry.key for entry in tensors.values()), 0)
    for change in changes:
        for entry in tensors_of(change):
            uses[entry.key] = uses.get(entry.key, 0) + 1
    wrong = next((name for name, entry in tensors.items() if uses[entry.key] != 1), None)
    if wrong is not None:
        count = uses[tensors[wrong].key]
        raise AdapterError(
            f"tensor {wrong!r} of the adapter is used by {count} layers, expected 1",
            where=where,
            hint="the adapter was written by an unknown version of PEFT; merge it there",
        )


def choose_norms(versions: Sequence[str | None], changes: Changes) -> tuple[NormOf, str]:
    """Chooses the weight whose norms DoRA takes where several adapters change one weight.

    `base` is the unmerged weight, as PEFT has it from 0.21 on; `running` the one with the earlier
    adapters merged, as before. With it comes a note for the user, if it matters.
    """
    low_rank = [[c for c in own if isinstance(c, LowRankChange)] for own in changes.values()]
    mattering = [own for own in low_rank if any(change.magnitude for change in own[1:])]
    involved = {change.source.position for own in mattering for change in own}
    numbers = [parse_version(versions[position]) for position in sorted(involved)]
    choice: NormOf = "base" if all(number >= NORM_OF_UNMERGED for number in numbers) else "running"
    if not mattering:
        return choice, ""
    rule = {
        "base": "of the unmerged weights, as PEFT does from 0.21 on",
        "running": "of the weights with the earlier adapters merged, as PEFT did before 0.21",
    }[choice]
    written_by = ", ".join(str(versions[number] or "no version") for number in sorted(involved))
    return choice, f"norms of DoRA are taken {rule}: the adapters were written by PEFT {written_by}"


_VOCABULARY = "vocab_size"
_NESTING = 4
HEADS = {  # PEFT's task types that give a model another head, and the ends of class names
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
_CLASSES = re.compile(r"(?:For[A-Z]\w*|LMHeadModel|Model)$")
_LABELLED = ("score", "classifier")  # Transformers' names of heads with one row per label


def has_vocabulary(name: str) -> bool:
    return is_vocabulary(name.rpartition(".")[0])


def find_model_types(config: Mapping[str, Any] | None) -> frozenset[str]:
    """Returns the model types of a configuration and of those nested in it.

    Nothing where the model's code comes with it: its classes are not those of Transformers.
    """
    if config is None or config.get("auto_map"):
        return frozenset()
    return frozenset(list_model_types(config))


def resize_vocabulary(
    config: Mapping[str, Any], old: int, new: int, depth: int = _NESTING
) -> dict[str, Any]:
    """Returns a configuration with another number of tokens, also in nested ones."""
    changed = {
        key: resize_vocabulary(value, old, new, depth - 1)
        if isinstance(value, Mapping) and depth
        else value
        for key, value in config.items()
    }
    if changed.get(_VOCABULARY) == old:
        changed[_VOCABULARY] = new
    return changed


def find_vocabulary_sizes(config: Mapping[str, Any], depth: int = _NESTING) -> frozenset[int]:
    own = config.get(_VOCABULARY)
    sizes = frozenset({own} if isinstance(own, int) else ())
    for inner in config.values() if depth else ():
        if isinstance(inner, Mapping):
            sizes |= find_vocabulary_sizes(inner, depth - 1)
    return sizes


def adapt_head(
    config: Mapping[str, Any], task_type: str | None, brought: Mapping[Fqn, Shape]
) -> tuple[dict[str, Any], list[str]]:
    """Adapts a configuration to the tensors that an adapter brings whole; with notes."""
    changed, notes = dict(config), []
    listed = config.get("architectures")
    old = listed[0] if isinstance(listed, list) and listed else None
    head = HEADS.get(task_type or "")
    if head and isinstance(old, str) and _CLASSES.search(old) and not old.endswith(head):
        new = _CLASSES.sub(head, old)
        changed["architectures"] = [new]
        notes.append(
            f"the adapter has a head of its own: 'architectures' is {new} instead of {old}"
        )
    rows = [
        shape[0]
        for name, shape in brought.items()
        if head and len(shape) > 1 and set(name.split(".")) & set(_LABELLED)
    ]
    labels = rows[-1] if rows else None  # by the last of the head's weights
    named, number = config.get("id2label"), config.get("num_labels", 2)
    before = number if isinstance(number, int) else 2
    before = len(named) if isinstance(named, Mapping) else before
    if labels is not None and labels != before:
        changed["id2label"] = {str(number): f"LABEL_{number}" for number in range(labels)}
        changed["label2id"] = {f"LABEL_{number}": number for number in range(labels)}
        notes.append(
            f"the head has {labels} labels, whose names are not recorded: 'id2label' is LABEL_0 to"
            f" LABEL_{labels - 1}"
        )
    return changed, notes


def drop_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: drop_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in {*CONFIG_KEYS, "_pre_quantization_dtype"}
    }


class TiedPair(Struct, frozen=True):
    """Two names that the configuration ties."""

    target: Fqn  # the name that `save_pretrained` omits
    source: Fqn  # the name that it writes
    is_present: bool  # the base holds the target too
    may_agree: bool  # the base's two tensors agree in element type and shape


def find_tied_pairs(config: Mapping[str, Any] | None, specs: Specs) -> list[TiedPair]:
    """Returns the names that the configuration ties, whether or not the base holds both."""
    agreeing, differing = find_tie_candidates(config, specs), find_tie_conflicts(config, specs)
    absent = find_absent_tied_names(config, specs.keys())
    pairs = {**agreeing, **differing, **absent}
    return [
        TiedPair(target, source, is_present=target not in absent, may_agree=target not in differing)
        for target, source in pairs.items()
    ]


def share_changes(
    changes: Changes, pairs: Sequence[TiedPair], tying: Collection[int]
) -> dict[Fqn, list[Change]]:
    """Adds the changes that PEFT makes to a tied module together with those of the embedding.

    `tying` has the positions of adapters that were trained with `ensure_weight_tying`. Trained
    tokens come first: they are beneath a LoRA, whichever adapter has it.
    """
    shared = {weight: list(own) for weight, own in changes.items()}
    for pair in pairs:
        own = [c for c in changes.get(pair.target, ()) if not is_frozen(c)]
        added = [
            replace(change, weight=pair.target)
            for change in changes.get(pair.source, ())
            if not is_frozen(change) and _follows(change, own, tying)
        ]
        if added:
            has_rows = any(isinstance(c, TokenRowsChange) for c in own)
            _refuse_lost([*own, *added])
            _refuse_sums([*own, *added], are_beneath=not has_rows)
            shared.setdefault(pair.target, []).extend(added)
    for listed in shared.values():
        listed.sort(key=lambda c: (not isinstance(c, TokenRowsChange), c.source.position))
        listed.sort(key=lambda c: not is_frozen(c))
    return shared


def _follows(change: Change, own: Iterable[Change], tying: Collection[int]) -> bool:
    """Returns whether PEFT applies a change of an embedding to a module that is tied to it.

    `own` are the changes of that module itself.
    """
    of_adapter = [c for c in own if c.source.position == change.source.position]
    if isinstance(change, TokenRowsChange):
        return all(isinstance(c, LowRankChange) for c in of_adapter)
    return change.source.position in tying and not of_adapter
