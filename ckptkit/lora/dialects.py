"""The tensors of adapters by their names: which they are, and which weight of the base they change.

Three dialects are in use: the names of the live model (`….lora_A.default.weight`, with the frozen
base), the same of the trained tensors alone, and those of PEFT's files (`….lora_A.weight`), which
omit the name of the adapter. Segments of wrappers may precede and separate the others.

Source: peft 0.21, `get_peft_model_state_dict` in `utils/save_and_load.py` and
`tuners/tuners_utils.py`; accelerate 1.15, `save_fsdp_model`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct, field

from ckptkit.core.errors import AdapterError, FormatError, UnsupportedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.core.wrapper_names import MODULE, WRAPPERS
from ckptkit.lora.config import EMBEDDINGS, PEFT_PREFIX, Adapter, Bias, LoraSettings
from ckptkit.plan.weight_kinds import LORA, advice_on, find_adapter, refusal_of

DEFAULT = "default"
"""PEFT's default name of an adapter."""

LORA_A, LORA_B = "lora_A", "lora_B"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
MAGNITUDE = "lora_magnitude_vector"
TOKENS = "trainable_tokens_delta"
_OF_LORA = "lora_"
_OF_TOKENS = "token_adapter"
BASE_LAYER = "base_layer"
_MODULES_TO_SAVE = "modules_to_save"
_ORIGINAL = "original_module"
_HOLDERS = {LORA_A, LORA_B, EMBEDDING_A, EMBEDDING_B, MAGNITUDE, TOKENS, _MODULES_TO_SAVE}
_PARAMETERS = {"weight", "bias"}
_ADAPTER_AND_BIAS = 3  # the length of `modules_to_save.default.bias`
_PREFIX = tuple(PEFT_PREFIX.rstrip(".").split("."))


class SortedTensors(Struct, frozen=True):
    """The tensors of one state dict, sorted by adapter."""

    # By adapter and name in its file.
    live: Mapping[str, Mapping[Fqn, TensorEntry]] = field(default_factory=dict)
    # Whose names are those of a PEFT file.
    stripped: Mapping[Fqn, TensorEntry] = field(default_factory=dict)
    # By names without wrappers, with PEFT's prefix and segments.
    rest: Mapping[Fqn, TensorEntry] = field(default_factory=dict)
    cut_module: bool = False  # segments `module` were removed as those of wrappers
    # Second copies: PEFT writes whole modules twice where it saves embeddings too.
    repeated: Mapping[Fqn, TensorEntry] = field(default_factory=dict)

    @property
    def holds_adapter(self) -> bool:
        return bool(self.live or self.stripped)


def sort_entries(entries: Iterable[TensorEntry], *, keep_module: bool = False) -> SortedTensors:
    """Separates the tensors of adapters from those of the base, in one state dict.

    `keep_module` says that the model itself has modules called `module`.
    """
    live: dict[str, dict[Fqn, TensorEntry]] = {}
    stripped: dict[Fqn, TensorEntry] = {}
    rest: dict[Fqn, TensorEntry] = {}
    cut, listed = False, list(entries)
    for entry in listed:
        parts = cut_wrappers(entry.name, keep_module=keep_module)
        holder = next((at for at, part in enumerate(parts) if part in _HOLDERS), -1)
        if holder < 0:
            _add(rest, parts, entry)
            continue
        cut |= not keep_module and MODULE in entry.name.split(".")
        adapter = _adapter_at(parts, holder)
        group = stripped if adapter is None else live.setdefault(adapter, {})
        _add(group, _in_file(parts, holder, live=adapter is not None), entry)
    _refuse_other_methods([entry.name for entry in listed], rest, is_live=bool(live))
    repeated: dict[Fqn, TensorEntry] = {}
    if stripped:  # a PEFT file may have modules twice; see `find_second_name`
        named = {_with_prefix(name) for name in rest}
        for adapter in [name for name, tensors in live.items() if named.issuperset(tensors)]:
            repeated |= live.pop(adapter)
    own = stripped if stripped and not live else None
    if own is None and len(live) == 1:
        segments = (name.split(".") for name in rest)
        if all(parts[-1] == "bias" or not {BASE_LAYER, _ORIGINAL} & {*parts} for parts in segments):
            own = next(iter(live.values()))  # the only adapter, saved without its base
    if own is not None:  # a PEFT file, or a save of trained tensors: all are the adapter's
        plain = {_with_prefix(name): entry for name, entry in rest.items()}
        repeated |= {name: own[name] for name in plain if name in own}
        own |= plain
        rest = {}
    return SortedTensors(live, stripped, rest, cut, repeated)


