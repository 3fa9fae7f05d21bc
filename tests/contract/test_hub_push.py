"""Pushing to a Hub with the unmodified client: what arrives, what does not, what goes wrong."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    HubError,
    IncompleteCheckpointError,
    InputError,
    RefusedError,
    UsageError,
    VerificationError,
)
from ckptkit.hub import Pushed, pull, push
from tests.files import flip_bit
from tests.hub_models import consolidated, write_model
from tests.hub_server import TOKEN, HubServer
from tests.sampled import sampled

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # what the client's own client says of its PUTs
)
SOON = {"Retry-After": "0"}
XET = True
Push = Callable[..., Pushed]


both_ways = pytest.mark.parametrize("hub_server", [True, False], ids=["xet", "lfs"], indirect=True)


@pytest.fixture
def pushes(hub: HubServer) -> Push:
    def run(folder: Path | str, repo_id: str = "me/model", **options: object) -> Pushed:
        options = {"token": TOKEN, "endpoint": hub.url} | options
        return push(folder, repo_id, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return consolidated(tmp_path_factory.mktemp("model"))


def refused(
    pushes: Push,
    folder: Path | str,
    kind: type[CkptkitError],
    repo: str = "me/model",
    **options: object,
) -> CkptkitError:
    with pytest.raises(kind) as raised:
        pushes(folder, repo, **options)
    told = f"{raised.value} {raised.value!r} {getattr(raised.value, '__notes__', '')}"
    assert TOKEN not in told
    return raised.value


@both_ways
def test_a_model_becomes_one_private_commit_with_a_tag(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    (model / "notes.txt").write_text("private")
    pushed = pushes(model, tag="step-30")
    repo = hub.repo("me/model")
    assert repo.private
    assert [commit.message for commit in repo.commits] == ["Push step 30 with ckptkit"]
    assert repo.tags == {"step-30": pushed.commit} == {"step-30": repo.head().oid}
    assert [skipped.path for skipped in pushed.skipped] == ["notes.txt"]
    assert set(repo.files()) == set(pushed.uploaded)
    weights = hub.read("me/model", "model.safetensors")
    assert weights == (model / "model.safetensors").read_bytes()


def test_nothing_of_this_machine_is_in_what_is_published(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    pushed = pushes(model)
    for path in pushed.uploaded:
        data = hub.read("me/model", path)
        for private in (str(model.parent), "/home/alice", os.uname().nodename, TOKEN):
            assert private.encode() not in data
    manifest = json.loads(hub.read("me/model", "ckptkit.json"))
    assert manifest["source"]["path"] == "checkpoint-30"
    card = hub.read("me/model", "README.md").decode()
    assert "| Step | 30 |" in card
    assert "library_name: transformers" in card


@both_ways
def test_a_push_done_again_reads_and_compares_and_sends_nothing(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    first = pushes(model, tag="step-30")
    sent = hub.sent_bytes()
    again = pushes(model, tag="step-30")
    assert (again.commit, again.uploaded, again.bytes_uploaded) == (first.commit, (), 0)
    assert hub.sent_bytes() == sent
    assert len(hub.repo("me/model").commits) == 1


@pytest.mark.parametrize("fault", sampled([429, 503, "drop", "lost"], [503, "lost"]))
@pytest.mark.parametrize("request_", ["POST .*commit/main", "POST .*tag/", "POST .*repos/create"])
def test_one_fault_anywhere_makes_no_second_commit(
    hub: HubServer, pushes: Push, model: Path, fault: int | str, request_: str
) -> None:
    hub.fail(request_, [fault], SOON)  # type: ignore[list-item]
    pushed = pushes(model, tag="step-30")
    repo = hub.repo("me/model")
    assert [commit.oid for commit in repo.commits] == [pushed.commit]
    assert repo.tags == {"step-30": pushed.commit}


def test_a_storm_of_429_is_waited_out_as_long_as_the_hub_asks(
    hub: HubServer, pushes: Push, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("POST .*/commit/", [429] * 5, {"Retry-After": "0"})
    with caplog.at_level(logging.WARNING, "ckptkit"):
        pushes(model)
    assert len(hub.repo("me/model").commits) == 1
    assert caplog.text.count("answered 429; retrying in 0.0 s") == 5
    assert TOKEN not in caplog.text


def test_a_429_that_asks_to_wait_too_long_is_an_error_with_the_wait(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    hub.fail("POST .*/commit/", [429], {"Retry-After": "3600"})
    error = refused(pushes, model, HubError)
    assert "answered 429 and asks to wait 3600 s" in str(error)
    assert len(hub.requests("^POST .*/commit/")) == 1


@both_ways
def test_a_hub_that_stays_busy_is_an_error_and_what_was_sent_is_not_sent_again(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    folder = consolidated(tmp_path, seed=1)
    hub.fail("POST .*/commit/", [503] * 7, SOON)
    error = refused(pushes, folder, HubError)
    assert error.exit_status == 7
    assert "answered 503, 7 times" in str(error)
    sent = hub.sent_bytes()
    assert sent > 0
    assert not hub.repo("me/model").commits
    hub.log.clear()
    pushes(folder)
    assert hub.sent_bytes() == sent
    assert not hub.requests("^PUT ")


def test_a_commit_by_somebody_else_meanwhile_is_kept(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    hub.put("me/model", {"model.safetensors.index.json": b"{}"})
    done: list[bool] = []

    def intrude() -> None:
        if not done:
            done.append(True)
            hub.put("me/model", {"theirs.md": b"hello", "pytorch_model.bin": b"old"})

    hub.before.append((re.compile("POST .*/commit/"), intrude))
    pushed = pushes(model)
    assert "theirs.md" in hub.repo("me/model").files()
    assert pushed.deleted == ("model.safetensors.index.json", "pytorch_model.bin")
    assert len(hub.repo("me/model").commits) == 3


def test_a_lost_answer_is_found_below_a_commit_of_somebody_else(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    hub.fail("POST .*/commit/", ["lost"])
    seen: list[bool] = []

    def intrude() -> None:
        if hub.requests("POST .*/commit/") and not seen:
            seen.append(True)
            hub.put("me/model", {"theirs.md": b"hello"})

    hub.before.append((re.compile("GET .*/revision/main"), intrude))
    pushed = pushes(model, tag="t")
    ours, theirs = hub.repo("me/model").commits
    assert (ours.oid, theirs.files.keys() - ours.files.keys()) == (pushed.commit, {"theirs.md"})
    assert hub.repo("me/model").tags == {"t": ours.oid}


def test_weights_of_another_layout_are_deleted_in_the_same_commit(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    pushes(consolidated(tmp_path, shard="1KB"))
    assert "model-00004-of-00004.safetensors" in hub.repo("me/model").files()
    pushed = pushes(consolidated(tmp_path))
    assert len(pushed.deleted) == 5  # four shards and their index
    files = hub.repo("me/model").files()
    assert [path for path in files if path.startswith("model")] == ["model.safetensors"]
    assert len(hub.repo("me/model").commits) == 2


@both_ways
@pytest.mark.parametrize("fault", [[], ["lost"]], ids=["answered", "lost"])
def test_a_pull_request_is_opened_once_and_leaves_the_branch_alone(
    hub: HubServer, pushes: Push, model: Path, fault: list[str]
) -> None:
    hub.put("me/model")
    hub.fail("POST .*/commit/", fault)  # type: ignore[arg-type]
    pushed = pushes(model, create_pr=True)
    repo = hub.repo("me/model")
    assert repo.commits == []
    assert list(repo.pull_requests.values()) == [pushed.commit]
    assert pushed.url == f"{hub.url}/me/model/discussions/1"


@both_ways
def test_a_pull_request_needs_no_right_to_write(hub: HubServer, pushes: Push, model: Path) -> None:
    hub.put("other/open")
    pushed = pushes(model, "other/open", create_pr=True)
    assert hub.repo("other/open").pull_requests == {"refs/pr/1": pushed.commit}


def test_a_hub_without_the_new_store_gets_large_files_the_older_way(
    hub: HubServer, pushes: Push, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "xet", False)
    pushes(consolidated(model.parent, seed=3))
    assert hub.requests("^PUT /lfs/")
    assert constants.HF_HUB_DISABLE_XET is False


def test_a_branch_is_made_and_the_name_alone_is_ones_own(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    pushed = pushes(model, "model", revision="experiment", message="Try this\n\nand that")
    repo = hub.repo("me/model")
    assert pushed.repo_id == "me/model"
    assert repo.commits == []
    head = repo.head("experiment")
    assert (head.oid, head.message, head.description) == (pushed.commit, "Try this", "and that")


def test_a_dry_run_changes_nothing_and_tells_what_it_would(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    assert "config.json" in pushes(model, dry_run=True).uploaded
    assert not hub.has("me/model")
    hub.put("me/model", {"pytorch_model.bin": b"old"})
    assert pushes(model, dry_run=True).deleted == ("pytorch_model.bin",)
    assert "pytorch_model.bin" in hub.repo("me/model").files()
    assert not hub.requests("commit|create|PUT")


def test_a_card_of_somebody_stays_and_ours_is_brought_up_to_date(
    hub: HubServer, pushes: Push, model: Path
) -> None:
    pushes(model)
    pushes(model, base_model="meta-llama/Llama-3.1-8B")
    assert b"meta-llama/Llama-3.1-8B" in hub.read("me/model", "README.md")
    hub.put("me/model", {"README.md": b"# mine"})
    pushes(model, base_model="other/base")
    assert hub.read("me/model", "README.md") == b"# mine"


def test_a_local_base_in_a_card_or_an_adapter_is_taken_out_before_the_hub_sees_it(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "adapter")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": str(tmp_path / "base")}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text(f"---\nbase_model: {tmp_path}/base\nlicense: mit\n---\n")
    (folder / "training_args.bin").write_bytes(TOKEN.encode())
    pushed = pushes(folder)
    assert json.loads(hub.read("me/model", "adapter_config.json"))["r"] == 8
    assert str(tmp_path).encode() not in hub.read("me/model", "adapter_config.json")
    assert hub.read("me/model", "README.md") == b"---\nlicense: mit\n---\n"
    assert "training_args.bin" not in hub.repo("me/model").files()
    assert any("--base-model" in note for note in pushed.notes)


def test_wrong_bytes_are_noticed_while_they_are_read_and_nothing_is_committed(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    folder = consolidated(tmp_path)
    weights = folder / "model.safetensors"
    flip_bit(weights, -1)
    error = refused(pushes, folder, VerificationError)
    assert "tensor 'model.layers" in str(error)
    (folder / "config.json").write_text("{}")
    assert "config.json" in str(refused(pushes, folder, VerificationError))
    assert not hub.repo("me/model").commits


def test_other_bytes_at_the_hub_than_were_read_are_noticed(
    hub: HubServer, pushes: Push, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = HubServer.keep_regular
    monkeypatch.setattr(HubServer, "keep_regular", lambda self, data: keep(self, data + b" "))
    error = refused(pushes, model, VerificationError, tag="t")
    assert "has another hash on the Hub" in str(error)
    assert hub.repo("me/model").tags == {}


def test_a_secret_in_any_text_refuses_the_push_before_the_hub_is_asked(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m")
    secret = "hf_" + "q7Kz2mXp9Rt4Lw8Vn3Bc6Yd1Hf5Js0Ga"
    (folder / "README.md").write_text(f"use {secret}")
    error = refused(pushes, folder, RefusedError)
    assert "a Hugging Face token in README.md" in str(error)
    assert secret not in repr(error)
    (folder / "README.md").write_text(f"use {TOKEN}")
    assert "the token in use" in str(refused(pushes, folder, RefusedError))
    assert hub.log == []


def test_folders_that_nothing_loads_are_refused_with_what_to_do(
    hub: HubServer, pushes: Push, tmp_path: Path, real_checkpoints: Path, model: Path
) -> None:
    error = refused(pushes, real_checkpoints / "fsdp2_plain" / "checkpoint", RefusedError)
    assert "ckptkit consolidate" in error.hint
    ckptkit.convert(model, tmp_path / "dcp", to="dcp")
    assert "ckptkit consolidate" in refused(pushes, tmp_path / "dcp", RefusedError).hint
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no weights" in str(refused(pushes, empty, RefusedError))
    half = consolidated(tmp_path, shard="1KB")
    (half / "model-00002-of-00004.safetensors").unlink()
    refused(pushes, half, IncompleteCheckpointError)
    index = half / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    files = document["weight_map"].items()
    document["weight_map"] = {name: file for name, file in files if "-00002-of" not in file}
    index.write_text(json.dumps(document))
    assert "'model-00002-of-00004" in str(refused(pushes, half, IncompleteCheckpointError))
    refused(pushes, tmp_path / "absent", CkptkitError)
    refused(pushes, "s3://bucket/model", RefusedError)
    assert hub.log == []


def test_a_link_that_leads_out_of_the_folder_is_refused(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m")
    (tmp_path / "private.json").write_text("{}")
    (folder / "generation_config.json").symlink_to(tmp_path / "private.json")
    error = refused(pushes, folder, RefusedError)
    assert "link that leads out" in str(error)
    assert "generation_config.json" in str(error)
    assert hub.log == []


def test_wrong_people_and_places_are_told_apart(hub: HubServer, pushes: Push, model: Path) -> None:
    assert refused(pushes, model, UsageError, "not an id").exit_status == 2
    hub.put("other/open")
    hub.put("other/closed", private=True)
    assert "does not have the permission" in str(refused(pushes, model, HubError, "other/open"))
    refused(pushes, model, HubError, "other/closed")
    expired = "hf_" + "Ex1" * 12
    error = refused(pushes, model, HubError, token=expired)
    assert "wrong or expired" in str(error)
    assert expired not in repr(error)
    hub.put("me/open", private=False)
    assert "is public" in str(refused(pushes, model, RefusedError, "me/open", private=True))
    hub.gated.add("other/open")
    with pytest.raises(HubError, match="have not granted access"):
        pull("other/open", model.parent / "gated", token=TOKEN, endpoint=hub.url)


def test_a_tag_that_names_something_else_is_an_error_before_anything_is_sent(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    first = pushes(consolidated(tmp_path, step=10), tag="best")
    hub.log.clear()
    error = refused(pushes, consolidated(tmp_path, step=20, seed=5), HubError, tag="best")
    assert "'best' exists already" in str(error)
    assert not hub.requests("commit/|PUT|xet")
    assert hub.repo("me/model").tags["best"] == first.commit
    pushes(consolidated(tmp_path, step=20, seed=5))
    again = pushes(consolidated(tmp_path, step=10), tag="best")
    assert again.commit == first.commit
    assert len(hub.repo("me/model").commits) == 2


@pytest.mark.parametrize("token", ["hf_üüüü", "hf_a\nb", "hf_\0", "hf_a b", "hf_\ud800"])
def test_a_token_that_no_hub_gives_is_told_before_anything_is_sent(
    hub: HubServer, pushes: Push, model: Path, token: str
) -> None:
    error = refused(pushes, model, HubError, token=token)
    assert error.message == "the token has characters that no token has"
    assert "hf auth login" in error.hint
    assert token not in f"{error} {error!r}"
    assert hub.log == []


def test_offline_mode_is_an_error_that_says_so(
    hub: HubServer, pushes: Push, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refused(pushes, model, HubError)
    assert "offline" in str(error)
    assert "HF_HUB_OFFLINE" in error.hint
    assert hub.log == []


def test_files_are_read_once_for_hashes_digests_and_the_network(
    pushes: Push, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptkit.storage.local.source import LocalSource

    read = 0
    real = LocalSource.read

    def counted(self: LocalSource, path: str, start: int, stop: int) -> bytes:
        nonlocal read
        read += stop - start if path == "model.safetensors" else 0
        return real(self, path, start, stop)

    monkeypatch.setattr(LocalSource, "read", counted)
    pushes(model)
    size = (model / "model.safetensors").stat().st_size
    weights = 4 * 8 * 16 * 4
    header = size - weights  # read before, for the places of the tensors
    assert size <= read <= size + header + 512


@both_ways
def test_a_file_over_the_servers_limit_is_told_with_what_to_do(
    hub: HubServer, pushes: Push, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "max_file_bytes", 1000)
    error = refused(pushes, consolidated(tmp_path, seed=9), HubError)
    assert "larger than the Hub takes" in str(error)
    assert "--max-shard-size" in error.hint
    monkeypatch.setattr("ckptkit.hub.package.MAX_FILE_BYTES", 1000)
    assert "at most 1,000" in str(refused(pushes, consolidated(tmp_path, seed=9), RefusedError))


def test_a_file_that_changes_while_others_are_sent_stops_the_push(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    folder = consolidated(tmp_path)
    config = folder / "config.json"
    hub.before.append((re.compile("xet-write"), lambda: config.unlink(missing_ok=True)))
    assert "config.json" in str(refused(pushes, folder, InputError))
    assert not hub.repo("me/model").commits


def test_a_card_that_the_hub_refuses_is_told_before_anything_is_sent(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    hub.fail("POST /api/validate-yaml", [400])
    error = refused(pushes, write_model(tmp_path / "m"), HubError)
    assert "metadata of README.md" in str(error)
    assert not hub.requests("PUT|xet|/commit/")


def test_a_secret_in_the_header_of_weights_or_in_a_large_tokenizer_is_found(
    hub: HubServer, pushes: Push, tmp_path: Path
) -> None:
    secret = "ghp_" + "x7Kq2mZp9Rt4Lw8Vn3Bc6Yd1Hf5Js0GaTu2E"
    folder = write_model(tmp_path / "m")
    save_file({"w": np.zeros(2, np.float32)}, folder / "model.safetensors", {"by": secret})
    error = refused(pushes, folder, RefusedError)
    assert "a GitHub token in model.safetensors" in str(error)
    write_model(folder)
    (folder / "tokenizer.json").write_bytes(b" " * 11_000_000 + secret.encode())
    assert "in tokenizer.json" in str(refused(pushes, folder, RefusedError))
    assert hub.log == []


@pytest.mark.parametrize("tag", ["", "a tag", "a..b", "-a", "a.lock", "a:b", "/a", "a/", "a@{b"])
def test_a_tag_that_git_would_not_take_is_refused_before_anything_is_sent(
    hub: HubServer, pushes: Push, tmp_path: Path, tag: str
) -> None:
    with pytest.raises(UsageError, match="is not a valid name of a tag"):
        pushes(write_model(tmp_path / "model"), tag=tag)
    assert not hub.log
