"""The sidecar of a step: configurations, tokenizer and facts of the run, which a conversion needs.

It is collected once, on rank 0, and written into every step, so that a step describes its model by
itself. Nothing that could be a secret is taken, such as `training_args.bin`. Also the check of
small files that the user saves with a step.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast, runtime_checkable

from torch import nn

from ckptkit.consumers.table import ADAPTER_CONFIG, CONFIG, GENERATION
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME, RUN_FACTS, SIDE_FOLDER
from ckptkit.core.model_configs import CLASS_NAME, class_of, parse_model_config, to_json
from ckptkit.core.text import a_kind
from ckptkit.training.step_names import innermost
from ckptkit.writer.messages import Inline
from ckptkit.writer.process import as_failure

_DEFAULT_ADAPTER = "default"  # PEFT's name for the adapter at the top
_FSDP2_PREFIX = "FSDP"  # what `fully_shard` puts before the name of a module's class
_SECRET = frozenset({"training_args.bin"})  # the Trainer's, with the token for the Hub
_MAX_BYTES = 128 << 20  # tokenizers have up to some 40 MB; more is a folder of weights
_Files = dict[str, bytes]


@runtime_checkable
class _Pretrained(Protocol):
    def save_pretrained(self, save_directory: str) -> object: ...


def check_sidecar(sidecar: object) -> Mapping[str, object]:
    """Returns the user's sidecar after a check that all of it can be stored."""
    if sidecar is None:
        return {}
    if not isinstance(sidecar, Mapping):
        raise UsageError(
            f"expected names and what to store, got {a_kind(sidecar)}",
            where="sidecar",
            hint='pass a dict, such as sidecar={"processing_class": tokenizer}',
        )
    for key, value in sidecar.items():
        if not isinstance(key, str):
            raise UsageError(f"expected a name, got {a_kind(key)}", where=f"sidecar[{key!r}]")
        _check_kind(key, value)
    return sidecar


def _check_kind(key: str, value: object) -> None:
    is_object = isinstance(value, _Pretrained) and not isinstance(value, (nn.Module, type))
    if not is_object and not isinstance(value, (str, bytes, os.PathLike)):
        raise UsageError(
            f"expected a tokenizer or processor, a path or bytes, got {a_kind(value)}",
            where=f"sidecar[{key!r}]",
        )


def collect_sidecar(
    models: Sequence[nn.Module], sidecar: Mapping[str, object]
) -> tuple[Inline, ...]:
    """Collects the files that describe a step.

    The user adds, by name: an object with `save_pretrained` (a tokenizer or processor), the path of
    a file or folder, whose names are kept, or bytes, which are stored under the name.

    The first model with a Transformers configuration adds `config.json`, `generation_config.json`
    and the configuration of every PEFT adapter: the default one at the top, others in
    `adapters/NAME`. A model without one adds nothing.

    Returns:
        Files below `ckptkit/`, sorted by path.
    """
    files: _Files = {}
    for model in models:
        files |= _configurations(innermost(model))
        if files:
            break
    for key, value in sidecar.items():
        for name, data in _given(key, value):
            _add(files, name, data, key)
    size = sum(map(len, files.values()))
    if size > _MAX_BYTES:
        raise UsageError(
            f"holds {size:,} bytes against at most {_MAX_BYTES:,}, and would be written into"
            " every step",
            where="sidecar",
            hint="pass the files of a tokenizer or processor, not a folder with weights",
        )
    return tuple(Inline(f"{SIDE_FOLDER}/{name}", files[name]) for name in sorted(files))


def run_facts(facts: Mapping[str, object], models: Sequence[nn.Module] = ()) -> Inline:
    """Returns the file that describes the layout of the run.

    `base_model` has, of the first model with a configuration, the `id` under which it was loaded
    and the `commit_hash` on the Hub, which `config.json` does not have.
    """
    document = {**facts}
    for base in map(_base_of, map(innermost, models)):
        if hasattr(getattr(base, "config", None), "to_json_string"):
            origin = {"id": _base_id(base), "commit_hash": _commit_hash(base)}
            if any(origin.values()):
                document["base_model"] = {name: text for name, text in origin.items() if text}
            break
    return Inline(RUN_FACTS, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())


def _base_id(base: nn.Module) -> str | None:
    return getattr(base, "name_or_path", None) or None


def _commit_hash(base: nn.Module) -> str | None:
    """Returns the Hub's commit of the model, for which Transformers has no public attribute."""
    commit = getattr(getattr(base, "config", None), "_commit_hash", None)
    return commit if isinstance(commit, str) and commit else None


