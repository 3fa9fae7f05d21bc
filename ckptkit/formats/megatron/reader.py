"""The reader of `--ckpt-format torch` of Megatron-LM: a file for each rank of the model.

Tensors get the names that they have in `torch_dist`, with a number for each layer and each expert.
Optimizer states are numbered on each rank, or are in the files of the distributed optimizer, and
are left alone.

Source: megatron/training/checkpointing.py (`generate_state_dict`), Megatron-LM; see the other
modules of this folder.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.geometry import is_row_major
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Key,
    Problem,
    RecordTable,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.text import quote
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.dcp.megatron import compare_iterations, read_common
from ckptkit.formats.megatron.global_names import LocalTensor, collect_tensors
from ckptkit.formats.megatron.model_files import ModelFiles, open_files
from ckptkit.formats.megatron.split_axes import Cut, find_cut, has_whole_rows, is_gated
from ckptkit.formats.parsing import TWO_SAVES
from ckptkit.formats.pickle.torch_archives import ArchiveTable
from ckptkit.formats.pickle.torch_copies import StoredTensor, find_differing_copies
from ckptkit.formats.trees import classify, describe_objects_in
from ckptkit.storage.base import Source

FILE = "model_optim_rng.pt"
_LONG = r"\d{3}|[1-9]\d{3,6}"
_PATH = re.compile(
    r"(?:(?P<step>.*?)/)??"
    rf"(?:mp_rank_(?P<a>\d{{2}}|[1-9]\d{{2,6}})(?:_(?P<b>{_LONG}))?(?:_(?P<c>{_LONG}))?/)?"
    rf"{re.escape(FILE)}"
)
_NUMBERS = ("a", "b", "c")  # of tensor parallelism, and of a stage or experts, or both
_LEAST_DIMENSIONS = {"columns": 2, "rows": 1, "halves of rows": 1, "whole": 0, "rows or whole": 2}
_ROTARY = "qk_pos_emb_head_dim"


class MegatronReader(FormatReader):
    """Reads `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`."""

    name = "megatron"
    order = 30
    expected = "'mp_rank_00/model_optim_rng.pt'"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups the files by the folder of their step; one that is alone is recognised too."""
        steps: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            match = _PATH.fullmatch(path) if path.endswith(FILE) else None
            if match is not None:
                steps[match["step"] or ""].append(path)
        return [
            Candidate(self.name, step, tuple(sorted(files)), f"{len(files)} files {FILE!r}")
            for step, files in sorted(steps.items())
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        where = posixpath.join(source.location, candidate.folder)
        table = ArchiveTable()
        matches = {path: _PATH.fullmatch(path) for path in candidate.files}
        numbers = {
            path: [int(match[kind]) for kind in _NUMBERS if match[kind] is not None]
            for path, match in matches.items()
            if match is not None
        }
        files = open_files(table, source, numbers, where)
        tensors, ignored = collect_tensors(files, where)
        assembly = _Assembly(source, table, files, where)
        for name, local in sorted(tensors.items()):
            assembly.add(name, local)
        notes = ["optimizer states and random states were left alone"]
        if ignored:
            notes.append(f"objects '_extra_state' were ignored, they hold no weights: {ignored:,}")
        return assembly.index(self.name, notes)


class _Assembly(Struct):
    """Makes the entries of tensors whose parts are in the files of ranks."""

    source: Source
    table: ArchiveTable
    files: ModelFiles
    where: str
    pieces: dict[str, tuple[LocalTensor, Shape, list[Chunk]]] = field(default_factory=dict)
    replicas: list[tuple[str, LocalTensor, LocalTensor]] = field(default_factory=list)

    def add(self, name: str, tensors: Sequence[LocalTensor]) -> None:
        """Adds a tensor.

        Args:
            name: Its name in the whole model.
            tensors: What the ranks have of it.
        """
        first = tensors[0]
        for local in tensors:
            same = first.tensor.dtype, first.tensor.shape
            if (local.tensor.dtype, local.tensor.shape) != same:
                raise FormatError(
                    f"{quote(local.name)} is {local.tensor.dtype.name}"
                    f" {list(local.tensor.shape)} here, and {first.tensor.dtype.name}"
                    f" {list(first.tensor.shape)} in {first.file.archive.path!r}",
                    where=local.file.archive.where,
                    hint=TWO_SAVES,
                )
        cut = self._find_cut(first)
        by_part: dict[int, LocalTensor] = {}
        for local in tensors:
            kept = by_part.setdefault(0 if cut == "whole" else local.part, local)
            if kept is not local:
                self.replicas.append((name, kept, local))
        shape = first.tensor.shape
        if cut != "whole":
            axis = 1 if cut == "columns" else 0
            shape = (*shape[:axis], shape[axis] * first.parts, *shape[axis + 1 :])
        chunks = [chunk for local in by_part.values() for chunk in self._chunks(local, cut, shape)]
        self.pieces[name] = first, shape, chunks

    def _find_cut(self, local: LocalTensor) -> Cut:
        """Returns how a tensor is cut, of two ways the one that its shape shows."""
        cut = find_cut(local.name)
        if local.parts == 1:
            return "whole"
        where = local.file.archive.where
        if cut == "rows or whole":
            rotary = self.files.arguments.get(_ROTARY)
            rotary = rotary if type(rotary) is int else None
            is_whole = has_whole_rows(
                local.name, local.neighbours, local.parts, rotary, where=where
            )
            cut = "whole" if is_whole else "rows"
        if cut == "halves of rows" and not is_gated(local.name, local.neighbours, where=where):
            cut = "rows"
        dimensions = len(local.tensor.shape)
        if cut is None or dimensions < _LEAST_DIMENSIONS[cut]:
            raise UnsupportedError(
                f"nothing shows how {quote(local.name)} with {dimensions} dimensions is cut over"
                f" {local.parts} ranks of tensor parallelism",
                where=where,
                hint="save the run in the format 'torch_dist', which stores it",
            )
        return cut

    def _chunks(self, local: LocalTensor, cut: Cut, shape: Shape) -> Iterator[Chunk]:
        own = local.tensor.shape
        zeros = (0,) * len(own)
        if cut == "whole":
            yield self._chunk(local, Box(zeros, own))
        elif cut == "halves of rows":
            rows = own[0] // 2
            for half in range(2):
                offset = half * shape[0] // 2 + local.part * rows
                box = Box((offset, *zeros[1:]), (rows, *own[1:]))
                yield self._chunk(local, box, first_row=half * rows)
        else:
            axis = 1 if cut == "columns" else 0
            offsets = (*zeros[:axis], local.part * own[axis], *zeros[axis + 1 :])
            yield self._chunk(local, Box(offsets, own))

    def _chunk(self, local: LocalTensor, box: Box, first_row: int = 0) -> Chunk:
        tensor, archive = local.tensor, local.file.archive
        skipped = tensor.storage_offset + (first_row * tensor.strides[0] if first_row else 0)
        return Chunk(
            box,
            self.table.record(archive, tensor),
            byte_offset=skipped * tensor.dtype.itemsize,
            strides=None if is_row_major(box.sizes, tensor.strides) else tensor.strides,
            rank=archive.number,
        )

    def index(self, format_name: str, notes: Sequence[str]) -> TensorIndex:
        memberships = classify([(name,) for name in self.pieces], where=self.where)
        entries: dict[Key, TensorEntry] = {}
        for (name, piece), membership in zip(self.pieces.items(), memberships, strict=True):
            first, shape, chunks = piece
            table = ChunkTable.of(chunks, len(shape))
            entry = membership.entry((name,), first.tensor.dtype, shape, table)
            entries[entry.key] = entry
        problems, unread = self._compare()
        more = [f"{unread:,} copies on other ranks were not compared"] if unread else []
        run = self._facts((*notes, *more))
        return TensorIndex(
            format=format_name,
            files=tuple(self.table.files),
            records=RecordTable.of(self.table.records),
            tensors=entries,
            run=run,
            problems=(*problems, *compare_iterations(run.step, self.where, FILE)),
        )

    def _facts(self, notes: tuple[str, ...]) -> RunFacts:
        common = read_common(self.files.files[0].root)
        sizes = self.files.parallelism
        known = {"tensor": sizes.tensor, "pipeline": sizes.pipeline, "expert": sizes.expert}
        return RunFacts(
            world_size=common.world_size,
            step=common.step,
            writer=", ".join(filter(None, [common.framework, "Megatron-LM, one file a rank"])),
            mesh=tuple({**known, **(common.sizes or {})}.items()),
            notes=notes,
            warnings=describe_objects_in(self.files.files[0].archive),
            settings=common.settings,
        )

    def _compare(self) -> tuple[list[Problem], int]:
        """Compares copies of tensors that several ranks have.

        Returns:
            The problems, and how many copies were not compared.
        """
        pairs = [
            (
                StoredTensor(kept.file.archive, kept.tensor),
                StoredTensor(other.file.archive, other.tensor),
            )
            for _, kept, other in self.replicas
        ]
        differing, unread = find_differing_copies(self.source, self.table, pairs)
        problems: dict[str, Problem] = {}
        for position in differing:
            name, kept, other = self.replicas[position]
            problems.setdefault(name, _differing(name, kept, other))
        return list(problems.values()), unread


def _differing(name: str, kept: LocalTensor, other: LocalTensor) -> Problem:
    return Problem(
        FormatError.code,
        name,
        f"{kept.file.archive.path!r} and {other.file.archive.path!r} hold different values of"
        f" {quote(kept.name)}{'' if kept.name == other.name else f' and {quote(other.name)}'},"
        " which ranks have as copies: files of two saves are in one folder, or training let them"
        " drift apart",
    )
