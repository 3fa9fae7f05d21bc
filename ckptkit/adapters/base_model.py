"""The base model of a merge: where its weights are, and how they correspond to live tensors.

The names of a base's tensors on disk may differ from those that an adapter uses.

Source: transformers 5.23, `_load_pretrained_model`: the weights of a headless model load into one
with a head, whose names have a prefix, and the other way round.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.adapters.packed_bases import ModelWeights, QuantizedBase
from ckptkit.consumers.table import CONFIG
from ckptkit.conversion.names_on_disk import DiskNames, find_disk_names, join_sources
from ckptkit.conversion.source.model_folders import read_pretrained_index
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint
from ckptkit.conversion.source.paths import find_model, is_anything, is_folder
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.conversion.unpacking import Unpacked, unpack_checkpoint
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CkptkitError,
    NotACheckpointError,
    RefusedError,
)
from ckptkit.core.frameworks import recognise_by_tensors
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.engine.kernels import Operand, StoredOperand
from ckptkit.engine.reader import Origin
from ckptkit.hub_names.disk_tensors import HubNames, HubTensor, find_whole
from ckptkit.hub_names.known_models import BASE_PREFIXES
from ckptkit.lora.config import PEFT_PREFIX, Adapter
from ckptkit.lora.dialects import build_table, make_plain_name, rename_plainly, sort_entries
from ckptkit.lora.pairing import SAME_NAMES, Renaming, find_text_model, list_owners
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.number_formats import UNPACKED_AHEAD
from ckptkit.plan.selection import select_model
from ckptkit.plan.ties import find_absent_tied_names, untie_config
from ckptkit.plan.weight_kinds import looks_packed
from ckptkit.storage.overlay import OverlaySource
from ckptkit.storage.places import PathLike, open_source, place_of

BASE = "base"
"""The origin of a base that was given."""


class BaseSource(Struct, frozen=True):
    opened: OpenedCheckpoint
    origin: Origin
    entries: Mapping[Fqn, TensorEntry]  # by their names in the checkpoint
    config: Mapping[str, Any] | None
    is_live: bool  # the names are certainly those of training
    home: str = ""  # the folder of the configuration; empty where there is none
    # The model with unpacked weights, and its configuration as it is stored; None where none of
    # them is packed in a form of `ckptkit.plan.number_formats`.
    unpacked: Unpacked | None = None
    packed_config: Mapping[str, Any] | None = None


class Alignment(Struct, frozen=True):
    """How a base's tensors correspond to live tensors, and to those that are written."""

    placed: Sequence[PlacedTensor]  # the tensors to be written
    shapes: Mapping[Fqn, Shape]  # of live tensors that the base's own headers do not show
    renaming: Renaming = SAME_NAMES  # how names of adapters differ
    # The names of live tensors in the output, where they differ.
    called: Mapping[Fqn, Fqn] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] | None = None  # of libraries that gave names


class NamesOfBase(Struct, frozen=True):
    map: str = "auto"  # see `ckptkit.api.Options`
    # A model folder with the configuration that the base lacks.
    model_config: PathLike | None = None
    config: Mapping[str, Any] | None = None  # of another model, if there is none
    option: str = "--model-config"  # that names a folder with one, for messages
    # The element type that packed weights are unpacked for; `keep` leaves them as they are.
    unpack: str = "keep"


def open_base(
    stack: ExitStack,
    path: PathLike,
    limit_bytes: int | None,
    names: NamesOfBase = NamesOfBase(),
) -> BaseSource:
    """Opens a model folder, or any other checkpoint that holds a whole model."""
    path = find_model(path, "--base")[0]
    if not is_anything(path):
        raise NotACheckpointError(
            "no such file or directory",
            where=f"--base {path}",
            hint="pass a folder on this machine, a URL, or the id of a model on the Hub: ORG/NAME",
        )
    try:
        checkpoint = _open_weights(stack, path, limit_bytes)
        folders = SideFolders(stack, checkpoint, names.model_config)
        side, _ = folders.choose(allow_code=False)
        packed_config = folders.config(side)
        unpacked = unpack_checkpoint(
            checkpoint, packed_config, names.unpack, methods=UNPACKED_AHEAD
        )
        checkpoint, config = unpacked.checkpoint, unpacked.config
        try:
            checkpoint = convert_names(checkpoint, names.map, config or names.config)
        except CkptkitError as error:
            hint = error.hint.replace("--base", names.option)
            raise type(error)(error.message, where=f"--base {error.where}", hint=hint) from error
        entries = list_weights(checkpoint)
    except AmbiguousSourceError as error:
        raise AmbiguousSourceError(
            error.message,
            where=f"--base {error.where}",
            hint="name the folder of one model, such as the one that the run was started from; a"
            " run that keeps its base is merged without --base, as the source",
        ) from error
    plain = _name_plainly(entries, checkpoint.path)
    return BaseSource(
        checkpoint,
        Origin(BASE, checkpoint.source, checkpoint.index),
        plain,
        config,
        is_live=False,
        home=next((file.origin for file in side if file.name == CONFIG), ""),
        unpacked=unpacked if unpacked.stored else None,
        packed_config=packed_config,
    )


