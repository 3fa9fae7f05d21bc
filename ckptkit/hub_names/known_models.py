"""What is known of a model's tensors without transformers: names on disk, and what is missing.

The tables know model types. The names of models of other types are left unchanged: Transformers
loads tensors under their live names too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from ckptkit.core.data_rows import read_row, read_table
from ckptkit.core.dtypes import DType
from ckptkit.core.index import Fqn, Shape
from ckptkit.core.model_configs import architecture_of, list_model_types
from ckptkit.plan.load_report import LoadReport, LoadRequest, Mismatch
from ckptkit.plan.ties import find_absent_tied_names, find_tie_candidates
from ckptkit.plan.vocabulary import is_embedding
from ckptkit.plan.weight_kinds import find_dense_name

# Buffers that older files hold, and that models make themselves.
_MADE = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|position_ids|masked_bias|token_type_ids|attn\.bias"
    r"|attention\.bias|rotary_emb\.(cos|sin)_cached|num_batches_tracked)$"
)
_LAYER = re.compile(r"^((?:[a-z_]+\.){0,3}(?:layers|h|blocks|block|layer))\.(\d{1,9})\.")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_PREDICTING = ("nextn", "mtp")  # keys of layers that predict further tokens
_MATRIX = 2
Shapes = Mapping[str, Shape | None]


class _DiskNames(Struct, frozen=True):
    """Model types by what happens to names on the way to disk, as `hub_names.py` found it.

    A type is listed where any of its classes has a conversion, so that some of its models may be
    the same in memory and on disk.
    """

    converted: frozenset[str]  # renamed, split or joined
    prefixed: frozenset[str]  # a prefix may differ, if the files that training began from have it
    unconverted: frozenset[str]


class _Outlines(Struct, frozen=True):
    """What models are like, as `model_outlines.py` found it."""

    roots: frozenset[str]  # what the names of tensors begin with
    base_prefixes: frozenset[str]  # what models with a head put before the names of their base
    counted: frozenset[str]  # types whose configuration counts layers and sizes embeddings


# Both tables are made by programs of these names in `fixtures/generators/`.
_DISK_NAMES = read_table(__file__, "disk_names.json", _DiskNames)
_OUTLINES = read_table(__file__, "outlines.json", _Outlines)
UNCONVERTED, BASE_PREFIXES = _DISK_NAMES.unconverted, _OUTLINES.base_prefixes
KNOWN_TYPES = _DISK_NAMES.converted | _DISK_NAMES.prefixed | UNCONVERTED
"""The model types of the Transformers that the tables were made with."""


def find_doubled_prefix(names: Collection[str]) -> str:
    """Returns the first part of all names where it stands twice in some; empty where it does not.

    Loading by Transformers 5 takes the prefix of base models away once more, that of 4 does not.

    >>> find_doubled_prefix(["model.model.norm.weight", "model.lm_head.weight"])
    'model.'
    """
    prefix = f"{next(iter(names), '').partition('.')[0]}."
    is_everywhere = all(name.startswith(prefix) for name in names)
    return prefix if is_everywhere and any(n.startswith(2 * prefix) for n in names) else ""


def compare_with_base(request: LoadRequest, base: Shapes, model: str) -> LoadReport:
    """Compares tensors with those of a base model.

    `base`: shapes by name; None where only names are known. `model`: the base, in words.
    """
    given, left_out = _as_in_base(request, base)
    wanted = base
    parts = _lacking_parts(given, left_out, base)
    if request.is_packed or any(find_dense_name(name) != name for name in base):
        given = {find_dense_name(name): None for name in given}
        wanted = {find_dense_name(name): None for name in base}
        left_out = {find_dense_name(name) for name in left_out}
    specs: dict[Fqn, Any] = {Fqn(name): (None, ()) for name in {**wanted, **given}}
    tied = {
        *find_tie_candidates(request.config, specs),
        *find_absent_tied_names(request.config, set(map(Fqn, given))),
    }
    missing = [n for n in wanted if n not in given and n not in tied and not _MADE.search(n)]
    unexpected = [
        name
        for name in given
        if not (name in wanted or name in left_out or name in tied or _MADE.search(name))
    ]
    mismatched = [
        Mismatch(name, str(list(shape)), str(list(other)))
        for name, shape in given.items()
        if shape is not None
        and name not in left_out
        and (other := wanted.get(name)) is not None
        and other != shape
        and not _MADE.search(name)
    ]
    rest = [name for name in request.written if name not in unexpected]
    doubled = find_doubled_prefix(rest)
    is_extra = bool(doubled) and all(name.removeprefix(doubled) in base for name in rest)
    return LoadReport(
        model=model,
        given=len(given) - len(left_out),
        missing=tuple(sorted({*missing, *parts})),
        unexpected=tuple(sorted(unexpected)),
        mismatched=tuple(mismatched),
        prefix=find_prefix(unexpected, wanted) or (doubled if is_extra else ""),
    )


def compare_packed_parts(request: LoadRequest, base: Shapes, model: str) -> LoadReport:
    """Compares what belongs to packed weights alone; see `compare_with_base`."""
    given, left_out = _as_in_base(request, base)
    missing = tuple(sorted(_lacking_parts(given, left_out, base)))
    return LoadReport(model, len(given) - len(left_out), missing)


def is_made_by_model(name: str) -> bool:
    """Returns whether a tensor is a buffer that models make themselves."""
    return _MADE.search(name) is not None


def _lacking_parts(given: Shapes, left_out: Collection[str], base: Shapes) -> set[str]:
    """Returns what packed weights of a base have beside them and the same weights here have not.

    A weight that is packed in the base alone, as training leaves it, lacks nothing.
    """
    packed = {find_dense_name(name) for name in given if find_dense_name(name) != name}
    apart = {*given, *left_out}
    return {name for name in base if find_dense_name(name) in packed and name not in apart}


def _as_in_base(request: LoadRequest, base: Shapes) -> tuple[Shapes, set[str]]:
    """Returns the tensors, and those left out, with the prefix of base models as the base has it.

    Transformers adds and strips that prefix as needed.
    """
    prefixes = sorted({name.split(".")[0] for name in (*request.tensors, *base)} & BASE_PREFIXES)

    def called(name: str) -> str:
        forms = [name, *(f"{prefix}.{name}" for prefix in prefixes)]
        forms += (name.removeprefix(f"{prefix}.") for prefix in prefixes)
        return next((form for form in forms if form in base), name)

    given = {called(name): shape for name, (_, shape) in request.tensors.items()}
    return given, {called(name) for name in request.left_out}


def find_prefix(unexpected: Collection[str], wanted: Collection[str]) -> str:
    """Returns what names begin with where most of the model's are found behind it; else empty."""
    known = Counter(
        name[: at + 1]
        for name in unexpected
        for at, letter in enumerate(name)
        if letter == "." and name[at + 1 :] in wanted
    )
    best = max(known, key=known.__getitem__, default="")
    return best if known[best] * 2 > min(len(unexpected), len(wanted)) else ""


