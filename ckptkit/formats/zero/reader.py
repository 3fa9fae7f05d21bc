"""The reader of DeepSpeed's ZeRO checkpoints, stages 1 to 3, and of those without ZeRO."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Sequence

from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.formats.zero.files import not_modelled, open_zero_file, parse_name
from ckptkit.storage.base import Source


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
        """Returns the index of the pickles and directories of all ranks' files."""
        # Every source is searched for this format, and few are of it.
        from ckptkit.formats.pickle.torch_archives import ArchiveTable
        from ckptkit.formats.zero.optimizer import Weights, index_of, optimizer_states
        from ckptkit.formats.zero.ranks import Contents, checked_names

        where = posixpath.join(source.location, candidate.folder)
        names = checked_names(candidate.files, where)
        table = ArchiveTable()
        models = [open_zero_file(table, source, name) for name in names["model"]]
        ranks = [open_zero_file(table, source, name) for name in names["optim"]]
        contents = Contents(models, ranks, where)
        contents.check()
        weights = Weights(table, contents, where)
        states = optimizer_states(
            *(table, contents.kept(), weights.masters, weights.called),
            [list(group) for group in contents.groups()],
        )
        return index_of(self.name, table, weights, states, contents.facts(states.notes))
