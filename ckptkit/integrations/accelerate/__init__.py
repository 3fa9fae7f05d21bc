"""What accelerate saves and loads, without stopping and without a collective.

```python
from ckptkit.integrations.accelerate import load_state, save_model, save_state

handle = save_state(accelerator, "out/checkpoint-500")  # returns once the local copy is taken
load_state(accelerator, "out/checkpoint-500")
save_model(accelerator, model, "out/final", dtype="bfloat16")  # no gather
```

`install(accelerator)` puts them in the place of the accelerator's own methods.
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
from ckptkit.integrations.accelerate.accelerator_state import prepared_model
from ckptkit.integrations.accelerate.saves import AcceleratorSaves, stock_method
from ckptkit.integrations.model_export import is_sharded
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

    The folder is there once the save is done, all at once; a folder of that name that ckptkit
    wrote is replaced then. With `automatic_checkpoint_naming` it is
    `PROJECT/checkpoints/checkpoint_N`, and the oldest beyond `total_limit` goes after the new
    one is durable. Stock `load_state` reads it.

    What only accelerate itself can save (without FSDP, or with other than sharded state dicts),
    or into a folder that holds other things, it saves at once, which the log says.

    Args:
        accelerator: Whose state; everything was prepared before.
        output_dir: The folder; left out with `automatic_checkpoint_naming`.
        **options: Those of the Checkpointer behind it, of which one is open at a time; others
            than before open a new one.

    Returns:
        The handle of the save; `result()` waits for it.

    Raises:
        UsageError: If no folder follows from the arguments, or an option is wrong.
        OutputExistsError: If the folder of this iteration is there already.
        RefusedError: If the directory cannot be used, or another job is writing to it.
        PeerError: If another rank does not take part in time.
    """
    return _saves(accelerator).save(accelerator, output_dir, options, {})


