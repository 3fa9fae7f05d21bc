"""Where a checkpoint's configuration and tokenizer may lie, and reading them."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ckptkit.core.errors import FormatError, InputError, NotACheckpointError
from ckptkit.formats.discovery import is_unit_folder, step_of
from ckptkit.pipeline.opening import Opened
from ckptkit.planning.plan import Literal, OutputFile, RawCopy, contiguous
from ckptkit.planning.side_files import (
    CONFIG,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER,
    SideFile,
    choose_side_files,
    content_as_written,
    is_side_file,
    parse_json_object,
)
from ckptkit.storage.local import LocalSource

_NESTED = ("ckptkit", "huggingface")  # where the training hooks, and verl, put them
_CLIMB = 2  # from checkpoint-500/pytorch_model_fsdp_0 up to the run


class SideFolders:
    """The folders that may hold side files, nearest to the weights first.

    Attributes:
        base: The model folder that the user named for what the source lacks, or None.
        sources: The folders, by their paths.
    """

    def __init__(self, stack: ExitStack, checkpoint: Opened, base: str | None) -> None:
        self.base = base
        self.sources: dict[str, LocalSource] = {}
        for path in _candidates(checkpoint, base):
            if path.is_dir():
                source = stack.enter_context(LocalSource(path))
                self.sources[str(path)] = source

    def choose(self, *, allow_code: bool) -> tuple[list[SideFile], list[str]]:
        """Returns the files to put beside the weights, and python files left out."""
        listed = [(origin, _listing(source)) for origin, source in self.sources.items()]
        return choose_side_files(listed, allow_code=allow_code)

    def read(self, file: SideFile) -> bytes:
        """Returns a whole side file."""
        return self.sources[file.origin].read(file.path, 0, file.size_bytes)

    def outputs(
        self, files: Sequence[SideFile], config: Mapping[str, Any] | None, *, allow_code: bool
    ) -> list[OutputFile]:
        """Plans the files as they are to be written.

        Args:
            files: As `choose` returned them.
            config: The model's configuration as it is to be written, if there is one.
            allow_code: Whether `auto_map`, which names python files, stays.

        Raises:
            FormatError: If a configuration is not a JSON object.
        """
        return [self._output(file, config, allow_code=allow_code) for file in files]

    def _output(
        self, file: SideFile, config: Mapping[str, Any] | None, *, allow_code: bool
    ) -> OutputFile:
        def read() -> bytes:
            return self.read(file)

        data = content_as_written(file.name, file.size_bytes, read, config, allow_code=allow_code)
        if data is None:
            return contiguous(file.name, [(file.size_bytes, RawCopy(file.origin, file.path), None)])
        return contiguous(file.name, [(len(data), Literal(data), None)])

    def tokenizer(self, files: Sequence[SideFile]) -> dict[str, Any] | None:
        """Returns the tokenizer that is taken along; None where there is none, or no usable one."""
        file = next((file for file in files if file.name == TOKENIZER), None)
        if file is None or file.size_bytes > MAX_TOKENIZER_BYTES:
            return None
        try:
            return parse_json_object(self.read(file), where=file.path)
        except FormatError:
            return None

    def config(self, files: Sequence[SideFile]) -> dict[str, Any] | None:
        """Returns the model's configuration, or None where there is none.

        Raises:
            FormatError: If it is not a JSON object.
        """
        file = next((file for file in files if file.name == CONFIG), None)
        if file is None or file.size_bytes > MAX_JSON_BYTES:
            return None
        where = posixpath.join(self.sources[file.origin].location, file.path)
        return parse_json_object(self.read(file), where=where)


def _candidates(checkpoint: Opened, base: str | None) -> Iterator[Path]:
    if base is not None and not Path(base).is_dir():
        raise NotACheckpointError("no such directory", where=f"--base {base}")
    homes: list[Path] = []
    for folder in checkpoint.source.folders:
        root = Path(folder.location)
        step = root / checkpoint.folder
        units = [root / unit.candidate.folder for unit in checkpoint.units if not unit.is_optimizer]
        homes += [*(unit for unit in units if unit != step), step, *_above(step)]
    paths = [path for home in homes for path in (*(home / name for name in _NESTED), home)]
    yield from dict.fromkeys(paths)
    if base is not None:
        yield Path(base)


def _above(step: Path) -> Iterator[Path]:
    """Climbs from a unit to its step, and from a step to its run."""
    path = step.absolute()
    for _ in range(_CLIMB):
        if not (is_unit_folder(path.name) or step_of(path.name) is not None):
            return
        path = path.parent
        yield path


def _listing(source: LocalSource) -> Mapping[str, int]:
    """Returns the side files of a folder; what cannot be read is nobody's configuration."""
    sizes = {}
    for path in source.walk(1):
        if is_side_file(path):
            try:
                sizes[path] = source.stat(path).size_bytes
            except InputError:
                continue
    return sizes