def configuration_of(model: nn.Module) -> Mapping[str, Any] | None:
    """Returns the configuration that a step stores for a model, None for a model without one."""
    data = _configurations(innermost(model)).get(CONFIG)
    return None if data is None else parse_model_config(data, where=CONFIG)


def _configurations(model: nn.Module) -> _Files:
    """Returns the configurations of a model and its adapters; none for other modules."""
    files: _Files = {}
    adapters = getattr(model, "peft_config", None)
    base = _base_of(model)
    config = getattr(base, "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        # As `save_pretrained` of the model would write it.
        config = copy.deepcopy(config)
        config.architectures = [type(base).__name__.removeprefix(_FSDP2_PREFIX)]
        files[CONFIG] = str(config.to_json_string()).encode()
        generation = getattr(base, "generation_config", None)
        if generation is not None and hasattr(generation, "to_json_string"):
            files[GENERATION] = generation.to_json_string().encode()
    elif getattr(base, "config_name", None) == CONFIG:  # a model of diffusers
        text = cast(Callable[[], str], base.to_json_string)()
        config = parse_model_config(text.encode(), where=CONFIG)
        files[CONFIG] = to_json({**config, CLASS_NAME: class_of(config)})
    for name, adapter in adapters.items() if isinstance(adapters, dict) else ():
        folder = "" if name == _DEFAULT_ADAPTER else f"adapters/{name}/"
        files[f"{folder}{ADAPTER_CONFIG}"] = _adapter_config(adapter, base)
    return files


def _base_of(model: nn.Module) -> nn.Module:
    """Returns the base model of a PEFT model; for others the model itself."""
    if not isinstance(getattr(model, "peft_config", None), dict):
        return model
    get = getattr(model, "get_base_model", None)
    return innermost(cast(Callable[[], nn.Module], get)()) if get is not None else model


def _adapter_config(adapter: Any, base: nn.Module) -> bytes:
    """Returns `adapter_config.json` as PEFT writes it for an adapter.

    A missing revision is set to the one that the base was loaded from.

    Source: peft 0.21, `PeftModel.save_pretrained`.
    """
    adapter = copy.deepcopy(adapter)
    if adapter.base_model_name_or_path is None:
        adapter.base_model_name_or_path = _base_id(base)
    if adapter.revision is None and adapter.base_model_name_or_path == _base_id(base):
        adapter.revision = _commit_hash(base)
    adapter.inference_mode = True
    mapping = None
    if adapter.task_type is None:  # PEFT then finds the class of the base by these
        name = type(base).__name__.removeprefix(_FSDP2_PREFIX)
        mapping = {"base_model_class": name, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        adapter.save_pretrained(folder, auto_mapping_dict=mapping)
        return (Path(folder) / ADAPTER_CONFIG).read_bytes()


def _given(key: str, value: object) -> Iterator[tuple[str, bytes]]:
    """Yields the files of one value of the user's."""
    _check_kind(key, value)
    if isinstance(value, bytes):
        yield key, value
    elif isinstance(value, (str, os.PathLike)):
        path = Path(value)
        if path.is_dir():
            yield from _below(path)
        elif path.is_file():
            yield path.name, path.read_bytes()
        else:
            raise UsageError("no such file or folder", where=f"sidecar[{key!r}] {str(path)!r}")
    elif isinstance(value, _Pretrained):
        with tempfile.TemporaryDirectory() as folder:
            value.save_pretrained(folder)
            yield from _below(Path(folder))


def _below(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the files of a folder, except hidden and secret ones."""
    total = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if hidden or name.name in _SECRET or not path.is_file():
            continue
        total += path.stat().st_size
        if total > _MAX_BYTES:  # before gigabytes of weights are read into memory
            raise UsageError(
                f"holds more than {_MAX_BYTES:,} bytes", where=f"sidecar folder {str(folder)!r}"
            )
        yield name.as_posix(), path.read_bytes()


def _add(files: _Files, name: str, data: bytes, key: str) -> None:
    where = f"sidecar[{key!r}]"
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or pure.name in _SECRET:
        raise UsageError(f"{name!r} was found where the name of a file was expected", where=where)
    if f"{SIDE_FOLDER}/{pure}" == RUN_FACTS or files.get(str(pure), data) != data:
        raise UsageError(
            f"has another {str(pure)!r} than the step already has",
            where=where,
            hint="leave it out of the sidecar, or rename it",
        )
    files[str(pure)] = data


# Of all layouts, since a step may be resumed in another one; see `step_names`.
_TOP = re.compile(
    rf"{re.escape(SIDE_FOLDER)}|\.ckptkit.*|(?:pytorch_model_fsdp|optimizer|base_model)_\d+"
    r"|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|rng_state(?:_\d+)?\.pth"
    r"|scheduler(?:_\d+)?\.(?:bin|pt)|scaler(?:_\d+)?\.pt"
)
_ANYWHERE = re.compile(rf"{re.escape(MANIFEST_NAME)}|\.metadata|\.ranks|.*\.distcp")


class StepFile(bytes):
    """Bytes of an integration that replace a file of the step itself."""


def checked_files(files: Mapping[str, bytes], taken: Iterable[str] = ()) -> tuple[Inline, ...]:
    """Returns files of the user for a step's directory."""
    if not isinstance(files, Mapping):
        raise UsageError(f"expected bytes by file name, got {a_kind(files)}", where="files")
    own = {name.casefold() for name in taken} - {""}
    for name, data in files.items():
        _check_file(name, data, own)
    known = {name.casefold(): name for name in files}
    for name in files:
        parts = name.split("/")
        above = (known.get("/".join(parts[:end]).casefold()) for end in range(1, len(parts)))
        other = next(filter(None, above), known[name.casefold()])
        if other != name:
            raise UsageError(
                f"this name and {other!r} cannot be in one directory on every file system",
                where=f"files[{name!r}]",
                hint="choose another",
            )
    return tuple(Inline(name, bytes(data)) for name, data in files.items())


def _check_file(name: object, data: object, own: Collection[str]) -> None:
    where = f"files[{name!r}]"
    if not isinstance(name, str) or not _is_relative(name):
        raise UsageError(
            "expected the name of a file in the step's directory",
            where=where,
            hint="pass names such as 'notes.json' or 'notes/a.json'",
        )
    if not isinstance(data, bytes):
        raise UsageError(f"expected bytes, got {a_kind(data)}", where=where)
    parts = name.casefold().split("/")  # some file systems ignore case
    taken = parts[0] in own or _TOP.fullmatch(parts[0]) or any(map(_ANYWHERE.fullmatch, parts))
    if taken and not isinstance(data, StepFile):
        raise UsageError(
            "this name is taken by files of the step itself", where=where, hint="choose another"
        )


def _is_relative(name: str) -> bool:
    """Returns whether a name is that of a file below a directory, on every file system."""
    if "\0" in name or "\\" in name or not name.isprintable():
        return False
    return all(part and not part.endswith((".", " ")) for part in name.split("/"))


class SidecarFolders:
    """Folders of sidecar files, which never change; the newest one is for the next save.

    Commits under way copy from earlier ones, as many as saves may be in flight.

    Attributes:
        folder: The newest one.
    """

    def __init__(self, parents: Sequence[Path], in_flight: int) -> None:
        """Creates nothing yet; folders are created in the first of `parents` that is writable.

        `in_flight` is how many saves may be under way, including the next one.
        """
        self._parents = parents
        self.folder = Path()
        self._kept: deque[Path] = deque()
        self._most = in_flight
        self._count = 0
        self._objects: tuple[object, ...] = ()
        self._places: object = ()
        self._files: Sequence[Inline] = ()

    def describes(self, objects: Sequence[object], places: object) -> bool:
        """Returns whether the newest folder is there and is of these objects and places.

        The objects are the models and optimizers that the files describe, the places those of other
        values, which they describe as well.
        """
        is_same = list(map(id, objects)) == list(map(id, self._objects)) and places == self._places
        return self._exists and is_same

    def write(self, files: Sequence[Inline], objects: Sequence[object], places: object) -> None:
        """Writes files to a new folder if they differ from those of the newest one.

        Removes the folders that no commit needs any more.
        """
        if not self._exists or tuple(files) != tuple(self._files):
            self._count += 1
            self.folder = self._create(str(self._count), files)
            self._kept.append(self.folder)
            self._files = files
        self._objects, self._places = tuple(objects), places
        while len(self._kept) > self._most:
            shutil.rmtree(self._kept.popleft(), ignore_errors=True)

    @property
    def _exists(self) -> bool:
        return bool(self._kept) and self.folder.is_dir()

    def close(self) -> None:
        """Removes all of them."""
        for parent in self._parents:
            shutil.rmtree(parent, ignore_errors=True)
        self._kept.clear()

    def _create(self, name: str, files: Sequence[Inline]) -> Path:
        problems: list[CkptkitError] = []
        for parent in self._parents:
            new = parent / name
            try:
                for file in files:
                    path = new / file.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(file.data)
            except OSError as error:
                shutil.rmtree(new, ignore_errors=True)
                problems.append(as_failure(error, str(new)))
            else:
                return new
        raise problems[-1]
