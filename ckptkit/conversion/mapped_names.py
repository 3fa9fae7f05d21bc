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
    operand_of,
    rearrange,
)
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import FormatError, RefusedError, UsageError
from ckptkit.core.index import ChunkTable, Fqn, Key, TensorEntry
from ckptkit.core.manifest import MAP_VERSION
from ckptkit.core.text import Aside, quote
from ckptkit.engine.kernels import AddedOperand, OperandKernel, PartOperand, StoredOperand
from ckptkit.engine.reader import Origin, TensorReader, same_values
from ckptkit.engine.rearranged import ComputedOperand, RearrangeKernel
from ckptkit.hub_names.disk_tensors import (
    HubNames,
    HubTensor,
    NamingRequest,
    find_run,
    find_whole,
)
from ckptkit.hub_names.known_models import recognise_framework
from ckptkit.name_maps.apply import MappedNames, apply_map
from ckptkit.name_maps.find import find_map, load_map, refuse_contradiction
from ckptkit.name_maps.language import NameMap, invert
from ckptkit.options import ConsolidateRequest, matches
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.plan import SOURCE, Compute, Product, StackedPart, TensorSpec
from ckptkit.plan.selection import select_model

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class MappedModel:
    """A model whose names a map converts.

    Attributes:
        name_map: The map.
        names: What it makes of the model.
        live: Element types and shapes of the source's tensors, by their names.
        wrapper: What all names of the source begin with and the rules' do not; left out of `live`.
    """

    name_map: NameMap
    names: MappedNames
    live: Specs
    wrapper: str = ""

    @property
    def versions(self) -> Mapping[str, str]:
        """The map with its digest, as a manifest has it."""
        return {f"{MAP_VERSION}{self.name_map.name}": self.name_map.digest}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user is to know of the conversion."""
        notes = [f"names were converted by map {self.name_map.name!r}"]
        if self.wrapper:
            notes.append(Aside(f"all names begin with {self.wrapper!r}: written without it"))
        for name, (first, count) in self.names.padding.items():
            notes.append(f"rows {first:,} to {count - 1:,} of {quote(name)} are padding: left out")
        by_reason: dict[str, list[Fqn]] = {}
        for name, reason in self.names.dropped.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, left in by_reason.items():
            more = f" and {len(left) - _SHOWN:,} more" if len(left) > _SHOWN else ""
            notes.append(f"left out: {', '.join(map(quote, left[:_SHOWN]))}{more}: {reason}")
        return tuple(notes)

    def refuse_different(self, entries: Mapping[Fqn, TensorEntry], origin: Origin) -> None:
        """Refuses names that stand for one tensor of the source and have other bytes."""
        reader = TensorReader(origin)
        for second, first in self.names.same.items():
            one, other = entries[first], entries[second]
            is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
            if not is_alike or not same_values(reader, one, other):
                raise FormatError(
                    f"{quote(first)} and {quote(second)} are names of one tensor, and differ",
                    where=origin.source.location,
                    hint="leave the wrong one out with --exclude",
                )

    def convert(self, products: Sequence[Product]) -> NamedProducts:
        """Returns the tensors to be written."""
        names = HubNames("", {n: s for n, (_, s) in self.live.items()}, self.names.tensors)
        maker = ProductMaker(names, NamingRequest({}, None), {p.spec.name: p for p in products})
        made = [self._add(product) for product in maker.products()]
        for name, shape in self.names.zeros.items():
            kernel = RearrangeKernel(shape, (), (), has_padding=True)
            spec = TensorSpec(name, dtype_named("float32"), shape)
            made.append(Product(spec, Compute(kernel, ())))
        return NamedProducts(made, {}, self.notes, self.versions)

    def derive(self, entries: Mapping[Fqn, TensorEntry]) -> Iterator[TensorEntry]:
        """Yields the tensors of the target, made of those of the source; keys are their names.

        One that is a tensor of the source element for element keeps its key.
        """
        live = {name: shape for name, (_, shape) in self.live.items()}
        uses = Counter(
            source for tensor in self.names.tensors.values() for source in tensor.sources
        )
        for name, tensor in self.names.tensors.items():
            sources = [entries[source] for source in tensor.sources]
            first, constant = sources[0], self.names.added.get(name)
            is_alone = uses[first.name] == len(sources) and constant is None
            if is_alone and find_whole(tensor, live) and first.shape == tensor.shape:
                yield replace(first, name=name, stored_names=(first.name,))
                continue
            made = _operand_of_sources(tensor, sources)
            yield TensorEntry(
                key=Key(name),
                key_path=(name,),
                name=name,
                tree=first.tree,
                part="model",
                dtype=first.dtype,
                shape=tensor.shape,
                chunks=ChunkTable.of((), len(tensor.shape)),
                derivation=made if constant is None else AddedOperand(made, constant),
                stored_names=tensor.sources,
            )

    def _add(self, product: Product) -> Product:
        constant = self.names.added.get(product.spec.name)
        if constant is None:
            return product
        operand = AddedOperand(operand_of(product), constant)
        return replace(product, body=OperandKernel(operand).compute())


def _operand_of_sources(
    tensor: HubTensor, sources: Sequence[TensorEntry]
) -> PartOperand | ComputedOperand:
    """Returns the elements of a tensor of the target, made of tensors of the source."""
    dtype, run = sources[0].dtype, find_run(tensor)
    if run is not None:
        return PartOperand(SOURCE, sources[0].key, dtype, run.start)
    kernel = rearrange(tensor, [StoredOperand(SOURCE, entry.key, dtype) for entry in sources])
    return ComputedOperand(kernel, TensorSpec(tensor.name, dtype, tensor.shape), kernel.reads)


def convert_checkpoint(
    checkpoint: OpenedCheckpoint, request: ConsolidateRequest, config: Mapping[str, Any] | None
) -> OpenedCheckpoint:
    """Returns a checkpoint whose model has the tensors that a map makes.

    Its index has the tensors of the target, each made of those of the source when it is read, and
    those of the source as tensors that belong to no model.
    """
    index, where, choice = checkpoint.index, checkpoint.path, request.map
    whole = replace(request, select=checkpoint.select)
    selected = select_model(index, whole, location=where, everything=True)
    entries = {entry.name: entry for entry in selected}
    framework = recognise_framework(entries)
    if choice == "none" or (choice == "auto" and not framework):
        return checkpoint
    tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    mapped = map_names(choice, framework, config, checkpoint, tensors, request.exclude)
    entries = {
        name: replace(entry, name=name)
        for entry in entries.values()
        for name in [Fqn(entry.name.removeprefix(mapped.wrapper))]
    }
    if mapped.names.same:
        same = {name for pair in mapped.names.same.items() for name in pair}
        refuse_problems(index, [entries[name] for name in same], where)
        origin = Origin(SOURCE, checkpoint.source, index)
        mapped.refuse_different(entries, origin)
    held = {entry.key: replace(entry, part="other") for entry in entries.values()}
    for entry in mapped.derive(entries):
        _refuse_parts_left_out(entry, request.exclude)
        is_taken = entry.derivation is not None and entry.key in index.tensors
        key = Key(f"{entry.key} by --map") if is_taken else entry.key
        held[key] = replace(entry, key=key)
    return replace(
        checkpoint,
        index=replace(index, tensors={**index.tensors, **held}),
        notes=(*checkpoint.notes, *mapped.notes),
        maps=mapped.versions,
        rules={name.text: rule.where for rule in mapped.name_map.rules for name in rule.targets},
    )


def _refuse_parts_left_out(entry: TensorEntry, exclude: tuple[str, ...]) -> None:
    """Refuses a tensor that is made of several if some of these are left out."""
    left = [name for name in entry.stored_names if matches(name, exclude)]
    rest = [name for name in entry.stored_names if name not in left]
    if left and rest:
        raise RefusedError(
            f"tensor {entry.name!r} is made of {rest[0]!r} and {left[0]!r}, and one of them is left"
            " out",
            where="--exclude",
            hint="leave both in or both out",
        )


def map_names(
    choice: str,
    framework: str,
    config: Mapping[str, Any] | None,
    checkpoint: OpenedCheckpoint,
    tensors: Specs,
    exclude: tuple[str, ...] = (),
) -> MappedModel:
    """Converts the names of a model."""
    where, name_map = checkpoint.path, choose_map(choice, framework, config, checkpoint)
    wrapper = name_map.find_wrapper(tensors)
    tensors = {Fqn(name.removeprefix(wrapper)): spec for name, spec in tensors.items()}
    left = {name for name in tensors if matches(name, exclude) and not name_map.takes_any([name])}
    kept = {name: spec for name, spec in tensors.items() if name not in left}
    names = apply_map(name_map, config or {}, kept, where=where)
    further = {name for pair in names.same.items() for name in pair if matches(name, exclude)}
    if further:
        kept = {name: spec for name, spec in kept.items() if name not in further}
        names = apply_map(name_map, config or {}, kept, where=where)
    return MappedModel(name_map, names, tensors, wrapper)


def choose_map(
    choice: str, framework: str, config: Mapping[str, Any] | None, checkpoint: OpenedCheckpoint
) -> NameMap:
    """Returns the map for a model; arguments and errors as for `map_names`."""
    where, settings = checkpoint.path, dict(checkpoint.index.run.settings)
    name_map = (
        find_map(framework, config, where=where, settings=settings)
        if choice == "auto"
        else load_map(choice)
    )
    refuse_contradiction(name_map, settings, where=where)
    _refuse_other_model(config or {}, settings, where)
    return name_map


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
                f"{key} is {value} in the checkpoint's own settings, {other!r} in the"
                " configuration",
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
    named = MappedModel(inverse, names, specs).convert(products)
    return named, names.parts
