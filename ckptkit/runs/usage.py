"""What runs take on a disk or in a store, by run, step and kind of file.

A file with several names counts once. So do blocks that files share, where the file system tells
which these are: XFS and btrfs do, but not of compressed ones.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.consumers.side_files import is_side_file
from ckptkit.core.errors import InputError, NotACheckpointError
from ckptkit.core.manifest import MANIFEST_NAME, SIDE_FOLDER
from ckptkit.formats.discovery import name_step, parse_step
from ckptkit.runs.find_run import ENTER_HINT, absent_run, describe_links
from ckptkit.runs.steps import StoredFile, freed_bytes
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.locations import is_work_folder
from ckptkit.storage.place_identity import find_mount, read_mounts
from ckptkit.storage.places import PathLike, is_url, local_path, open_source

MODEL, OPTIMIZER, STATE = "model", "optimizer", "other state"
SIDE, LEFTOVER, OTHER = "side files", "leftovers", "other files"
KINDS = (MODEL, OPTIMIZER, STATE, SIDE, LEFTOVER, OTHER)
_DEEP = 64
_LEAST_SHARED_BYTES = 1 << 20  # of smaller files, too little could be shared to ask for it
# By the names that frameworks give their files; what is in them is not read. A sharded folder that
# holds a model with its optimizer counts as the model.
_OPTIMIZER = re.compile(r"optim|(?:^|/)exp_avg|distrib_optim", re.IGNORECASE)
_STATE = re.compile(
    r"random_state|rng|scheduler|scaler|trainer_state|training_args|dataloader|sampler|latest"
    r"|custom_checkpoint|zero_to_fp32|iteration|\.metadata\.json",
    re.IGNORECASE,
)
_MODEL = re.compile(
    r"\.(safetensors|distcp|bin|pt|pth|ckpt|tar|model)(\.index\.json)?$|\.metadata$|mp_rank_"
    r"|pytorch_model|model_state",
    re.IGNORECASE,
)


def kind_of(path: str) -> str:
    """Returns what a file in a step is, by its path in the step.

    >>> kind_of("optimizer_0/__0_0.distcp"), kind_of("pytorch_model_fsdp_0/__0_0.distcp")
    ('optimizer', 'model')
    >>> kind_of("random_states_0.pkl"), kind_of("ckptkit/config.json"), kind_of("notes.txt")
    ('other state', 'side files', 'other files')
    """
    name = posixpath.basename(path)
    if any(is_work_folder(part) for part in path.split("/")):
        return LEFTOVER
    if name == MANIFEST_NAME or path.startswith(f"{SIDE_FOLDER}/") or is_side_file(name):
        return SIDE
    if _OPTIMIZER.search(path):
        return OPTIMIZER
    if _STATE.search(name):
        return STATE
    return MODEL if _MODEL.search(path) else OTHER


class StepUsage(Struct, frozen=True):
    """What a step takes."""

    name: str  # its folder; empty for files of the run that are in no step
    size_bytes: int  # of all its files
    # What its removal would free: files without names elsewhere, but for blocks that they share
    freed_bytes: int
    kinds: Mapping[str, int]  # bytes by kind
    files: int  # how many files it has

    def to_json(self) -> dict[str, Any]:
        return {
            "step": parse_step(self.name),
            "name": self.name,
            "bytes": self.size_bytes,
            "freed_bytes": self.freed_bytes,
            "kinds": dict(self.kinds),
            "files": self.files,
        }


class RunUsage(Struct, frozen=True):
    """What a run takes."""

    path: str  # its folder
    size_bytes: int  # of all files; one with several names counts once
    taken_bytes: int  # the same, where blocks that files share count once, too
    kinds: Mapping[str, int]  # the same by kind
    # Its steps in the order of their numbers, and then what is in no step
    steps: tuple[StepUsage, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.path,
            "bytes": self.size_bytes,
            "taken_bytes": self.taken_bytes,
            "kinds": dict(self.kinds),
            "steps": [step.to_json() for step in self.steps],
        }


class Usage(Struct, frozen=True):
    """What runs take together."""

    runs: tuple[RunUsage, ...]  # the largest first
    taken_bytes: int  # blocks count once that files of several runs share

    @property
    def size_bytes(self) -> int:
        return sum(run.size_bytes for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes": self.size_bytes,
            "taken_bytes": self.taken_bytes,
            "runs": [run.to_json() for run in self.runs],
        }


# By the inode of a file: the blocks that it shares with others, each a disk, a start and a stop.
_Shared = Mapping[str, Sequence[tuple[str, int, int]]]


def measure_runs(place: PathLike) -> Usage:
    """Measures all runs at or below a place; no file is read."""
    files = list(_list_remote(place) if is_url(place) else _list_local(local_path(place)))
    location = os.fspath(place).rstrip("/")
    runs: dict[str, list[tuple[str, StoredFile]]] = defaultdict(list)
    folders = {_split_at_step(file.path)[0] for file in files}
    for file in files:
        run, step = _split_at_step(file.path)
        if run is None:
            run = next((f for f in _above(file.path) if f in folders), None)
        if run is not None:
            runs[run].append((step, file))
    if not runs:
        links = targets = ""
        if not is_url(place):
            with open_source(place) as source:
                links, targets = describe_links([source], as_run=True)
        raise NotACheckpointError(
            "; ".join(filter(None, ["no run with steps is here or below", links])),
            where=location,
            hint=targets or "pass a folder with checkpoint-N folders in it, or one above",
        )
    every = [file for own in runs.values() for _, file in own]
    shared = {} if is_url(place) else _find_shared_blocks(local_path(place), every)
    measured = [
        _measure(posixpath.join(location, run) if run else location, own, shared)
        for run, own in runs.items()
    ]
    measured.sort(key=lambda run: (-run.size_bytes, run.path))
    size_bytes = sum(run.size_bytes for run in measured)
    return Usage(tuple(measured), size_bytes - _repeated_bytes(every, shared))


def _find_shared_blocks(root: Path, files: Iterable[StoredFile]) -> _Shared:
    shared: dict[str, Sequence[tuple[str, int, int]]] = {}
    disks: dict[str, str] = {}
    mounts = read_mounts()
    for stored in files:
        if stored.size_bytes < _LEAST_SHARED_BYTES or stored.inode in shared:
            continue
        shared[stored.inode] = ()
        with suppress(OSError):  # the file may not be read, or its file system does not tell
            file = LOCAL_DISK.open_for_reading(root / stored.path)
            try:
                blocks = list(file.shared_blocks())
            finally:
                file.close()
            device, _, _ = stored.inode.partition("-")
            if blocks and device not in disks:  # subvolumes of btrfs each have a device
                mount = find_mount((root / stored.path).resolve(), mounts)
                disks[device] = device if mount is None else mount.device
            shared[stored.inode] = [(disks[device], start, stop) for start, stop in blocks]
    return shared


def _repeated_bytes(files: Iterable[StoredFile], shared: _Shared) -> int:
    """Returns how much less files take than their sizes are, since they share blocks."""
    inodes = {file.inode for file in files}
    blocks = sorted(block for inode in inodes for block in shared.get(inode, ()))
    repeated, last, end = 0, "", 0
    for disk, start, stop in blocks:
        if disk != last:
            last, end = disk, start
        repeated += max(min(stop, end) - start, 0)
        end = max(end, stop)
    return repeated


def _measure(path: str, files: Sequence[tuple[str, StoredFile]], shared: _Shared) -> RunUsage:
    steps: dict[str, list[StoredFile]] = defaultdict(list)
    for step, file in files:
        steps[step].append(file)
    usages = [_measure_step(step, own, shared) for step, own in steps.items()]
    usages.sort(key=lambda usage: (not usage.name, parse_step(usage.name) or 0, usage.name))
    kinds = _sum_kinds(files)
    size_bytes = sum(kinds.values())
    taken_bytes = size_bytes - _repeated_bytes((file for _, file in files), shared)
    return RunUsage(path, size_bytes, taken_bytes, kinds, tuple(usages))


def _measure_step(name: str, files: Sequence[StoredFile], shared: _Shared) -> StepUsage:
    kinds = _sum_kinds((name, file) for file in files)
    # What else shares a block is not known, so it counts as one that stays.
    own = [
        replace(file, size_bytes=file.size_bytes - _shared_bytes(file, shared)) for file in files
    ]
    return StepUsage(name, sum(kinds.values()), freed_bytes(own), kinds, len(files))


def _shared_bytes(file: StoredFile, shared: _Shared) -> int:
    return sum(stop - start for _, start, stop in shared.get(file.inode, ()))


def _sum_kinds(files: Iterable[tuple[str, StoredFile]]) -> dict[str, int]:
    """Returns the bytes of each kind; a file with several names counts once."""
    kinds: Counter[str] = Counter()
    seen = set()
    for step, file in files:
        key = file.inode or file.path
        if key not in seen:
            seen.add(key)
            kinds[_kind_in(step, file)] += file.size_bytes
    return {kind: kinds[kind] for kind in KINDS if kinds[kind]}


def _kind_in(step: str, file: StoredFile) -> str:
    if not step:
        return LEFTOVER if any(map(is_work_folder, file.path.split("/"))) else OTHER
    return kind_of(file.path.rpartition(f"{step}/")[2])


def _split_at_step(path: str) -> tuple[str | None, str]:
    """Returns the run and the step of a file, by the first folder that is named like a step."""
    parts = path.split("/")
    named = [
        number
        for number, part in enumerate(parts[:-1])
        if parse_step(part) is not None and not part.startswith(".")
    ]
    if not named and parse_step(parts[-1]) is not None:
        return "/".join(parts[:-1]), name_step(parts[-1])
    if not named:
        return None, ""
    # A folder such as 2026 may be above a run; nanotron's steps are called so, too.
    at = next((number for number in named if not parts[number].isdigit()), named[0])
    return "/".join(parts[:at]), parts[at]


def _above(path: str) -> Iterator[str]:
    folder = posixpath.dirname(path)
    while folder:
        yield folder
        folder = posixpath.dirname(folder)
    yield ""


def _list_local(root: Path) -> Iterator[StoredFile]:
    if not root.is_dir():
        raise absent_run(root)

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed since its parent was listed
            raise _unlisted(error, error.filename) from error

    for folder, names, files in os.walk(root, onerror=fail):
        names.sort()
        below = Path(folder).relative_to(root).as_posix()
        for name in sorted(files):
            path = name if below == "." else f"{below}/{name}"
            try:
                status = (root / path).lstat()
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:  # the folder may be listed and not entered
                raise _unlisted(error, folder) from error
            inode = f"{status.st_dev:x}-{status.st_ino:x}"
            links = status.st_nlink
            yield StoredFile(path, status.st_size, status.st_mtime, "", links=links, inode=inode)


def _unlisted(error: OSError, folder: str) -> InputError:
    reason = (error.strerror or str(error)).lower()
    hint = ENTER_HINT if isinstance(error, PermissionError) else ""
    return InputError(f"cannot be listed: {reason}", where=folder, hint=hint)


def _list_remote(place: PathLike) -> Iterator[StoredFile]:
    with open_source(place) as source:
        for path in source.walk(_DEEP):
            reference = source.stat(path)
            yield StoredFile(path, reference.size_bytes, reference.modified, reference.identity)
