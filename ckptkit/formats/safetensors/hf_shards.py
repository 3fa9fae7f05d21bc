"""The reader of safetensors shards that torch.distributed.checkpoint writes, one set per rank.

`shard-RRRRR-model-IIIII-of-NNNNN.safetensors` holds the shards that rank R has of the tensors in
model file I. The files contain neither the number of ranks nor the shapes of whole tensors: a shape
is the extent of all shards together. So the numbers have to be complete, and shapes and names are
compared with a `config.json` or an index where the folder has one.

If there is neither, missing last shards show in the shapes. Sharding splits the rows of all
matrices and leaves their columns. In a model the rows of one matrix are the columns of another:
where that is true of no matrix, but would be of several if there were more shards, the last ones
are missing.

Source: torch/distributed/checkpoint/{hf_storage,_hf_utils}.py (`HuggingFaceStorageWriter`), torch
2.8 to 2.13; nemo_automodel/components/checkpoint/addons.py (`ConsolidatedHFAddon`), Automodel 0.3;
transformers 5.23, distributed/checkpoint.py and configuration_utils.py
(`PreTrainedConfig.attribute_map` of the models). DTensors are split by `torch.chunk`: all shards
have `ceil(rows / shards)` rows but the last ones, which have fewer or none.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import FormatError, IncompleteCheckpointError, InputError, MissingFileError
from ckptkit.core.index import (
    Box,
    Chunk,
    FileRef,
    KeyPath,
    Problem,
    Record,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.model_configs import parse_model_config
from ckptkit.core.text import counted, join_first
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.parsing import (
    INDEX_ENDING,
    FileTable,
    group_by_folder,
    overflows,
    read_limited,
    read_weight_map,
)
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header, read_shard_offsets
from ckptkit.formats.trees import Stored, make_entries
from ckptkit.storage.base import Source, is_there

SHARDED_FOLDER = "sharded"
"""The folder in which torch leaves the shards of a model that it has consolidated."""
CONSOLIDATED_FOLDER = "consolidated"
"""The folder below the shards in which NeMo Automodel has torch consolidate them."""
METADATA_FOLDER = ".hf_metadata"
"""The folder below the shards in which NeMo Automodel saves configuration and tokenizer."""
UNPROVEN = (
    "the shards contain neither their number nor full shapes: shapes are the extent of all shards,"
    " and a shard missing at the end would not show; put the model's config.json beside them, or"
    " name it with --base, to have them compared"
)
_SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
_INDEX = f"model.safetensors{INDEX_ENDING}"
_ENDING = ".safetensors"
_INCOMPLETE = IncompleteCheckpointError.code
_LISTED_NAMES = 3
_MOST_RANKS = 10_000_000
_MATRIX = 2
_LEAST_EVIDENCE = 2  # different numbers of columns that more shards would explain
_MOST_SHARDS = 1024

CONFIG_NAME = "config.json"
_MAX_CONFIG_BYTES = 4 << 20
# Of all tensors only embeddings have the same names and shapes in nearly every architecture: a row
# for each token, a column for each hidden unit. What shortens all tensors shortens them, too.
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|word_embeddings|shared|wte|tok_embeddings|embed_in)\.weight$"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d{1,9})\.")
_TEXT = "text_config"
_TOKENS = ("vocab_size",)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_OTHER_WIDTHS = ("embedding_size", "word_embed_proj_dim", "embedding_dim", "hidden_size_per_layer")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


class ConfigExtents(Struct, frozen=True):
    """Sizes in a model's configuration; 0 where it does not have them."""

    path: str = ""  # the configuration, relative to the source's root; empty where there is none
    tokens: int = 0  # rows of the embeddings, at least: they may be padded
    hidden: int = 0  # columns of the embeddings
    layers: int = 0  # number of layers, at least

    def least(self, name: str) -> Shape | None:
        """Returns the smallest shape that a tensor can have; None where it is unknown."""
        if not self.tokens or _EMBEDDING.search(name) is None:
            return None
        return self.tokens, self.hidden

    def count_lacking_layers(self, names: Iterable[str]) -> int:
        """Returns how many layers follow the last one that occurs in a name."""
        numbers = [int(match[1]) for match in map(_LAYER.search, names) if match]
        return max(0, self.layers - 1 - max(numbers)) if numbers else 0

    def proves(self, shapes: Mapping[str, Shape]) -> bool:
        """Returns whether a tensor of known size is there, and all layers are."""
        is_sized = any(
            len(shape) == _MATRIX and self.least(name) is not None for name, shape in shapes.items()
        )
        return is_sized and not self.count_lacking_layers(shapes)


