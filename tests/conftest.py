"""What every test shares: where the real checkpoints lie, and settings for generated input."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import certifi
import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings

from ckptkit.conversion import naming_program
from ckptkit.conversion.naming_program import NamingProgram
from ckptkit.storage.local.disk import OpenFile
from tests.command_line import ENTRIES, answer_question, close_host
from tests.forked_writers import forked_writers
from tests.hub_server import TOKEN, HubServer
from tests.object_store import ObjectStore, running_object_store
from tests.ranks import RankHost, RunRanks, make_runner
from tests.s3_client import keep_parsed
from tests.sampled import leave_slow
from tests.this_checkout import refuse_others

refuse_others()

ROOT = Path(__file__).resolve().parents[1]
# Else each of the many processes that tests start would compile ckptkit anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Else DeepSpeed, which accelerate imports if it is installed, prints what it takes the machine for.
os.environ["DS_ACCELERATOR"] = "cpu"
sys.dont_write_bytecode = False
gc.disable()  # until all is imported, most of which stays: see `pytest_collection_finish`

END = "-----END CERTIFICATE-----\n"
LEFT_OPEN: list[str] = []
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A shell in the background ignores SIGINT, and nohup SIGHUP; commands of tests would do so too.
for number in HANDLED:
    if signal.getsignal(number) is signal.SIG_IGN:
        usual = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)

# Machines that run tests are shared and slow by turns: a deadline would fail for no fault of
# ours. A failing example is printed so that it can be replayed anywhere.
settings.register_profile("ckptkit", deadline=None, print_blob=True)
settings.load_profile("ckptkit")


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def real_checkpoints() -> Path:
    """The folder of small checkpoints that real frameworks wrote, one subfolder per case."""
    return ROOT / "fixtures"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach a network by accident."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for what transformers has answered, one for all processes of the tests."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        yield shared / "cache"


@pytest.fixture(scope="session", autouse=True)
def asked_here() -> Iterator[None]:
    """Answers what transformers is asked in this process, which saves its import each time.

    Tests that replace the program have processes of their own.
    """
    start = NamingProgram.ask
    usual = naming_program._PROGRAM

    def ask(program: NamingProgram, question: bytes) -> Future[bytes]:
        if usual != naming_program._PROGRAM or program._entry not in ENTRIES:
            return start(program, question)
        future: Future[bytes] = Future()
        future.set_result(answer_question(program._entry, question))
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamingProgram, "ask", ask)
        yield


@pytest.fixture(scope="session", autouse=True)
def parsed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spares clients of S3 what each of them would parse again.

    All certificates of the system are of that kind too: no server of the tests has one.
    """
    certificate, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(END)
    certificates = tmp_path_factory.mktemp("certificates") / "one.pem"
    certificates.write_text(certificate + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_CA_BUNDLE", str(certificates))
        keep_parsed(patch.setattr)
        yield


@pytest.fixture(scope="session", autouse=True)
def noted_collections() -> Iterator[None]:
    """Notes which files the garbage collector closes: nothing else closed them.

    Python warns of files that it closes itself. It is silent where it ends a generator that was
    never finished, whose with-block then closes its files.
    """
    close, collecting = OpenFile.close, 0

    def note(phase: str, _info: dict[str, int]) -> None:
        nonlocal collecting
        collecting = threading.get_ident() if phase == "start" else 0

    def close_noted(file: OpenFile) -> None:
        if collecting == threading.get_ident() and not file._file.closed:
            LEFT_OPEN.append(str(file.find_place()))
        close(file)

    gc.callbacks.append(note)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenFile, "close", close_noted)
        yield
        gc.collect()
    gc.callbacks.remove(note)
    check_left_open()


@pytest.fixture(autouse=True)
def closed_files() -> Iterator[None]:
    """No test may leave files to the garbage collector, which closes them during another test."""
    yield
    check_left_open()


@pytest.fixture(scope="module", autouse=True)
def closed_checkpointers() -> Iterator[None]:
    """No file of tests may leave a Checkpointer open during those of another."""
    yield
    if door := sys.modules.get("ckptkit.training.dcp"):  # whose sessions end with the program
        assert door.close_all() == []
    threads = {thread.name for thread in threading.enumerate()}
    assert not threads & {"ckptkit-saver", "ckptkit-requests"}, "these tests left one open"


@pytest.fixture(scope="session", autouse=True)
def command_host() -> Iterator[None]:
    yield
    close_host()


@pytest.fixture(scope="session", autouse=True)
def writers() -> Iterator[None]:
    with forked_writers():
        yield


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """Runs a script on several ranks; see `make_runner`."""
    host = RankHost()
    yield make_runner(host)
    host.close()


@pytest.fixture(scope="session")
def running_store() -> Iterator[ObjectStore]:
    """One S3 server for all tests of this process; tests take `object_store` instead."""
    with running_object_store() as store:
        yield store


@pytest.fixture
def memory_disk() -> Iterator[Path]:
    """A folder where syncing costs nothing, so that hundreds of saves can be tried."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that a test starts."""
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return processes


@pytest.fixture
def object_store(running_store: ObjectStore) -> ObjectStore:
    """An S3 server behind a proxy that counts, and misbehaves on request; see `ObjectStore`."""
    running_store.proxy.reset()
    return running_store


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Commands that a test runs in its own process handle signals; the next test gets none."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


def check_left_open() -> None:
    left = [LEFT_OPEN.pop() for _ in range(len(LEFT_OPEN))]
    assert not left, f"this test or an earlier one left files open: {left}"


@pytest.hookimpl(trylast=True)  # once those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first: what is quick then fills the gaps to the end.

    The pages are the first of them: no other file takes as long.
    """
    slow = {
        item.path
        for item in items
        if any(item.get_closest_marker(name) for name in ("distributed", "slow"))
    }
    items.sort(key=lambda item: (item.path not in slow, item.path.name != "test_pages.py"))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Marks the cases of a test slow but for those that its mark `quick` has."""
    found = yield
    if isinstance(found, list):
        leave_slow([one for one in found if isinstance(one, pytest.Function)])
    return found


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out what holds no tests; a search for doctests would import every program."""
    is_program = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return is_program or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Looks for doctests in the package alone: in each module of tests it takes long."""
    found = yield
    if not file_path.is_relative_to(ROOT / "tests"):
        return found
    return [one for one in found if not isinstance(one, DoctestModule)]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="module")
def hub_server(request: pytest.FixtureRequest) -> Iterator[HubServer]:
    """A Hub for the tests of a module; with `XET`, or as a parameter, it has the Xet store."""
    from tests.hub_models import running_hub

    with running_hub(xet=getattr(request, "param", getattr(request.module, "XET", False))) as hub:
        yield hub


@pytest.fixture
def hub(hub_server: HubServer) -> HubServer:
    """That Hub, empty."""
    hub_server.clear()
    return hub_server


@pytest.fixture
def own_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """That Hub, as it is for a process whose environment names it and its token."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub
