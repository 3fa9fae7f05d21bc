"""The groups of an optimizer whose settings torch wrote down parameter by parameter.

Source: torch/distributed/checkpoint/state_dict.py (`_flatten_optim_state_dict`): the settings of
a group stand under `param_groups.<parameter>.<setting>`, once for each of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.core.index import KeyPath

_GROUPS, _MEMBERS = "param_groups", "params"
Settings = dict[KeyPath, Any]


def with_groups(values: Mapping[KeyPath, Any], wants: Callable[[str], bool]) -> dict[KeyPath, Any]:
    """Puts parameters whose settings are the same into one group, as they were.

    Args:
        values: Plain values of an optimizer's state dict, by path.
        wants: Tells which parameters are wanted.

    Returns:
        The values; those of flattened groups under `param_groups`, number and setting, with the
        names of the members under `params`.
    """
    kept: dict[KeyPath, Any] = {}
    settings: dict[str, Settings] = {}
    for path, value in values.items():
        name, kind = _parts(path[0])
        if not name:
            kept[path] = value
        elif wants(name):
            settings.setdefault(name, {})[kind, *path[1:]] = value
    groups: dict[str, tuple[Settings, list[str]]] = {}
    for name, found in settings.items():
        groups.setdefault(repr(sorted(found.items(), key=repr)), (found, []))[1].append(name)
    for number, (found, members) in enumerate(groups.values()):
        kept |= {(_GROUPS, number, *path): value for path, value in found.items()}
        kept[_GROUPS, number, _MEMBERS] = members
    return kept


def _parts(key: str | int) -> tuple[str, str]:
    """Returns the parameter and the setting that a flattened key names, or two empty texts."""
    start = f"{_GROUPS}."
    if not isinstance(key, str) or not key.startswith(start):
        return "", ""
    name, _, kind = key.removeprefix(start).rpartition(".")
    return name, kind
