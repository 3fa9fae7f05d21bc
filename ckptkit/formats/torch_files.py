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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    LimitError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    FileRef,
    Key,
    KeyPath,
    Problem,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
    is_named_as_copy,
)
from ckptkit.core.text import counted
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.parsing import (
    INDEX_ENDING,
    FileTable,
    check_weight_map,
    find_data_files,
    group_model_files,
)
from ckptkit.formats.pickle.machine import InertObject
from ckptkit.formats.pickle.objects import (
    describe_objects,
    find_holders,
    find_unread,
    is_array,
    is_object,
    unwrap,
    whole_object_error,
)
from ckptkit.formats.pickle.pickles import MAX_KEY_CHARACTERS, walk_values
from ckptkit.formats.pickle.torch_archives import ArchiveTable
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import (
    EXTRA_STATE,
    TRAINING_VALUES,
    Framework,
    classify,
    detect_framework,
    find_aliases,
    is_name_of_weight,
    is_weight,
    join_path,
    part_of_path,
    problem_of,
)
from ckptkit.storage.base import Source

ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pth.lora")
# Files that accelerate, the Trainer, DeepSpeed, torchtune and others write next to a model.
_NOT_A_MODEL = re.compile(
    r"optim.*|scheduler.*|lr_scheduler.*|scaler.*|sampler.*|rng_state.*|random_states.*|dl_state_dict.*"
    r"|training_args\.bin|extra_state.*|recipe_state.*|(bf16_)?zero_pp_rank_.*"
    # Megatron-LM, Megatron-Bridge and slime
    r"|distrib_optim\.pt|layer_wise_optimizer_\d+\.pt|train_dataloader_dprank\d+\.pt"
    r"|latest_train_state\.pt|global_dataset_state_dict_\d+\.pt"
)
_OPTIMIZER_FILE = re.compile(r"optimizer(_\d{1,7})?\.(bin|pt)")
_ONLY_TENSOR: KeyPath = ("tensor",)  # the path of a tensor that is in no container
_ALL = "*"  # the name of all tensors of an object
_UNKNOWN = BY_NAME["float32"]  # in place of a type that is not known


class TorchFileReader(FormatReader):
    name = "torch"
    order = 140
    expected = "'*.pt', '*.pth', '*.bin' or '*.ckpt'"
    endings = r"\.(?:pt|pth|bin|ckpt|tar|lora)(?:\.index\.json)?"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        own = [path for path in paths if not _NOT_A_MODEL.fullmatch(posixpath.basename(path))]
        return group_model_files(own, ENDINGS, self.name)

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        paths, weight_map = find_data_files(source, candidate)
        contents = TorchContents()
        for path in paths:
            contents.add_file(source, path)
        if weight_map is not None:
            check_weight_map(weight_map, contents.files_by_key())
        indices = [path for path in candidate.files if path.endswith(INDEX_ENDING)]
        return contents.index(*map(source.stat, indices))


class _LoadedTensor(Struct, frozen=True):
    """A tensor, its path, its file, and its chunk.

    A tensor that cannot be read has no chunk, and the error that says why; the tensors of an object
    are one of these.
    """

    path: KeyPath
    file: str
    dtype: DType
    shape: Shape
    chunk: Chunk | None = None
    error: CkptkitError | None = None

    @property
    def key(self) -> Key:
        return Key(join_path(self.path))