@check_names
def load_state(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> None:
    """Loads what `save_state` saved, or stock accelerate; a save under way is waited for.

    Args:
        accelerator: Whose state; as many models and optimizers were prepared as when it was
            saved.
        input_dir: The folder; left out with `automatic_checkpoint_naming`, to load the newest
            that is complete.
        **options: As for `save_state`: with `local`, the nodes' own disks are looked at too.

    Raises:
        ResumeError: If there is none, or it does not fit.
        InputError: If it is damaged.
        PeerError: If another rank does not take part in time.
    """
    _saves(accelerator).load(accelerator, input_dir, options, {})


@check_names
def save_model(
    accelerator: Accelerator,
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    **options: Unpack[ExportOptions],
) -> None:
    """Writes the folder that `from_pretrained` opens, from all ranks at once, without a gather.

    It holds what `ckptkit consolidate` makes of a save, and of a PEFT model it is the adapter.
    What else lies in the directory stays, but for the weights of an earlier model. To be called
    on all ranks; the files are there once the main process has returned.

    Args:
        accelerator: Which prepared the model.
        model: A model that FSDP shards.
        save_directory: Where to.
        **options: As for `Checkpointer.export`.

    Raises:
        UsageError: If the model is not sharded, or an option is wrong.
        CkptkitError: What went wrong, on every rank.
    """
    whole = prepared_model(accelerator, model)
    if not is_sharded(whole):
        raise UsageError(
            "no parameter of it is sharded",
            where="model",
            hint="accelerator.save_model of accelerate itself writes it",
        )
    _saves(accelerator).save_model(accelerator, whole, Path(save_directory).absolute(), options)


@check_names
def install(accelerator: Accelerator, *, wait: bool = False, **options: Unpack[Options]) -> None:
    """Has an accelerator save and load through ckptkit.

    That concerns `save_state`, `load_state`, `save_model` and `get_state_dict`.

    As the stock method does, `accelerator.save_state` returns the path of the folder, which is
    not there yet. What fails in the background is in the log, and raised by
    `accelerator.end_training`.

    Args:
        accelerator: Whose methods are replaced; doing so again only changes the options.
        wait: Whether a save is waited for, for scripts that look into the folder right after.
        **options: As for `save_state`.
    """
    saves = _saves(accelerator)
    saves.options = options
    saves.waits = wait
    accelerator.save_state = functools.partial(saved_like_stock, accelerator)
    accelerator.load_state = functools.partial(loaded_like_stock, accelerator)
    accelerator.save_model = functools.partial(model_saved_like_stock, accelerator)
    accelerator.get_state_dict = functools.partial(state_like_stock, accelerator)


@check_names
def close(accelerator: Accelerator) -> None:
    """Waits for the saves of an accelerator and gives back what they need.

    `accelerator.end_training` and `accelerator.free_memory` do this as well.

    Raises:
        SaveError: If a save failed, and nobody has asked for its result.
    """
    _saves(accelerator).close()


def saved_like_stock(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,  # noqa: FBT001, FBT002  as in accelerate
    *,
    waits: bool = False,
    **further: Any,
) -> Path:
    """Saves under the signature of `Accelerator.save_state`.

    Args:
        accelerator: Whose state.
        output_dir: The folder.
        safe_serialization: For what accelerate itself has to save.
        waits: Whether the save is waited for, even if `install` was not told so.
        **further: For what accelerate itself has to save.

    Returns:
        The folder.
    """
    saves = _saves(accelerator)
    stock = {"safe_serialization": safe_serialization, **further}
    handle = saves.save(accelerator, output_dir, saves.options, stock)
    if waits or saves.waits:
        handle.result()
    return saves.folder


def loaded_like_stock(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **further: Any,
) -> None:
    """Loads under the signature of `Accelerator.load_state`.

    Args:
        accelerator: Whose state.
        input_dir: The folder.
        load_kwargs: For what accelerate itself has to load.
        **further: The same.
    """
    if load_kwargs is not None:  # which older versions do not know
        further["load_kwargs"] = load_kwargs
    saves = _saves(accelerator)
    saves.load(accelerator, input_dir, saves.options, further)


def model_saved_like_stock(
    accelerator: Accelerator,
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,  # noqa: FBT001, FBT002  as in accelerate
) -> None:
    """Writes a model under the signature of `Accelerator.save_model`.

    Args:
        accelerator: Which prepared the model.
        model: A model; one that is not sharded is left to accelerate itself.
        save_directory: Where to.
        max_shard_size: The size at which a new file is begun.
        safe_serialization: What accelerate itself has to do if it is not set.
    """
    is_ours = safe_serialization and is_sharded(prepared_model(accelerator, model))
    if is_ours and not Path(save_directory).is_file():
        save_model(accelerator, model, save_directory, max_shard_size=max_shard_size)
        return
    stock_method("save_model")(
        accelerator, model, save_directory, max_shard_size, safe_serialization
    )


def state_like_stock(
    accelerator: Accelerator, model: torch.nn.Module, *further: Any, **options: Any
) -> Any:
    """Returns the whole state of a model under the signature of `Accelerator.get_state_dict`.

    As stock's, it is on the first rank, and empty on the others; no collective is issued for it.

    Args:
        accelerator: Which prepared the model.
        model: A model; one that FSDP does not shard is left to accelerate itself.
        *further: For what accelerate itself has to gather.
        **options: The same.
    """
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind == "FSDP" and is_sharded(model):
        whole = prepared_model(accelerator, model)
        found = _saves(accelerator).whole_state(accelerator, whole)
        if found is not None:
            return found
    return stock_method("get_state_dict")(accelerator, model, *further, **options)


def _saves(accelerator: Accelerator) -> AcceleratorSaves:
    found = _SAVES.get(accelerator)
    if found is None:
        found = _SAVES[accelerator] = AcceleratorSaves()
        for method in ("end_training", "free_memory"):
            setattr(accelerator, method, _closing(found, getattr(accelerator, method)))
    return found


def _closing(saves: AcceleratorSaves, stock: Any) -> Any:
    """Returns a method that first waits for saves: they need the store, and hold the models."""

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
