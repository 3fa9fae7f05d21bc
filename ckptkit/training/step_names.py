"""Names of files and folders of a step, names without wrappers, and places of tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from msgspec import Struct
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Fqn, KeyPath, Shape
from ckptkit.core.wrapper_names import COMPILED, MODULE, WRAPPERS, without_wrappers
from ckptkit.formats.discovery import parse_step
from ckptkit.hub_names.disk_tensors import HubNames, NamingRequest
from ckptkit.hub_names.known_models import determine_need, explain_doubt
from ckptkit.lora.dialects import AdapterNames, holds_adapters
from ckptkit.storage.locations import unstaged_path

RNG = "rng"
"""The key of the random number generators in the layout `dcp`."""

VALUES_FILES = "ckptkit/values_rank_"
"""The prefix of the names of these files; see `ckptkit.training.state.structures`."""

TRAINER_STATE = "trainer_state.json"
"""The file with the Trainer's own state."""

logger = logging.getLogger(__name__)

_COUNTED = "checkpoint_"  # with automatic_checkpoint_naming of accelerate
_PARALLEL = (DistributedDataParallel, DataParallel)
_RUNNERS = (*_PARALLEL, FullyShardedDataParallel)


def name_save(step: int, folder: object) -> str:
    """Returns what messages call a save: its step, unless saves were counted instead of steps.

    Those that accelerate names itself are counted, and those in folders without a number.

    >>> name_save(5, "run/checkpoint-5"), name_save(0, "run/final"), name_save(0, "checkpoint_0")
    ('step 5', "'final'", "'checkpoint_0'")
    """
    path = unstaged_path(str(folder))
    name = PurePath(path).name
    is_step = parse_step(path) == step and not name.startswith(_COUNTED)
    return f"step {step}" if is_step else repr(name)


def model_unit(index: int) -> str:
    return f"pytorch_model_fsdp_{index}"


def optimizer_unit(index: int) -> str:
    return f"optimizer_{index}"


def scheduler_file(index: int) -> str:
    return f"scheduler_{index}.bin" if index else "scheduler.bin"


def scaler_file(index: int) -> str:
    return f"scaler_{index}.pt" if index else "scaler.pt"


def base_unit(index: int) -> str:
    return f"base_model_{index}"


def random_states_file(rank: int) -> str:
    return f"random_states_{rank}.pkl"


def trainer_scheduler_file(index: int) -> str:
    return f"scheduler_{index}.pt" if index else "scheduler.pt"


def random_states_files(rank: int, world_size: int) -> tuple[str, ...]:
    return random_states_file(rank), trainer_random_states_file(rank, world_size)


def trainer_random_states_file(rank: int, world_size: int) -> str:
    return f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"


def custom_file(index: int) -> str:
    """Returns the file of the object at `index` of any other kind."""
    return f"custom_checkpoint_{index}.pkl"


def rank_file(kind: str, index: int, rank: int) -> str:
    """Returns the name of a rank's own state of a dataloader or a generator."""
    return f"ckptkit/{kind}_{index}_rank_{rank}.bin"


def values_file(rank: int) -> str:
    return f"{VALUES_FILES}{rank}.bin"


def clean_fqn(name: str, parallel: Sequence[str] = ()) -> str:
    """Returns a parameter's or module's name without the parts that wrappers add.

    >>> clean_fqn("_orig_mod.0._fsdp_wrapped_module.module.weight")
    '0.module.weight'
    >>> clean_fqn("module.module.weight", ("",))
    'module.weight'
    """
    clean = without_wrappers(name)
    for prefix in parallel:
        if clean == prefix + MODULE:
            return prefix.removesuffix(".")
        if clean.startswith(f"{prefix}{MODULE}."):
            clean = prefix + clean[len(f"{prefix}{MODULE}.") :]
    return clean


