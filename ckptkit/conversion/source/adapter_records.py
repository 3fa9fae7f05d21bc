"""Finds and reads the configurations of adapters."""

from __future__ import annotations

import posixpath
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.conversion.source.places import check_path, is_folder
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.core.errors import InputError, MissingFileError
from ckptkit.core.manifest import SIDE_FOLDER
from ckptkit.core.model_configs import parse_json_object
from ckptkit.lora.dialects import DEFAULT
from ckptkit.plan.side_files import MAX_JSON_BYTES
from ckptkit.storage.base import Source, is_there
from ckptkit.storage.places import PathLike, open_source, place_of

ADAPTER_CONFIG = "adapter_config.json"
_NAMED = "adapters"  # where the training hooks keep those of adapters that have a name
_OPTION = "--adapter-config"


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """The configuration of an adapter.

    Attributes:
        document: Its content.
        path: Its path.
        is_own: Whether the run wrote it into the step itself, with the weights.
    """

    document: Mapping[str, Any]
    path: str
    is_own: bool = False


class AdapterRecords:
    """The configurations of adapters in the side folders of a checkpoint."""

    def __init__(self, folders: SideFolders) -> None:
        self._folders = folders

    def find(
        self, adapter: str, *, is_only_one: bool, others: Container[str] = ()
    ) -> AdapterRecord | None:
        """Returns the configuration of one adapter; None where there is none.

        Args:
            adapter: Its name.
            is_only_one: Whether a configuration without a name belongs to it.
            others: The names of folders that belong to other adapters.
        """
        unnamed = [ADAPTER_CONFIG] if is_only_one or adapter == DEFAULT else []
        named = [f"{_NAMED}/{adapter}/{ADAPTER_CONFIG}", f"{adapter}/{ADAPTER_CONFIG}"]
        for location, source in self._folders.sources.items():
            own = [ADAPTER_CONFIG] if Path(location).name == adapter else []
            own += [] if Path(location).name in others else unnamed
            for path in dict.fromkeys([*named, *own]):
                document = _read(source, path)
                if document is not None:
                    is_own = Path(location).name == SIDE_FOLDER
                    return AdapterRecord(document, posixpath.join(location, path), is_own)
        return None

    def names(self) -> list[str]:
        """Returns the names of the adapters that the run recorded, the default one first."""
        names: dict[str, None] = {}
        for location, source in self._folders.sources.items():
            if Path(location).name == SIDE_FOLDER:
                names |= dict.fromkeys(_list_recorded(source))
        return sorted(names, key=lambda name: (name != DEFAULT, name))


def read_record(path: PathLike) -> AdapterRecord:
    """Returns the configuration that the user named: a file, or the folder that holds it."""
    check_path(path, _OPTION)
    place = place_of(path)
    name = ADAPTER_CONFIG
    if not is_folder(place):
        folder, name = posixpath.split(place)
        place = place.beside(folder or ".")
    text, document = f"{_OPTION} {path}", None
    if is_folder(place):
        with open_source(place) as source:
            if not is_there(source, name):
                raise MissingFileError(
                    "no such file", where=text, hint="name the run's adapter_config.json"
                )
            document = _read(source, name)
    if document is None:
        raise MissingFileError("cannot be read", where=text)
    return AdapterRecord(document, posixpath.join(place, name))


def _list_recorded(source: Source) -> Iterator[str]:
    for path in source.walk(2):
        folder, _, name = path.rpartition("/")
        if name == ADAPTER_CONFIG and not folder:
            yield DEFAULT
        elif name == ADAPTER_CONFIG and posixpath.dirname(folder) == _NAMED:
            yield posixpath.basename(folder)


def _read(source: Source, path: str) -> dict[str, Any] | None:
    try:
        size_bytes = source.stat(path).size_bytes
    except InputError:
        return None
    where = posixpath.join(source.location, path)
    if size_bytes > MAX_JSON_BYTES:
        raise InputError(f"{size_bytes:,} bytes are no configuration of an adapter", where=where)
    return parse_json_object(source.read(path, 0, size_bytes), where=where)
