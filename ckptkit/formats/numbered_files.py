"""Files that are numbered by rank: those of torch_checkpointing and of torch's experimental writer.

`model_0.pt` may as well be the model of epoch 0, so that names do not tell. What tells is the
`metadata.pkl` that torch_checkpointing writes beside them, or else what is in the files: a pickle
that names torch's distributed tensors was written by a rank.

Source: torch_checkpointing/checkpoint_layout.py (`default_torch_layout_info`), 0.1.1;
torch/distributed/checkpoint/_experimental/checkpoint_writer.py, torch 2.13.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import InputError
from ckptkit.formats.base import Candidate
from ckptkit.formats.torch_zip import open_archive
from ckptkit.storage.base import Source

FORMAT = "torch-checkpointing"
METADATA_PICKLE = "metadata.pkl"
_NAME = re.compile(r"(?P<item>[A-Za-z0-9_-]+?)[_-]?(?P<rank>\d{1,7})\.(?P<kind>pt|safetensors)")
_FINAL = {"dcp", "zero"}
_MARKS = (b"torch.distributed", b"ShardedTensor")
_LOOSE = {"torch", "torch optimizer", "safetensors"}  # what single files are taken for
_MOST_LOOKS = 32  # at items of the state, to tell what they are
_FILES_OF_AN_ITEM = 3  # one of them may be damaged


@dataclass(frozen=True, slots=True)
class NumberedFile:
    """What the name of a file tells.

    Attributes:
        path: The file.
        item: Whose state it holds.
        rank: The rank that wrote it.
        is_safetensors: Whether it is a safetensors file, and not torch's.
    """

    path: str
    item: str
    rank: int
    is_safetensors: bool


def numbered(path: str) -> NumberedFile | None:
    """Returns what the name of a file tells, or None for any other name."""
    match = _NAME.fullmatch(posixpath.basename(path))
    if match is None:
        return None
    return NumberedFile(path, match["item"], int(match["rank"]), match["kind"] == "safetensors")


def described(paths: Sequence[str]) -> list[Candidate]:
    """Recognises folders in which a `metadata.pkl` lies beside numbered files; reads nothing."""
    homes = {posixpath.dirname(p) for p in paths if posixpath.basename(p) == METADATA_PICKLE}
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths if homes else ():
        folder = posixpath.dirname(path)
        if folder in homes and (numbered(path) or posixpath.basename(path) == METADATA_PICKLE):
            found[folder].append(path)
    reason = f"{METADATA_PICKLE!r} beside files numbered by rank"
    return [
        Candidate(FORMAT, folder, tuple(sorted(files)), reason)
        for folder, files in sorted(found.items())
        if len(files) > 1
    ]


def with_numbered_ranks(
    source: Source, candidates: Sequence[Candidate], paths: Sequence[str]
) -> list[Candidate]:
    """Puts files together that ranks wrote, though only what is in them tells so.

    Args:
        source: Where they lie.
        candidates: What was recognised by names.
        paths: All files.

    Returns:
        The candidates; single files that are of ranks are in one of their own.
    """
    taken = {p for c in candidates if c.format not in _LOOSE or len(c.files) > 1 for p in c.files}
    # Beside a model of these they are what its run saved besides, and are left alone.
    others = {c.folder for c in candidates if c.format in _FINAL}
    folders: dict[str, list[NumberedFile]] = defaultdict(list)
    for path in paths:
        file, folder = numbered(path), posixpath.dirname(path)
        if file is not None and path not in taken and folder not in others:
            folders[folder].append(file)
    found = list(_of_ranks(source, folders))
    theirs = {path for candidate in found for path in candidate.files}
    return [c for c in candidates if theirs.isdisjoint(c.files)] + found


def _of_ranks(source: Source, folders: dict[str, list[NumberedFile]]) -> Iterator[Candidate]:
    looks = 0
    for folder, files in sorted(folders.items()):
        items: dict[str, list[NumberedFile]] = defaultdict(list)
        for file in sorted(files, key=lambda file: file.rank):
            items[file.item].append(file)
        looks += len(items)
        if looks > _MOST_LOOKS:
            return
        spread = sorted(
            item
            for item, held in items.items()
            if any(_is_of_a_rank(source, file) for file in held[:_FILES_OF_AN_ITEM])
        )
        if spread:
            named = " and ".join(map(repr, spread))
            reason = f"files numbered by rank, of which {named} hold distributed tensors"
            yield Candidate(FORMAT, folder, tuple(sorted(f.path for f in files)), reason)


def _is_of_a_rank(source: Source, file: NumberedFile) -> bool:
    """Tells whether the pickle of a file names torch's distributed tensors."""
    path = file.path

    def read(start: int, stop: int) -> bytes:
        return source.read(path, start, stop)

    if file.is_safetensors:
        return False  # such files do not tell
    try:
        size = source.stat(path).size_bytes
        pickle = open_archive(read, size, where=path).pickle()
    except InputError:
        return False  # what is wrong with it, its reader tells
    return any(mark in pickle for mark in _MARKS)
