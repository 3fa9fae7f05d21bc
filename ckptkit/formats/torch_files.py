"""The readers of files that `torch.save` writes: models, and optimizers saved next to them.

accelerate and the Trainer write `optimizer.bin` and `optimizer.pt`, one more for each further
model. Only `--optimizer` needs them, so an error in one is reported, and the model is read all the
same.

Source: accelerate/utils/fsdp_utils.py (`save_fsdp_optimizer`), accelerate/checkpointing.py
(`save_accelerator_state`), transformers/trainer.py (`_save_optimizer_and_scheduler`).
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.core.errors import (
    FormatError,
    InputError,
    LimitError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    Key,
    KeyPath,
    Problem,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.parsing import (
    INDEX_ENDING,
    check_weight_map,
    find_data_files,
    group_model_files,
)
from ckptkit.formats.pickle.pickles import MAX_KEY_CHARACTERS, walk_values
from ckptkit.formats.pickle.torch_archives import ArchiveTable
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import (
    TRAINING_VALUES,
    Framework,
    classify,
    detect_framework,
    join_path,
)
from ckptkit.storage.base import Source

ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
# Files that accelerate, the Trainer, DeepSpeed and others write next to a model.
_NOT_A_MODEL = re.compile(
    r"optim.*|scheduler.*|lr_scheduler.*|scaler.*|sampler.*|rng_state.*|random_states.*|dl_state_dict.*"
    r"|training_args\.bin|extra_state.*|(bf16_)?zero_pp_rank_.*"
    # Megatron-LM, Megatron-Bridge and slime
    r"|distrib_optim\.pt|layer_wise_optimizer_\d+\.pt|train_dataloader_dprank\d+\.pt"
    r"|latest_train_state\.pt|global_dataset_state_dict_\d+\.pt"
)
_OPTIMIZER_FILE = re.compile(r"optimizer(_\d{1,7})?\.(bin|pt)")
_NUMBER = re.compile(r".*_(\d{1,7})")
_ONLY_TENSOR: KeyPath = ("tensor",)  # the path of a tensor that is in no container


class TorchFileReader:
    """Reads models that `torch.save` wrote."""

    name = "torch"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        own = [path for path in paths if not _NOT_A_MODEL.fullmatch(posixpath.basename(path))]
        return [files.candidate(self.name) for files in group_model_files(own, ENDINGS)]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        where = posixpath.join(source.location, candidate.folder)
        paths, weight_map = find_data_files(source, candidate)
        contents = TorchContents()
        for path in paths:
            contents.add_file(source, path)
        if weight_map is not None:
            check_weight_map(weight_map, contents.files_by_key(), where=where)
        indices = [path for path in candidate.files if path.endswith(INDEX_ENDING)]
        index = contents.index(where)
        return replace(index, files=(*index.files, *map(source.stat, indices)))


@dataclass(frozen=True, slots=True)
class _LoadedTensor:
    """A tensor, its path, and its chunk."""

    path: KeyPath
    tensor: TensorRef
    chunk: Chunk

    @property
    def key(self) -> Key:
        return Key(join_path(self.path))


@dataclass(slots=True)
class TorchContents:
    """Collects the contents of the files of one candidate."""

    _table: ArchiveTable = field(default_factory=ArchiveTable)
    _tensors: list[_LoadedTensor] = field(default_factory=list)
    _values: dict[KeyPath, Any] = field(default_factory=dict)
    _framework: Framework = field(default_factory=Framework)
    _notes: list[str] = field(default_factory=list)

    def add_file(self, source: Source, path: str, under: KeyPath = ()) -> None:
        """Adds the tensors and values of one file.

        Args:
            source: The source of the file.
            path: The file.
            under: Keys that are put in front of the paths of all its values.
        """
        file = self._table.open(source, path, TRAINING_VALUES)
        if not self._framework.name:
            self._framework = detect_framework(file.root)
        if file.is_legacy:
            self._notes.append(
                f"{posixpath.basename(path)} has the layout of torch before 1.6, without checksums"
            )
        characters = MAX_KEY_CHARACTERS * file.pickle_bytes
        # No real pickle has more than one value per byte.
        for steps, value in walk_values(file.root, limit=file.pickle_bytes, where=file.where):
            if not isinstance(value, TensorRef):
                self._values[(*under, *steps)] = value
                continue
            loaded = _LoadedTensor(
                (*under, *(steps or _ONLY_TENSOR)), value, self._table.chunk(file, value)
            )
            self._tensors.append(loaded)
            characters -= len(loaded.key)
            if characters < 0:
                raise LimitError(
                    "names of tensors are far longer than the pickle", where=file.where
                )

    def files_by_key(self) -> dict[str, str]:
        files, records = self._table.files, self._table.records
        return {t.key: files[records[t.chunk.record].file].path for t in self._tensors}

    def index(self, where: str) -> TensorIndex:
        """Returns the index of all files that were added."""
        paths = [loaded.path for loaded in self._tensors]
        memberships = classify(paths, where=where, values=self._values)
        entries: dict[Key, TensorEntry] = {}
        views: dict[tuple[int, TensorRef], set[Key]] = defaultdict(set)  # of one storage
        for loaded, membership in zip(self._tensors, memberships, strict=True):
            shape = loaded.tensor.shape
            chunks = ChunkTable.of([loaded.chunk], len(shape))
            entry = membership.entry(loaded.path, loaded.tensor.dtype, shape, chunks)
            if entry.key in entries:
                raise FormatError(f"two tensors are called {entry.key!r}", where=where)
            entries[entry.key] = entry
            if 0 not in shape:
                views[loaded.chunk.record, loaded.tensor].add(entry.key)
        return TensorIndex(
            format=TorchFileReader.name,
            files=tuple(self._table.files),
            records=RecordTable.of(self._table.records),
            tensors=entries,
            values=self._values,
            aliases=tuple(frozenset(keys) for keys in views.values() if len(keys) > 1),
            run=RunFacts(
                step=self._framework.step,
                writer=self._framework.name or "torch.save",
                version=self._framework.version,
                notes=tuple(self._notes),
            ),
        )


def is_optimizer_file(path: str) -> bool:
    """Returns whether frameworks give that name to a file of an optimizer's state.

    >>> is_optimizer_file("checkpoint-5/optimizer_1.bin"), is_optimizer_file("optimizer_0/x.bin")
    (True, False)
    """
    return _OPTIMIZER_FILE.fullmatch(posixpath.basename(path)) is not None


def model_number(name: str) -> int:
    """Returns the number of a model, or of an optimizer, among those of one save; the first is 0.

    >>> model_number("pytorch_model_fsdp_1.bin"), model_number("model.safetensors")
    (1, 0)
    """
    match = _NUMBER.fullmatch(_stem(name))
    return int(match[1]) if match else 0


def _stem(path: str) -> str:
    return posixpath.basename(path).partition(".")[0]


class TorchOptimizerReader:
    """Reads optimizer states that `torch.save` wrote into files of their own."""

    name = "torch optimizer"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises such files by their names; each is a candidate."""
        return [
            Candidate(self.name, posixpath.dirname(path), (path,), repr(posixpath.basename(path)))
            for path in sorted(paths)
            if is_optimizer_file(path)
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the file; an empty one, with the reason, if it cannot be read."""
        try:
            return read_optimizer_file(source, candidate)
        except InputError as error:
            (path,) = candidate.files
            is_intact = isinstance(error, (UnsafePickleError, UnsupportedError))
            note = f"{posixpath.basename(path)} was left unread: {error.message}"
            return TensorIndex(
                format=TorchFileReader.name,
                files=(source.stat(path),),
                records=RecordTable.of([]),
                tensors={},
                run=RunFacts(notes=(note,) if is_intact else ()),
                problems=() if is_intact else (Problem(error.code, path, error.message),),
            )


def is_optimizer_candidate(candidate: Candidate) -> bool:
    return candidate.format == TorchOptimizerReader.name


def drop_lone_optimizers(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops the files of optimizers in folders without a model."""
    folders = {c.folder for c in candidates if not is_optimizer_candidate(c)}
    return [c for c in candidates if not is_optimizer_candidate(c) or c.folder in folders]


def read_optimizer_file(source: Source, candidate: Candidate) -> TensorIndex:
    """Returns the index of an optimizer's file; its state dict is called like the file."""
    (path,) = candidate.files
    contents = TorchContents()
    contents.add_file(source, path, (_stem(path),))
    return contents.index(posixpath.join(source.location, path))
