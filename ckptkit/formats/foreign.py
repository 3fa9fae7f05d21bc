"""Files of ranks that are recognised so that they can be refused by name: those without a model.

Optimizer states and extra states are read together with the weights that the same ranks wrote.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from ckptkit.core.errors import UnsupportedError
from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.storage.base import Source

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
        """Refuses.

        Raises:
            UnsupportedError: Always, with what the files are.
        """
        raise UnsupportedError(
            f"holds {candidate.reason}",
            where=posixpath.join(source.location, candidate.folder),
            hint="copy the ranks' files of weights beside them, such as"
            " 'model_world_size_2_rank_0.pt' or 'pytorch_model_fsdp_0_rank0.bin'",
        )
