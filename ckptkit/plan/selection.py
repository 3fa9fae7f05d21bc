"""From an index and a request to the tensors that will be written.

Keeping the file map of another model: the same names of files, the same tensors in each.

What is uploaded once more then has the same files as before, and of a file that changed only the
changed parts travel. Inside a file tensors lie as in all our outputs, which is also the order
of the safetensors library: larger item sizes first, then by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    IncompleteCheckpointError,
    RefusedError,
)
from ckptkit.core.index import Fqn, Key, Shape, TensorEntry, TensorIndex
from ckptkit.options import ConsolidateRequest, matches
from ckptkit.plan.peft_names import LORA, find_adapter, own_adapters, title_of
from ckptkit.plan.plan import SOURCE, Compute, Copy, Kernel, Product, TensorSpec, name_order

CastFactory = Callable[[str, Key, DType, DType], Kernel]
"""Makes the kernel that casts a tensor of an origin from one element type to another."""

# What stands beside `x.weight` in fp8 and compressed tensors, and `x.qweight` in GPTQ and AWQ.
_SCALE_ENDINGS = ("_scale", "_scale_inv", "_scale_2", "_scales")
_SCALE = re.compile(r"(.*)(?:_scale|_scale_inv|_scale_2|_scales|\.scales)")
# Layers that no model has with a single input, as a whole weight of one column would mean.
_PROJECTION = re.compile(
    r"(\b(q|k|v|o|qkv|gate|up|down|gate_up|out)_proj|\bc_attn|\bc_fc|query_key_value|\bw[123]"
    r"|dense_h_to_4h|dense_4h_to_h)\.weight$"
)
_MATRIX = 2
PACKED_WEIGHT = "a packed 4-bit or 8-bit weight"
_PACKED = re.compile(r"\.(quant_state\.bitsandbytes__\w+|absmax|quant_map|SCB)$")


def model_trees(index: TensorIndex) -> list[str]:
    return list(dict.fromkeys(entry.tree for entry in index.of_part("model")))


def select_model(
    index: TensorIndex, request: ConsolidateRequest, *, location: str
) -> list[TensorEntry]:
    """Returns the tensors of the one model state dict that is meant, patterns applied."""
    trees = model_trees(index)
    if not trees:
        raise IncompleteCheckpointError(
            f"holds no model tensor among {len(index.tensors):,} tensors",
            where=location,
            hint=lost_adapter(index.tensors)
            or "the run saved nothing but other state here; see `ckptkit inspect`",
        )
    tree = _chosen(trees, request.select, location, advice=_of_peft(index))
    whole = [entry for entry in index.of_part("model") if entry.tree == tree]
    if request.strip_prefix:
        whole = _without_prefixes(whole, request.strip_prefix, location)
    taken = [entry for entry in whole if request.wants(entry.name)]
    if not taken:
        raise CannotPlanError(
            f"--include and --exclude leave none of {len(whole):,} tensors",
            where=location,
            hint="patterns must fit whole names, such as 'model.layers.*'",
        )
    return taken


def _without_prefixes(
    entries: Sequence[TensorEntry], prefixes: Sequence[str], location: str
) -> list[TensorEntry]:
    """Takes the longest of the prefixes that a name begins with from each name."""
    longest = sorted(prefixes, key=len, reverse=True)
    for prefix in longest:
        if not any(entry.name.startswith(prefix) for entry in entries):
            raise CannotPlanError(
                f"no name of {len(entries):,} tensors begins with {prefix!r}; the first is"
                f" {entries[0].name!r}",
                where=location,
                hint="leave --strip-prefix out, or pass what the names begin with",
            )
    found: dict[Fqn, TensorEntry] = {}
    for entry in entries:
        prefix = next((p for p in longest if entry.name.startswith(p)), "")
        name = Fqn(entry.name.removeprefix(prefix))
        if name in found or not name:
            other = found[name].key if name else "no name"
            raise CannotPlanError(
                f"without {prefix!r}, tensor {entry.key!r} has the name of {other!r}",
                where=location,
                hint="leave one of them out of the checkpoint, or --strip-prefix out",
            )
        found[name] = replace(entry, name=name)
    return list(found.values())


def _of_peft(index: TensorIndex) -> str:
    """Says where several models are a base that training left as it was, and its adapter."""
    sign = find_adapter(entry.name for entry in index.of_part("model"))
    if sign is None:
        return ""
    if sign.method not in {"", LORA}:
        return (
            f"tensor {sign.name!r} belongs to {title_of(sign.method)}: choose the model with"
            " --select"
        )
    return (
        "they are a base and what PEFT trained on it: `ckptkit adapter merge` makes one model of"
        " them, `ckptkit adapter extract` takes the adapter out; --select takes one of the"
        " raw state dicts"
    )


def _chosen(trees: Sequence[str], select: str | None, location: str, *, advice: str) -> str:
    if select is None and len(trees) == 1:
        return trees[0]
    names = ", ".join(repr(tree) for tree in trees)
    if select is None:
        raise AmbiguousSourceError(
            f"holds {len(trees)} models: {names}",
            where=location,
            hint=advice or f"choose one with --select {trees[0]}",
        )
    if select not in trees:
        raise CannotPlanError(
            f"holds no model {select!r}; found {names}",
            where=location,
            hint=f"pass --select {trees[0]}",
        )
    return select


def lost_adapter(names: Iterable[str]) -> str:
    """Tells what became of an adapter of which the optimizer's state alone is there.

    Args:
        names: Of all tensors of a checkpoint without a model.

    Returns:
        What happened and what to do, in words; empty where there was none.
    """
    if find_adapter(names) is None:
        return ""
    return (
        "only the optimizer's state of an adapter is here: under FSDP1, PEFT 0.21 finds no weights"
        " to save; save through ckptkit.integrations, or with FSDP2"
    )


def looks_packed(name: str, shape: Shape, dtype: str = "") -> bool:
    """Tells whether a tensor seems to be a packed weight, or to lie beside one.

    >>> looks_packed("layers.0.q_proj.weight", (2048, 1)), looks_packed("score.weight", (2, 1))
    (True, False)
    >>> looks_packed("fc1.weight", (64, 64), "int8"), looks_packed("mask", (64, 64), "int8")
    (True, False)
    """
    in_one_column = shape[1:] == (1,) and shape[0] > 1 and _PROJECTION.search(name)
    of_bytes = len(shape) == _MATRIX and dtype in {"int8", "uint8"} and name.endswith(".weight")
    return bool(in_one_column or of_bytes or _PACKED.search(name))


def what_loads_as_random(
    tensors: Iterable[tuple[str, Shape, str]],
    *,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Tells in words why Transformers would load another model, without an error; mostly empty.

    Bytes with a scale beside them are known to Transformers, as in compressed tensors.

    Args:
        tensors: Names, shapes and element types of a whole model.
        config: The model's configuration: adapters that it declares are a part of the model.
    """
    held = list(tensors)
    sign = find_adapter((name for name, _, _ in held), own_adapters(config))
    if sign is not None:
        return as_random(sign.name, title_of(sign.method))
    return _packed_among(held)


