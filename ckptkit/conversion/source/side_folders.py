"""The configuration, tokenizer and other side files of a checkpoint."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.conversion.source.open import OpenedCheckpoint, make_absolute, open_folder
from ckptkit.core.errors import FormatError, InputError, MissingFileError
from ckptkit.core.manifest import SIDE_FOLDER, Manifest
from ckptkit.core.model_configs import parse_json_object, parse_model_config
from ckptkit.formats.discovery import RELEASE, is_unit_folder, parse_step
from ckptkit.plan.side_files import (
    CONFIG,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER,
    SideFile,
    choose_side_files,
    has_auto_map,
    is_side_file,
    rewrite_side_file,
)
from ckptkit.runs.step_manifests import step_folder
from ckptkit.runs.stored_proofs import check_file
from ckptkit.storage.base import Folder, StoreFolder
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, place_of

if TYPE_CHECKING:
    from ckptkit.plan.plan import OutputFile

_NESTED = ("ckptkit", "huggingface")  # folders of the training hooks, and of verl
_MEGATRON_FORMATS = {"dcp", "megatron"}
# Folders of Megatron-LM and Megatron-Bridge, and of NeMo.
_OF_MEGATRON = ("hf", "tokenizer", "context/artifacts", "context/nemo_tokenizer")
_WEIGHTS = "weights"  # NeMo's folder, beside `context`
_SHALLOW = (*_NESTED, *_OF_MEGATRON, "additional_chat_templates")
_HUB, _REPOSITORY = "hf://", 3  # slashes before the end of hf://org/name
_AUTO_MAP = "auto_map"
_CLIMB = 2  # from checkpoint-500/pytorch_model_fsdp_0 up to the run


class SideFolders:
    """The folders that can hold side files, nearest to the weights first.

    Attributes:
        base: The model folder of `--base`, or None.
        sources: The folders, by their paths.
    """

    def __init__(
        self, stack: ExitStack, checkpoint: OpenedCheckpoint, base: PathLike | None
    ) -> None:
        self.base = None if base is None else place_of(base)
        self.sources: dict[str, Folder] = {}
        self._proofs: dict[str, tuple[Manifest, str] | None] = {}  # and what names begin with
        base_folder = None if base is None else open_folder(stack, base, "--base")
        formats = {unit.candidate.format for unit in checkpoint.units}
        names = (*_NESTED, *(() if formats.isdisjoint(_MEGATRON_FORMATS) else _OF_MEGATRON), "")
        models = [unit.candidate.folder for unit in checkpoint.units if not unit.is_optimizer]
        for root in checkpoint.source.folders:
            above: dict[str, StoreFolder | None] = {}
            step = _in(root.location, checkpoint.folder)
            if checkpoint.manifest is not None:
                saved = _in(root.location, step_folder(checkpoint.units[0].candidate.folder))
                self._proofs[_in(saved, SIDE_FOLDER)] = checkpoint.manifest, f"{SIDE_FOLDER}/"
            units = [_in(root.location, folder) for folder in models]
            inside = [home for unit in units if unit != step for home in (unit, *_above(unit))]
            homes = [*inside, step, *_above(step)]
            for path in dict.fromkeys(_in(home, name) for home in homes for name in names):
                if path not in self.sources:
                    source = _open_if_there(stack, root, path, above)
                    if source is not None:
                        self.sources[path] = source
        self._base_location = None if base_folder is None else base_folder.location
        if base_folder is not None:
            self.sources.setdefault(base_folder.location, base_folder)

    def choose(self, *, allow_code: bool) -> tuple[list[SideFile], list[str]]:
        """Chooses side files by their sizes; returns them, and the python files left out."""
        listed = []
        for origin, source in self.sources.items():
            sizes = {}
            for path in filter(is_side_file, source.walk(1)):
                with suppress(InputError):  # what cannot be read is no side file
                    sizes[path] = source.stat(path).size_bytes
            listed.append((origin, sizes))
        return choose_side_files(listed, allow_code=allow_code)

    def read(self, file: SideFile) -> bytes:
        """Returns the content, which has the digest that ckptkit wrote for it, if there is one."""
        self.prove(file.origin, file.path)
        return self.sources[file.origin].read(file.path, 0, file.size_bytes)

    def prove(self, origin: str, path: str) -> None:
        """Compares a file of a folder with the digest that ckptkit wrote for it, if it did."""
        source = self.sources[origin]
        if origin not in self._proofs:
            self._proofs[origin] = None
            with suppress(MissingFileError):
                self._proofs[origin] = read_manifest(source), ""
        proof = self._proofs[origin]
        if proof is not None:
            manifest, begin = proof
            check_file(source, path, manifest, f"{begin}{path}")

    def outputs(
        self, files: Sequence[SideFile], config: Mapping[str, Any] | None, *, allow_code: bool
    ) -> list[OutputFile]:
        """Plans the files as they are to be written.

        Args:
            files: The result of `choose`.
            config: The model's configuration as it is written, or None.
            allow_code: Whether to keep `auto_map`, which names python files.
        """
        from ckptkit.plan.plan import Literal, RawCopy, lay_out_file  # late: inspect plans nothing

        outputs = []
        for file in files:
            read = partial(self.read, file)
            data = rewrite_side_file(
                file.name, file.size_bytes, read, config, allow_code=allow_code
            )
            if data is None:
                self.prove(file.origin, file.path)
            body = RawCopy(file.origin, file.path) if data is None else Literal(data)
            size = file.size_bytes if data is None else len(data)
            outputs.append(lay_out_file(file.name, [(size, body, None)]))
        return outputs

    def tokenizer(self, files: Sequence[SideFile]) -> dict[str, Any] | None:
        """Returns the tokenizer; None where there is none, or it cannot be parsed."""
        file = next((file for file in files if file.name == TOKENIZER), None)
        if file is None or file.size_bytes > MAX_TOKENIZER_BYTES:
            return None
        try:
            return parse_json_object(self.read(file), where=file.path)
        except FormatError:
            return None

    def code_of(self, files: Sequence[SideFile]) -> dict[str, Any]:
        """Returns the `auto_map` of the configuration, which is not written; empty without one."""
        config = self.config(files) or {}
        return {_AUTO_MAP: config[_AUTO_MAP]} if has_auto_map(config) else {}

    def base_of_config(self, files: Sequence[SideFile]) -> str | None:
        """Returns the folder of `--base` if the configuration is from there, else None."""
        file = next((file for file in files if file.name == CONFIG), None)
        is_of_base = file is not None and file.origin == self._base_location
        return self.base if is_of_base else None

    def config(self, files: Sequence[SideFile]) -> dict[str, Any] | None:
        """Returns the model's configuration, or None where there is none."""
        file = next((file for file in files if file.name == CONFIG), None)
        if file is None or file.size_bytes > MAX_JSON_BYTES:
            return None
        where = posixpath.join(self.sources[file.origin].location, file.path)
        return parse_model_config(self.read(file), where=where)


