"""`from_pretrained` that reads headers only: weights are read when the model is sharded.

Source: transformers 5.23, `PreTrainedModel.from_pretrained` and `_load_pretrained_model`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
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
from ckptkit.core.text import list_first
from ckptkit.integrations.accelerate.deferred_weights import (
    DEFERRED,
    DeferredWeights,
    find_changed,
    is_watched,
    watch,
)
from ckptkit.integrations.patches import replaced
from ckptkit.training.load.load_into import ModelLoad

logger = logging.getLogger(__name__)

_METHOD = "_load_pretrained_model"
_MOVE = "_move_adapter_to_device_of_base_layer"  # of PEFT
_Method = Callable[..., Any]
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

    Adapters of PEFT are added in the block too, for which a trainer of TRL may be made in it. Those
    whose initial values are computed or copied from the weights are refused.

    A model that cannot be read this way is loaded as usual, and the log says why: one that is
    quantized, is in other files than safetensors, goes to devices by `device_map`, or has names
    or values that are computed while it is loaded.
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

    with (
        replaced(PreTrainedModel, **{_METHOD: staticmethod(load)}),
        # Where Transformers sees that FSDP is used, all ranks but the first leave new heads empty.
        replaced(modeling_utils, is_fsdp_enabled=lambda: False),
        _adapters_with_values(),
    ):
        yield


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
    """Has adapters keep their initial values, and refuses those that PEFT cannot compute.

    PEFT initialises an adapter on the CPU, and moves it to the device of its layer, more than once;
    on the meta device it would lose its values. What it computes or copies from weights that are
    not there cannot be had.

    Source: peft 0.21, `BaseTunerLayer._move_adapter_to_device_of_base_layer`, `BaseTuner` and
    `PeftModel`.
    """
    with ExitStack() as undo:
        undo.enter_context(_wrapped(nn.Module, "to", _without_meta))
        if find_spec("peft") is not None:
            from peft import PeftModel
            from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

            undo.enter_context(_wrapped(BaseTunerLayer, _MOVE, _to_the_cpu))
            undo.enter_context(_wrapped(BaseTuner, "inject_adapter", _checked))
            undo.enter_context(_wrapped(PeftModel, "__init__", _checked))
        yield


def _wrapped(
    owner: type, name: str, wrap: Callable[[_Method], _Method]
) -> AbstractContextManager[None]:
    stock = getattr(owner, name)
    return replaced(owner, **{name: functools.wraps(stock)(wrap(stock))})


def _without_meta(stock: _Method) -> _Method:
    """Returns `nn.Module.to` that leaves modules with values where they are."""

    def move(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        device = options.get("device", arguments[0] if arguments else None)
        is_meta = isinstance(device, str | torch.device) and torch.device(device).type == "meta"
        if not is_meta or any(tensor.is_meta for tensor in module.parameters()):
            return stock(module, *arguments, **options)
        rest = {key: value for key, value in options.items() if key != "device"}
        further = arguments[1:] if "device" not in options else arguments
        return stock(module, *further, **rest) if further or rest else module

    return move


def _to_the_cpu(stock: _Method) -> _Method:
    """Returns a method that moves an adapter to the device of its layer, but not to meta."""

    def move(layer: Any, adapter_name: str, device: torch.device | None = None) -> None:
        is_meta = any(tensor.is_meta for tensor in layer.get_base_layer().parameters())
        stock(layer, adapter_name, torch.device("cpu") if is_meta else device)

    return move


def _checked(stock: _Method) -> _Method:
    """Returns a method that adds adapters, and refuses what needs weights that are deferred."""

    def add(owner: Any, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        if options.get("low_cpu_mem_usage") or not any(map(is_watched, model.parameters())):
            return stock(owner, model, *arguments, **options)
        before, changed = {id(tensor) for _, tensor in _named(model)}, _changed(model)
        try:
            added = stock(owner, model, *arguments, **options)
        except RuntimeError as error:  # also NotImplementedError, which torch raises on meta
            raise _refusal(owner, f"{type(error).__name__}: {error}") from error
        empty = [name for name, t in _named(model) if t.is_meta and id(t) not in before]
        empty += sorted(_changed(model) - changed - {*empty})
        if empty:
            raise _refusal(owner, list_first(empty))
        return added

    return add


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _changed(model: nn.Module) -> set[str]:
    return {name for name, _ in find_changed(model.named_parameters())}


def _refusal(owner: Any, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"PEFT computes or copies initial values from weights that are deferred: {what}",
        where=f"{type(owner).__name__} in defer_weights",
        hint="load the model without defer_weights, or leave out what needs its weights: DoRA,"
        " PiSSA and other init_lora_weights that decompose them, modules_to_save, and tokens that"
        " are trained",
    )


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
        weights = DeferredWeights.record(files)
        headers: dict[str, torch.Tensor] = {}
        for path in files:
            headers |= modeling_utils.load_state_dict(path, map_location="meta")
        on_meta = dataclasses.replace(config, device_map={"": "meta"})
        loaded = stock(model, headers, None, on_meta, *rest, **more)
        info = loaded[0]
        initialised = {*info.missing_keys, *(name for name, *_ in info.mismatched_keys)}
        why = _doubt(model, weights, info, initialised)
        if not why:
            DEFERRED[model] = weights
            # Transformers gives memory and values to the others next.
            watch(value for name, value in model.named_parameters() if name not in initialised)
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


def _doubt(model: Any, weights: DeferredWeights, info: Any, initialised: set[str]) -> str:
    """Returns what ckptkit would read in another way than Transformers; empty for nothing."""
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
