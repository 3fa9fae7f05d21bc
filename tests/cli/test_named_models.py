"""`--base`, `--config` and `--tokenizer`: folders, files, and models on the Hub by their ids."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptkit
from ckptkit.conversion.source.paths import find_model
from ckptkit.core.errors import HubUnavailableError
from tests.command_line import Result, run_command
from tests.hub_models import running_hub
from tests.hub_server import HubServer

ROOT = Path(__file__).parents[2]
SHARDS = ROOT / "fixtures/fsdp2_llama_flat/checkpoint"
MODEL = ROOT / "fixtures/hf_sharded/checkpoint"
OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
NOWHERE = "http://127.0.0.1:9"
ALPHA = ("--lora-alpha", "16", "--no-use-rslora")


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with running_hub(xet=False) as server:
        files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
        files |= {"tokenizer.json": b'{"model": {"vocab": {}}}', "tokenizer_config.json": b"{}"}
        server.put("org/model", files)
        server.put("org/other", {"tokenizer.json": b'{"model": {}}', "README.md": b"other"})
        yield server


def shell(hub: HubServer, *words: str | Path, **environment: str) -> Result:
    return run_command(*words, **hub.environment | environment)


def config_of(folder: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / "config.json").read_text())
    return document


def test_configuration_and_tokenizer_come_from_the_hub_and_no_weights(
    hub: HubServer, tmp_path: Path
) -> None:
    side = {"config.json": (MODEL / "config.json").read_bytes(), "tokenizer.json": b"{}"}
    hub.put("org/side", side)  # without any weights
    commit = hub.repo("org/side").head().oid
    for name in ("org/side", "hf://org/side", "org/side@main", f"org/side@{commit}"):
        out = tmp_path / name.replace("/", "-")
        done = shell(hub, "consolidate", SHARDS, out, "--base", name)
        assert done.returncode == 0, done.stderr
        assert "AutoModelForCausalLM.from_pretrained" in done.stdout
        assert config_of(out)["model_type"] == "llama"
        assert (out / "tokenizer.json").read_bytes() == b"{}"
        said = f"note: --base {name}: org/side on the Hub, commit {commit[:10]}\n"
        assert (said in done.stderr) == (commit not in name)
        assert "warning" not in done.stderr


def test_a_folder_of_the_name_goes_first_and_this_is_said(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "org/model")
    (tmp_path / "org/model/tokenizer.json").write_text('{"mine": 1}')
    hub.log.clear()
    done = shell(hub, "consolidate", SHARDS, "out", "--base", "org/model")
    assert done.returncode == 0
    assert "--base org/model: the folder of this name is used; hf://org/model is" in done.stderr
    assert "mine" in Path("out/tokenizer.json").read_text()
    assert not hub.log
    assert shell(hub, "consolidate", SHARDS, "other", "--base", "hf://org/model").returncode == 0
    assert "mine" not in Path("other/tokenizer.json").read_text()


def test_a_place_that_cannot_be_a_model_on_the_hub_is_not_compared_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/model", "org/model--2", "org/model.", "org/model.git"):
        shutil.copytree(MODEL, name)
        notes = find_model(name, "--base")[1]
        assert bool(notes) == (name == "org/model")
    assert find_model("org/model/config.json", "--config")[1] == ()
    shutil.copy("org/model/config.json", "org/config.json")
    done = run_command("consolidate", SHARDS, "out", "--config", "org/config.json")
    assert (done.returncode, "hf://" in done.stderr) == (0, False)


@pytest.mark.parametrize(
    ("base", "environment", "status", "message", "hint"),
    [
        ("org/modle", {}, 3, "there is no such folder here, and there is no such model", "hf auth"),
        ("org/model@no", {}, 3, "no such revision of it, on the Hub", "check the spelling"),
        ("hf://org/modle", {}, 3, "modle: there is no such model", "check the spelling"),
        ("org/model", {"HF_ENDPOINT": NOWHERE}, 7, "the Hub was not reached", "`hf download org/m"),
        ("org/model", {"HF_HUB_OFFLINE": "1"}, 7, "HF_HUB_OFFLINE is set", "`hf download org/mo"),
        ("modle", {}, 3, "--base modle: no such directory", "contains"),
    ],
)
def test_a_wrong_name_or_no_network_fails_at_once(
    hub: HubServer,
    tmp_path: Path,
    base: str,
    environment: dict[str, str],
    status: int,
    message: str,
    hint: str,
) -> None:
    began = time.monotonic()
    out = tmp_path / "deep" / "out"
    cache = str(tmp_path / "cache")
    done = shell(hub, "consolidate", SHARDS, out, "--base", base, HF_HOME=cache, **environment)
    assert time.monotonic() - began < 20
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert hint in done.stderr.partition("hint:")[2]
    assert "Traceback" not in done.stderr
    assert not out.parent.exists()


def test_without_a_network_the_copy_in_the_cache_is_used(hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    cache = tmp_path / "home" / "hub"
    for name in ("config.json", *OF_TOKENIZER):
        HfApi(endpoint=hub.url).hf_hub_download("org/model", name, cache_dir=cache)
    home = {"HF_HOME": str(cache.parent)}
    for number, environment in enumerate(({"HF_ENDPOINT": NOWHERE}, {"HF_HUB_OFFLINE": "1"})):
        out = tmp_path / str(number)
        words: list[str | Path] = ["consolidate", SHARDS, out, "--base", "org/model"]
        done = shell(hub, *words, **(home | environment))
        assert done.returncode == 0, done.stderr
        assert "the Hub was not reached; its copy in " in done.stderr
        assert config_of(out)["model_type"] == "llama"


def test_configuration_and_tokenizer_from_two_places_take_one_command(
    hub: HubServer, tmp_path: Path
) -> None:
    config = config_of(MODEL) | {"rope_theta": 123456.0, "max_position_embeddings": 77}
    file = tmp_path / "small.json"
    file.write_text(json.dumps(config))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in OF_TOKENIZER:
        (tokenizer / name).write_text(json.dumps({"from": "folder"}))
    out = tmp_path / "out"
    done = shell(hub, "consolidate", MODEL, out, "--config", file, "--tokenizer", "org/other")
    assert done.returncode == 0, done.stderr
    assert config_of(out)["max_position_embeddings"] == 77
    assert (out / "tokenizer.json").read_bytes() == b'{"model": {}}'
    assert not (out / "tokenizer_config.json").exists()
    assert not (out / "README.md").exists()
    words: list[str | Path] = ["--config", "org/model", "--tokenizer", tokenizer, "--overwrite"]
    assert shell(hub, "consolidate", SHARDS, out, *words).returncode == 0
    assert config_of(out)["max_position_embeddings"] != 77
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"from": "folder"}
    words = ["--base", MODEL, "--tokenizer", tokenizer / "tokenizer.json", "--overwrite"]
    assert shell(hub, "consolidate", SHARDS, out, *words).returncode == 0
    assert json.loads((out / "tokenizer.json").read_text()) == {"from": "folder"}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--config", "tokenizer", "holds no 'config.json'"),
        ("--tokenizer", "empty", "holds no tokenizer"),
        ("--tokenizer", "empty/notes.txt", "is no tokenizer"),
        ("--config", "nowhere", "no such file or directory"),
        ("--config", "empty/notes.txt", "not JSON"),
    ],
)
def test_what_has_no_configuration_or_tokenizer_is_refused(
    tmp_path: Path, option: str, value: str, message: str
) -> None:
    for name in ("tokenizer", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "empty" / "notes.txt").write_text("hello")
    done = run_command("consolidate", MODEL, tmp_path / "out", option, tmp_path / value)
    assert done.returncode == 3
    assert message in done.stderr
    assert "hint:" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_merged_into_a_model_on_the_hub(hub: HubServer, tmp_path: Path) -> None:
    step = ROOT / "fixtures/peft_fsdp2/checkpoint"
    whole = tmp_path / "whole"
    assert run_command("adapter", "merge", step, whole, *ALPHA).returncode == 0
    adapter = tmp_path / "adapter"
    assert run_command("adapter", "extract", step, adapter, *ALPHA).returncode == 0
    hub.put("org/base", {path.name: path.read_bytes() for path in whole.iterdir()})
    merge: list[str | Path] = ["adapter", "merge", adapter, "--allow-other-base"]
    by_id = shell(hub, *merge[:3], tmp_path / "a", *merge[3:], "--base", "org/base")
    assert by_id.returncode == 0, by_id.stderr
    by_path = shell(hub, *merge[:3], tmp_path / "b", *merge[3:], "--base", whole)
    assert by_path.returncode == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors"
    ).read_bytes()


def test_functions_take_ids_too(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    ckptkit.consolidate(
        SHARDS, tmp_path / "out", base="org/model", tokenizer="org/other", names="live"
    )
    assert (tmp_path / "out/tokenizer.json").read_bytes() == b'{"model": {}}'
    assert ckptkit.inspect(SHARDS, base="org/model").model_type == "llama"
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HubUnavailableError, match="the Hub was not reached"):
        ckptkit.inspect(SHARDS, base="org/model")


def test_an_output_that_would_not_load_is_named_before_it_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_command("consolidate", SHARDS, out, "--events")
    names = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert names.index("planned") < names.index("started")
    plan = json.loads(done.stderr.splitlines()[names.index("planned")])
    command = f"ckptkit consolidate {SHARDS} {out} --base ORG/NAME --overwrite"
    assert any(f"run `{command}`" in note for note in plan["notes"])
    words = command.replace("ORG/NAME", str(MODEL)).split()[1:]
    again = run_command(*words)
    assert again.returncode == 0, again.stderr
    assert "AutoModelForCausalLM.from_pretrained" in again.stdout
    assert "config.json" not in again.stderr
