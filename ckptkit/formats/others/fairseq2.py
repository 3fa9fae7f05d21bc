"""The reader of fairseq2's own files: `pp_PP/tp_TT/sdp_SS.pt`, a file of each rank.

Each file is a `torch.save` of the local parts of a rank under FSDP2, plain tensors without the
shapes of the whole ones. fairseq2 puts parts together along dimension 0, in the order of `sdp`.
Nothing in the files shows whether a part at the end is missing, or a tensor is whole on each rank:
the shapes of another model do (`check_reach`). Along which dimension tensor parallel ranks split
is in the code of the model alone.

Source: fairseq2/model_checkpoint/native.py (`NativeModelCheckpointLoader`) and common.py
(`reshard_tensor`), fairseq2/checkpoint/manager.py for the folders, fairseq2 0.5 to 0.8.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from ckptkit.core.errors import FormatError, IncompleteCheckpointError, UnsupportedError
from ckptkit.core.index import Box, KeyPath, RunFacts, TensorIndex
from ckptkit.core.text import counted, quote
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.parsing import TWO_SAVES, refuse_missing_ranks
from ckptkit.formats.pickle.pickles import walk_values
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import TRAINING_VALUES, Stored, make_entries
from ckptkit.storage.base import Source

_PART = re.compile(
    r"(?P<home>(?:.*/)?)pp_(?P<pp>\d{2,7})/tp_(?P<tp>\d{2,7})/sdp_(?P<sdp>\d{2,7})\.pt"
)
_LONE = re.compile(r"(?:.*/)?sdp_\d{2,7}\.pt")
_MODEL, _OPTIMIZER = "model", "optimizer"
# What else a step has: the states of trainers and of readers of data.
_BESIDE = re.compile(r"(?:^|/)(?:trainer/rank|data_reader/dp)_\d{2,7}\.pt$")
_JOIN = (
    "load it with fairseq2 in one process, which joins the parts, and save the model's"
    " `state_dict()` with torch.save"
)
UNPROVEN_PARTS = (
    "the files of fairseq2's ranks have parts of tensors without the shapes of the whole, which are"
    " put together along dimension 0; they are written where the shapes of another model, which"
    " --like or --base names, prove it"
)
HINT_AT_PARTS = (
    "name with --like a folder that has safetensors with these names and shapes, such as the model"
    f" that the run was started from; or {_JOIN}"
)


class Fairseq2Reader(FormatReader):
    """Reads the parts that fairseq2's ranks saved, and refuses a part by itself."""

    name = "fairseq2"
    order = 50
    expected = "'pp_00/tp_00/sdp_00.pt'"
    endings = r"(?:sdp|rank|dp)_\d+\.pt"

    def find_deep_folders(self, paths: Sequence[str]) -> Collection[str]:
        beside = (path for path in paths if _BESIDE.search(path))
        return {posixpath.dirname(posixpath.dirname(path)) for path in beside}

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups the files of a step, or of a model without one."""
        homes: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            if match := _PART.fullmatch(path):
                home = match["home"].rstrip("/")
                above, name = posixpath.split(home)
                homes[above if name in {_MODEL, _OPTIMIZER} else home].append(path)
            elif _LONE.fullmatch(path):
                homes[posixpath.dirname(path)].append(path)
        beside: dict[str, list[str]] = defaultdict(list)
        for path in paths if homes else ():
            folder = posixpath.dirname(posixpath.dirname(path))
            if folder in homes and _BESIDE.search(path):
                beside[folder].append(path)
        return [
            Candidate(
                self.name,
                folder,
                (*sorted(files), *beside[folder]),
                f"{counted(len(files), 'file')} 'pp_PP/tp_TT/sdp_SS.pt'",
            )
            for folder, files in homes.items()
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        where = posixpath.join(source.location, candidate.folder)
        parts: dict[tuple[int, int, int], str] = {}
        of_optimizer: set[int] = set()
        for path in candidate.files:
            match = _PART.fullmatch(path)
            if match is None:
                continue
            numbers = int(match["pp"]), int(match["tp"]), int(match["sdp"])
            if posixpath.basename(match["home"].rstrip("/")) == _OPTIMIZER:
                of_optimizer.add(numbers[2])
            else:
                parts[numbers] = path
        if not parts:
            _refuse_lone(candidate, where, has_optimizer=bool(of_optimizer))
        counts = [max(own) + 1 for own in zip(*parts, strict=True)]
        counts[2] = max(counts[2], max(of_optimizer, default=0) + 1)
        for stage in range(counts[0]):
            for split in range(counts[1]):
                ranks = [sdp for pp, tp, sdp in parts if (pp, tp) == (stage, split)]
                what = f"weights below 'pp_{stage:02d}/tp_{split:02d}'"
                refuse_missing_ranks(ranks, counts[2], what)
        if counts[1] > 1:
            raise UnsupportedError(
                f"{counts[1]} tensor parallel ranks split the tensors, along dimensions that are in"
                " no file",
                hint=_JOIN,
            )
        table = ArchiveTable()
        joined: dict[KeyPath, Stored] = {}
        for stage in range(counts[0]):
            held: dict[KeyPath, list[tuple[TorchArchive, TensorRef]]] = defaultdict(list)
            for rank in range(counts[2]):
                archive = table.open(source, parts[stage, 0, rank], TRAINING_VALUES)
                limit = archive.most_values
                for keys, value in walk_values(archive.root, limit=limit, where=archive.where):
                    if isinstance(value, TensorRef):
                        held[keys].append((archive, value))
            for keys, held_parts in held.items():
                name = quote(".".join(map(str, keys)))
                if keys in joined:
                    raise FormatError(f"two pipeline stages have {name}", hint=TWO_SAVES)
                with errors_at(f"{where}, {name}"):
                    joined[keys] = _join(held_parts, table)
        notes = []
        trainers = sum(path.rpartition("/")[0].endswith("trainer") for path in candidate.files)
        if counts[2] > 1 or not (of_optimizer or trainers == counts[0]):
            notes.append(UNPROVEN_PARTS)
        if of_optimizer:
            notes.append("optimizer states of fairseq2's ranks have no shapes, and are not read")
        run = RunFacts(
            world_size=len(parts),
            writer="fairseq2, one file a rank",
            mesh=(("pp", counts[0]), ("sdp", counts[2])),
            notes=tuple(notes),
        )
        return table.index(self.name, make_entries(joined), run=run)


def _refuse_lone(candidate: Candidate, where: str, *, has_optimizer: bool) -> None:
    """Refuses files of ranks whose folders are not known, and optimizers without their models."""
    if has_optimizer:
        raise IncompleteCheckpointError(
            "has the optimizer's files of fairseq2's ranks, and none of the model",
            hint="name the folder of a step that has a folder 'model'",
        )
    above = posixpath.abspath(where)
    inner = re.compile(r"tp_\d+|pp_\d+")
    while inner.fullmatch(posixpath.basename(above)):
        above = posixpath.dirname(above)
    raise IncompleteCheckpointError(
        f"{posixpath.basename(candidate.files[0])!r} is one rank's part of each tensor of a model",
        hint=f"name the folder of all parts: {above}" if above != where.rstrip("/") else _JOIN,
    )


def _join(parts: Sequence[tuple[TorchArchive, TensorRef]], table: ArchiveTable) -> Stored:
    """Returns the element type, the whole shape and the chunks."""
    first = parts[0][1]
    like = first.dtype, first.shape[1:], len(first.shape)
    for archive, tensor in parts[1:]:
        if (tensor.dtype, tensor.shape[1:], len(tensor.shape)) != like:
            raise FormatError(
                f"{tensor.dtype.name} {list(tensor.shape)} in {archive.path!r} is no part beside"
                f" {first.dtype.name} {list(first.shape)}",
                hint=TWO_SAVES,
            )
    if not first.shape:
        if len({table.records[table.record(*part)].crc32 for part in parts}) > 1:
            raise FormatError("a number differs between ranks", hint=TWO_SAVES)
        return first.dtype, (), [table.chunk(*parts[0], 0)]
    chunks, at = [], 0
    for rank, (archive, tensor) in enumerate(parts):
        place = Box((at, *(0 for _ in first.shape[1:])), tensor.shape)
        chunk = table.chunk(archive, tensor, rank, place)
        chunks += [chunk] if 0 not in tensor.shape else []
        at += tensor.shape[0]
    return first.dtype, (at, *first.shape[1:]), chunks