def select_adapter_tensors(
    tensors: SortedTensors,
    adapter: str,
    settings: LoraSettings | None,
    *,
    embeddings: Collection[str] = (),
) -> dict[Fqn, TensorEntry]:
    """Returns the tensors of one adapter by their names in its file.

    `embeddings` are further modules that its file has whole: their number of tokens changed.
    """
    if adapter not in tensors.live:
        return dict(tensors.stripped)
    own = tensors.live[adapter]
    names = AdapterNames(
        adapter=adapter,
        bias="none" if settings is None else settings.bias,
        embeddings=(*_find_saved_embeddings(tensors.rest, settings, own), *embeddings),
    )
    of_base: dict[Fqn, TensorEntry] = {}
    for name, entry in tensors.rest.items():
        if names.file_name(name) is None:
            continue
        module, _, parameter = name.rpartition(".")
        in_file = name
        if module in embeddings and not _is_changed(module, own):
            # A model without the other adapters, whose wrappers the name has, loads the file.
            in_file = _with_prefix(Fqn(f"{make_plain_name(module)}.{parameter}"))
        of_base[in_file] = entry
    return {**own, **of_base}


def find_second_name(name: str, *, keep_module: bool) -> Fqn | None:
    """Returns the name under which PEFT saves a second copy with `bias="all"`; mostly None.

    PEFT then takes every name that ends with `bias`, also in modules that were trained whole, and
    omits the name of the adapter where that is the last segment but one. `keep_module` is that of
    `sort_entries`.

    Source: peft 0.21, `_get_learnable_bias_state_dict` and `_remove_adapter_name_from_key`.
    """
    parts = cut_wrappers(name, keep_module=keep_module)
    if _MODULES_TO_SAVE not in parts or parts[-1] != "bias":
        return None
    at = parts.index(_MODULES_TO_SAVE)
    if len(parts) == at + _ADAPTER_AND_BIAS:
        parts = [*parts[: at + 1], parts[-1]]
    return _with_prefix(Fqn(".".join(parts)))


def rename_plainly(rest: Mapping[Fqn, TensorEntry]) -> dict[Fqn, TensorEntry]:
    """Returns the tensors of `SortedTensors.rest` by their names without PEFT."""
    plain: dict[Fqn, TensorEntry] = {}
    for name, entry in rest.items():
        _add(plain, make_plain_name(name).split("."), entry)
    return plain


def make_plain_name(name: str) -> str:
    """Returns the name of a tensor or module in the base model.

    >>> make_plain_name("base_model.model.model.embed_tokens.token_adapter.base_layer.weight")
    'model.embed_tokens.weight'
    """
    ours = (BASE_LAYER, _ORIGINAL, _OF_TOKENS)
    return ".".join(p for p in name.removeprefix(PEFT_PREFIX).split(".") if p not in ours)


def is_frozen_name(file_name: str) -> bool:
    """Returns whether a tensor in an adapter's file is a frozen one of the base."""
    parts = file_name.split(".")
    # Biases of wrapped layers are trained with `bias="all"`; their weights never are.
    return _ORIGINAL in parts or (BASE_LAYER in parts and parts[-1] != "bias")


def _with_prefix(name: Fqn) -> Fqn:
    return name if name.startswith(PEFT_PREFIX) else Fqn(PEFT_PREFIX + name)


