"""`ckptkit.training.dcp` at URLs on real ranks, beside torch's own functions."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.storage.places import Place
from tests.files import mounted, tmpfs
from tests.object_store import Fault, ObjectStore

SCRIPT = Path(__file__).with_name("dcp_urls_run.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def place(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Place:
    """A bucket of the test, which the ranks know; they stage in a folder of the test."""
    bucket = object_store.bucket(request.node.originalname.replace("_", "-")[-60:])
    (tmp_path / "store.json").write_text(json.dumps([bucket.url, object_store.options]))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return Place(bucket.url, object_store.options)


@pytest.mark.usefixtures("place")
def test_steps_at_urls_are_those_of_torch(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "same", "damage", "folders")


@pytest.mark.usefixtures("place")
def test_a_rank_that_fails_fails_on_all_and_full_disks_name_what_to_set(
    run_ranks: Callable[..., Any], object_store: ObjectStore, tmp_path: Path
) -> None:
    object_store.proxy.fail(r"(PUT|POST) .*/refused/.*__1_0", 403, "AccessDenied", times=None)
    with mounted(tmp_path / "disk", *tmpfs("1m")):
        run_ranks(SCRIPT, 2, tmp_path, "faults")


@pytest.mark.usefixtures("place")
def test_odd_urls_lost_folders_and_a_rank_without_a_store(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "readers", "places")


def test_a_kill_in_an_upload_leaves_no_step_and_the_next_save_clears_up(
    run_ranks: Callable[..., Any], place: Place, object_store: ObjectStore, tmp_path: Path
) -> None:
    proxy, folder = object_store.proxy, tmp_path / "dies_uploading"

    def kill() -> None:
        for rank in (0, 1):
            with suppress(ProcessLookupError):
                os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)

    proxy.add(Fault(r"(PUT|POST) .*/step-2/__1_0.distcp.*partNumber=2", before=kill, status=500))
    run_ranks(SCRIPT, 2, tmp_path, "dies_uploading", torchrun=True, status=None)
    run = place.beside(f"{place}/dies_uploading")
    assert ckptkit.verify(run.beside(f"{run}/step-1")).ok
    bucket = object_store.bucket(place.inner_path)
    left = {key.rpartition("/")[2] for key in bucket.keys("dies_uploading/step-2/")}
    assert not left & {".metadata", "ckptkit.json"}, left
    assert list((tmp_path / "tmp").glob(".saves*/files/step-2"))
    run_ranks(SCRIPT, 2, tmp_path, "dies_uploading", torchrun=True)
    assert ckptkit.verify(run.beside(f"{run}/step-2")).ok
    assert bucket.unfinished_uploads() == []
    assert list((tmp_path / "tmp").glob(".saves*")) == []
