"""The files of a DeepSpeed checkpoint: their names, and what their pickles hold.

Source: deepspeed/runtime/engine.py (`_get_zero_ckpt_name`, `_get_ckpt_name`, `_save_checkpoint`),
deepspeed/runtime/pipe/module.py (`ckpt_layer_path`), deepspeed 0.19.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.index import FileRef, Record, Shape
from ckptkit.formats.pickles import (
    Builder,
    Global,
    InertDict,
    InertObject,
    inert_class,
    parse_pickle,
    shown,
)
from ckptkit.formats.torch_values import (
    ALLOWED,
    MAX_DIMENSIONS,
    TensorRef,
    rebuild_tensor_v2,
    storage_ref,
)
from ckptkit.formats.torch_zip import Archive, open_archive
from ckptkit.storage.base import Source

Kind = Literal["model", "optim"]
_NAME = re.compile(
    r"(bf16_)?(?:zero_pp_rank_(?P<rank>\d{1,7})_)?mp_rank_(?P<slice>\d{1,7})_"
    r"(?P<kind>optim|model)_states\.pt"
)
_NOT_MODELLED = {
    "experts in files of their own": re.compile(r"layer_\d+_expert_\d+_.*\.pt|expp_rank_.*\.pt"),
    "the layers of a pipeline": re.compile(r"layer_\d+-.*model_states\.pt"),
}
_UNIVERSAL = re.compile(
    r"(?:(?P<folder>.*)/)?zero/(?:[^/]+/)?(fp32|exp_avg|exp_avg_sq|step|optimizer_state)\.pt"
)
UNIVERSAL = "a universal checkpoint"
_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class FileName:
    """What the name of a file tells.

    Attributes:
        path: The file.
        kind: Whether it holds weights or optimizer states.
        rank: The data-parallel rank that wrote it; None for the only file of its kind.
        slice: The slice of tensor parallelism.
    """

    path: str
    kind: Kind
    rank: int | None
    slice: int


def parse_name(path: str) -> FileName | None:
    """Returns what the name of a file tells, or None where DeepSpeed names no file so."""
    match = _NAME.fullmatch(posixpath.basename(path))
    if match is None:
        return None
    kind: Kind = "model" if match["kind"] == "model" else "optim"
    rank = None if match["rank"] is None else int(match["rank"])
    return FileName(path, kind, rank, int(match["slice"]))


def not_modelled(path: str) -> tuple[str, str] | None:
    """Tells which part of a DeepSpeed checkpoint that is not modelled a file belongs to.

    Returns:
        The folder of the checkpoint and what the file holds, or None for any other file.
    """
    name = posixpath.basename(path)
    for what, pattern in _NOT_MODELLED.items():
        if pattern.fullmatch(name):
            return posixpath.dirname(path), what
    match = _UNIVERSAL.fullmatch(path)
    return None if match is None else (match["folder"] or "", UNIVERSAL)


def _stage(*args: object) -> int:
    match args:
        case (int(stage),):
            return stage
    raise FormatError("ZeRO's stage is not a number")


def _rebuild_from_type(*args: object) -> TensorRef:
    # How torch writes a tensor that was given attributes; they do not change its values.
    match args:
        case (
            Global("torch._utils", "_rebuild_tensor_v2"),
            Global("torch", "Tensor"),
            tuple(inner),
            _,
        ):
            return rebuild_tensor_v2(*inner)
    raise UnsupportedError("tensor is of a class that is not modelled")


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_OWN: Mapping[tuple[str, str], Builder | Global] = {
    (_SCALERS, "LossScaler"): inert_class(_SCALERS, "LossScaler"),
    (_SCALERS, "DynamicLossScaler"): inert_class(_SCALERS, "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _stage,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): inert_class(
        "deepspeed.utils.tensor_fragment", "fragment_address"
    ),
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Tensor"): Global("torch", "Tensor"),
}
_ALLOWED = {**ALLOWED, **_OWN}


@dataclass(frozen=True, slots=True)
class Document:
    """A dictionary out of a pickle, whose values may be anything until they are looked at.

    Attributes:
        values: The dictionary.
        where: The file, and what of it, for messages.
    """

    values: Mapping[Any, Any]
    where: str

    def inner(self, key: str) -> Document:
        """Returns the dictionary under a key; an empty one where there is none.

        Raises:
            FormatError: If it is something else.
        """
        return _document(self.values.get(key), f"{self.where}, {key!r}")

    def inner_list(self, key: str) -> list[Document]:
        """Returns the dictionaries in the list under a key; none where there is no list.

        Raises:
            FormatError: If it is something else.
        """
        where = f"{self.where}, {key!r}"
        return [_document(item, where) for item in self.sequence(key)]

    def sequence(self, key: str) -> Sequence[Any]:
        """Returns the list under a key; an empty one where there is none.

        Raises:
            FormatError: If it is something else.
        """
        found = self.values.get(key)
        if found is None:
            return ()
        if not isinstance(found, (list, tuple)):
            raise self.error(f"{key!r} is not a list")
        return found

    def vectors(self, key: str) -> list[TensorRef]:
        """Returns the one-dimensional tensors in the list under a key.

        Raises:
            FormatError: If something else is among them.
        """
        found = self.sequence(key)
        for item in found:
            if not (isinstance(item, TensorRef) and len(item.shape) == 1 and item.row_major):
                raise self.error(f"{key!r} holds something that is not a flat tensor")
        return list(found)

    def count(self, key: str) -> int | None:
        """Returns the natural number under a key, or None where there is none.

        Raises:
            FormatError: If it is something else.
        """
        found = self.values.get(key)
        if found is not None and not _is_count(found):
            raise self.error(f"{key!r} is not a natural number")
        return found

    def text(self, key: str) -> str:
        """Returns the text under a key, or an empty one."""
        found = self.values.get(key)
        return found if isinstance(found, str) else ""

    def shapes(self) -> dict[str, Shape]:
        """Returns the dictionary as one of shapes by name.

        Raises:
            FormatError: If it is none.
        """
        for name, shape in self.values.items():
            whole = isinstance(shape, tuple) and len(shape) <= MAX_DIMENSIONS
            if not (isinstance(name, str) and whole and all(map(_is_count, shape))):
                raise self.error("holds something that is not the shape of a parameter")
        return dict(self.values)

    def tensor(self, name: str) -> TensorRef:
        """Returns the tensor of a name.

        Raises:
            FormatError: If it is not there, or is something else.
        """
        found = self.values.get(name)
        if not isinstance(found, TensorRef):
            raise self.error(f"holds no tensor {shown(name)}")
        return found

    def error(self, message: str) -> FormatError:
        """Makes the error to raise for what was found wrong here."""
        return FormatError(message, where=self.where)


def _document(value: object, where: str) -> Document:
    if value is None:
        return Document({}, where)
    if isinstance(value, dict):
        return Document(value, where)
    if isinstance(value, InertObject) and isinstance(value.state, dict):
        return Document(value.state, where)
    raise FormatError("is not a dictionary", where=where)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


@dataclass(frozen=True, slots=True)
class ZeroFile:
    """An opened file.

    Attributes:
        name: What its name tells.
        number: Its position among the files of the index.
        content: What its pickle holds.
        archive: The zip archive that it is.
    """

    name: FileName
    number: int
    content: Document
    archive: Archive


@dataclass(slots=True)
class FileTable:
    """The files that were opened, and the records of the storages in them that are used."""

    files: list[FileRef] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    _places: dict[tuple[int, str], int] = field(default_factory=dict)

    def open(self, source: Source, name: FileName) -> ZeroFile:
        """Opens a file and parses its pickle.

        Raises:
            UnsafePickleError: If the pickle names something outside the allow-list.
            FormatError: If the file is damaged, or holds something else.
        """
        file = source.stat(name.path)
        where = posixpath.join(source.location, name.path)

        def read(start: int, stop: int) -> bytes:
            return source.read(name.path, start, stop)

        archive = open_archive(read, file.size_bytes, where=where)
        root = parse_pickle(archive.pickle(), _ALLOWED, where=where, persistent=storage_ref)
        if not isinstance(root, (dict, InertDict)):
            raise FormatError("holds no dictionary, as DeepSpeed writes one", where=where)
        self.files.append(file)
        return ZeroFile(name, len(self.files) - 1, Document(root, where), archive)

    def record(self, file: ZeroFile, tensor: TensorRef) -> int:
        """Returns the position of the record of a tensor's storage, adding it when new.

        Raises:
            FormatError: If the archive has no such record, or one of another length.
        """
        storage = tensor.storage
        place = file.number, storage.key
        known = self._places.get(place)
        if known is None:
            start, stop, crc32 = file.archive.extent(storage)
            known = self._places[place] = len(self.records)
            self.records.append(Record(file.number, start, stop, crc32=crc32))
        record = self.records[known]
        if record.stop - record.start != storage.size_bytes:
            raise file.content.error(f"storage {shown(storage.key)} has two different lengths")
        return known
