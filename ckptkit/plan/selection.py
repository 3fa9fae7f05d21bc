"""From an index and a request to the tensors that are written, and their element types."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    IncompleteCheckpointError,
    RefusedError,
)
from ckptkit.core.index import Fqn, Key, TensorEntry, TensorIndex
from ckptkit.core.text import Aside, list_first
from ckptkit.options import ConsolidateRequest, matches
from ckptkit.plan.load_report import order_of_copy
from ckptkit.plan.plan import Copy, Product, TensorSpec
from ckptkit.plan.weight_kinds import (
    LORA,
    MERGED_BESIDE,
    explain_lost_adapter,
    find_adapter,
    is_quantized,
)

_NUMBER = re.compile(r".*_(\d{1,7})")
_PROPOSED = 4
_OF_TRAINER = "base_model_"  # the base beside an adapter in the layout of the Trainer


def find_number(tree: str) -> int:
    """Returns the number of a model, or of an optimizer, among those of one save; the first is 0.

    >>> find_number("pytorch_model_fsdp_1.bin"), find_number("model.safetensors")
    (1, 0)
    """
    match = _NUMBER.fullmatch(posixpath.basename(tree).partition(".")[0])
    return int(match[1]) if match else 0


def model_trees(index: TensorIndex) -> list[str]:
    return list(dict.fromkeys(entry.tree for entry in index.of_part("model")))


def propose_trees(trees: Sequence[str], home: str = "") -> str:
    """Returns the options that select state dicts, those that are published first.

    `home`: what was selected already, in which they are.
    """
    ordered = sorted(trees, key=lambda tree: order_of_copy(tree)[0])
    named = [posixpath.join(home, tree or ".") if home else tree for tree in ordered[:_PROPOSED]]
    options = [f"--select {shlex.quote(name)}" for name in named]
    return ", or ".join(options)


def select_model(
    index: TensorIndex, request: ConsolidateRequest, *, location: str, everything: bool = False
) -> list[TensorEntry]:
    """Returns the tensors of the selected model, patterns applied.

    `request`: the selection and the patterns. `everything`: whether tensors that the user leaves
    out are among them.
    """
    trees = model_trees(index)
    if not trees:
        raise IncompleteCheckpointError(
            f"holds no model tensor among {len(index.tensors):,} tensors",
            where=location,
            hint=explain_lost_adapter(index.tensors)
            or "the run saved nothing but other state here; see `ckptkit inspect`",
        )
    if request.select is None and MERGED_BESIDE in index.run.warnings:
        trees = plain_trees(index) or trees
    tree = trees[0] if request.select is None else request.select
    averages = dict.fromkeys(entry.tree for entry in index.of_part("average"))
    names, home = ", ".join(map(repr, [*trees, *averages])), index.run.selected
    if request.select is None and len(trees) > 1:
        raise AmbiguousSourceError(
            f"holds {len(trees)} models: {names}",
            where=location,
            hint=_advise_on_peft(index) or f"choose one with {propose_trees(trees, home)}",
        )
    if tree not in trees:
        raise CannotPlanError(
            f"holds no model {tree!r}; found {names}",
            where=location,
            hint=f"pass {propose_trees([*trees, *averages], home)}",
        )
    entries = [entry for entry in index.of_part("model") if entry.tree == tree]
    before = {entry.key: entry.name for entry in entries}
    if request.strip_prefix:
        entries = _strip_prefixes(entries, request, location)
    if everything:
        return entries
    wanted = [
        entry
        for entry in entries
        if request.wants(entry.name, *entry.stored_names, before=before[entry.key])
    ]
    if not wanted:
        raise CannotPlanError(
            f"--include and --exclude leave none of {len(entries):,} tensors",
            where=location,
            hint="patterns must fit whole names, such as 'model.layers.*'",
        )
    return wanted


def _strip_prefixes(
    entries: Sequence[TensorEntry], request: ConsolidateRequest, location: str
) -> list[TensorEntry]:
    """Removes from each name the longest of the prefixes that it begins with.

    One that is left out keeps its name where another tensor gets the name without the prefix.
    """
    longest = sorted(request.strip_prefix, key=len, reverse=True)
    for prefix in longest:
        if not any(entry.name.startswith(prefix) for entry in entries):
            raise CannotPlanError(
                f"no name of {len(entries):,} tensors begins with {prefix!r}; the first is"
                f" {entries[0].name!r}",
                where=location,
                hint="leave --strip-prefix out, or pass what the names begin with",
            )
    by_name: dict[Fqn, TensorEntry] = {}
    left: list[tuple[Fqn, TensorEntry]] = []
    for entry in entries:
        prefix = next((p for p in longest if entry.name.startswith(p)), "")
        name = Fqn(entry.name.removeprefix(prefix))
        if name and not request.wants(name, *entry.stored_names, before=entry.name):
            left.append((name, entry))
            continue
        if name in by_name or not name:
            other = by_name[name].key if name else "no name"
            raise CannotPlanError(
                f"without {prefix!r}, tensor {entry.key!r} has the name of {other!r}",
                where=location,
                hint="leave one of them out of the checkpoint, or --strip-prefix out",
            )
        by_name[name] = replace(entry, name=name)
    for name, entry in left:
        free = entry.name if name in by_name else name
        by_name.setdefault(free, replace(entry, name=free))
    return list(by_name.values())


def _advise_on_peft(index: TensorIndex) -> str:
    """Returns advice where the models are a frozen base and its adapter; else an empty text."""
    sign = find_adapter(entry.name for entry in index.of_part("model"))
    if sign is None:
        return ""
    if sign.method not in {"", LORA}:
        return f"tensor {sign.name!r} belongs to {sign.title}: choose the model with --select"
    plain = plain_trees(index)
    if plain and not any(_OF_TRAINER in tree for tree in plain):
        return (
            f"choose the model with --select {plain[0]}; nothing records whether it is the base of"
            " the adapter beside it, or has it merged already, as torchtune writes it"
        )
    return (
        "they are a base and what PEFT trained on it: `ckptkit adapter merge` makes one model of"
        " them, `ckptkit adapter extract` takes the adapter out; --select takes one of the"
        " raw state dicts"
    )


def plain_trees(index: TensorIndex) -> list[str]:
    """Returns the models that are no adapters."""
    trees: dict[str, list[str]] = {}
    for entry in index.of_part("model"):
        trees.setdefault(entry.tree, []).append(entry.name)
    return [tree for tree, names in trees.items() if find_adapter(names) is None]


def refuse_casting_quantized(
    entries: Sequence[TensorEntry],
    config: Mapping[str, Any] | None,
    policy: DTypePolicy,
    *,
    location: str,
) -> None:
    """Refuses to cast packed numbers as if they were weights, and to leave them packed unasked."""
    cast = [entry for entry in entries if policy.target(entry) != entry.dtype]
    names = {entry.name: entry.dtype for entry in entries}
    asked = cast if policy.choice in {"keep", "base"} else policy.list_unnamed(entries)
    packed = next((e.name for e in asked if is_quantized(e.name, e.shape, names)), None)
    what = f"tensor {packed!r} is quantized, or a scale of one that is" if packed else ""
    said = (config or {}).get("quantization_config")
    if said and any(find_adapter([entry.name]) is None for entry in cast):
        method = said.get("quant_method") if isinstance(said, Mapping) else None
        of = f" of {method!r}" if method else ""
        what = f"the configuration has a 'quantization_config'{of}"
    if what:
        raise RefusedError(
            f"{what}; --dtype {policy.choice} cannot unpack it",
            where=location,
            hint="leave --dtype out to copy them as they are; the library that packed them unpacks"
            " them"
            if said
            else "leave --dtype out to copy them as they are, or pass with --config the"
            " configuration that says how they are packed",
        )


class KeptDtypes(Struct, frozen=True):
    """Tensors that stay in float32 where the others are cast to 16 bits."""

    always: tuple[str, ...] = ()  # expressions that are searched in a name
    in_float16: tuple[str, ...] = ()  # the same, for casts to float16 alone
    names: frozenset[str] = frozenset()

    def holds(self, name: str, wanted: DType) -> bool:
        """Returns whether a tensor stays in float32 under a cast to `wanted`."""
        if wanted.itemsize != _HALF:
            return False
        searched = self.always + (self.in_float16 if wanted.name == "float16" else ())
        return name in self.names or any(_expression(one).search(name) for one in searched)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


_HALF = 2  # bytes of float16 and bfloat16
_FLOAT32 = dtype_named("float32")


class DTypePolicy(Struct, frozen=True):
    """Which element type each tensor is written in."""

    choice: str  # what `--dtype` says
    keep: tuple[str, ...] = ()  # patterns of names that keep their stored type
    # For the choice `base`, the element type of each tensor of the base model.
    base: Mapping[Fqn, DType] | None = None
    kept: KeptDtypes = KeptDtypes()  # what stays in float32

    def is_kept(self, tensor: TensorEntry | TensorSpec) -> bool:
        """Returns whether a tensor stays in float32 although `--dtype` names another type."""
        is_asked = self.choice not in {"keep", "base"} and tensor.dtype.kind == "float"
        if not is_asked or tensor.dtype.name == self.choice or self._is_named(tensor):
            return False
        return self.kept.holds(tensor.name, dtype_named(self.choice))

    def _is_named(self, tensor: TensorEntry | TensorSpec) -> bool:
        names = [tensor.name, *(tensor.stored_names if isinstance(tensor, TensorEntry) else ())]
        return any(matches(name, self.keep) for name in names)

    def list_unnamed(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Returns the tensors that `--keep-dtype` does not name."""
        return [entry for entry in entries if not self._is_named(entry)]

    def target(self, tensor: TensorEntry | TensorSpec) -> DType:
        """Returns the type to write; only floating tensors are ever cast."""
        fixed = self.choice == "keep" or tensor.dtype.kind != "float"
        if fixed or self._is_named(tensor):
            return tensor.dtype
        if self.choice != "base":
            return _FLOAT32 if self.is_kept(tensor) else dtype_named(self.choice)
        if self.base is None:
            raise RefusedError(
                "takes the element types from the files of a base model, and none was named",
                where="--dtype base",
                hint="name its folder with --base DIR",
            )
        dtype = self.base.get(tensor.name, tensor.dtype)
        if dtype.kind != "float" or dtype.itemsize == 1:
            raise RefusedError(
                f"tensor {tensor.name!r} is {dtype.name} in the base model, which is its packed"
                " form: numbers cannot just be cast to it",
                where="--dtype base",
                hint=f"pass --dtype bfloat16, or --keep-dtype '{tensor.name}'",
            )
        return dtype


