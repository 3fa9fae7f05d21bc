"""Serves a checkpoint, or the newest steps of a run, until it is closed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct

from ckptkit.core.errors import AccessError, CkptkitError, StorageError
from ckptkit.core.text import Closing, event_of_note
from ckptkit.engine.outcome import Event, Planned
from ckptkit.hub.watch.watched_steps import WatchedRun, default_poll_seconds
from ckptkit.runs.find_run import find_run
from ckptkit.runs.steps import abandoned
from ckptkit.serving.planned_folder import IdleReaders, PlannedFolder, divide_memory
from ckptkit.serving.plans import ServePlan
from ckptkit.serving.s3_api import BUCKET, REGION
from ckptkit.serving.server import ModelServer, ServedBucket, ServeRequest, is_loopback
from ckptkit.storage.places import is_url

logger = logging.getLogger(__name__)
ServeEventName = Literal[
    "serving", "added", "removed", "skipped", "waiting", "failed", "note", "warning"
]
_KEPT_STEPS = 2  # the newest, and the one before for clients that read it already
_AGAIN = "start the server again once the source is complete"


class ServeEvent(Struct, frozen=True):
    """Something that happened.

    Attributes:
        name: What happened.
        facts: As JSON values.
    """

    name: ServeEventName
    facts: Mapping[str, Any]


ServeListener = Callable[[ServeEvent], None]


class Serving(Closing):
    """A server with what it serves; a context manager.

    Attributes:
        url: The endpoint, such as `http://127.0.0.1:9000`.
        prefix: The prefix of all keys, without a slash at its end.
        server: The server.
        bucket: What is served.
    """

    def __init__(self, request: ServeRequest, listener: ServeListener | None = None) -> None:
        """Plans what is served, and starts to listen; raises what refuses it.

        Args:
            request: What is served.
            listener: Receives events, from several threads; its errors are logged.
        """
        self._request, self._listener = request, listener
        self._stopped = threading.Event()
        self.bucket, self._readers = ServedBucket(), IdleReaders()
        self.prefix = request.prefix
        src, resources = request.plan.job.src, request.plan.job.resources
        try:
            if not request.follow:
                self._add(self.prefix, request.plan)
            else:
                self._run = WatchedRun(find_run(src), None)
                self._refused: dict[str, str] = {}  # digests of steps, by names in the bucket
                self._served: dict[str, str] = {}  # the same, oldest first
                self._serve_newest()
                if not self._served:
                    self._tell("waiting", self.prefix, message=f"{src} has no complete step yet")
            is_remote = is_url(src) or any(one.is_remote for one in self.bucket.folders.values())
            threads, parts = divide_memory(resources, is_remote=is_remote)
            self.server = ModelServer(self.bucket, request, threads, parts, self._tell_failure)
        except BaseException:
            self.bucket.close()
            raise
        self.url = self.server.url
        if request.follow:
            threading.Thread(target=self._follow, name="ckptkit-follow", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients of S3 find the server and its keys."""
        keys = self._request.keys
        named = {
            "AWS_ACCESS_KEY_ID": "none" if keys is None else keys.access_key,
            "AWS_SECRET_ACCESS_KEY": "none" if keys is None else keys.secret_key,
        }
        regions = dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), REGION)
        return {"AWS_ENDPOINT_URL": self.url, **named, **regions}

    @property
    def warning(self) -> str:
        """What a user has to know who lets other machines in; empty for this machine alone."""
        if is_loopback(self._request.host):
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
        self._stopped.set()
        self.server.close()
        self.bucket.close()

    def _tell(self, event: ServeEventName, name: str, **facts: Any) -> None:
        """Reports an event; a listener that fails does not change what is served."""
        try:
            if self._listener is not None:
                self._listener(ServeEvent(event, {"name": name, **facts}))
        except Exception:
            logger.exception("the event %r could not be reported", event)

    def _tell_failure(self, name: str, error: CkptkitError) -> None:
        self._tell("failed", name, error=error.to_json())

    def _tell_notes(self, name: str, notes: Iterable[str]) -> None:
        for note in notes:
            self._tell(event_of_note(note), name, message=note)

    def _add(self, name: str, plan: ServePlan) -> None:
        """Plans a source, and puts it into the bucket."""

        def listen(event: Event) -> None:
            self._tell_notes(name, event.notes if isinstance(event, Planned) else ())

        folder = PlannedFolder(plan, listen, _AGAIN, self._readers)
        self.bucket.put(name, folder)
        objects = [
            {"key": f"{name}/{path}", "bytes": file.size_bytes, "etag": file.etag}
            for path, file in folder.files.items()
        ]
        facts = {"source": folder.path, "bytes": folder.size_bytes, "objects": objects}
        self._tell("added", name, **facts)
        self._tell_notes(name, folder.notes)

    # --- a run that is followed ---

    def _follow(self) -> None:
        """Looks for newer steps until the server is closed."""
        src = self._request.plan.job.src
        seconds = self._request.poll_seconds or default_poll_seconds(src)
        while not self._stopped.wait(seconds):
            try:
                self._serve_newest()
            except CkptkitError as error:
                self._tell("skipped", self.prefix, error=error.to_json())
            except Exception:
                logger.exception("the run cannot be followed; it is looked at again")

    def _serve_newest(self) -> None:
        """Adds the newest step, if it is not served yet, and drops old ones."""
        steps = self._run.list_steps()
        left = abandoned(steps)
        current = [step for step in steps if step.step not in left]
        if not current:
            return
        newest = max(current, key=lambda step: (step.save_number, step.step))
        name, digest = f"{self.prefix}/{newest.name}", newest.digest
        if digest not in (self._served.get(name), self._refused.get(name)):
            try:
                self._add(name, self._request.plan.of_step(self._run.place_of(newest)))
            except CkptkitError as error:
                if not isinstance(error, AccessError | StorageError):
                    self._refused[name] = digest
                raise
            self._served.pop(name, None)
            self._served[name] = digest
        for old in list(self._served)[:-_KEPT_STEPS]:
            del self._served[old]
            self.bucket.put(old, None)
            self._tell("removed", old)
