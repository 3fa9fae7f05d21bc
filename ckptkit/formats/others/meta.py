"""The reader of Meta's own files: `consolidated.NN.pth` of each tensor-parallel rank.

A file is a `torch.save` of the rank's state dict. Nothing in it says how tensors are split: the
names do, and `params.json` has the sizes. Rows of q, k, v, gate, up and the head are split, and
columns of the attention's output and of the down projection; embeddings by columns up to Llama 2,
by rows since Llama 3. All ranks have the norms. Mistral's files are of the same kind. A single
file without `params.json` is read like any other file of `torch.save`.

Source: llama/model.py of Llama 2 and models/llama3/model.py (`ParallelEmbedding`,
`ColumnParallelLinear`, `RowParallelLinear`), models/checkpoint.py (`reshard_mp`, also for more
ranks than key-value heads).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import Box, KeyPath, RunFacts, Shape, TensorIndex
from ckptkit.core.text import quote
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.parsing import (
    MIXED_SAVES,
    TWO_SAVES,
    group_by_folder,
    is_count,
    read_json_object,
    refuse_missing_ranks,
    stat_or_missing,
)
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive, find_differing_copies
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.torch_files import TorchFileReader
from ckptkit.formats.trees import TRAINING_VALUES, Stored, make_entries
from ckptkit.storage.base import Source

PARAMS = "params.json"
_FILE = re.compile(r"consolidated\.(\d{2,4})\.pth")
_MAX_BYTES = 1 << 20
_MAX_SIZE = 1 << 32
_MATRIX = 2
_LAYER = r"layers\.(?P<layer>0|[1-9]\d{0,5})\."
_NAME = re.compile(
    rf"(?:{_LAYER})?(?P<kind>attention\.w[qkvo]|feed_forward\.w[123]|attention_norm|ffn_norm|norm"
    r"|tok_embeddings|output)\.weight"
)
_FREQUENCIES = re.compile(rf"(?:{_LAYER}attention\.inner_attention\.)?rope\.freqs")
_EMBEDDINGS, _KEYS_AND_VALUES = "tok_embeddings", ("attention.wk", "attention.wv")
# By columns; all other matrices are split by rows.
_BY_COLUMNS = ("attention.wo", "feed_forward.w2")
_WHOLE = ("attention_norm", "ffn_norm", "norm")


class MetaReader(FormatReader):
    """Reads the files of all tensor-parallel ranks, with `params.json`."""

    name = "meta"
    order = 40
    expected = "'consolidated.00.pth' beside 'params.json'"
    endings = r"consolidated\.\d+\.pth"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        there = set(paths)
        own = [path for path in paths if _FILE.fullmatch(posixpath.basename(path))]
        found = []
        for folder, files in group_by_folder(own).items():
            params = posixpath.join(folder, PARAMS)
            if params not in there and [_rank_of(path) for path in files] == [0]:
                continue
            beside = f" beside {PARAMS!r}" if params in there else ""
            others = (params,) if params in there else ()
            reason = f"{len(files)} 'consolidated.NN.pth'{beside}"
            found.append(Candidate(self.name, folder, (*files, *others), reason))
        return found

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        paths = [path for path in candidate.files if not path.endswith(PARAMS)]
        numbers = [_rank_of(path) for path in paths]
        if len(set(numbers)) < len(numbers):
            raise FormatError(
                f"two of the files are of one rank: {', '.join(map(posixpath.basename, paths))}",
                hint=MIXED_SAVES,
            )
        refuse_missing_ranks(numbers, max(numbers) + 1, "weights")
        params = posixpath.join(candidate.folder, PARAMS)
        file = stat_or_missing(source, params)
        if file.size_bytes < 0:
            raise MissingFileError(
                f"{PARAMS!r} is not beside the files of {len(paths)} ranks, so that it is not known"
                " how many there were",
                hint=f"copy {PARAMS!r} from the same download",
            )
        with errors_at(posixpath.join(source.location, params)):
            sizes = _Sizes.read(source, params)
        if len(paths) == 1:
            whole = TorchFileReader().read_index(source, replace(candidate, files=(*paths,)))
            entries = whole.of_part("model")
            _check({entry.name: entry.shape for entry in entries}, sizes, 1)
            run = replace(whole.run, settings=sizes.settings())
            return replace(whole, format=self.name, files=(*whole.files, file), run=run)
        table = ArchiveTable()
        ranks = _open_ranks(table, source, paths)
        tensors, notes = _join_ranks(source, table, ranks, sizes)
        run = RunFacts(
            world_size=len(paths),
            writer="Meta's Llama, one file for each tensor-parallel rank",
            mesh=(("tp", len(paths)),),
            notes=tuple(notes),
            settings=sizes.settings(),
        )
        return table.index(self.name, make_entries(tensors), file, run=run)


def _rank_of(path: str) -> int:
    return int(posixpath.basename(path).split(".")[1])


class _Sizes(Struct, frozen=True):
    """What `params.json` says, in elements."""

    hidden: int
    layers: int
    heads: int
    groups: int  # heads of keys and of values
    head: int  # the width of a head
    words: int  # the size of the vocabulary; -1 where it is not said

    @classmethod
    def read(cls, source: Source, path: str) -> _Sizes:
        content = read_json_object(source, path, _MAX_BYTES, PARAMS)
        content = content.get("model", content)
        if not isinstance(content, dict):
            raise FormatError("is not a JSON object")

        def size(key: str, otherwise: int = 0) -> int:
            value = content.get(key)
            value = otherwise if value is None else value
            if not is_count(value, _MAX_SIZE) or not value:
                raise FormatError(f"{key!r} is not a size")
            return value

        hidden, heads = size("dim"), size("n_heads")
        words = content.get("vocab_size", -1)
        return cls(
            hidden=hidden,
            layers=size("n_layers"),
            heads=heads,
            groups=size("n_kv_heads", heads),
            head=size("head_dim", hidden // heads),
            words=words if is_count(words, _MAX_SIZE) and words else -1,
        )

    def settings(self) -> tuple[tuple[str, int], ...]:
        """Returns the sizes under the keys of Transformers' configurations."""
        return (
            ("hidden_size", self.hidden),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.groups),
            ("head_dim", self.head),
        )

    def shape(self, kind: str) -> tuple[int | None, ...]:
        """Returns the shape of a whole tensor, None for what is not said."""
        query, group = self.heads * self.head, self.groups * self.head
        words = None if self.words < 0 else self.words
        if kind in _WHOLE:
            return (self.hidden,)
        return {
            "attention.wq": (query, self.hidden),
            "attention.wk": (group, self.hidden),
            "attention.wv": (group, self.hidden),
            "attention.wo": (self.hidden, query),
            "feed_forward.w2": (self.hidden, None),
            "tok_embeddings": (words, self.hidden),
            "output": (words, self.hidden),
        }.get(kind, (None, self.hidden))


