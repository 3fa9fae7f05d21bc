"""What is taken out of small files, and what a model card says."""

from __future__ import annotations

from ckptkit.hub.contents import (
    ModelFacts,
    base_model_of,
    clean_contents,
    is_ours,
    scrub,
    scrub_card,
    write_card,
)


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
