"""The Trainer of Transformers, and those of TRL, with saves that do not stop training.

```python
trainer = SFTTrainer(...)
install(trainer)
trainer.train(resume_from_checkpoint=True)
```

Saving and loading is replaced in one trainer, not in its class: the trainer gets a class that has
`_Saving` between its own class and `Trainer`, which delegates to `TrainerCheckpoints`. Methods of
subclasses are still called. Uploads of the Trainer leave out files with secrets.
"""

from __future__ import annotations

import copy
import glob
import inspect
import logging
import shlex
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
import transformers
from huggingface_hub import get_token, run_as_future
from transformers import Trainer
from transformers import trainer as trainer_module
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import hub

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import OutputError, UnsupportedError, UsageError
from ckptkit.core.text import a_kind
from ckptkit.hub.secrets import MAX_SMALL_BYTES, redact_secrets, secrets_in
from ckptkit.integrations.accelerate.deferred_weights import fill_when_prepared, refuse_empty
from ckptkit.integrations.checkpointers import export_into, is_sharded
from ckptkit.integrations.patches import replaced, saves_whole_models
from ckptkit.integrations.transformers.checkpoints import (
    TrainerCheckpoints,
    agree_on_newest,
    find_uncalled,
    hub_options,
    refuse_thinned,
    replaces_save_model,
)
from ckptkit.integrations.transformers.pretrained import defer_weights
from ckptkit.training.handle import SaveHandle
from ckptkit.training.pushing import ProgramEnd, program_end
from ckptkit.training.settings import Options

__all__ = ["TrainerCheckpoints", "defer_weights", "install"]

logger = logging.getLogger(__name__)

