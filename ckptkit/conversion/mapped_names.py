"""The tensors of another framework under the names, and in the forms, of Transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.conversion.names_on_disk import (
    NamedProducts,
    ProductMaker,
    Specs,
    find_left_out,
    operand_of,
)
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.manifest import MAP_VERSION
from ckptkit.core.text import quote
from ckptkit.engine.kernels import AddedOperand, OperandKernel
from ckptkit.hub_names.disk_tensors import HubNames, NamingRequest
from ckptkit.name_maps.apply import MappedNames, apply_map
from ckptkit.name_maps.find import find_map, load_map
from ckptkit.name_maps.language import NameMap
from ckptkit.plan.plan import Product

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
        notes = [f"names were converted by map {self.name_map.name!r}"]
        for name, (first, count) in self.names.padding.items():
            notes.append(f"rows {first:,} to {count - 1:,} of {quote(name)} are padding: left out")
        by_reason: dict[str, list[Fqn]] = {}
        for name, reason in self.names.dropped.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, left in by_reason.items():
            more = f" and {len(left) - _SHOWN:,} more" if len(left) > _SHOWN else ""
            notes.append(f"left out: {', '.join(map(quote, left[:_SHOWN]))}{more}: {reason}")
        rest = find_left_out(made, dropped, specs)
        versions = {f"{MAP_VERSION}{self.name_map.name}": self.name_map.digest}
        return NamedProducts(made, dropped, tuple(notes), versions, left_out=rest)

    def _add(self, product: Product) -> Product:
        constant = self.names.added.get(product.spec.name)
        if constant is None:
            return product
        operand = AddedOperand(operand_of(product), constant)
        return replace(product, body=OperandKernel(operand).compute())


def map_names(
    choice: str,
    framework: str,
    config: Mapping[str, Any] | None,
    tensors: Specs,
    *,
    where: str,
) -> MappedModel:
    """Converts the names of a model.

    Args:
        choice: `auto` for the map of the framework and the model, else the name of one or a file.
        framework: The framework whose names they are, for `auto`.
        config: The configuration of the model, or None.
        tensors: Element types and shapes by the names of the source.
        where: The checkpoint, for messages.
    """
    is_auto = choice == "auto"
    name_map = find_map(framework, config, where=where) if is_auto else load_map(choice)
    return MappedModel(name_map, apply_map(name_map, config or {}, tensors, where=where), tensors)
