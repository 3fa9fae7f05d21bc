"""What the installed transformers would report of loading tensors that have names and shapes alone.

Its own loading runs, on tensors of the meta device: renaming, conversions, prefixes of base models,
ties and the keys that a class ignores are those of the library.

Source: transformers 5.23, `PreTrainedModel.from_pretrained`, and
`convert_and_load_state_dict_in_model` in `core_model_loading.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from msgspec import Struct
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import LoadStateDictConfig

from ckptkit.core.index import Fqn, Shape
from ckptkit.hub_names.known_models import find_doubled_prefix
from ckptkit.hub_names.transformers.answers import torch_dtype
from ckptkit.hub_names.transformers.model_classes import build_model, named_class, unsaved_names
from ckptkit.plan.load_report import LoadReport, LoadRequest, Mismatch
from ckptkit.plan.weight_kinds import find_dense_name

_META = {"": "meta"}
_MOST_CLASSES = 12  # that are tried for one that takes all names
_MOST_TENSORS = 20_000  # in a model; a larger one is not built in further classes
_MOST_PREFIXES = 3  # segments that a wrapper puts before the names

Tensors = Mapping[str, torch.Tensor]


class _Found(Struct, frozen=True):
    """What loading reports, by the model's own names."""

    missing: frozenset[str]  # names that the model has and no tensor is for
    # Names of tensors, as they were given, that the model has nothing for.
    unexpected: frozenset[str]
    mismatched: Mapping[str, tuple[str, str]]  # what was found, and what the model has, by name
    targets: Mapping[str, str]  # what each given name is for, and whether the model has it

    @property
    def is_clean(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def without(self, other: _Found) -> _Found:
        """Leaves out what is reported of the library's own files too."""
        return _Found(
            self.missing - other.missing,
            frozenset(n for n in self.unexpected if self.targets[n] not in other.strange),
            {n: v for n, v in self.mismatched.items() if n not in other.mismatched},
            self.targets,
        )

    @property
    def strange(self) -> frozenset[str]:
        return frozenset(self.targets[name] for name in self.unexpected)


def report_loading(request: LoadRequest) -> LoadReport:
    """Reports what loading tensors of these names and shapes would miss, or not use.

    `request`: the configuration, and the tensors.
    """
    model = build_model(request.config, list(request.tensors))
    found = _load(model, request)
    if not found.is_clean:
        found = found.without(_own_report(request, type(model)))
    fitted = [name for name in request.written if name not in found.unexpected]
    prefix, fitting = _extra_prefix(model, fitted), ""
    if not (found.is_clean or prefix):
        prefix = _prefix_to_strip(found, request, type(model))
        inside = [n.removeprefix(prefix) for n in request.written if n.startswith(prefix)]
        prefix += _extra_prefix(model, inside) if prefix else ""
        fitting = "" if prefix else _fitting_class(request, type(model))
    if fitting and named_class(request.config) is None:  # no class is named
        model = _built(getattr(transformers, fitting), request)
        found = _load(model, request)
    return LoadReport(
        model=f"{type(model).__name__} of transformers {transformers.__version__}",
        given=len(request.tensors) - len(request.left_out),
        missing=tuple(sorted(found.missing)),
        unexpected=tuple(sorted(found.unexpected)),
        mismatched=tuple(Mismatch(n, *found.mismatched[n]) for n in sorted(found.mismatched)),
        prefix=prefix,
        fitting=fitting,
    )


def _load(model: Any, request: LoadRequest) -> _Found:
    conversions = get_model_conversion_mapping(model)
    targets = _targets(model, request.tensors, conversions)
    if request.is_packed:
        dense = _targets(model, map(find_dense_name, targets), conversions)
        own = model.state_dict()
        targets = {n: t if t in own else dense[find_dense_name(n)] for n, t in targets.items()}
        found = _by_name(model, targets)
    else:
        tensors = {
            name: torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
            for name, (dtype, shape) in request.tensors.items()
        }
        found = _by_loading(model, tensors, conversions, targets)
    left_out = {targets[name] for name in request.left_out if name in targets}
    return _Found(
        found.missing,
        frozenset(found.unexpected - request.left_out),
        {name: value for name, value in found.mismatched.items() if name not in left_out},
        targets,
    )


def _by_loading(
    model: Any, tensors: Tensors, conversions: list[Any], targets: Mapping[str, str]
) -> _Found:
    """Has transformers load tensors without elements."""
    config = LoadStateDictConfig(
        device_map=_META, ignore_mismatched_sizes=True, weight_mapping=conversions
    )
    given: dict[str, Any] = {"model": model, "state_dict": dict(tensors), "load_config": config}
    if "tp_plan" in inspect.signature(convert_and_load_state_dict_in_model).parameters:
        given["tp_plan"] = None  # transformers 5.0 asks for it
    info, _ = convert_and_load_state_dict_in_model(**given)
    _settle(model, info)
    mismatched = {
        name: (str(list(found)), str(list(expected)))
        for name, found, expected in info.mismatched_keys
    }
    for name, said in info.conversion_errors.items():
        last = said.strip().splitlines()[-1] if said.strip() else "no conversion"
        mismatched[name] = (last, "")
    unexpected = {name for name, target in targets.items() if target in info.unexpected_keys}
    missing = frozenset(info.missing_keys - mismatched.keys())
    return _Found(missing - unsaved_names(model), frozenset(unexpected), mismatched, targets)


def _by_name(model: Any, targets: Mapping[str, str]) -> _Found:
    """Compares names alone: the shapes of packed weights are their method's own."""
    own = model.state_dict()
    info = _info(set(own) - set(targets.values()))
    unexpected = {name for name, target in targets.items() if target not in own}
    info.unexpected_keys = {targets[name] for name in unexpected}
    _settle(model, info)
    rest = {name for name in unexpected if targets[name] in info.unexpected_keys}
    return _Found(frozenset(info.missing_keys) - unsaved_names(model), frozenset(rest), {}, targets)


def _info(missing: set[str]) -> SimpleNamespace:
    """Returns what transformers adjusts of a report."""
    return SimpleNamespace(missing_keys=missing, unexpected_keys=set())


def _settle(model: Any, info: Any) -> None:
    """Takes out of a report what transformers ties, ignores or makes itself."""
    tied = model.all_tied_weights_keys
    groups: dict[str, set[str]] = {}
    for target, source in tied.items():
        groups.setdefault(source, {source}).add(target)
    for group in groups.values():  # tying is symmetric: any one of them will do
        if not group <= info.missing_keys:
            info.missing_keys -= group
    model._adjust_missing_and_unexpected_keys(info)  # noqa: SLF001  as loading does


def _targets(model: Any, names: Iterable[str], conversions: list[Any]) -> dict[str, str]:
    """Returns what each name is for in the model, as loading finds it."""
    return {name: target for name, (target, _) in _find_targets(model, names, conversions).items()}


def _find_targets(
    model: Any, names: Iterable[str], conversions: list[Any]
) -> dict[str, tuple[str, bool]]:
    """Returns what each name is for in the model, and whether it is converted on the way."""
    own = model.state_dict()
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    found = {}
    for name in names:
        target, converter = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, converter = rename_source_key(name, [], [], prefix, own)
        found[name] = target, converter is not None
    return found


def _own_report(request: LoadRequest, model_class: Any) -> _Found:
    """Reports what loading a class's own files would, which is no fault of the tensors.

    A class whose own files cannot be made up without elements has nothing to leave out.
    """
    files = _own_files(_built(model_class, request))
    fresh = _built(model_class, request)
    conversions = get_model_conversion_mapping(fresh)
    return _by_loading(fresh, files, conversions, _targets(fresh, files, conversions))


def _own_files(model: Any) -> Tensors:
    """Returns the tensors that the model's own files would have, without elements."""
    tied = model.all_tied_weights_keys
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in tied and name not in unsaved_names(model)
    }
    try:
        files: Tensors = revert_weight_conversion(model, own)
    except Exception:  # noqa: BLE001  conversions may fail in any way without elements
        return own
    return files