def _packed_among(held: Sequence[tuple[str, Shape, str]]) -> str:
    names = {name for name, _, _ in held}
    for name, shape, dtype in held:
        is_scaled = any(name + end in names for end in _SCALE_ENDINGS)
        if looks_packed(name, shape, "" if is_scaled else dtype):
            return as_random(name, PACKED_WEIGHT)
    return ""


def as_random(name: str, what: str) -> str:
    """Returns why tensors of PEFT's, or packed ones, are no model that Transformers loads."""
    return (
        f"tensor {name!r} belongs to {what}; under these names Transformers would load a"
        " model with random weights"
    )


def refuse_what_would_load_as_random(
    entries: Iterable[TensorEntry],
    *,
    location: str,
    advice: str = "",
    config: Mapping[str, Any] | None = None,
) -> None:
    """Refuses adapters and packed weights, which load as another model without an error.

    Args:
        entries: What would be written.
        location: The source, for messages.
        advice: What to do instead, if there is something; it stands in the hint.
        config: See `what_loads_as_random`.
    """
    if told := what_loads_as_random(map(_described, entries), config=config):
        raise RefusedError(told, where=location, hint=hint_on_raw(advice))


def refuse_packed(entries: Iterable[TensorEntry], *, location: str) -> None:
    """Refuses packed weights; see `refuse_what_would_load_as_random`."""
    if told := _packed_among(list(map(_described, entries))):
        raise RefusedError(told, where=location, hint=hint_on_raw())


def _described(entry: TensorEntry) -> tuple[str, Shape, str]:
    return entry.name, entry.shape, entry.dtype.name


def hint_on_raw(advice: str = "") -> str:
    """Returns a hint that ends with how to write a state dict that is no model."""
    raw = "pass --names live to write the raw state dict all the same"
    return f"{advice}; {raw}" if advice else raw


