"""The reader of what each rank saved for itself: DTensors, ShardedTensors and plain tensors.

So save verl, accelerate with `use_dcp=False` or LOCAL_STATE_DICT, and everyone who calls
`torch.save(model.state_dict())` on every rank. No DTensor is built, so that any release of torch,
and none, will do.

Files of ranks that are recognised so that they can be refused by name: those without a model.

Optimizer states and extra states are read together with the weights that the same ranks wrote.

`fsdp_config.json`, which verl writes beside the files of ranks.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py (`FSDPConfig`).
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    Fqn,
    Key,
    KeyPath,
    Problem,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.optimizer_names import (
    NUMBERED,
    OPTIMIZER,
    names_of_states,
    renamed_path,
    renamed_values,
)
from ckptkit.formats.ranks.contents import (
    ACCELERATE,
    FAIRSEQ,
    VERL,
    Family,
    Kind,
    RankContents,
    RankReading,
    by_path,
    check_counters,
    check_names,
    check_ranks,
    families,
    told_sizes,
    without_slices,
)
from ckptkit.formats.ranks.fairscale import fairscale_shards
from ckptkit.formats.ranks.flat import SLICES, has_flat, with_layout_beside
from ckptkit.formats.ranks.tensors import (
    NOTE,
    Held,
    Placing,
    Spread,
    differing_ranks,
    is_of_optimizer,
    unproven_ranks,
    without_cut_states,
)
from ckptkit.formats.trees import Membership, classify
from ckptkit.storage.base import Source

_NAME = "fsdp_config.json"
_MAX_BYTES = 1 << 16


def with_verl_config(index: TensorIndex, source: Source, folder: str) -> TensorIndex:
    """Compares what was found with what verl says of the run, and adds what it tells besides.

    Args:
        index: Of the files of ranks.
        source: Where they lie.
        folder: Of the files.
    """
    path = posixpath.join(folder, _NAME)
    where = posixpath.join(source.location, path)
    try:
        file = source.stat(path)
    except MissingFileError:  # verl before 0.4 wrote none
        return index
    try:
        told = json.loads(source.read(path, 0, min(file.size_bytes, _MAX_BYTES)))
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON", where=where) from error
    size = told.get("world_size") if isinstance(told, dict) else None
    if size is not None and size != index.run.world_size:
        raise FormatError(
            f"tells of a run with {size!r} ranks, and the files are of {index.run.world_size}",
            where=where,
            hint="a save went into the folder of another one; take away the files of one",
        )
    version = told.get("FSDP_version") if isinstance(told, dict) else None
    known = f", FSDP{version}" if type(version) is int else ""
    run = replace(index.run, writer=f"verl{known}, one file a rank")
    return replace(index, files=(*index.files, file), run=run)


_UNDER: dict[Kind, KeyPath] = {
    "model": ("model",),
    "optimizer": ("optimizer",),
    "extra": (),
    "metadata": (),
}
# What each rank computes from its own data; frameworks save that of rank 0.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_EXTRA: KeyPath = ("extra_state",)
_NAMED = 3


class RankFilesReader:
    """Reads one `torch.save` file a rank."""

    name = "rank-files"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups files whose names end with a rank."""
        return [
            Candidate(
                self.name,
                family.folder,
                tuple(sorted(file.path for file in family.files)),
                f"{len(family.of('model'))} files named after ranks",
            )
            for family in families(paths)
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the pickles and directories of all ranks' files."""
        where = posixpath.join(source.location, candidate.folder)
        (family,) = families(candidate.files)
        check_names(family, where)
        reading = RankReading(source)
        read = {kind: _read(reading, family, kind) for kind in _UNDER}
        for contents in read.values():
            check_counters(contents)
        shards = fairscale_shards(read["model"], read["metadata"], where)
        if shards is not None:
            read["model"] = shards.contents
            index = RankAssembly(reading, family, read, where).index()
            return shards.unflattened(index, where)
        index = RankAssembly(reading, family, read, where).index()
        if family.writer == VERL:
            index = with_verl_config(index, source, family.folder)
        return with_layout_beside(index, source, family.folder) if has_flat(index) else index


def _read(reading: RankReading, family: Family, kind: Kind) -> list[RankContents]:
    under = _UNDER[kind] if family.writer in {VERL, ACCELERATE} or kind != "model" else ()
    return [reading.read(file, under) for file in family.of(kind)]


class RankAssembly:
    """Makes the index.

    Attributes:
        entries: Every tensor, by key.
        problems: What is wrong with single tensors.
        notes: What the user should know.
    """

    def __init__(
        self,
        reading: RankReading,
        family: Family,
        read: dict[Kind, list[RankContents]],
        where: str,
    ) -> None:
        self._reading = reading
        self._family = family
        self._read = read
        self._where = where
        self._placing = Placing(reading.source, reading.table)
        self.entries: dict[Key, TensorEntry] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._slices: dict[KeyPath, tuple[int, int]] = {}
        self._names: dict[int, Fqn] = {}  # of the parameters that the optimizer numbers

    def index(self) -> TensorIndex:
        """Returns the index."""
        weights, self._slices = without_slices(self._read["model"])
        contents = [*weights, *self._read["optimizer"]]
        spread = self._spread(by_path(contents))
        world_size = self._world_size(contents)
        check_ranks(self._family, world_size, self._where)
        self._add(spread)
        return TensorIndex(
            format=RankFilesReader.name,
            files=tuple(self._reading.table.files),
            records=RecordTable.of(self._reading.table.records),
            tensors=self.entries,
            values=renamed_values(self._values(), OPTIMIZER, self._names),
            aliases=_aliases(self.entries),
            run=self._facts(world_size),
            problems=tuple(self.problems),
        )

    def _spread(self, held: Mapping[KeyPath, Held]) -> dict[KeyPath, Spread]:
        """Places all tensors but the states of an optimizer that nobody could name."""
        kept, left = without_cut_states(held, lambda path: self._differs(path, held[path]))
        if left:
            self.notes.append(f"{left} {NOTE}")
        return {path: self._placing.place(path, one) for path, one in kept.items()}

    def _differs(self, path: KeyPath, held: Held) -> bool:
        spread = self._placing.place(path, held)
        return spread.is_plain and unproven_ranks(spread, self._checksums(spread)) is not None

    def _checksums(self, spread: Spread) -> list[int | None]:
        records = self._reading.table.records
        return [records[stored.chunk.record].crc32 for stored in spread.stored]

    def _world_size(self, contents: Sequence[RankContents]) -> int:
        """Returns how many ranks the run had, which all that tells it must agree on."""
        told = {size: one.archive.where for size, one in told_sizes(contents).items()}
        for file in self._family.files:
            if file.world_size is not None:
                told.setdefault(file.world_size, file.path)
        if len(told) > 1:
            named = " and ".join(map(str, sorted(told)))
            raise FormatError(
                f"the files are of runs with {named} ranks",
                where=self._where,
                hint="a save went into the folder of another one; take away the files of one",
            )
        reached = [mesh.highest_rank + 1 for _, mesh in self._placing.meshes.values()]
        least = max(reached, default=0) or 1 + max(file.rank for file in self._family.files)
        return next(iter(told), least)

    def _add(self, spread: dict[KeyPath, Spread]) -> None:
        """Adds every tensor, with what is wrong with it."""
        drifted: list[str] = []
        self._names, in_order = names_of_states(spread, self._values())
        if in_order:
            self.notes.append(f"the optimizer {NUMBERED}")
        named = {renamed_path(path, OPTIMIZER, self._names): one for path, one in spread.items()}
        # Beside parts that are marked as such, plain tensors are what all ranks have alike.
        is_marked = not all(one.is_plain for one in spread.values())
        places = classify(list(named), where=self._where)
        for (path, one), place in zip(named.items(), places, strict=True):
            entry = _entry(path, one, place)
            self.entries[entry.key] = entry
            ranks = differing_ranks(one, self._checksums(one))
            if ranks is None:
                unproven = None if is_marked else unproven_ranks(one, self._checksums(one))
                self.problems += [_unproven(entry, unproven)] if unproven else []
                continue
            if is_of_optimizer(path) and not one.shape:
                raise self._of_different_steps(path, ranks)
            if one.is_plain and str(path[-1]).rpartition(".")[2] in _STATISTICS:
                drifted.append(entry.name)
            else:
                self.problems.append(_differing(entry, one, ranks))
        if drifted:
            more = f" and {len(drifted) - _NAMED} more" if len(drifted) > _NAMED else ""
            listed = ", ".join(drifted[:_NAMED]) + more
            self.notes.append(f"statistics differ between ranks, rank 0's are taken: {listed}")

    def _of_different_steps(self, path: KeyPath, ranks: tuple[int, int]) -> FormatError:
        return FormatError(
            f"{'.'.join(map(str, path))!r} differs between ranks {ranks[0]} and {ranks[1]}, so that"
            " they are of different steps",
            where=self._where,
            hint="files of two saves lie together; take an earlier checkpoint",
        )

    def _values(self) -> dict[KeyPath, Any]:
        """Returns what is no tensor, as rank 0 has it."""
        values: dict[KeyPath, Any] = {}
        for kind, contents in self._read.items():
            under = _EXTRA if kind == "extra" else ()
            for one in contents[:1]:
                values |= {(*under, *path): value for path, value in one.values.items()}
        for path, (start, stop) in self._slices.items():
            values[*SLICES, str(path[-1])] = (start, stop)
        return values

    def _facts(self, world_size: int) -> RunFacts:
        """Returns what is known of the run."""
        meshes = [mesh for _, mesh in self._placing.meshes.values()]
        largest = max(meshes, key=lambda mesh: len(mesh.sizes), default=None)
        names = () if largest is None else largest.names or ("",) * len(largest.sizes)
        step = self._values().get(("step",), self._values().get(("global_step",)))
        return RunFacts(
            world_size=world_size,
            step=step if type(step) is int else None,
            writer=_WRITERS[self._family.writer],
            mesh=() if largest is None else tuple(zip(names, largest.sizes, strict=True)),
            notes=tuple(self.notes),
        )


_WRITERS = {
    VERL: "verl, one file a rank",
    ACCELERATE: "accelerate, one file a rank",
    FAIRSEQ: "fairseq, one file a rank",
    "": "torch.save on every rank",
}


def _entry(path: KeyPath, spread: Spread, place: Membership) -> TensorEntry:
    chunks = [stored.chunk for stored in spread.stored]
    return TensorEntry(
        key=Key(".".join(map(str, path))),
        key_path=path,
        name=place.name,
        tree=place.tree,
        part=place.part,
        dtype=spread.dtype,
        shape=spread.shape,
        # Every rank has the whole of a plain tensor; that of the first is enough.
        chunks=ChunkTable.of(chunks[:1] if spread.is_plain else chunks, len(spread.shape)),
    )


def _differing(entry: TensorEntry, spread: Spread, ranks: tuple[int, int]) -> Problem:
    kept = "as a plain tensor" if spread.is_plain else "of the same elements"
    return Problem(
        FormatError.code,
        entry.key,
        f"ranks {ranks[0]} and {ranks[1]} hold different values {kept}, so that they are no"
        " replicas; slices that are not marked as such are not modelled",
    )


def _unproven(entry: TensorEntry, ranks: tuple[int, int]) -> Problem:
    return Problem(
        FormatError.code,
        entry.key,
        f"nothing proves that ranks {ranks[0]} and {ranks[1]} hold the same plain tensor: they are"
        " different views, or have no checksums; if every rank has the whole of it, give the file"
        " of one rank, in a folder of its own",
    )


def _aliases(entries: dict[Key, TensorEntry]) -> tuple[frozenset[Key], ...]:
    """Groups the names under which the very same chunks are found."""
    groups: dict[tuple[Chunk, ...], set[Key]] = defaultdict(set)
    for key, entry in entries.items():
        if entry.elements and len(entry.chunks):
            groups[tuple(_hashable(entry.chunks))].add(key)
    return tuple(frozenset(keys) for keys in groups.values() if len(keys) > 1)


def _hashable(chunks: ChunkTable) -> Iterator[Chunk]:
    yield from (chunks[row] for row in range(len(chunks)))


_WITHOUT_WEIGHTS = re.compile(
    r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt|optimizer(_\d+)?_rank\d+\.bin"
)


class ForeignReader:
    """Recognises what ranks wrote beside their weights, where the weights are not there."""

    name = "foreign"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups such files by folder."""
        folders: dict[str, list[str]] = {}
        for path in paths:
            if _WITHOUT_WEIGHTS.fullmatch(posixpath.basename(path)):
                folders.setdefault(posixpath.dirname(path), []).append(path)
        reason = "optimizer states and extra states of ranks, without their weights"
        return [
            Candidate(self.name, folder, tuple(sorted(files)), reason)
            for folder, files in sorted(folders.items())
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Refuses."""
        raise UnsupportedError(
            f"holds {candidate.reason}",
            where=posixpath.join(source.location, candidate.folder),
            hint="copy the ranks' files of weights beside them, such as"
            " 'model_world_size_2_rank_0.pt' or 'pytorch_model_fsdp_0_rank0.bin'",
        )
