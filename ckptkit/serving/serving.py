"""Serves a checkpoint, or the newest steps of a run, until it is closed."""

from __future__ import annotations

import logging
import posixpath
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.core.errors import AccessError, CkptkitError, StorageError, UsageError
from ckptkit.core.text import Closing, event_of_note
from ckptkit.engine.outcome import Event, Planned
from ckptkit.formats.discovery import parse_step
from ckptkit.hub.watch.watched_steps import WatchedRun
from ckptkit.runs.run_paths import find_run
from ckptkit.runs.steps import RunStep, abandoned
from ckptkit.serving.plans import ServePlan
from ckptkit.serving.reading import ReadingLimits
from ckptkit.serving.s3_api import REGION
from ckptkit.serving.served_folder import ServedBucket, ServedFolder
from ckptkit.serving.served_objects import BUCKET
from ckptkit.serving.server import ModelServer, ServerAddress
from ckptkit.storage.places import PathLike, is_url, local_path

logger = logging.getLogger(__name__)
ServeEventName = Literal[
    "serving", "added", "removed", "skipped", "waiting", "failed", "note", "warning"
]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_DEFAULT_NAME = "model"
_KEPT_STEPS = 2  # the newest, and the one before for clients that read it already
_LOCAL_SECONDS, _REMOTE_SECONDS = 5.0, 30.0


@dataclass(frozen=True, slots=True)
class ServeEvent:
    """Something that happened.

    Attributes:
        name: What happened.
        facts: As JSON values.
    """

    name: ServeEventName
    facts: Mapping[str, Any]


ServeListener = Callable[[ServeEvent], None]


def ignore_events(_event: ServeEvent) -> None:
    """Does nothing; for servers that report to no one."""


def _guard(listener: ServeListener) -> ServeListener:
    """Returns a listener whose errors do not change what is served."""

    def listen(event: ServeEvent) -> None:
        try:
            listener(event)
        except Exception:
            logger.exception("the event %r could not be reported", event.name)

    return listen


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """What is served, where, and to whom.

    Attributes:
        plan: What is planned for each source.
        address: Where the server listens, and the keys.
        name: The prefix of all keys; None for the name of the source.
        follow: Whether the source is a run whose newest step is served.
        poll_seconds: How often a run is looked at; None for a default by its storage.
    """

    plan: ServePlan
    address: ServerAddress = field(default_factory=ServerAddress)
    name: str | None = None
    follow: bool = False
    poll_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is not a name of letters, digits, dots, hyphens and underscores",
                where="--name",
                hint="pass a name such as --name llama",
            )

    @property
    def prefix(self) -> str:
        """The prefix of all keys, without a slash at its end."""
        if self.name is not None:
            return self.name
        src = self.plan.job.src
        path = str(src) if is_url(src) else local_path(src).absolute().as_posix()
        name = posixpath.basename(path.rstrip("/"))
        if parse_step(name) is not None and not self.follow:
            run = posixpath.basename(posixpath.dirname(path.rstrip("/")))
            name = f"{run}-{name}" if run else name
        return name if _NAME.fullmatch(name) else _DEFAULT_NAME


