"""Which state dict a tensor belongs to, told from the path of keys that led to it.

Which framework wrote a checkpoint whose format is torch's own, told from what lies in it.

Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py (`dump_checkpoint`),
lightning/fabric/strategies/model_parallel.py (`_save_checkpoint`), lightning 2.6;
torchtitan/components/checkpoint.py (`CheckpointManager`), torchtitan 0.2.

What training frameworks put beside the weights of a file, and what stands for it.

Nothing here is imported or called: classes are names, and what they were made from is kept.

Source: lightning/fabric/utilities/data.py (`AttributeDict`), omegaconf 2.1 to 2.4, torch/optim,
functools.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.errors import FormatError, InputError, UnsafePickleError, UnsupportedError
from ckptkit.core.index import Fqn, KeyPath, Part, Problem
from ckptkit.formats.pickle.pickles import Builder, Global, InertObject, ordered_dict
from ckptkit.formats.pickle.torch_archives import ArchiveTable
from ckptkit.formats.pickle.torch_values import (
    ALLOWED,
    TensorRef,
    rebuild_tensor_v2,
    rebuild_tensor_v3,
)
from ckptkit.storage.base import Source

# Dictionary keys under which training code keeps an optimizer, a model, and what is neither.
_OPTIMIZER = re.compile(r"(\w+_)?optim(izer)?s?(_?\w+)?")
_STATE_DICT = r"(\w+_)?state_dict(_ema)?"
_MODEL = re.compile(
    r"(model|module|network|net|policy|generator|discriminator|encoder|decoder|transformer|unet"
    r"|backbone|student|teacher|actor|critic)s?(_?\d+)?|(net|gen|dis)_?[gd]"
    rf"|(model_|params_|weights_)?ema(_model|_params|_weights)?|(swa|avg)_model|{_STATE_DICT}",
    re.IGNORECASE,
)
_STATE_DICT_ONLY = re.compile(_STATE_DICT)
_NEITHER = re.compile(
    r"extra.*|.*rng.*|random_states?|\w*schedulers?(_\w+)?|\w*scaler(_\w+)?|data_?loaders?"
    r"|train_state|sampler|meta(data)?|client_state|args|config|callbacks|loops"
    r"|(datamodule_)?hyper_parameters|averaging_state"
)
_WRAPPERS = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module"}
)
_DDP_PREFIX = "module."
_MAX_DDP = 4  # DataParallel in DistributedDataParallel in AveragedModel, and one more
_EMA_COUNT = "n_averaged"  # torch.optim.swa_utils.AveragedModel keeps it beside `module.`
_PARAMETER_ENDINGS = (".weight", ".bias", "_proj", ".running_mean")
_GROUPS, _STATE = "param_groups", "state"  # what `Optimizer.state_dict` returns
EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Membership:
    """Where a tensor belongs: the state dict's name, its kind, and the tensor's own name."""

    tree: str
    part: Part
    name: Fqn


def classify(
    paths: Sequence[KeyPath], *, where: str, values: Iterable[KeyPath] = ()
) -> list[Membership]:
    """Sorts tensors into models, optimizers and the rest.

    A dictionary key that names an optimizer or a model says what is below it, and so do the
    `param_groups` that every optimizer has, whatever it is called. Any other
    container is a model when its tensors are named like parameters, or when nothing else could
    be one. Wrapper segments are cut out of model names.

    Args:
        paths: One path per tensor; the last element is the tensor's name in its container.
        where: The checkpoint, for messages.
        values: The paths of what is no tensor.

    Returns:
        One membership per path, in order.
    """
    optimizers = {place for path in (*paths, *values) if (place := _above_groups(path)) is not None}
    split = [_split(path, optimizers) for path in paths]
    names = defaultdict(list)
    for container, name, part in split:
        if part is None:
            names[container].append(name)
    likely = {c for c, held in names.items() if any(n.endswith(_PARAMETER_ENDINGS) for n in held)}
    certain = {c for c, _, part in split if part == "model"}
    models = certain | likely or set(names)
    found = [
        Membership(
            ".".join(map(str, container)),
            part or ("model" if container in models else "other"),
            Fqn(name),
        )
        for container, name, part in split
    ]
    return _checked(_without_wrappers(found), paths, where)


def _above_groups(path: KeyPath) -> KeyPath | None:
    """Returns the container in which a path leads through an optimizer's groups, or None."""
    for depth, step in enumerate(path):
        if isinstance(step, str) and (step == _GROUPS or step.startswith(f"{_GROUPS}.")):
            return path[:depth]
    return None


