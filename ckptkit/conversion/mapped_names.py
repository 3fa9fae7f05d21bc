"""The tensors of another framework under the names, and in the forms, of Transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.conversion.names_on_disk import (
    NamedProducts,
    ProductMaker,
    Specs,
    find_left_out,
    operand_of,
    rearrange,
)
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.errors import FormatError, RefusedError, UsageError
from ckptkit.core.index import ChunkTable, Fqn, Key, TensorEntry
from ckptkit.core.manifest import MAP_VERSION
from ckptkit.core.text import quote
from ckptkit.engine.kernels import AddedOperand, Operand, OperandKernel, StoredOperand
from ckptkit.engine.reader import Origin, TensorReader, same_values
from ckptkit.engine.rearranged import ComputedOperand
from ckptkit.hub_names.disk_tensors import HubNames, NamingRequest, find_whole
from ckptkit.hub_names.known_models import recognise_framework
from ckptkit.name_maps.apply import MappedNames, apply_map
from ckptkit.name_maps.find import find_map, load_map, refuse_contradiction
from ckptkit.name_maps.language import NameMap, invert
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.plan import SOURCE, Product, StackedPart, TensorSpec
from ckptkit.plan.selection import select_model

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class MappedModel:
    """A model whose names a map converts.

    Attributes:
        name_map: The map.
        names: What it makes of the model.
        live: Element types and shapes of the source's tensors, by their names.
    """

    name_map: NameMap
    names: MappedNames
    live: Specs

    @property
    def versions(self) -> Mapping[str, str]:
        """The map with its digest, as a manifest has it."""
        return {f"{MAP_VERSION}{self.name_map.name}": self.name_map.digest}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user is to know of the conversion."""
        notes = [f"names were converted by map {self.name_map.name!r}"]
        for name, (first, count) in self.names.padding.items():
            notes.append(f"rows {first:,} to {count - 1:,} of {quote(name)} are padding: left out")
        by_reason: dict[str, list[Fqn]] = {}
        for name, reason in self.names.dropped.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, left in by_reason.items():
            more = f" and {len(left) - _SHOWN:,} more" if len(left) > _SHOWN else ""
            notes.append(f"left out: {', '.join(map(quote, left[:_SHOWN]))}{more}: {reason}")
        return tuple(notes)

    def rename(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Returns the entries that become one tensor each, under the target's names.

        Shapes stay those of the source, with the padding in them.
        """
        uses = Counter(s for t in self.names.tensors.values() for s in t.sources)
        made = {
            t.sources[0]: name
            for name, t in self.names.tensors.items()
            if len(t.sources) == 1 and uses[t.sources[0]] == 1
        }
        return [replace(e, name=made[e.name]) for e in entries if e.name in made]

    def refuse_different(self, entries: Sequence[TensorEntry], origin: Origin) -> None:
        """Refuses names that stand for one tensor of the source and have other bytes.

        Raises:
            FormatError: If they differ.
        """
        by_name = {entry.name: entry for entry in entries}
        reader = TensorReader(origin)
        for second, first in self.names.same.items():
            if first not in by_name or second not in by_name:
                continue  # left out by the user
            one, other = by_name[first], by_name[second]
            is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
            if not is_alike or not same_values(reader, one, other):
                raise FormatError(
                    f"{quote(first)} and {quote(second)} are names of one tensor, and differ",
                    where=origin.source.location,
                    hint="leave the wrong one out with --exclude",
                )

    def source_of(self, name: Fqn) -> Fqn:
        """Returns the tensor of the source that the target's tensor `name` is made of."""
        return self.names.tensors[name].sources[0]

    def convert(
        self,
        products: Sequence[Product],
        dropped: Mapping[Fqn, Fqn],
        absent: Mapping[Fqn, Fqn] | None = None,
    ) -> NamedProducts:
        """Returns the tensors to be written.

        Args:
            products: The tensors of the source that are wanted.
            dropped: Names of the target that are tied to others and not written.
            absent: Names of the target that are written with the tensors they are tied to.
        """
        names = HubNames("", {n: s for n, (_, s) in self.live.items()}, self.names.tensors)
        maker = ProductMaker(names, NamingRequest({}, None), {p.spec.name: p for p in products})
        made = [self._add(product) for product in maker.products()]
        by_name = {product.spec.name: product for product in made}
        for target, source in (absent or {}).items():
            if source in by_name:
                product = by_name[source]
                made.append(replace(product, spec=replace(product.spec, name=target)))
        specs = {n: (self.live[t.sources[0]][0], t.shape) for n, t in names.tensors.items()}
        rest = find_left_out(made, dropped, specs)
        return NamedProducts(made, dropped, self.notes, self.versions, left_out=rest)

    def derive(self, entries: Mapping[Fqn, TensorEntry]) -> Iterator[TensorEntry]:
        """Yields the tensors of the target, made of those of the source; keys are their names.

        Args:
            entries: The tensors of the source, by name.
        """
        live = {name: shape for name, (_, shape) in self.live.items()}
        for name, tensor in self.names.tensors.items():
            first = entries[tensor.sources[0]]
            whole, constant = find_whole(tensor, live), self.names.added.get(name)
            if whole is not None and constant is None and live[whole] == tensor.shape:
                yield replace(first, key=Key(name), name=name)
                continue
            stored = [StoredOperand(SOURCE, entries[s].key, first.dtype) for s in tensor.sources]
            operand: Operand = stored[0]
            if whole is None:
                kernel = rearrange(tensor, stored)
                spec = TensorSpec(name, first.dtype, tensor.shape)
                operand = ComputedOperand(kernel, spec, kernel.reads)
            if constant is not None:
                operand = AddedOperand(operand, constant)
            yield TensorEntry(
                key=Key(name),
                key_path=(name,),
                name=name,
                tree=first.tree,
                part="model",
                dtype=first.dtype,
                shape=tensor.shape,
                chunks=ChunkTable.of((), len(tensor.shape)),
                derivation=operand,
            )

    def _add(self, product: Product) -> Product:
        constant = self.names.added.get(product.spec.name)
        if constant is None:
            return product
        operand = AddedOperand(operand_of(product), constant)
        return replace(product, body=OperandKernel(operand).compute())


def convert_checkpoint(
    checkpoint: OpenedCheckpoint, choice: str, config: Mapping[str, Any] | None
) -> OpenedCheckpoint:
    """Returns a checkpoint whose model has the tensors that a map makes.

    Its index has the tensors of the target, each made of those of the source when it is read, and
    those of the source as tensors that belong to no model.

    Args:
        checkpoint: The checkpoint; one that no map is for is returned as it is.
        choice: `auto`, `none`, the name of a map or a file.
        config: The configuration of the model, or None.

    Raises:
        InputError: If a tensor of the model cannot be read whole.
        CannotPlanError: If the map does not fit the tensors.
        RefusedError: If there is no map for the model.
    """
    index, where = checkpoint.index, checkpoint.path
    entries = select_model(index, ConsolidateRequest(select=checkpoint.select), location=where)
    framework = recognise_framework(entry.name for entry in entries)
    if choice == "none" or (choice == "auto" and not framework):
        return checkpoint
    refuse_problems(index, entries, where)
    tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
    mapped = map_names(choice, framework, config, checkpoint, tensors)
    mapped.refuse_different(entries, Origin(SOURCE, checkpoint.source, index))
    made = mapped.derive({entry.name: entry for entry in entries})
    sources = {entry.key: replace(entry, part="other") for entry in entries}
    for entry in made:
        key = entry.key if entry.key not in index.tensors else Key(f"{entry.key} by --map")
        sources[key] = replace(entry, key=key)
    return replace(
        checkpoint,
        index=replace(index, tensors={**index.tensors, **sources}),
        notes=(*checkpoint.notes, *mapped.notes),
        maps=mapped.versions,
    )


def map_names(
    choice: str,
    framework: str,
    config: Mapping[str, Any] | None,
    checkpoint: OpenedCheckpoint,
    tensors: Specs,
) -> MappedModel:
    """Converts the names of a model.

    Args:
        choice: `auto` for the map of the framework and the model, else the name of one or a file.
        framework: The framework whose names they are, for `auto`.
        config: The configuration of the model, or None.
        checkpoint: The checkpoint, for what it says of the model itself.
        tensors: Element types and shapes by the names of the source.

    Raises:
        RefusedError: If the configuration, or the map, is for another model than the checkpoint.
    """
    where, settings = checkpoint.path, dict(checkpoint.index.run.settings)
    name_map = (
        find_map(framework, config, where=where, settings=settings)
        if choice == "auto"
        else load_map(choice)
    )
    refuse_contradiction(name_map, settings, where=where)
    _refuse_other_model(config or {}, settings, where)
    return MappedModel(name_map, apply_map(name_map, config or {}, tensors, where=where), tensors)


def _refuse_other_model(config: Mapping[str, Any], settings: Mapping[str, int], where: str) -> None:
    """Refuses a configuration that differs from what the checkpoint says of its model.

    Shapes would often fit all the same, as with half as many heads of twice the size.
    """
    text = config.get("text_config")
    stated = {**config, **text} if isinstance(text, dict) else config
    for key, value in settings.items():
        other = stated.get(key)
        if other is not None and other != value:
            raise RefusedError(
                f"{key} is {value} in the checkpoint's own settings, {other} in the configuration",
                where=where,
                hint="name the folder of the model that was trained with --base",
            )


def name_for_framework(
    framework: str,
    choice: str,
    config: Mapping[str, Any] | None,
    products: Sequence[Product],
    *,
    where: str,
) -> tuple[NamedProducts, Mapping[Fqn, StackedPart]]:
    """Gives tensors with the names of Transformers those of a framework.

    Args:
        framework: The framework.
        choice: `auto` for its map of the model, else the name of one or a file.
        config: The configuration of the model, or None.
        products: The tensors to be written, by the names of Transformers.
        where: The checkpoint, for messages.

    Returns:
        The tensors, stacked ones in parts, and where these parts are.
    """
    is_auto = choice == "auto"
    name_map = find_map(framework, config, where=where) if is_auto else load_map(choice)
    if name_map.source != framework:
        raise UsageError(
            f"has names of {name_map.source}; expected those of {framework}",
            where=f"--map {choice}",
            hint="name a map of the framework that --to names, or leave --map out",
        )
    inverse = invert(name_map)
    specs = {product.spec.name: (product.spec.dtype, product.spec.shape) for product in products}
    names = apply_map(inverse, config or {}, specs, where=where, in_parts=True)
    named = MappedModel(inverse, names, specs).convert(products, {})
    return named, names.parts
