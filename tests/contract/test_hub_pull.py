"""Pulling from a Hub with the unmodified client: whole and proven, or not at all."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    HubError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
    RefusedError,
    UnsafePathError,
    VerificationError,
)
from ckptkit.engine.outcome import BytesWritten, Event
from ckptkit.hub import Pulled, pull, push
from ckptkit.hub import download as partial_module
from ckptkit.hub.download import open_pull_folder
from ckptkit.storage.local import workdir
from tests.files import flip_bit
from tests.hub_models import consolidated
from tests.hub_server import TOKEN, HubServer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # what the client's own client says of its PUTs
)
Pull = Callable[..., Pulled]
XET = True
WEIGHTS = "HEAD .*/resolve/.*safetensors"
TOKENIZER = "(GET|HEAD) .*/resolve/.*/tokenizer.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return consolidated(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hub(hub: HubServer, model: Path) -> HubServer:
    """A Hub that holds the model, at the tag `step-30`."""
    push(model, "me/model", tag="step-30", token=TOKEN, endpoint=hub.url)
    hub.log.clear()
    return hub


@pytest.fixture
def pulls(hub: HubServer) -> Pull:
    def run(folder: Path, repo_id: str = "me/model", **options: object) -> Pulled:
        options = {"token": TOKEN, "endpoint": hub.url} | options
        return pull(repo_id, folder, **options)  # type: ignore[arg-type]

    return run


def failed(pulls: Pull, folder: Path, kind: type[CkptkitError], **options: object) -> CkptkitError:
    with pytest.raises(kind) as raised:
        pulls(folder, **options)
    assert not folder.exists()
    return raised.value


def interrupt(hub: HubServer, pulls: Pull, out: Path) -> None:
    """Lets a pull fail at the tokenizer, not before the weights are asked for."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not hub.requests(WEIGHTS) and time.monotonic() < deadline:
            time.sleep(0.005)

    hub.before.append((re.compile(TOKENIZER), wait))
    hub.fail(TOKENIZER, [404])
    failed(pulls, out, HubError)
    hub.before.clear()


