"""The tensors of a model under the names, and in the forms, that `save_pretrained` writes.

Most conversions of transformers move elements, which streams. Where one computes, its tensors are
gathered in files of a temporary folder, one group at a time, and transformers converts them there
in a process of its own.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.conversion.naming_program import NamingProgram, ask_transformers
from ckptkit.conversion.source.model_folders import read_names
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import NoSpaceError, RefusedError, error_from_json
from ckptkit.core.index import Fqn, Key, Shape, Span
from ckptkit.core.text import Closing, list_first
from ckptkit.core.threads import memory_in_use_bytes
from ckptkit.engine import kernels
from ckptkit.engine.executor import WORKER_BYTES
from ckptkit.engine.kernels import (
    ComputedOperand,
    ConstantKernel,
    Operand,
    OperandKernel,
    RearrangeKernel,
)
from ckptkit.hub_names.disk_tensors import HubNames, HubTensor, NamingRequest, find_whole
from ckptkit.hub_names.known_models import determine_need, explain_doubt
from ckptkit.options import NameChoice, Resources
from ckptkit.plan.plan import Compute, Kernel, Product, Reading, TensorSpec
from ckptkit.plan.ties import find_tie_candidates, find_tie_conflicts
from ckptkit.plan.weight_kinds import find_dense_name

_BLOCK = 1 << 20  # elements that are gathered at once
_LIVE = "pass --names live to write the names that training holds"


class Conversion(Struct, frozen=True):
    """The inputs and outputs of one conversion that computes."""

    model: NamingRequest
    inputs: tuple[TensorSpec, ...]
    operands: tuple[Operand, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the inputs and outputs together."""
        return sum(spec.size_bytes for spec in (*self.inputs, *self.outputs))

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return tuple(dict.fromkeys(read for operand in self.operands for read in operand.reads))


class Converted(Kernel, Struct, frozen=True):
    """The kernel of one output of a conversion; it is prepared together with the others."""

    group: Conversion
    spec: TensorSpec

    @property
    def is_ready(self) -> bool:
        return False

    def prepare(self, _out: TensorSpec, reading: Reading) -> ConstantKernel:
        """Converts the group unless that was done; returns a kernel that has the elements."""
        model = self.group.model
        converter = reading.open_once(("conversions", id(model)), partial(Converter, model))
        return ConstantKernel(converter.take(self.group, self.spec, reading))


def reserve_for_conversions(resources: Resources, size_bytes: int) -> Resources:
    """Returns the limits of everything else while the largest group is converted."""
    limit = resources.memory_limit_bytes
    if limit is None or not size_bytes:
        return resources
    used = memory_in_use_bytes() + WORKER_BYTES
    if limit - used < size_bytes:
        raise NoSpaceError(
            f"a group of tensors that transformers converts as a whole takes {size_bytes:,} bytes"
            f" and {limit:,} leave {max(0, limit - used):,}",
            where="--memory-limit",
            hint=f"allow at least {used + size_bytes:,} bytes, or {_LIVE}",
        )
    return replace(resources, memory_limit_bytes=limit - size_bytes)


