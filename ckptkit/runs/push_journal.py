"""The journal of the pushes of a run, which survives a kill at any point.

RUN/.ckptkit/watch/lock               locked while a watch pushes the steps of RUN
RUN/.ckptkit/watch/identity           identifies the run, also against an earlier one at its path
RUN/.ckptkit/watch/ORG--NAME.json     the journal of one repository
RUN/.ckptkit/watch/status             what the last watch has not pushed, and why
RUN/.ckptkit/watch/commands/NAME      the journal of one command, and a log for each of its steps

The files are written as a whole and renamed, so a reader sees the old or the new one. The journal
only saves requests to the Hub: a commit may lack an entry, since a kill may happen between the two.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from msgspec import MsgspecError, Struct, field
from msgspec.json import decode

from ckptkit.core.display import plain_fields
from ckptkit.core.errors import FormatError, NoSpaceError, OutputError, RefusedError
from ckptkit.runs.marks import FileLocks, identity_in
from ckptkit.storage.local.disk import LOCAL_DISK, Disk, OpenFile, is_out_of_space
from ckptkit.storage.local.durable import replace_file
from ckptkit.storage.local.ownership import make_private, refuse_planted
from ckptkit.storage.locations import MARKS_FOLDER, PathLike, is_url, local_path

WATCH_FOLDER = f"{MARKS_FOLDER}/watch"
_LOCK = "lock"
_STATUS = "status"
_COMMANDS = "commands"
_COMMAND_DIGITS = 12
_VERSION = 1
_SUFFIX = ".json"
_MOST_BYTES = 64 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
PushState = Literal["pushing", "pushed"]


class StepPush(Struct, frozen=True):
    """The push of one step.

    Attributes:
        step: Its number.
        digest: Of its manifest, which distinguishes a replaced step from the one before.
        state: `pushing` from before the first request that could change the Hub.
        repo_id: The repository.
        commit: The hash of the commit, once known.
        tag: The tag that points to it.
        url: Of the commit.
        at: When it was pushed, in UTC.
        size_bytes: Bytes that were uploaded for it.
        save_number: The larger, the later the step was saved; 0 if unknown.
        metrics: Those of the step, which may no longer be in the run.
        replaces: The commit of an earlier save of the step, which loses its tag.
    """

    step: int
    digest: str
    state: PushState
    repo_id: str
    commit: str = ""
    tag: str = ""
    url: str = ""
    at: str = ""
    size_bytes: int = 0
    save_number: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    replaces: str = ""


class WatchStatus(Struct, frozen=True):
    """What a watch has not pushed, as `ckptkit ls` shows it, and a training that goes on.

    Attributes:
        repo_id: The repository; empty where nothing was watched.
        waiting: The steps that are to be pushed.
        failed: Why steps cannot be pushed, by their numbers.
        problem: Why those that wait are not pushed now: the error that is retried, or that ended
            the watch; empty where nothing is in the way.
    """

    repo_id: str = ""
    waiting: tuple[int, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        failed = {str(step): why for step, why in sorted(self.failed.items())}
        return {**plain_fields(self), "waiting": list(self.waiting), "failed": failed}


class _StatusFile(WatchStatus, frozen=True, kw_only=True):
    ckptkit_watch: Literal[1]


def write_status(state: Path, status: WatchStatus) -> None:
    """Replaces the status of the last watch; a disk that takes none is left alone."""
    data = json.dumps({"ckptkit_watch": _VERSION} | status.to_json(), indent=1).encode()
    with suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
        replace_file(state / _STATUS, data, LOCAL_DISK, draft=state / f".{_STATUS}")


def read_status(state: Path) -> WatchStatus:
    """Returns the status of the last watch; an empty one where there is none, or a damaged one."""
    try:
        with (state / _STATUS).open("rb") as file:
            found = decode(file.read(_MOST_BYTES), type=_StatusFile)
    except (OSError, MsgspecError, RecursionError):  # it only speeds up and explains
        return WatchStatus()
    return WatchStatus(found.repo_id, found.waiting, found.failed, found.problem)


class CommandRun(Struct, frozen=True):
    """A command that a watch has started for one step.

    Attributes:
        step: The number of the step.
        digest: Of the step, as for a push.
        state: `running` from before it is started until it has ended.
        command: The command, with its placeholders.
        log: The file that its output goes to.
        status: Its exit status: 128 and the number of the signal that ended it, 124 after the time
            limit; None while it runs.
        at: When it ended, in UTC.
        seconds: How long it took.
        save_number: As for a push.
        metrics: Those of the step.
    """

    step: int
    digest: str
    state: Literal["running", "ended"]
    command: str
    log: str = ""
    status: int | None = None
    at: str = ""
    seconds: float = 0.0
    save_number: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)


class _CommandFile(Struct, frozen=True):
    ckptkit_commands: Literal[1]
    run: str
    steps: dict[int, CommandRun]


class CommandJournal:
    """What one command has run for in a run, in a file; a damaged file counts as none."""

    def __init__(self, state: Path, command: str, run: str) -> None:
        """Reads it; entries of an earlier run at this path are left out."""
        name = hashlib.sha256(command.encode()).hexdigest()[:_COMMAND_DIGITS]
        self._path = state / _COMMANDS / f"{name}{_SUFFIX}"
        self._run = run
        found = _read_commands(self._path)
        self.runs = dict(found.steps) if found is not None and found.run == run else {}

    def log_of(self, step: int) -> Path:
        """Returns the file for the output of the command."""
        return self._path.absolute().with_name(f"{self._path.stem}-step-{step}.log")

    def note(self, entry: CommandRun) -> None:
        runs = {**self.runs, entry.step: entry}
        document = {
            "ckptkit_commands": _VERSION,
            "run": self._run,
            "steps": {str(step): plain_fields(one) for step, one in sorted(runs.items())},
        }
        _replace_json(self._path, document)
        self.runs = runs


def _read_commands(path: Path) -> _CommandFile | None:
    try:
        with path.open("rb") as file:
            return decode(file.read(_MOST_BYTES), type=_CommandFile)
    except (OSError, MsgspecError, RecursionError):
        return None


def read_commands(run: PathLike, state: PathLike | None) -> tuple[CommandRun, ...]:
    """Returns what watches have run for the steps of a run, sorted by steps."""
    folder = _watch_folder(run, state)
    paths = [] if folder is None else sorted((folder / _COMMANDS).glob(f"*{_SUFFIX}"))
    found = filter(None, map(_read_commands, paths))
    runs = [entry for file in found for entry in file.steps.values()]
    return tuple(sorted(runs, key=lambda entry: entry.step))


class _JournalFile(Struct, frozen=True):
    ckptkit_pushes: Literal[1]
    run: str
    steps: dict[int, StepPush]


class PushJournal:
    """The pushes of one run to one repository, in a file."""

    def __init__(self, path: Path, repo_id: str, run: str, pushes: Mapping[int, StepPush]) -> None:
        """Stores the entries of the file; see `open_journal`."""
        self.path = path
        self.repo_id = repo_id
        self._run = run
        self.pushes = dict(pushes)

    def note(self, push: StepPush) -> None:
        self._write({**self.pushes, push.step: push})

    def forget(self, step: int) -> None:
        self._write({n: push for n, push in self.pushes.items() if n != step})

    def _write(self, pushes: Mapping[int, StepPush]) -> None:
        document = {
            "ckptkit_pushes": _VERSION,
            "repo_id": self.repo_id,
            "run": self._run,
            "steps": {str(step): plain_fields(push) for step, push in sorted(pushes.items())},
        }
        _replace_json(self.path, document)
        self.pushes = dict(pushes)


def _replace_json(path: Path, document: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        replace_file(path, json.dumps(document, indent=1).encode(), LOCAL_DISK, draft=draft)
    except OSError as error:
        raise _unwritable(path, error) from error


def journal_path(state: Path, repo_id: str) -> Path:
    """Returns the file of a repository's journal.

    >>> journal_path(Path("watch"), "org/name").name
    'org--name.json'
    """
    return state / f"{_UNSAFE.sub('--', repo_id)}{_SUFFIX}"


def open_journal(
    state: Path, repo_id: str, run: str, former: Collection[str] = ()
) -> tuple[PushJournal, str]:
    """Opens the journal of a run's pushes to a repository; a new one is empty.

    A file that is damaged, or that belongs to an earlier run at this path, is moved aside: the
    Hub has the same information. `run` is the identity of the run, which it had `former` ones of
    in older versions. Returns a message about the file that was moved too, usually empty.
    """
    path = journal_path(state, repo_id)
    try:
        identity, pushes = _read(path)
        if identity == run or identity in former:
            return PushJournal(path, repo_id, run, pushes), ""
        why = "is of another run"
    except FileNotFoundError:
        return PushJournal(path, repo_id, run, {}), ""
    except OSError as error:
        raise _unwritable(path, error) from error
    except FormatError as error:
        why = error.message
    aside = path.with_name(f"{path.name}.aside")
    try:
        path.replace(aside)
    except OSError as error:
        raise _unwritable(path, error) from error
    return PushJournal(path, repo_id, run, {}), f"{path} {why}; it was renamed to {aside.name}"


def read_journals(state: Path) -> tuple[StepPush, ...]:
    """Returns the pushes in the journals of a watch, finished or under way, sorted by steps."""
    pushes: list[StepPush] = []
    for path in sorted(state.glob(f"*{_SUFFIX}")) if state.is_dir() else ():
        try:
            pushes += _read(path)[1].values()
        except (OSError, FormatError):
            continue  # damaged
    return tuple(sorted(pushes, key=lambda push: push.step))


def read_pushes(run: PathLike, state: PathLike | None) -> tuple[StepPush, ...]:
    """Returns the pushes that a watch has recorded for a run."""
    folder = _watch_folder(run, state)
    return () if folder is None else read_journals(folder)


def read_watch(run: PathLike, state: PathLike | None) -> WatchStatus | None:
    """Returns what the last watch of a run has not pushed; None where there was none."""
    folder = _watch_folder(run, state)
    status = None if folder is None else read_status(folder)
    return status if status is not None and status.repo_id else None


def _watch_folder(run: PathLike, state: PathLike | None) -> Path | None:
    """Returns the folder with the state of a watch; None where it is unknown."""
    if state is not None:
        return Path(state)
    return None if is_url(run) else local_path(run) / WATCH_FOLDER


def take_watch_lock(state: Path, run: Path | None, disk: Disk = LOCAL_DISK) -> FileLocks:
    """Takes the lock of a watch's state, and that in the run, if it is no URL and writable.

    If the file system has no locks, none is taken.
    """
    taken: list[OpenFile] = []
    if state != run:
        _make_private_state(state)
    try:
        for folder in dict.fromkeys(folder for folder in (state, run) if folder is not None):
            file = _locked(folder, disk, must=folder == state)
            if file is not None:
                taken.append(file)
    except BaseException:
        FileLocks(taken).close()
        raise
    return FileLocks(taken)


def _make_private_state(state: Path) -> None:
    """Makes a folder outside the run, where models are built that may be private as the run is."""
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        make_private(state)
    except FileExistsError:
        refuse_planted(state)
    except OSError as error:
        raise _unwritable(state, error) from error


def _locked(folder: Path, disk: Disk, *, must: bool) -> OpenFile | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_alone, file = disk.try_lock(folder / _LOCK)
    except OSError as error:
        if not must:
            return None
        raise _unwritable(folder, error) from error
    if not is_alone:
        try:
            owner = (folder / _LOCK).read_text(encoding="utf-8", errors="replace")[:200].strip()
        except OSError:
            owner = ""
        raise RefusedError(
            f"another watch is running: {owner or 'an unknown process'}",
            where=str(folder),
            hint="only one watch can push the steps of a run; end the other one first",
        )
    if file is not None:
        file.truncate(0)
        file.write_at(0, memoryview(f"process {os.getpid()} on {socket.gethostname()}".encode()))
    return file


def watch_identity(folder: Path) -> str:
    """Returns the identity of a run, created if there was none; empty if it cannot be written.

    Only the process with the lock may call this.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return identity_in(folder)
    except OSError:
        return ""


def _read(path: Path) -> tuple[str, dict[int, StepPush]]:
    with path.open("rb") as file:
        return parse_journal(file.read(_MOST_BYTES), where=str(path))


def parse_journal(data: bytes, *, where: str) -> tuple[str, dict[int, StepPush]]:
    """Returns the identity of the run, and its pushes by their steps."""
    try:
        found = decode(data, type=_JournalFile)
    except (MsgspecError, RecursionError) as error:
        raise FormatError(f"is no journal: {error!r:.200}", where=where) from error
    for step, push in found.steps.items():
        if push.step != step:
            raise FormatError(
                f"is no journal: the entry of step {step} is of step {push.step}", where=where
            )
    return found.run, found.steps


def _unwritable(path: Path, error: OSError) -> OutputError | NoSpaceError:
    if is_out_of_space(error):
        return NoSpaceError(
            "the disk is full; the state of the watch was not saved", where=str(path)
        )
    return OutputError(
        f"the state of the watch cannot be saved: {error.strerror or error}",
        where=str(path),
        hint="pass another directory with --state",
    )