def list_weights(checkpoint: OpenedCheckpoint) -> Sequence[TensorEntry]:
    """Returns the tensors of the model; each is whole."""
    request = ConsolidateRequest(select=checkpoint.select)
    entries = select_model(checkpoint.index, request, location=checkpoint.path)
    refuse_problems(checkpoint.index, entries, checkpoint.path)
    return entries


def _open_weights(stack: ExitStack, path: PathLike, limit_bytes: int | None) -> OpenedCheckpoint:
    if is_folder(path):  # `from_pretrained` has no other weights to choose here
        place = place_of(path)
        folder = stack.enter_context(open_source(place))
        index = read_pretrained_index(folder)
        if index is not None:
            return OpenedCheckpoint(place, OverlaySource([folder]), "", (), index, None, ())
    return stack.enter_context(open_checkpoint(path, limit_bytes=limit_bytes))


def convert_names(
    checkpoint: OpenedCheckpoint, choice: str, config: Mapping[str, Any] | None
) -> OpenedCheckpoint:
    """Converts the names of a model, if a map is for them; see `convert_checkpoint`."""
    is_foreign = choice != "auto" or recognise_by_tensors(
        entry.name for entry in checkpoint.index.of_part("model")
    )
    if choice == "none" or not is_foreign:
        return checkpoint
    from ckptkit.conversion.mapped_names import convert_checkpoint  # few models need it

    return convert_checkpoint(checkpoint, ConsolidateRequest(map=choice), config)


def _name_plainly(entries: Sequence[TensorEntry], location: str) -> dict[Fqn, TensorEntry]:
    """Returns the tensors of a base by their own names, also of a model that PEFT wrapped."""
    tensors = sort_entries(entries)
    if tensors.holds_adapter:
        raise RefusedError(
            "contains an adapter of PEFT, expected a model alone",
            where=f"--base {location}",
            hint="pass the model that the adapter was trained on; if it is this one, merge its own"
            " adapter first",
        )
    if not any(name.startswith(PEFT_PREFIX) for name in tensors.rest):
        return {entry.name: entry for entry in entries}
    return rename_plainly(tensors.rest)


def align(
    base: BaseSource,
    modules: Collection[str],
    config: Mapping[str, Any] | None,
    *,
    folder: str | None,
    saved: Collection[str] = (),
) -> Alignment:
    """Finds how the base's tensors correspond to the adapters' modules, and to the output.

    Where names differ, a prefix may be missing, Transformers may have other tensors in memory than
    on disk, or the adapters may be of the text model in a multimodal base. `folder` is a model
    folder with the names on disk. `saved` are modules that the adapters have whole, which the base
    may lack.
    """
    alignment = _align(base, modules, saved, config, folder=folder)
    live = [name for placed in alignment.placed for name in placed.live]
    owners = list_owners([*live, *find_absent_tied_names(config, live)])
    renaming = find_text_model(modules, owners, config)
    if renaming is None or any(alignment.renaming):
        return alignment
    if renaming.own == renaming.base:
        return replace(alignment, renaming=renaming)
    note = (
        f"the adapter was trained on the text model alone: its {renaming.own!r} is"
        f" {renaming.base!r} in the base"
    )
    return replace(alignment, renaming=renaming, notes=(*alignment.notes, note))


def _align(
    base: BaseSource,
    modules: Collection[str],
    saved: Collection[str],
    config: Mapping[str, Any] | None,
    *,
    folder: str | None,
) -> Alignment:
    names = base.entries.keys()
    if base.is_live:
        specs = {name: (entry.dtype, entry.shape) for name, entry in base.entries.items()}
        return _align_live(names, find_disk_names(config, specs, base=folder))
    as_stored, lost = _align_as_stored(names, modules, saved, config)
    if as_stored is not None and not lost:
        return as_stored
    # An untied model has names for all tensors that a merge may have to write.
    untied = None if config is None else untie_config(config)
    found = find_disk_names(untied, None, base=folder)
    hub = found.names  # a given base may have either kind of names
    if as_stored is not None and (hub is None or lost.isdisjoint(list_owners(hub.live))):
        return as_stored  # the adapter adds these modules
    if hub is None or sum(n in hub.tensors for n in names) < sum(n in hub.live for n in names):
        return _align_live(names, found)
    return Alignment(
        place_on_disk(names, hub),
        hub.live,
        called=map_to_disk_names(hub),  # tensors that only transformers would write are left out
        versions={"transformers": hub.library},
    )


