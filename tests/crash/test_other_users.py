"""What other users of the machine see of a run, and what they can have ckptkit do."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.conversion import naming_program
from ckptkit.conversion.naming_program import AnswerCache
from ckptkit.core.errors import OutputError
from ckptkit.hub.download import open_pull_folder
from ckptkit.runs.marks import take_request
from ckptkit.runs.push_journal import (
    WATCH_FOLDER,
    StepPush,
    journal_path,
    open_journal,
    take_watch_lock,
)
from ckptkit.storage.local.ownership import is_own, is_planted, make_private
from ckptkit.storage.local.target import LocalTarget, SharedTarget
from ckptkit.storage.locations import MARKS_FOLDER, hidden_name
from ckptkit.training import Checkpointer
from ckptkit.training.load import node_sharing
from ckptkit.training.save.staging import MemoryPlaces, SharedBuffer
from tests.command_line import started
from tests.other_user import NOBODY, as_nobody, can_be_read, needs_root, open_folder

pytestmark = [needs_root, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
NONCE = "0123456789abcdef"
SECRET = "5EKRET0a1b2c3d4e5f6"  # noqa: S105


@pytest.fixture
def everybody() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@contextmanager
def masked(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def plant(folder: Path, *names: str) -> None:
    """Makes a folder, and folders in it, that belong to another user and are open to all."""

    def make() -> None:
        os.umask(0)
        folder.mkdir()
        for name in names:
            (folder / name).mkdir()

    as_nobody(make)
    assert folder.stat().st_uid == NOBODY


def train_and_save(run: Path, **options: Any) -> None:
    state = {"model": torch.nn.Linear(3, 3)}
    with Checkpointer(run, **options) as checkpointer:
        checkpointer.save(1, state).wait(60)
        checkpointer.export(run.parent / f"{run.name}-model")


# --- folders that another user has made before ---


def test_the_work_folder_of_another_user_is_neither_resumed_nor_removed(everybody: Path) -> None:
    out, planted = everybody / "out", everybody / hidden_name("out", NONCE)
    plant(planted, "files", "old")
    as_nobody((planted / "parts").mkdir)
    as_nobody(lambda: (planted / "files/model.safetensors").write_bytes(b"x") and None)
    target = LocalTarget(out, resume=True)
    assert target.folder != planted
    target.abandon()
    assert not out.exists()  # nor is its "previous output" put in place
    ckptkit.consolidate(STEP, out, resume=True)
    assert out.stat().st_uid == 0
    assert (planted / "files/model.safetensors").read_bytes() == b"x"


def test_a_pull_does_not_continue_in_a_folder_of_another_user(
    everybody: Path, tmp_path: Path
) -> None:
    """Its `files` may lead anywhere, and a pull removes there what the repository lacks."""
    (tmp_path / "thesis.tex").write_text("years of work")
    planted = everybody / hidden_name("model", "pull")
    plant(planted)
    as_nobody(lambda: (planted / "files").symlink_to(tmp_path))
    with (
        pytest.raises(OutputError, match="belongs to another user"),
        open_pull_folder(everybody / "model") as folder,
    ):
        folder.prepare({})
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_link_that_another_user_made_is_not_followed_by_a_pull(
    everybody: Path, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/thesis.tex").write_text("years of work")
    as_nobody(lambda: (everybody / hidden_name("model", "pull")).symlink_to(tmp_path))
    with (
        pytest.raises(OutputError, match="belongs to another user"),
        open_pull_folder(everybody / "model") as folder,
    ):
        folder.prepare({})
    assert (tmp_path / "files/thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("is_link", [False, True])
def test_an_output_is_not_written_where_another_user_waits_for_it(
    everybody: Path, tmp_path: Path, is_link: bool
) -> None:
    out = everybody / "out"
    (tmp_path / "mine").mkdir()
    if is_link:
        as_nobody(lambda: out.symlink_to(tmp_path / "mine"))
    else:
        plant(out)
    writes: list[Callable[[], Any]] = [
        lambda: ckptkit.consolidate(STEP, out),
        lambda: ckptkit.consolidate(STEP, out, overwrite=True),
        lambda: SharedTarget(out, NONCE),
        lambda: open_pull_folder(out).__enter__(),
        lambda: Checkpointer(tmp_path / "run", local=out),
    ]
    for write in writes:
        with pytest.raises(OutputError, match="belongs to another user"):
            write()
    assert not [path for path in out.iterdir() if path.name != MARKS_FOLDER]


def test_slices_do_not_meet_in_a_folder_of_another_user(everybody: Path) -> None:
    planted = everybody / hidden_name("out", NONCE)
    plant(planted, "files")
    with pytest.raises(OutputError, match="belongs to another user"):
        SharedTarget(everybody / "out", NONCE)
    assert [path.name for path in planted.iterdir()] == ["files"]


def test_a_folder_of_the_owner_of_the_directory_is_taken(everybody: Path) -> None:
    """Such as one that the administrator has made on a node's disk, with the sticky bit."""
    os.chown(everybody, NOBODY, NOBODY)
    plant(everybody / "out")
    assert not is_planted(everybody / "out")
    ckptkit.consolidate(STEP, everybody / "out")
    assert (everybody / "out/config.json").exists()


