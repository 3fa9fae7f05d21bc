"""No secret reaches the Hub, wherever it lies and whichever way files go there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.hub import push
from ckptkit.hub.secrets import secrets_in
from ckptkit.hub.watch.build import BuildSettings
from ckptkit.hub.watch.watch import Pauses, WatchEvent, WatchRequest, run_watch
from tests.hub_models import write_model
from tests.hub_server import TOKEN, HubServer
from tests.planted_secrets import FILES, SECRETS
from tests.sampled import sampled

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
STEP = Path(__file__).parents[2] / "fixtures/peft_trl_fsdp2_ckptkit/checkpoint/checkpoint-2"
REPO = "org/secrets"
QUICK = (  # files of each kind; the others are in `make test-slow`
    *("notes.gz", "notes.ipynb", "logs/deep/er/out.txt"),
)
HARMLESS = {
    "notes.md": b"nothing to hide",
    "events.out.tfevents.7": b"\x00\x01" * 99,
    "many/levels/down/data": b"x",
}


def plant(folder: Path) -> dict[str, bytes]:
    """Puts each secret into a file, and a secret into each kind of file."""
    kinds = list(SECRETS)
    planted = {
        f"extra/k{number}/{path}": FILES[path](SECRETS[kinds[number % len(kinds)]])
        for number, path in enumerate([*FILES, *FILES])
    }
    loose = {path: data for path, data in FILES.items() if not path.endswith((".bin", ".pt"))}
    planted |= {path: content(f"token={TOKEN}") for path, content in loose.items()}
    for path, data in planted.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    assert len(planted) > len(kinds)
    return planted


def plain(folder: Path) -> None:
    for path, data in HARMLESS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def published(hub: HubServer) -> dict[str, bytes]:
    """Returns what the Hub has of the branch, and finds no secret in it."""
    if not hub.has(REPO):
        return {}
    files = {path: hub.read(REPO, path) for path in hub.repo(REPO).files()}
    assert {
        path: found for path, data in files.items() if (found := secrets_in([data], [TOKEN]))
    } == {}
    return files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    step = tmp_path / "run/checkpoint-2"
    shutil.copytree(STEP, step)
    return step.parent


@pytest.fixture
def watch(hub: HubServer, run: Path) -> Callable[..., tuple[list[WatchEvent], dict[int, Any]]]:
    class AtOnce(Pauses):
        def wait(self, seconds: float) -> None:
            raise AssertionError(seconds)

    def watched(
        include: Sequence[str] = (), whole: str = "last-checkpoint"
    ) -> tuple[list[WatchEvent], dict[int, CkptkitError]]:
        events: list[WatchEvent] = []
        request = WatchRequest(
            run=run,
            repo_id=REPO,
            build=BuildSettings(state_folder=whole),
            include=include,
            token=TOKEN,
            endpoint=hub.url,
        )
        failures = run_watch(
            request, AtOnce(ending=True, reads_input=False), events.append, lambda _: None
        )
        return events, dict(failures)

    return watched


Watch = Callable[..., tuple[list[WatchEvent], dict[int, CkptkitError]]]


@pytest.mark.parametrize(
    "whole", sampled(["", "last-checkpoint", "checkpoint-{step}"], ["last-checkpoint"])
)
def test_strangers_in_a_step_stay_at_home_and_are_named(
    hub: HubServer, run: Path, watch: Watch, whole: str
) -> None:
    planted = plant(run / "checkpoint-2")
    plain(run / "checkpoint-2")
    events, failures = watch(whole=whole)
    assert failures == {}
    there = published(hub)
    assert "adapter_model.safetensors" in there
    if whole:
        folder = whole.format(step=2)
        own = {p.relative_to(STEP).as_posix() for p in STEP.rglob("*") if p.is_file()}
        assert {f"{folder}/{path}" for path in own} <= there.keys()
        assert not {f"{folder}/{path}" for path in [*planted, *HARMLESS]} & there.keys()
        told = [event.facts["message"] for event in events if event.name == "warning"]
        assert any("not pushed with the step: " in text and "--include" in text for text in told)


def test_files_that_are_asked_for_go_with_a_step(hub: HubServer, run: Path, watch: Watch) -> None:
    plain(run / "checkpoint-2")
    (run / "checkpoint-2/training_args.bin").write_bytes(b"no token in it")
    assert watch(include=["notes.md", "last-checkpoint/many/*", "*args*", "*.pem"])[1] == {}
    there = published(hub)
    assert there["last-checkpoint/notes.md"] == HARMLESS["notes.md"]
    assert "last-checkpoint/many/levels/down/data" in there
    assert "last-checkpoint/events.out.tfevents.7" not in there
    assert not [path for path in there if "training_args" in path]


@pytest.mark.parametrize("path", sampled(FILES, QUICK))
def test_a_secret_is_refused_though_its_file_is_asked_for(
    hub: HubServer, run: Path, watch: Watch, path: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    for folder, text in ((run / "checkpoint-2", TOKEN), (model, SECRETS["azure"])):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(FILES[path](text))
    _, failures = watch(include=["*"])
    assert isinstance(failures[2], RefusedError)
    assert f"in last-checkpoint/{path}" in str(failures[2])
    if "/" in path:  # a push takes files of the folder and right below it
        return
    with pytest.raises(RefusedError, match="an Azure key in ") as raised:
        push(model, REPO, include=["*"], token=TOKEN, endpoint=hub.url)
    assert SECRETS["azure"][-60:-30] not in repr(raised.value)
    assert published(hub) == {}


@pytest.mark.parametrize(
    "path",
    sampled(
        [
            "trainer_state.json",
            "scheduler.pt",
            "rng_state_0.pth",
            "ckptkit/config.json",
            "README.md",
            "tokenizer.json",
            "optimizer_0/__9_0.distcp",
            "pytorch_model_fsdp_0/random_states_0.pkl",
            "zero_to_fp32.py",
        ],
        ["trainer_state.json", "optimizer_0/__9_0.distcp"],
    ),
)
def test_files_that_a_step_is_made_of_are_searched_too(
    hub: HubServer, run: Path, watch: Watch, path: str
) -> None:
    step = run / "checkpoint-2"
    manifest = json.loads((step / "ckptkit.json").read_text())
    manifest["files"].pop(path, None)
    manifest.pop("checksum", None)
    (step / "ckptkit.json").write_text(json.dumps(manifest))
    text = json.dumps({"note": SECRETS["wandb netrc"]})
    (step / path).write_bytes(
        text.encode() if path.endswith((".json", ".md")) else FILES["notes.bin"](text)
    )
    _, failures = watch()
    assert "a Weights & Biases key in" in str(failures[2])
    assert published(hub) == {}


def test_names_links_and_messages_are_looked_at(
    hub: HubServer, run: Path, watch: Watch, tmp_path: Path
) -> None:
    secret = SECRETS["github classic"]
    step = run / "checkpoint-2"
    (tmp_path / "id_rsa").write_text(SECRETS["openssh"])
    (step / "scheduler_1.pt").symlink_to(tmp_path / "id_rsa")
    (step / "optimizer_1").symlink_to(tmp_path)
    (step / f"optimizer_{secret}.pt").write_bytes(b"")
    _, failures = watch()
    assert "a GitHub token in the name of a file" in str(failures[2])
    assert secret not in repr(failures[2])
    (step / f"optimizer_{secret}.pt").unlink()
    assert watch(include=["*"])[1] == {}
    there = published(hub)
    assert not [path for path in there if "scheduler_1" in path or "optimizer_1" in path]
    with pytest.raises(RefusedError, match="in the message or tag of the commit"):
        push(
            write_model(tmp_path / "m"), REPO, message=f"by {secret}", token=TOKEN, endpoint=hub.url
        )


def test_weights_are_searched_on_their_way(hub: HubServer, tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin", "model-00001-of-00001.safetensors"):
        folder = write_model(tmp_path / name)
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").unlink()
        secret = SECRETS["aws secret"].encode()
        if name.endswith(".bin"):
            hidden = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
            torch.save({"model.layers.0.mlp.up_proj.weight": hidden}, folder / name)
        else:
            (folder / name).write_bytes(data[: -len(secret)] + secret)
        with pytest.raises(RefusedError, match="an AWS secret key in"):
            push(folder, REPO, token=TOKEN, endpoint=hub.url)
    assert published(hub) == {}