def cut_wrappers(name: str, *, keep_module: bool = False) -> list[str]:
    """Splits a name into segments from PEFT's prefix on, without those of wrappers."""
    wrappers = WRAPPERS if keep_module else WRAPPERS | {MODULE}
    parts = name.split(".")
    kept = [
        part
        for before, part in zip(["", *parts], parts[:-1], strict=False)
        if part not in wrappers or (part == MODULE and before in _HOLDERS)  # an adapter's name
    ]
    kept += parts[-1:]
    for at in range(len(kept) - 1):
        if tuple(kept[at : at + 2]) == _PREFIX:
            return kept[at:]
    return kept


def _adapter_at(parts: list[str], holder: int) -> str | None:
    """Returns the adapter whose name follows a holder; None in the names of a file."""
    after = parts[holder + 1 :]
    kind = parts[holder]
    if kind == _MODULES_TO_SAVE and not _HOLDERS.isdisjoint(after[1:]):
        raise UnsupportedError(
            f"tensor {'.'.join(parts)!r} is of an adapter inside of a module that another one"
            " trained whole, which is not modelled, and which PEFT itself does not save",
            hint="train the adapters apart from one another, or choose other modules_to_save",
        )
    # Whole modules that PEFT saved as embeddings have lost the adapter's name.
    if kind in {LORA_A, LORA_B, _MODULES_TO_SAVE}:
        return after[0] if len(after) > 1 else None
    if len(after) == 1 and kind == MAGNITUDE and after[0] in _PARAMETERS:
        return None
    return after[0] if after else None


def _in_file(parts: list[str], holder: int, *, live: bool) -> list[str]:
    """Returns the segments of the same tensor in a PEFT file."""
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


def _is_changed(module: str, own: Iterable[Fqn]) -> bool:
    inside = f"{make_plain_name(module)}."
    return any(make_plain_name(name).startswith(inside) for name in own)


def _find_saved_embeddings(
    rest: Mapping[Fqn, TensorEntry], settings: LoraSettings | None, own: Iterable[Fqn]
) -> list[str]:
    """Returns the frozen weights of targeted embeddings, which PEFT saves with the adapter.

    It does so at both ends of the model where a target has a name of `EMBEDDINGS`. Those that only
    another adapter of the checkpoint targets are left out.

    Source: peft 0.21, `get_peft_model_state_dict` with `save_embedding_layers="auto"`.
    """
    if settings is None or settings.trainable_token_indices:
        return []
    modules = [name.rpartition(".")[0] for name in rest]
    ends = find_vocabulary(make_plain_name(module) for module in modules)
    embeddings = [
        module
        for module in modules
        if module.endswith(f".{BASE_LAYER}")
        and make_plain_name(module) in ends
        and _is_changed(module, own)
    ]
    targets = settings.target_modules or ()
    if isinstance(targets, str):
        targets = tuple(make_plain_name(module).rpartition(".")[2] for module in embeddings)
    return embeddings if set(targets) & EMBEDDINGS else []