def _built(model_class: Any, request: LoadRequest) -> Any:
    named = {**request.config, "architectures": [model_class.__name__]}
    return build_model(named, ())


def loads_as_built(
    config: Mapping[str, Any],
    live: Mapping[Fqn, Shape],
    disk: Mapping[str, Collection[Fqn]],
    *,
    is_converted: bool,
) -> bool:
    """Returns whether tensors are, for certain, all those of the class that a configuration names.

    For a process that trains: it builds the class without weights, once, and loads nothing. Element
    types are left out, since torch's default would change for all threads.

    `config`: the configuration as it is written. `live`: the shapes that training holds, by name,
    with tied ones under each name. `disk`: the names on disk, each with the live tensors that it is
    made of. `is_converted`: whether those are what `save_pretrained` makes of the live ones; else
    they are live names.
    """
    if _reaches_beyond(config):
        return False
    model = build_model(_without_types(config), list(live))
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if not live.items() <= own.items():
        return False
    targets = _find_targets(model, disk, get_model_conversion_mapping(model))
    for name, (target, passes_converter) in targets.items():
        if target not in disk[name] or (passes_converter and not is_converted):
            return False
    written = {source for sources in disk.values() for source in sources}
    info = _info(own.keys() - written)
    _settle(model, info)
    return not info.missing_keys - unsaved_names(model)


