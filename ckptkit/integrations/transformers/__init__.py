"""The Trainer of Transformers, and those of TRL, with saves that do not stop training.

```python
trainer = SFTTrainer(...)
install(trainer)
trainer.train(resume_from_checkpoint=True)
```

Saving and loading is replaced in one trainer, not in its class: the trainer gets a class that has
`_Saving` between its own class and `Trainer`, which delegates to `TrainerCheckpoints`. Methods of
subclasses are still called.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Unpack

import transformers
from transformers import Trainer

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.text import a_kind
from ckptkit.integrations.transformers.checkpoints import TrainerCheckpoints, find_uncalled
from ckptkit.integrations.transformers.trainer_models import filter_uploads, finish_step, save_model
from ckptkit.integrations.transformers.trainer_state import agree_on_newest
from ckptkit.training.settings import Options

__all__ = ["TrainerCheckpoints", "install"]

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_ckptkit"  # of a trainer, with its checkpoints
# The methods that are replaced or called, each with its parameters.
# Source: transformers 5.23, `trainer.py`.
_METHODS: dict[str, tuple[str, ...]] = {
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "save_model": ("output_dir", "_internal_call"),
    "_save_checkpoint": ("model", "trial"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_load_best_model": (),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "_get_output_dir": ("trial",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "push_to_hub": ("commit_message", "blocking"),
    "store_flos": (),
}


@check_names
def install(
    trainer: Trainer, *, wait: bool | None = None, **options: Unpack[Options]
) -> TrainerCheckpoints:
    """Makes a trainer save asynchronously and sharded, and resume from these saves.

    Call it on every rank after the trainer was created; a second call only changes the options
    that it passes. Without FSDP the trainer stays as it is.

    Steps are in `checkpoint-N` of `output_dir` as without ckptkit; only complete ones appear.
    `save_strategy`, `save_total_limit`, `save_only_model`, `load_best_model_at_end` and
    `resume_from_checkpoint` have their usual meaning, with these differences:

    - A step is sharded with any `state_dict_type` of FSDP. Without ckptkit the Trainer resumes
      from it with `SHARDED_STATE_DICT`.
    - `on_save` of callbacks is called once the state is copied, before the files are there; see
      `wait`. `train` returns when all saves are done.
    - A save that fails is logged, and training continues. `train` raises at its end the error of
      the last save, or of the best one if that is to be loaded.
    - A PEFT model's adapter is saved as the Trainer saves it, and the base model in
      `base_model_0`.
    - `save_model` writes the whole model, or the adapter, without gathering it on one rank.

    Args:
        trainer: A Trainer, or an object of a class made from it.
        wait: Whether to wait for each save, so that its files are complete in `on_save`. Left
            out, it waits if the files may be used: if a callback that is part of neither
            Transformers nor TRL has an `on_save`, or a subclass adds to the saving.
        **options: Options of the `Checkpointer`, except the layout and those that the trainer's
            own arguments set, such as which steps stay.

    Returns:
        The checkpoints of the trainer: its saves under way, and the Checkpointer.

    Raises:
        UsageError: If it is not a Trainer, or an option is wrong.
        UnsupportedError: If this version of Transformers has other methods.
    """
    if not isinstance(trainer, Trainer):
        raise UsageError(f"{a_kind(trainer)} was found where a Trainer was expected")
    earlier = getattr(trainer, _ATTRIBUTE, None)
    if isinstance(earlier, TrainerCheckpoints):
        earlier.change(wait=wait, options=options)
        return earlier
    _check_version(trainer)
    checkpoints = TrainerCheckpoints(trainer, wait=wait, options=options)
    if checkpoints.is_active:
        _replace_saving(trainer, checkpoints)
    else:
        _warn_unchanged(trainer)
    return checkpoints


def _replace_saving(trainer: Trainer, checkpoints: TrainerCheckpoints) -> None:
    setattr(trainer, _ATTRIBUTE, checkpoints)
    trainer.__class__ = _with_saving(type(trainer))
    trainer.add_callback(checkpoints.callback)
    if trainer.is_world_process_zero():
        logger.info("%s saves through ckptkit", type(trainer).__name__)
        for name in find_uncalled(trainer):
            logger.warning("%s is not called: ckptkit writes the files of a step", name)


def _warn_unchanged(trainer: Trainer) -> None:
    if trainer.is_world_process_zero():
        reason = "DeepSpeed is used" if trainer.is_deepspeed_enabled else "FSDP is not used"
        logger.warning("%s: the Trainer saves as without ckptkit", reason)


def _check_version(trainer: Trainer) -> None:
    if problem := _problem_of(type(trainer)):
        raise UnsupportedError(
            f"transformers {transformers.__version__}: {problem}",
            where="install",
            hint="without ckptkit the Trainer saves as usual",
        )


def _problem_of(kind: type) -> str:
    """Returns which method is missing or has other parameters; empty if none.

    Source: transformers 5.23, `trainer.py`.
    """
    for name, expected in _METHODS.items():
        method = getattr(Trainer, name, None)
        if method is None:
            return f"it has no Trainer.{name}"
        parameters = tuple(inspect.signature(method).parameters)[1:]
        if parameters[: len(expected)] != expected:
            return f"Trainer.{name} takes {parameters}, expected {expected}"
    return "" if issubclass(kind, Trainer) else f"{kind.__name__} is no Trainer"


def _with_saving(kind: type) -> type:
    """Returns a class with `_Saving` between a trainer's class and `Trainer`."""
    bases = (_Saving,) if kind is Trainer else (kind, _Saving)
    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, bases, attributes)


class _Saving(Trainer):  # type: ignore[misc]  # its module is not followed
    """The class that `install` puts between a trainer's class and `Trainer`."""

    _ckptkit: TrainerCheckpoints
    control: Any

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trial = args[0] if args else kwargs.get("trial")
        with self._ckptkit.training(trial) as run:
            if resume_from_checkpoint is True:
                resume_from_checkpoint = str(agree_on_newest(run))
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002  as Trainer has it
        finish_step(self, self._ckptkit, self._ckptkit.save(trial))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Before the model is prepared, the optimizer may be that of an earlier training.
        if not self._ckptkit.load(resume_from_checkpoint, whole=model is not None):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._ckptkit.load_rest(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._ckptkit.load_rest(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_best_model(self) -> None:
        if not self._ckptkit.load_best():
            super()._load_best_model()

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ckptkit.is_due:  # save_strategy="best" has skipped it, but training ends here
            self._save_checkpoint(self.model_wrapped, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self._ckptkit.finish()
        return super()._finalize_training(trial, *args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with filter_uploads():
            super()._push_from_checkpoint(checkpoint_folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with filter_uploads():
            return super().push_to_hub(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002  as Trainer has it
        if self._ckptkit.is_adding:
            return  # the step holds the model already
        if not save_model(self, self._ckptkit, output_dir):
            super().save_model(output_dir, _internal_call)
        elif self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
