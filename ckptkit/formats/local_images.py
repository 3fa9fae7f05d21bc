"""Local tensors in a safetensors file of each rank, placed by what `metadata.pkl` says of them."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptkit.core.errors import FormatError, MissingFileError
from ckptkit.core.geometry import flat_offset, row_major_strides
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    FileRef,
    Key,
    KeyPath,
    Record,
    TensorEntry,
)
from ckptkit.formats.dtensor_places import LocalPart, local_part
from ckptkit.formats.pickles import shown
from ckptkit.formats.safetensors import StoredTensor, read_header
from ckptkit.formats.spread_metadata import Spreading, SpreadItem
from ckptkit.formats.trees import classify
from ckptkit.storage.base import Source


@dataclass(frozen=True, slots=True)
class _Local:
    """A tensor of one file, and the position of that file."""

    file: int
    stored: StoredTensor


class LocalImages:
    """Collects the tensors of such files.

    Attributes:
        where: The checkpoint, for messages.
        files: Those that were opened.
        records: One for each local tensor.
        entries: The whole tensors, by key.
    """

    def __init__(self, source: Source, where: str) -> None:
        self._source = source
        self.where = where
        self.files: list[FileRef] = []
        self.records: list[Record] = []
        self.entries: dict[Key, TensorEntry] = {}

    def add(self, item: str, spread: SpreadItem, by_rank: Mapping[int, str]) -> None:
        """Adds the tensors of an item of the state.

        Raises:
            MissingFileError: If the file of a rank is not there.
            FormatError: If files hold other tensors than the metadata tells, or of other shapes.
        """
        held = {rank: self._opened(rank, path) for rank, path in sorted(by_rank.items())}
        names = {".".join(map(str, path)): path for path in spread.tensors}
        for rank, tensors in held.items():
            odd = next((name for name in tensors if name not in names), None)
            if odd is not None:
                raise FormatError(
                    f"{posixpath.basename(by_rank[rank])!r} holds {shown(odd)}, of which the"
                    " metadata tells nothing",
                    where=self.where,
                )
        paths: list[KeyPath] = [(item, *path) for path in names.values()]
        places = classify(paths, where=self.where)
        for (name, path), place in zip(names.items(), places, strict=True):
            spreading = spread.tensors[path]
            chunks = list(self._chunks(name, spreading, held))
            entry = TensorEntry(
                key=Key(f"{item}.{name}"),
                key_path=(item, *path),
                name=place.name,
                tree=place.tree,
                part=place.part,
                dtype=held[spreading.ranks[0]][name].stored.dtype,
                shape=spreading.shape,
                chunks=ChunkTable.of(chunks, len(spreading.shape)),
            )
            self.entries[entry.key] = entry

    def _opened(self, rank: int, path: str) -> Mapping[str, _Local]:
        try:
            file = self._source.stat(path)
        except MissingFileError:
            raise MissingFileError(
                f"{posixpath.basename(path)!r}, the file of rank {rank}, is not there",
                where=self.where,
                hint="copy the file back, name where other nodes keep theirs with --also, or take"
                " an earlier checkpoint",
            ) from None
        self.files.append(file)
        header = read_header(self._source, file)
        return {t.name: _Local(len(self.files) - 1, t) for t in header.tensors}

    def _chunks(
        self, name: str, spreading: Spreading, held: Mapping[int, Mapping[str, _Local]]
    ) -> Iterator[Chunk]:
        """Yields the blocks that ranks have of a tensor."""
        absent = next((rank for rank in spreading.ranks if name not in held.get(rank, {})), None)
        if absent is not None:
            raise FormatError(f"rank {absent} has no part of {shown(name)}", where=self.where)
        local = {rank: held[rank][name] for rank in spreading.ranks}
        if len({one.stored.dtype for one in local.values()}) > 1:
            raise FormatError(f"ranks have {shown(name)} in several types", where=self.where)
        for rank, part in self._parts(name, spreading, local).items():
            one = local[rank]
            strides = row_major_strides(part.shape)
            if 0 in part.shape:
                continue
            self.records.append(Record(one.file, one.stored.start, one.stored.stop))
            for piece in part.pieces:
                yield Chunk(
                    piece.box,
                    len(self.records) - 1,
                    byte_offset=flat_offset(piece.local, strides) * one.stored.dtype.itemsize,
                    strides=None if piece.box.sizes == part.shape else strides,
                    rank=rank,
                )

    def _parts(
        self, name: str, spreading: Spreading, local: Mapping[int, _Local]
    ) -> Mapping[int, LocalPart]:
        """Returns what each rank has; splits were made in the order that fits the sizes."""
        meshes = spreading.seen_from_ranks()
        for inner_first in (True, False):
            found = {
                rank: local_part(
                    spreading.shape, mesh, spreading.placements, inner_first=inner_first
                )
                for rank, mesh in meshes.items()
            }
            fitting = {
                rank: part
                for rank, part in found.items()
                if part is not None and _fits(local[rank].stored, part)
            }
            if len(fitting) == len(found):
                return fitting
        raise FormatError(
            f"{shown(name)} of shape {list(spreading.shape)} has parts of other shapes than its"
            " placements give: sizes do not add up",
            where=self.where,
        )


def _fits(stored: StoredTensor, part: LocalPart) -> bool:
    # Of a part without elements, releases of torch differ in which dimension they call empty.
    return stored.shape == part.shape or (0 in stored.shape and 0 in part.shape)
