"""What is published, what is not, and what is taken out of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptkit
from ckptkit.consumers.table import TRANSFORMERS
from ckptkit.core.errors import AccessError, RefusedError
from ckptkit.hub.client import is_repo_id
from ckptkit.hub.contents import (
    ModelFacts,
    base_model_of,
    check_contents,
    clean_contents,
    is_ours,
    scrub,
    scrub_card,
    write_card,
)
from ckptkit.hub.package import PushOptions, choose_files, find_stale_files, prepare_package
from ckptkit.hub.secrets import find_secrets, redact_secrets
from ckptkit.storage.local.source import LocalSource
from tests.other_user import as_nobody, needs_root, open_folder

STEP = Path(__file__).resolve().parents[3] / "fixtures/accelerate_fsdp2_tied_with_config/checkpoint"

SECRETS = {
    "a Hugging Face token": "hf_" + "aZ4kQ9xLmP2vR7tY" * 2 + "ab",
    "an AWS access key": "AKIA" + "Q7ZK4M2XW9PLR5TB",
    "an AWS secret key": 'aws_secret_access_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzQ8rT1uVx"',
    "a private key": "-----BEGIN OPENSSH PRIVATE" + " KEY-----",
    "a Weights & Biases key": "WANDB_API_KEY=" + "0123456789abcdef0123456789abcdef01234567",
    "a GitHub token": "ghp_" + "x7Kq2mZp9Rt4Lw8Vn3Bc6Yd1Hf5Js0GaTu2E",
    "a GitLab token": "glpat-" + "Zk7Qm2Xp9Rt4Lw8Vn3Bc",
    "an OpenAI or Anthropic key": "sk-proj-" + "9xLmP2vR7tYaZ4kQ9xLmP2vR7tYaZ4kQ",
    "a Google API key": "AIza" + "SyD9xLmP2vR7tYaZ4kQ9xLmP2vR7tYaZ4kQ",
    "a Slack token": "xoxb-" + "123456789012-aBcDeFgHiJkLmN",
    "a password in a URL": "postgres://trainer:" + "hunter2hunter2@db.internal",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_told_by_its_kind_and_file_and_never_shown(kind: str) -> None:
    secret = SECRETS[kind]
    data = f'{{"note": "use {secret} for it"}}'.encode()
    assert list(find_secrets(data)) == [kind]
    with pytest.raises(RefusedError) as raised:
        check_contents({"config.json": data}, "out", [])
    assert kind in str(raised.value)
    assert "config.json" in str(raised.value)
    assert secret[-12:] not in f"{raised.value} {raised.value.__notes__} {raised.value!r}"
    assert secret[-12:] not in redact_secrets(data.decode())


@pytest.mark.parametrize(
    "text",
    [
        "pass token=hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        '"sk-learn": 3, "hf_hub": "task-oriented-language-models-are-few-shot"',
        "see https://huggingface.co/meta-llama/Llama-3.1-8B@main",
        "postgres://{user}:{password}@host",
        "postgres://user:password@localhost",
        "0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_what_only_looks_like_a_secret_is_let_through(text: str) -> None:
    assert list(find_secrets(text.encode())) == []


def test_the_token_in_use_is_found_in_any_form() -> None:
    assert list(find_secrets(b"key: corp-7781-token", ["corp-7781-token"])) == ["the token in use"]


def test_files_of_a_model_go_and_all_others_stay_with_a_reason() -> None:
    model = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "README.md",
        "LICENSE",
        "ckptkit.json",
        "reward/adapter_config.json",
        "reward/adapter_model.safetensors",
    ]
    other = [
        "training_args.bin",
        "optimizer.bin",
        "rng_state_0.pth",
        "trainer_state.json",
        "modeling_llama.py",
        ".env",
        "runs/events.out.tfevents",
        "wandb/run.log",
        "notes.txt",
    ]
    chosen = choose_files([*model, *other], TRANSFORMERS, code=False, optimizer=False)
    assert set(chosen.files) == set(model)
    assert {skipped.path for skipped in chosen.skipped} == set(other)
    assert all(skipped.reason for skipped in chosen.skipped)


def test_options_let_more_files_through_but_never_the_training_arguments() -> None:
    paths = [
        "training_args.bin",
        "optimizer.bin",
        "modeling_x.py",
        "a.txt",
        "old/optimizer.bin",
    ]
    chosen = choose_files(
        paths, TRANSFORMERS, code=True, optimizer=True, include=["*.txt", "training_args.bin"]
    )
    assert chosen.files == ("a.txt", "modeling_x.py", "optimizer.bin")


def test_weights_of_an_earlier_layout_go_with_a_new_model() -> None:
    remote = [
        "model-00001-of-00003.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "adapter_config.json",
        "adapter_model.bin",
        "ckptkit.json",
        "README.md",
        "model.onnx",
        "gguf/model.safetensors",
    ]
    assert find_stale_files(remote, ["model.safetensors", "config.json", "ckptkit.json"]) == [
        "adapter_config.json",
        "adapter_model.bin",
        "model-00001-of-00003.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ]


def test_an_adapter_takes_the_place_of_an_adapter_and_leaves_a_model_alone() -> None:
    remote = ["model.safetensors", "adapter_model.bin", "adapter_config.json", "ckptkit.json"]
    new = ["adapter_model.safetensors", "adapter_config.json"]
    assert find_stale_files(remote, new) == ["adapter_model.bin", "ckptkit.json"]


@pytest.mark.parametrize("text", ["org/name", "name", "a.b/c_d-e"])
def test_ids_of_repositories_are_recognised(text: str) -> None:
    assert is_repo_id(text)


@pytest.mark.parametrize(
    "text",
    ["", "a/b/c", "/a/b", "a b", "../x", "a/..", "https://x/a", "a--b/c", "x.git", "ä/b"],
)
def test_what_is_no_id_of_a_repository_is_refused(text: str) -> None:
    assert not is_repo_id(text)


def test_paths_of_this_machine_are_taken_out_of_documents() -> None:
    config = {"_name_or_path": "/home/alice/llama", "model_type": "llama"}
    assert scrub("config.json", config, None) == {
        "_name_or_path": "",
        "model_type": "llama",
    }
    named = {"_name_or_path": "meta-llama/Llama-3.1-8B"}
    assert scrub("config.json", named, None) == named
    adapter = {"base_model_name_or_path": "/data/llama", "r": 8}
    assert scrub("adapter_config.json", adapter, "meta/l")["base_model_name_or_path"] == "meta/l"
    assert scrub("adapter_config.json", adapter, None)["base_model_name_or_path"] is None
    nested = {"text_config": {"_name_or_path": "/x/y"}, "special_tokens_map_file": "/root/.cache/m"}
    assert scrub("tokenizer_config.json", nested | {"eos_token": "/s"}, None) == {
        "text_config": {"_name_or_path": ""},
        "special_tokens_map_file": None,
        "eos_token": "/s",
    }


def test_a_manifest_keeps_the_last_part_of_paths_and_loses_folders_and_hosts() -> None:
    manifest = {
        "source": {
            "path": "runs/secret-project/checkpoint-30",
            "config": "/home/alice/adapter_config.json",
            "adapters": [{"path": "s3://bucket-of-alice/run/step-3"}],
            "format": "dcp",
        },
        "options": {"like": "/mnt/nfs07/like", "include": ["model.*"]},
        "tensors": {"/odd/name": {"file": "model.safetensors"}},
    }
    found = scrub("ckptkit.json", manifest, None)
    assert found["source"] == {
        "path": "checkpoint-30",
        "config": "adapter_config.json",
        "adapters": [{"path": "step-3"}],
        "format": "dcp",
    }
    assert found["options"] == {"like": "like", "include": ["model.*"]}
    assert found["tensors"] == manifest["tensors"]


def test_a_card_loses_its_local_base_and_nothing_else() -> None:
    card = (
        "---\nbase_model: /home/alice/llama\nlicense: mit\ntags:\n"
        "- base_model:adapter:/home/alice/llama\n- lora\n---\nSee /home.\n"
    )
    assert scrub_card(card) == "---\nlicense: mit\ntags:\n- lora\n---\nSee /home.\n"
    listed = "---\nbase_model:\n- org/base\n  - ~/llama\n- s3://bucket/llama\nlicense: mit\n---\n"
    assert scrub_card(listed) == "---\nbase_model:\n- org/base\nlicense: mit\n---\n"
    theirs = (
        "---\ndatasets:\n- https://example.org/data\n- /r/programming\nwidget:\n"
        "- src: https://example.org/cat.png\n- ./cat.png\nextra:\n  - ~user\n  - ../up\n"
        "base_model: org/base\nlinks:\n- s3://public/x\nurl: https://example.org\n---\n- /a\n"
    )
    assert scrub_card(theirs) == theirs
    good = "---\nbase_model: meta-llama/Llama-3.1-8B\n---\ntext"
    assert scrub_card(good) == good
    assert scrub_card("# no metadata\n- /data") == "# no metadata\n- /data"


def test_a_file_without_paths_is_published_byte_by_byte() -> None:
    data = b'{"model_type":"llama",  "x": 1}\n'
    assert clean_contents({"config.json": data}, [], None) == {"config.json": data}


def test_a_card_tells_what_is_known() -> None:
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "base_model_name_or_path": "o/base"}
    base = base_model_of({}, adapter, None)
    card = write_card(ModelFacts("my-adapter", base, adapter, {}, None))
    for line in ('base_model: "o/base"', "base_model_relation: adapter", "library_name: peft"):
        assert line in card.splitlines()
    assert "# my-adapter" in card
    assert "- lora" in card
    assert "| Rank | `16` |" in card
    assert is_ours(card.encode())
    assert not is_ours(b"# mine")


def test_a_base_that_is_a_path_is_not_in_the_card() -> None:
    assert base_model_of({"_name_or_path": "/home/alice/llama"}, None, None) is None
    assert base_model_of({}, {"base_model_name_or_path": "./llama"}, "org/llama") == "org/llama"


@needs_root
def test_a_folder_that_may_not_be_entered_is_named_and_never_left_out_of_a_step() -> None:
    def push(model: Path, options: PushOptions) -> list[str]:
        try:
            with LocalSource(model) as source:
                package = prepare_package(source, "me/model", options, [])
        except AccessError as error:
            return [str(error)]
        return [f"{skipped.path} {skipped.reason}" for skipped in package.skipped]

    with open_folder() as folder:
        ckptkit.consolidate(STEP, folder / "model", names="live")
        shutil.copytree(STEP, folder / "model" / "step")
        push(folder / "model", {"whole": "step"})  # another user cannot import what it needs
        (folder / "model" / "notes").mkdir(mode=0o700)
        (folder / "model" / "step" / "pytorch_model_fsdp_0").chmod(0)
        skipped = as_nobody(lambda: push(folder / "model", {}))
        whole = as_nobody(lambda: push(folder / "model", {"whole": "step"}))
    assert "notes/ may not be entered" in skipped
    assert "step/pytorch_model_fsdp_0: cannot be read: permission denied" in whole[0]