def refuse_casting_quantized(
    entries: Sequence[TensorEntry],
    request: ConsolidateRequest,
    config: Mapping[str, Any] | None,
    *,
    location: str,
    base: Mapping[Fqn, DType] | None = None,
) -> None:
    """Refuses to cast packed numbers as if they were weights.

    Args:
        entries: What is to be written.
        request: What was asked for.
        config: The model's configuration, or None.
        location: The source, for messages.
        base: The element types of the base model, for `--dtype base`.
    """
    policy = DTypePolicy(request.dtype, request.keep_dtype, base)
    cast = [entry for entry in entries if policy.target(entry) != entry.dtype]
    if request.names == "live" or not cast:
        return
    names = {entry.name: entry.dtype for entry in entries}
    packed = next((e.name for e in cast if _is_quantized(e.name, names)), None)
    what = f"tensor {packed!r} is quantized, or a scale of one that is" if packed else ""
    if (config or {}).get("quantization_config"):
        what = "the configuration has a 'quantization_config'"
    if what:
        raise RefusedError(
            f"{what}; --dtype {request.dtype} would change its numbers without unpacking them",
            where=location,
            hint="leave --dtype out, or keep those tensors with --keep-dtype GLOB and --names live",
        )


def _is_quantized(name: Fqn, names: Mapping[Fqn, DType]) -> bool:
    scale = _SCALE.fullmatch(name)
    if scale is not None:
        base = names.get(Fqn(scale[1]), names.get(Fqn(f"{scale[1]}.qweight")))
        return base is not None and (base.itemsize == 1 or base.kind == "int")
    return names[name].itemsize == 1 and any(Fqn(name + end) in names for end in _SCALE_ENDINGS)


@dataclass(frozen=True, slots=True)
class DTypePolicy:
    """Which element type each tensor is written in.

    Attributes:
        choice: What `--dtype` says.
        keep: Patterns of names that keep their stored type.
        base: For the choice `base`, the element type of each tensor of the base model.
    """

    choice: str
    keep: tuple[str, ...]
    base: Mapping[Fqn, DType] | None = None

    def target(self, tensor: TensorEntry | TensorSpec) -> DType:
        """Returns the type to write; only floating tensors are ever cast."""
        fixed = self.choice == "keep" or tensor.dtype.kind != "float"
        if fixed or matches(tensor.name, self.keep):
            return tensor.dtype
        if self.choice != "base":
            return dtype_named(self.choice)
        if self.base is None:
            raise RefusedError(
                "takes the element types from the files of a base model, and none was named",
                where="--dtype base",
                hint="name its folder with --base DIR",
            )
        return _castable(tensor.name, self.base.get(tensor.name, tensor.dtype))


def _castable(name: Fqn, dtype: DType) -> DType:
    if dtype.kind == "float" and dtype.itemsize > 1:
        return dtype
    raise RefusedError(
        f"tensor {name!r} is {dtype.name} in the base model, which is its packed form: numbers"
        " cannot just be cast to it",
        where="--dtype base",
        hint=f"pass --dtype bfloat16, or --keep-dtype '{name}'",
    )


def under_tied_names(
    entries: Sequence[TensorEntry], absent: Mapping[Fqn, Fqn]
) -> list[TensorEntry]:
    """Adds the names that a live model has besides, each standing for the tensor of another."""
    by_name = {entry.name: entry for entry in entries}
    added = [replace(by_name[source], name=target) for target, source in absent.items()]
    return [*entries, *added]


def make_products(
    entries: Sequence[TensorEntry],
    request: ConsolidateRequest,
    dropped: Mapping[Fqn, Fqn],
    cast: CastFactory,
) -> list[Product]:
    """Says for every tensor to be written what it looks like and how it comes to be."""
    policy = DTypePolicy(request.dtype, request.keep_dtype)
    products = []
    for entry in entries:
        if entry.name in dropped:
            continue
        dtype = policy.target(entry)
        spec = TensorSpec(entry.name, dtype, entry.shape)
        key, stored = entry.key, entry.dtype
        if dtype != stored and entry.master is not None:
            key, stored = entry.master.key, entry.master.dtype
        body: Copy | Compute = Copy(SOURCE, key)
        if dtype != stored:
            body = Compute(cast(SOURCE, key, stored, dtype), ((SOURCE, key),))
        products.append(Product(spec, body))
    return products