def test_a_folder_of_another_user_without_the_sticky_bit_is_taken(tmp_path: Path) -> None:
    """All who may write there can replace everything anyway, as in the directory of a team."""
    (tmp_path / "out").mkdir()
    os.chown(tmp_path / "out", NOBODY, NOBODY)
    ckptkit.consolidate(STEP, tmp_path / "out")
    assert (tmp_path / "out/config.json").exists()


def test_files_that_a_mount_stores_as_those_of_one_user_are_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_private(tmp_path / "work")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)  # NFS stores files of root as nobody's
    assert is_own(tmp_path / "work")


def test_a_run_that_another_user_made_is_warned_about(
    everybody: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant(everybody / "run")
    train_and_save(everybody / "run")
    assert "belongs to another user, who can replace its steps" in caplog.text


def test_state_is_not_written_through_a_link(everybody: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    path = journal_path(everybody, "org/name")
    as_nobody(lambda: path.with_name(f".{path.name}").symlink_to(tmp_path / "thesis.tex"))
    journal, _ = open_journal(everybody, "org/name", "run")
    journal.note(StepPush(1, "digest", "pushing", "org/name"))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert json.loads(path.read_bytes())["steps"].keys() == {"1"}


def test_the_state_of_a_watch_outside_the_run_is_private(everybody: Path) -> None:
    """Models are built there, of runs that may be private."""
    run = everybody / "run" / WATCH_FOLDER
    take_watch_lock(everybody / "a/state", run).close()
    assert not can_be_read(everybody / "a/state")
    assert can_be_read(run)  # who may read the run sees which steps were pushed
    plant(everybody / "planted")
    with pytest.raises(OutputError, match="belongs to another user"):
        take_watch_lock(everybody / "planted", run)


def test_a_pipe_in_place_of_a_request_does_not_stop_the_training(tmp_path: Path) -> None:
    (tmp_path / MARKS_FOLDER).mkdir()
    os.mkfifo(tmp_path / MARKS_FOLDER / "save-now")
    began = time.monotonic()
    request = take_request(tmp_path)
    assert request is not None
    assert str(request) == "an unknown process"
    assert time.monotonic() - began < 5


# --- what other users can read ---


@pytest.mark.slow
def test_an_output_is_hidden_until_its_commit(everybody: Path) -> None:
    """The directory may be private, and be replaced by the commit."""
    out = everybody / "out"
    make_private(out)
    for target in (LocalTarget(out), SharedTarget(out, NONCE)):
        target.create("model.safetensors", 4)
        target.write("model.safetensors", 0, memoryview(b"1234"))
        assert not can_be_read(target.folder)
        assert not can_be_read(target.folder / "files/model.safetensors")
        target.abandon()
    with open_pull_folder(out) as folder:
        (folder.files / "model.safetensors").write_bytes(b"1234")
        assert not can_be_read(folder.files)
    ckptkit.consolidate(STEP, out)
    assert not can_be_read(out / "config.json")
    ckptkit.consolidate(STEP, everybody / "other")
    assert can_be_read(everybody / "other/config.json")


@pytest.mark.parametrize("mask", [0o022, 0o077])
@pytest.mark.quick("18")
def test_files_have_the_permissions_that_the_umask_leaves(everybody: Path, mask: int) -> None:
    """Those of the processes that write and upload, too."""
    with masked(mask):
        ckptkit.consolidate(STEP, everybody / "out")
        train_and_save(everybody / "run", local=everybody / "local")
    for top in ("out", "run", "run-model"):
        for path in [everybody / top, *(everybody / top).rglob("*")]:
            most = (0o777 if path.is_dir() else 0o666) & ~mask
            assert not stat.S_IMODE(path.stat().st_mode) & ~most, path
            assert path.stat().st_uid == 0
    assert can_be_read(everybody / "out") is (mask == 0o022)
    assert not can_be_read(everybody / "local")  # on a node's disk, which all of its users see


def test_the_memory_of_a_save_has_no_name(everybody: Path) -> None:
    everywhere = MemoryPlaces(anonymous=False, memory_folder=everybody)
    on_disk = MemoryPlaces(anonymous=False, memory_folder=None, disk_folder=everybody)
    for places in (MemoryPlaces(), everywhere, on_disk):
        buffer = SharedBuffer(places)
        buffer.reserve(1 << 20)
        assert list(everybody.iterdir()) == []
        assert not can_be_read(Path(f"/proc/{os.getpid()}/fd/{buffer.descriptor}"))
        buffer.close()


def abstract_address(name: str) -> str:
    text = f"{node_sharing._FORM} {os.geteuid()} {name}"
    return "\0ckptkit-" + blake2b(text.encode(), digest_size=16).hexdigest()


def test_the_memory_of_a_node_is_not_given_to_other_users() -> None:
    name = uuid.uuid4().hex
    memory = node_sharing.join_node(name)
    assert memory is not None
    try:
        address = abstract_address(name)

        def ask() -> int:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(20)
                client.connect(address)
                return len(socket.recv_fds(client, 1, 1)[1])

        assert as_nobody(ask) == 0
        assert not can_be_read(Path(f"/proc/{os.getpid()}/fd/{memory._descriptor}"))
        other = node_sharing.join_node(name)
        assert other is not None  # of this user
        other.close()
    finally:
        memory.close()


def test_memory_that_another_user_offers_is_not_taken() -> None:
    name = uuid.uuid4().hex
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "server = socket.socket(socket.AF_UNIX); server.bind(bytes.fromhex(sys.argv[1]))\n"
        "server.listen(); print('ready', flush=True); client, _ = server.accept()\n"
        "memory = os.memfd_create('x', os.MFD_ALLOW_SEALING)\n"
        "socket.send_fds(client, [b'0'], [memory]); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, abstract_address(name).encode().hex()]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        began = time.monotonic()
        assert node_sharing.join_node(name) is None  # each rank reads for itself
        assert time.monotonic() - began < 5
        process.kill()


# --- the cache ---


def test_the_cache_is_private_and_takes_nothing_of_other_users(
    everybody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming_program, "_MOST_ENTRIES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = AnswerCache({"model_type": "llama"})
    cache.keep(b"question", {"names": []})
    assert cache.read(b"question") == {"names": []}
    folder = tmp_path / "cache" / naming_program._FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (entry,) = folder.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    os.chown(entry, NOBODY, NOBODY)
    assert cache.read(b"question") is None

    (tmp_path / "thesis").mkdir()
    for number in range(3):
        (tmp_path / f"thesis/{number}.tex").write_text("years of work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(everybody))
    planted = everybody / naming_program._FOLDER
    plant(planted.parent)
    as_nobody(lambda: planted.symlink_to(tmp_path / "thesis"))
    cache.keep(b"question", {"names": []})
    assert len(list((tmp_path / "thesis").iterdir())) == 3


# --- processes ---


def words_of(process: int) -> str:
    """Returns the command line of a process, and of those that it started, as others see it."""

    def read() -> str:
        lines = []
        for folder in Path("/proc").iterdir():
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                if folder.name == str(process) or status[1] == str(process):
                    lines.append((folder / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
        return "\n".join(lines)

    return str(as_nobody(read))


@pytest.mark.parametrize("words", [[], ["--access-key", "AK", "--secret-key-from", "MY_KEY"]])
@pytest.mark.quick("words1")
def test_the_list_of_processes_shows_no_key_of_a_server(words: list[str]) -> None:
    command = [sys.executable, "-m", "ckptkit_cli", "serve", str(STEP), *words, "--json"]
    with started(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"MY_KEY": SECRET}
    ) as process:
        assert process.stdout is not None
        shown: dict[str, Any] = {}
        while shown.get("event") != "serving":
            shown = json.loads(process.stdout.readline())
        key = shown["environment"]["AWS_SECRET_ACCESS_KEY"]
        assert not words or key == SECRET
        seen = words_of(process.pid)
        assert "serve" in seen
        assert key not in seen
        assert not can_be_read(Path(f"/proc/{process.pid}/environ"))
        process.kill()


def test_values_of_tensors_are_not_left_in_temporary_folders(everybody: Path) -> None:
    code = (
        "import sys, numpy as np, safetensors.numpy, ckptkit\n"
        "from pathlib import Path; folder = Path(sys.argv[1])\n"
        "(folder / 'in').mkdir(mode=0o700)\n"
        "safetensors.numpy.save_file({'w': np.full(1 << 16, 7, np.uint8)},"
        " folder / 'in/model.safetensors')\n"
        "ckptkit.convert(folder / 'in', folder / 'out', to='dcp')\n"
    )
    (everybody / "tmp").mkdir(mode=0o1777)
    subprocess.run(
        [sys.executable, "-c", code, str(everybody)],
        check=True,
        env=os.environ | {"TMPDIR": str(everybody / "tmp")},
    )
    assert list((everybody / "tmp").iterdir()) == []
    assert np.all(np.fromfile(everybody / "in/model.safetensors", np.uint8)[-100:] == 7)
