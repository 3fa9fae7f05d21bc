"""Saves and loads the state of accelerate, without stopping training and without a collective.

```python
from ckptkit.integrations.accelerate import load_state, save_model, save_state

handle = save_state(accelerator, "out/checkpoint-500")  # returns once the local copy is taken
load_state(accelerator, "out/checkpoint-500")
save_model(accelerator, model, "out/final", dtype="bfloat16")  # no gather
```

`install(accelerator)` replaces the accelerator's own methods with them.
"""

from __future__ import annotations

import functools
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.integrations.accelerate.accelerator_state import (
    check_layout,
    kind_of,
    prepared_model,
    stock_method,
)
from ckptkit.integrations.accelerate.deferred_weights import prepare_and_fill
from ckptkit.integrations.accelerate.saves import AcceleratorSaves
from ckptkit.integrations.checkpointers import is_sharded
from ckptkit.training.export.export import ExportOptions
from ckptkit.training.handle import SaveHandle
from ckptkit.training.settings import Options

if TYPE_CHECKING:
    from accelerate import Accelerator

_SAVES: weakref.WeakKeyDictionary[Accelerator, AcceleratorSaves] = weakref.WeakKeyDictionary()


@check_names
def save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> SaveHandle:
    """Saves what `accelerator.save_state(output_dir)` saves, in the background.

    The folder appears once the save is complete; it replaces a folder of that name that ckptkit
    wrote. With `automatic_checkpoint_naming` it is `PROJECT/checkpoints/checkpoint_N`, and the
    oldest folder beyond `total_limit` is removed after the new one is durable. Stock `load_state`
    reads it.

    Accelerate itself saves, without background, if only it can (such as FSDP with state dicts that
    are not sharded), or if the folder holds other files or is the one that the program runs in. The
    log says so.

    Args:
        accelerator: The accelerator, after all objects were prepared.
        output_dir: The folder; left out with `automatic_checkpoint_naming`.
        **options: Options of the Checkpointer. One is open at a time; other options than before
            open a new one.

    Returns:
        The handle of the save; `result()` waits for it.

    Raises:
        UsageError: If no folder follows from the arguments, or an option is wrong.
        OutputExistsError: If the folder of this iteration exists already.
        RefusedError: If the directory cannot be used, or another job is writing to it.
        PeerError: If another rank does not take part in time.
    """
    return _saves(accelerator).save(output_dir, options, {})


