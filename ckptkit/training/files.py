"""Small files that the user has saved with a step."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ckptkit.core.errors import UsageError
from ckptkit.core.manifest import MANIFEST_NAME, SIDE_FOLDER
from ckptkit.core.texts import a_kind
from ckptkit.training.pieces import SmallFile

# Of all layouts, as a step may be resumed from in another one; see `names` for who makes them.
_TOP = re.compile(
    rf"{re.escape(SIDE_FOLDER)}|\.ckptkit.*|(?:pytorch_model_fsdp|optimizer|base_model)_\d+"
    r"|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|rng_state(?:_\d+)?\.pth"
    r"|scheduler(?:_\d+)?\.(?:bin|pt)|scaler(?:_\d+)?\.pt"
)
_ANYWHERE = re.compile(rf"{re.escape(MANIFEST_NAME)}|\.metadata|\.ranks|.*\.distcp")


class StepFile(bytes):
    """Bytes that an integration puts in the place of a file that the step would make itself."""


def checked_files(files: Mapping[str, bytes], taken: Iterable[str] = ()) -> tuple[SmallFile, ...]:
    """Returns files of the user's, to lie in a step's directory.

    Args:
        files: What each holds, by its name relative to the directory.
        taken: Files and folders of this very step, beside those that every step may have.

    Raises:
        UsageError: If one has no name for a file, a name that is taken, or no bytes.
    """
    if not isinstance(files, Mapping):
        raise UsageError(
            f"{a_kind(files)} was found where bytes by file name were expected", where="files"
        )
    own = {name.casefold() for name in taken} - {""}
    for name, data in files.items():
        _check_file(name, data, own)
    known = {name.casefold(): name for name in files}
    for name in files:
        above = (known.get(folder.casefold()) for folder in _folders_of(name))
        other = next(filter(None, above), known[name.casefold()])
        if other != name:
            raise UsageError(
                f"this name and {other!r} cannot lie in one directory on every file system",
                where=f"files[{name!r}]",
                hint="choose another",
            )
    return tuple(SmallFile(name, bytes(data)) for name, data in files.items())


def _folders_of(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _check_file(name: object, data: object, own: Collection[str]) -> None:
    where = f"files[{name!r}]"
    if not isinstance(name, str) or not _is_relative(name):
        raise UsageError(
            "no name of a file in the step's directory was found",
            where=where,
            hint="give names such as 'notes.json' or 'notes/a.json'",
        )
    if not isinstance(data, bytes):
        raise UsageError(f"{a_kind(data)} was found where bytes were expected", where=where)
    parts = name.casefold().split("/")  # some file systems take no notice of case
    taken = parts[0] in own or _TOP.fullmatch(parts[0]) or any(map(_ANYWHERE.fullmatch, parts))
    if taken and not isinstance(data, StepFile):
        raise UsageError(
            "this name is taken by files of the step itself", where=where, hint="choose another"
        )


def _is_relative(name: str) -> bool:
    """Tells whether a name is that of a file below a directory, on every file system."""
    if "\0" in name or "\\" in name or not name.isprintable():
        return False
    return all(part and not part.endswith((".", " ")) for part in name.split("/"))
