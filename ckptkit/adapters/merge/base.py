"""The base model of a merge: where its weights lie, and what each written tensor is made of."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckptkit.adapters.merge.tensors import BaseTensor, rearranged
from ckptkit.adapters.quantized.bases import QuantizedBase, Weights
from ckptkit.conversion.names_on_disk import DiskNames, disk_names
from ckptkit.conversion.source.model_folders import pretrained_index
from ckptkit.conversion.source.open import OpenedCheckpoint, PathLike, open_checkpoint
from ckptkit.conversion.source.places import is_anything, is_folder
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.core.errors import AmbiguousSourceError, NotACheckpointError, RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.engine.kernels import Operand, StoredOperand
from ckptkit.engine.reader import Origin
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.dialects import plain_entries, sort_entries
from ckptkit.lora.generations import (
    Placed,
    lacking,
    names_on_disk,
    placed_as_live,
    placed_as_stored,
    placed_on_disk,
    prefix_between,
)
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import error_of, find_problems
from ckptkit.plan.selection import looks_packed, select_model
from ckptkit.plan.side_files import CONFIG
from ckptkit.plan.ties import tied_names_absent, untied_config
from ckptkit.storage.overlay import OverlaySource
from ckptkit.storage.places import open_source, place_of

BASE = "base"
"""The origin of a base model that was given."""


@dataclass(frozen=True, slots=True)
class BaseSource:
    """A base model, wherever its weights lie.

    Attributes:
        opened: The checkpoint.
        origin: The same, opened for reading tensors.
        entries: Its tensors, by the names that they have there.
        config: The `config.json` beside them, if any.
        is_live: Whether the names are those of training without doubt.
        home: The folder that the configuration lies in; empty where there is none.
    """

    opened: OpenedCheckpoint
    origin: Origin
    entries: Mapping[Fqn, TensorEntry]
    config: Mapping[str, Any] | None
    is_live: bool
    home: str = ""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a base's tensors correspond to those of the live model, and to what is written.

    Attributes:
        placed: What is written, and what of.
        shapes: Of live tensors, where other things than the base's own headers tell them.
        adapter_prefix: What has to stand before the modules of adapters.
        called: What live tensors are called in the output, where that is another name.
        notes: What the user should know.
        versions: The libraries that told names.
    """

    placed: Sequence[Placed]
    shapes: Mapping[Fqn, Shape]
    adapter_prefix: str = ""
    called: Mapping[Fqn, Fqn] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] | None = None


def open_base(stack: ExitStack, path: PathLike, limit_bytes: int | None) -> BaseSource:
    """Opens a model folder, or any other checkpoint that holds a whole model."""
    if not is_anything(path):
        raise NotACheckpointError(
            "no such file or directory",
            where=f"--base {path}",
            hint="pass a folder on this machine, into which `hf download` puts a model of the Hub,"
            " or a URL such as hf://org/name",
        )
    try:
        found = _pretrained(stack, path)
        if found is None:
            found = stack.enter_context(open_checkpoint(path, limit_bytes=limit_bytes))
        request = ConsolidateRequest().selecting(found.select)
        entries = select_model(found.index, request, location=found.path)
    except AmbiguousSourceError as error:
        raise AmbiguousSourceError(
            error.message,
            where=f"--base {error.where}",
            hint="name the folder of one model, such as the one that the run was started from; a"
            " run that keeps its base is merged without --base, as the source",
        ) from error
    problem = next(find_problems(found.index, entries), None)
    if problem is not None:
        raise error_of(problem, found.path)
    plain = _plain(entries, found.path)
    folders = SideFolders(stack, found, None)
    side, _ = folders.choose(allow_code=False)
    return BaseSource(
        found,
        Origin(BASE, found.source, found.index),
        plain,
        folders.config(side),
        is_live=False,
        home=next((file.origin for file in side if file.name == CONFIG), ""),
    )


def _plain(entries: Sequence[TensorEntry], location: str) -> dict[Fqn, TensorEntry]:
    """Returns the tensors of a base by their own names, also where PEFT has wrapped the model."""
    found = sort_entries(entries)
    if found.holds_adapter:
        raise RefusedError(
            "has an adapter of PEFT in it, where a model alone was expected",
            where=f"--base {location}",
            hint="pass the model that the adapter was trained on; if it is this one, merge its own"
            " adapter first",
        )
    if not any(name.startswith(PEFT_PREFIX) for name in found.rest):
        return {entry.name: entry for entry in entries}
    return plain_entries(found.rest)


def _pretrained(stack: ExitStack, path: PathLike) -> OpenedCheckpoint | None:
    """Opens what `from_pretrained` would load, whatever other weights lie beside it."""
    if not is_folder(path):
        return None
    place = place_of(path)
    folder = stack.enter_context(open_source(place))
    index = pretrained_index(folder)
    if index is None:
        return None
    return OpenedCheckpoint(place, OverlaySource([folder]), "", (), index, None, ())


