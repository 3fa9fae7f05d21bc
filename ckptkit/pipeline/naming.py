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
from ckptkit.pipeline.model_folders import names_in
from ckptkit.pipeline.naming_program import ask_transformers
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
    """

    products: Sequence[Product]
    dropped: Mapping[Fqn, Fqn]
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def named(
    products: Sequence[Product],
    dropped: Mapping[Fqn, Fqn],
    tensors: Specs,
    config: Mapping[str, Any] | None,
    *,
    choice: NameChoice,
    base: str | None,
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

    Raises:
        RefusedError: If the names are needed and cannot be told.
    """
    disk = disk_names(config, tensors, choice=choice, base=base)
    if disk.names is None:
        return Named(products, dropped, disk.notes)
    made = tuple(_products(disk.names, {p.spec.name: p for p in products}))
    called = {s: n for n, t in disk.names.tensors.items() if (s := whole_of(t, disk.names.live))}
    ties = {called.get(t, t): called.get(s, s) for t, s in dropped.items()}
    unsaved = [name for name in disk.names.unsaved if name in {p.spec.name for p in products}]
    notes = (*disk.notes, *(_said_of(name, disk.names.library) for name in unsaved))
    return Named(made, ties, notes, {"transformers": disk.names.library})


def _said_of(unsaved: Fqn, library: str) -> str:
    return (
        f"tensor {unsaved!r} is not written, as transformers {library} makes it anew when it loads"
        " such a model"
    )


@dataclass(frozen=True, slots=True)
class DiskNames:
    """The names on disk, or None where they are the live ones, and what the user should know."""

    names: HubNames | None
    notes: tuple[str, ...] = ()


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
        RefusedError: If the names are needed and cannot be told.
    """
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
    names = ask_transformers(NamingRequest(_without_code(config), tensors, known))
    if names.unknown and config.get("auto_map"):
        reason = (
            f"tensor {names.unknown[0]!r} is not one of transformers' own model, so that the code"
            " beside config.json seems to have been trained"
        )
        return _left_live(reason, choice)
    # Of tied tensors either is written, or the user is told that they differ.
    tied = {*tie_candidates(config, specs), *tie_conflicts(config, specs)}
    return DiskNames(names, tuple(_differences(names, known, base, tied)))


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


def _products(names: HubNames, live: Mapping[Fqn, Product]) -> Iterator[Product]:
    for tensor in names.tensors.values():
        wanted = [source for source in tensor.sources if source in live]
        if wanted and len(wanted) < len(tensor.sources):
            missing = next(s for s in tensor.sources if s not in live)
            raise RefusedError(
                f"tensor {tensor.name!r} is made of {wanted[0]!r} and {missing!r}, and one of them"
                " is left out",
                hint=f"leave both in or both out, or {_LIVE}",
            )
        if wanted:
            yield _product(tensor, names.live, live)


def _product(
    tensor: HubTensor, shapes: Mapping[Fqn, Shape], live: Mapping[Fqn, Product]
) -> Product:
    whole = whole_of(tensor, shapes)
    if whole is not None:
        product = live[whole]
        return Product(replace(product.spec, name=tensor.name, shape=tensor.shape), product.body)
    sources = tensor.sources
    number = {source: i for i, source in enumerate(sources)}
    kernel = Rearranged(
        grid=tensor.grid,
        stretches=tuple(
            Stretch(piece.box, number[piece.source], piece.start, piece.steps)
            for piece in tensor.pieces
        ),
        operands=tuple(_operand(live[source]) for source in sources),
    )
    dtype = live[sources[0]].spec.dtype  # that of all: joining others is refused
    return Product(TensorSpec(tensor.name, dtype, tensor.shape), Compute(kernel, kernel.reads))


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