def _check(shapes: Mapping[str, Shape], sizes: _Sizes, count: int) -> None:
    """Refuses whole tensors that do not fit `params.json`, but for names that are not Meta's."""
    layers = set()
    for name, shape in shapes.items():
        found = _NAME.fullmatch(name)
        if found is None:
            continue
        layers |= {int(found["layer"])} if found["layer"] else set()
        expected = sizes.shape(found["kind"])
        if len(shape) != len(expected) or any(
            want not in {None, size} for size, want in zip(shape, expected, strict=True)
        ):
            wanted = ", ".join("any" if want is None else str(want) for want in expected)
            raise FormatError(
                f"{quote(name)} of {count} files has shape {list(shape)} in all, {PARAMS!r} says"
                f" [{wanted}]",
                hint=f"copy all files and {PARAMS!r} from one download",
            )
    # The number in the file may be any: the layers that are there are counted.
    absent = (n for n in range(min(sizes.layers, len(layers) + 1)) if n not in layers)
    odd = [*islice(absent, 1), *(n for n in layers if n >= sizes.layers)]
    if layers and odd:
        raise IncompleteCheckpointError(
            f"has {len(layers):,} layers, {PARAMS!r} says {sizes.layers:,}; the first that differs"
            f" is layer {min(odd)}",
            hint=f"copy all files and {PARAMS!r} from one download",
        )


_OfRank = tuple[TorchArchive, dict[str, TensorRef]]  # the file of a rank, and the tensors in it


