"""Sharded saves of Lightning, Fabric and Trainer, that do not stop training.

Both strategies stand in for Lightning's own `ModelParallelStrategy` (FSDP2, tensor parallel). What
they write is what Lightning writes, a DCP directory with `meta.pt`, so that each reads the other's.

The saves of one Lightning strategy: one Checkpointer at a time, and removals that can wait.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy as StockFabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as StockTrainerStrategy
from torch import nn
from torch.optim import Optimizer

from ckptkit.core.errors import CkptkitError, ResumeError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.discovery import parse_step
from ckptkit.integrations.open_runs import OpenRun
from ckptkit.runs.marks import STEP_PREFIXES, is_step_folder
from ckptkit.storage.local.durable import remove_folder
from ckptkit.storage.local.source import LocalSource
from ckptkit.training import Options, SaveHandle, SaveReport
from ckptkit.training.agree.peers import open_peers
from ckptkit.training.resume.resume import decline, resume_from
from ckptkit.training.settings import check_options
from ckptkit.training.state.collect import bind
from ckptkit.training.state.objects_on_disk import read_torch_file
from ckptkit.training.step_names import clean_fqn

logger = logging.getLogger(__name__)

_NOT_HERE = frozenset({
    "layout", "prefix", "every", "keep_last", "keep_every", "keep_best", "best_mode", "signals",
    "slurm_margin_seconds",
})  # fmt: skip
_HINT = "what is saved when, and what stays, is told by your loop or by Lightning's ModelCheckpoint"


class StrategySaves:
    """Saves to paths that Lightning chooses.

    All ranks make the same calls in the same order, but for `remove`, which rank 0 calls.
    """

    def __init__(self, options: Options) -> None:
        """Checks the options; nothing is opened before the first save."""
        refused = sorted(_NOT_HERE & options.keys())
        if refused:
            raise UsageError(
                f"the option {refused[0]!r} was found, which Lightning decides about",
                where="checkpointer",
                hint=_HINT,
            )
        self._listener = options.get("listener")
        self._options: Options = {
            **options,
            "layout": "dcp",
            "slurm_margin_seconds": 0.0,
            "listener": self._heard,
        }
        self.timeout_seconds = check_options(options).timeout_seconds
        self._run = OpenRun()
        self._handles: list[SaveHandle] = []
        self._lock = threading.Lock()  # what follows is used by the thread that saves as well
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
        """Copies this rank's part of the state, and has it written to a path in the background.

        Args:
            path: The directory that is to be; one that is complete already is replaced.
            state: Models and optimizers.
            files: Small files to lie in it.
            step: The training step, where it is known.
        """
        path = path.absolute()
        with self._lock:
            self._count += 1
            self._numbers[path] = self._count
            self._unwanted = [entry for entry in self._unwanted if entry[1] != path]
        number = prefix = None
        if is_step_folder(path.name):
            number = parse_step(path.name)
            prefix = next(one for one in STEP_PREFIXES if path.name.startswith(one))
        checkpointer = self._run.of(path.parent, self._options, prefix=prefix)
        if number is not None:
            handle = checkpointer.save(number, state, files=files)
        else:
            known = self._count if step is None else step
            handle = checkpointer.save(known, state, name=path.name, files=files)
        self._handles = [*(one for one in self._handles if not one.done()), handle]

    def remove(self, path: Path) -> None:
        """Removes a checkpoint once the save that was begun last, or a later one, is complete."""
        with self._lock:
            self._unwanted.append((self._count, path.absolute()))
        self._remove_unwanted()

    def wait(self) -> None:
        """Waits for all saves to end, well or not."""
        for handle in self._handles:
            handle.wait()

    def close(self) -> None:
        """Waits for the last save, and ends threads and processes; a later save begins anew."""
        self._run.close()

    def _heard(self, report: SaveReport) -> None:
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
            self._unwanted = [one for one in self._unwanted if one[0] > newest]
            for path in due:
                self._numbers.pop(path, None)
        for path in due:
            _remove(path)


def load(state: Mapping[str, Any], path: Path, *, timeout_seconds: float) -> None:
    """Loads a directory into models and optimizers in place, on all ranks.

    The directory need not be writable, nor be of ours.

    Args:
        state: Models and optimizers, by their keys in the directory.
        path: A DCP directory.
        timeout_seconds: How long other ranks are waited for.
    """
    peers = open_peers(path, timeout_seconds=timeout_seconds)
    try:
        try:
            bound = bind(state, layout="dcp", rank=peers.rank, world_size=peers.world_size)
        except Exception as error:
            decline(peers, error, timeout_seconds=timeout_seconds)
            raise
        resume_from(bound, path.absolute(), peers, timeout_seconds=timeout_seconds)
    finally:
        peers.close()


def _remove(path: Path) -> None:
    try:
        remove_folder(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


META = "meta.pt"
"""Where Lightning keeps what is no model and no optimizer; it knows its directories by it."""

_TAKEN = "Lightning's own checkpoint lies there; move it away, or save under another name"
_CHANGED = "a hook has changed the weights in the checkpoint"
_STEP_NAMES = ("global_step", "step", "iteration", "iter_num", "step_count")
_State = dict[str, Any]


class FabricModelParallelStrategy(StockFabricStrategy):  # type: ignore[misc]  # not followed
    """Lightning Fabric's `ModelParallelStrategy`, whose sharded saves do not stop training.

        fabric = Fabric(strategy=FabricModelParallelStrategy(parallelize))
        fabric.save("runs/a/step-500.ckpt", {"model": model, "optimizer": optimizer, "step": 500})
        fabric.load("runs/a/step-500.ckpt", state)

    `save` returns once the local copy is taken; the directory appears when it is complete and
    durable. Saves into one directory share their buffers, so give each a name of its own there.
    The random numbers of all ranks are saved and loaded too.

    A `filter`, `storage_options`, `save_distributed_checkpoint=False` and saving over a checkpoint
    of Lightning's own are Lightning's business as before, and so is loading with `strict=False` or
    from a single file.
    """

    def __init__(self, *args: Any, checkpointer: Options | None = None, **kwargs: Any) -> None:
        """Takes what Lightning's strategy takes.

        Args:
            *args: As there.
            checkpointer: Options of the `Checkpointer` that saves, such as `in_flight`.
            **kwargs: As there.
        """
        super().__init__(*args, **kwargs)
        self._saves = StrategySaves(checkpointer or {})

    def save_checkpoint(
        self,
        path: str | Path,
        state: _State,
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002  Lightning's name
    ) -> None:
        """Saves as `fabric.save` says, in the background."""
        if storage_options is not None or filter is not None or not _is_sharded(self):
            super().save_checkpoint(path, state, storage_options, filter)
            return
        target, is_taken = _target_of(self, path)
        if is_taken:
            _warn_of_stock(self, target, _TAKEN)
            super().save_checkpoint(target, state)
            return
        parts = {key: value for key, value in state.items() if _is_part(value)}
        rest = {key: _plain(value) for key, value in state.items() if key not in parts}
        files = {META: _archived(rest)} if self.global_rank == 0 else None
        self._saves.save(target, parts, files=files, step=_step_in(rest))

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,  # noqa: FBT001, FBT002  Lightning's signature
        weights_only: bool | None = None,  # noqa: FBT001
    ) -> dict[str, Any]:
        """Loads as `fabric.load` says; saves under way are waited for."""
        path = Path(self.broadcast(path))
        self._saves.wait()
        if not (isinstance(state, dict) and state and strict and _holds_shards(path)):
            rest: dict[str, Any] = super().load_checkpoint(
                path, state, strict, **_where_given(weights_only)
            )
            return rest
        parts = {key: value for key, value in state.items() if _is_part(value)}
        rest = _read_meta(path, weights_only=weights_only)
        missing = state.keys() - parts.keys() - rest.keys()
        if missing:
            raise ResumeError(
                f"{', '.join(map(repr, sorted(missing)))} was not saved there",
                where=str(path),
                hint="pass strict=False to load the others",
            )
        load(parts, path, timeout_seconds=self._saves.timeout_seconds)
        state |= {key: rest.pop(key) for key in state.keys() - parts.keys()}
        return rest

    def wait_for_saves(self) -> None:
        """Waits until all saves have ended, well or not."""
        self._saves.wait()

    def finish_saves(self) -> None:
        """Waits for the last save, and ends what saves; call it after the last step.

        Fabric tells its strategies of no end. Without this call the program waits as it ends, and
        what went wrong is in the log only.
        """
        self._saves.close()


class TrainerModelParallelStrategy(StockTrainerStrategy):  # type: ignore[misc]  # not followed
    """The Lightning Trainer's `ModelParallelStrategy`, whose sharded saves do not stop training.

        trainer = Trainer(strategy=TrainerModelParallelStrategy(), callbacks=[ModelCheckpoint(…)])
        trainer.fit(model, ckpt_path="runs/a/epoch=3-step=400.ckpt")

    A checkpoint that `ModelCheckpoint` wants gone stays until one that was begun later is
    complete, so that there is a whole one at any moment. The random numbers of all ranks are saved
    and loaded too.

    Where a hook has put other weights into the checkpoint (averaged ones, for example), over a
    checkpoint of Lightning's own, and with `save_distributed_checkpoint=False`, Lightning saves as
    before.
    """

    def __init__(self, *args: Any, checkpointer: Options | None = None, **kwargs: Any) -> None:
        """Takes what Lightning's strategy takes.

        Args:
            *args: As there.
            checkpointer: Options of the `Checkpointer` that saves, such as `in_flight`.
            **kwargs: As there.
        """
        super().__init__(*args, **kwargs)
        self._saves = StrategySaves(checkpointer or {})
        self._offered: Mapping[str, Any] = {}
        self._was_interrupted = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the live weights, which hooks may look at; nothing is copied."""
        if not _is_sharded(self):
            whole: dict[str, Any] = super().lightning_module_state_dict()
            return whole
        assert self.model is not None  # noqa: S101  the Trainer sets it up first
        # As torch's get_model_state_dict, which collects garbage before and after, for 40 ms.
        states = self.model.state_dict()
        self._offered = {clean_fqn(name): value for name, value in states.items()}
        return dict(self._offered)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns nothing: the state is saved from the optimizer itself."""
        if _is_sharded(self):
            return {}
        whole: dict[str, Any] = super().optimizer_state(optimizer)
        return whole

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Saves what `Trainer.save_checkpoint` has gathered, in the background."""
        if storage_options is not None or not _is_sharded(self):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path, is_taken = _target_of(self, filepath)
        offered, self._offered = self._offered, {}
        if is_taken or not _is_as_offered(checkpoint, offered):
            _warn_of_stock(self, path, _TAKEN if is_taken else _CHANGED)
            self._save_stock(checkpoint, path)
            return
        count = len(checkpoint.get("optimizer_states", ()))
        rest = {k: v for k, v in checkpoint.items() if k not in {"state_dict", "optimizer_states"}}
        files = {META: _archived(rest)} if self.global_rank == 0 else None
        self._saves.save(path, self._parts(count), files=files, step=_step_in(rest))

    def load_checkpoint(
        self,
        checkpoint_path: str | Path,
        weights_only: bool | None = None,  # noqa: FBT001  Lightning's signature
    ) -> dict[str, Any]:
        """Loads models and optimizers in place; saves under way are waited for."""
        path = Path(self.broadcast(checkpoint_path))
        self._saves.wait()
        assert self.lightning_module is not None  # noqa: S101  the Trainer sets it up first
        if not (self.lightning_module.strict_loading and _holds_shards(path)):
            rest: dict[str, Any] = super().load_checkpoint(path, **_where_given(weights_only))
            return rest
        rest = _read_meta(path, weights_only=weights_only)
        state = self._parts(len(self.optimizers))
        load(state, path, timeout_seconds=self._saves.timeout_seconds)
        return rest

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint once a later one is complete."""
        if not _is_sharded(self):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._saves.remove(Path(filepath))

    def wait_for_saves(self) -> None:
        """Waits until all saves have ended, well or not."""
        self._saves.wait()

    def on_exception(self, exception: BaseException) -> None:
        self._was_interrupted = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Waits for the last save, and raises what went wrong in one that nobody asked about."""
        was_interrupted, self._was_interrupted = self._was_interrupted, False
        try:
            self._saves.close()
        except CkptkitError:
            if not was_interrupted:  # else it was logged when it happened
                raise
        finally:
            super().teardown()

    def _parts(self, optimizers: int) -> _State:
        """Returns the model and its first optimizers, by the names that Lightning gives them."""
        numbered = enumerate(self.optimizers[:optimizers])
        return {"state_dict": self.model, **{f"optimizer_{n}": one for n, one in numbered}}

    def _save_stock(self, checkpoint: dict[str, Any], path: Path) -> None:
        self._saves.wait()
        states = checkpoint.get("optimizer_states", ())
        if states:
            checkpoint["optimizer_states"] = [
                state or super(TrainerModelParallelStrategy, self).optimizer_state(optimizer)
                for state, optimizer in zip(states, self.optimizers, strict=True)
            ]
        super().save_checkpoint(checkpoint, path)