class TorchContents(Struct):
    _table: ArchiveTable = field(default_factory=ArchiveTable)
    _tensors: list[_LoadedTensor] = field(default_factory=list)
    _unread: dict[KeyPath, Any] = field(default_factory=dict)  # tensors that are not modelled
    _holders: list[_LoadedTensor] = field(default_factory=list)  # objects with tensors
    _values: dict[KeyPath, Any] = field(default_factory=dict)
    _framework: Framework = field(default_factory=Framework)
    _notes: list[str] = field(default_factory=list)

    def add_file(self, source: Source, path: str, under: KeyPath = ()) -> None:
        """Adds the tensors and values of one file, with `under` in front of all paths."""
        file = self._table.open(source, path, TRAINING_VALUES)
        file = replace(file, root=unwrap(file.root))
        if isinstance(file.root, InertObject):
            raise whole_object_error(file.root, file.where)
        if not self._framework.name:
            self._framework = detect_framework(file.root)
        if file.is_legacy:
            self._notes.append(
                f"{posixpath.basename(path)} has the layout of torch before 1.6, without checksums"
            )
        characters = MAX_KEY_CHARACTERS * file.pickle_bytes
        objects: dict[KeyPath, InertObject] = {}
        for steps, value in walk_values(file.root, limit=file.most_values, where=file.where):
            place = (*under, *(steps or _ONLY_TENSOR))
            if isinstance(value, TensorRef):
                chunk = self._table.chunk(file, value)
                loaded = _LoadedTensor(place, path, value.dtype, value.shape, chunk)
            elif (unread := find_unread(value)) is not None:
                self._unread[place] = value
                dtype = unread.dtype or _UNKNOWN
                loaded = _LoadedTensor(place, path, dtype, unread.shape, error=unread.error())
            else:
                self._values[(*under, *steps)] = value
                if isinstance(value, InertObject):
                    objects[place] = value
                continue
            self._tensors.append(loaded)
            characters -= len(loaded.key)
            if characters < 0:
                raise LimitError(
                    "names of tensors are far longer than the pickle", where=file.where
                )
        self._holders += _list_arrays(objects)
        holders = find_holders(objects.values())
        self._holders += (
            _LoadedTensor((*place, _ALL), path, _UNKNOWN, (), error=whole_object_error(value, ""))
            for place, value in objects.items()
            if id(value) in holders
        )

    def files_by_key(self) -> dict[str, str]:
        return {t.key: t.file for t in self._tensors}

    def index(self, *beside: FileRef) -> TensorIndex:
        """Returns the index of all files that were added, and of those `beside` them."""
        paths = [loaded.path for loaded in self._tensors]
        memberships = classify(paths, values=self._values)
        pairs = list(zip(self._tensors, memberships, strict=True))
        has_model = any(member.part == "model" for member in memberships)
        # A copy, such as an average, may not be taken in place of a model that cannot be read.
        is_there = any(
            is_weight(path, member) and not is_named_as_copy(member.tree)
            for path, member in zip(paths, memberships, strict=True)
        )
        holders = [] if is_there else self._wanted_holders(has_model=has_model)
        of_holders = classify([loaded.path for loaded in holders])
        pairs += zip(holders, of_holders, strict=True)
        entries: dict[Key, TensorEntry] = {}
        problems: list[Problem] = []
        for loaded, membership in pairs:
            if loaded.error is not None and membership.part == "other":
                continue  # nobody needs it
            chunks = ChunkTable.of(list(filter(None, [loaded.chunk])), len(loaded.shape))
            entry = membership.entry(loaded.path, loaded.dtype, loaded.shape, chunks)
            if entry.key in entries:
                raise FormatError(f"two tensors are called {entry.key!r}")
            entries[entry.key] = entry
            if loaded.error is not None:
                problems.append(problem_of(entry, loaded.error))
        run = RunFacts(
            step=self._framework.step,
            writer=self._framework.name or "torch.save",
            version=self._framework.version,
            notes=tuple(self._notes),
            warnings=describe_objects(self._objects(list(entries.values()))),
        )
        return self._table.index(
            TorchFileReader.name,
            entries,
            *beside,
            values=self._values,
            aliases=find_aliases(entries.values()),
            run=run,
            problems=tuple(problems),
        )

    def _wanted_holders(self, *, has_model: bool) -> list[_LoadedTensor]:
        """Returns the objects in which a model is: all that keys call one.

        If there is no other model, it is the first of these, or the first whose keys say nothing.
        """
        pairs = [(one, part_of_path(one.path[:-1])) for one in self._holders]
        named = [loaded for loaded, part in pairs if part == "model"]
        if has_model:
            return named
        return (named or [loaded for loaded, part in pairs if part is None])[:1]

    def _objects(self, entries: Sequence[TensorEntry]) -> dict[KeyPath, Any]:
        """Returns what to tell the user of: objects, and other values among the weights."""
        paths = {entry.key_path for entry in entries}
        models = {entry.key_path[:-1] for entry in entries if entry.part == "model"}
        holders = {loaded.path[:-1] for loaded in self._holders}
        unread = {path: value for path, value in self._unread.items() if path not in paths}
        return unread | {
            path: value
            for path, value in self._values.items()
            if is_object(value)
            or path in holders
            or (
                isinstance(value, InertObject)
                and path[:-1] in models
                and EXTRA_STATE not in str(path[-1])
            )
        }


def _list_arrays(objects: Mapping[KeyPath, InertObject]) -> Iterator[_LoadedTensor]:
    """Yields the dictionaries of arrays of numpy that have the names of weights."""
    homes = Counter(place[:-1] for place, value in objects.items() if is_array(value))
    for home, count in homes.items():
        if part_of_path(home) == "model" or any(
            place[:-1] == home and is_name_of_weight(str(place[-1])) for place in objects
        ):
            error = UnsupportedError(
                f"holds {counted(count, 'array')} of numpy in place of tensors",
                hint="save tensors: `{name: torch.from_numpy(array) for name, array in"
                " state_dict.items()}`",
            )
            yield _LoadedTensor((*home, _ALL), "", _UNKNOWN, (), error=error)


def is_optimizer_file(path: str) -> bool:
    """Returns whether frameworks give that name to a file of an optimizer's state.

    >>> is_optimizer_file("checkpoint-5/optimizer_1.bin"), is_optimizer_file("optimizer_0/x.bin")
    (True, False)
    """
    return _OPTIMIZER_FILE.fullmatch(posixpath.basename(path)) is not None


class TorchOptimizerReader(FormatReader):
    name = "torch optimizer"
    order = 130
    endings = r"\.(?:pt|bin)"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        return [
            Candidate(self.name, posixpath.dirname(path), (path,), repr(posixpath.basename(path)))
            for path in sorted(paths)
            if is_optimizer_file(path)
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the file; an empty one, with the reason, if it cannot be read."""
        try:
            return read_optimizer_file(source, candidate)
        except InputError as error:
            (path,) = candidate.files
            is_intact = isinstance(error, (UnsafePickleError, UnsupportedError))
            note = f"{posixpath.basename(path)} was left unread: {error.message}"
            return FileTable().index(
                TorchFileReader.name,
                {},
                source.stat(path),
                run=RunFacts(notes=(note,) if is_intact else ()),
                problems=() if is_intact else (Problem(error.code, path, error.message),),
            )


def read_optimizer_file(source: Source, candidate: Candidate) -> TensorIndex:
    """Returns the index of an optimizer's file; its state dict is called like the file."""
    (path,) = candidate.files
    contents = TorchContents()
    contents.add_file(source, path, (posixpath.basename(path).partition(".")[0],))
    with errors_at(posixpath.join(source.location, path)):
        return contents.index()
