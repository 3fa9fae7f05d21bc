"""The Checkpointers of integrations: opened when needed, closed before the program ends.

`export_into` writes a sharded model with one of them, into a folder that may hold other files.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ckptkit.core.errors import CkptkitError, OutputError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.local.workdir import is_empty
from ckptkit.storage.locations import BESIDE_FILES
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.export.export import ExportOptions
from ckptkit.training.handle import SaveHandle
from ckptkit.training.settings import Options
from ckptkit.training.state.collect import WholeState

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_PARTS = "model-?????-of-?????.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_OPEN: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_OPTION = re.compile(r"Checkpointer\(\.\.\., (\w+)=([^()]*)\)")


def register(checkpointer: Checkpointer) -> None:
    """Registers a Checkpointer for `close_all`; it may be closed before."""
    _OPEN.add(checkpointer)


def close_all() -> list[CkptkitError]:
    """Closes all registered Checkpointers after their saves; returns errors that no call raised."""
    failures: list[CkptkitError] = []
    while _OPEN:
        try:
            _OPEN.pop().close()
        except CkptkitError as error:
            failures.append(error)
    return failures


@contextmanager
def naming_options(how: str) -> Iterator[None]:
    """Has hints name the options of a Checkpointer as the user of an integration passes them."""
    try:
        yield
    except CkptkitError as error:
        hint = _OPTION.sub(lambda found: how.format(name=found[1], value=found[2]), error.hint)
        if hint == error.hint:
            raise
        raise error.hinted(hint) from error


class WholeCheckpointer(Checkpointer):
    """A Checkpointer that also saves files in the form of a framework."""

    def save_whole(
        self, step: int, find_state: Callable[[], WholeState], *, name: str | None = None
    ) -> SaveHandle:
        """Does what `save` does with the files that `find_state` returns."""
        began = time.perf_counter()
        with self._calling("save"):
            save = self._begin_save(step, name, began)
            self._save(save, find_state)
        self._failed.warn()
        return save.handle


class OpenRun:
    """At most one Checkpointer, opened when needed, and again for another run.

    Each holds a copy of the local state, so only one is open at a time.
    """

    def __init__(self) -> None:
        self.checkpointer: WholeCheckpointer | None = None
        self._run = Path()
        self._options: Mapping[str, Any] = {}
        self._failed: list[CkptkitError] = []

    def of(self, run: Path, options: Options, *, prefix: str | None = None) -> WholeCheckpointer:
        """Returns a Checkpointer for a run; the open one if it fits."""
        wanted: dict[str, Any] = dict(options)
        if prefix is not None:
            wanted["prefix"] = prefix
        elif "prefix" in self._options:
            wanted["prefix"] = self._options["prefix"]
        if self.checkpointer is None or (self._run, self._options) != (run, wanted):
            self.end()
            self.checkpointer = WholeCheckpointer(run, **wanted)
            register(self.checkpointer)
            self._run, self._options = run, wanted
        return self.checkpointer

    def end(self) -> None:
        """Closes the Checkpointer; an error is kept for `close`."""
        if self.checkpointer is not None:
            checkpointer, self.checkpointer = self.checkpointer, None
            try:
                checkpointer.close()
            except CkptkitError as error:
                self._failed.append(error)

    def close(self) -> None:
        """Closes the Checkpointer, and raises the first error; it may be opened again."""
        self.end()
        failed, self._failed = self._failed, []
        if failed:
            raise failed[0]


def is_sharded(model: torch.nn.Module) -> bool:
    """Returns whether a model is sharded over ranks, by FSDP or as DTensors."""
    return any(isinstance(part, FullyShardedDataParallel) for part in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def export_into(
    checkpointer: Checkpointer,
    out: Path,
    model: torch.nn.Module,
    *,
    is_first: bool,
    **options: Unpack[ExportOptions],
) -> None:
    """Writes a model, or the adapter of a PEFT model, from all ranks at once, and waits for it.

    Other files in the folder stay, except for the weights of an earlier model. The files are
    complete once the first rank has returned.
    """
    options = {**options, "overwrite": True}  # replaces an export that a kill interrupted
    handle = checkpointer.export(out / BESIDE_FILES, state={"model": model}, **options)
    report = handle.report()
    if not is_first:
        return
    if report.command:  # writes the folder, or a new one if it holds other files
        is_free = not out.exists() or is_empty(out)
        target = str(out if is_free else out.with_name(f"{out.name}-model"))
        words = [word for word in shlex.split(report.command) if word != "--overwrite"]
        command = shlex.join(target if word == str(out.absolute()) else word for word in words)
        logger.warning("%s: the model was written in shards; run %s", out, command)
    else:
        try:
            _move_into(out)
        except OSError as error:
            raise OutputError(
                f"the model is complete in {BESIDE_FILES!r} and could not be moved:"
                f" {error.strerror or error}",
                where=str(out),
                hint="free some space and move its files, or save it to another folder",
            ) from error


def _move_into(out: Path) -> None:
    """Moves the files of a model into the folder, and removes an earlier model.

    The manifest of a step that training resumes from stays where it is.
    """
    hidden = out / BESIDE_FILES
    names = [path.relative_to(hidden) for path in hidden.rglob("*") if path.is_file()]
    try:
        is_step = read_local_manifest(out).kind == "training"
    except (OSError, CkptkitError):
        is_step = False
    if is_step:
        names = [name for name in names if str(name) != MANIFEST_NAME]
    is_whole_model = any(str(name) in {_WEIGHTS, _INDEX} for name in names)
    if is_whole_model:  # the old index would combine old and new shards
        (out / _INDEX).unlink(missing_ok=True)
    for name in _weights_first(names):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).replace(out / name)
    for old in (out / _WEIGHTS, *out.glob(_PARTS)) if is_whole_model else ():
        if old.relative_to(out) not in names:
            old.unlink(missing_ok=True)
    shutil.rmtree(hidden)


def _weights_first(names: Iterable[Path]) -> list[Path]:
    """Returns the names in an order in which the folder looks complete only at the end."""
    last = (_INDEX, MANIFEST_NAME)
    return sorted(
        names,
        key=lambda name: (
            last.index(str(name)) + 1 if str(name) in last else 0,
            name.suffix != ".safetensors",
            name,
        ),
    )