def _refuse_other_methods(names: Collection[str], rest: Iterable[str], *, is_live: bool) -> None:
    """Refuses tensors of methods that are not modelled, and of LoRA's variants.

    `names` are those of all tensors, `rest` those that are not of plain LoRA. `is_live` says that
    names have the adapter: what follows a segment then distinguishes LoRA's tensors from modules
    of the model with the same names.
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


# PEFT's names of the containers of adapters' parameters.
_TUNERS = (
    *("boft_", "bone_", "c3a_", "delora_", "fourierft_", "hada_", "hra_", "ia3_", "ln_tuning_"),
    *("lokr_", "lora_", "miss_", "oft_", "randlora_", "road_", "shira_", "vera_", "waveft_"),
)
# Transformers' names of the modules at both ends of a language model.
_INPUTS = frozenset(
    ("embed_in", "embed_tokens", "embeddings", "shared", "tok_embeddings", "word_embeddings", "wte")
)
_OUTPUTS = frozenset(("decoder", "embed_out", "lm_head", "output_layer", "vocab_projector"))
_SHARED = "shared"  # an input embedding that modules `embed_tokens` repeat


class AdapterNames(Struct, frozen=True):
    """Selects and names the tensors of a PEFT model that belong to one adapter."""

    adapter: str = "default"
    bias: Bias = "none"  # which biases of the base were trained with it
    embeddings: tuple[str, ...] = ()  # that its files have whole: targeted, or of another size

    def file_name(self, fqn: str) -> str | None:
        """Returns the name of a tensor in PEFT's files; None if it is not the adapter's.

        `fqn` is its name in the model, without the segments of wrappers.

        Example:
            >>> names = AdapterNames()
            >>> names.file_name("base_model.model.q.lora_A.default.weight")
            'base_model.model.q.lora_A.weight'
            >>> names.file_name("base_model.model.score.modules_to_save.default.weight")
            'base_model.model.score.weight'
            >>> names.file_name("base_model.model.q.base_layer.weight") is None
            True
        """
        parts = fqn.split(".")
        for at, part in enumerate(parts[1:], start=1):
            holder = parts[at - 1]
            if part == self.adapter and holds_adapters(holder):
                kept = parts[: at - 1] if holder == _MODULES_TO_SAVE else parts[:at]
                return ".".join(kept if holder == MAGNITUDE else [*kept, *parts[at + 1 :]])
        is_own_bias = self.bias == "lora_only" and parts[-2:-1] == [BASE_LAYER]
        is_trained = parts[-1] == "bias" and (self.bias == "all" or is_own_bias)
        return fqn if is_trained or fqn.rpartition(".")[0] in self.embeddings else None


def holds_adapters(part: str) -> bool:
    return part.startswith(_TUNERS) or part in {_MODULES_TO_SAVE, TOKENS}


def is_input_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in _INPUTS


def is_vocabulary(module: str) -> bool:
    return is_input_embedding(module) or module.rpartition(".")[2] in _OUTPUTS


def find_vocabulary(modules: Iterable[str]) -> set[str]:
    """Returns the modules of the base that are input embeddings or heads by their names.

    Example:
        >>> sorted(find_vocabulary(["shared", "encoder.embed_tokens", "encoder.norm", "lm_head"]))
        ['lm_head', 'shared']
    """
    ends = {module for module in modules if is_vocabulary(module)}
    if _SHARED not in {module.rpartition(".")[2] for module in ends}:
        return ends
    return {module for module in ends if module.rpartition(".")[2] != "embed_tokens"}


_MATRIX = 2
_PARTS = {
    f"{LORA_A}.weight": "down",
    f"{LORA_B}.weight": "up",
    f"{LORA_B}.bias": "up_bias",
    EMBEDDING_A: "down",
    EMBEDDING_B: "up",
    MAGNITUDE: "magnitude",
}
_OUTPUT = f".{BASE_LAYER}.out_proj"
_LONGEST = 2  # segments of a key of `_PARTS`


class LoraLayer(Struct, frozen=True):
    """The low-rank factors of one weight of the base."""

    module: str  # the path in the base of the module with the weight
    level: int  # `base_layer` segments before the factors: one module, several targeted parameters
    down: TensorEntry  # [rank, in, ...], [rank, rows] of embeddings, [E * rank, in] of E experts
    # [out, rank], [out, rank / G, 1, ...] of G groups, [out, rank * E] of E experts.
    up: TensorEntry
    is_embedding: bool
    up_bias: TensorEntry | None
    magnitude: TensorEntry | None  # DoRA's
    names: tuple[Fqn, ...]
    owner: str  # that a configuration names: of MultiheadAttention's output, the parent

    @property
    def times(self) -> int:
        """How many times PEFT adds the product: twice in the output of MultiheadAttention.

        Source: peft 0.21, `MultiheadAttention.merge`, which its `forward` calls as well.
        """
        return 1 if self.owner == self.module else 2

    @property
    def groups(self) -> int:
        """The number of groups of a convolution; 1 of all other layers."""
        return self.inner // self.up.shape[1] if self.is_convolution else 1

    @property
    def is_convolution(self) -> bool:
        return len(self.down.shape) > _MATRIX

    @property
    def inner(self) -> int:
        return self.down.shape[0]

    @property
    def shape(self) -> Shape:
        """The weight's shape as [out, in, ...]; that of an embedding is [rows, features]."""
        if self.is_embedding:
            return (self.down.shape[1], self.up.shape[0])
        return (self.up.shape[0], *self.down.shape[1:])


