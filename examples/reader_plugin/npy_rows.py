"""Teaches ckptkit a format: each rank's rows of each tensor in a file `NAME.RANK-of-RANKS.npy`."""

import io
import re
from collections import defaultdict
from collections.abc import Sequence

from numpy.lib import format as npy

from ckptkit import readers as ck

_PIECE = re.compile(r"(?:(.*)/)?([^/]+)\.(\d{1,6})-of-(\d{1,6})\.npy")
_HEADER_BYTES = 4096  # more than any real header has
_Rows = tuple[int, ck.DType, ck.Shape]  # the position of the record, and what it holds


class NpyRowsReader:
    """Reads headers; ckptkit itself reads the tensors, straight into the output."""

    name = "npy-rows"

    def find(self, paths: Sequence[str]) -> list[ck.Candidate]:
        """Recognises files by their names alone; those of one folder are one checkpoint."""
        folders = defaultdict(list)
        for match in filter(None, map(_PIECE.fullmatch, paths)):
            folders[match[1] or ""].append(match[0])
        return [
            ck.Candidate(self.name, folder, tuple(sorted(files)), f"{len(files)} '.npy' files")
            for folder, files in folders.items()
        ]

    def read_index(self, source: ck.Source, candidate: ck.Candidate) -> ck.TensorIndex:
        """Says of every tensor which bytes of which files it consists of."""
        files, records = [], list[ck.Record]()
        pieces = defaultdict[tuple[str, int], dict[int, _Rows]](dict)
        for match in filter(None, map(_PIECE.fullmatch, candidate.files)):
            files.append(source.stat(match[0]))
            dtype, shape, start = _header(source, files[-1])
            pieces[match[2], int(match[4])][int(match[3])] = len(records), dtype, shape
            records.append(ck.Record(len(files) - 1, start, files[-1].size_bytes))
        for (name, ranks), held in pieces.items():
            if sorted(held) != list(range(ranks)):  # prove whatever the format lets you prove
                text = f"{name!r} has the files of {len(held)} ranks against {ranks}"
                raise ck.MissingFileError(text, where=source.location)
        entries = [_entry(name, sorted(held.items())) for (name, _), held in pieces.items()]
        run = ck.RunFacts(world_size=max(ranks for _, ranks in pieces), writer="numpy.save")
        tensors = {entry.key: entry for entry in entries}
        return ck.TensorIndex(self.name, files, ck.RecordTable.of(records), tensors, run=run)


def _header(source: ck.Source, file: ck.FileRef) -> tuple[ck.DType, ck.Shape, int]:
    """Reads the element type, the shape, and where the data begins."""
    stream = io.BytesIO(source.read(file.path, 0, min(file.size_bytes, _HEADER_BYTES)))
    try:
        npy.read_magic(stream)
        shape, is_transposed, dtype = npy.read_array_header_1_0(stream)
    except ValueError as error:
        raise ck.FormatError(f"has no header of numpy's: {error}", where=file.path) from error
    if is_transposed or not shape or dtype.byteorder == ">":
        raise ck.UnsupportedError("is no array of rows", where=file.path)
    return ck.dtype_named(dtype.name, where=file.path), shape, stream.tell()


def _entry(name: str, held: list[tuple[int, _Rows]]) -> ck.TensorEntry:
    """Puts the rows of the ranks one below the other."""
    chunks, rows, (_, (_, dtype, (_, *columns))) = [], 0, held[0]
    for rank, (record, _, shape) in held:
        place = ck.Box((rows, *(0 for _ in columns)), shape)
        chunks.append(ck.Chunk(place, record, byte_offset=0, rank=rank))
        rows += shape[0]
    table, shape = ck.ChunkTable.of(chunks, 1 + len(columns)), (rows, *columns)
    return ck.TensorEntry(ck.Key(name), (name,), ck.Fqn(name), "", "model", dtype, shape, table)