def read_config_extents(source: Source, folders: Sequence[str]) -> ConfigExtents:
    """Returns the sizes in the first configuration in some folders; none if it is damaged."""
    for folder in folders:
        path = posixpath.join(folder, CONFIG_NAME)
        if not is_there(source, path):
            continue
        config: Mapping[str, Any] = {}
        with suppress(InputError):  # reported where more of the configuration is needed
            data = read_limited(source, path, _MAX_CONFIG_BYTES, "configuration")
            config = parse_model_config(data, where=path)
        text = config.get(_TEXT)
        if isinstance(text, dict) and not _first_size(config, _TOKENS):
            config = text
        has_other_width = any(name in config for name in _OTHER_WIDTHS)
        hidden = 0 if has_other_width else _first_size(config, _HIDDEN)
        tokens, layers = _first_size(config, _TOKENS), _first_size(config, _LAYERS)
        return ConfigExtents(path, tokens, hidden, layers)
    return ConfigExtents()


def _first_size(config: Mapping[str, Any], names: Sequence[str]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def estimate_shards(matrices: Iterable[tuple[Shape, int]]) -> int | None:
    """Returns how many shards there must have been, if that is more than there are.

    Of each tensor it gets the shape, as far as its shards extend, and the shards along its rows.

    >>> whole = [((8, 6), 2), ((6, 8), 2), ((20, 6), 2)]
    >>> half = [((4, 6), 1), ((3, 8), 1), ((10, 6), 1)]
    >>> estimate_shards(whole), estimate_shards(half)
    (None, 2)
    """
    known = [(shape, shards) for shape, shards in matrices if len(shape) == _MATRIX]
    if not known:
        return None
    ((there, _),) = Counter(shards for _, shards in known).most_common(1)
    shapes = [shape for shape, shards in known if shards == there]
    rows = {shape[0] for shape in shapes}
    columns = {shape[1] for shape in shapes}
    if rows & columns:
        return None
    for shards in range(there + 1, min(8 * there + 8, _MOST_SHARDS)):
        explained = [n for n in columns if there * -(-n // shards) in rows]
        if len(explained) >= _LEAST_EVIDENCE:
            return shards
    return None


class _Shard(Struct, frozen=True):
    """A shard of a tensor: its entry in the header of file number `file`, and its offsets."""

    file: int
    path: str
    rank: int
    model_file: int
    stored: HeaderTensor
    offsets: Shape

    @property
    def end(self) -> Shape:
        return tuple(o + n for o, n in zip(self.offsets, self.stored.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        return 0 in self.stored.shape

    def chunk(self, table: FileTable) -> Chunk:
        record = table.add_record(Record(self.file, self.stored.start, self.stored.stop))
        place = Box(self.offsets, self.stored.shape)
        return Chunk(place, record, byte_offset=0, rank=self.rank - 1)


_Numbers = tuple[int, int, int]  # in the name of a file: rank, model file, model files, all from 1


def _numbers_of(path: str) -> _Numbers:
    match = _SHARD.fullmatch(posixpath.basename(path))
    assert match is not None  # noqa: S101  narrows the type: `find` took no other
    return int(match[1]), int(match[2]), int(match[3])


def is_shard(path: str) -> bool:
    return _SHARD.fullmatch(posixpath.basename(path)) is not None


class HfShardsReader(FormatReader):
    """Reads what torch's `HuggingFaceStorageWriter(save_distributed=True)` writes."""

    name = "dcp-hf"
    order = 110  # before safetensors: each shard is such a file
    expected = "'shard-00001-model-00001-of-00001.safetensors'"
    endings = r"shard-[^/\n]+\.safetensors"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups shards by folder; an index of files that are not there belongs to them."""
        others = {posixpath.dirname(p) for p in paths if p.endswith(_ENDING) and not is_shard(p)}
        indexes = {posixpath.dirname(p): p for p in paths if posixpath.basename(p) == _INDEX}
        candidates = []
        for folder, shards in group_by_folder(filter(is_shard, paths)).items():
            index = None if folder in others else indexes.get(folder)
            files = (*shards, *filter(None, [index]))
            ranks = len({_numbers_of(path)[0] for path in shards})
            reason = f"{len(shards)} 'shard-…-model-….safetensors' of {counted(ranks, 'rank')}"
            candidates.append(Candidate(self.name, folder, files, reason))
        return candidates

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        paths = [path for path in candidate.files if is_shard(path)]
        others = [path for path in candidate.files if not is_shard(path)]
        numbers = list(map(_numbers_of, paths))
        indexed = [name for path in others for name in read_weight_map(source, path)]
        _check_model_files(numbers)
        files = list(map(source.stat, paths))
        table = FileTable()
        shards = _read_shards(source, table, files)
        absent = [name for name in indexed if name not in shards]
        if absent or not indexed:  # else no tensor is missing
            _check_ranks(numbers)
        shapes = {name: _whole_shape(held) for name, held in shards.items()}
        folders = [candidate.folder, posixpath.join(candidate.folder, METADATA_FOLDER)]
        if posixpath.basename(candidate.folder) == SHARDED_FOLDER:
            folders.append(posixpath.dirname(candidate.folder))
        extents = read_config_extents(source, folders)
        lacking = extents.count_lacking_layers(shards)
        if lacking:
            raise IncompleteCheckpointError(
                f"the last {lacking:,} of {extents.layers:,} layers by {extents.path!r} are in no"
                " shard",
                hint="give the directory that holds the shards of every rank",
            )
        ranks = max(rank for rank, _, _ in numbers)
        is_proven = extents.proves(shapes)
        notes = [] if is_proven else [UNPROVEN]
        if absent:
            names = join_first(map(repr, absent), len(absent), _LISTED_NAMES)
            notes.insert(0, f"{_INDEX!r} names tensors that no shard has: {names}")
        held: dict[KeyPath, Stored] = {
            (name,): (
                own[0].stored.dtype,
                shapes[name],
                [s.chunk(table) for s in own if not s.is_empty],
            )
            for name, own in shards.items()
        }
        entries = make_entries(held)
        problems = [
            *_find_stored_twice(shards),
            *(_compare_extents(entry, extents) for entry in entries.values()),
            *([] if is_proven else _find_cut_off(shards, shapes, ranks)),
        ]
        run = RunFacts(
            world_size=ranks,
            writer="HuggingFaceStorageWriter of torch.distributed.checkpoint",
            notes=tuple(notes),
        )
        return table.index(
            self.name,
            entries,
            *map(source.stat, others),
            run=run,
            problems=tuple(filter(None, problems)),
        )


def _read_shards(
    source: Source, table: FileTable, files: Sequence[FileRef]
) -> dict[str, list[_Shard]]:
    shards: dict[str, list[_Shard]] = defaultdict(list)
    for file in files:
        number = table.add_file(file)
        rank, model_file, _ = _numbers_of(file.path)
        header = read_header(source, file)
        offsets = read_shard_offsets(header, where=posixpath.join(source.location, file.path))
        for stored in header.tensors:
            shards[stored.name].append(
                _Shard(number, file.path, rank, model_file, stored, offsets[stored.name])
            )
    for name, (first, *others) in shards.items():
        for other in others:
            for what, expected, actual in (
                ("dtype", first.stored.dtype.name, other.stored.dtype.name),
                ("dimensions", len(first.offsets), len(other.offsets)),
                ("model file", first.model_file, other.model_file),
            ):
                if expected != actual:
                    raise FormatError(
                        f"tensor {name!r} has {what} {expected} in {first.path!r}"
                        f" against {actual} in {other.path!r}",
                        hint="the shards are of different saves: take the older ones away",
                    )
    return dict(shards)


def _check_ranks(numbers: Sequence[_Numbers]) -> None:
    """Refuses a set with gaps, of which no index shows that no tensor is missing.

    A rank without a shard of a model file writes no file, as in a pipeline. The check of
    coverage, later, proves that no part of a tensor is missing.
    """
    there = {(rank, model_file) for rank, model_file, _ in numbers}
    last, count = max(rank for rank, _, _ in numbers), numbers[0][2]
    if len(there) == last * count:
        return
    rank, file = next(
        (rank, file)
        for rank in range(1, last + 1)
        for file in range(1, count + 1)
        if (rank, file) not in there
    )
    missing = f"shard-{rank:05d}-model-{file:05d}-of-{count:05d}{_ENDING}"
    raise MissingFileError(
        f"{len(there):,} of {last * count:,} shards are there; {missing!r} is missing",
        hint="copy the missing files as well; if the rank held no part of that file and so"
        f" wrote none, put the model's {_INDEX!r} beside the shards, which names all tensors",
    )


def _find_stored_twice(shards: Mapping[str, Sequence[_Shard]]) -> Iterator[Problem]:
    """Yields tensors with two shards of one part, which would be taken for replicas."""
    for name, held in shards.items():
        seen: dict[tuple[Shape, Shape], _Shard] = {}
        for shard in held:
            other = seen.setdefault((shard.offsets, shard.stored.shape), shard)
            if other is not shard and not shard.is_empty:
                both = f"{other.path!r} and {shard.path!r}"
                message = f"{list(shard.stored.shape)} elements from {list(shard.offsets)} on"
                yield Problem(_INCOMPLETE, name, f"{message} are stored in both {both}")
                break


def _find_cut_off(
    shards: Mapping[str, Sequence[_Shard]], shapes: Mapping[str, Shape], ranks: int
) -> Iterator[Problem]:
    """Yields all matrices if shapes show that the last shards are missing."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    counts = {name: len({shard.offsets[:1] for shard in shards[name]}) for name in matrices}
    expected = estimate_shards((shape, counts[name]) for name, shape in matrices.items())
    if expected is not None:
        for name, shape in matrices.items():
            yield Problem(
                _INCOMPLETE,
                name,
                f"the shards of {ranks} ranks reach to {list(shape)}, but no matrix has as"
                f" many rows as another has columns, as they would with {expected} shards of"
                " each: those after the last one are missing",
            )


def _check_model_files(numbers: Sequence[_Numbers]) -> None:
    counts = sorted({model_files for _, _, model_files in numbers})
    if len(counts) > 1:
        raise FormatError(
            f"shards are numbered '-of-{counts[0]:05d}' and '-of-{counts[1]:05d}'",
            hint="they are of different saves: take the older ones away",
        )
    last = max(rank for rank, _, _ in numbers)
    if last > _MOST_RANKS:
        raise FormatError(f"a shard is named as that of rank {last:.3g}")
    there = {model_file for _, model_file, _ in numbers}
    missing = next((n for n in range(1, counts[0] + 1) if n not in there), None)
    if missing is not None or max(there) > counts[0] or min(rank for rank, _, _ in numbers) < 1:
        raise MissingFileError(
            f"no shard is of model file {missing or 1} of {counts[0]}",
            hint="copy the missing files as well",
        )


def _whole_shape(shards: Sequence[_Shard]) -> Shape:
    shape = tuple(max(ends) for ends in zip(*(shard.end for shard in shards), strict=True))
    stored = shards[0].stored
    if overflows(shape, stored.dtype):
        raise FormatError(f"size of tensor {stored.name!r} of shape {list(shape)} overflows")
    return shape


def _compare_extents(entry: TensorEntry, extents: ConfigExtents) -> Problem | None:
    """Reports a tensor that is larger in the configuration than all its shards together."""
    least = extents.least(entry.name)
    if least is None or len(least) != len(entry.shape):
        return None
    if all(size >= needed for size, needed in zip(entry.shape, least, strict=True)):
        return None
    return Problem(
        _INCOMPLETE,
        entry.key,
        f"the shards reach to {list(entry.shape)} against {list(least)} by {extents.path!r}: a"
        " shard after the last one is missing",
    )