def _align_as_stored(
    names: Collection[Fqn],
    modules: Collection[str],
    saved: Collection[str],
    config: Mapping[str, Any] | None,
) -> tuple[Alignment | None, set[str]]:
    """Finds all `modules` in a base by its own names, but for a prefix; None without one of them.

    Returns those of `saved` that are not there, too, but for new heads, which are beside the
    modules of the base.
    """
    for before_base, before_adapter in dict.fromkeys([("", ""), find_prefixes(modules, names)]):
        renamed = [Fqn(before_base + name) for name in names]
        names_with_tied = [*renamed, *find_absent_tied_names(config, renamed)]
        owners = list_owners(names_with_tied)
        if not all(before_adapter + module in owners for module in modules):
            continue
        held = {".".join(p[:end]) for p in (o.split(".") for o in owners) for end in range(len(p))}
        lost = {
            module
            for module in saved
            if before_adapter + module not in owners
            and before_adapter + module.partition(".")[0] in held
        }
        if not before_base or before_base.removesuffix(".") in BASE_PREFIXES:
            placed = place_as_stored(names, before_base)
            return Alignment(placed, {}, Renaming("", before_adapter)), lost
        note = (
            f"the modules of the adapter begin with {before_base!r}, which those of the base do"
            " not: merged without it"
        )
        placed = place_as_stored(names)
        return Alignment(placed, {}, Renaming(before_base), notes=(note,)), lost
    return None, set()


def _align_live(names: Collection[Fqn], found: DiskNames) -> Alignment:
    if found.names is None:
        return Alignment(place_as_stored(names), {}, notes=found.notes)
    return Alignment(
        place_as_live(names, found.names),
        {},
        called=map_to_disk_names(found.names),
        notes=found.notes,
        versions={"transformers": found.names.library},
    )


def find_folder(base: BaseSource) -> str:
    """Returns the folder with a base's configuration, or else with its weights."""
    place = place_of(base.opened.location)
    if base.home:
        return place.beside(base.home)
    return place if is_folder(place) else place.beside(posixpath.dirname(place))


def take_weights(base: BaseSource) -> ModelWeights:
    entries = {str(name): entry for name, entry in base.entries.items()}
    return ModelWeights(base.origin, entries, base.config, base.opened.path)


def take_plain_weights(base: BaseSource, alignment: Alignment) -> ModelWeights:
    """Returns those of the base's tensors that are live tensors, by live name."""
    entries: dict[str, TensorEntry] = {}
    for placed in alignment.placed:
        if not placed.is_stored_so:
            entries |= {name: base.entries[name] for name in placed.stored}
        elif placed.part is None:
            entries[placed.live[0]] = base.entries[placed.stored[0]]
    return ModelWeights(base.origin, entries, base.config, base.opened.path)


class BaseTensor(Struct, frozen=True):
    """A tensor of the base model, as it is written."""

    name: Fqn  # in the output
    live: tuple[Fqn, ...]  # the live tensors that it is made of
    shape: Shape
    dtype: DType  # in which it is written by default
    operand: Operand
    part: HubTensor | None = None  # how it is made of live tensors; None where it is one of them


def make_base_tensors(
    base: BaseSource, alignment: Alignment, quantized: QuantizedBase
) -> list[BaseTensor]:
    """Returns the tensors of the base as they are written, packed ones unpacked."""
    tensors: list[BaseTensor] = []
    for placed in alignment.placed:
        first = placed.live[0]
        if first in quantized.hidden and first not in quantized.operands:
            continue
        operands: list[Operand] = []
        for stored, live in zip(placed.stored, placed.live, strict=False):
            entry = base.entries[stored]
            own = StoredOperand(base.origin.name, entry.key, entry.dtype)
            operands.append(quantized.operands.get(live, own))
        entry = base.entries[placed.stored[0]]
        is_part = placed.part is not None
        # Without a live name of its own it would not be unpacked.
        if is_part and looks_packed(entry.name, entry.shape, entry.dtype.name):
            raise RefusedError(
                f"tensor {entry.name!r} of shape {entry.shape} is a packed weight, and part of a"
                " larger one in memory, where it would not be unpacked",
                where=base.opened.path,
                hint="pass the model that was quantized for training as --base",
            )
        operand: Operand
        if placed.part is not None and not placed.is_stored_so:
            operand, shape = join_sources(placed.part, operands), placed.part.shape
        else:
            operand, shape = operands[0], quantized.shapes.get(first, entry.shape)
        dtype = quantized.dtypes.get(first, operand.dtype)
        tensors.append(BaseTensor(placed.name, placed.live, shape, dtype, operand, placed.part))
    return tensors


