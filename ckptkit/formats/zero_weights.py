"""The weights of a DeepSpeed checkpoint: the live ones, and the optimizer's master copies.

The live weights are served as the model: up to stage 2 they are stored whole, in stage 3 they are
rounded from the optimizer's master copy, as DeepSpeed does after each step. The master copies are
served beside them, so that casts can be made from those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ckptkit.core.errors import IncompleteCheckpointError
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Key,
    KeyPath,
    Master,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.pickles import shown
from ckptkit.formats.torch_archives import ArchiveTable, Document
from ckptkit.formats.torch_values import TensorRef
from ckptkit.formats.trees import Membership, classify
from ckptkit.formats.zero_files import ZeroFile
from ckptkit.formats.zero_layout import Parameter, chunks_of
from ckptkit.formats.zero_optimizer import States

MODULE = "module"
_MASTERS = "fp32"  # the state dict of the master copies


class Saved(Protocol):
    """What the files of one save hold."""

    @property
    def models(self) -> Sequence[ZeroFile]:
        """The files of weights: of each rank where weights are spread over ranks, else one."""
        ...

    @property
    def first(self) -> Document:
        """What the first file of weights holds."""
        ...

    @property
    def is_partitioned(self) -> bool:
        """Whether the weights themselves are spread over ranks, as in stage 3."""
        ...

    def masters(self) -> Mapping[str, Parameter]:
        """Returns the master copies of trained parameters, by name."""
        ...

    def frozen(self) -> Mapping[str, Parameter]:
        """Returns the frozen parameters that are spread over ranks, by name."""
        ...

    def shared(self) -> Mapping[str, str]:
        """Returns the names under which others' parameters are known besides, with the others."""
        ...


class Weights:
    """The weights of a save as entries of an index, with their master copies.

    Args:
        table: The opened files.
        contents: What they hold.
        where: Their folder, for messages.

    Attributes:
        entries: The live tensors, then the masters.
        values: What stands among the weights and is no tensor.
        called: What the parameters are called in the index, by the names of their module.
        masters: The master copies of trained parameters, by name.
        aliases: Groups of keys that share one storage.

    Raises:
        FormatError: If the files contradict each other.
        IncompleteCheckpointError: If a weight is nowhere.
    """

    def __init__(self, table: ArchiveTable, contents: Saved, where: str) -> None:
        self._table = table
        self._contents = contents
        self.masters = contents.masters()
        self._frozen = contents.frozen()
        self._shared = contents.shared()
        self.values: dict[KeyPath, Any] = {}
        module = contents.first.inner(MODULE)
        names = []
        for name, value in module.values.items():
            if isinstance(value, TensorRef) and isinstance(name, str):
                names.append(name)
            else:
                self.values[MODULE, str(name)] = value
        for name in self.masters:
            if name not in module.values:
                raise module.error(f"holds no {shown(name)}, of which there is a master copy")
        places = classify([(MODULE, name) for name in names], where=where)
        live, masters = [], []
        for name, place in zip(names, places, strict=True):
            entry, master = self._entry(name, module.tensor(name), place)
            live.append(entry)
            masters += [] if master is None else [master]
        self.called = {name: place.name for name, place in zip(names, places, strict=True)}
        self.entries = (*live, *masters)
        self.aliases = self._aliases()

    def _entry(
        self, name: str, tensor: TensorRef, place: Membership
    ) -> tuple[TensorEntry, TensorEntry | None]:
        """Makes the live tensor of a name, and its master copy if that has another type."""
        entry = self._live(name, tensor, place)
        parameter = self.masters.get(self._shared.get(name, name))
        if parameter is None:
            return entry, None
        if parameter.shape != entry.shape:
            raise self._contents.first.error(
                f"{shown(name)} has shape {list(entry.shape)}, its master copy"
                f" {list(parameter.shape)}"
            )
        if parameter.dtype == entry.dtype:
            return entry, None
        key = Key(f"{_MASTERS}.{name}")
        master = replace(
            entry,
            key=key,
            key_path=(_MASTERS, name),
            tree=_MASTERS,
            part="other",
            dtype=parameter.dtype,
            chunks=chunks_of(self._table, parameter),
            rounded_from=None,
        )
        return replace(entry, master=Master(key, parameter.dtype)), master

    def _live(self, name: str, tensor: TensorRef, place: Membership) -> TensorEntry:
        """Makes the live tensor; in stage 3 one that is spread is stored as an empty one."""
        owner = self._shared.get(name, name)
        parameter = self._frozen.get(owner) or self.masters.get(owner)
        is_spread = self._contents.is_partitioned and parameter is not None
        entry = TensorEntry(
            key=Key(f"{MODULE}.{name}"),
            key_path=(MODULE, name),
            name=place.name,
            tree=place.tree,
            part=place.part,
            dtype=tensor.dtype,
            shape=tensor.shape,
            chunks=self._whole(tensor),
        )
        if not is_spread or parameter is None:
            if self._is_placeholder(name, tensor):
                raise IncompleteCheckpointError(
                    f"weight {shown(name)} is empty here, and no rank has a part of it",
                    where=self._contents.first.where,
                )
            return entry
        chunks = chunks_of(self._table, parameter)
        if owner in self._frozen or parameter.dtype == tensor.dtype:
            return replace(entry, dtype=parameter.dtype, shape=parameter.shape, chunks=chunks)
        return replace(entry, shape=parameter.shape, chunks=chunks, rounded_from=parameter.dtype)

    def _is_placeholder(self, name: str, tensor: TensorRef) -> bool:
        buffers = self._contents.first.sequence("buffer_names")
        return self._contents.is_partitioned and tensor.shape == (0,) and name not in buffers

    def _whole(self, tensor: TensorRef) -> ChunkTable:
        chunk = Chunk(
            Box((0,) * len(tensor.shape), tensor.shape),
            self._table.record(self._contents.models[0].archive, tensor),
            byte_offset=tensor.storage_offset * tensor.dtype.itemsize,
            strides=None if tensor.row_major else tensor.strides,
            rank=0,
        )
        return ChunkTable.of([chunk], len(tensor.shape))

    def _aliases(self) -> tuple[frozenset[Key], ...]:
        """Groups the names of tied weights; empty tensors are not told apart by DeepSpeed."""
        filled = {entry.key for entry in self.entries if entry.elements}
        groups: dict[Key, set[Key]] = defaultdict(set)
        for name, owner in self._shared.items():
            keys = Key(f"{MODULE}.{name}"), Key(f"{MODULE}.{owner}")
            if all(key in filled for key in keys):
                groups[keys[1]] |= {*keys}
        return tuple(frozenset(keys) for keys in groups.values())


def index_of(
    name: str, table: ArchiveTable, weights: Weights, states: States, run: RunFacts
) -> TensorIndex:
    """Makes the index of weights and of the states of their optimizer.

    Args:
        name: Of the format.
        table: The opened files.
        weights: The weights.
        states: What the optimizer keeps.
        run: What is known of the run.
    """
    return TensorIndex(
        format=name,
        files=tuple(table.files),
        tensors={entry.key: entry for entry in (*weights.entries, *states.entries)},
        records=RecordTable.of(table.records),
        values={**weights.values, **states.values},
        aliases=weights.aliases,
        run=run,
    )