def find_float32_among_halves(tensors: Iterable[TensorEntry]) -> frozenset[str]:
    """Returns the float32 tensors of a model most of whose elements have a smaller type."""
    sizes: dict[bool, int] = {True: 0, False: 0}
    names = set()
    for tensor in tensors:
        is_float32 = tensor.dtype == _FLOAT32
        names |= {str(tensor.name)} if is_float32 else set()
        if tensor.dtype.kind == "float" and tensor.dtype.itemsize <= _FLOAT32.itemsize:
            sizes[is_float32] += tensor.elements
    return frozenset(names) if sizes[False] > sizes[True] else frozenset()


def describe_kept(policy: DTypePolicy, tensors: Iterable[TensorEntry | TensorSpec]) -> list[str]:
    """Returns a note that counts and names the tensors that stay in float32; none for none."""
    names = [str(tensor.name) for tensor in tensors if policy.is_kept(tensor)]
    if not names:
        return []
    subject = "1 tensor stays" if len(names) == 1 else f"{len(names):,} tensors stay"
    said = f"{subject} in float32, as the model needs {'it' if len(names) == 1 else 'them'}:"
    return [Aside(f"{said} {list_first(names, 3)}; --cast-all casts all to {policy.choice}")]


def take_masters(
    entries: Sequence[TensorEntry], index: TensorIndex, request: ConsolidateRequest
) -> list[TensorEntry]:
    """Returns each tensor's master copy where there is one, unless `--keep-dtype` names it."""

    def choose(entry: TensorEntry) -> TensorEntry:
        if entry.master is None or matches(entry.name, request.keep_dtype):
            return entry
        return replace(index.tensors[entry.master.key], name=entry.name)

    return [choose(entry) for entry in entries]


def add_tied_names(entries: Sequence[TensorEntry], absent: Mapping[Fqn, Fqn]) -> list[TensorEntry]:
    """Adds the tied names in `absent`, each with the tensor of the name that it is tied to."""
    by_name = {entry.name: entry for entry in entries}
    added = [replace(by_name[source], name=target) for target, source in absent.items()]
    return [*entries, *added]


def describe_masters(entries: Sequence[TensorEntry], products: Iterable[Product]) -> str:
    """Describes where casts take their numbers from, if a source has them in several types."""
    masters = {entry.master.key for entry in entries if entry.master is not None}
    read: set[Key] = set()
    for product in products:
        body = product.body
        read |= {body.key} if isinstance(body, Copy) else {key for _, key in body.reads}
    if masters & read:
        return (
            f"{len(masters & read):,} of {len(entries):,} tensors are made from the master copies"
            " that the optimizer works on, the others from the weights as the model has them"
        )
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
