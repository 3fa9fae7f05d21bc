"""Which modules a configuration names, by the rules of PEFT.

Source: peft 0.21, `tuners/tuners_utils.py`: `check_target_module_exists` and
`_inject_parameters`; `utils/other.py`: `_set_trainable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ckptkit.adapters.config import ALL_LINEAR, LoraSettings


def is_target(settings: LoraSettings, module: str) -> bool:
    """Tells whether `target_modules` names a module of the base."""
    if _fits(settings.exclude_modules or (), module) or _is_set_apart(settings, module):
        return False
    targets = settings.target_modules
    if targets is None:
        return False
    if isinstance(targets, str):
        return targets.lower() == ALL_LINEAR or re.fullmatch(targets, module) is not None
    if module in _set_of(targets):
        return True
    return _fits(targets, module) and _in_layers(settings, module)


def _is_set_apart(settings: LoraSettings, module: str) -> bool:
    """Tells whether `modules_to_save` names a module, or one that it is a part of."""
    return any(
        re.match(rf"(^|.*\.){name}($|\..*)", module) is not None
        for name in settings.modules_to_save
    )


def is_saved(modules_to_save: Iterable[str], module: str) -> bool:
    """Tells whether a module, or one that it is a part of, was trained as it is.

    The ends of paths decide, wherever a segment begins: `norm` means `input_layernorm` too.
    """
    parts = module.split(".")
    paths = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
    return any(path.endswith(name) for name in modules_to_save for path in paths)


def fits_target(target: str, module: str) -> bool:
    """Tells whether one name of a list means a module: it is its path, or the end of it."""
    return module == target or module.endswith(f".{target}")


def target_parameters(settings: LoraSettings, module: str, held: Iterable[str] = ()) -> list[str]:
    """Returns the parameters of a module that `target_parameters` names.

    Args:
        settings: The configuration.
        module: The path of the module in the base.
        held: The parameters that it has, where that is known: a name without the module's
            means every parameter so called.
    """
    known = tuple(held)
    found = []
    for target in sorted(set(settings.target_parameters)):
        owner, _, parameter = target.rpartition(".")
        if (not owner or fits_target(owner, module)) and (not known or parameter in known):
            found.append(parameter)
    return found


def _fits(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    parts = module.split(".")
    known = _set_of(names)
    return any(".".join(parts[start:]) in known for start in range(len(parts)))


@lru_cache(16)
def _set_of(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


def _in_layers(settings: LoraSettings, module: str) -> bool:
    """Tells whether a module lies in one of the layers that are to be transformed."""
    layers = settings.layers_to_transform
    if layers is None:
        return True
    patterns = settings.layers_pattern
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return match is not None and int(match[1]) in layers
    matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns)
    found = next((match for match in matches if match is not None), None)
    return found is not None and int(found[1]) in layers