@check_names
def load_state(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> None:
    """Loads a folder of `save_state`, or of stock accelerate, after the last save has ended.

    Args:
        accelerator: The accelerator, with as many prepared models and optimizers as when the
            folder was saved.
        input_dir: The folder; left out with `automatic_checkpoint_naming` to load the newest
            complete one.
        **options: As for `save_state`; with `local`, the nodes' own disks are searched too.

    Raises:
        ResumeError: If there is no such folder, or it does not fit.
        InputError: If it is damaged.
        PeerError: If another rank does not take part in time.
    """
    _saves(accelerator).load(input_dir, options, {})


@check_names
def save_model(
    accelerator: Accelerator,
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    **options: Unpack[ExportOptions],
) -> None:
    """Writes the folder that `from_pretrained` opens, from all ranks at once, without a gather.

    It equals the output of `ckptkit consolidate`; for a PEFT model it is the adapter. Other files
    in the directory stay, except for the weights of an earlier model. Call it on all ranks; the
    files are complete once the main process has returned.

    Args:
        accelerator: The accelerator that prepared the model.
        model: A model that FSDP shards.
        save_directory: The directory to write to.
        **options: As for `Checkpointer.export`.

    Raises:
        UsageError: If the model is not sharded, or an option is wrong.
        CkptkitError: If the export fails, on every rank.
    """
    whole = prepared_model(accelerator, model)
    if not is_sharded(whole):
        raise UsageError(
            "it has no sharded parameter",
            where="model",
            hint="use accelerator.save_model of accelerate itself",
        )
    _saves(accelerator).save_model(whole, Path(save_directory).absolute(), options)


@check_names
def install(accelerator: Accelerator, *, wait: bool = False, **options: Unpack[Options]) -> None:
    """Makes an accelerator save and load through ckptkit.

    It replaces `save_state`, `load_state`, `save_model` and `get_state_dict`; and `prepare`, which
    fills models that were loaded in `ckptkit.integrations.transformers.defer_weights`.

    As the stock method, `accelerator.save_state` returns the path of the folder, which appears
    later. An error in the background is logged, and raised by `accelerator.end_training`.

    Args:
        accelerator: The accelerator; a second call only changes the options.
        wait: Whether to wait for each save, for scripts that use the folder right after it.
        **options: As for `save_state`.

    Raises:
        UsageError: If another layout than accelerate's is passed.
    """
    check_layout(options)
    saves = _saves(accelerator)
    saves.options = options
    saves.waits = wait
    stock = functools.partial(stock_method("prepare"), accelerator)
    accelerator.prepare = functools.partial(prepare_and_fill, accelerator, stock)
    accelerator.save_state = functools.partial(save_like_stock, accelerator)
    accelerator.load_state = functools.partial(load_like_stock, accelerator)
    accelerator.save_model = functools.partial(save_model_like_stock, accelerator)
    accelerator.get_state_dict = functools.partial(get_state_like_stock, accelerator)


@check_names
def close(accelerator: Accelerator) -> None:
    """Waits for the saves of an accelerator, and frees their memory and processes.

    `accelerator.end_training` and `accelerator.free_memory` do the same.

    Raises:
        SaveError: If a save failed, and no call has raised its error.
    """
    _saves(accelerator).close()


def save_like_stock(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,  # noqa: FBT001, FBT002  as in accelerate
    *,
    waits: bool = False,
    **further: Any,
) -> Path:
    """Saves under the signature of `Accelerator.save_state`."""
    saves = _saves(accelerator)
    stock = {"safe_serialization": safe_serialization, **further}
    handle = saves.save(output_dir, saves.options, stock)
    if waits or saves.waits:
        handle.result()
    return saves.folder


def load_like_stock(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **further: Any,
) -> None:
    """Loads under the signature of `Accelerator.load_state`."""
    if load_kwargs is not None:  # older versions have no such argument
        further["load_kwargs"] = load_kwargs
    saves = _saves(accelerator)
    saves.load(input_dir, saves.options, further)


def save_model_like_stock(
    accelerator: Accelerator,
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,  # noqa: FBT001, FBT002  as in accelerate
) -> None:
    """Writes a model under the signature of `Accelerator.save_model`."""
    is_ours = safe_serialization and is_sharded(prepared_model(accelerator, model))
    if is_ours and not Path(save_directory).is_file():
        save_model(accelerator, model, save_directory, max_shard_size=max_shard_size)
        return
    stock_method("save_model")(
        accelerator, model, save_directory, max_shard_size, safe_serialization
    )


def get_state_like_stock(
    accelerator: Accelerator, model: torch.nn.Module, *further: Any, **options: Any
) -> Any:
    """Returns the whole state of a model under the signature of `Accelerator.get_state_dict`.

    As with the stock method, other ranks than the first get an empty dictionary. It issues no
    collective.
    """
    if kind_of(accelerator) == "FSDP" and is_sharded(model):
        state = _saves(accelerator).whole_state(prepared_model(accelerator, model))
        if state is not None:
            return state
    return stock_method("get_state_dict")(accelerator, model, *further, **options)


def _saves(accelerator: Accelerator) -> AcceleratorSaves:
    saves = _SAVES.get(accelerator)
    if saves is None:
        saves = _SAVES[accelerator] = AcceleratorSaves(accelerator)
        for method in ("end_training", "free_memory"):
            setattr(accelerator, method, _close_before(saves, getattr(accelerator, method)))
    return saves


def _close_before(saves: AcceleratorSaves, stock: Any) -> Any:
    """Wraps a method so that it first waits for saves, which use the process group and models."""

    @functools.wraps(stock)
    def method(*arguments: Any, **options: Any) -> Any:
        failure: CkptkitError | None = None
        try:
            saves.close()
        except CkptkitError as error:
            failure = error
        result = stock(*arguments, **options)
        if failure is not None:
            raise failure
        return result

    return method
