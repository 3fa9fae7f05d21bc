"""Tensors under the names that `save_pretrained` gives them, made of those that training holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.kernels.operands import Operand, Stored
from ckptkit.kernels.rearranged import Computed, Rearranged, Stretch
from ckptkit.pipeline.conversions import Conversion, Converted
from ckptkit.pipeline.model_folders import names_in
from ckptkit.pipeline.naming_program import NamingProgram, ask_transformers
from ckptkit.planning.hub_names import HubNames, HubTensor, whole_of
from ckptkit.planning.hub_names_need import naming_need, why_unsure
from ckptkit.planning.hub_names_wire import NamingRequest
from ckptkit.planning.plan import Compute, Copy, Preparable, Product, TensorSpec
from ckptkit.planning.requests import NameChoice
from ckptkit.planning.ties import tie_candidates, tie_conflicts

_LISTED = 3
_LIVE = "pass --names live to write the names that training holds"
Specs = Mapping[Fqn, tuple[DType, Shape]]


@dataclass(frozen=True, slots=True)
class Named:
    """What is written, and under which names.

    Attributes:
        products: The tensors to be written.
        dropped: Tied names that are not written, with the name that stands for each.
        notes: What the user should know.
        versions: The libraries that told the names, with their versions.
        conversion_bytes: What the largest group of tensors takes that is converted as a whole.
        left_out: Element types and shapes of tensors that the user left out, by the names that
            they would have.
    """

    products: Sequence[Product]
    dropped: Mapping[Fqn, Fqn]
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    conversion_bytes: int = 0
    left_out: Specs = field(default_factory=dict)


def named(
    products: Sequence[Product],
    dropped: Mapping[Fqn, Fqn],
    tensors: Specs,
    config: Mapping[str, Any] | None,
    *,
    choice: NameChoice,
    base: str | None,
    program: NamingProgram | None = None,
) -> Named:
    """Gives tensors the names, and the forms, that `save_pretrained` would give them.

    Args:
        products: The tensors to be written, by live name.
        dropped: Live names that are tied to others and not written.
        tensors: Element types and shapes of all tensors of the model, by live name: also of
            those that the user left out, on which the others may depend.
        config: The model's parsed `config.json`, or None.
        choice: `auto` leaves names that nobody can tell as they are, `hub` refuses.
        base: A folder of the model that training began from, or None.
        program: What asks transformers, if it is needed for other questions too.

    Raises:
        RefusedError: If the names are needed and cannot be told.
    """
    disk = _told(config, tensors, choice=choice, base=base, program=program)
    if disk.names is None or disk.request is None:
        return Named(products, dropped, disk.notes, left_out=left_out(products, dropped, tensors))
    maker = _Maker(disk.names, disk.request, {p.spec.name: p for p in products})
    made = tuple(maker.products())
    called = {s: n for n, t in disk.names.tensors.items() if (s := whole_of(t, disk.names.live))}
    ties = {called.get(t, t): called.get(s, s) for t, s in dropped.items()}
    unsaved = [name for name in disk.names.unsaved if name in {p.spec.name for p in products}]
    library = disk.names.library
    notes = (*disk.notes, *maker.notes, *(_said_of(name, library) for name in unsaved))
    versions = {"transformers": library}
    specs = {n: (tensors[t.sources[0]][0], t.shape) for n, t in disk.names.tensors.items()}
    rest = left_out(made, ties, specs)
    return Named(made, ties, notes, versions, maker.largest_bytes, rest)


def left_out(products: Sequence[Product], dropped: Mapping[Fqn, Fqn], tensors: Specs) -> Specs:
    """Returns the tensors that are not written, and that no other stands for."""
    written = {*dropped, *(product.spec.name for product in products)}
    return {name: spec for name, spec in tensors.items() if name not in written}


def _said_of(unsaved: Fqn, library: str) -> str:
    return (
        f"tensor {unsaved!r} is not written, as transformers {library} makes it anew when it loads"
        " such a model"
    )


@dataclass(frozen=True, slots=True)
class DiskNames:
    """The names on disk, or None where they are the live ones, and what the user should know.

    Attributes:
        names: The names.
        notes: What the user should know.
        request: What transformers was asked, if it was.
    """

    names: HubNames | None
    notes: tuple[str, ...] = ()
    request: NamingRequest | None = None


def disk_names(
    config: Mapping[str, Any] | None,
    tensors: Specs | None,
    *,
    choice: NameChoice = "auto",
    base: str | None = None,
) -> DiskNames:
    """Finds what a model's tensors are called on disk, asking transformers where that is needed.

    Args:
        config: The model's parsed `config.json`, or None.
        tensors: Element types and shapes by live name; None for those of the model as its class
            makes it, without the names that it ties to others.
        choice: `auto` leaves names that nobody can tell as they are, `hub` refuses.
        base: A folder of the model that training began from, or None.

    Raises:
        RefusedError: If the names are needed and cannot be told, or if tensors on disk are
            computed from others.
    """
    found = _told(config, tensors, choice=choice, base=base)
    for tensor in () if found.names is None else found.names.tensors.values():
        if tensor.computed is not None:
            raise RefusedError(
                f"tensor {tensor.name!r} on disk is computed from {tensor.sources[0]!r} by"
                " transformers, so that parts of it cannot be changed",
                hint="name a folder with the names of training, as `ckptkit consolidate --names"
                " live` writes it",
            )
    return found


def _told(
    config: Mapping[str, Any] | None,
    tensors: Specs | None,
    *,
    choice: NameChoice,
    base: str | None,
    program: NamingProgram | None = None,
) -> DiskNames:
    # Weights of the base that nobody needs may be damaged, or not be there.
    may_need = choice != "live" and naming_need(config, has_base=True).kind != "none"
    known = names_in(base) if base is not None and may_need else ()
    need = naming_need(config, has_base=bool(known))
    if choice == "live" or need.kind == "none":
        return DiskNames(None)
    specs = tensors or {}
    reason = need.reason or why_unsure(config or {}, (dtype for dtype, _ in specs.values()))
    if reason or config is None:
        return _left_live(reason, choice, has_config=config is not None)
    request = NamingRequest(_without_code(config), tensors, known)
    names = ask_transformers(request, program)
    if names.unknown and config.get("auto_map"):
        reason = (
            f"tensor {names.unknown[0]!r} is not one of transformers' own model, so that the code"
            " beside config.json seems to have been trained"
        )
        return _left_live(reason, choice)
    # Of tied tensors either is written, or the user is told that they differ.
    tied = {*tie_candidates(config, specs), *tie_conflicts(config, specs)}
    return DiskNames(names, tuple(_differences(names, known, base, tied)), request)


def _left_live(reason: str, choice: NameChoice, *, has_config: bool = True) -> DiskNames:
    if choice == "hub":
        raise RefusedError(f"the names on disk cannot be told: {reason}", hint=_LIVE)
    # Without a configuration the output cannot be loaded anyway, which is said elsewhere.
    note = f"names are written as training holds them: {reason}"
    return DiskNames(None, (note,) if has_config else ())


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "auto_map"}


def _differences(
    names: HubNames, known: Sequence[Fqn], base: str | None, tied: Collection[Fqn]
) -> Iterator[str]:
    """Says where the names differ from those of the model that training began from."""
    new = names.tensors.keys() - set(known) if known else ()
    differing = sorted(name for name in new if not set(names.tensors[name].sources) <= set(tied))
    if differing:
        listed = ", ".join(map(repr, differing[:_LISTED]))
        more = f" and {len(differing) - _LISTED:,} more" if len(differing) > _LISTED else ""
        yield f"{base} has no tensor {listed}{more}, which transformers {names.library} writes"


class _Maker:
    """Makes what is written from what training holds.

    Attributes:
        largest_bytes: What the largest group takes that is converted as a whole.
    """

    def __init__(
        self, names: HubNames, request: NamingRequest, live: Mapping[Fqn, Product]
    ) -> None:
        self.largest_bytes = 0
        self._names = names
        self._request = request
        self._live = live
        self._groups: dict[tuple[Fqn, ...], Conversion] = {}

    @property
    def notes(self) -> Sequence[str]:
        """Says how much memory conversions take that compute."""
        count = len(self._groups)
        if not count:
            return ()
        groups = "1 group of tensors is" if count == 1 else f"{count:,} groups of tensors are"
        said = f"{groups} converted as a whole by transformers {self._names.library}"
        return (f"{said}; the largest takes {self.largest_bytes:,} bytes of memory",)

    def products(self) -> Iterator[Product]:
        """Yields what is written, in the order in which `save_pretrained` writes it."""
        for tensor in self._names.tensors.values():
            wanted = [source for source in tensor.sources if source in self._live]
            if wanted and len(wanted) < len(tensor.sources):
                missing = next(s for s in tensor.sources if s not in self._live)
                raise RefusedError(
                    f"tensor {tensor.name!r} is made of {wanted[0]!r} and {missing!r}, and one of"
                    " them is left out",
                    hint=f"leave both in or both out, or {_LIVE}",
                )
            if wanted:
                yield self._product(tensor)

    def _product(self, tensor: HubTensor) -> Product:
        live = self._live
        if tensor.computed is not None:
            group = self._group(tensor.computed.sources)
            spec = next(spec for spec in group.outputs if spec.name == tensor.name)
            return Product(spec, Compute(Converted(group, spec), group.reads))
        whole = whole_of(tensor, self._names.live)
        if whole is not None:
            product = live[whole]
            spec = replace(product.spec, name=tensor.name, shape=tensor.shape)
            return Product(spec, product.body)
        sources = tensor.sources
        kernel = _rearranged(tensor, [_operand(live[source]) for source in sources])
        dtype = live[sources[0]].spec.dtype  # that of all: joining others is refused
        return Product(TensorSpec(tensor.name, dtype, tensor.shape), Compute(kernel, kernel.reads))

    def _group(self, sources: tuple[Fqn, ...]) -> Conversion:
        found = self._groups.get(sources)
        if found is None:
            outputs = tuple(
                TensorSpec(tensor.name, tensor.computed.dtype, tensor.shape)
                for tensor in self._names.tensors.values()
                if tensor.computed is not None and tensor.computed.sources == sources
            )
            inputs = [self._live[source] for source in sources]
            operands = tuple(_operand(product) for product in inputs)
            specs = tuple(product.spec for product in inputs)
            found = self._groups[sources] = Conversion(self._request, specs, operands, outputs)
            self.largest_bytes = max(self.largest_bytes, found.size_bytes)
        return found


def _rearranged(tensor: HubTensor, operands: Sequence[Operand]) -> Rearranged:
    number = {source: i for i, source in enumerate(tensor.sources)}
    return Rearranged(
        grid=tensor.grid,
        stretches=tuple(
            Stretch(piece.box, number[piece.source], piece.start, piece.steps)
            for piece in tensor.pieces
        ),
        operands=tuple(operands),
    )


def _operand(product: Product) -> Operand:
    body, spec = product.body, product.spec
    if isinstance(body, Copy):
        return Stored(body.origin, body.key, spec.dtype)
    if isinstance(body.kernel, Preparable):
        raise RefusedError(
            f"tensor {spec.name!r} is computed as a whole, and stands in several tensors on disk",
            hint=_LIVE,
        )
    return Computed(body.kernel, spec, body.reads)
