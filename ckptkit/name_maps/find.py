"""Finds the map for a checkpoint: a file, one that comes with ckptkit by its name, or by itself."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.name_maps.language import NameMap, parse_map, read_document
from ckptkit.name_maps.shipped import describe_map_names, list_map_names, read_map_text

_SUFFIX = ".toml"


@cache
def load_own_map(name: str) -> NameMap:
    """Returns a map that comes with ckptkit."""
    return _parse(read_map_text(name), f"map {name}")


def load_map(choice: str) -> NameMap:
    """Returns the map of a name, or of a file."""
    if choice in list_map_names():
        return load_own_map(choice)
    path = Path(choice)
    if path.suffix != _SUFFIX and not path.is_file():
        nearest = get_close_matches(choice, list_map_names(), n=1, cutoff=0.0)
        raise UsageError(
            f"{choice!r} is neither a file nor a map; maps are {describe_map_names()}",
            where="--map",
            hint=f"pass --map {nearest[0]}, or the path of a .toml file",
        )
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"could not be read: {error}", where=f"--map {choice}", hint="see if the path is right"
        ) from error


def _parse(text: str, where: str) -> NameMap:
    parent = read_document(text, where=where).get("extends")
    if parent is None:
        return parse_map(text, where=where)
    if not isinstance(parent, str) or parent not in list_map_names():
        raise UsageError(
            f"extends {parent!r}, which is no map; maps are {describe_map_names()}",
            where=where,
        )
    return parse_map(text, where=where, parent=load_own_map(parent))


def find_map(
    framework: str,
    config: Mapping[str, Any] | None,
    *,
    where: str,
    settings: Mapping[str, int] | None = None,
) -> NameMap:
    """Finds the map between a framework's names and those of Transformers.

    `config`: the configuration of the model, or None. `settings`: what the checkpoint says of its
    model.
    """
    settings = settings or {}
    if config is None:
        raise RefusedError(
            f"names of {framework} are converted by the sizes of the model, and no configuration"
            " has them",
            where=where,
            hint="pass the folder of the model with --base, or keep the names with --map none",
        )
    kind = config.get("model_type")
    # Parsing all maps takes longer than the rest of a plan, so others are not parsed.
    likely = [load_own_map(name) for name in list_map_names() if str(kind) in read_map_text(name)]
    of_model = [one for one in likely if one.source == framework and kind in one.model_types]
    left = [one for one in of_model if not find_contradiction(one, settings)]
    if len(left) == 1:
        return left[0]
    if left:
        keys = sorted({key for one in left for key in one.when})
        raise RefusedError(
            f"the checkpoint does not say {', '.join(keys)}, by which the maps"
            f" {' and '.join(one.name for one in left)} differ",
            where=where,
            hint=f"pass --map {left[0].name}, or the other one",
        )
    if of_model:
        refuse_contradiction(of_model[0], settings, where=where)
    own = [load_own_map(name) for name in list_map_names()]
    known = sorted({kind for one in own if one.source == framework for kind in one.model_types})
    raise RefusedError(
        f"no map has names of {framework} for the model type {kind!r}; there are maps for"
        f" {', '.join(known)}",
        where=where,
        hint="write a map (see docs/reference/name-maps.md) and pass it with --map FILE, or keep"
        " the names with --map none",
    )


def find_contradiction(name_map: NameMap, settings: Mapping[str, int]) -> str:
    """Returns the key of `when` for which the checkpoint says something else; usually empty."""
    wrong = (key for key, value in name_map.when.items() if settings.get(key, value) != value)
    return next(wrong, "")


def refuse_contradiction(name_map: NameMap, settings: Mapping[str, int], *, where: str) -> None:
    """Refuses a map for models that are laid out otherwise than the checkpoint says."""
    key = find_contradiction(name_map, settings)
    if key:
        raise RefusedError(
            f"map {name_map.name!r} is for {key} = {name_map.when[key]}, and the checkpoint says"
            f" {settings[key]}",
            where=where,
            hint="name another map with --map, or let --map auto choose it",
        )
