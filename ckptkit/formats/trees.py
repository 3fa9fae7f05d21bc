"""Which state dict a tensor belongs to, told from the path of keys that led to it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Fqn, KeyPath, Part

# Dictionary keys under which training code keeps an optimizer, a model, and what is neither.
_OPTIMIZER = re.compile(r"optim(izer)?s?(_?\d+)?|optimizer_states?|optimizer_state_dict")
_MODEL = re.compile(r"(model|module|network|net|policy)s?(_?\d+)?|(model_)?state_dict")
_NEITHER = re.compile(
    r"extra.*|.*rng.*|random_states?|(lr_)?schedulers?|data_?loaders?|train_state|(grad_)?scaler"
    r"|sampler|meta(data)?|client_state|args|config"
)
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_DDP_PREFIX = "module."
_EMA_COUNT = "n_averaged"  # torch.optim.swa_utils.AveragedModel keeps it beside `module.`
_PARAMETER_ENDINGS = (".weight", ".bias", "_proj", ".running_mean")
EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Membership:
    """Where a tensor belongs: the state dict's name, its kind, and the tensor's own name."""

    tree: str
    part: Part
    name: Fqn


def classify(paths: Sequence[KeyPath], *, where: str) -> list[Membership]:
    """Sorts tensors into models, optimizers and the rest.

    A dictionary key that names an optimizer or a model says what is below it. Any other
    container is a model when its tensors are named like parameters, or when nothing else could
    be one. Wrapper segments are cut out of model names.

    Args:
        paths: One path per tensor; the last element is the tensor's name in its container.
        where: The checkpoint, for messages.

    Returns:
        One membership per path, in order.

    Raises:
        FormatError: If two tensors of one state dict end up with the same name.
    """
    split = [_split(path) for path in paths]
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


def _split(path: KeyPath) -> tuple[KeyPath, str, Part | None]:
    """Cuts a path into container and name; the part is None where the keys do not tell."""
    for depth, step in enumerate(path[:-1]):
        text = str(step)
        if _OPTIMIZER.fullmatch(text):
            return path[: depth + 1], _joined(path[depth + 1 :]), "optimizer"
        if _NEITHER.fullmatch(text):
            return path[: depth + 1], _joined(path[depth + 1 :]), "other"
        if _MODEL.fullmatch(text):
            cut = depth + 1
            while cut < len(path) - 1 and isinstance(path[cut], int):
                cut += 1
            return path[:cut], _joined(path[cut:]), "model"
    return path[:-1], str(path[-1]), None


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
    plain = {
        m.tree
        for m in cleaned
        if m.part == "model" and not m.name.startswith(_DDP_PREFIX) and m.name != _EMA_COUNT
    }
    return [
        m
        if m.part != "model" or m.tree in plain
        else Membership(m.tree, m.part, Fqn(m.name.removeprefix(_DDP_PREFIX)))
        for m in cleaned
    ]


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
