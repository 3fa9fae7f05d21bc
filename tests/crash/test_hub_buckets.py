"""Buckets of the Hub as the place of outputs: what is visible is whole, whoever is interrupted."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import pytest

import ckptkit
from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    NotACheckpointError,
    OutputError,
    OutputExistsError,
    RefusedError,
    UsageError,
)
from ckptkit.storage.places import Place, open_source, open_target
from ckptkit.storage.remote.store import get_store
from tests.command_line import kill_command, run_command
from tests.files import contents
from tests.hub_models import consolidated, write_model
from tests.hub_server import TOKEN, HubServer
from tests.made_up_runs import save_step

BUCKET = "org/b"
BATCH = re.compile(f"POST /api/buckets/{BUCKET}/batch")


@pytest.fixture
def bucket(hub: HubServer) -> HubServer:
    hub.put_bucket(BUCKET)
    return hub


def place(hub: HubServer, path: str, **options: Any) -> Place:
    return Place(f"hf://buckets/{path}", {"endpoint": hub.url, "token": TOKEN, **options})


def there(hub: HubServer, folder: str) -> dict[str, bytes]:
    names = [name for name in hub.put_bucket(BUCKET).files if name.startswith(f"{folder}/")]
    return {name.removeprefix(f"{folder}/"): hub.read_bucket(BUCKET, name) for name in names}


def test_outputs_go_to_a_bucket_and_come_back_with_the_same_bytes(
    bucket: HubServer, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "checkpoint-30", names=12)
    out = place(bucket, f"{BUCKET}/models/a")
    ckptkit.consolidate(source, out, max_shard_size="2KB")
    with pytest.raises(OutputExistsError):
        ckptkit.consolidate(source, out)
    began = len(bucket.requests("batch"))
    ckptkit.consolidate(source, out, overwrite=True)
    assert ckptkit.verify(out).ok
    ckptkit.consolidate(source, tmp_path / "local")
    assert there(bucket, "models/a").keys() == contents(tmp_path / "local").keys()
    weights = "model.safetensors"
    assert there(bucket, "models/a")[weights] == (tmp_path / "local" / weights).read_bytes()
    # Each of the four files is sent, and the claim twice; the old manifest goes, the others are
    # copied at once, and the new one follows; what was replaced, what was sent and the claim go.
    assert len(bucket.requests("batch")) - began == 4 + 2 + 3 + 3
    ckptkit.consolidate(out, tmp_path / "back")
    assert (tmp_path / "back" / weights).read_bytes() == there(bucket, "models/a")[weights]
    # A listing of the same client shows what others have changed since.
    with open_source(out) as opened:
        assert "config.json" in set(opened.walk(0))
    ckptkit.consolidate(source, place(bucket, f"{BUCKET}/models/a/sub"))
    with open_source(out) as opened:
        assert "sub/ckptkit.json" in set(opened.walk(1))


def test_a_name_that_begins_alike_is_another_place(bucket: HubServer, tmp_path: Path) -> None:
    source = write_model(tmp_path / "checkpoint-30")
    ckptkit.consolidate(source, place(bucket, f"{BUCKET}/model-old"))
    ckptkit.consolidate(source, place(bucket, f"{BUCKET}/model"))
    with open_source(place(bucket, f"{BUCKET}/model")) as opened:
        assert set(opened.walk(3)) == there(bucket, "model").keys()
    assert ckptkit.verify(place(bucket, f"{BUCKET}/model-old")).ok


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 12))
def test_a_kill_leaves_the_old_output_or_none_or_the_new_one(
    bucket: HubServer,
    tmp_path: Path,
    number: int,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("kills", 1)
    old, new = (consolidated(tmp_path, seed=seed) for seed in (0, 1))
    url = f"hf://buckets/{BUCKET}/model"
    ckptkit.consolidate(old, place(bucket, f"{BUCKET}/model"))
    before = there(bucket, "model")
    left = iter(range(number - 1, -1, -1))

    def kill() -> None:
        if next(left, 1) == 0:
            kill_command()

    bucket.before.append((BATCH, kill))
    words = ("consolidate", new, url, "--overwrite")
    assert run_command(*words, **bucket.environment).returncode == -signal.SIGKILL
    bucket.before.clear()
    visible = there(bucket, "model")
    if "ckptkit.json" in visible:
        assert ckptkit.verify(place(bucket, f"{BUCKET}/model")).ok
        assert visible["model.safetensors"] in {
            before["model.safetensors"],
            (new / "model.safetensors").read_bytes(),
        }
    else:
        with pytest.raises(NotACheckpointError):
            ckptkit.verify(place(bucket, f"{BUCKET}/model"))
    done = run_command(*words, **bucket.environment)
    assert done.returncode == 0, done.stderr
    assert there(bucket, "model").keys() == before.keys()
    assert there(bucket, "model")["model.safetensors"] == (new / "model.safetensors").read_bytes()


def test_broken_connections_and_lost_answers_do_not_matter(
    bucket: HubServer, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "checkpoint-30")
    bucket.fail("POST .*/batch", ["drop", "lost", 503])
    bucket.fail("DELETE|POST .*/paths-info", ["lost"])
    bucket.fail("GET /buckets/", ["drop", 503])
    out = place(bucket, f"{BUCKET}/model")
    ckptkit.consolidate(source, out)
    assert ckptkit.verify(out).ok
    assert not [name for name in bucket.put_bucket(BUCKET).files if "/.ckptkit" in name]


def test_an_output_that_fails_leaves_nothing(bucket: HubServer, tmp_path: Path) -> None:
    source = write_model(tmp_path / "checkpoint-30")
    out = place(bucket, f"{BUCKET}/model")

    def take_away() -> None:
        stored = bucket.put_bucket(BUCKET).files
        for name in [name for name in stored if name.startswith("model/.ckptkit-") and "c" in name]:
            if name.endswith("config.json"):
                del stored[name]

    bucket.before.append((re.compile("POST .*/paths-info"), take_away))
    with pytest.raises(OutputError, match="another run has removed what this one had sent"):
        ckptkit.consolidate(source, out)
    assert bucket.put_bucket(BUCKET).files == {}
    bucket.before.clear()
    bucket.refused_paths.add("model/tokenizer.json")
    with pytest.raises(OutputError, match="Failed to apply 1 out of 3 operation"):
        ckptkit.consolidate(source, out)
    assert bucket.put_bucket(BUCKET).files == {}
    bucket.refused_paths.clear()
    target = open_target(out, overwrite=False)
    target.create("a", 3)
    target.write("a", 0, memoryview(b"abc"))
    assert len(bucket.put_bucket(BUCKET).files) == 1
    target.abandon()
    assert bucket.put_bucket(BUCKET).files == {}


def refusals(hub: HubServer) -> list[tuple[type[CkptkitError], str, str, Place]]:
    hub.put_bucket("other/b")
    hub.put_bucket("other/private", private=True)
    anonymous = {"token": False}
    create = "hf buckets create"
    return [
        (OutputError, "no such bucket", create, place(hub, "org/typo/model")),
        (OutputError, "no such bucket", create, place(hub, "other/private/model")),
        (AccessError, "401", "HF_TOKEN", place(hub, "other/private/model", **anonymous)),
        (AccessError, "where permission to write", "may write", place(hub, "other/b/model")),
        (UsageError, "no place in a bucket", "ORG/NAME/FOLDER", place(hub, "org")),
        (UsageError, "no place in a bucket", "no revisions", place(hub, "org/b@main/model")),
        (UsageError, "no place in a bucket", "ORG/NAME/FOLDER", place(hub, "org/b/a/../model")),
        (RefusedError, "nothing is written", "hf://buckets/", Place("hf://org/model")),
        (UsageError, "no storage was opened", "options", place(hub, "org/b/m", colour="red")),
    ]


def test_what_cannot_be_written_is_refused_with_what_to_do(
    bucket: HubServer, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "checkpoint-30")
    for kind, text, hint, out in refusals(bucket):
        with pytest.raises(kind, match=text) as caught:
            ckptkit.consolidate(source, out)
        assert hint in caught.value.hint, out
        assert TOKEN not in str(caught.value) + caught.value.hint
    with pytest.raises(RefusedError, match="whole bucket"):
        ckptkit.consolidate(source, place(bucket, BUCKET), overwrite=True)
    with pytest.raises(NotACheckpointError, match="no such bucket"):
        ckptkit.inspect(place(bucket, "org/typo/model"))
    bucket.roles["me"] = "read"
    try:
        with pytest.raises(AccessError, match="permission to write"):
            ckptkit.consolidate(source, place(bucket, f"{BUCKET}/model"))
    finally:
        bucket.roles.clear()
    assert bucket.put_bucket(BUCKET).files == {}


@pytest.mark.parametrize("is_hub", [True, False])
def test_a_whole_bucket_that_holds_files_is_refused_without_proposing_to_replace_it(
    bucket: HubServer, tmp_path: Path, *, is_hub: bool
) -> None:
    source = write_model(tmp_path / "checkpoint-30")
    whole = place(bucket, BUCKET) if is_hub else Place("memory://whole")
    ckptkit.consolidate(source, Place(f"{whole.location}/model", whole.options))
    with pytest.raises(OutputExistsError) as caught:
        ckptkit.consolidate(source, whole)
    assert ("prefix" in caught.value.hint) is is_hub
    assert ("--overwrite" in caught.value.hint) is not is_hub


def test_a_client_that_is_too_old_is_named_with_the_version_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(huggingface_hub.errors, "BucketBatchError")  # as before 1.33
    with pytest.raises(RefusedError, match=r"buckets need 1\.33 or later") as caught:
        get_store(Place("hf://buckets/org/old", {"endpoint": "http://127.0.0.1:1"}))
    assert "pip install 'huggingface_hub>=1.33'" in caught.value.hint


@pytest.mark.slow
def test_a_run_in_a_bucket_is_listed_pruned_and_watched_into_a_bucket(
    bucket: HubServer, tmp_path: Path
) -> None:
    run, store = tmp_path / "run", get_store(place(bucket, BUCKET))
    for step in (1, 2, 3):
        save_step(run, step, save_number=step)
    for name, data in contents(run).items():
        store.put_small(f"{BUCKET}/run/{name}", data)
    url = f"hf://buckets/{BUCKET}/run"
    pruned = run_command("prune", url, "--keep-last", "2", **bucket.environment)
    assert pruned.returncode == 0, pruned.stderr
    assert not there(bucket, "run/checkpoint-1")
    words = ("--once", "--weights-only", "--state", tmp_path / "state")
    versions = f"hf://buckets/{BUCKET}/versions"
    watched = run_command("watch", url, "--into", versions, *words, **bucket.environment)
    assert watched.returncode == 0, watched.stderr
    for number in (1, 2):
        assert ckptkit.verify(place(bucket, f"{BUCKET}/versions/weight_v{number:06}")).ok
    folders = run_command("watch", url, "--to-dir", versions, *words, **bucket.environment)
    assert "--into" in folders.stderr
