"""Watching a run: which steps reach a Hub, what stops a watch, and what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.adapters.sources import AdapterRequest
from ckptkit.core.checksums import digest_as
from ckptkit.core.errors import CkptkitError, HubError, HubUnavailableError, RefusedError
from ckptkit.hub import client as retrying
from ckptkit.hub import pull
from ckptkit.hub.watch.build import BuildSettings, PushChoice
from ckptkit.hub.watch.watch import Pauses, WatchEvent, WatchRequest, run_watch
from ckptkit.runs.push_journal import WATCH_FOLDER, read_journals
from ckptkit.runs.retention import Retention
from ckptkit.storage.places import PathLike, Place
from ckptkit.storage.remote.errors import RetryPolicy
from tests.files import flip_bit
from tests.hub_models import add_step
from tests.hub_server import TOKEN, HubServer
from tests.object_store import ObjectStore

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # what the client's own client says of its PUTs
)
FIXTURES = Path(__file__).parents[2] / "fixtures"
OTHER = FIXTURES / "peft_checkpointer/checkpoint/checkpoint-2"
ADAPTER = FIXTURES / "peft_trl_fsdp2_ckptkit/checkpoint/checkpoint-2"
MODEL = FIXTURES / "fsdp2_plain/checkpoint"
REPO = "org/run"
SOON = RetryPolicy(attempts=2, first_wait_seconds=0.01, longest_wait_seconds=0.01)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "-run[1]*?#%20 {b}\n'\"e\u0301\U0001f680"  # no name is a pattern
    folder.mkdir()
    return folder


def add(run: Path, step: int, source: Path = ADAPTER, **facts: object) -> Path:
    return add_step(run, step, source, **facts)


class Moments(Pauses):
    """Does something at each pause of a watch, and has it end when there is nothing left to do."""

    def __init__(self, *moments: Callable[[], object]) -> None:
        super().__init__(ending=not moments, reads_input=False)
        self._moments = list(moments)

    def wait(self, seconds: float) -> None:  # noqa: ARG002  whatever is asked, time is short
        if self._moments:
            moment = self._moments.pop(0)
            self.ending = not self._moments
            moment()


class Watched:
    """What a watch told, and how it ended."""

    def __init__(self) -> None:
        self.events: list[WatchEvent] = []
        self.failures: Mapping[int, CkptkitError] = {}

    def of(self, name: str) -> list[Any]:
        return [event.step for event in self.events if event.name == name]


@pytest.fixture
def watch(hub: HubServer, run: Path) -> Callable[..., Watched]:
    def watched(*moments: Callable[[], object], place: PathLike = run, **options: Any) -> Watched:
        found = Watched()
        known: dict[str, Any] = {"token": TOKEN, "endpoint": hub.url, "retries": SOON} | options
        request = WatchRequest(run=place, repo_id=REPO, **known)
        found.failures = run_watch(request, Moments(*moments), found.events.append, lambda _: None)
        return found

    return watched


def titles(hub: HubServer) -> list[str]:
    return [commit.message.split(" (")[0] for commit in hub.repo(REPO).commits]


Watch = Callable[..., Watched]


def test_each_step_becomes_one_commit_with_its_tag_as_soon_as_it_is_there(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    found = watch(lambda: add(run, 1), lambda: add(run, 2))
    assert titles(hub) == ["Step 1", "Step 2"]
    repo = hub.repo(REPO)
    assert list(repo.tags.items()) == [
        ("step-1", repo.commits[0].oid),
        ("step-2", repo.commits[1].oid),
    ]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= repo.files().keys()
    assert repo.private
    assert found.of("pushed") == [1, 2]
    asked = len(hub.log)
    assert watch().of("pushed") == []
    assert len(hub.log) == asked  # the journal knows
    assert [push.tag for push in read_journals(run / WATCH_FOLDER)] == ["step-1", "step-2"]
    assert not list((run / WATCH_FOLDER).glob("*.work"))


def test_without_its_journal_a_watch_asks_the_hub_and_pushes_nothing_twice(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    add(run, 1)
    watch()
    shutil.rmtree(run / ".ckptkit")
    hub.repo(REPO).tags.clear()  # as after a kill between the commit and the tag
    found = watch()
    assert titles(hub) == ["Step 1"]
    assert list(hub.repo(REPO).tags) == ["step-1"]
    assert [event.facts["resumed"] for event in found.events if event.name == "pushed"] == [True]


def test_rules_choose_the_steps(hub: HubServer, run: Path, watch: Watch) -> None:
    for step, loss in ((2, 3.0), (3, 1.0), (4, 2.0)):
        add(run, step, metrics={"loss": loss})
    watch(choice=PushChoice(best="loss"))
    assert titles(hub) == ["Step 3"]
    add(run, 5, metrics={"loss": 1.5})
    add(run, 6, metrics={"loss": 0.5})
    add(run, 7, metrics={"loss": 0.4})
    watch(choice=PushChoice(every=2, last_only=True))
    assert titles(hub) == ["Step 3", "Step 6"]


def test_a_damaged_step_is_reported_and_the_next_one_is_pushed(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    shard = next(add(run, 1).glob("pytorch_model_fsdp_0/*.distcp"))
    flip_bit(shard, shard.stat().st_size // 2, 0xFF)
    add(run, 2)
    found = watch(lambda: None)
    assert found.of("failed") == [1]
    assert found.of("pushed") == [2]
    assert found.failures[1].exit_status == 3
    assert titles(hub) == ["Step 2"]


def test_a_step_that_vanishes_while_it_is_read_is_passed_over(hub: HubServer, run: Path) -> None:
    add(run, 1)

    def vanish(event: WatchEvent) -> None:
        if event.name == "building" and event.step == 1:
            shutil.rmtree(run / "checkpoint-1")

    found = Watched()
    request = WatchRequest(run, REPO, retries=SOON, token=TOKEN, endpoint=hub.url)

    def listen(event: WatchEvent) -> None:
        found.events.append(event)
        vanish(event)

    failures = run_watch(request, Moments(lambda: add(run, 2)), listen, lambda _: None)
    assert found.of("passed") == [1]
    assert found.of("pushed") == [2]
    assert not failures


@pytest.mark.slow
def test_a_step_that_is_saved_again_gets_a_commit_of_its_own_and_takes_the_tag(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    build = BuildSettings(adapter=AdapterRequest(adapter="default"))
    watch(lambda: add(run, 1), lambda: add(run, 1, OTHER, save_number=2), build=build)
    repo = hub.repo(REPO)
    assert titles(hub) == ["Step 1", "Step 1"]
    assert repo.tags == {"step-1": repo.commits[1].oid}


def test_the_tag_of_another_run_is_left_alone(hub: HubServer, run: Path, watch: Watch) -> None:
    other = hub.put(REPO, {"model.safetensors": b"x"}).commits[0].oid
    hub.repo(REPO).tags["step-1"] = other
    add(run, 1)
    error = watch().failures[1]
    assert isinstance(error, RefusedError)
    assert "--tag-prefix" in error.hint
    assert hub.repo(REPO).tags == {"step-1": other}
    assert watch(tag_prefix="b-").of("pushed") == [1]


def test_a_tag_is_left_alone_too_where_the_branch_is_new(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    hub.put(REPO, {"model.safetensors": b"x"})
    tags = {"step-1": hub.repo(REPO).commits[0].oid}
    hub.repo(REPO).tags.update(tags)
    add(run, 1)
    found = watch(revision="dev")
    assert isinstance(found.failures[1], RefusedError)
    assert hub.repo(REPO).tags == tags


def test_a_push_that_was_killed_and_whose_tag_somebody_took_stops_no_other_step(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    add(run, 1)
    watch()
    (journal,) = (run / WATCH_FOLDER).glob("*.json")
    document = json.loads(journal.read_text())
    document["steps"]["1"] |= {"state": "pushing", "commit": ""}
    journal.write_text(json.dumps(document))
    hub.repo(REPO).tags["step-1"] = hub.put(REPO, {"notes.txt": b"x"}).commits[-1].oid
    add(run, 2)
    found = watch()
    assert isinstance(found.failures[1], RefusedError)
    assert found.of("pushed") == [2]


def test_a_run_that_was_started_over_in_its_place_is_told(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    for number in (7, 8):
        add(run, number * 100, save_number=number)
    assert watch().of("warning") == []
    for path in run.glob("checkpoint-*"):
        shutil.rmtree(path)
    found = watch(lambda: add(run, 100, save_number=1), lambda: None)
    (warning,) = [event for event in found.events if event.name == "warning"]
    assert warning.facts["message"].startswith("not pushed: 100; ")
    assert titles(hub) == ["Step 700", "Step 800"]


def test_of_steps_that_cannot_be_pushed_nothing_stays_on_the_disk(run: Path, watch: Watch) -> None:
    for step in (1, 2):
        (add(run, step) / "ckptkit/notes.json").write_text(json.dumps({"key": "hf_" + "Aa1" * 12}))
    built: list[list[str]] = []

    def look() -> None:
        built.append([path.name for path in (run / WATCH_FOLDER).glob("*.work/*")])

    found = watch(look, build=BuildSettings(state_folder="last-checkpoint"))
    assert sorted(found.failures) == [1, 2]
    assert built == [[]]


def test_a_hub_that_is_down_is_tried_again_until_it_is_up(
    hub: HubServer, run: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "HUB_RETRIES", RetryPolicy(attempts=1))
    add(run, 1)
    hub.fail("POST /api/repos/create", [503])
    found = watch(lambda: None, lambda: None)
    assert found.of("retrying") == [None]
    assert titles(hub) == ["Step 1"]
    add(run, 2)
    hub.fail("POST /api/validate-yaml", [503] * 2)
    with pytest.raises(HubUnavailableError):
        watch()


def test_a_wrong_token_ends_a_watch_before_there_is_a_step(hub: HubServer, watch: Watch) -> None:
    secret = "hf_" + "Bb2" * 12
    with pytest.raises(HubError) as raised:
        watch(lambda: None, token=secret)
    assert secret not in f"{raised.value!r} {raised.value} {raised.value.hint}"
    assert not hub.has(REPO)


def test_the_second_watch_of_a_run_is_refused(run: Path, watch: Watch) -> None:
    def second() -> None:
        with pytest.raises(RefusedError, match="another watch is running"):
            watch()
        with pytest.raises(RefusedError, match="another watch is running"):
            watch(state=run.parent / "elsewhere")

    watch(second)


def test_steps_that_were_pushed_are_pruned_and_those_that_wait_are_not(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    for step in (1, 2, 3):
        add(run, step)
    found = watch(retention=Retention(keep_last=1))
    assert titles(hub) == ["Step 1", "Step 2", "Step 3"]
    assert [event.facts["steps"] for event in found.events if event.name == "pruned"] == [[1, 2]]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.slow
def test_a_whole_step_beside_the_model_can_be_resumed_from_and_the_next_replaces_it(
    hub: HubServer, run: Path, watch: Watch, tmp_path: Path
) -> None:
    add(run, 1)
    (run / "checkpoint-1/notes.txt").write_text("of the first")
    build = BuildSettings(state_folder="last-checkpoint")
    watch(lambda: add(run, 2), build=build, private=False)
    files = hub.repo(REPO).files()
    assert "last-checkpoint/notes.txt" not in files
    step = run / "checkpoint-2"
    for path in (path for path in step.rglob("*") if path.is_file()):
        name = path.relative_to(step).as_posix()
        if name != "ckptkit.json":
            assert hub.read(REPO, f"last-checkpoint/{name}") == path.read_bytes()
    assert not hub.repo(REPO).private
    pull(REPO, tmp_path / "back", token=TOKEN, endpoint=hub.url)


def test_a_whole_step_is_pushed_without_the_paths_of_this_machine_and_proves_itself_still(
    hub: HubServer, run: Path, watch: Watch, tmp_path: Path
) -> None:
    step = add(run, 1)
    manifest = json.loads((step / "ckptkit.json").read_text())
    places = {
        "trainer_state.json": {"best_model_checkpoint": f"{run}/checkpoint-1"},
        "ckptkit/config.json": {"_name_or_path": f"{run}/base"},
        "ckptkit/run.json": {"base_model": {"id": f"{run}/base", "commit_hash": None}},
    }
    for path, keys in places.items():
        data = json.dumps(json.loads((step / path).read_text()) | keys).encode()
        (step / path).write_bytes(data)
        digest = digest_as(manifest["files"][path]["digest"], memoryview(data))
        manifest["files"][path] = {"size_bytes": len(data), "digest": digest}
    manifest["source"]["path"] = f"{run}/checkpoint-1"
    manifest.pop("checksum", None)
    (step / "ckptkit.json").write_text(json.dumps(manifest))
    found = watch(build=BuildSettings(state_folder="last-checkpoint"))
    assert found.failures == {}
    pushed = {path: hub.read(REPO, path) for path in hub.repo(REPO).files()}
    texts = {path: data for path, data in pushed.items() if not path.endswith(".safetensors")}
    assert not [path for path, data in texts.items() if str(tmp_path).encode() in data]
    state = json.loads(texts["last-checkpoint/trainer_state.json"])
    assert state["best_model_checkpoint"] is None
    pull(REPO, tmp_path / "back", token=TOKEN, endpoint=hub.url)
    assert ckptkit.verify(tmp_path / "back/last-checkpoint").ok


def test_folders_are_made_beside_the_pushes(
    hub: HubServer, run: Path, watch: Watch, tmp_path: Path
) -> None:
    folders = tmp_path / "models"
    found = watch(lambda: add(run, 1), lambda: add(run, 2), to_dir=folders)
    assert found.of("written") == found.of("pushed") == [1, 2]
    assert titles(hub) == ["Step 1", "Step 2"]
    for step in (1, 2):
        assert ckptkit.verify(folders / f"checkpoint-{step}").ok
    pull(REPO, tmp_path / "back", token=TOKEN, endpoint=hub.url)
    assert ckptkit.diff(tmp_path / "back", folders / "checkpoint-2").same
    assert not watch(to_dir=folders).of("written")


def test_folders_do_not_wait_for_a_hub_that_is_away(
    hub: HubServer, run: Path, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "HUB_RETRIES", RetryPolicy(attempts=1))
    folders, seen = tmp_path / "models", []

    def fail() -> None:
        hub.fail("POST /api/validate-yaml", [503])
        add(run, 1)
        add(run, 2)

    def look() -> None:
        seen.extend(sorted(path.name for path in folders.iterdir()))

    found = watch(fail, look, to_dir=folders)
    assert seen == ["checkpoint-1", "checkpoint-2"]
    names = [event.name for event in found.events if event.name in {"written", "retrying"}]
    assert names == ["written", "written", "retrying"]
    assert found.of("pushed") == [1, 2]


def test_a_step_whose_folder_cannot_be_made_fails(run: Path, watch: Watch, tmp_path: Path) -> None:
    shard = next(add(run, 1).glob("pytorch_model_fsdp_0/*.distcp"))
    flip_bit(shard, shard.stat().st_size // 2, 0xFF)
    add(run, 2)
    found = watch(to_dir=tmp_path / "models")
    assert found.of("failed") == [1]
    assert found.of("written") == found.of("pushed") == [2]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["checkpoint-2"]


@pytest.mark.slow
def test_a_run_on_a_store_is_watched_like_a_local_one(
    hub: HubServer, object_store: ObjectStore, run: Path, watch: Watch, tmp_path: Path
) -> None:
    bucket = object_store.bucket("watched")
    add(run, 1)
    name = "exp[1]*?#%20 +{b}&key=e\u0301"
    bucket.put_tree(run, name)
    place = Place(f"{bucket.url}/{name}", bucket.store.options)
    found = watch(place=place, state=tmp_path / "state")
    assert found.of("pushed") == [1]
    assert titles(hub) == ["Step 1"]
    told = "".join(json.dumps(event.to_json()) for event in found.events)
    told += "".join(path.read_text() for path in (tmp_path / "state").iterdir())
    for secret in (TOKEN, bucket.store.options["secret"]):
        assert secret not in told
    with pytest.raises(RefusedError, match="is a URL, where the state"):
        watch(place=place)
    # The same run, written in another way: what was pushed is known.
    client = {"endpoint_url": f"{bucket.store.endpoint}/", "region_name": "us-east-1"}
    options = {**bucket.store.options, "client_kwargs": client}
    for url in (f"s3a://{bucket.name}/{name}", f"{bucket.url}//{name}/"):
        found = watch(place=Place(url, options), state=tmp_path / "state")
        assert found.of("warning") == found.of("pushed") == []
        assert sorted(one.name for one in (tmp_path / "state").glob("*.aside")) == []


def test_a_step_that_others_saved_is_pushed_once_it_stays_the_same(
    hub: HubServer, run: Path, watch: Watch
) -> None:
    def save() -> None:
        shutil.copytree(MODEL, run / "checkpoint-7")

    found = watch(save, lambda: None, build=BuildSettings(kind="model"))
    assert found.of("pushed") == [7]
    assert "model.safetensors" in hub.repo(REPO).files()


def test_a_step_of_megatron_is_pushed_under_the_names_of_transformers(
    hub: HubServer, run: Path, watch: Watch, tmp_path: Path
) -> None:
    megatron = FIXTURES / "megatron_model_llama_tp2_pp2"

    def save() -> None:
        shutil.copytree(megatron / "checkpoint", run, dirs_exist_ok=True)

    refused = watch(save, lambda: None)
    assert refused.of("pushed") == []
    assert "--base" in refused.failures[7].hint
    build = BuildSettings(base=str(megatron))
    found = watch(lambda: None, build=build)
    assert found.of("pushed") == [7]
    out = tmp_path / "pulled"
    pull(REPO, out, token=TOKEN, endpoint=hub.url)
    assert ckptkit.diff(out, megatron / "truth.safetensors").same