def _without_types(value: Any) -> Any:
    """Returns a configuration without element types, also those of its parts."""
    if isinstance(value, list):
        return [_without_types(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    kept = (key for key in value if key not in {"dtype", "torch_dtype"})
    return {key: _without_types(value[key]) for key in kept}


def _reaches_beyond(config: Mapping[str, Any]) -> bool:
    """Returns whether building a class may communicate, or look up weights of its backbone.

    Source: transformers 5.23, `PreTrainedModel._from_config` under ZeRO-3, and `load_backbone`.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    has_backbone = any(
        part.get("backbone") or part.get("use_pretrained_backbone") for part in parts
    )
    return has_backbone or is_deepspeed_zero3_enabled()


# --- what the user may have meant ---


def _prefix_to_strip(found: _Found, request: LoadRequest, model_class: Any) -> str:
    """Returns the prefix without which more names fit; empty where there is none."""
    model = _built(model_class, request)
    own, best = model.state_dict(), ""
    conversions = get_model_conversion_mapping(model)
    fewest = len(found.unexpected)
    seen: dict[str, None] = {}  # what names may begin with that a wrapper put there
    for name in sorted(found.unexpected)[:_MOST_TENSORS]:
        segments = name.split(".")
        for count in range(1, min(_MOST_PREFIXES, len(segments) - 1) + 1):
            prefix = ".".join(segments[:count]) + "."
            if not re.search(r"\.\d+\.$", prefix):
                seen.setdefault(prefix)
    for prefix in sorted(seen, key=lambda prefix: prefix.count("."))[:_MOST_CLASSES]:
        stripped = [name.removeprefix(prefix) for name in request.written]
        targets = _targets(model, stripped, conversions)
        strange = sum(find_dense_name(t) not in own and t not in own for t in targets.values())
        if strange < fewest:
            fewest, best = strange, prefix
    return best


def _extra_prefix(model: Any, names: Collection[str]) -> str:
    """Returns what all names begin with twice, where those of the model begin with it once."""
    prefix = find_doubled_prefix(names)
    own = {*model.state_dict(), *_own_files(model)} if prefix else set()
    is_extra = prefix and all(name.removeprefix(prefix) in own for name in names)
    return prefix if is_extra and own.isdisjoint(names) else ""


def _fitting_class(request: LoadRequest, model_class: Any) -> str:
    """Returns another class of the configuration that takes all names as they are, if any."""
    if len(request.tensors) > _MOST_TENSORS:
        return ""
    for name in islice(_classes_beside(model_class), _MOST_CLASSES):
        try:
            if _load(_built(getattr(transformers, name), request), request).is_clean:
                return name
        except Exception:  # noqa: BLE001, S112  a class that needs more of its configuration
            continue
    return ""


def _classes_beside(model_class: Any) -> Iterator[str]:
    """Yields the names of the other models of a configuration."""
    module = inspect.getmodule(model_class)
    for name in sorted(dir(module)):
        other: Any = getattr(module, name)
        if (
            isinstance(other, type)
            and issubclass(other, PreTrainedModel)
            and other is not model_class
            and getattr(other, "config_class", None) is model_class.config_class
            and getattr(transformers, name, None) is other
        ):
            yield name
