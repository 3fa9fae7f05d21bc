"""The reader of universal checkpoints, which DeepSpeed's `ds_to_universal.py` makes of its own.

Every parameter has a folder below `zero/`, with its master copy and the optimizer's states in a
file each; the files of weights of the save lie beside, as they were. Up to stage 2 a file holds
the tensor in its shape, beside what a change of tensor parallelism needs to know; in stage 3 it
holds the elements alone, and neither steps nor frozen parameters are there. Those are in the files
of weights, and the steps in `zero/optimizer_state.pt`.

Source: deepspeed/checkpoint/ds_to_universal.py (`merge_tp_slices`, `merge_zero3_slices`,
`_save_optimizer_state`), deepspeed 0.14 to 0.19.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Sequence

from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.formats.zero.files import parse_name, universal_place
from ckptkit.storage.base import Source


class UniversalReader:
    """Reads what `ds_to_universal.py` writes into the folder of a tag."""

    name = "universal"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with files of parameters, and the files of weights in them."""
        folders: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            place = universal_place(path)
            if place is not None:
                folders[place.folder].append(path)
        counts = {folder: len(found) for folder, found in folders.items()}
        for path in paths:
            folder = posixpath.dirname(path)
            if folder in counts and parse_name(path) is not None:
                folders[folder].append(path)
        return [
            Candidate(
                self.name,
                folder,
                tuple(sorted(found)),
                f"{counts[folder]} files named as ds_to_universal.py names those of parameters",
            )
            for folder, found in sorted(folders.items())
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the pickles and directories of all files."""
        # Every source is searched for this format, and few are of it.
        from ckptkit.formats.pickle.torch_archives import ArchiveTable
        from ckptkit.formats.zero.optimizer import Weights, index_of
        from ckptkit.formats.zero.universal_parts import UniversalContents

        where = posixpath.join(source.location, candidate.folder)
        table = ArchiveTable()
        contents = UniversalContents.open(table, source, candidate.files, where)
        weights = Weights(table, contents, where)
        states = contents.states(table, weights.called)
        return index_of(self.name, table, weights, states, contents.facts())