def _split(path: KeyPath, optimizers: AbstractSet[KeyPath]) -> tuple[KeyPath, str, Part | None]:
    """Cuts a path into container and name; the part is None where the keys do not tell."""
    if () in optimizers and str(path[0]).partition(".")[0] in {_GROUPS, _STATE}:
        return (), _joined(path), "optimizer"
    for depth, step in enumerate(path[:-1]):
        if path[: depth + 1] in optimizers:
            return path[: depth + 1], _joined(path[depth + 1 :]), "optimizer"
        part = _told_by(str(step))
        if part is not None:
            cut = depth + 1
            while part != "other" and cut < len(path) - 1 and _is_inner(path[cut], part):
                cut += 1
            return path[:cut], _joined(path[cut:]), part
    return path[:-1], str(path[-1]), None


def _told_by(step: str) -> Part | None:
    """Returns what a dictionary key says of what is below it, or None."""
    if _OPTIMIZER.fullmatch(step):
        return "optimizer"
    if _NEITHER.fullmatch(step):
        return "other"
    return "model" if _MODEL.fullmatch(step) else None


def _is_inner(step: str | int, part: Part) -> bool:
    """Tells whether a step leads further into a container: a list of them, or its state dict."""
    return isinstance(step, int) or (
        part == "model" and _STATE_DICT_ONLY.fullmatch(step) is not None
    )


