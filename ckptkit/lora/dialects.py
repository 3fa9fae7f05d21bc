"""Which tensors of a checkpoint are an adapter's, whatever names the save gave them.

Three dialects are in use: the names of the live model (`….lora_A.default.weight` beside the
frozen base), the same of the trained tensors alone, and those of PEFT's files
(`….lora_A.weight`). Before and between the segments may stand what wrapped the model.

Source: peft 0.21, `get_peft_model_state_dict`; accelerate 1.15, `save_fsdp_model`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.lora.config import PEFT_PREFIX, LoraSettings
from ckptkit.lora.names import AdapterNames, vocabulary_of
from ckptkit.plan.peft_names import LORA, advice_on, find_adapter, refusal_of

DEFAULT = "default"
"""PEFT's name for an adapter that nobody named."""

LORA_A, LORA_B = "lora_A", "lora_B"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
MAGNITUDE = "lora_magnitude_vector"
TOKENS = "trainable_tokens_delta"
_OF_LORA = "lora_"
_OF_TOKENS = "token_adapter"
BASE_LAYER = "base_layer"
_MODULES_TO_SAVE = "modules_to_save"
_ORIGINAL = "original_module"
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_MODULE = "module"  # what DDP and others call what they wrap, and a name that models use too
_HOLDERS = {LORA_A, LORA_B, EMBEDDING_A, EMBEDDING_B, MAGNITUDE, TOKENS, _MODULES_TO_SAVE}
_PARAMETERS = {"weight", "bias"}
_ADAPTER_AND_BIAS = 3  # the length of `modules_to_save.default.bias`
EMBEDDINGS = {"embed_tokens", "lm_head"}  # peft 0.21, EMBEDDING_LAYER_NAMES
_PREFIX = tuple(PEFT_PREFIX.rstrip(".").split("."))


@dataclass(frozen=True, slots=True)
class Sorted:
    """The tensors of one state dict, told apart.

    Attributes:
        live: Tensors by the name of their adapter and by the name in its file, where their
            names tell the adapter.
        stripped: Tensors by the name in a PEFT file, where the names are those of a file.
        rest: All others by their names without wrappers, PEFT's prefix and segments kept.
        cut_module: Whether segments called `module` were taken for those of wrappers.
        repeated: Tensors that are there once more, by the name in a PEFT file that they share:
            PEFT writes modules that were trained whole twice where it saves embeddings too.
    """

    live: Mapping[str, Mapping[Fqn, TensorEntry]] = field(default_factory=dict)
    stripped: Mapping[Fqn, TensorEntry] = field(default_factory=dict)
    rest: Mapping[Fqn, TensorEntry] = field(default_factory=dict)
    cut_module: bool = False
    repeated: Mapping[Fqn, TensorEntry] = field(default_factory=dict)

    @property
    def holds_adapter(self) -> bool:
        return bool(self.live or self.stripped)


def sort_entries(entries: Iterable[TensorEntry], *, keep_module: bool = False) -> Sorted:
    """Tells the tensors of adapters from those of the base.

    Args:
        entries: The tensors of one state dict.
        keep_module: Whether the model itself has modules called `module`.
    """
    live: dict[str, dict[Fqn, TensorEntry]] = {}
    stripped: dict[Fqn, TensorEntry] = {}
    rest: dict[Fqn, TensorEntry] = {}
    cut, held = False, list(entries)
    for entry in held:
        parts = _cleaned(entry.name, keep_module=keep_module)
        holder = next((at for at, part in enumerate(parts) if part in _HOLDERS), -1)
        if holder < 0:
            _add(rest, parts, entry)
            continue
        cut |= not keep_module and _MODULE in entry.name.split(".")
        adapter = _adapter_at(parts, holder)
        group = stripped if adapter is None else live.setdefault(adapter, {})
        _add(group, _in_file(parts, holder, live=adapter is not None), entry)
    _refuse_other_methods([entry.name for entry in held], rest, is_live=bool(live))
    repeated = _repeats_in_file(live, rest) if stripped else {}
    own = stripped if stripped and not live else _alone(live, rest)
    if own is not None:  # a file of PEFT's, or a save of what was trained: it is all the adapter's
        plain = {_with_prefix(name): entry for name, entry in rest.items()}
        repeated |= {name: own[name] for name in plain if name in own}
        own |= plain
        rest = {}
    return Sorted(live, stripped, rest, cut, repeated)


