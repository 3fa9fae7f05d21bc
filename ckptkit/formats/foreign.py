"""Formats that are recognised so that they can be refused by name, and not misread as others.

Some of them are ordinary `.pt` or `.safetensors` files one by one, each with a part of the model.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from ckptkit.core.errors import UnsupportedError
from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.storage.base import Source

_FORMATS = {
    "optimizer states and extra states of ranks, without their weights": re.compile(
        r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt|optimizer(_\d+)?_rank\d+\.bin"
    ),
}


class ForeignReader:
    """Recognises what this version does not read."""

    name = "foreign"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups such files by folder and format."""
        groups: dict[tuple[str, str], list[str]] = {}
        for path in paths:
            name = posixpath.basename(path)
            kind = next((k for k, pattern in _FORMATS.items() if pattern.fullmatch(name)), None)
            if kind is not None:
                groups.setdefault((posixpath.dirname(path), kind), []).append(path)
        return [
            Candidate(self.name, folder, tuple(sorted(files)), kind)
            for (folder, kind), files in sorted(groups.items())
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Refuses.

        Raises:
            UnsupportedError: Always, with the name of the format.
        """
        raise UnsupportedError(
            f"holds {candidate.reason}, which this version does not read",
            where=posixpath.join(source.location, candidate.folder),
            hint="read are torch.distributed.checkpoint ('.metadata' and '.distcp'), DeepSpeed's"
            " ZeRO, '.safetensors' and whole '.bin' or '.pt' files",
        )