def _joined(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _without_wrappers(found: Iterable[Membership]) -> list[Membership]:
    cleaned = []
    for one in found:
        segments = one.name.split(".")
        if one.part == "model":
            segments = [segment for segment in segments if segment not in _WRAPPERS]
        name = ".".join(segments)
        is_state = EXTRA_STATE in segments
        cleaned.append(Membership(one.tree, "other" if is_state else one.part, Fqn(name)))
    return _without_counts(_without_ddp(cleaned), cleaned)


def _without_ddp(found: list[Membership]) -> list[Membership]:
    """Cuts `module.` off, as often as all names of a model begin with it."""
    for _ in range(_MAX_DDP):
        plain = {m.tree for m in found if m.part == "model" and not _is_wrapped(m.name)}
        if not any(m.part == "model" and m.tree not in plain for m in found):
            break
        found = [
            m
            if m.part != "model" or m.tree in plain
            else Membership(m.tree, m.part, Fqn(m.name.removeprefix(_DDP_PREFIX)))
            for m in found
        ]
    return found


def _without_counts(found: list[Membership], before: list[Membership]) -> list[Membership]:
    """Takes AveragedModel's count of updates, which is no weight, out of models that it wrapped."""
    averaged = {
        m.tree
        for m, old in zip(found, before, strict=True)
        if m.name != old.name and m.part == "model"
    }
    return [
        replace(m, part="other") if m.name == _EMA_COUNT and m.tree in averaged else m
        for m in found
    ]


def _is_wrapped(name: str) -> bool:
    return name == _EMA_COUNT or (name.startswith(_DDP_PREFIX) and name != _DDP_PREFIX)


def _checked(found: list[Membership], paths: Sequence[KeyPath], where: str) -> list[Membership]:
    seen: dict[tuple[str, str], KeyPath] = {}
    for one, path in zip(found, paths, strict=True):
        before = seen.setdefault((one.tree, one.name), path)
        if before is not path and one.part == "model":
            raise FormatError(
                f"{_joined(before)!r} and {_joined(path)!r} are both named {one.name!r}",
                where=where,
                hint="names must stay distinct when wrapper segments are cut out",
            )
    return found


_OPTIMIZERS = {
    **{name.lower(): name for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax")},
    **{name.lower(): name for name in ("NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "LBFGS")},
    "_adafactor": "Adafactor",
    "sparse_adam": "SparseAdam",
}
_SCHEDULERS = (
    *("LRScheduler", "_LRScheduler", "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR"),
    *("ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR", "CyclicLR"),
    *("CosineAnnealingWarmRestarts", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR"),
)
_OMEGACONF = (
    *(("omegaconf.dictconfig", "DictConfig"), ("omegaconf.listconfig", "ListConfig")),
    *(("omegaconf.base", name) for name in ("ContainerMetadata", "Metadata")),
    *(
        ("omegaconf.nodes", f"{kind}Node")
        for kind in ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path")
    ),
)
_ATTRIBUTES = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "lightning.pytorch.utilities.parsing",
    "pytorch_lightning.utilities.parsing",
)
_TENSOR_CLASSES = (
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
)
_REBUILDERS = {"_rebuild_tensor_v2": rebuild_tensor_v2, "_rebuild_tensor_v3": rebuild_tensor_v3}
_OTHER_TENSORS = {
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_sparse_csr_tensor": "sparse",
    "_rebuild_qtensor": "quantized by torch",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_meta_tensor_no_storage": "on the device 'meta', without values",
    "_rebuild_device_tensor_from_numpy": "of another device, stored through numpy",
    "_rebuild_wrapper_subclass": "of a class that wraps others",
}


def _object(module: str, name: str) -> Builder:
    cls = Global(module, name)

    def build(*args: object) -> InertObject:
        return InertObject(cls, args)

    return build


def _with_attributes(*args: object) -> TensorRef:
    # How torch writes a tensor that was given attributes; they do not change its values.
    match args:
        case (Global("torch._utils", name), Global() as cls, tuple(inner), _) if (
            name in _REBUILDERS and (cls.module, cls.name) in _TENSOR_CLASSES
        ):
            return _REBUILDERS[name](*inner)
        case (_, Global() as cls, _, _):
            raise UnsupportedError(
                f"tensor is of the class '{cls}', which is not modelled",
                hint="save `tensor.data` or `tensor.dequantize()`, as plain tensors",
            )
    raise FormatError("tensor with attributes is rebuilt from something that does not describe one")


def _refused(kind: str) -> Builder:
    def build(*_args: object) -> TensorRef:
        raise UnsupportedError(
            f"tensor is {kind}, which is not modelled",
            hint="save it again as a plain tensor on the CPU",
        )

    return build


TRAINING_VALUES: Mapping[tuple[str, str], object] = {
    **ALLOWED,
    **{("torch._utils", name): _refused(kind) for name, kind in _OTHER_TENSORS.items()},
    **{name: Global(*name) for name in _TENSOR_CLASSES},
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
    **{name: _object(*name) for name in _OMEGACONF},
    **{(module, "AttributeDict"): ordered_dict for module in _ATTRIBUTES},
    ("typing", "Any"): Global("typing", "Any"),
    ("functools", "partial"): _object("functools", "partial"),
    **{
        (f"torch.optim.{module}", name): Global(f"torch.optim.{module}", name)
        for module, name in _OPTIMIZERS.items()
    },
    **{
        ("torch.optim.lr_scheduler", name): Global("torch.optim.lr_scheduler", name)
        for name in _SCHEDULERS
    },
}
"""`ALLOWED`, and the classes that the dictionaries of training frameworks hold besides."""

LIGHTNING_META = "meta.pt"
_LIGHTNING_VERSION = "pytorch-lightning_version"
_STEP_KEYS = ("global_step", "global_steps", "step", "iteration", "num_updates", "iter")
_TITAN = frozenset({"train_state", "lr_scheduler", "optimizer"})
_MAX_STEP = 10**15


@dataclass(frozen=True, slots=True)
class Framework:
    """What a checkpoint tells of the framework that wrote it.

    Attributes:
        name: Its name; empty where nothing tells.
        version: Its version; empty where nothing tells.
        step: The training step, or None.
        notes: What could not be read, and is not needed.
        problems: What is damaged, and not needed.
    """

    name: str = ""
    version: str = ""
    step: int | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def framework_of_values(root: object) -> Framework:
    """Tells who wrote a dictionary, from the keys that a training loop gave it."""
    if not isinstance(root, dict):
        return Framework()
    version = root.get(_LIGHTNING_VERSION)
    return Framework(
        name="Lightning Trainer" if version is not None else "",
        version=version if isinstance(version, str) else "",
        step=_step_in(root),
    )


def _step_in(root: Mapping[Any, Any]) -> int | None:
    found = (root.get(key) for key in _STEP_KEYS)
    return next((n for n in found if type(n) is int and 0 <= n <= _MAX_STEP), None)


def framework_of_meta(source: Source, path: str) -> Framework:
    """Tells what Lightning's `meta.pt`, beside shards, says; the weights do not need it."""
    try:
        file = ArchiveTable().open(source, path, TRAINING_VALUES)
    except (UnsafePickleError, UnsupportedError) as error:
        note = f"{posixpath.basename(path)} was left unread: {error.message}"
        return Framework("Lightning", notes=(note,))
    except InputError as error:
        return Framework("Lightning", problems=(Problem(error.code, path, error.message),))
    found = framework_of_values(file.root)
    return Framework(found.name or "Lightning Fabric", found.version, found.step)


def framework_of_keys(paths: Iterable[KeyPath]) -> Framework:
    heads = {path[0] for path in paths if path}
    return Framework("torchtitan") if heads >= _TITAN else Framework()