def note_of_masters(entries: Sequence[TensorEntry], products: Iterable[Product]) -> str:
    """Tells where a cast takes its numbers from, if a source has them in several types.

    Args:
        entries: What is written.
        products: How it is made.
    """
    masters = {entry.master.key for entry in entries if entry.master is not None}
    read = {key for product in products for key in _keys_read(product)}
    if not masters & read:
        return _note_of_live(entries)
    return (
        f"{len(masters & read):,} of {len(entries):,} tensors are made from the master copies that"
        " the optimizer works on, the others from the weights as the model has them"
    )


def _note_of_live(entries: Sequence[TensorEntry]) -> str:
    """Tells that masters are there, and were not what was asked for."""
    wider = {entry.master.dtype.name for entry in entries if entry.master is not None}
    if not wider:
        return ""
    rounded = any(entry.rounded_from is not None for entry in entries)
    how = "rounded from them, as training does" if rounded else "as the model has them"
    listed = " and ".join(sorted(wider))
    return (
        f"the optimizer works on master copies in {listed}: weights are written {how};"
        f" --dtype {min(wider)} writes the master copies themselves"
    )


def _keys_read(product: Product) -> Iterable[Key]:
    if isinstance(product.body, Copy):
        return (product.body.key,)
    return (key for _, key in product.body.reads)


_LISTED = 3


@dataclass(frozen=True, slots=True)
class FileMap:
    """Which file of a model holds which tensor.

    Attributes:
        location: The model's folder, for messages.
        files: The file's name by the name of the tensor.
    """

    location: str
    files: Mapping[Fqn, str]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The tensors of each file to be written, and what the user should know of it."""

    groups: tuple[tuple[str, tuple[Product, ...]], ...]
    notes: tuple[str, ...]


def distribute(
    products: Sequence[Product],
    file_map: FileMap,
    *,
    is_wanted: Callable[[str], bool],
    tied: Collection[Fqn],
) -> Distribution:
    """Puts each tensor into the file that it has in another model.

    A tensor that the other model has not, such as a head that is no longer tied, goes to the
    file of the tensor before it in the order of the names, so that no file is new.

    Args:
        products: What is to be written.
        file_map: The other model's files.
        is_wanted: Tells whether the user left a name in.
        tied: Names that are not written because another tensor holds their bytes.

    Returns:
        The files that hold something, by name.

    """
    written = {product.spec.name for product in products}
    lacking = [
        name
        for name in file_map.files
        if name not in written and name not in tied and is_wanted(name)
    ]
    if lacking:
        raise _lacks(lacking, file_map, shared=len(file_map.files) - len(lacking))
    groups: dict[str, list[Product]] = {}
    added: dict[str, str] = {}
    ordered = sorted(products, key=lambda product: name_order(product.spec.name))
    known = [file for p in ordered if (file := file_map.files.get(p.spec.name)) is not None]
    file = known[0] if known else min(file_map.files.values())
    for product in ordered:
        name = product.spec.name
        file = file_map.files.get(name, file)
        if name not in file_map.files:
            added[name] = file
        groups.setdefault(file, []).append(product)
    named = tuple((name, tuple(groups[name])) for name in sorted(groups))
    return Distribution(named, tuple(_notes(added, file_map, groups)))


def _lacks(lacking: Sequence[Fqn], file_map: FileMap, *, shared: int) -> RefusedError:
    more = f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
    if not shared:
        hint = "name the model that the run was started from; see --names for names on the Hub"
    else:
        pattern = re.sub(r"\.\d+\.", ".*.", lacking[0])
        hint = f"pass --exclude '{pattern}' if the output is to lack it"
    return RefusedError(
        f"holds tensor {lacking[0]!r}{more}, which the output would lack",
        where=f"--like {file_map.location}",
        hint=hint,
    )


def _notes(added: Mapping[str, str], file_map: FileMap, written: Collection[str]) -> Sequence[str]:
    notes = []
    for name, file in list(added.items())[:_LISTED]:
        notes.append(f"{file_map.location} has no tensor {name!r}: it lies in {file!r}")
    if len(added) > _LISTED:
        notes.append(
            f"{len(added) - _LISTED:,} more tensors that {file_map.location} has not lie beside"
            " the tensors before them"
        )
    left = sorted(set(file_map.files.values()) - set(written))
    if left:
        notes.append(
            f"files of {file_map.location} that would hold nothing are not written:"
            f" {', '.join(left)}"
        )
    return notes
