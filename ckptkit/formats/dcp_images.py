"""Data files of DCP that end with a safetensors image: `SerializationFormat.SAFETENSORS`.

Python objects come first, then one image with all tensors of the file. `.metadata` has every
tensor begin where the image does, so that torch itself cannot read one back; where a tensor lies,
the header of the image tells.

Source: torch/distributed/checkpoint/filesystem.py (`_write_files_from_queue`), torch 2.8 to 2.13.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptkit.core.errors import FormatError, IncompleteCheckpointError
from ckptkit.core.index import FileRef, Problem, RecordTable, Shape
from ckptkit.core.ranges import FileRange
from ckptkit.formats.dcp_metadata import DcpTensor
from ckptkit.formats.safetensors import StoredTensor, read_header
from ckptkit.formats.sharding_info import saved_offsets
from ckptkit.storage.base import Source, foresee

_Held = Mapping[str, tuple[StoredTensor, Shape]]


@dataclass(slots=True)
class Images:
    """Looks chunks up in the images of the files that hold them.

    Attributes:
        source: Where the files lie.
        files: All data files; those that are missing have a negative size.
        problems: Chunks that are in no image, as far as was looked.
    """

    source: Source
    files: Sequence[FileRef]
    problems: list[Problem] = field(default_factory=list)
    _images: dict[int, _Held] = field(default_factory=dict)

    def records(self, tensors: Sequence[DcpTensor]) -> RecordTable:
        """Returns where the chunks of tensors lie, in their order.

        Of a file that is missing, the records are where `.metadata` has them.

        Raises:
            InputError: If the header of an image is damaged, or contradicts `.metadata`.
        """
        self._foresee(tensors)
        rows = [self._place(tensor, row) for tensor in tensors for row in range(len(tensor.file))]
        places = np.array(rows, np.int64).reshape(len(rows), 3)
        return RecordTable(places[:, 0], places[:, 1], places[:, 2])

    def _foresee(self, tensors: Sequence[DcpTensor]) -> None:
        """Has the headers of all images read at once, where each costs a round trip."""
        starts = {
            file: start
            for tensor in tensors
            for file, start in zip(tensor.file.tolist(), tensor.start.tolist(), strict=True)
            if start < self.files[file].size_bytes
        }
        wanted = [FileRange(self.files[n].path, at, at + 1) for n, at in starts.items()]
        foresee(self.source, wanted)

    def _place(self, tensor: DcpTensor, row: int) -> tuple[int, int, int]:
        file, start = int(tensor.file[row]), int(tensor.start[row])
        stop = start + int(tensor.length[row])
        if self.files[file].size_bytes < 0:
            return file, start, stop
        if file not in self._images:
            self._images[file] = self._opened(self.files[file], start)
        found = self._images[file].get(tensor.key)
        offsets, sizes = tuple(tensor.offsets[row].tolist()), tuple(tensor.sizes[row].tolist())
        if found is None or found[1] != offsets:
            self._note_lost(tensor, self.files[file], offsets, found)
            return file, start, start
        stored = found[0]
        if (stored.dtype, stored.shape) != (tensor.dtype, sizes):
            raise FormatError(
                f"holds {stored.dtype.name} {list(stored.shape)} against {tensor.dtype.name}"
                f" {list(sizes)} in '.metadata'",
                where=f"{self._where(self.files[file])}: tensor {tensor.key!r}",
                hint="the file belongs to another save, or was damaged",
            )
        return file, stored.start, stored.stop

    def _opened(self, file: FileRef, start: int) -> _Held:
        header = read_header(self.source, file, start)
        offsets = saved_offsets(header, where=self._where(file))
        return {stored.name: (stored, offsets[stored.name]) for stored in header.tensors}

    def _note_lost(
        self,
        tensor: DcpTensor,
        file: FileRef,
        offsets: Shape,
        found: tuple[StoredTensor, Shape] | None,
    ) -> None:
        """Takes note of a chunk that its file lacks.

        Torch keeps one piece of each name in an image: of two that a rank holds, the last.
        """
        instead = f", in its place is that from {list(found[1])} on" if found else ""
        self.problems.append(
            Problem(
                IncompleteCheckpointError.code,
                tensor.key,
                f"the piece from {list(offsets)} on is not in {file.path!r}{instead}",
            )
        )

    def _where(self, file: FileRef) -> str:
        return posixpath.join(self.source.location, file.path)
