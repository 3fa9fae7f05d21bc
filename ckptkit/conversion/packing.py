"""Packing the weights of an output in the form that `--dtype` names."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.conversion.unpacking import StoredForm
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn
from ckptkit.core.text import Aside, counted
from ckptkit.engine.kernels import ConstantKernel, operand_of
from ckptkit.engine.packing import PackingKernel, PackingLoss, Part
from ckptkit.hub_names.disk_tensors import HubNames
from ckptkit.options import find_patterns, matches
from ckptkit.plan.number_formats import Scheme, place
from ckptkit.plan.packed_forms import FORMS, UNPACKED, PackedForm, is_packed, list_kept
from ckptkit.plan.packing_settings import WHOLE, find_quantization
from ckptkit.plan.plan import Compute, Plan, Product, TensorSpec

# The stored type of numbers that share an element, and how many do.
_STORED = {"int4": ("int32", 8), "e2m1": ("uint8", 2)}
_WEIGHT, _BIAS = ".weight", ".bias"


class Packed(Struct, frozen=True):
    """The tensors of an output with packed weights, its configuration, and notes."""

    products: Sequence[Product]
    config: dict[str, Any]
    notes: Sequence[str]


def pack_products(
    products: Sequence[Product],
    config: Mapping[str, Any] | None,
    choice: str,
    *,
    keep: tuple[str, ...],
    tied: Collection[str],
    where: str,
    hub: HubNames | None,
) -> Packed:
    """Packs the weights of linear layers, and says so in the configuration.

    `keep`: patterns of names that are not packed. `tied`: names of weights that are not written.
    `hub`: the names in memory, where they differ and the form needs them.
    """
    form = FORMS[choice]
    if config is None:
        raise RefusedError(
            f"--dtype {choice} needs the config.json of a model of Transformers, to say in it how"
            " weights are packed",
            where=where,
            hint="pass the model that was trained with --base, or its configuration with --config",
        )
    _refuse_packed(products, config, choice, where)
    _refuse_transposed(products, choice, where)
    packed = [p.spec for p in products if is_packed(p.spec) and not matches(p.spec.name, keep)]
    if not packed:
        raise RefusedError(
            f"has no weight of a linear layer that --dtype {choice} packs",
            where=where,
            hint="leave --dtype out, or look with `ckptkit inspect` at what it has",
        )
    _refuse_undivided(packed, form, choice)
    names = {spec.name for spec in packed}
    made: list[Product] = []
    for product in products:
        made += _pack(product, form) if product.spec.name in names else [product]
    specs = [product.spec for product in products]
    kept = list_kept(specs, names)
    kept += [name.removesuffix(_WEIGHT) for name in tied if name.endswith(_WEIGHT)]
    if hub is not None:
        of_tensors = {s.name: hub.tensors[s.name].sources for s in specs if s.name in hub.tensors}
        live = [replace(s, name=name) for s in specs for name in of_tensors.get(s.name, ())]
        kept += list_kept(live, {name for own in names for name in of_tensors.get(own, ())})
        kept += [name.removesuffix(_WEIGHT) for name in hub.tied if name.endswith(_WEIGHT)]
    rest = [spec for spec in specs if len(spec.shape) > 1 and spec.name not in names]
    note = f"{counted(len(packed), 'weight')} packed: {form.scheme.title}"
    if rest:
        most = max(rest, key=lambda spec: spec.size_bytes)
        others = counted(len(rest), "other tensor")
        note += f"; {others} of matrices left as they are, the largest {most.name!r}"
    notes = [
        Aside(note),
        *_describe_short(packed, form),
        *describe_kept_types(specs, keep, form.scheme),
    ]
    if form.of_experts and any(".experts." in spec.name for spec in packed):
        notes.append(f"experts are packed: {form.of_experts}")
    return Packed(made, {**config, "quantization_config": form.make_config(kept)}, notes)


def describe_kept_types(
    specs: Iterable[TensorSpec], keep: tuple[str, ...], scheme: Scheme
) -> list[str]:
    """Returns a note on tensors beside packed ones in a type that layers fail with, if any."""
    kept = [
        spec
        for spec in specs
        if spec.dtype.kind == "float" and spec.dtype.name != UNPACKED and matches(spec.name, keep)
    ]
    if scheme.method != "fp8" or not kept:
        return []
    note = (
        f"--keep-dtype keeps {counted(len(kept), 'tensor')} in {kept[0].dtype.name}, such as"
        f" {kept[0].name!r}: the FP8 layers of transformers 5.23.0 compute in {UNPACKED}, and fail"
        f" on other types; write the model with --dtype {UNPACKED}, then pack that output"
    )
    return [note]


def pack_as(
    stored: StoredForm, product: Product, where: str, hint: str, loss: PackingLoss | None = None
) -> list[Product]:
    """Returns the tensors that a weight is packed in, as another model has it packed."""
    group, made = stored.group, []
    if stored.form is not None and product.spec.shape == stored.shape:
        made = _pack(product, stored.form, loss)
    expected = {str(entry.name): (entry.dtype, entry.shape) for entry in group.entries}
    found = {str(one.spec.name): (one.spec.dtype, one.spec.shape) for one in made}
    if found == expected:
        return made
    if product.spec.shape != stored.shape:
        problem = f"has shape {product.spec.shape}, and there {stored.shape}"
    else:
        listed = ", ".join(f"{n!r} ({d.name} {list(s)})" for n, (d, s) in expected.items())
        problem = f"cannot be packed as it is there ({group.scheme.title}): in {listed}"
    raise RefusedError(f"weight {product.spec.name!r} {problem}", where=where, hint=hint)


def describe_losses(plan: Plan) -> dict[str, float]:
    """Returns how far packed weights are from what was packed, once a plan was executed."""
    return {
        str(kernel.weight.name): kernel.loss.relative
        for _, segment, _ in plan.specs()
        if isinstance(segment.body, Compute)
        and isinstance(kernel := segment.body.kernel, PackingKernel)
        and kernel.loss is not None
        and kernel.part == "numbers"
    }


def _pack(product: Product, form: PackedForm, loss: PackingLoss | None = None) -> list[Product]:
    """Returns the tensors that a weight is packed in."""
    spec, body = product.spec, operand_of(product)
    rows, columns = spec.shape
    scheme = form.scheme
    kind, held = _STORED.get(form.number, (form.number, 1))
    scale = Fqn(place(spec.name, scheme.scale[0]))
    outputs: tuple[tuple[Part, TensorSpec], ...] = (
        (
            "numbers",
            TensorSpec(
                Fqn(place(spec.name, scheme.packed)), BY_NAME[kind], (rows, columns // held)
            ),
        ),
        ("scales", TensorSpec(scale, BY_NAME[form.scale], form.grid(spec.shape))),
    )
    if scheme.total:
        total = TensorSpec(Fqn(place(spec.name, scheme.total)), BY_NAME["float32"], (1,))
        outputs = (*outputs, ("total", total))
    made: list[Product] = []
    for part, out in outputs:
        kernel = PackingKernel(form, spec, body, part, loss=loss)
        compute = Compute(kernel, body.reads, kernel.most_elements(out))
        made.append(Product(out, compute, made[0].spec.name if made else None))
    if scheme.shape:
        out = TensorSpec(Fqn(place(spec.name, scheme.shape)), BY_NAME["int64"], (2,))
        shape = ConstantKernel(np.array(spec.shape, np.int64))
        made.append(Product(out, Compute(shape, body.reads)))
    return made


def _refuse_undivided(packed: Sequence[TensorSpec], form: PackedForm, choice: str) -> None:
    high, wide = form.blocks
    if form.scheme.has_rest or high != 1 or wide == WHOLE:
        return
    rest = [spec for spec in packed if spec.shape[1] % wide]
    if rest:
        names = [spec.name for spec in rest]
        hint = "pass --dtype fp8-block or fp8-channel, which have no groups of columns"
        patterns = find_patterns(names, {spec.name for spec in packed}.difference(names))
        options = " ".join(f"--keep-dtype {shlex.quote(pattern)}" for pattern in patterns)
        if rest != packed:
            hint = f"leave {'them' if rest[1:] else 'it'} unpacked with {options}"
        raise RefusedError(
            f"has {rest[0].shape[1]:,} columns, which groups of {wide} do not divide"
            + (f", nor those of {counted(len(rest) - 1, 'more weight')}" if rest[1:] else ""),
            where=f"tensor {rest[0].name!r}, --dtype {choice}",
            hint=hint,
        )


def _refuse_packed(
    products: Sequence[Product], config: Mapping[str, Any], choice: str, where: str
) -> None:
    """Refuses a model that is packed already, and was not unpacked."""
    names = [
        str(product.spec.name)
        for product in products
        if product.spec.dtype.itemsize == 1 and product.spec.dtype.kind == "float"
    ]
    if not names and find_quantization(config) is None:
        return
    what = f"tensor {names[0]!r} is" if names else "its quantization_config says that weights are"
    raise RefusedError(
        f"{what} packed in another form, which --dtype {choice} cannot unpack first",
        where=where,
        hint="take the model that was not packed, or pass with --config the configuration that"
        " says how it is",
    )


def _refuse_transposed(products: Sequence[Product], choice: str, where: str) -> None:
    """Refuses a model whose layers are no linear ones, as GPT-2's: rows are their inputs."""
    biases = {
        product.spec.name: product.spec.shape
        for product in products
        if product.spec.name.endswith(_BIAS)
    }
    for spec in (product.spec for product in products):
        bias = biases.get(Fqn(spec.name.removesuffix(_WEIGHT) + _BIAS))
        if is_packed(spec) and bias == spec.shape[1:] != spec.shape[:1]:
            raise RefusedError(
                f"tensor {spec.name!r} has its inputs in rows, as {Fqn(place(spec.name, _BIAS))!r}"
                " shows: no library packs such layers",
                where=where,
                hint=f"leave --dtype {choice} out, or pass --dtype bfloat16",
            )


def _describe_short(packed: Sequence[TensorSpec], form: PackedForm) -> list[str]:
    """Returns a note on weights whose last blocks are short; none for none."""
    high, wide = form.blocks
    if high == 1:
        return []
    short = [
        spec.name
        for spec in packed
        if any(n > size and n % size for n, size in zip(spec.shape, (high, wide), strict=True))
    ]
    if not short:
        return []
    note = (
        f"blocks of {high} x {wide} end short in {counted(len(short), 'weight')}, such as"
        f" {short[0]!r}: vLLM and transformers on a GPU read them, transformers on a CPU does not;"
        " --keep-dtype with their names leaves them unpacked"
    )
    return [note]
