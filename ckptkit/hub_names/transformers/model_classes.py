"""The model of a configuration, built without weights or remote code, and its parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from ckptkit.core.errors import CannotPlanError

_LONGEST = 300  # characters of what another library says
# Heads that people train, the likely ones first: for configurations that name no architecture.
_TASKS = (
    *("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM"),
    *("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING"),
    *("MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_CLASSIFICATION", "PRETRAINING"),
)


def build_model(config: Mapping[str, Any], live: Collection[str]) -> Any:
    """Builds a model on the meta device.

    `live`: names that training holds; they choose the class where the configuration does not.
    Returns the model of the class that the configuration names, unless its model type is that of
    others, which the auto classes would load.
    """
    parsed = _parse(_config_class(config), config)
    parsed._attn_implementation = "eager"  # noqa: SLF001  kernels of others need not be there
    classes: list[Any] = []
    for task in (*(f"MODEL_FOR_{task}_MAPPING" for task in _TASKS), "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, task, {})
        if type(parsed) in mapping:
            found = mapping[type(parsed)]
            classes += found if isinstance(found, tuple) else (found,)
    named = named_class(config)
    if named is not None and (
        not classes or named in classes or isinstance(parsed, named.config_class)
    ):
        return _build(named, parsed)
    models = (_build(model_class, parsed) for model_class in classes)
    return _find_closest(models, live, str(config.get("model_type")))


def unsaved_names(model: Any) -> frozenset[str]:
    return frozenset(model._keys_to_ignore_on_save or ())  # noqa: SLF001  as saving does


def list_kept(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns what a model keeps in float32: in 16 bits of any kind, and in float16 alone."""
    always = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    in_float16 = getattr(model, "_keep_in_fp32_modules", None) or ()
    return tuple(sorted(always)), tuple(sorted(in_float16))


def explain_foreign(config: Mapping[str, Any]) -> str:
    """Says that transformers itself has no model type; empty where it may have it."""
    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING_NAMES or named_class(config) is not None:
        return ""
    return _lacks(str(model_type))


def _lacks(model_type: str) -> str:
    return f"transformers {transformers.__version__} has no model type {model_type!r}"


def _config_class(config: Mapping[str, Any]) -> Any:
    model_type = str(config.get("model_type"))
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    # A part of a model may be saved on its own, and its type is not registered.
    own = getattr(named_class(config), "config_class", None)
    if own is None or own.model_type != model_type:
        raise CannotPlanError(_lacks(model_type))
    return own


def _parse(config_class: Any, config: Mapping[str, Any]) -> Any:
    try:
        return config_class.from_dict(dict(config))
    except Exception as error:  # each class checks its fields in its own way
        said = " ".join(str(error).split())
        raise CannotPlanError(
            f"transformers {transformers.__version__} refuses config.json: {said[:_LONGEST]}",
            hint="compare config.json with the one that save_pretrained writes for this model",
        ) from error


def _find_closest(models: Iterator[Any], live: Collection[str], model_type: str) -> Any:
    """Returns the first model that has all names, or else the one that has most of them."""
    best, known = None, -1
    for model in models:
        shared = len(set(live) & model.state_dict().keys())
        if shared > known:
            best, known = model, shared
        if shared == len(live) > 0:
            break
    if best is None:
        raise CannotPlanError(f"no class of transformers belongs to model type {model_type!r}")
    return best


def named_class(config: Mapping[str, Any]) -> Any:
    """Returns the class that a configuration names, if transformers has it."""
    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name).removeprefix("FSDP"), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    return None


def _build(model_class: Any, config: Any) -> Any:
    with torch.device("meta"), _DrawNothing():  # type: ignore[no-untyped-call]
        return model_class(config)


class _DrawNothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves the random numbers of training as they are.

    Some classes draw elements although their tensors are to have none, such as speech models with
    `torch.Tensor(size).uniform_()`, which is never on the meta device.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **options)
        given = getattr(args[0], "device", None) if args else None
        if given is None:  # it makes a tensor
            return func(*args, **{**options, "device": torch.device("meta")})
        if given.type == "meta":
            return func(*args, **options)
        if not func._schema.name.endswith("_"):  # noqa: SLF001  the elements are asked for
            raise CannotPlanError(f"the class draws random numbers by {func}")
        return args[0]


def list_parameters(config: Mapping[str, Any], live: list[str]) -> list[dict[str, Any]]:
    """Returns names and shape of every parameter, tied ones once with all their names.

    `live`: names in the checkpoint; they choose the class where `config` does not.
    """
    model = build_model(config, live)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    found: dict[int, dict[str, Any]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_contiguous():
            raise CannotPlanError(f"parameter {name!r} is not stored row by row")
        entry = found.setdefault(id(parameter), {"names": [], "shape": list(parameter.shape)})
        entry["names"].append(name)
    return list(found.values())