_SECRETS = ("hub_token", "push_to_hub_token")
_ATTRIBUTE = "_ckptkit"  # of a trainer, with its checkpoints
# The methods that are replaced or called, each with its parameters.
# Source: transformers 5.23, `trainer.py`.
_METHODS: dict[str, tuple[str, ...]] = {
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "evaluation_loop": ("dataloader", "description"),
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
    - A model that was loaded in `defer_weights` is filled once it is sharded, by each rank what
      it holds.

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
    _check_version()
    checkpoints = TrainerCheckpoints(trainer, wait=wait, options=options)
    _replace_saving(trainer, checkpoints)
    return checkpoints


def _check_version() -> None:
    """Compares the methods of `Trainer` with those that are known."""
    # Source: transformers 5.23, `trainer.py`.
    for name, expected in _METHODS.items():
        method = getattr(Trainer, name, None)
        parameters = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        problem = ""
        if method is None:
            problem = f"it has no Trainer.{name}"
        elif parameters[: len(expected)] != expected:
            problem = f"Trainer.{name} takes {parameters}, expected {expected}"
        if problem:
            raise UnsupportedError(
                f"transformers {transformers.__version__}: {problem}",
                where="install",
                hint="without ckptkit the Trainer saves as usual",
            )


def _replace_saving(trainer: Trainer, checkpoints: TrainerCheckpoints) -> None:
    """Gives a trainer under FSDP a class with `_Saving` between its own class and `Trainer`."""
    if not checkpoints.is_active:
        if trainer.is_world_process_zero():
            reason = "DeepSpeed is used" if trainer.is_deepspeed_enabled else "FSDP is not used"
            logger.warning("%s: the Trainer saves as without ckptkit", reason)
        return
    kind = type(trainer)
    bases = (_Saving,) if kind is Trainer else (kind, _Saving)
    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    setattr(trainer, _ATTRIBUTE, checkpoints)
    trainer.__class__ = type(kind.__name__, bases, attributes)
    trainer.add_callback(checkpoints.callback)
    if trainer.is_world_process_zero():
        logger.info("%s saves through ckptkit", kind.__name__)
        for name in find_uncalled(trainer):
            logger.warning("%s is not called: ckptkit writes the files of a step", name)


class _Saving(Trainer):  # type: ignore[misc]  # its module is not followed
    """The class that `install` puts between a trainer's class and `Trainer`."""

    _ckptkit: TrainerCheckpoints
    control: Any

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        run = Path(self._get_output_dir(args[0] if args else kwargs.get("trial")))
        with self._ckptkit.training(run):
            if resume_from_checkpoint is True:
                resume_from_checkpoint = str(agree_on_newest(run))
            if isinstance(resume_from_checkpoint, str | Path):
                refuse_thinned(Path(resume_from_checkpoint))
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        reads = not self._ckptkit.has_whole_model(resume_from_checkpoint)
        with fill_when_prepared(self.accelerator, reads=reads):
            prepared = super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        if not reads:
            refuse_empty(self.model)
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        # Before `train`, it prepares the model, and with FSDP1 needs no optimizer for that.
        with fill_when_prepared(self.accelerator, reads=True):
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002  as Trainer has it
        is_search = self.hp_search_backend is not None or trial is not None
        if not is_search:
            self.store_flos()
        handle = self._ckptkit.save(Path(self._get_output_dir(trial)))
        if not handle.skipped:
            self._add_and_push(handle)

    def _add_and_push(self, handle: SaveHandle) -> None:
        """Does what the Trainer, or a subclass, does after a save: `save_model`, and the push."""
        checkpoints, strategy = self._ckptkit, self.args.hub_strategy
        folder = checkpoints.folder(handle.step)
        if replaces_save_model(self) and handle.done() and folder.is_dir():
            with replaced(checkpoints, is_adding=True):
                self.save_model(str(folder), _internal_call=True)
        if not self.args.push_to_hub or strategy == HubStrategy.END:
            return
        if hub_options(self):  # a process of the Checkpointer pushes each step
            return
        if saves_whole_models(self):
            _write_model(self, checkpoints, None)  # which the Trainer copies from the step
        if strategy in {HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS}:
            handle.wait()
            if not folder.is_dir():
                return
        self._push_from_checkpoint(str(folder))

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
        with _without_the_hub(self, self._ckptkit):
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
        if not _write_model(self, self._ckptkit, output_dir):
            super().save_model(output_dir, _internal_call)
        elif self.args.push_to_hub and not _internal_call:
            _push_model(self, self._ckptkit)


@contextmanager
def _without_the_hub(trainer: Any, checkpoints: TrainerCheckpoints) -> Iterator[None]:
    """Keeps the Trainer from waiting for its own uploads, and from removing what is not pushed.

    Source: transformers 5.23, `Trainer._finalize_training`.
    """
    upload, limit = getattr(trainer, "push_in_progress", None), trainer.args.save_total_limit
    if upload is not None:
        trainer.push_in_progress = None
        for job in upload.jobs:
            _follow_upload(trainer, job)
    if checkpoints.unpushed:
        trainer.args.save_total_limit = None
    try:
        yield
    finally:
        trainer.args.save_total_limit = limit
        if upload is not None:
            trainer.push_in_progress = upload


def _push_model(trainer: Any, checkpoints: TrainerCheckpoints) -> None:
    """Pushes the model that was saved, in the background; a failure ends rank 0 with a status."""
    repo_id = hub_options(trainer).get("push_to_hub")
    if trainer.hub_model_id is None and repo_id is not None:
        trainer.hub_model_id = repo_id  # instead of a request, while other ranks wait
    with _without_the_hub(trainer, checkpoints):
        upload = trainer.push_to_hub(
            commit_message="Model save", revision=trainer.args.hub_revision, blocking=False
        )
    if isinstance(upload, Future):
        _follow_upload(trainer, upload)


def _follow_upload(trainer: Any, upload: Future[Any]) -> None:
    repo_id, revision = trainer.hub_model_id, trainer.args.hub_revision
    words = ["ckptkit", "push", str(Path(trainer.args.output_dir).absolute()), repo_id]
    words += ["--revision", revision] if revision else []
    upload.add_done_callback(partial(_report_upload, program_end(), repo_id, shlex.join(words)))
    # The client hashes and uploads files in pools of threads, which the end of the program closes
    # before `atexit` runs.
    register: Callable[..., None] = threading._register_atexit  # type: ignore[attr-defined]  # noqa: SLF001
    register(futures.wait, [upload])


def _report_upload(end: ProgramEnd, repo_id: str, again: str, upload: Future[Any]) -> None:
    error = None if upload.cancelled() else upload.exception()
    if error is not None:
        end.has_failed = True
        text = redact_secrets(f"{type(error).__name__}: {error}")
        logger.error(
            "a model that the Trainer uploads is not pushed to %s: %s; once that is mended, `%s`"
            " pushes it",
            repo_id,
            text,
            again,
        )


def _write_model(trainer: Any, checkpoints: TrainerCheckpoints, output_dir: str | None) -> bool:
    """Writes the whole model, or the adapter of a PEFT model; False if it is not sharded."""
    # With it go the files of the Trainer: configurations, tokenizer, and its arguments without
    # tokens. Other files in the folder stay.
    if not is_sharded(trainer.model):
        return False
    out = Path(output_dir or trainer.args.output_dir)
    is_first = trainer.is_world_process_zero()
    with checkpoints.open() as checkpointer:
        export_into(checkpointer, out, trainer.model, is_first=is_first)
    if not is_first:
        return True
    arguments = copy.copy(trainer.args)
    for name in _SECRETS:
        if getattr(arguments, name, None) is not None:
            setattr(arguments, name, None)
    try:
        out.mkdir(parents=True, exist_ok=True)
        torch.save(arguments, out / TRAINING_ARGS_NAME)
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        write_card = getattr(model, "create_or_update_model_card", None)  # of PEFT
        if write_card is not None:
            write_card(str(out))
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        raise OutputError(
            f"the model was written, but not the files of the Trainer: {error}", where=str(out)
        ) from error
    return True


_NEVER_PUSHED = [".ckptkit*", ".checkpoint-*"]
"""Not part of a model: the run's lock, and folders that are being written."""

_OWN = ".ckptkit"
_LISTINGS = 5  # of a folder in which files come and go
_BLOCK_BYTES = 8 << 20  # of files that are too large for memory


def _with_secrets(folder: Path, ignored: list[str], token: object) -> list[str]:
    """Returns patterns of the files that hold a secret, and logs their names."""
    patterns = []
    tokens = [text for text in (token, get_token()) if isinstance(text, str)]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(fnmatchcase(name, pattern) for pattern in ignored) or not path.is_file():
            continue
        try:
            kinds = secrets_in(_blocks(path), tokens)
        except OSError as error:  # removed meanwhile, or without permission
            kinds = [f"data that cannot be read ({error.strerror or error})"]
        if kinds:
            logger.warning("%s is not pushed: it holds %s", name, ", ".join(kinds))
            patterns.append(glob.escape(name))
    return patterns


def _blocks(path: Path) -> Iterator[bytes]:
    """Yields the content of a file; archives are searched only in one block."""
    is_small = path.stat().st_size < MAX_SMALL_BYTES
    with path.open("rb") as file:
        while block := file.read(MAX_SMALL_BYTES if is_small else _BLOCK_BYTES):
            yield block


def _upload(upload: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Uploads a folder except for files with secrets, which it searches first."""
    folder, ignored = Path(options["folder_path"]), options.pop("ignore_patterns", None) or []
    ignored = [ignored] if isinstance(ignored, str) else list(ignored)
    ignored += _NEVER_PUSHED
    left = _LISTINGS
    while True:
        try:
            secret = _with_secrets(folder, ignored, options.get("token"))
            return upload(**options, ignore_patterns=[*ignored, *secret])
        except FileNotFoundError as error:
            # Folders of a run's own come and go while all that is in it is listed, here and by the
            # client, which has sent nothing then.
            left -= 1
            if not left or folder / _OWN not in Path(str(error.filename)).parents:
                raise


@contextmanager
def filter_uploads() -> Iterator[None]:
    """Makes uploads of the Trainer skip files of a run that are no part of a model.

    The Trainer uploads all files in its directory except checkpoints and a fixed list of names.
    """
    has_client = hasattr(hub, "hf_api")  # older versions have a function of the module
    uploader: Any = hub.hf_api() if has_client else trainer_module
    upload = uploader.upload_folder

    def upload_folder(**options: Any) -> Any:
        if not options.pop("run_as_future", False):
            return _upload(upload, options)
        # The search reads all files, so it runs in the background too.
        run = getattr(uploader, "run_as_future", run_as_future)
        return run(_upload, upload, options)

    with replaced(uploader, upload_folder=upload_folder):
        yield