def compare_with_counts(request: LoadRequest) -> LoadReport | None:
    """Compares tensors with what a configuration counts.

    Returns what differs for certain; None where a configuration of this kind shows nothing.
    """
    config, names = request.config, list(request.tensors)
    model_type = config.get("model_type")
    is_known = isinstance(model_type, str) and model_type in KNOWN_TYPES
    if not is_known or not names:
        return None
    model = f"the {model_type} model of config.json"
    given = len(names) - len(request.left_out)
    prefix = _foreign_prefix(request.written)
    if prefix:
        return LoadReport(model, given, unexpected=tuple(sorted(request.written)), prefix=prefix)
    if model_type not in _OUTLINES.counted:
        return None  # nothing else is certain
    missing, unexpected = _layers(config, request)
    mismatched = () if request.is_packed else tuple(_sizes(config, request))
    prefix = find_doubled_prefix(request.written)
    return LoadReport(model, given, missing, unexpected, mismatched, prefix=prefix)


def _foreign_prefix(names: list[str]) -> str:
    """Returns the first segments of all names if no model of any family has such names."""
    segments = names[0].split(".") if names else [""]
    if segments[0] in _OUTLINES.roots:
        return ""
    for count in range(1, len(segments)):
        prefix = ".".join(segments[:count]) + "."
        if not all(name.startswith(prefix) for name in names):
            return ""
        if segments[count] in _OUTLINES.roots:
            return prefix
    return ""