class Converter(Closing):
    """The process that converts, and the folder of its files. Use it as a context manager.

    One group is converted at a time. Its outputs stay in files until they are written.
    """

    def __init__(self, model: NamingRequest) -> None:
        self._program = NamingProgram("convert")
        self._first = model.to_json() + b"\n"  # which the process reads before its first group
        self._lock = threading.Lock()
        self._finished: dict[TensorSpec, Path] = {}
        self._count = 0
        self._home = tempfile.TemporaryDirectory(prefix="ckptkit-")
        self._folder = Path(self._home.name)

    def close(self) -> None:
        """Ends the process and removes the files."""
        self._program.close()
        self._home.cleanup()

    def take(self, group: Conversion, spec: TensorSpec, reading: Reading) -> NDArray[Any]:
        """Returns the elements of one output, in a file that is unlinked."""
        with self._lock:
            if spec not in self._finished:
                self._finished |= self._convert(group, reading)
            path = self._finished.pop(spec)
        kind = numpy_dtype(spec.dtype)
        if not spec.elements:
            return np.empty(0, kind)
        held = np.memmap(path, np.uint8, mode="r", shape=(spec.size_bytes,))
        path.unlink()
        return held.view(kind)

    def _convert(self, group: Conversion, reading: Reading) -> dict[TensorSpec, Path]:
        try:
            gathered = [
                self._gather(spec, operand, reading)
                for spec, operand in zip(group.inputs, group.operands, strict=True)
            ]
        except OSError as error:
            raise NoSpaceError(
                f"gathering {group.size_bytes:,} bytes for a conversion failed: {error}",
                where=self._home.name,
                hint="set TMPDIR to a folder with more room",
            ) from error
        outputs = {spec: self._new_path() for spec in group.outputs}
        request = {
            "inputs": [
                [spec.name, spec.dtype.name, spec.shape, str(path)]
                for spec, path in zip(group.inputs, gathered, strict=True)
            ],
            "outputs": [[spec.name, str(path)] for spec, path in outputs.items()],
        }
        question, self._first = self._first + json.dumps(request).encode(), b""
        failing = f"transformers could not convert a group of {group.size_bytes:,} bytes"
        where = f"tensor {group.outputs[0].name!r}"
        asked = self._program.ask(question)
        try:
            answer = self._program.wait(
                asked, _LIVE, threading.TIMEOUT_MAX, failing=failing, is_logged=False
            )
        except RefusedError as error:
            raise error.located(where) from error
        for path in gathered:
            path.unlink()
        if "error" in answer:
            raise error_from_json(answer["error"]).located(where)
        actual = {name: (dtype, tuple(shape)) for name, dtype, shape in answer["outputs"]}
        expected = {str(spec.name): (spec.dtype.name, spec.shape) for spec in group.outputs}
        if actual != expected:
            raise RefusedError(
                f"transformers made {actual} of a group, against {expected} that it announced",
                where=where,
                hint=_LIVE,
            )
        return outputs

    def _gather(self, spec: TensorSpec, operand: Operand, reading: Reading) -> Path:
        """Writes a tensor into a file, block by block."""
        path = self._new_path()
        with path.open("wb") as file:
            for start in range(0, spec.elements, _BLOCK):
                span = Span(start, min(start + _BLOCK, spec.elements))
                inputs = [reading.read(demand) for demand in operand.demands(span)]
                file.write(operand.values(span, inputs).view(np.uint8).data)
        return path

    def _new_path(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)


_LISTED = 3
Specs = Mapping[Fqn, tuple[DType, Shape]]


class NamedProducts(Struct, frozen=True):
    """The tensors to be written, with the names on disk."""

    products: Sequence[Product]
    dropped: Mapping[Fqn, Fqn]  # tied names that are not written, with the name that has the bytes
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # of what gave the names
    conversion_bytes: int = 0  # memory of the largest group that is converted as a whole
    left_out: Specs = field(default_factory=dict)  # what the user left out, by names on disk
    hub: HubNames | None = None  # what transformers said, if it was asked


