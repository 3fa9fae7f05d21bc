"""Sharded saves of Lightning, Fabric and Trainer, that do not stop training.

Both strategies replace Lightning's own `ModelParallelStrategy` (FSDP2, tensor parallel). They write
what Lightning writes, a DCP directory with `meta.pt`, so that each reads the other's checkpoints.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy as StockFabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as StockTrainerStrategy
from torch import nn
from torch.optim import Optimizer

from ckptkit.core.errors import CkptkitError, ResumeError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.integrations.checkpointers import OpenRun, naming_options
from ckptkit.runs.marks import STEP_FOLDER
from ckptkit.runs.retention import RETENTION_OPTIONS
from ckptkit.storage.local.durable import remove_folder
from ckptkit.storage.local.source import LocalSource
from ckptkit.training import Options, SaveHandle, SaveReport
from ckptkit.training.agree.peers import open_peers
from ckptkit.training.resume.resume import decline, resume_from
from ckptkit.training.settings import Settings, check_options
from ckptkit.training.state.collect import bind
from ckptkit.training.state.objects import read_torch_file
from ckptkit.training.step_names import clean_fqn

logger = logging.getLogger(__name__)

_NOT_HERE = frozenset(
    {"layout", "prefix", "every", "signals", "slurm_margin_seconds", *RETENTION_OPTIONS}
)
_HINT = "your loop or Lightning's ModelCheckpoint decides what is saved when, and what stays"


class StrategySaves:
    """The saves of one strategy to paths that Lightning chooses: one Checkpointer at a time.

    All ranks make the same calls in the same order, except for `remove`, which rank 0 calls.
    """

    def __init__(self, options: Options) -> None:
        """Checks the options; nothing is opened before the first save."""
        refused = sorted(_NOT_HERE & options.keys())
        if refused:
            raise UsageError(
                f"the option {refused[0]!r} cannot be passed, since Lightning decides about it",
                where="checkpointer",
                hint=_HINT,
            )
        self._listener = options.get("listener")
        self._options: Options = {
            **options,
            "layout": "dcp",
            "slurm_margin_seconds": 0.0,
            "listener": self._on_saved,
        }
        self.settings = check_options(options)
        self._run = OpenRun()
        self._handles: list[SaveHandle] = []
        self._lock = threading.Lock()  # the thread that saves uses the following attributes too
        self._count = 0
        self._numbers: dict[Path, int] = {}  # of the last save to each path
        self._newest_complete = 0
        self._unwanted: list[tuple[int, Path]] = []

    def save(
        self,
        path: Path,
        state: Mapping[str, object],
        *,
        files: Mapping[str, bytes] | None,
        step: int | None,
    ) -> None:
        """Copies this rank's part of the state, and writes it to a path in the background."""
        path = path.absolute()
        with self._lock:
            self._count += 1
            self._numbers[path] = self._count
            self._unwanted = [entry for entry in self._unwanted if entry[1] != path]
        match = STEP_FOLDER.fullmatch(path.name)
        number, prefix = (int(match[2]), match[1]) if match else (None, None)
        checkpointer = self._run.of(path.parent, self._options, prefix=prefix)
        if number is not None:
            handle = checkpointer.save(number, state, files=files)
        else:
            count = self._count if step is None else step
            handle = checkpointer.save(count, state, name=path.name, files=files)
        self._handles = [*(h for h in self._handles if not h.done()), handle]

    def remove(self, path: Path) -> None:
        """Removes a checkpoint once the last save, or a later one, is complete."""
        with self._lock:
            self._unwanted.append((self._count, path.absolute()))
        self._remove_unwanted()

    def wait(self) -> None:
        """Waits for all saves to end or fail."""
        for handle in self._handles:
            handle.wait()

    def close(self) -> None:
        """Waits for the last save, and ends threads and processes; a later save starts new ones."""
        self._run.close()

    def _on_saved(self, report: SaveReport) -> None:
        with self._lock:
            number = self._numbers.get(report.path, 0)
            self._newest_complete = max(self._newest_complete, number)
        self._remove_unwanted()
        if self._listener is not None:
            self._listener(report)

    def _remove_unwanted(self) -> None:
        with self._lock:
            newest = self._newest_complete
            due = [path for number, path in self._unwanted if number <= newest]
            self._unwanted = [entry for entry in self._unwanted if entry[0] > newest]
            for path in due:
                self._numbers.pop(path, None)
        for path in due:
            try:
                remove_folder(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s could not be removed: %s", path, error)


def load(state: Mapping[str, Any], path: Path, settings: Settings) -> None:
    """Loads a directory into models and optimizers in place, on all ranks.

    The directory need not be writable, and Lightning may have written it.
    """
    timeout_seconds = settings.timeout_seconds
    peers = open_peers(path, timeout_seconds=timeout_seconds)
    try:
        try:
            bound = bind(state, layout="dcp", rank=peers.rank, world_size=peers.world_size)
        except Exception as error:
            decline(peers, error, timeout_seconds=timeout_seconds)
            raise
        bound = bound.resuming(settings.unfit_optimizer, settings.missing_groups)
        with naming_options("{name}={value} in checkpointer={{...}} of the strategy"):
            resume_from(bound, path.absolute(), peers, timeout_seconds=timeout_seconds)
    finally:
        peers.close()


META = "meta.pt"
"""The file with everything except models and optimizers, which marks Lightning's directories."""

_TAKEN = "the path holds Lightning's own checkpoint; move it away, or save under another name"
_CHANGED = "a hook has changed the weights in the checkpoint"
_STEP_NAMES = ("global_step", "step", "iteration", "iter_num", "step_count")
_State = dict[str, Any]


class _ShardedSaves:
    """What both strategies share; a base before Lightning's own class."""

    _save_distributed_checkpoint: bool  # Lightning's; no public attribute says it
    global_rank: int
    broadcast: Any

    def __init__(self, *args: Any, checkpointer: Options | None = None, **kwargs: Any) -> None:
        """Takes the arguments of Lightning's strategy."""
        super().__init__(*args, **kwargs)
        self._saves = StrategySaves(checkpointer or {})

    def wait_for_saves(self) -> None:
        """Waits until all saves have ended or failed."""
        self._saves.wait()

    def _target_of(self, path: str | Path) -> tuple[Path, bool]:
        """Returns the path of rank 0, and whether only Lightning can replace what is there."""
        target = Path(path)
        is_foreign = _holds_shards(target) and not (target / MANIFEST_NAME).exists()
        result: tuple[Path, bool] = self.broadcast((target, target.is_file() or is_foreign))
        return result

    def _warn_of_stock(self, path: Path, reason: str) -> None:
        if self.global_rank == 0:
            logger.warning(
                "%s: Lightning itself saves, and training waits for it: %s", path, reason
            )

    def _save(self, path: Path, parts: _State, rest: _State) -> None:
        """Saves models and optimizers as shards, and the rest in a file next to them."""
        files: dict[str, bytes] | None = None
        if self.global_rank == 0:
            buffer = io.BytesIO()
            torch.save(rest, buffer)
            files = {META: buffer.getvalue()}
        steps = (rest.get(name) for name in _STEP_NAMES)
        step = next((step for step in steps if type(step) is int and step >= 0), None)
        self._saves.save(path, parts, files=files, step=step)


class FabricModelParallelStrategy(_ShardedSaves, StockFabricStrategy):  # type: ignore[misc]  # not followed
    """Lightning Fabric's `ModelParallelStrategy`, whose sharded saves do not stop training.

        fabric = Fabric(strategy=FabricModelParallelStrategy(parallelize))
        fabric.save("runs/a/step-500.ckpt", {"model": model, "optimizer": optimizer, "step": 500})
        fabric.load("runs/a/step-500.ckpt", state)

    `save` returns once the local copy is taken; the directory appears when it is complete and
    durable. Saves below one directory share their buffers, so use a different name for each.
    The random numbers of all ranks are saved and loaded too.

    Lightning itself saves with a `filter`, with `storage_options`, with
    `save_distributed_checkpoint=False`, and over a checkpoint of its own. It loads with
    `strict=False` and from a single file.
    """

    def save_checkpoint(
        self,
        path: str | Path,
        state: _State,
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002  Lightning's name
    ) -> None:
        """Saves as `fabric.save`, in the background."""
        is_sharded = self._save_distributed_checkpoint
        if storage_options is not None or filter is not None or not is_sharded:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        target, is_taken = self._target_of(path)
        if is_taken:
            self._warn_of_stock(target, _TAKEN)
            super().save_checkpoint(target, state)
            return
        parts = {key: value for key, value in state.items() if _is_part(value)}
        rest = {key: value for key, value in state.items() if key not in parts}
        for key, value in rest.items():
            if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                rest[key] = value.state_dict()
        self._save(target, parts, rest)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,  # noqa: FBT001, FBT002  Lightning's signature
        weights_only: bool | None = None,  # noqa: FBT001
    ) -> dict[str, Any]:
        """Loads as `fabric.load`, after all saves have ended."""
        path = Path(self.broadcast(path))
        self._saves.wait()
        if not (isinstance(state, dict) and state and strict and _holds_shards(path)):
            rest: dict[str, Any] = super().load_checkpoint(
                path, state, strict, **_load_options(weights_only)
            )
            return rest
        parts = {key: value for key, value in state.items() if _is_part(value)}
        rest = _read_meta(path, weights_only=weights_only)
        missing = state.keys() - parts.keys() - rest.keys()
        if missing:
            raise ResumeError(
                f"{', '.join(map(repr, sorted(missing)))} is not in the checkpoint",
                where=str(path),
                hint="pass strict=False to load the others",
            )
        load(parts, path, self._saves.settings)
        state |= {key: rest.pop(key) for key in state.keys() - parts.keys()}
        return rest

    def finish_saves(self) -> None:
        """Waits for the last save, and ends its processes; call it after the last step.

        Fabric does not notify its strategies of the end of training. Without this call the program
        waits when it exits, and errors are only in the log.
        """
        self._saves.close()


