"""The reader of files that each rank saved: DTensors, ShardedTensors and plain tensors.

verl, accelerate with `use_dcp=False` or LOCAL_STATE_DICT, and every program that calls
`torch.save(model.state_dict())` on all ranks write such files. No DTensor is built, so files of any
release of torch can be read without torch. Optimizer states and extra states are read together with
the weights of the same ranks; without the weights such files are refused by name.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py (`FSDPConfig`) for `fsdp_config.json`,
which verl writes next to the files of ranks.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    Key,
    KeyPath,
    Problem,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.parsing import (
    MIXED_SAVES,
    TWO_SAVES,
    group_by_folder,
    list_first,
    refuse_mixed_sizes,
    stat_or_missing,
)
from ckptkit.formats.pickle.objects import describe_objects, is_holder, is_object
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.ranks.fairscale import find_fairscale_shards
from ckptkit.formats.ranks.flat import (
    SLICES,
    apply_layout_file,
    find_flat_parameters,
)
from ckptkit.formats.ranks.rank_files import (
    ACCELERATE,
    FAIRSEQ,
    VERL,
    Kind,
    RankContents,
    RankFileLoader,
    RankFileSet,
    RankParts,
    RankTensor,
    check_counters,
    check_names,
    check_ranks,
    group_rank_files,
    split_off_slices,
)
from ckptkit.formats.ranks.rank_tensors import (
    UNASSIGNED_STATES,
    AssembledTensor,
    TensorAssembler,
    drop_cut_states,
    find_differing_ranks,
    find_unproven_ranks,
    is_of_optimizer,
)
from ckptkit.formats.ranks.sharded_values import DTensorRef, ShardedTensorRef
from ckptkit.formats.trees import (
    EXTRA_STATE,
    classify,
    detect_framework,
    is_name_of_weight,
    join_path,
)
from ckptkit.storage.base import Source

_VERL_CONFIG = "fsdp_config.json"
_MAX_CONFIG_BYTES = 1 << 16
_PREFIXES: dict[Kind, KeyPath] = {
    "model": ("model",),
    "optimizer": ("optimizer",),
    "extra": (),
    "metadata": (),
}
# Every rank computes these from its own data; frameworks save those of rank 0.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_EXTRA: KeyPath = ("extra_state",)
_TENSORS = (TensorRef, DTensorRef, ShardedTensorRef)
_LISTED_NAMES = 3
_WRITERS = {
    VERL: "verl, one file a rank",
    ACCELERATE: "accelerate, one file a rank",
    FAIRSEQ: "fairseq, one file a rank",
    "": "torch.save on every rank",
}


class RankFilesReader(FormatReader):
    """Reads one `torch.save` file per rank."""

    name = "rank-files"
    order = 60  # before readers that would take a rank's file for a model
    expected = "'model_world_size_2_rank_0.pt', 'pytorch_model_fsdp_0_rank0.bin' or 'rank_0.pt'"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups files whose names end with a rank."""
        return [
            Candidate(
                self.name,
                files.folder,
                tuple(sorted(file.path for file in files.files)),
                f"{len(files.of('model'))} files named after ranks",
            )
            for files in group_rank_files(paths)
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        where = posixpath.join(source.location, candidate.folder)
        (files,) = group_rank_files(candidate.files)
        check_names(files, where)
        loader = RankFileLoader(source)
        contents: dict[Kind, list[RankContents]] = {}
        for kind, prefix in _PREFIXES.items():
            has_prefix = files.writer in {VERL, ACCELERATE} or kind != "model"
            under = prefix if has_prefix else ()
            contents[kind] = [loader.load(file, under) for file in files.of(kind)]
            if kind == "model" and under and have_state_dicts(contents[kind]):
                files = replace(files, writer="")
                contents[kind] = [drop_first_key(held) for held in contents[kind]]
        for of_kind in contents.values():
            check_counters(of_kind)
        shards = find_fairscale_shards(contents["model"], contents["metadata"], where)
        if shards is not None:
            contents["model"] = shards.contents
            return shards.unflatten(RankAssembly(loader, files, contents, where).index(), where)
        index = RankAssembly(loader, files, contents, where).index()
        if files.writer == VERL:
            index = _check_verl_config(index, source, files.folder)
        if find_flat_parameters(index):
            index = apply_layout_file(index, source, files.folder)
        return index


def have_state_dicts(contents: Sequence[RankContents]) -> bool:
    """Returns whether files below `model` have state dicts: `{"model": ..., "optimizer": ...}`.

    A loop may give its own dictionary a name by which a framework writes the weights alone.
    """
    paths = [path[1:] for held in contents for path in held.tensors]
    paths = [path for path in paths if path and not str(path[0]).endswith(EXTRA_STATE)]
    is_bare = any(len(path) == 1 and is_name_of_weight(str(path[0])) for path in paths)
    return not is_bare and any(len(path) > 1 for path in paths)


def drop_first_key(held: RankContents) -> RankContents:
    """Returns contents whose paths begin with the second key, where files have state dicts."""
    return replace(
        held,
        tensors={path[1:]: value for path, value in held.tensors.items()},
        values={path[1:]: value for path, value in held.values.items()},
    )


def _check_verl_config(index: TensorIndex, source: Source, folder: str) -> TensorIndex:
    """Compares an index with verl's configuration, and adds the version of FSDP."""
    path = posixpath.join(folder, _VERL_CONFIG)
    where = posixpath.join(source.location, path)
    file = stat_or_missing(source, path)
    if file.size_bytes < 0:  # verl before 0.4 wrote none
        return index
    try:
        config = json.loads(source.read(path, 0, min(file.size_bytes, _MAX_CONFIG_BYTES)))
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON", where=where) from error
    config = config if isinstance(config, dict) else {}
    size = config.get("world_size")
    if size is not None and size != index.run.world_size:
        raise FormatError(
            f"is of a run with {size!r} ranks, and the files are of {index.run.world_size}",
            where=where,
            hint=MIXED_SAVES,
        )
    version = config.get("FSDP_version")
    fsdp = f", FSDP{version}" if type(version) is int else ""
    run = replace(index.run, writer=f"verl{fsdp}, one file a rank")
    return replace(index, files=(*index.files, file), run=run)


class RankAssembly:
    """Makes the index of the contents of ranks' files."""

    def __init__(
        self,
        loader: RankFileLoader,
        files: RankFileSet,
        contents: dict[Kind, list[RankContents]],
        where: str,
    ) -> None:
        self._records = loader.table
        self._files = files
        self._contents = contents
        self._where = where
        self._assembler = TensorAssembler(loader.source, loader.table)
        self.entries: dict[Key, TensorEntry] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._slices: dict[KeyPath, tuple[int, int]] = {}

    def index(self) -> TensorIndex:
        weights, self._slices = split_off_slices(self._contents["model"])
        contents = [*weights, *self._contents["optimizer"]]
        parts: dict[KeyPath, list[tuple[RankContents, RankTensor]]] = defaultdict(list)
        for held in contents:
            for path, tensor in held.tensors.items():
                parts[path].append((held, tensor))
        kept, dropped = drop_cut_states(parts, lambda path: self._differ(path, parts[path]))
        if dropped:  # states of an optimizer that cannot be named
            self.notes.append(f"{dropped} {UNASSIGNED_STATES}")
        tensors = {path: self._assembler.assemble(path, own) for path, own in kept.items()}
        world_size = self._world_size(contents)
        check_ranks(self._files, world_size, self._where)
        self._add(tensors)
        identical: dict[tuple[Chunk, ...], set[Key]] = defaultdict(set)  # by their chunks
        for key, entry in self.entries.items():
            if entry.elements and len(entry.chunks):
                identical[tuple(entry.chunks[:])].add(key)
        return TensorIndex(
            format=RankFilesReader.name,
            files=tuple(self._records.files),
            records=RecordTable.of(self._records.records),
            tensors=self.entries,
            values=self._values(),
            aliases=tuple(frozenset(keys) for keys in identical.values() if len(keys) > 1),
            run=self._facts(world_size),
            problems=tuple(self.problems),
        )

    def _differ(self, path: KeyPath, parts: RankParts) -> bool:
        tensor = self._assembler.assemble(path, parts)
        return tensor.is_plain and find_unproven_ranks(tensor, self._checksums(tensor)) is not None

    def _checksums(self, tensor: AssembledTensor) -> list[int | None]:
        return [self._records.records[stored.chunk.record].crc32 for stored in tensor.stored]

    def _world_size(self, contents: Sequence[RankContents]) -> int:
        """Returns the number of ranks of the run; all sources of it have to agree."""
        sizes: set[int] = set()
        for held in contents:
            for tensor in held.tensors.values():
                if not isinstance(tensor, ShardedTensorRef):
                    continue
                if tensor.rank != held.file.rank:
                    raise FormatError(
                        f"file is named after rank {held.file.rank}, and was written by rank"
                        f" {tensor.rank}",
                        where=held.archive.where,
                        hint="give the files of all ranks the names that they were saved under",
                    )
                sizes.add(tensor.world_size)
        sizes |= {file.world_size for file in self._files.files if file.world_size is not None}
        refuse_mixed_sizes(sizes, self._where)
        reached = [mesh.highest_rank + 1 for _, mesh in self._assembler.meshes.values()]
        least = max(reached, default=0) or 1 + max(file.rank for file in self._files.files)
        return next(iter(sizes), least)

    def _add(self, tensors: dict[KeyPath, AssembledTensor]) -> None:
        """Adds every tensor, and its problems."""
        drifted: list[str] = []
        # Next to tensors that are marked as distributed, plain tensors are equal on all ranks.
        is_marked = not all(tensor.is_plain for tensor in tensors.values())
        memberships = classify(list(tensors), where=self._where, values=self._values())
        for (path, tensor), membership in zip(tensors.items(), memberships, strict=True):
            chunks = [stored.chunk for stored in tensor.stored]
            # Every rank has the whole of a plain tensor; that of the first is enough.
            table = ChunkTable.of(chunks[:1] if tensor.is_plain else chunks, len(tensor.shape))
            entry = membership.entry(path, tensor.dtype, tensor.shape, table)
            self.entries[entry.key] = entry
            checksums = self._checksums(tensor)
            ranks = find_differing_ranks(tensor, checksums)
            if ranks is None:
                unproven = None if is_marked else find_unproven_ranks(tensor, checksums)
                self.problems += [_unproven(entry, unproven)] if unproven else []
            elif is_of_optimizer(path) and not tensor.shape:
                raise FormatError(
                    f"{join_path(path)!r} differs between ranks {ranks[0]} and {ranks[1]}, so that"
                    " they are of different steps",
                    where=self._where,
                    hint=TWO_SAVES,
                )
            elif tensor.is_plain and str(path[-1]).rpartition(".")[2] in _STATISTICS:
                drifted.append(entry.name)
            else:
                self.problems.append(_differing(entry, tensor, ranks))
        if drifted:
            names = list_first(drifted, len(drifted), _LISTED_NAMES)
            self.notes.append(f"statistics differ between ranks, rank 0's are taken: {names}")

    def _values(self) -> dict[KeyPath, Any]:
        """Returns all values that are not tensors, from rank 0."""
        values: dict[KeyPath, Any] = {}
        for kind, contents in self._contents.items():
            prefix = _EXTRA if kind == "extra" else ()
            for held in contents[:1]:
                values |= {(*prefix, *path): value for path, value in held.values.items()}
        for path, (start, stop) in self._slices.items():
            values[*SLICES, str(path[-1])] = (start, stop)
        return values

    def _facts(self, world_size: int) -> RunFacts:
        meshes = [mesh for _, mesh in self._assembler.meshes.values()]
        largest = max(meshes, key=lambda mesh: len(mesh.sizes), default=None)
        names = () if largest is None else largest.names or ("",) * len(largest.sizes)
        is_loop = not self._files.writer  # a loop's own dictionary, the same on all ranks
        root = self._contents["model"][0].archive.root if is_loop else None
        framework = detect_framework(root)
        values = self._values()
        step = values.get(("step",), values.get(("global_step",)))
        return RunFacts(
            world_size=world_size,
            step=step if type(step) is int else framework.step,
            writer=framework.name or _WRITERS[self._files.writer],
            version=framework.version,
            mesh=() if largest is None else tuple(zip(names, largest.sizes, strict=True)),
            notes=tuple(self.notes),
            warnings=describe_objects(
                {p: v for p, v in values.items() if is_object(v) or is_holder(v, _TENSORS)}
            ),
        )


def _differing(entry: TensorEntry, tensor: AssembledTensor, ranks: tuple[int, int]) -> Problem:
    what = "as a plain tensor" if tensor.is_plain else "of the same elements"
    return Problem(
        FormatError.code,
        entry.key,
        f"ranks {ranks[0]} and {ranks[1]} hold different values {what}, so that they are no"
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


_WITHOUT_WEIGHTS = re.compile(
    r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt|optimizer(_\d+)?_rank\d+\.bin"
)


class ForeignReader(FormatReader):
    """Recognises and refuses files that ranks wrote next to their weights, without the weights."""

    name = "foreign"
    order = 70  # its files are kept from the others, which would misread them

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups such files by folder."""
        own = [path for path in paths if _WITHOUT_WEIGHTS.fullmatch(posixpath.basename(path))]
        reason = "optimizer states and extra states of ranks, without their weights"
        return [
            Candidate(self.name, folder, tuple(files), reason)
            for folder, files in group_by_folder(own).items()
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Raises an error that names the missing files."""
        raise UnsupportedError(
            f"holds {candidate.reason}",
            where=posixpath.join(source.location, candidate.folder),
            hint="copy the ranks' files of weights beside them, such as"
            " 'model_world_size_2_rank_0.pt' or 'pytorch_model_fsdp_0_rank0.bin'",
        )