def name_on_disk(
    products: Sequence[Product],
    dropped: Mapping[Fqn, Fqn],
    tensors: Specs,
    config: Mapping[str, Any] | None,
    *,
    choice: NameChoice,
    base: str | None,
    program: NamingProgram | None = None,
) -> NamedProducts:
    """Gives tensors the names, and the forms, that `save_pretrained` would give them."""
    left_out = find_left_out(products, dropped, tensors)
    disk = _find_names(
        config, tensors, choice=choice, base=base, program=program, left_out=left_out
    )
    if disk.names is None or disk.request is None:
        return NamedProducts(products, dropped, disk.notes, left_out=left_out)
    tensors_on_disk, library = disk.names.tensors, disk.names.library
    live = {product.spec.name: product for product in products}
    renamed, groups = make_disk_products(disk.names, disk.request, live)
    notes, most_bytes = list(disk.notes), max((one.size_bytes for one in groups), default=0)
    if groups:
        some = f"{len(groups):,} groups of tensors are"
        some = "1 group of tensors is" if len(groups) == 1 else some
        said = f"{some} converted as a whole by transformers {library}"
        notes.append(f"{said}; the largest takes {most_bytes:,} bytes of memory")
    remade = f"is not written, as transformers {library} makes it anew when it loads such a model"
    notes += [f"tensor {name!r} {remade}" for name in disk.names.unsaved if name in live]
    called = {s: n for n, t in tensors_on_disk.items() if (s := find_whole(t, disk.names.live))}
    ties = {called.get(t, t): called.get(s, s) for t, s in dropped.items()}
    specs = {n: (tensors[t.sources[0]][0], t.shape) for n, t in tensors_on_disk.items()}
    return NamedProducts(
        renamed,
        ties,
        notes=tuple(notes),
        versions={"transformers": library},
        conversion_bytes=most_bytes,
        left_out=find_left_out(renamed, ties, specs),
        hub=disk.names,
    )


def find_left_out(products: Sequence[Product], dropped: Mapping[Fqn, Fqn], tensors: Specs) -> Specs:
    """Returns the tensors that are not written and not tied to one that is."""
    written = {*dropped, *(product.spec.name for product in products)}
    return {name: spec for name, spec in tensors.items() if name not in written}


class DiskNames(Struct, frozen=True):
    """The names on disk, None where they are those of training; and what was asked for them."""

    names: HubNames | None
    notes: tuple[str, ...] = ()
    request: NamingRequest | None = None


def find_disk_names(
    config: Mapping[str, Any] | None, tensors: Specs | None, *, base: str | None = None
) -> DiskNames:
    """Finds the names of a model's tensors on disk, asking transformers where that is needed."""
    disk = _find_names(config, tensors, choice="auto", base=base)
    for tensor in () if disk.names is None else disk.names.tensors.values():
        if tensor.computed is not None:
            raise RefusedError(
                f"tensor {tensor.name!r} on disk is computed from {tensor.sources[0]!r} by"
                " transformers, so that parts of it cannot be changed",
                hint="name a folder with the names of training, as `ckptkit consolidate --names"
                " live` writes it",
            )
    return disk


def _find_names(
    config: Mapping[str, Any] | None,
    tensors: Specs | None,
    *,
    choice: NameChoice,
    base: str | None,
    program: NamingProgram | None = None,
    left_out: Collection[Fqn] = (),
) -> DiskNames:
    # Weights of the base that are not needed may be damaged or missing.
    may_need = choice != "live" and determine_need(config, has_base=True).kind != "none"
    names_of_base = read_names(base) if base is not None and may_need else ()
    # The tensors of a packed weight stand for its own name.
    dense = (Fqn(find_dense_name(name)) for name in names_of_base)
    names_of_base = tuple(dict.fromkeys((*names_of_base, *dense)))
    need = determine_need(config, has_base=bool(names_of_base))
    if choice == "live" or need.kind == "none":
        return DiskNames(None)
    specs = tensors or {}
    reason = need.reason or explain_doubt(config or {}, (dtype for dtype, _ in specs.values()))
    if reason or config is None:
        return _left_live(reason, choice, has_config=config is not None)
    without_code = {key: value for key, value in config.items() if key != "auto_map"}
    request = NamingRequest(without_code, tensors, names_of_base)
    names = ask_transformers(request, program)
    if names.unknown and config.get("auto_map"):
        reason = (
            f"tensor {names.unknown[0]!r} is not one of transformers' own model, so that the code"
            " beside config.json seems to have been trained"
        )
        return _left_live(reason, choice)
    # One of two tied tensors is written, or a note says that they differ.
    ties = {*find_tie_candidates(config, specs), *find_tie_conflicts(config, specs)}
    told = {*ties, *names.tied, *left_out}
    notes: tuple[str, ...] = ()
    new = names.tensors.keys() - set(names_of_base) if names_of_base else ()
    differing = sorted(name for name in new if not set(names.tensors[name].sources) <= told)
    if differing:
        listed = list_first(differing, _LISTED)
        notes = (f"{base} has no tensor {listed}, which transformers {names.library} writes",)
    return DiskNames(names, notes, request)


