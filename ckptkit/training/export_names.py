"""The names of an exported model's tensors on disk: those that its `save_pretrained` would write.

Every rank finds them out by itself, from what all ranks know alike. A model whose names cannot
be told is exported under the names of training, which Transformers 5 loads too: an export is
often the last thing that a job does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckptkit.core.geometry import intersect
from ckptkit.core.index import Box, Fqn, Shape
from ckptkit.planning.hub_names import HubNames, HubTensor, Window, whole_of, windows_of
from ckptkit.planning.hub_names_need import naming_need, why_unsure
from ckptkit.planning.hub_names_wire import NamingRequest
from ckptkit.planning.plan import TensorSpec
from ckptkit.training.names import innermost

Table = Mapping[Fqn, TensorSpec]
Part = tuple[Box, torch.Tensor]


class DiskNames:
    """How live tensors are called, and cut, on disk.

    Attributes:
        notes: What the user should know.
        versions: The libraries that told the names, with their versions.
    """

    def __init__(self, names: HubNames | None, notes: tuple[str, ...] = ()) -> None:
        """Takes what `save_pretrained` makes of a model; None where it changes nothing."""
        self.notes = notes
        self._tensors = {} if names is None else names.tensors
        self._live = {} if names is None else names.live
        self._called = {
            tensor.sources[0]: name
            for name, tensor in self._tensors.items()
            if _is_same(tensor, self._live)
        }
        library = {} if names is None else {"transformers": names.library}
        self.versions: Mapping[str, str] = library

    def name_of(self, live: Fqn) -> Fqn:
        """Returns what a live tensor is called on disk, if it is one tensor there."""
        return self._called.get(live, live)

    def specs(self, written: Table) -> Iterator[TensorSpec]:
        """Yields the tensors on disk, given the live ones as they are to be written."""
        if not self._tensors:
            yield from written.values()
        for name, tensor in self._tensors.items():
            found = [written[source] for source in tensor.sources if source in written]
            if found:
                yield TensorSpec(name, found[0].dtype, tensor.shape)

    def sources(self, name: Fqn) -> tuple[Fqn, ...]:
        """Returns the live tensors that one on disk is made of."""
        tensor = self._tensors.get(name)
        return (name,) if tensor is None else tensor.sources

    def parts(self, name: Fqn, source: Fqn, held: Iterator[Part]) -> Iterator[Part]:
        """Turns parts of a live tensor into those of one on disk.

        Args:
            name: The tensor on disk.
            source: One of its live tensors.
            held: Boxes of that, with their elements in the shape of the box.

        Yields:
            Boxes of the tensor on disk, with theirs.
        """
        tensor = self._tensors.get(name)
        if tensor is None or self._called.get(source) == name:
            yield from held
            return
        windows = [pair for pair in self._windows(tensor) if pair[1].source == source]
        for box, local in held:
            for place, window in windows:
                shared = intersect(box, window.box)
                if shared is not None:
                    yield _moved(shared, place, window), _taken(local, box, shared, window)

    def _windows(self, tensor: HubTensor) -> Sequence[tuple[Box, Window]]:
        return windows_of(tensor, self._live) or ()


def disk_names(modules: Sequence[nn.Module], table: Table, config: Any) -> DiskNames:
    """Finds out what the tensors of a model are called on disk.

    Args:
        modules: The model; several modules where they are stages of a pipeline.
        table: The tensors of the whole model.
        config: Its parsed `config.json`, or None.
    """
    model: Any = innermost(modules[0])
    own = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))
    is_native = own.__module__.startswith("transformers.")
    need = naming_need(config, has_base=True)
    if need.kind != "ask" or not is_native:
        return DiskNames(None)
    why = why_unsure(config, (spec.dtype for spec in table.values()))
    names: HubNames | None = None
    if not why:
        try:
            names = _asked(model, {**config, "architectures": [own.__name__]}, table)
        except Exception as error:  # noqa: BLE001  whatever goes wrong there, it is written
            why = f"{type(error).__name__}: {error}"
    if names is not None and not _can_be_cut(names):
        why, names = _why_not(names), None
    notes = (f"names are written as training holds them: {why}",) if why else ()
    return DiskNames(names, notes)


def _asked(model: Any, config: Mapping[str, Any], table: Table) -> HubNames:
    from ckptkit.naming.answers import answer

    tensors = {name: (spec.dtype, spec.shape) for name, spec in table.items()}
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    return answer(NamingRequest(plain, tensors), getattr(model, "_weight_conversions", None))


def _can_be_cut(names: HubNames) -> bool:
    return all(
        _is_same(tensor, names.live) or windows_of(tensor, names.live) is not None
        for tensor in names.tensors.values()
    )


def _why_not(names: HubNames) -> str:
    """Says what keeps every rank from writing what it holds."""
    for tensor in names.tensors.values():
        if tensor.computed is not None:
            return (
                f"transformers {names.library} computes tensor {tensor.name!r}, for which it needs"
                f" {tensor.sources[0]!r} as a whole; `ckptkit consolidate` makes what"
                " save_pretrained would write of this folder"
            )
    return "its conversion reorders elements within a dimension"


def _is_same(tensor: HubTensor, live: Mapping[Fqn, Shape]) -> bool:
    source = whole_of(tensor, live)
    return source is not None and live[source] == tensor.shape


def _moved(shared: Box, place: Box, window: Window) -> Box:
    """Returns where on disk a part of a live tensor lies."""
    return Box(
        tuple(
            offset + shared.offsets[axis] - window.box.offsets[axis]
            for offset, axis in zip(place.offsets, window.axes, strict=True)
        ),
        tuple(shared.sizes[axis] for axis in window.axes),
    )


def _taken(local: torch.Tensor, box: Box, shared: Box, window: Window) -> torch.Tensor:
    """Returns the elements of a part, in the shape that it has on disk."""
    for axis, size in enumerate(shared.sizes):
        local = local.narrow(axis, shared.offsets[axis] - box.offsets[axis], size)
    rest = [axis for axis in range(local.dim()) if axis not in window.axes]
    ordered = local.permute(*rest, *window.axes)
    return ordered[(0,) * len(rest)]
