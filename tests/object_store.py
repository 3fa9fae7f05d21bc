"""An S3 server of our own, in a process of its own, behind a proxy that misbehaves on request.

The server is moto's, unmodified. The proxy stands between it and whatever is tested: it counts
requests and bytes, and answers with errors, slowly, in parts or not at all where a test asks for
that. Started as a program, this module is the server.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ckptkit.storage.places import Place
from tests.faulty_proxy import Fault, Proxy, Seen

_ROOT = Path(__file__).resolve().parents[1]
_MOST_KEYS = 1000  # of a request
KEY, SECRET = "store-key-AKIA0001", "store-secret-5b1f0c77"

__all__ = ["KEY", "SECRET", "Bucket", "Fault", "ObjectStore", "Seen", "running_object_store"]


@dataclass(frozen=True)
class Bucket:
    """One bucket; files are put there and looked at past the proxy, so that nothing is counted."""

    store: ObjectStore
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def place(self, prefix: str, **further: Any) -> Place:
        """Returns a URL below it, with the options of the store."""
        return Place(f"{self.url}/{prefix}", self.store.options | further)

    def files_below(self, prefix: str) -> dict[str, bytes]:
        keys = self.keys(f"{prefix}/")
        return {key.removeprefix(f"{prefix}/"): self.get(key) for key in keys}

    def put(self, key: str, data: bytes) -> None:
        self.store.client.put_object(Bucket=self.name, Key=key, Body=data)

    def put_tree(self, folder: Path, prefix: str = "") -> str:
        """Puts all files below a local folder; returns the URL of the prefix."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = path.relative_to(folder).as_posix()
                self.put(f"{prefix}/{key}" if prefix else key, path.read_bytes())
        return f"{self.url}/{prefix}" if prefix else self.url

    def get(self, key: str) -> bytes:
        data: bytes = self.store.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.store.client.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.name, Prefix=prefix)
        return [item["Key"] for page in found for item in page.get("Contents", ())]

    @contextmanager
    def renewed(self, key: str, claim: dict[str, Any]) -> Iterator[None]:
        """Renews a claim, as a run on another machine does while it commits."""
        ended = threading.Event()

        def renew() -> None:
            for beat in itertools.count():
                self.put(key, json.dumps({**claim, "beat": beat}).encode())
                if ended.wait(0.5):
                    return

        with ThreadPoolExecutor(1) as pool:
            renewing = pool.submit(renew)
            try:
                yield
            finally:
                ended.set()
        renewing.result()

    def delete(self, key: str) -> None:
        self.store.client.delete_object(Bucket=self.name, Key=key)

    def unfinished_uploads(self) -> list[str]:
        """Returns the keys of multipart uploads that were neither completed nor aborted."""
        answer = self.store.client.list_multipart_uploads(Bucket=self.name)
        return [upload["Key"] for upload in answer.get("Uploads", ())]

    def clear(self, *, kept: str = "") -> None:
        """Removes all objects but those below a prefix, and all uploads."""
        keys = [{"Key": key} for key in self.keys() if not (kept and key.startswith(kept))]
        for start in range(0, len(keys), _MOST_KEYS):
            batch = {"Objects": keys[start : start + _MOST_KEYS], "Quiet": True}
            answer = self.store.client.delete_objects(Bucket=self.name, Delete=batch)
            assert "Errors" not in answer, answer
        for upload in self.store.client.list_multipart_uploads(Bucket=self.name).get("Uploads", ()):
            self.store.client.abort_multipart_upload(
                Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"]
            )


@dataclass
class ObjectStore:
    """A running server and its proxy."""

    direct: str  # the server's own URL, without the proxy: for benchmarks, and to look at results
    proxy: Proxy  # counts, and misbehaves
    _buckets: dict[str, Bucket] = field(default_factory=dict)
    _client: Any = None

    @property
    def endpoint(self) -> str:
        return self.proxy.url

    @property
    def options(self) -> dict[str, Any]:
        return self.options_for(KEY, SECRET)

    @property
    def direct_options(self) -> dict[str, Any]:
        """The same, past the proxy."""
        return self.options_for(KEY, SECRET, endpoint=self.direct)

    def options_for(self, key: str, secret: str, *, endpoint: str = "") -> dict[str, Any]:
        client = {"endpoint_url": endpoint or self.endpoint, "region_name": "us-east-1"}
        return {"key": key, "secret": secret, "client_kwargs": client}

    def arguments(self, option: str = "--src-option") -> list[str]:
        """Returns the same as arguments of the command line."""
        pairs = [
            f"key={KEY}",
            f"secret={SECRET}",
            f"client_kwargs.endpoint_url={self.endpoint}",
            "client_kwargs.region_name=us-east-1",
        ]
        return [word for pair in pairs for word in (option, pair)]

    @property
    def client(self) -> Any:
        """A client of another make than fsspec's, past the proxy."""
        if self._client is None:
            import botocore.session

            self._client = botocore.session.get_session().create_client(
                "s3",
                endpoint_url=self.direct,
                region_name="us-east-1",
                aws_access_key_id=KEY,
                aws_secret_access_key=SECRET,
            )
        return self._client

    def bucket(self, name: str) -> Bucket:
        """Returns a bucket, made on first use; it keeps what is in it until `Bucket.clear`."""
        if name not in self._buckets:
            self.client.create_bucket(Bucket=name)
            self._buckets[name] = Bucket(self, name)
        return self._buckets[name]

    def close(self) -> None:
        self.proxy.close()
        if self._client is not None:
            self._client.close()


@contextmanager
def running_object_store() -> Iterator[ObjectStore]:
    """Starts the server, which ends with this process at the latest, and a proxy before it."""
    command = [sys.executable, "-m", "tests.object_store"]
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        assert server.stdout is not None
        store: ObjectStore | None = None
        try:
            port = int(server.stdout.readline())
            store = ObjectStore(f"http://127.0.0.1:{port}", Proxy("127.0.0.1", port))
            yield store
        finally:
            if store is not None:
                store.close()
            server.terminate()


def _serve() -> None:
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Says nothing: the log is kept by the proxy."""

    # Its S3 alone: to find the service of a request would take a third of the time.
    application = create_backend_app("s3")
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    threading.Thread(
        target=_end_with, args=(sys.stdin.buffer, server.shutdown), daemon=True
    ).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


def _end_with(parent: BinaryIO, stop: Callable[[], None]) -> None:
    """Waits for the other end of the pipe to close, however its process ends."""
    parent.read()
    stop()


if __name__ == "__main__":
    _serve()
