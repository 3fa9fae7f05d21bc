"""The reader of DeepSpeed's ZeRO checkpoints, stages 1 to 3, and of its checkpoints without ZeRO.

The live weights are served as the model: up to stage 2 they are stored whole, in stage 3 they are
rounded from the optimizer's master copy, as DeepSpeed does after each step. The master copies are
served beside them, so that casts can be made from those.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import IncompleteCheckpointError
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Key,
    KeyPath,
    Master,
    RecordTable,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.pickles import shown
from ckptkit.formats.torch_archives import ArchiveTable
from ckptkit.formats.torch_values import TensorRef
from ckptkit.formats.trees import Membership, classify
from ckptkit.formats.zero_files import not_modelled, open_zero_file, parse_name
from ckptkit.formats.zero_layout import Parameter
from ckptkit.formats.zero_ranks import MODULE, Contents, checked_names
from ckptkit.storage.base import Source

_MASTERS = "fp32"  # the state dict of the master copies


class ZeroReader:
    """Reads what DeepSpeed's `save_checkpoint` writes into the folder of a tag."""

    name = "zero"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups the files by folder, along with those that are only refused."""
        folders: dict[str, list[str]] = defaultdict(list)
        odd: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            other = not_modelled(path)
            if other is not None:
                odd[other[0]].append(path)
            elif parse_name(path) is not None:
                folders[posixpath.dirname(path)].append(path)
        return [
            Candidate(
                self.name,
                folder,
                tuple(sorted(folders[folder] + odd[folder])),
                f"{len(folders[folder])} files named as DeepSpeed names those of its ranks",
            )
            for folder in sorted({*folders, *odd})
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the pickles and directories of all ranks' files.

        Raises:
            MissingFileError: If the file of a rank is not there.
            UnsupportedError: If a part of the model is stored in a way that is not modelled.
            UnsafePickleError: If a pickle names something outside the allow-list.
            InputError: If a file is damaged, or the files contradict each other.
        """
        where = posixpath.join(source.location, candidate.folder)
        names = checked_names(candidate.files, where)
        table = ArchiveTable()
        models = [open_zero_file(table, source, name) for name in names["model"]]
        ranks = [open_zero_file(table, source, name) for name in names["optim"]]
        contents = Contents(models, ranks, where)
        contents.check()
        maker = _EntryMaker(table, contents, where)
        return TensorIndex(
            format=self.name,
            files=tuple(table.files),
            tensors=maker.entries,
            records=RecordTable.of(table.records),
            values=maker.values,
            aliases=maker.aliases,
            run=contents.facts(),
        )


class _EntryMaker:
    """Makes the tensors of the index.

    Attributes:
        entries: Every tensor, by key.
        values: What stands among the weights and is no tensor.
        aliases: Groups of keys that share one storage.
    """

    def __init__(self, table: ArchiveTable, contents: Contents, where: str) -> None:
        self._table = table
        self._contents = contents
        self._masters = contents.masters()
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
        for name in self._masters:
            if name not in module.values:
                raise module.error(f"holds no {shown(name)}, of which there is a master copy")
        places = classify([(MODULE, name) for name in names], where=where)
        live, masters = [], []
        for name, place in zip(names, places, strict=True):
            entry, master = self._entry(name, module.tensor(name), place)
            live.append(entry)
            masters += [] if master is None else [master]
        self.entries = {entry.key: entry for entry in (*live, *masters)}
        self.aliases = self._aliases()

    def _entry(
        self, name: str, tensor: TensorRef, place: Membership
    ) -> tuple[TensorEntry, TensorEntry | None]:
        """Makes the live tensor of a name, and its master copy if that has another type."""
        entry = self._live(name, tensor, place)
        parameter = self._masters.get(self._shared.get(name, name))
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
            chunks=self._chunks(parameter),
            rounded_from=None,
        )
        return replace(entry, master=Master(key, parameter.dtype)), master

    def _live(self, name: str, tensor: TensorRef, place: Membership) -> TensorEntry:
        """Makes the live tensor; in stage 3 one that is spread is stored as an empty one."""
        owner = self._shared.get(name, name)
        parameter = self._frozen.get(owner) or self._masters.get(owner)
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
        chunks = self._chunks(parameter)
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

    def _chunks(self, parameter: Parameter) -> ChunkTable:
        chunks = [
            Chunk(
                Span(run.start, run.start + run.count),
                self._table.record(run.file.archive, run.tensor),
                byte_offset=(run.tensor.storage_offset + run.first) * parameter.dtype.itemsize,
                rank=run.file.name.rank,
            )
            for run in parameter.runs
        ]
        return ChunkTable.of(chunks, len(parameter.shape))

    def _aliases(self) -> tuple[frozenset[Key], ...]:
        """Groups the names of tied weights; empty tensors are not told apart by DeepSpeed."""
        groups: dict[Key, set[Key]] = defaultdict(set)
        for name, owner in self._shared.items():
            keys = Key(f"{MODULE}.{name}"), Key(f"{MODULE}.{owner}")
            if all(key in self.entries and self.entries[key].elements for key in keys):
                groups[keys[1]] |= {*keys}
        return tuple(frozenset(keys) for keys in groups.values())