@pytest.mark.parametrize("hub_server", [True, False], ids=["xet", "lfs"], indirect=True)
def test_a_pulled_model_is_what_was_pushed_and_training_can_start_from_it(
    hub: HubServer, pulls: Pull, model: Path, tmp_path: Path
) -> None:
    hub.put("me/model", {"later.md": b"after the tag"})
    out = tmp_path / "new" / "model"
    pulled = pulls(out, revision="step-30")
    assert (pulled.commit, pulled.tensors) == (hub.repo("me/model").tags["step-30"], 4)
    assert sorted(path.name for path in out.iterdir()) == sorted(pulled.files)
    assert ckptkit.verify(out).ok
    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    ckptkit.convert(out, tmp_path / "dcp", to="dcp")
    assert ckptkit.diff(model, tmp_path / "dcp").same
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_a_folder_that_holds_something_is_not_touched(pulls: Pull, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(OutputExistsError):
        pulls(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_pull_into_the_current_directory_fills_it_and_goes_on_after_half_a_commit(
    pulls: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"
    out.mkdir()
    monkeypatch.chdir(out)
    place_all = workdir._place_all

    def stop(*arguments: Any) -> None:
        place_all(*arguments)
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(workdir, "_place_all", stop)
        patch.setattr(workdir, "_take_back", lambda *_: None)  # as if it were killed
        with pytest.raises(OutputError):
            pulls(Path())
    assert "model.safetensors" in os.listdir()  # noqa: PTH208  of where the process is
    assert "ckptkit.json" not in os.listdir()  # noqa: PTH208
    pulled = pulls(Path())
    assert sorted(os.listdir()) == sorted(pulled.files)  # noqa: PTH208
    assert ckptkit.verify(out).ok
    assert list(tmp_path.iterdir()) == [out]


def test_a_pull_goes_on_where_it_was_interrupted(
    hub: HubServer, pulls: Pull, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    interrupt(hub, pulls, out)
    assert hub.requests(WEIGHTS)
    hub.log.clear()
    pulls(out)
    assert not hub.requests(WEIGHTS)
    assert ckptkit.verify(out).ok
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_was_damaged_since_the_interruption_is_brought_again(
    hub: HubServer, pulls: Pull, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    interrupt(hub, pulls, out)
    (kept,) = tmp_path.rglob("model.safetensors")
    flip_bit(kept, -1)
    pulls(out)
    assert ckptkit.verify(out).ok


def test_bytes_that_the_hub_has_another_hash_for_are_refused(
    pulls: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = HubServer.content
    monkeypatch.setattr(HubServer, "content", lambda self, blob: content(self, blob)[:-1] + b"?")
    error = failed(pulls, tmp_path / "model", VerificationError)
    assert "another hash here than on the Hub" in str(error)


def test_weights_that_somebody_replaced_at_the_hub_are_told(
    hub: HubServer, pulls: Pull, tmp_path: Path
) -> None:
    weights = bytearray(hub.read("me/model", "model.safetensors"))
    weights[-1] ^= 1
    hub.put("me/model", {"model.safetensors": bytes(weights)})
    assert "than the manifest" in str(failed(pulls, tmp_path / "model", VerificationError))


def test_a_configuration_that_somebody_edited_at_the_hub_is_taken_and_told(
    hub: HubServer, pulls: Pull, tmp_path: Path
) -> None:
    hub.put("me/model", {"config.json": b'{"model_type": "llama", "edited": true}'})
    pulled = pulls(tmp_path / "model")
    assert pulled.notes == ("config.json was changed on the Hub after it was pushed",)
    assert b"edited" in (tmp_path / "model" / "config.json").read_bytes()


def test_a_repository_that_others_made_is_proven_by_the_hubs_hashes_alone(
    hub: HubServer, pulls: Pull, tmp_path: Path
) -> None:
    weights = hub.read("me/model", "model.safetensors")
    hub.put("other/open", {"model.safetensors": weights, "a/b.txt": b"x", "empty": b""})
    pulled = pulls(tmp_path / "model", "other/open")
    assert pulled.tensors == 0
    assert (tmp_path / "model" / "a" / "b.txt").read_bytes() == b"x"


def test_names_that_lead_out_of_the_folder_are_refused(
    hub: HubServer, pulls: Pull, tmp_path: Path
) -> None:
    hub.put("other/evil", {"../outside.txt": b"x"})
    failed(pulls, tmp_path / "model", UnsafePathError, repo_id="other/evil")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_brought(
    hub: HubServer, pulls: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_module, "free_bytes", lambda _path: 100)
    failed(pulls, tmp_path / "model", NoSpaceError)
    assert not hub.requests("/resolve/")
    assert list(tmp_path.iterdir()) == []


def test_two_pulls_do_not_write_to_one_place(pulls: Pull, tmp_path: Path) -> None:
    with open_pull_folder(tmp_path / "model"):
        failed(pulls, tmp_path / "model", RefusedError)
    pulls(tmp_path / "model")


def test_absent_revisions_and_repositories_are_told_apart(
    pulls: Pull, tmp_path: Path, hub: HubServer
) -> None:
    assert "no such revision" in str(failed(pulls, tmp_path / "m", HubError, revision="step-31"))
    assert "does not exist" in str(failed(pulls, tmp_path / "m", HubError, repo_id="me/none"))
    hub.fail("GET .*/revision/", [503, "drop", 429], {"Retry-After": "0"})
    assert re.fullmatch("[0-9a-f]{40}", pulls(tmp_path / "m").commit)


@pytest.mark.parametrize("progress", [True, False])
def test_a_push_and_a_pull_show_progress_beside_the_listener_of_their_user(
    hub: HubServer, pulls: Pull, model: Path, tmp_path: Path, progress: bool
) -> None:
    shown: dict[str, set[bool]] = {"push": set(), "pull": set()}

    def hear(name: str, event: Event) -> None:
        if isinstance(event, BytesWritten):
            names = {thread.name for thread in threading.enumerate()}
            shown[name].add("ckptkit-progress" in names)

    how = {"token": TOKEN, "endpoint": hub.url, "progress": progress}
    push(model, "me/other", listener=partial(hear, "push"), **how)  # type: ignore[arg-type]
    pulls(tmp_path / "out", listener=partial(hear, "pull"), progress=progress)
    assert shown == {"push": {progress}, "pull": {progress}}
