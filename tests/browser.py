"""Headless Chromium, driven by its own chromedriver; a test that needs it skips where it is not.

Source: https://www.w3.org/TR/webdriver2/ (commands); https://chromedriver.chromium.org/capabilities
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

_PROGRAMS = ("chromium", "chromedriver")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's reference
_START_SECONDS = 30
KEYS = {
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Tab": "\ue004",
    "Backspace": "\ue003",
    "ArrowLeft": "\ue012",
    "ArrowUp": "\ue013",
    "ArrowRight": "\ue014",
    "ArrowDown": "\ue015",
    "End": "\ue010",
    "PageDown": "\ue00f",
}


class Browser:
    """One window. A script is the body of a function, and returns plain values."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, page: Path, anchor: str = "") -> None:
        self._post("/url", {"url": "about:blank"})
        self._post("/url", {"url": page.as_uri() + anchor})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def settle(self) -> None:
        """Waits for two frames, after which sizes and colours are drawn."""
        wait = (
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));"
        )
        self._post("/execute/async", {"script": wait, "args": []})

    def press(self, *keys: str) -> None:
        """Presses keys where the focus is; other texts are typed."""
        element = self._post(
            "/execute/sync", {"script": "return document.activeElement", "args": []}
        )
        text = "".join(KEYS.get(key, key) for key in keys)
        self._post(f"/element/{element[_ELEMENT]}/value", {"text": text})
        self.settle()

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)
        self.settle()

    def resize(self, width: int, height: int) -> None:
        self._post("/window/rect", {"width": width, "height": height})
        self.settle()

    def emulate(self, command: str, **values: Any) -> None:
        """Sends a command of the DevTools protocol, such as `Emulation.setEmulatedMedia`."""
        self._post("/goog/cdp/execute", {"cmd": command, "params": values})
        self.settle()

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Returns what was logged since the last call: `browser` for the console."""
        entries: list[dict[str, Any]] = self._post("/se/log", {"type": kind})
        return entries

    def requests(self) -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [
            message["params"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        # The browser's own first page goes on loading.
        return [one["request"]["url"] for one in sent if "chrome" not in one["documentURL"][:7]]

    def screenshot(self, out: Path) -> None:
        out.write_bytes(base64.b64decode(_call(f"{self._session}/screenshot")))

    def _post(self, path: str, values: dict[str, Any]) -> Any:
        return _call(self._session + path, values)


def _call(url: str, values: dict[str, Any] | None = None) -> Any:
    data = None if values is None else json.dumps(values).encode()
    request = Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=60) as answer:  # noqa: S310  of a driver on this machine
        return json.load(answer)["value"]


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with a new profile, and ends it."""
    found = {program: shutil.which(program) for program in _PROGRAMS}
    for program, path in found.items():
        if path is None:
            pytest.skip(f"{program} is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [str(found["chromedriver"]), f"--port={port}", "--log-level=OFF"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}/session"
        session = f"{address}/{_start(address, profile)}"
        try:
            yield Browser(session)
        finally:
            urlopen(Request(session, method="DELETE"), timeout=60).close()  # noqa: S310
    finally:
        driver.terminate()
        driver.wait(20)


def _start(address: str, profile: Path) -> str:
    options = {"args": [*_FLAGS, f"--user-data-dir={profile}"]}
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return str(_call(address, {"capabilities": {"alwaysMatch": wanted}})["sessionId"])
        except (URLError, ConnectionError):  # the driver is not listening yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