class TrainerModelParallelStrategy(_ShardedSaves, StockTrainerStrategy):  # type: ignore[misc]  # not followed
    """The Lightning Trainer's `ModelParallelStrategy`, whose sharded saves do not stop training.

        trainer = Trainer(strategy=TrainerModelParallelStrategy(), callbacks=[ModelCheckpoint(…)])
        trainer.fit(model, ckpt_path="runs/a/epoch=3-step=400.ckpt")

    A checkpoint that `ModelCheckpoint` removes stays until a later one is complete, so that one
    complete checkpoint always exists. The random numbers of all ranks are saved and loaded too.

    Lightning itself saves if a hook has put other weights into the checkpoint (averaged ones, for
    example), over a checkpoint of its own, and with `save_distributed_checkpoint=False`.
    """

    _offered: Mapping[str, Any] = MappingProxyType({})
    _was_interrupted = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the live weights, without a copy, for hooks to examine."""
        if not self._save_distributed_checkpoint:
            whole: dict[str, Any] = super().lightning_module_state_dict()
            return whole
        assert self.model is not None  # noqa: S101  the Trainer sets it up first
        # As torch's get_model_state_dict, which collects garbage before and after, for 40 ms.
        states = self.model.state_dict()
        self._offered = {clean_fqn(name): value for name, value in states.items()}
        return dict(self._offered)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns nothing: the state is saved from the optimizer itself."""
        if self._save_distributed_checkpoint:
            return {}
        whole: dict[str, Any] = super().optimizer_state(optimizer)
        return whole

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Saves the checkpoint of `Trainer.save_checkpoint` in the background."""
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path, is_taken = self._target_of(filepath)
        offered, self._offered = self._offered, {}
        states = checkpoint.get("optimizer_states", ())
        if not is_taken and _is_as_offered(checkpoint, offered):
            left_out = {"state_dict", "optimizer_states"}
            rest = {key: value for key, value in checkpoint.items() if key not in left_out}
            self._save(path, self._parts(len(states)), rest)
            return
        self._warn_of_stock(path, _TAKEN if is_taken else _CHANGED)
        self._saves.wait()
        if states:
            checkpoint["optimizer_states"] = [
                state or super(TrainerModelParallelStrategy, self).optimizer_state(optimizer)
                for state, optimizer in zip(states, self.optimizers, strict=True)
            ]
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(
        self,
        checkpoint_path: str | Path,
        weights_only: bool | None = None,  # noqa: FBT001  Lightning's signature
    ) -> dict[str, Any]:
        """Loads models and optimizers in place, after all saves have ended."""
        path = Path(self.broadcast(checkpoint_path))
        self._saves.wait()
        assert self.lightning_module is not None  # noqa: S101  the Trainer sets it up first
        if not (self.lightning_module.strict_loading and _holds_shards(path)):
            rest: dict[str, Any] = super().load_checkpoint(path, **_load_options(weights_only))
            return rest
        rest = _read_meta(path, weights_only=weights_only)
        state = self._parts(len(self.optimizers))
        load(state, path, self._saves.settings)
        return rest

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint once a later one is complete."""
        if not self._save_distributed_checkpoint:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._saves.remove(Path(filepath))

    def on_exception(self, exception: BaseException) -> None:
        self._was_interrupted = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Waits for the last save, and raises the error of a failed one."""
        was_interrupted, self._was_interrupted = self._was_interrupted, False
        try:
            self._saves.close()
        except CkptkitError:
            if not was_interrupted:  # else it was logged when it happened
                raise
        finally:
            super().teardown()

    def _parts(self, optimizers: int) -> _State:
        """Returns the model and its first optimizers, by Lightning's names."""
        numbered = enumerate(self.optimizers[:optimizers])
        return {"state_dict": self.model, **{f"optimizer_{n}": o for n, o in numbered}}