class Serving(Closing):
    """A server with what it serves; a context manager.

    Attributes:
        url: The endpoint, such as `http://127.0.0.1:9000`.
        prefix: The prefix of all keys, without a slash at its end.
        server: The server.
    """

    def __init__(self, request: ServeRequest, listener: ServeListener) -> None:
        """Plans what is served, and starts to listen; raises what refuses it.

        Args:
            request: What is served.
            listener: Receives events, from several threads.
        """
        self._request = request
        self._listener = _guard(listener)
        self._bucket = ServedBucket()
        self.prefix = request.prefix
        self._steps = _FollowedRun(request, self._add) if request.follow else None
        try:
            if self._steps is None:
                self._add(self.prefix, request.plan)
            else:
                self._steps.look()
                if not self._steps.served:
                    text = f"{request.plan.job.src} has no complete step yet"
                    self._listener(ServeEvent("waiting", {"name": self.prefix, "message": text}))
            self.server = ModelServer(self._bucket, request.address, self._limits(), self._refused)
        except BaseException:
            self._bucket.close()
            raise
        self.url = self.server.url
        if self._steps is not None:
            self._steps.start(self._take_steps)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients of S3 find the server and its keys."""
        keys = self._request.address.keys
        named = {
            "AWS_ACCESS_KEY_ID": "none" if keys is None else keys.access_key,
            "AWS_SECRET_ACCESS_KEY": "none" if keys is None else keys.secret_key,
        }
        regions = dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), REGION)
        return {"AWS_ENDPOINT_URL": self.url, **named, **regions}

    @property
    def warning(self) -> str:
        """What a user has to know who lets other machines in; empty for this machine alone."""
        if not self._request.address.is_open:
            return ""
        return (
            f"other machines reach this server at {self.url}: requests are signed, but nothing is"
            " encrypted, so that whatever is between can read what is sent"
        )

    @property
    def location(self) -> str:
        """The place of what is served, as an `s3://` URL."""
        return f"s3://{BUCKET}/{self.prefix}/"

    def close(self) -> None:
        """Ends all connections at once; a second call does nothing."""
        if self._steps is not None:
            self._steps.stop()
        self.server.close()
        self._bucket.close()

    def _limits(self) -> ReadingLimits:
        is_remote = self._bucket.is_remote() or is_url(self._request.plan.job.src)
        return ReadingLimits.from_resources(self._request.plan.job.resources, is_remote=is_remote)

    def _add(self, name: str, plan: ServePlan) -> None:
        """Plans a source, and puts it into the bucket."""

        def note(event: Event) -> None:
            self._report(name, event.notes if isinstance(event, Planned) else ())

        with ExitStack() as stack:
            folder = ServedFolder(stack, name, stack.enter_context(plan.open(note)))
            folder.keep(stack.pop_all())
        self._bucket.put(folder)
        facts = {"name": name, "source": folder.path, "bytes": folder.size_bytes}
        facts["objects"] = [
            {"key": entry.key, "bytes": entry.size_bytes, "etag": entry.etag}
            for entry in folder.objects.values()
        ]
        self._listener(ServeEvent("added", facts))
        self._report(name, folder.notes)

    def _report(self, name: str, notes: Iterable[str]) -> None:
        for note in notes:
            facts = {"name": name, "message": note}
            self._listener(ServeEvent(event_of_note(note), facts))

    def _take_steps(self, followed: _FollowedRun) -> None:
        """Looks for a newer step, from the thread that follows the run."""
        before = set(followed.served)
        try:
            followed.look()
        except CkptkitError as error:
            self._listener(ServeEvent("skipped", {"name": self.prefix, "error": error.to_json()}))
        except Exception:
            logger.exception("the run cannot be followed; it is looked at again")
        for name in before - set(followed.served):
            self.server.drop(name)
            self._listener(ServeEvent("removed", {"name": name}))

    def _refused(self, folder: ServedFolder, error: CkptkitError) -> None:
        self._listener(ServeEvent("failed", {"name": folder.name, "error": error.to_json()}))


class _FollowedRun:
    """The newest steps of a run, and a thread that looks for newer ones.

    Attributes:
        served: The digests of the steps that are served, by names in the bucket, oldest first.
    """

    def __init__(self, request: ServeRequest, add: Callable[[str, ServePlan], None]) -> None:
        self.served: dict[str, str] = {}
        self._plan = request.plan
        self._prefix = request.prefix
        self._add = add
        run = find_run(request.plan.job.src)
        self._run = WatchedRun(run, None)
        default = _REMOTE_SECONDS if is_url(run) else _LOCAL_SECONDS
        self._seconds = default if request.poll_seconds is None else request.poll_seconds
        self._refused: dict[str, str] = {}
        self._stopped = threading.Event()

    def start(self, look: Callable[[_FollowedRun], None]) -> None:
        """Starts the thread, which calls `look` at intervals."""

        def run() -> None:
            while not self._stopped.wait(self._seconds):
                look(self)

        threading.Thread(target=run, name="ckptkit-follow", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread after what it does."""
        self._stopped.set()

    def look(self) -> None:
        """Adds the newest step, if it is not served yet, and forgets old ones."""
        steps = self._run.look()
        left = abandoned(steps)
        current = [step for step in steps if step.step not in left]
        if not current:
            return
        newest = max(current, key=lambda step: (step.save_number, step.step))
        name, digest = f"{self._prefix}/{newest.name}", newest.digest
        if digest not in (self.served.get(name), self._refused.get(name)):
            self._serve(name, newest)
        for old in list(self.served)[:-_KEPT_STEPS]:
            del self.served[old]

    def _serve(self, name: str, step: RunStep) -> None:
        place: PathLike = self._run.place_of(step)
        try:
            self._add(name, self._plan.of_step(place))
        except CkptkitError as error:
            if not isinstance(error, AccessError | StorageError):
                self._refused[name] = step.digest
            raise
        self.served.pop(name, None)
        self.served[name] = step.digest