class AdapterTable(Struct, frozen=True):
    """Every tensor of an adapter, once."""

    layers: tuple[LoraLayer, ...]
    tokens: Mapping[str, TensorEntry]  # rows of embeddings, by path in the base
    whole: Mapping[Fqn, TensorEntry]  # tensors that replace the base's, by name in the file

    @property
    def modules(self) -> list[str]:
        """The modules that factors and trained tokens belong to."""
        return [*(layer.module for layer in self.layers), *self.tokens]


def build_table(tensors: Mapping[Fqn, TensorEntry]) -> AdapterTable:
    """Groups the tensors of an adapter, given by the names of its file."""
    factors: dict[str, dict[str, Fqn]] = defaultdict(dict)
    tokens: dict[str, TensorEntry] = {}
    whole: dict[Fqn, TensorEntry] = {}
    for name, entry in tensors.items():
        module, part = _split(name)
        if part:
            factors[module][part] = name
        elif name.rpartition(".")[2] == TOKENS:
            tokens[make_plain_name(name.rpartition(".")[0])] = entry
        else:
            whole[name] = entry
    layers = tuple(_make_layer(module, parts, tensors) for module, parts in factors.items())
    return AdapterTable(layers, tokens, whole)


def find_linear_shapes(adapter: Adapter) -> dict[str, Shape]:
    """Returns the shapes [out, in] of the linear weights that an adapter changes, by name."""
    return {
        f"{layer.module}.weight": layer.shape
        for layer in build_table(adapter.tensors).layers
        if not (layer.is_embedding or layer.is_convolution or layer.level)
    }


def _split(name: str) -> tuple[str, str]:
    """Splits a name into module and part; the part is empty for what is no factor."""
    segments = name.split(".")
    for length in range(1, _LONGEST + 1):
        part = _PARTS.get(".".join(segments[-length:]))
        if part is not None:
            return ".".join(segments[:-length]), part
    return name, ""


def _make_layer(
    module: str, parts: Mapping[str, Fqn], tensors: Mapping[Fqn, TensorEntry]
) -> LoraLayer:
    missing = [factor for factor, part in (("A", "down"), ("B", "up")) if part not in parts]
    if missing:
        there = next(iter(parts.values()))
        raise AdapterError(
            f"{there!r} was found without LoRA's factor {missing[0]} of the same module",
            where=f"module {make_plain_name(module)!r}",
            hint="the save was cut short or lost tensors; take another checkpoint",
        )
    entries = {part: tensors[name] for part, name in parts.items()}
    layer = LoraLayer(
        module=make_plain_name(module),
        level=module.removeprefix(PEFT_PREFIX).split(".").count(BASE_LAYER),
        down=entries["down"],
        up=entries["up"],
        is_embedding=parts["down"].endswith(EMBEDDING_A),
        up_bias=entries.get("up_bias"),
        magnitude=entries.get("magnitude"),
        names=tuple(parts.values()),
        owner=make_plain_name(module.removesuffix(_OUTPUT) if module.endswith(_OUTPUT) else module),
    )
    down, up = layer.down.shape, layer.up.shape
    same = len(down) == len(up) >= _MATRIX and 0 not in (*down, *up)
    groups = down[0] // up[1] if same and len(down) > _MATRIX else 1
    if not same or down[0] != groups * up[1] or up[0] % groups:
        raise AdapterError(
            f"LoRA's factor A of shape {list(down)} was found with a B of shape {list(up)}; the"
            " rows of A have to be as many as the columns of B",
            where=f"module {layer.module!r}",
            hint="the factors are pieces of sharded tensors, or of different adapters",
        )
    for what, entry in (("bias", layer.up_bias), ("magnitude", layer.magnitude)):
        if entry is not None and entry.elements != up[0]:
            raise AdapterError(
                f"a {what} of shape {list(entry.shape)} was found with a B of shape {list(up)}",
                where=f"module {layer.module!r}",
            )
    return layer
