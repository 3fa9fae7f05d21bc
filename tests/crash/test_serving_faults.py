"""What goes wrong while a model is served: sources that change or are damaged, clients that go.

A body that was begun and cannot be proven is broken off, so that no client takes it for whole.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import torch
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    IncompleteReadError,
    ResponseStreamingError,
)

import ckptkit
from ckptkit.serving import serving as server_module
from ckptkit.serving.serving import ServeEvent, Serving
from tests.command_line import started
from tests.files import flip_bit, wait_until
from tests.s3_client import client_of
from tests.sharded import write_sharded

ROWS = 6 << 10  # of 8 KiB: 48 MiB, more than all buffers hold
BROKEN = (IncompleteReadError, ResponseStreamingError, ConnectionClosedError)
KEY = "m/model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    torch.manual_seed(0)
    state = {"large": torch.randn(ROWS, 2048), "small": torch.randn(16)}
    write_sharded(folder, {f"model.{name}": tensor for name, tensor in state.items()}, 1)
    return folder


@pytest.fixture
def source(saved: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for path in saved.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


class Events(list[ServeEvent]):
    def failures(self) -> list[str]:
        return [event.facts["error"]["code"] for event in self if event.name == "failed"]


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def serving(source: Path, events: Events) -> Iterator[Serving]:
    with ckptkit.serve(source, name="m", names="live", listener=events.append) as serving:
        yield serving


def shard_of(source: Path) -> Path:
    return max(source.iterdir(), key=lambda path: path.stat().st_size)


def refusal(serving: Serving, key: str = KEY, **asked: Any) -> dict[str, Any]:
    with pytest.raises(ClientError) as raised:
        client_of(serving.environment).get_object(Bucket="ckptkit", Key=key, **asked)
    response: dict[str, Any] = raised.value.response
    return response


def change_in_place(shard: Path) -> None:
    flip_bit(shard, shard.stat().st_size - 5000, 4)


def test_a_body_is_broken_off_once_its_source_has_changed(
    serving: Serving, source: Path, events: Events
) -> None:
    body = client_of(serving.environment).get_object(Bucket="ckptkit", Key=KEY)["Body"]
    assert len(body.read(1 << 20)) == 1 << 20
    change_in_place(shard_of(source))
    with pytest.raises(BROKEN):
        body.read()
    response = refusal(serving)
    assert response["Error"]["Code"] == "InternalError"
    assert response["Error"]["Reason"] == "source-changed"
    assert "changed while it was served" in response["Error"]["Message"]
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert events.failures() == ["source-changed"]


def test_a_listener_that_fails_puts_nothing_into_a_body(source: Path) -> None:
    """As where events are written to a program that has ended."""

    def listen(event: ServeEvent) -> None:
        if event.name == "failed":
            raise BrokenPipeError

    options: Any = {"name": "m", "names": "live", "auth": False, "listener": listen}
    with ckptkit.serve(source, **options) as serving:
        expected = requests.get(f"{serving.url}/ckptkit/{KEY}", timeout=60).content
        with begin_and_take_nothing(serving) as connection:
            connection.settimeout(20)
            received = bytearray(connection.recv(1 << 20))
            change_in_place(shard_of(source))
            with suppress(ConnectionError):
                while data := connection.recv(1 << 20):
                    received += data
        body = bytes(received).partition(b"\r\n\r\n")[2]
        assert len(body) < len(expected)
        assert body == expected[: len(body)]
        answer = requests.get(f"{serving.url}/ckptkit/{KEY}", timeout=60)
        assert answer.status_code == 500


def test_a_source_that_changed_before_the_first_read_is_refused(
    serving: Serving, source: Path, events: Events
) -> None:
    change_in_place(shard_of(source))
    for _ in range(2):
        assert refusal(serving)["Error"]["Reason"] == "source-changed"
    assert events.failures() == ["source-changed"]
    with pytest.raises(ClientError):  # HEAD promises nothing that GET would not hold
        client_of(serving.environment).head_object(Bucket="ckptkit", Key=KEY)


def test_no_byte_of_a_damaged_record_is_served(source: Path, events: Events) -> None:
    flip_bit(shard_of(source), shard_of(source).stat().st_size // 2, 4)
    with ckptkit.serve(source, name="m", names="live", listener=events.append) as serving:
        client = client_of(serving.environment)
        # The header may be sent before the damage is found.
        with pytest.raises((*BROKEN, ClientError)):
            client.get_object(Bucket="ckptkit", Key=KEY, Range="bytes=0-")["Body"].read()
        for _ in range(3):
            assert refusal(serving)["Error"]["Reason"] == "checksum-mismatch"
        assert events.failures() == ["checksum-mismatch"]


# --- clients ---


def free_parts(serving: Serving) -> int:
    return serving._parts._parts._value


def begin_and_take_nothing(serving: Serving, sent: bytes = b"") -> socket.socket:
    """Asks for all bytes, or something else, and reads none of the answer."""
    split = urlsplit(serving.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((split.hostname, split.port))
    whole = f"GET /ckptkit/{KEY} HTTP/1.1\r\nHost: {split.netloc}\r\n\r\n".encode()
    connection.sendall(sent or whole)
    return connection


@pytest.fixture
def unsigned(saved: Path) -> Iterator[Serving]:
    with ckptkit.serve(saved, name="m", names="live", auth=False) as serving:
        yield serving


def test_clients_that_go_away_free_their_buffers(unsigned: Serving) -> None:
    whole = free_parts(unsigned)
    connections = [begin_and_take_nothing(unsigned) for _ in range(20)]
    wait_until(lambda: free_parts(unsigned) == 0)
    for connection in connections:
        connection.close()
    wait_until(lambda: free_parts(unsigned) == whole)
    answer = requests.get(f"{unsigned.url}/ckptkit/{KEY}", timeout=60)
    assert len(answer.content) == int(answer.headers["Content-Length"])


def test_clients_that_take_nothing_lose_their_connection(
    unsigned: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PATIENCE_SECONDS", 0.5)
    whole = free_parts(unsigned)
    connections = [begin_and_take_nothing(unsigned) for _ in range(20)]
    answer = requests.get(f"{unsigned.url}/ckptkit/{KEY}", timeout=60)  # waits behind them
    assert len(answer.content) == int(answer.headers["Content-Length"])
    wait_until(lambda: free_parts(unsigned) == whole)
    for connection in connections:
        connection.close()


@pytest.mark.slow
def test_clients_that_take_little_at_a_time_do_not_keep_buffers_that_others_wait_for(
    unsigned: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PATIENCE_SECONDS", 1.0)
    whole = free_parts(unsigned)
    slow = [begin_and_take_nothing(unsigned) for _ in range(20)]
    stop = threading.Event()

    def take_little(connection: socket.socket) -> None:
        with suppress(OSError):
            while not stop.wait(0.2) and connection.recv(64 << 10):
                pass

    threads = [threading.Thread(target=take_little, args=(one,)) for one in slow]
    for thread in threads:
        thread.start()
    try:
        answer = requests.get(f"{unsigned.url}/ckptkit/{KEY}", timeout=30)  # waits behind them
        assert len(answer.content) == int(answer.headers["Content-Length"])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for connection in slow:
            connection.close()
    wait_until(lambda: free_parts(unsigned) == whole)


def connect(url: str, sent: bytes = b"") -> socket.socket:
    split = urlsplit(url)
    connection = socket.create_connection((split.hostname, split.port), timeout=20)
    connection.sendall(sent)
    return connection


def receive_all(connection: socket.socket) -> bytes:
    """Returns what comes until the connection is closed."""
    received = bytearray()
    with suppress(ConnectionError):
        while data := connection.recv(1 << 20):
            received += data
    return bytes(received)


def is_closed(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"x")
    except TimeoutError:  # it takes no more at the moment
        return False
    except ConnectionError:
        return True
    return False


HEAD = b"GET /ckptkit HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
def impatient(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 1.0)
    with ckptkit.serve(saved, name="m", names="live", auth=False) as serving:
        yield serving


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n"], ids=["nothing", "half", "request"])
def test_a_connection_that_asks_for_nothing_is_closed(impatient: Serving, sent: bytes) -> None:
    with connect(impatient.url, sent) as connection:
        received = receive_all(connection)
        assert received.startswith(b"HTTP/1.1 200" if sent.endswith(b"\n\r\n") else b"")


def test_a_head_that_comes_slowly_is_not_waited_for(impatient: Serving) -> None:
    with connect(impatient.url, HEAD + b"X: ") as connection:
        wait_until(lambda: is_closed(connection), seconds=15)


def test_answers_that_nobody_takes_are_given_up(
    unsigned: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PATIENCE_SECONDS", 1.0)
    with begin_and_take_nothing(unsigned, HEAD + b"\r\n") as connection:
        connection.settimeout(0.5)
        with suppress(OSError):  # the server reads no more, or has closed it
            while True:
                connection.sendall((HEAD + b"\r\n") * 100)
        wait_until(lambda: is_closed(connection), seconds=15)
        assert unsigned.requests < 20_000  # as many answers as the kernel's buffers hold


@pytest.mark.slow
def test_connections_that_are_used_stay_open(impatient: Serving) -> None:
    with connect(impatient.url) as connection, begin_and_take_nothing(impatient) as slow:
        for _ in range(10):
            connection.sendall(b"HEAD /ckptkit HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            time.sleep(0.4)
        slow.settimeout(20)
        head, _, body = receive_all(slow).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head


def test_more_clients_than_buffers_all_get_their_bytes(saved: Path) -> None:
    with ckptkit.serve(
        saved, name="m", names="live", auth=False, workers=1, memory_budget="26MB"
    ) as serving:
        assert free_parts(serving) == 1
        sizes: list[int] = []

        def read() -> None:
            with requests.get(f"{serving.url}/ckptkit/{KEY}", stream=True, timeout=60) as answer:
                count = 0
                for piece in answer.iter_content(1 << 20):
                    count += len(piece)
                    time.sleep(0.002)
                sizes.append(count)

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        head = requests.head(f"{serving.url}/ckptkit/{KEY}", timeout=60)
        assert sizes == [int(head.headers["Content-Length"])] * 8
        assert free_parts(serving) == 1


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_server_that_ends_leaves_no_body_that_looks_whole(saved: Path, number: int) -> None:
    command = [sys.executable, "-m", "ckptkit_cli", "serve", str(saved), "--names", "live"]
    with started(
        [*command, "--name", "m", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        facts: dict[str, Any] = {}
        while facts.get("event") != "serving":
            facts = json.loads(process.stdout.readline())
        client = client_of(facts["environment"])
        body = client.get_object(Bucket="ckptkit", Key=KEY)["Body"]
        body.read(1 << 20)
        process.send_signal(number)
        with pytest.raises(BROKEN):
            body.read()
        assert process.wait(30) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    with pytest.raises(EndpointConnectionError):
        client.list_objects_v2(Bucket="ckptkit")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /ckptkit/../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /ckptkit/m/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /ckptkit/m/\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /ckptkit/m/%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"PUT /ckptkit/m/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nnot taken",
        b"\x16\x03\x01 is no request\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: \xff\xfe\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
)
def test_hostile_requests_are_refused_and_the_server_goes_on(
    unsigned: Serving, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    split = urlsplit(unsigned.url)
    with socket.create_connection((split.hostname, split.port), timeout=30) as connection:
        connection.sendall(sent)
        status = int(connection.recv(4096).split(b" ")[1])
    assert 400 <= status < 500
    assert requests.get(f"{unsigned.url}/ckptkit", timeout=60).status_code == 200
    # No client can fill the terminal. Other threads close clients of other tests.
    logged = [record for record in caplog.records if record.threadName == "ckptkit-serve"]
    assert not [record for record in logged if record.levelno >= logging.WARNING]