def _layers(
    config: Mapping[str, Any], request: LoadRequest
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns layers that are counted and not there, and those that are there and not counted."""
    count = _number(config, _LAYERS)
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in request.tensors:
        match = _LAYER.match(name)
        if match:
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), []).append(name)
    if count is None or len(stacks) != 1:
        return (), ()
    ((stack, there),) = stacks.items()
    missing = tuple(f"{stack}.{i}.*" for i in range(min(count, 10_000)) if i not in there)
    if any(word in key for key in config for word in _PREDICTING):
        return missing, ()  # files may hold further layers, which transformers does not load
    extra = [n for i, names in there.items() if i >= count for n in names]
    return missing, tuple(sorted(name for name in extra if name not in request.left_out))


def _sizes(config: Mapping[str, Any], request: LoadRequest) -> Iterator[Mismatch]:
    """Yields embeddings that have other rows or columns than the configuration says."""
    wanted = _number(config, ("vocab_size",)), _number(config, _HIDDEN)
    for name, (_, shape) in request.tensors.items():
        if not is_embedding(name) or len(shape) != _MATRIX or name in request.left_out:
            continue
        if None not in wanted and wanted != shape:
            yield Mismatch(name, str(list(shape)), str(list(wanted)))


# Layers that predict further tokens, where they have names of their own.
_PREDICTORS = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
_TOWER = re.compile(r"vis|audio|image|coder")  # these have counts of their own
_KEYS_AND_VALUES = re.compile(r"\.self_attn\.[kv]_(?:proj|norm)\.")


def _find_layer(name: str, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the number of a tensor's layer, and how many layers a configuration counts."""
    count, found = _number(config, _LAYERS), _LAYER.match(name)
    if count is None or found is None or _TOWER.search(found[1]) is not None:
        return None
    return int(found[2]), count


def is_beyond_counts(name: str, config: Mapping[str, Any]) -> bool:
    """Returns whether files may hold a tensor for which the counts of a configuration have no room.

    These are layers that predict further tokens: `mtp`, and those after the last one; and keys and
    values of layers that share those of an earlier one.

    Source: transformers 5.23, `_keys_to_ignore_on_load_unexpected`, also as `Gemma3nTextModel` and
    `Gemma4TextModel` set it.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    layer = _find_layer(name, config)
    shared = 0
    if _KEYS_AND_VALUES.search(name) is not None:
        shared = _number(config, ("num_kv_shared_layers",)) or 0
    is_beyond = layer is not None and layer[0] >= layer[1] - shared
    return is_beyond or _PREDICTORS.search(name) is not None


def is_counted_beyond_layers(name: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a tensor is of the layers for further tokens that a configuration counts.

    Transformers leaves them where they are, also where its class does not say that it does.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    counts = [v for k, v in config.items() if any(word in k for word in _PREDICTING)]
    further = max((value for value in counts if type(value) is int), default=0)
    if _PREDICTORS.search(name) is not None:
        return further > 0
    layer = _find_layer(name, config)
    return layer is not None and layer[1] <= layer[0] < layer[1] + further


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if type(config.get(key)) is int), None)


class Need(Struct, frozen=True):
    """Whether names on disk have to be asked for."""

    # `ask` where they may differ, `none` where they do not, `unknown` where the table does not say.
    kind: Literal["ask", "none", "unknown"]
    reason: str = ""  # why it cannot, as a clause; empty otherwise


def determine_need(config: Mapping[str, Any] | None, *, has_base: bool) -> Need:
    """Returns whether a model's names on disk have to be asked for.

    `config`: a parsed `config.json`, or None. `has_base`: whether the disk names of the model that
    training began from are known; only they show that a prefix is to be added or dropped.
    """
    if config is None:
        return Need("unknown", "there is no config.json")
    types = set(list_model_types(config))
    if types & _DISK_NAMES.converted or (has_base and types & _DISK_NAMES.prefixed):
        return Need("ask")
    root = config.get("model_type")
    if root in UNCONVERTED or root in _DISK_NAMES.prefixed:
        return Need("none")
    if root is None:
        return Need("unknown", "config.json names no model type")
    return Need("unknown", f"the model type {root!r} of config.json is not known")


def explain_doubt(config: Mapping[str, Any], dtypes: Iterable[DType]) -> str:
    """Says why conversions would have to know of a quantization; empty where they need not."""
    kinds = {dtype.kind for dtype in dtypes if dtype.itemsize == 1}
    is_packed = "float" in kinds or ("int" in kinds and bool(config.get("quantization_config")))
    return "the weights are packed in 8 bits or fewer" if is_packed else ""


# --- names and shapes by the keys of a configuration ---

# `model_shapes.jsonl` describes a class by its sizes, its switches, the keys that change nothing,
# and those that may only have their default. `fixtures/generators/model_shapes.py` finds them by
# building the class. A configuration that says anything else is not described.
DATA = Path(__file__).with_name("model_shapes.jsonl")
LAYER = "{layer}"
_MOST, _MOST_LAYERS = 1 << 40, 10_000  # a configuration may be hostile
_FACTOR = re.compile(r"(^|[*/])([^*/]+)")


class _UndescribedError(Exception):
    """The configuration says what was not tried; this never leaves the module."""


def is_as_described(request: LoadRequest) -> bool:
    """Returns whether tensors are, for certain, those of the class that a configuration names."""
    shapes = None if request.is_packed else lay_out(request.config)
    if shapes is None:
        return False
    given = {n: shape for n, (_, shape) in request.tensors.items() if n not in request.left_out}
    missing = shapes.keys() - given.keys() - find_tied(request.config)
    return not missing and all(shapes.get(name) == shape for name, shape in given.items())


def lay_out(config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Returns the shapes of the tensors of a model, by name; None where they are not certain."""
    family = _find_family(config)
    if family is None or architecture_of(config) != family["class"]:
        return None
    try:
        values = _Values(family, config)
        return dict(_expand(family, values))
    except _UndescribedError:
        return None


def find_tied(config: Mapping[str, Any]) -> set[str]:
    """Returns the names that a described model need not have, as it ties them to others."""
    family = _find_family(config)
    if family is None:
        return set()
    return {*family["tied"]} if config.get("tie_word_embeddings", family["ties"]) else set()


def _expand(family: Mapping[str, Any], values: _Values) -> Iterator[tuple[str, Shape]]:
    for condition, rows in family["rows"].items():
        if not all(values.meets(one) for one in condition.split()):
            continue
        for template, terms in rows.items():
            shape = tuple(values.compute(term) for term in terms.split())
            if LAYER in template:
                for layer in range(min(values.compute(family["layers"]), _MOST_LAYERS)):
                    yield template.replace(LAYER, str(layer)), shape
            else:
                yield template, shape


class _Values:
    """What a configuration says, with what its class takes for what it does not."""

    def __init__(self, family: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Refuses keys and values that were not tried."""
        self._config, self._family = config, family
        free = {*read_row(DATA, "free").split(), *family["free"].split()}
        for key, value in config.items():
            if key in family["sizes"]:
                is_size = type(value) is int and 0 < value <= _MOST
                is_fit = is_size or (value is None and key in family["null"])
            elif key in family["switches"]:
                is_fit = isinstance(value, bool)
            elif key in family["activations"]:
                is_fit = value in read_row(DATA, "activations")
            else:
                is_fit = key in free or family["fixed"].get(key, self) == value
            if not is_fit:
                raise _UndescribedError(key)
        switches = family["switches"]
        changed = [key for key, usual in switches.items() if config.get(key, usual) != usual]
        if family["alone"] and len(changed) > 1:
            raise _UndescribedError(changed)

    def meets(self, condition: str) -> bool:
        """Returns whether a switch, `key` or `!key`, is as a condition has it."""
        key = condition.lstrip("!")
        is_on = bool(self._config.get(key, self._family["switches"][key]))
        return is_on != condition.startswith("!")

    def compute(self, terms: str) -> int:
        """Computes a sum of products and quotients of sizes; each term is a whole number."""
        total = 0
        for term in terms.split("+"):
            value = 1
            for sign, factor in _FACTOR.findall(term):
                number = int(factor) if factor.isdigit() else self._find(factor)
                if sign == "/" and value % number:
                    raise _UndescribedError(terms)
                value = value // number if sign == "/" else value * number
            total += value
        return total

    def _find(self, key: str) -> int:
        value = self._config.get(key)
        usual = str(self._family["sizes"][key])
        if value is None and not usual:
            raise _UndescribedError(key)
        return self.compute(usual) if value is None else int(value)


def _find_family(config: Mapping[str, Any]) -> Any:
    model_type = config.get("model_type")
    return read_row(DATA, "families", model_type) if isinstance(model_type, str) else None
