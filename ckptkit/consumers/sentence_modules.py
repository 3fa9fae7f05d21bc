"""The modules of a sentence-transformers folder, and which tensors of training are theirs.

Source: sentence-transformers 6.2, `save_pretrained` of its models and modules. A model is a list
of the modules in `modules.json`. Training calls their tensors `<name>.<tensor>`, and those of an
encoder of Transformers `<name>.model.<tensor>`, before version 6 `<name>.auto_model.<tensor>`. The
first module may also be one without a configuration, such as a `StaticEmbedding`.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import MOST_WRAPPERS, Fqn, Key, TensorEntry
from ckptkit.options import matches

ROUTER_CONFIG = "router_config.json"
_ENCODERS = ("auto_model", "model")
_ROUTERS = ("Router", "Asym")
_OF_TRANSFORMERS = ("Transformer", "CLIPModel")
_WEIGHTS = (".safetensors", ".bin")


class SentenceModule(Struct, frozen=True):
    folder: str  # empty for the root
    prefix: str  # what the names of its tensors begin with in training
    is_model: bool  # whether its tensors are the model that is written at the root


def _find_modules(
    listed: Any, names: Collection[str], where: str, *, base: str = "", router: Any = None
) -> Sequence[SentenceModule]:
    """Returns the modules that the tensors of a checkpoint belong to; none for an encoder alone."""
    found = []
    for position, (name, folder, kind) in enumerate(_read_rows(listed)):
        own = [one for one in names if one.startswith(f"{name}.")]
        if own and kind.endswith(_ROUTERS):
            segments = own[0].split(".")  # such as `0.sub_modules.query.0.model.`
            last = len(segments) - 1
            end = next((i for i, part in enumerate(segments) if part in _ENCODERS), last)
            prefix = "".join(f"{part}." for part in segments[: end + 1])
            options = ["--include", f"{prefix}*", "--strip-prefix", prefix]
            inside = _folder_of_route(router, own[0])
            if base and inside:
                options = ["--base", posixpath.join(base, folder, inside), *options]
            raise RefusedError(
                f"{len(own):,} tensors are those of several encoders behind a router of"
                " sentence-transformers, which stand in a folder each",
                where=where,
                hint="write each of them with the options that choose it, such as"
                f" {shlex.join(options)}",
            )
        inner = next((e for e in _ENCODERS if any(n.startswith(f"{name}.{e}.") for n in own)), "")
        if own:
            prefix = f"{name}.{inner}." if inner else f"{name}."
            is_first = position == 0 and not kind.endswith(_OF_TRANSFORMERS)
            found.append(SentenceModule(folder, prefix, bool(inner) or is_first))
    return found if any(module.is_model for module in found) else ()


def split_modules(
    listed: Any,
    entries: Sequence[TensorEntry],
    *,
    where: str,
    base: str,
    router: Any,
    stripped: Sequence[str],
    exclude: tuple[str, ...],
) -> tuple[dict[Key, TensorEntry], dict[str, list[TensorEntry]], str]:
    """Takes the tensors of modules beside an encoder out of a model.

    Returns the tensors under the names that are written, those of other modules by their folders,
    and the prefix without which the names of the encoder are written; nothing of an encoder alone.
    """
    tensors: dict[Key, TensorEntry] = {}
    taken: dict[str, list[TensorEntry]] = {}
    wrapper = _find_wrapper(listed, [str(entry.name) for entry in entries], stripped)
    if wrapper is None:
        return tensors, taken, ""
    names = {entry.key: entry.name.removeprefix(wrapper) for entry in entries}
    found = _find_modules(listed, list(names.values()), where, base=base, router=router)
    for entry in entries if found else ():
        name = names[entry.key]
        module = next((m for m in found if name.startswith(m.prefix)), None)
        # Patterns may be of the names before.
        stored = (*entry.stored_names, entry.name)
        is_left = any(matches(one, exclude) for one in (name, *stored))
        if module is not None and (module.is_model or not is_left):
            name = name.removeprefix(module.prefix)
        renamed = replace(entry, name=Fqn(name), stored_names=stored)
        if module is not None and not (module.is_model or is_left):
            taken.setdefault(module.folder, []).append(renamed)
            renamed = replace(renamed, part="other")
        tensors[entry.key] = renamed
    encoder = next((module.prefix for module in found if module.is_model), "")
    return tensors, taken, f"{wrapper}{encoder}"


def _find_wrapper(listed: Any, names: Collection[str], stripped: Sequence[str]) -> str | None:
    """Returns what the names of all modules begin with; None where none is known.

    Of the prefixes that a user takes off, one that has that of the first module in it stands for
    what is before: the tensors of the other modules are there too.
    """
    if has_router(listed):  # whose encoders are written one by one
        return None if stripped else ""
    first = next((name for name, _, _ in _read_rows(listed)), "")
    inner = [*(f"{first}.{encoder}." for encoder in _ENCODERS), f"{first}."]
    begins = {""}
    if stripped:
        ends = ((p, next((i for i in inner if f".{p}".endswith(f".{i}")), "")) for p in stripped)
        begins = {prefix.removesuffix(end) for prefix, end in ends}
    elif not _find_modules(listed, names, ""):
        parts = (name.split(".") for name in names)
        begins = {
            ".".join([*own[:count], ""])
            for own in parts
            for count in range(1, MOST_WRAPPERS + 1)
            if own[count : count + 1] == [first]
        }
    fitting = [
        begin
        for begin in begins
        if _find_modules(listed, [n.removeprefix(begin) for n in names if n.startswith(begin)], "")
    ]
    return fitting[0] if len(fitting) == 1 else None


def find_lacking_modules(listed: Any, taken: Collection[str], files: Collection[str]) -> list[str]:
    """Returns the folders of modules whose weights are files, and not tensors that were taken."""
    weights = {posixpath.dirname(path) for path in files if path.endswith(_WEIGHTS)}
    folders = (folder for _, folder, _ in _read_rows(listed))
    return [folder for folder in folders if folder and folder in weights and folder not in taken]


def has_router(listed: Any) -> bool:
    return any(kind.endswith(_ROUTERS) for _, _, kind in _read_rows(listed))


def has_config(listed: Any) -> bool:
    """Returns whether one of the modules is a model of Transformers, which has a configuration."""
    kinds = (*_OF_TRANSFORMERS, *_ROUTERS)
    return any(kind.endswith(kinds) for _, _, kind in _read_rows(listed))


def _read_rows(listed: Any) -> list[tuple[str, str, str]]:
    """Returns the name, the folder and the class of each module."""
    rows = [row for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else []
    found = ([row.get(key) for key in ("name", "path", "type")] for row in rows)
    return [(str(name or ""), str(path or ""), str(kind or "")) for name, path, kind in found]


def _folder_of_route(router: Any, name: str) -> str:
    """Returns the folder of the module behind a router that has a tensor; empty if unknown."""
    _, _, route, number, *_ = [*name.split("."), *[""] * 4]
    structure = router.get("structure") if isinstance(router, Mapping) else None
    folders = structure.get(route) if isinstance(structure, Mapping) else None
    is_known = isinstance(folders, list) and number.isdecimal() and int(number) < len(folders)
    return str(folders[int(number)]) if isinstance(folders, list) and is_known else ""


def find_first_folder(listed: Any) -> str:
    """Returns the folder of the first module, whose files are written at the root."""
    first = listed[0] if isinstance(listed, list) and listed else None
    return str(first.get("path", "")) if isinstance(first, Mapping) else ""


def move_first(listed: Any, folder: str) -> list[Any]:
    """Returns `modules.json` with the first module at the root, where its files are written."""
    return [
        {**row, "path": ""} if isinstance(row, Mapping) and row.get("path") == folder else row
        for row in listed
    ]
