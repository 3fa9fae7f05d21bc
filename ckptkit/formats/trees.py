"""Which state dict a tensor belongs to, told from the path of keys that led to it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Fqn, KeyPath, Part

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

    Raises:
        FormatError: If two tensors of one state dict end up with the same name.
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