def _left_live(reason: str, choice: NameChoice, *, has_config: bool = True) -> DiskNames:
    if choice == "hub":
        raise RefusedError(f"the names on disk are not known: {reason}", hint=_LIVE)
    # Another note says that without a configuration the output cannot be loaded.
    note = f"names are written as training holds them: {reason}"
    return DiskNames(None, (note,) if has_config else ())


def make_disk_products(
    names: HubNames, request: NamingRequest, live: Mapping[Fqn, Product]
) -> tuple[list[Product], tuple[Conversion, ...]]:
    """Makes the tensors on disk from those of training, in the order of `save_pretrained`.

    Returns them, and the groups that are converted as a whole.
    """
    groups: dict[tuple[Fqn, ...], Conversion] = {}
    made: list[Product] = []
    for tensor in names.tensors.values():
        missing = [source for source in tensor.sources if source not in live]
        if len(missing) == len(tensor.sources):
            continue
        if missing:
            there = next(source for source in tensor.sources if source in live)
            raise RefusedError(
                f"tensor {tensor.name!r} is made of {there!r} and {missing[0]!r}, and one of them"
                " is left out",
                hint=f"leave both in or both out, or {_LIVE}",
            )
        whole = find_whole(tensor, names.live) if tensor.computed is None else None
        if tensor.computed is not None:
            sources = tensor.computed.sources
            if sources not in groups:
                outputs = tuple(
                    TensorSpec(other.name, other.computed.dtype, other.shape)
                    for other in names.tensors.values()
                    if other.computed is not None and other.computed.sources == sources
                )
                inputs = [live[source] for source in sources]
                operands = tuple(map(operand_of, inputs))
                specs = tuple(product.spec for product in inputs)
                groups[sources] = Conversion(request, specs, operands, outputs)
            group = groups[sources]
            spec = next(spec for spec in group.outputs if spec.name == tensor.name)
            made.append(Product(spec, Compute(Converted(group, spec), group.reads)))
        elif whole is not None:
            spec, body = live[whole].spec, live[whole].body
            if isinstance(body, Compute) and spec.shape != tensor.shape:
                body = OperandKernel(operand_of(live[whole])).compute()  # keeps its own shape
            made.append(Product(replace(spec, name=tensor.name, shape=tensor.shape), body))
        else:
            joined = join_sources(tensor, [operand_of(live[source]) for source in tensor.sources])
            made.append(Product(joined.spec, Compute(joined.kernel, joined.reads)))
    return made, tuple(groups.values())


def join_sources(tensor: HubTensor, sources: Sequence[Operand]) -> ComputedOperand:
    """Returns a tensor that is made of others, in the order of `tensor.sources`, as an operand."""
    of_sources = dict(zip(tensor.sources, sources, strict=True))
    kernel = RearrangeKernel(tensor.pieces, of_sources, tensor.has_padding)
    # Sources of several element types are refused before.
    spec = TensorSpec(tensor.name, sources[0].dtype, tensor.shape)
    return ComputedOperand(kernel, spec, kernel.reads)


def operand_of(product: Product) -> Operand:
    """Returns the elements of a product, which must not be computed as a whole."""
    if isinstance(product.body, Compute) and not product.body.kernel.is_ready:
        raise RefusedError(
            f"tensor {product.spec.name!r} is computed as a whole, and stands in several tensors on"
            " disk",
            hint=_LIVE,
        )
    return kernels.operand_of(product)
