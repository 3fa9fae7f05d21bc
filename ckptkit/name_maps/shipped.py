"""The maps that come with ckptkit, as texts; it imports nothing, so that help can list them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).with_name("families")
_SUFFIX = ".toml"


@cache
def list_map_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}")))


def describe_map_names() -> str:
    """Returns the names in short, such as `megatron-(llama, mixtral), torchtitan-(llama)`."""
    kinds: dict[str, list[str]] = {}
    for name in list_map_names():
        framework, _, family = name.partition("-")
        kinds.setdefault(framework, []).append(family)
    return ", ".join(f"{framework}-({', '.join(rest)})" for framework, rest in kinds.items())


def read_map_text(name: str) -> str:
    """Returns the TOML document of a map."""
    return (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
