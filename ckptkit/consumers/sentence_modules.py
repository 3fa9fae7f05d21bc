"""The modules of a sentence-transformers folder, and which tensors of training are theirs.

Source: sentence-transformers 6.2, `save_pretrained` of its models and modules. A model is a list
of the modules in `modules.json`. Training calls their tensors `<name>.<tensor>`, and those of the
encoder `<name>.model.<tensor>`, before version 6 `<name>.auto_model.<tensor>`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import RefusedError

_ENCODERS = ("auto_model", "model")
_ROUTERS = ("Router", "Asym")


@dataclass(frozen=True, slots=True)
class SentenceModule:
    """A module.

    Attributes:
        folder: Where its files are; empty for the root.
        prefix: What the names of its tensors begin with in training.
        is_encoder: Whether it is the model of Transformers, whose files are written at the root.
    """

    folder: str
    prefix: str
    is_encoder: bool


def find_modules(listed: Any, names: Collection[str], where: str) -> Sequence[SentenceModule]:
    """Returns the modules that the tensors of a checkpoint belong to; none for an encoder alone.

    Args:
        listed: The content of `modules.json`.
        names: Of the tensors, as training holds them.
        where: The source, for messages.

    Raises:
        RefusedError: If they are of several encoders, which would be several model folders.
    """
    found = []
    for name, folder, kind in _read_rows(listed):
        own = [one for one in names if one.startswith(f"{name}.")]
        if own and kind.endswith(_ROUTERS):
            raise RefusedError(
                f"{len(own):,} tensors are those of several encoders behind a router of"
                " sentence-transformers, which stand in a folder each",
                where=where,
                hint="write one of them with --include and --strip-prefix, such as"
                f" --include '{_stem_of_route(own[0])}*' --strip-prefix {_stem_of_route(own[0])}",
            )
        inner = next((e for e in _ENCODERS if any(n.startswith(f"{name}.{e}.") for n in own)), "")
        if own:
            prefix = f"{name}.{inner}." if inner else f"{name}."
            found.append(SentenceModule(folder, prefix, bool(inner)))
    return found if any(module.is_encoder for module in found) else ()


def has_router(listed: Any) -> bool:
    """Returns whether several encoders stand behind a router."""
    return any(kind.endswith(_ROUTERS) for _, _, kind in _read_rows(listed))


def _read_rows(listed: Any) -> list[tuple[str, str, str]]:
    """Returns the name, the folder and the class of each module."""
    rows = [row for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else []
    found = ([row.get(key) for key in ("name", "path", "type")] for row in rows)
    return [(str(name or ""), str(path or ""), str(kind or "")) for name, path, kind in found]


def _stem_of_route(name: str) -> str:
    """Returns what the names of one encoder begin with: `0.sub_modules.query.0.model.`."""
    segments = name.split(".")
    end = next((i for i, s in enumerate(segments) if s in _ENCODERS), len(segments) - 1)
    return ".".join(segments[: end + 1]) + "."


def find_encoder_folder(listed: Any) -> str:
    """Returns the folder of the first module, which has the configuration of the encoder."""
    first = listed[0] if isinstance(listed, list) and listed else None
    return str(first.get("path", "")) if isinstance(first, Mapping) else ""


def move_encoder(listed: Any, folder: str) -> list[Any]:
    """Returns `modules.json` with the encoder at the root, where its files are written."""
    return [
        {**row, "path": ""} if isinstance(row, Mapping) and row.get("path") == folder else row
        for row in listed
    ]
