"""`from_pretrained` that reads headers only: weights are read when the model is sharded.

Source: transformers 5.23, `PreTrainedModel.from_pretrained` and `_load_pretrained_model`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.index import Fqn
from ckptkit.integrations.accelerate.deferred_weights import DeferredWeights, keep_deferred
from ckptkit.integrations.accelerate.watched_parameters import watch
from ckptkit.training.load.load_into import ModelLoad

logger = logging.getLogger(__name__)

_METHOD = "_load_pretrained_model"
_PARAMETERS = ("model", "state_dict", "checkpoint_files", "load_config", "expected_keys")


@contextmanager
@check_names
def defer_weights() -> Iterator[None]:
    """Makes `from_pretrained` leave weights on the meta device, until the block ends.

    ```python
    with defer_weights():
        model = AutoModelForCausalLM.from_pretrained("base", dtype="bfloat16")
    trainer = Trainer(model, ...)
    install(trainer)
    trainer.train()
    ```

    `train` then shards the model with FSDP, and each rank reads its own part of the files. Use it
    on all ranks, and set the same seed on them. What the files do not hold, such as a new head or
    the frequencies of a rotary embedding, is computed as without it.

    Adapters of PEFT are added in the block too, for which a trainer of TRL may be made in it.

    A model that cannot be read this way is loaded as usual, and the log says why: one that is
    quantized, is in other files than safetensors, goes to devices by `device_map`, or has names
    or values that are computed while it is loaded.

    Raises:
        UnsupportedError: If this version of Transformers loads in another way.
    """
    stock = _stock_method()

    def load(
        model: Any,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        arguments = (model, state_dict, checkpoint_files, load_config, *rest)
        return _load_headers(stock.__func__, *arguments, **more)

    # Where Transformers sees that FSDP is used, all ranks but the first leave new heads empty.
    sees = modeling_utils.is_fsdp_enabled
    setattr(PreTrainedModel, _METHOD, staticmethod(load))
    modeling_utils.is_fsdp_enabled = _sees_no_fsdp
    try:
        with _adapters_with_values():
            yield
    finally:
        setattr(PreTrainedModel, _METHOD, stock)
        modeling_utils.is_fsdp_enabled = sees


def _sees_no_fsdp() -> bool:
    return False


def _stock_method() -> Any:
    """Returns the method that loads a model; refuses another than is known."""
    stock = vars(PreTrainedModel).get(_METHOD)
    function = getattr(stock, "__func__", None)
    found = () if function is None else tuple(inspect.signature(function).parameters)
    if not isinstance(stock, staticmethod) or found != _PARAMETERS:
        raise UnsupportedError(
            f"transformers {transformers.__version__}: {_METHOD} takes {found}, expected"
            f" {_PARAMETERS}",
            where="defer_weights",
            hint="without it the model is loaded as usual",
        )
    return stock


@contextmanager
def _adapters_with_values() -> Iterator[None]:
    """Keeps modules with values where they are, which would lose them on the meta device.

    PEFT initialises an adapter on the CPU, and moves it to the device of its layer, more than once.

    Source: peft 0.21, `BaseTunerLayer` and `BaseTuner._replace_module`.
    """
    stock = nn.Module.to

    @functools.wraps(stock)
    def move(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        device = options.get("device", arguments[0] if arguments else None)
        is_meta = isinstance(device, str | torch.device) and torch.device(device).type == "meta"
        if not is_meta or any(tensor.is_meta for tensor in module.parameters()):
            return stock(module, *arguments, **options)
        rest = {key: value for key, value in options.items() if key != "device"}
        further = arguments[1:] if "device" not in options else arguments
        return stock(module, *further, **rest) if further or rest else module

    setattr(nn.Module, "to", move)  # noqa: B010  mypy refuses an assignment to a method
    try:
        yield
    finally:
        setattr(nn.Module, "to", stock)  # noqa: B010


def _load_headers(
    stock: Callable[..., Any],
    model: Any,
    state_dict: Any,
    files: Sequence[str] | None,
    config: Any,
    *rest: Any,
    **more: Any,
) -> Any:
    """Does what `_load_pretrained_model` does, with tensors on the meta device where it can."""
    why = _obstacle(model, state_dict, files, config)
    if not why:
        assert files is not None  # noqa: S101  see _obstacle
        weights = DeferredWeights.look(files)
        headers: dict[str, torch.Tensor] = {}
        for path in files:
            headers |= modeling_utils.load_state_dict(path, map_location="meta")
        on_meta = replace(config, device_map={"": "meta"})
        loaded = stock(model, headers, None, on_meta, *rest, **more)
        why = _doubt(model, weights, loaded[0])
        if not why:
            keep_deferred(model, weights)
            watch(model.parameters())
            return loaded
    logger.warning("%s is loaded as without ckptkit: %s", type(model).__name__, why)
    return stock(model, state_dict, files, config, *rest, **more)


def _obstacle(model: Any, state_dict: Any, files: Sequence[str] | None, config: Any) -> str:
    """Returns why the weights of a model are not deferred; empty where they are."""
    if state_dict is not None or not files:
        return "its weights are not in files"
    converts = len(config.weight_mapping or ())
    reasons = {
        "it is quantized": config.hf_quantizer is not None,
        "its devices are given": config.device_map is not None or config.device_mesh is not None,
        "its files are not safetensors": any(Path(p).suffix != ".safetensors" for p in files),
        "its files are in several folders": len({Path(path).parent for path in files}) > 1,
        "key_mapping is given": converts != len(get_model_conversion_mapping(model)),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _doubt(model: Any, weights: DeferredWeights, info: Any) -> str:
    """Returns what ckptkit would read in another way than Transformers; empty for nothing.

    Args:
        model: The model, on the meta device.
        weights: Where its weights are.
        info: What Transformers has found in their headers.
    """
    initialised = {*info.missing_keys, *(name for name, *_ in info.mismatched_keys)}
    try:
        with ModelLoad(model, weights.folder, kept=frozenset(map(Fqn, initialised))) as load:
            load.check(strict=False)
            missing, read = load.unfilled, load.files
    except CkptkitError as error:
        return str(error)
    named = {os.path.realpath(path) for path, *_ in weights.files}
    if {os.path.realpath(path) for path in read} - named:
        return f"{weights.folder} has files of other weights too"
    if info.error_msgs or info.conversion_errors:
        return "Transformers finds faults in its files"
    return f"{missing[0]} is computed from what the files hold" if missing else ""