def find_live_shapes(
    base: BaseSource, alignment: Alignment, quantized: QuantizedBase
) -> dict[Fqn, Shape]:
    shapes = dict(alignment.shapes)
    for placed in alignment.placed:
        if placed.part is None or not placed.is_stored_so:
            for stored, live in zip(placed.stored, placed.live, strict=True):
                shapes[live] = tuple(quantized.shapes.get(live, base.entries[stored].shape))
    return {
        name: shape
        for name, shape in shapes.items()
        if name not in quantized.hidden or name in quantized.operands
    }


_COMPANION = ".weight."  # bitsandbytes prefixes scales with the weight's own name


class PlacedTensor(Struct, frozen=True):
    """A tensor to be written."""

    name: Fqn  # in the output
    live: tuple[Fqn, ...]  # the live tensors that it contains, or parts of
    stored: tuple[Fqn, ...]  # the base's tensors that it is read from
    # How it is made of the live tensors; None where it is one of them.
    part: HubTensor | None = None
    is_stored_so: bool = True  # the base stores it as it is written, not as training holds it


def list_modules(adapter: Adapter) -> tuple[list[str], list[str]]:
    """Returns the modules of the base that an adapter changes, and those that it may add."""
    table = build_table(adapter.tensors)
    names = adapter.settings.modules_to_save
    whole = dict.fromkeys(make_plain_name(name).rpartition(".")[0] for name in table.whole)
    saved = [module for module in whole if any(name in module for name in names)]
    kept = (module for module in whole if module not in saved)
    changed = [*(layer.module for layer in table.layers), *table.tokens, *kept]
    return list(dict.fromkeys(changed)), saved


def find_prefixes(modules: Collection[str], names: Collection[Fqn]) -> tuple[str, str]:
    """Returns the prefixes of the base's and the adapter's names with which these agree.

    Both are empty where the names agree, or where no prefix helps.
    """
    owners = list_owners(names)
    missing = [module for module in modules if module not in owners]
    best = ("", "")
    fewest = len(missing)
    for module in missing:  # a headless base has no names like those of a head
        prefixes: dict[tuple[str, str], None] = {}
        for owner in owners:
            if module.endswith(f".{owner}"):
                prefixes[module[: -len(owner)], ""] = None
            if owner.endswith(f".{module}"):
                prefixes["", owner[: -len(module)]] = None
        for before in prefixes:
            renamed = {before[0] + owner for owner in owners}
            lost = sum(before[1] + each not in renamed for each in modules)
            if lost < fewest:
                best, fewest = before, lost
        if any(best):
            break
    return best


def place_as_stored(names: Iterable[Fqn], prefix: str = "") -> list[PlacedTensor]:
    return [PlacedTensor(Fqn(prefix + n), (Fqn(prefix + n),), (n,)) for n in names]


def place_on_disk(names: Collection[Fqn], hub: HubNames) -> list[PlacedTensor]:
    """Matches the tensors of a model folder with live tensors, or parts of them."""
    placed: dict[Fqn, PlacedTensor] = {}
    for name in names:
        tensor = hub.tensors.get(name)
        if tensor is not None:
            whole = _find_equal(tensor, hub)
            live = tensor.sources if whole is None else (whole,)
            placed[name] = PlacedTensor(name, live, (name,), tensor if whole is None else None)
    for name in [name for name in names if name not in placed]:
        # The companion of a weight, such as its scales.
        module, _, rest = name.partition(_COMPANION)
        weight = placed.get(Fqn(f"{module}.weight")) if rest else None
        called = name
        if weight is not None:
            called = Fqn(f"{weight.live[0]}.{rest}")
        else:
            module, _, last = name.rpartition(".")
            weight = placed.get(Fqn(f"{module}.weight"))
            if weight is not None:
                called = Fqn(f"{weight.live[0].rpartition('.')[0]}.{last}")
        placed[name] = PlacedTensor(name, (called,), (name,))
    return list(placed.values())


def map_to_disk_names(hub: HubNames) -> dict[Fqn, Fqn]:
    pairs = ((_find_equal(tensor, hub), name) for name, tensor in hub.tensors.items())
    return {live: name for live, name in pairs if live is not None}


def place_as_live(names: Collection[Fqn], hub: HubNames) -> list[PlacedTensor]:
    """Makes the tensors of a model folder from live tensors."""
    placed: list[PlacedTensor] = []
    used: set[Fqn] = set()
    for tensor in hub.tensors.values():
        if not all(source in names for source in tensor.sources):
            continue
        whole = _find_equal(tensor, hub)
        used.update(tensor.sources)
        part = tensor if whole is None else None
        live = tensor.sources
        placed.append(PlacedTensor(tensor.name, live, live, part, is_stored_so=False))
    return [*placed, *place_as_stored(name for name in names if name not in used)]


def _find_equal(tensor: HubTensor, hub: HubNames) -> Fqn | None:
    whole = find_whole(tensor, hub.live)
    return whole if whole is not None and hub.live[whole] == tensor.shape else None