def _holds_shards(path: Path) -> bool:
    return path.is_dir() and (path / META).is_file()


def _is_part(value: object) -> bool:
    return isinstance(value, nn.Module | Optimizer)


def _load_options(weights_only: bool | None) -> dict[str, bool]:  # noqa: FBT001  Lightning's
    return {} if weights_only is None else {"weights_only": weights_only}


def _read_meta(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Reads the file next to the shards without executing its pickle.

    Lightning reads it if the user allows objects of other classes.
    """
    if weights_only is False:
        meta: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path / META, weights_only=False)
        return meta
    with LocalSource(path) as source:
        try:
            meta = read_torch_file(source, META)
        except ResumeError as error:
            hint = "pass weights_only=False to let Lightning make such objects, if you trust them"
            raise ResumeError(error.message, where=error.where, hint=hint) from error
    return meta


def _is_as_offered(checkpoint: Mapping[str, Any], offered: Mapping[str, Any]) -> bool:
    """Returns whether hooks have left the weights and the optimizers as the strategy gave them."""
    weights = checkpoint.get("state_dict")
    return (
        isinstance(weights, dict)
        and bool(offered)
        and weights.keys() == offered.keys()
        and all(value is offered[key] for key, value in weights.items())
        and not any(checkpoint.get("optimizer_states", ()))
    )