def of_adapter(
    found: Sorted,
    adapter: str,
    settings: LoraSettings | None,
    *,
    embeddings: Collection[str] = (),
) -> dict[Fqn, TensorEntry]:
    """Returns the tensors of one adapter out of what `sort_entries` found.

    Args:
        found: The tensors of one state dict.
        adapter: The adapter's name; without meaning where the names are those of a file.
        settings: Its configuration.
        embeddings: Names of further modules that lie in its file as they are, because they
            were given another number of tokens.
    """
    if adapter not in found.live:
        return dict(found.stripped)
    own = found.live[adapter]
    names = AdapterNames(
        adapter=adapter,
        bias="none" if settings is None else settings.bias,
        embeddings=(*_saved_embeddings(found.rest, settings, own), *embeddings),
    )
    beside = {
        _beside(name, own, embeddings): entry
        for name, entry in found.rest.items()
        if names.file_name(name) is not None
    }
    return {**own, **beside}


def second_name(name: str, *, keep_module: bool) -> Fqn | None:
    """Returns the name under which PEFT saves a tensor once more with `bias="all"`; mostly None.

    It takes every name that ends with `bias` then, also in modules that were trained whole, and
    leaves out the name of the adapter where that is the last segment but one.

    Args:
        name: As the model or the checkpoint has it.
        keep_module: See `sort_entries`.

    Source: peft 0.21, `_get_learnable_bias_state_dict` and `_remove_adapter_name_from_key`.
    """
    parts = _cleaned(name, keep_module=keep_module)
    if _MODULES_TO_SAVE not in parts or parts[-1] != "bias":
        return None
    at = parts.index(_MODULES_TO_SAVE)
    if len(parts) == at + _ADAPTER_AND_BIAS:
        parts = [*parts[: at + 1], parts[-1]]
    return _with_prefix(Fqn(".".join(parts)))


def plain_entries(rest: Mapping[Fqn, TensorEntry]) -> dict[Fqn, TensorEntry]:
    """Returns tensors of the base by the names that they have without PEFT.

    Args:
        rest: Tensors as `Sorted.rest` has them.
    """
    plain: dict[Fqn, TensorEntry] = {}
    for name, entry in rest.items():
        _add(plain, plain_name(name).split("."), entry)
    return plain


def plain_name(name: str) -> str:
    """Returns the name that a tensor or module has in the base model.

    >>> plain_name("base_model.model.model.embed_tokens.token_adapter.base_layer.weight")
    'model.embed_tokens.weight'
    """
    ours = (BASE_LAYER, _ORIGINAL, _OF_TOKENS)
    return ".".join(p for p in name.removeprefix(PEFT_PREFIX).split(".") if p not in ours)


def is_frozen_name(file_name: str) -> bool:
    """Tells whether an adapter was trained upon a tensor of its file, and did not change it."""
    parts = file_name.split(".")
    # Biases beneath a wrapper are trained with `bias="all"`; weights there never are.
    return _ORIGINAL in parts or (BASE_LAYER in parts and parts[-1] != "bias")


def _alone(
    live: Mapping[str, dict[Fqn, TensorEntry]], rest: Mapping[Fqn, TensorEntry]
) -> dict[Fqn, TensorEntry] | None:
    """Returns the only adapter of a live model whose frozen tensors were not saved; else None."""
    for name in rest:
        parts = name.split(".")
        if parts[-1] != "bias" and (BASE_LAYER in parts or _ORIGINAL in parts):
            return None
    return next(iter(live.values())) if len(live) == 1 else None


def _repeats_in_file(
    live: dict[str, dict[Fqn, TensorEntry]], rest: Mapping[Fqn, TensorEntry]
) -> dict[Fqn, TensorEntry]:
    """Takes out of live tensors what a file of PEFT has twice, see `second_name`."""
    plain = {_with_prefix(name) for name in rest}
    found: dict[Fqn, TensorEntry] = {}
    for adapter in [one for one, tensors in live.items() if plain.issuperset(tensors)]:
        found |= live.pop(adapter)
    return found


def _with_prefix(name: Fqn) -> Fqn:
    return name if name.startswith(PEFT_PREFIX) else Fqn(PEFT_PREFIX + name)


def _cleaned(name: str, *, keep_module: bool) -> list[str]:
    """Returns the segments of a name from PEFT's prefix on, without those of wrappers."""
    wrappers = _WRAPPERS if keep_module else _WRAPPERS | {_MODULE}
    parts = name.split(".")
    kept = [
        part
        for before, part in zip(["", *parts], parts[:-1], strict=False)
        if part not in wrappers or (part == _MODULE and before in _HOLDERS)  # an adapter's name
    ]
    kept += parts[-1:]
    for at in range(len(kept) - 1):
        if tuple(kept[at : at + 2]) == _PREFIX:
            return kept[at:]
    return kept