def parallel_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Returns the prefixes of the modules that wrap another one as `module`, the innermost first.

    A module of the user may be called `module` too, so that the name alone is not enough.
    """
    names = [
        clean_fqn(name) for name, module in model.named_modules() if isinstance(module, _PARALLEL)
    ]
    return tuple(sorted((f"{name}." if name else "" for name in names), key=len, reverse=True))


def wrapper_names(model: nn.Module) -> list[str]:
    """Returns the class names of the wrappers in a model, each once, in order of appearance."""
    kinds = [
        type(module).__name__
        for module in model.modules()
        if isinstance(module, _PARALLEL) or not WRAPPERS.isdisjoint(dict(module.named_children()))
    ]
    return list(dict.fromkeys(kinds))


def innermost(model: nn.Module) -> nn.Module:
    """Returns the model inside of its wrappers."""
    while True:
        is_wrapped = isinstance(model, _RUNNERS)
        inner = model.module if is_wrapped else dict(model.named_children()).get(COMPILED)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def model_class(model: nn.Module) -> type:
    """Returns the class of a model inside of its wrappers, not that which FSDP2 derives of it."""
    kinds = type(innermost(model)).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith("torch."))


def ask_disk_names(
    model: nn.Module,
    config: Mapping[str, Any] | None,
    tensors: Mapping[Fqn, tuple[DType, Shape]],
    *,
    base: Sequence[Fqn] = (),
) -> tuple[HubNames | None, str]:
    """Determines the names of a live model's tensors on disk, where they may differ.

    They are None where they are the live ones, or not known; the text says why they are not.
    """
    inner, own = innermost(model), model_class(model)
    need = determine_need(config, has_base=True)
    if config is None or need.kind != "ask" or not own.__module__.startswith("transformers."):
        return None, ""
    why = explain_doubt(config, (dtype for dtype, _ in tensors.values()))
    if why:
        return None, why
    try:
        from ckptkit.hub_names.transformers.answers import answer_names

        plain = {**config, "architectures": [own.__name__]}
        plain.pop("auto_map", None)
        conversions = None if base else getattr(inner, "_weight_conversions", None)
        return answer_names(NamingRequest(plain, tensors, base), conversions), ""
    except Exception as error:  # noqa: BLE001  live names do without
        return None, f"{type(error).__name__}: {error}"


def ask_live_class(
    own: type,
    config: Mapping[str, Any],
    live: Mapping[Fqn, Shape],
    disk: Mapping[str, Collection[Fqn]],
    *,
    is_converted: bool,
) -> tuple[bool, str]:
    """Asks the class of a live model, in this process, whether tensors are all that it has.

    Returns whether that is certain, and why transformers does not know the model, if so.
    """
    if all(kind.__module__ != "transformers.modeling_utils" for kind in own.__mro__):
        return False, ""  # transformers need not be imported here
    try:
        from ckptkit.hub_names.transformers import loading, model_classes

        if not own.__module__.startswith("transformers."):  # building it may do anything
            return False, model_classes.explain_foreign(config)
        return loading.loads_as_built(config, live, disk, is_converted=is_converted), ""
    except Exception as error:  # noqa: BLE001  a process is asked, which says what is wrong
        logger.debug("the class of the live model did not answer: %r", error)
        return False, ""


_EMBEDDINGS = ("embed_tokens", "lm_head")  # PEFT's EMBEDDING_LAYER_NAMES
_SIDES = ("input", "output")
_PEFT_PREFIX = "base_model.model."  # of names in the base model


class TensorPlaces(Struct, frozen=True):
    """The DCP directory and the key path of each tensor of a model."""

    unit: str  # the directory
    path: KeyPath  # the prefix of the key paths
    # For a model that is split, as the Trainer does it: the names of the adapter's tensors, which
    # are in `unit` under their names in PEFT's files
    adapter: AdapterNames | None = None
    base_unit: str = ""  # for a model that is split, the directory of all other tensors

    def of(self, fqn: str) -> tuple[str, KeyPath]:
        """Returns the directory of a tensor, and its key path."""
        if self.adapter is None:
            return self.unit, (*self.path, fqn)
        in_file = self.adapter.file_name(fqn)
        if in_file is None:
            return self.base_unit, (*self.path, fqn)
        return self.unit, (*self.path, in_file)

    @property
    def units(self) -> tuple[str, ...]:
        return (self.unit,) if self.adapter is None else (self.unit, self.base_unit)


def adapter_names(model: nn.Module) -> AdapterNames | None:
    """Returns the names of the active adapter's tensors of a PEFT model.

    It is None for other models, and for adapters without modules of their own.

    Source: peft's `PeftModel`, whose `peft_config` holds a configuration for each adapter.
    """
    inner: Any = innermost(model)
    configs = getattr(inner, "peft_config", None)
    active = getattr(inner, "active_adapter", None)
    if not isinstance(configs, dict) or not isinstance(active, str) or active not in configs:
        return None
    if not any(holds_adapters(name.rpartition(".")[2]) for name, _ in inner.named_modules()):
        return None  # such as prompts, which PEFT's files do not name by modules
    bias = str(getattr(configs[active], "bias", "none"))
    return AdapterNames(
        adapter=active,
        bias="all" if bias == "all" else "lora_only" if bias.endswith("_only") else "none",
        embeddings=tuple(_saved_embeddings(inner, configs[active])),
    )


def _saved_embeddings(model: Any, config: Any) -> Iterator[str]:
    """Yields the names of embeddings that PEFT saves with an adapter.

    Source: peft 0.21, `get_peft_model_state_dict` with `save_embedding_layers="auto"`.
    """
    names = [clean_fqn(name) for name, _ in model.named_modules()]
    targeted = any(_is_target(name, config) for name in names)
    only_tokens = getattr(config, "trainable_token_indices", None) is not None
    if (not targeted or only_tokens) and not _was_resized(model, config):
        return
    layers = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in _SIDES]
    if targeted:
        layers = [getattr(layer, "base_layer", None) for layer in layers]
    for name, module in model.named_modules():
        if any(module is layer for layer in layers):
            yield clean_fqn(name)


def _is_target(name: str, config: Any) -> bool:
    """Returns whether a module is an embedding that an adapter targets."""
    last, targets = name.rpartition(".")[2], getattr(config, "target_modules", None) or ()
    if last not in _EMBEDDINGS:
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, name.removeprefix(_PEFT_PREFIX)) is not None
    return last in targets


def _was_resized(model: Any, config: Any) -> bool:
    """Returns whether a model has another number of tokens than its base."""
    own: Any = getattr(model, "config", None)
    tokens = getattr(own, "vocab_size", None)
    origin = getattr(config, "base_model_name_or_path", None)
    if not tokens or not origin:
        return False
    try:
        before = own.from_pretrained(origin, local_files_only=True)
    except (OSError, ValueError):  # removed, or not on this machine
        return False
    return bool(getattr(before, "vocab_size", tokens) != tokens)
