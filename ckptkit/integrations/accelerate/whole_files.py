"""Files that accelerate and DeepSpeed save whole, captured where they would be written.

The library's own code runs and decides which files there are and what is in them. Only the calls
that write tensors are caught: `torch.save`, and `save_file` of safetensors. They give the content
of a file without the data of its tensors, which is then copied like that of any other save.

Source: accelerate 1.15, `Accelerator.save_state` and `accelerate.utils.save`; DeepSpeed 0.19,
`TorchCheckpointEngine`; torch/serialization.py `_save` of 2.13 for the identities of storages.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, field
from torch.serialization import location_tag

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.index import Fqn, Key
from ckptkit.integrations.patches import replaced
from ckptkit.plan.layouts.hf import layout_adapter
from ckptkit.plan.layouts.torch import ZipParts
from ckptkit.plan.plan import Copy, Literal, OutputFile, Product, TensorSpec, lay_out_file
from ckptkit.training.state.pieces import Holdings, Piece, whole_places
from ckptkit.writer.messages import Inline

_INLINE_BYTES = 1 << 16  # of a file that is sent in a message
_PROTOCOL = 2  # of torch's pickles
_BODY = Copy("", Key(""))


class WholeFiles(Struct):
    """The files of one save, by their paths in the step."""

    files: dict[str, tuple[OutputFile, list[torch.Tensor]]] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        return [*self.files, *self.small]

    def drop(self, path: str) -> None:
        self.files.pop(path, None)
        self.small.pop(path, None)

    def holdings(self) -> Holdings:
        """Returns them for a save; tensors are still those of training."""
        pieces = [
            Piece("", (path, n), tuple(t.shape), whole_places(tuple(t.shape)), t.detach())
            for path, (_, tensors) in self.files.items()
            for n, t in enumerate(tensors)
        ]
        return Holdings(
            tuple(pieces),
            files=tuple(Inline(path, data) for path, data in self.small.items()),
            whole=tuple(file for file, _ in self.files.values()),
        )


@contextmanager
def capturing(folder: Path) -> Iterator[WholeFiles]:
    """Captures what this thread saves below a folder; other files are there at the end.

    The folder has to exist until the files are copied.
    """
    from accelerate.utils import other

    found, thread = WholeFiles(), threading.get_ident()

    def path_of(target: Any) -> str:
        """Returns the path in the step; empty of what is written as ever."""
        if threading.get_ident() != thread or not isinstance(target, str | os.PathLike):
            return ""
        path = Path(os.path.abspath(target))  # noqa: PTH100  links are not followed
        return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else ""

    def save(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
        path = path_of(f)
        if not path:
            stock_save(obj, f, *arguments, **options)
            return
        is_usual = not arguments and set(options) <= {"_use_new_zipfile_serialization"}
        file, tensors = _archive_of(obj, path) if is_usual else (None, [])
        if file is not None and file.size_bytes > _INLINE_BYTES:
            found.files[path] = file, tensors
            return
        data = io.BytesIO()
        stock_save(obj, data, *arguments, **options)
        _add_bytes(found, path, torch.frombuffer(data.getbuffer(), dtype=torch.uint8))

    def save_file(
        tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any = None, **options: Any
    ) -> None:
        path = path_of(filename)
        if not path or options:
            stock_save_file(tensors, filename, metadata=metadata, **options)
            return
        found.files[path] = _weights_of(tensors, path, metadata or {})

    stock_save, stock_save_file = torch.save, getattr(other, "safe_save_file", save_file)
    with replaced(torch, save=save), replaced(other, safe_save_file=save_file):
        yield found
    for path in sorted(folder.rglob("*")):
        size = path.stat().st_size if path.is_file() else 0
        if size:
            data = torch.from_file(str(path), size=size, dtype=torch.uint8)
            _add_bytes(found, path.relative_to(folder).as_posix(), data)
        elif path.is_file():
            found.small[path.relative_to(folder).as_posix()] = b""


def _add_bytes(found: WholeFiles, path: str, data: torch.Tensor) -> None:
    """Adds a file that is known to the last byte."""
    if data.numel() <= _INLINE_BYTES:
        found.small[path] = data.numpy().tobytes()
        return
    found.files[path] = lay_out_file(path, [(data.numel(), _BODY, None)]), [data]


class _Pickler(pickle.Pickler):
    """Pickles as `torch.save`, and lists the storages instead of writing them."""

    def __init__(self, target: io.BytesIO) -> None:
        super().__init__(target, protocol=_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        typed: Any = obj
        if isinstance(obj, torch.storage.TypedStorage):
            storage = typed._untyped_storage  # noqa: SLF001  as torch.save
            kind, length = getattr(torch, typed._pickle_storage_type()), typed._size()  # noqa: SLF001
        elif isinstance(obj, torch.UntypedStorage):
            storage, kind, length = obj, torch.UntypedStorage, obj.nbytes()
        else:
            return None
        number = self._numbers.setdefault(storage._cdata, len(self.storages))  # noqa: SLF001
        if number == len(self.storages):
            self.storages.append(storage)
        return "storage", kind, str(number), location_tag(storage), length


def _archive_of(obj: object, path: str) -> tuple[OutputFile, list[torch.Tensor]]:
    """Returns what `torch.save` would write, and the bytes of its storages as tensors."""
    target = io.BytesIO()
    pickler = _Pickler(target)
    pickler.dump(obj)
    parts = ZipParts(Path(path).stem)
    parts.add_bytes("data.pkl", target.getvalue())
    parts.add_bytes("byteorder", b"little")
    tensors = []
    for number, storage in enumerate(pickler.storages):
        tensors.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        parts.add(f"data/{number}", storage.nbytes(), _BODY)
    parts.add_bytes("version", b"3\n")
    parts.finish()
    return lay_out_file(path, parts.rows), tensors


def _weights_of(
    tensors: Mapping[str, torch.Tensor], path: str, metadata: Mapping[str, str]
) -> tuple[OutputFile, list[torch.Tensor]]:
    """Returns what `save_file` of safetensors would write, and its tensors in their order."""
    products = [
        Product(TensorSpec(Fqn(name), dtype_named(str(value.dtype)), tuple(value.shape)), _BODY)
        for name, value in tensors.items()
    ]
    file = layout_adapter(products, path.removesuffix(".safetensors"), metadata)
    specs = (segment.spec for segment in file.segments if not isinstance(segment.body, Literal))
    return file, [tensors[spec.name] for spec in specs if spec is not None]