def _open_if_there(
    stack: ExitStack, root: Folder, path: str, above: dict[str, StoreFolder | None]
) -> Folder | None:
    """Opens a folder in or above an open one.

    Of a store it is a part of a listing. Above the root, only side folders are listed; `above` has
    these listings.
    """
    if not isinstance(root, StoreFolder):
        return stack.enter_context(LocalSource(Path(path))) if Path(path).is_dir() else None
    inside = _rest_of(path, root.location)
    if inside is None:
        run = next((run for run in above if _rest_of(path, run) is not None), path)
        if run not in above:
            try:
                above[run] = root.above(run, folders=_SHALLOW)
            except InputError:
                above[run] = None  # a step may be readable while its run is not
        listed = above[run]
        if listed is None:
            return None
        root, inside = listed, _rest_of(path, run) or ""
    folder = root.below(inside) if inside else root
    return folder if next(iter(folder.walk(1)), None) is not None else None


def _rest_of(path: str, root: str) -> str | None:
    if path == root:
        return ""
    return path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else None


def _in(folder: str, name: str) -> str:
    if is_url(folder):
        return f"{folder}/{name}" if name else folder
    return str(Path(folder, name))


def _above(step: str) -> Iterator[str]:
    """Yields the step above a unit, and the run above a step."""
    path = make_absolute(step)
    for _ in range(_CLIMB):
        name = posixpath.basename(path)
        is_step = parse_step(name) is not None or name == RELEASE
        if not (is_step or is_unit_folder(name) or name == _WEIGHTS):
            return
        above = posixpath.dirname(path) if is_url(path) else str(Path(path).parent)
        if above.endswith("/") or (above.startswith(_HUB) and above.count("/") < _REPOSITORY):
            return  # the root of all buckets, repositories or directories
        path = above
        yield path