def _is_sharded(strategy: StockFabricStrategy | StockTrainerStrategy) -> bool:
    """Returns whether a strategy saves shards; neither of them says so in public."""
    return bool(strategy._save_distributed_checkpoint)  # noqa: SLF001


def _target_of(
    strategy: StockFabricStrategy | StockTrainerStrategy, path: str | Path
) -> tuple[Path, bool]:
    """Returns where rank 0 saves, and whether something lies there that only Lightning replaces."""
    target = Path(path)
    is_whole = target.is_file()
    is_foreign = _holds_shards(target) and not (target / MANIFEST_NAME).exists()
    found: tuple[Path, bool] = strategy.broadcast((target, is_whole or is_foreign))
    return found


def _warn_of_stock(
    strategy: StockFabricStrategy | StockTrainerStrategy, path: Path, reason: str
) -> None:
    if strategy.global_rank == 0:
        logger.warning(
            "%s: Lightning itself saves, which stops training meanwhile: %s", path, reason
        )


def _holds_shards(path: Path) -> bool:
    return path.is_dir() and (path / META).is_file()


def _is_part(value: object) -> bool:
    return isinstance(value, nn.Module | Optimizer)


def _where_given(weights_only: bool | None) -> dict[str, bool]:  # noqa: FBT001  Lightning's
    return {} if weights_only is None else {"weights_only": weights_only}


def _plain(value: Any) -> Any:
    is_stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return value.state_dict() if is_stateful else value


def _archived(values: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    return buffer.getvalue()


def _read_meta(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Reads what lies beside the shards, without running it.

    Objects of other classes are left to Lightning, where the user has asked for that.
    """
    if weights_only is False:
        found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path / META, weights_only=False)
        return found
    with LocalSource(path) as source:
        try:
            found = read_torch_file(source, META)
        except ResumeError as error:
            hint = "pass weights_only=False to let Lightning make such objects, if you trust them"
            raise ResumeError(error.message, where=error.where, hint=hint) from error
    return found


def _step_in(values: Mapping[str, Any]) -> int | None:
    found = (values.get(name) for name in _STEP_NAMES)
    return next((step for step in found if type(step) is int and step >= 0), None)


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