def _adapter_at(parts: list[str], holder: int) -> str | None:
    """Returns the adapter that a name tells behind a holder; None in the names of a file."""
    after = parts[holder + 1 :]
    kind = parts[holder]
    if kind == _MODULES_TO_SAVE and not _HOLDERS.isdisjoint(after[1:]):
        raise UnsupportedError(
            f"tensor {'.'.join(parts)!r} is of an adapter inside of a module that another one"
            " trained as a whole, which is not modelled, and which PEFT itself does not save",
            hint="train the adapters apart from one another, or choose other modules_to_save",
        )
    # What PEFT saved of a whole module as of an embedding has lost the adapter's name.
    if kind in {LORA_A, LORA_B, _MODULES_TO_SAVE}:
        return after[0] if len(after) > 1 else None
    if len(after) == 1 and kind == MAGNITUDE and after[0] in _PARAMETERS:
        return None
    return after[0] if after else None


def _in_file(parts: list[str], holder: int, *, live: bool) -> list[str]:
    """Returns the segments under which a PEFT file holds what a name means."""
    kind = parts[holder]
    after = parts[holder + 2 :] if live else parts[holder + 1 :]
    if kind == _MODULES_TO_SAVE:
        inside = [*parts[:holder], *after]
    elif kind == MAGNITUDE:
        inside = parts[: holder + 1]
    else:
        inside = [*parts[: holder + 1], *after]
    return inside if tuple(inside[:2]) == _PREFIX else [*_PREFIX, *inside]


def _add(group: dict[Fqn, TensorEntry], parts: Iterable[str], entry: TensorEntry) -> None:
    name = Fqn(".".join(parts))
    if name in group:
        raise FormatError(
            f"{group[name].name!r} and {entry.name!r} are both the tensor {name!r} of the adapter",
            hint="names must stay distinct when wrapper segments are cut out",
        )
    group[name] = entry


def _beside(name: Fqn, own: Iterable[Fqn], embeddings: Collection[str]) -> Fqn:
    """Returns what a file calls a tensor of the base that lies in it.

    What another adapter wrapped is called as in a model without that adapter, or PEFT would
    not find its place.
    """
    module, _, parameter = name.rpartition(".")
    if module not in embeddings or _is_changed(module, own):
        return name
    return _with_prefix(Fqn(f"{plain_name(module)}.{parameter}"))


def _is_changed(module: str, own: Iterable[Fqn]) -> bool:
    inside = f"{plain_name(module)}."
    return any(plain_name(name).startswith(inside) for name in own)


def _saved_embeddings(
    rest: Mapping[Fqn, TensorEntry], settings: LoraSettings | None, own: Iterable[Fqn]
) -> list[str]:
    """Returns the frozen weights of targeted embeddings, which PEFT saves with the adapter.

    It does so for both ends of the model where a target has a name of `EMBEDDINGS`. Those that
    only another adapter of the checkpoint targets are left out.

    Source: peft 0.21, `get_peft_model_state_dict` with `save_embedding_layers="auto"`.
    """
    if settings is None or settings.trainable_token_indices:
        return []
    modules = [name.rpartition(".")[0] for name in rest]
    ends = vocabulary_of(plain_name(module) for module in modules)
    embeddings = [
        module
        for module in modules
        if module.endswith(f".{BASE_LAYER}")
        and plain_name(module) in ends
        and _is_changed(module, own)
    ]
    targets = settings.target_modules or ()
    if isinstance(targets, str):
        targets = tuple(plain_name(module).rpartition(".")[2] for module in embeddings)
    return embeddings if set(targets) & EMBEDDINGS else []


def _refuse_other_methods(names: Collection[str], rest: Iterable[str], *, is_live: bool) -> None:
    """Refuses tensors of methods that are not modelled, and of LoRA's variants.

    Args:
        names: Of all tensors.
        rest: Of those that LoRA is not known to have.
        is_live: Whether adapters are named in names: then what follows a segment tells LoRA's
            tensors from modules of the model that are called alike.
    """
    sign = find_adapter(names)
    if sign is not None and sign.method not in {"", LORA}:
        raise UnsupportedError(
            f"tensor {sign.name!r} is of PEFT's method {sign.method!r}{refusal_of(sign.method)}",
            hint=advice_on(sign.method),
        )
    own = {*_PARAMETERS, BASE_LAYER, _ORIGINAL} if is_live else set()
    for name in rest:
        parts = name.split(".")
        followed = zip(parts, [*parts[1:], ""], strict=True)
        is_variant = any(part.startswith(_OF_LORA) and after not in own for part, after in followed)
        if is_variant and name.startswith(PEFT_PREFIX):
            raise UnsupportedError(
                f"tensor {name!r} is of a variant of PEFT's method 'LORA'; LoRA, rsLoRA and DoRA"
                " are modelled",
                hint=advice_on(LORA),
            )
