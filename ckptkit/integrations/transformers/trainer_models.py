"""`Trainer.save_model` of a sharded model without a gather, and the push of the Trainer."""

from __future__ import annotations

import copy
import glob
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_token, run_as_future
from transformers import trainer as trainer_module
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import hub

from ckptkit.core.errors import OutputError
from ckptkit.hub.publish.secrets import MAX_SMALL_BYTES, secrets_in
from ckptkit.integrations.model_export import export_into, is_sharded
from ckptkit.integrations.patches import saves_whole_models
from ckptkit.integrations.transformers.checkpoints import (
    TrainerCheckpoints,
    hub_options,
    replaces_save_model,
)
from ckptkit.training.handle import SaveHandle

logger = logging.getLogger(__name__)

_SECRETS = ("hub_token", "push_to_hub_token")


def save_model(trainer: Any, checkpoints: TrainerCheckpoints, output_dir: str | None) -> bool:
    """Writes the whole model, or the adapter of a PEFT model, from all ranks at once.

    It adds the files of the Trainer: configurations, tokenizer, and its arguments without tokens.
    Other files in the folder stay.

    Returns:
        Whether it was written; the Trainer itself writes a model that is not sharded.
    """
    if not is_sharded(trainer.model):
        return False
    out = Path(output_dir or trainer.args.output_dir)
    is_first = trainer.is_world_process_zero()
    with checkpoints.open() as checkpointer:
        export_into(checkpointer, out, trainer.model, is_first=is_first)
    if is_first:
        try:
            _add_trainer_files(trainer, out)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
            raise OutputError(
                f"the model was written, but not the files of the Trainer: {error}",
                where=str(out),
            ) from error
    return True


def _add_trainer_files(trainer: Any, out: Path) -> None:
    """Writes the files that the Trainer, and PEFT, add to a model."""
    out.mkdir(parents=True, exist_ok=True)
    arguments = copy.copy(trainer.args)
    for name in _SECRETS:
        if getattr(arguments, name, None) is not None:
            setattr(arguments, name, None)
    torch.save(arguments, out / TRAINING_ARGS_NAME)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    write_card = getattr(model, "create_or_update_model_card", None)
    if write_card is not None:
        write_card(str(out))


_NEVER_PUSHED = [".ckptkit*", ".checkpoint-*"]
"""Not part of a model: the run's lock, and folders that are being written."""

_BLOCK_BYTES = 8 << 20  # of files that are too large for memory
_WHOLE_STEPS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


def finish_step(trainer: Any, checkpoints: TrainerCheckpoints, handle: SaveHandle) -> None:
    """Does what the Trainer, or a subclass, does after a save: `save_model`, and the push."""
    folder = checkpoints.folder(handle.step)
    if handle.skipped:
        return
    if replaces_save_model(trainer) and handle.done() and folder.is_dir():
        checkpoints.is_adding = True
        try:
            trainer.save_model(str(folder), _internal_call=True)
        finally:
            checkpoints.is_adding = False
    if not trainer.args.push_to_hub or trainer.args.hub_strategy == HubStrategy.END:
        return
    if hub_options(trainer):  # a process of the Checkpointer pushes each step
        return
    if saves_whole_models(trainer):
        save_model(trainer, checkpoints, None)  # which the Trainer copies from the step
    if trainer.args.hub_strategy in _WHOLE_STEPS:
        handle.wait()
        if not folder.is_dir():
            return
    trainer._push_from_checkpoint(str(folder))  # noqa: SLF001  there is no public way


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
    ignored = options.pop("ignore_patterns", None) or []
    ignored = [ignored] if isinstance(ignored, str) else list(ignored)
    ignored += _NEVER_PUSHED
    ignored += _with_secrets(Path(options["folder_path"]), ignored, options.get("token"))
    return upload(**options, ignore_patterns=ignored)


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

    uploader.upload_folder = upload_folder
    try:
        yield
    finally:
        uploader.upload_folder = upload