def _open_ranks(table: ArchiveTable, source: Source, paths: Sequence[str]) -> list[_OfRank]:
    """Opens the files of all ranks, which have to hold parts of the same tensors."""
    ranks: list[_OfRank] = []
    seen: dict[tuple[int | None, ...], int] = {}
    for path in paths:
        archive = table.open(source, path, TRAINING_VALUES)
        with errors_at(archive.where):
            tensors = _check_tensors(archive, ranks[0][1] if ranks else None)
        ranks.append((archive, tensors))
    for rank, (archive, tensors) in enumerate(ranks):
        sums = tuple(archive.archive.extent(t.storage)[2] for t in tensors.values())
        other_rank = rank if None in sums else seen.setdefault(sums, rank)
        if other_rank != rank:
            raise FormatError(
                f"holds the weights of rank {other_rank} once more, all of them",
                where=archive.where,
                hint=f"copy the file of rank {rank} anew",
            )
    return ranks


def _check_tensors(
    archive: TorchArchive, first: Mapping[str, TensorRef] | None
) -> dict[str, TensorRef]:
    """Returns the tensors of a rank, which has to have parts of the same ones as the first."""
    tensors = {}
    for name, value in archive.dictionary().values.items():
        if not isinstance(name, str) or not isinstance(value, TensorRef):
            raise FormatError(
                f"holds {quote(str(name))}, which is no tensor; a state dict was expected"
            )
        tensors[name] = value
    first = tensors if first is None else first
    if tensors.keys() != first.keys():
        other = min(tensors.keys() ^ first.keys())
        place = "this file has" if other in tensors else "this file lacks"
        raise FormatError(f"{place} {quote(other)}, unlike that of rank 0", hint=TWO_SAVES)
    for name, tensor in tensors.items():
        mine, theirs = (f"{t.dtype.name} {list(t.shape)}" for t in (tensor, first[name]))
        if mine != theirs:
            raise FormatError(
                f"{quote(name)} is {mine} here, and {theirs} on rank 0", hint=TWO_SAVES
            )
    return tensors


def _join_ranks(
    source: Source, table: ArchiveTable, ranks: Sequence[_OfRank], sizes: _Sizes
) -> tuple[dict[KeyPath, Stored], list[str]]:
    """Returns the whole tensors, and notes."""
    count = len(ranks)
    joined: dict[KeyPath, Stored] = {}
    copies: list[tuple[str, int, int]] = []  # a tensor, and two ranks that have it in common
    for name, first in ranks[0][1].items():
        part = first.shape
        axis, in_common = _find_axis(name, part, count, sizes)
        chunks = []
        for rank, (archive, tensors) in enumerate(ranks):
            number, copy = divmod(rank, in_common)
            if copy:
                copies.append((name, rank - copy, rank))
                continue
            offsets = tuple(number * size if dim == axis else 0 for dim, size in enumerate(part))
            chunks.append(table.chunk(archive, tensors[name], rank, Box(offsets, part)))
        parts = count // in_common
        shape = tuple(n * parts if dim == axis else n for dim, n in enumerate(part))
        joined[name,] = first.dtype, shape, chunks
    _check({str(name): shape for (name,), (_, shape, _) in joined.items()}, sizes, count)
    pairs = [
        ((ranks[owner][0], ranks[owner][1][name]), (ranks[rank][0], ranks[rank][1][name]))
        for name, owner, rank in copies
    ]
    differing, notes = find_differing_copies(source, table, pairs)
    for name, owner, rank in (copies[position] for position in differing[:1]):
        raise FormatError(
            f"{quote(name)} differs between ranks {owner} and {rank}, which should have it in"
            " common",
            hint=TWO_SAVES,
        )
    return joined, notes


def _find_axis(name: str, part: Shape, count: int, sizes: _Sizes) -> tuple[int, int]:
    """Returns the axis along which a tensor is split, and how many ranks have the same part."""
    found = _NAME.fullmatch(name)
    kind = "" if found is None else found["kind"]
    if _FREQUENCIES.fullmatch(name) or (kind in _WHOLE and len(part) == 1):
        return 0, count
    if not kind or len(part) != _MATRIX:
        raise UnsupportedError(
            f"it is not known how {quote(name)} of shape {list(part)} is split into {count}"
            " files: Llama 1 to 3 have no such tensor",
            hint="join the files with the program that wrote them",
        )
    if kind in _KEYS_AND_VALUES and count > sizes.groups and count % sizes.groups == 0:
        return 0, count // sizes.groups  # neighbours have the same head
    if kind == _EMBEDDINGS:
        return (0 if part[1] == sizes.hidden else 1), 1
    return (1 if kind in _BY_COLUMNS else 0), 1