def align(
    base: BaseSource,
    modules: Collection[str],
    config: Mapping[str, Any] | None,
    *,
    folder: str | None,
) -> Alignment:
    """Finds out what the base's tensors are called by the adapters, and in the output.

    Names are taken as they are where they agree. Where they do not, a prefix may be missing, or
    Transformers holds other tensors in memory than on disk.

    Args:
        base: The base.
        modules: What the adapters change.
        config: The model's configuration.
        folder: A model folder with the names on disk, or None.
    """
    names = base.entries.keys()
    if base.is_live:
        specs = {name: (entry.dtype, entry.shape) for name, entry in base.entries.items()}
        return _live(names, disk_names(config, specs, base=folder))
    for before_base, before_adapter in dict.fromkeys([("", ""), prefix_between(modules, names)]):
        renamed = [Fqn(before_base + name) for name in names]
        known = [*renamed, *tied_names_absent(config, renamed)]
        if not lacking([before_adapter + module for module in modules], known):
            return Alignment(placed_as_stored(names, before_base), {}, before_adapter)
    # Untied, a model has names for all that a merge may have to write.
    untied = None if config is None else untied_config(config)
    return _asked(names, disk_names(untied, None, base=folder))


def _asked(names: Collection[Fqn], found: DiskNames) -> Alignment:
    """Aligns a given base, which may have either kind of names, by what transformers told."""
    hub = found.names
    if hub is None:
        return Alignment(placed_as_stored(names), {}, notes=found.notes)
    if sum(name in hub.tensors for name in names) < sum(name in hub.live for name in names):
        return _live(names, found)
    return Alignment(
        placed_on_disk(names, hub),
        hub.live,
        called=names_on_disk(hub),  # what transformers would write besides is not written here
        versions={"transformers": hub.library},
    )


def _live(names: Collection[Fqn], found: DiskNames) -> Alignment:
    if found.names is None:
        return Alignment(placed_as_stored(names), {}, notes=found.notes)
    return Alignment(
        placed_as_live(names, found.names),
        {},
        called=names_on_disk(found.names),
        notes=found.notes,
        versions={"transformers": found.names.library},
    )


def folder_of(base: BaseSource) -> str:
    """Returns the folder with a base's configuration, or else the one that it lies in itself."""
    place = place_of(base.opened.location)
    if base.home:
        return place.beside(base.home)
    return place if is_folder(place) else place.beside(posixpath.dirname(place))


def weights_as_they_are(base: BaseSource) -> Weights:
    entries = {str(name): entry for name, entry in base.entries.items()}
    return Weights(base.origin, entries, base.config, base.opened.path)


def plain_weights(base: BaseSource, alignment: Alignment) -> Weights:
    """Returns the base's tensors by live name, as far as they are those of the live model."""
    entries: dict[str, TensorEntry] = {}
    for placed in alignment.placed:
        if not placed.is_stored_so:
            entries |= {name: base.entries[name] for name in placed.stored}
        elif placed.part is None:
            entries[placed.live[0]] = base.entries[placed.stored[0]]
    return Weights(base.origin, entries, base.config, base.opened.path)


def base_tensors(
    base: BaseSource, alignment: Alignment, quantized: QuantizedBase
) -> list[BaseTensor]:
    """Returns the tensors of the base as they are written, packed ones unpacked."""
    made: list[BaseTensor] = []
    for placed in alignment.placed:
        first = placed.live[0]
        if first in quantized.hidden and first not in quantized.operands:
            continue
        operands = [
            _operand(base, stored, live, quantized)
            for stored, live in zip(placed.stored, placed.live, strict=False)
        ]
        entry = base.entries[placed.stored[0]]
        if placed.part is not None:
            _refuse_packed_part(entry, base.opened.path)
        if placed.part is not None and not placed.is_stored_so:
            operand, shape = rearranged(placed.part, operands), placed.part.shape
        else:
            operand, shape = operands[0], quantized.shapes.get(first, entry.shape)
        dtype = quantized.dtypes.get(first, operand.dtype)
        made.append(BaseTensor(placed.name, placed.live, shape, dtype, operand, placed.part))
    return made


def _refuse_packed_part(entry: TensorEntry, location: str) -> None:
    """Refuses a packed weight that has no name of its own in memory, so that nothing unpacks it."""
    if looks_packed(entry.name, entry.shape, entry.dtype.name):
        raise RefusedError(
            f"tensor {entry.name!r} of shape {entry.shape} is a packed weight, and a part of a"
            " larger one in memory, where it would not be unpacked",
            where=location,
            hint="pass the model that was quantized for training as --base",
        )


def _operand(base: BaseSource, stored: Fqn, live: Fqn, quantized: QuantizedBase) -> Operand:
    packed = quantized.operands.get(live)
    if packed is not None:
        return packed
    entry = base.entries[stored]
    return StoredOperand(base.origin.name, entry.key, entry.dtype)


def live_shapes(
    base: BaseSource, alignment: Alignment, quantized: QuantizedBase
) -> dict[Fqn, Shape]:
    """Returns the shapes of the live model's tensors."""
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
