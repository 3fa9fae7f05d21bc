"""A model stops where its tokenizer ends a turn, as `generate` of the written folder shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import ckptkit
from ckptkit.consumers.class_facts import generation_of
from tests.reports.folders import REPORTS, notes_of, save

TOKENS = 16
GENERATION_KEYS = {"eos_token_id", "pad_token_id", "num_beams", "forced_eos_token_id"}
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "</s>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def stubborn_model(token: int, **values: Any) -> Any:
    """Returns a model that says one token for ever."""
    config = transformers.Qwen2Config(
        vocab_size=TOKENS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        **values,
    )
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[token] = 1.0
    return model


def write_tokenizer(
    folder: Path, eos: str, template: str = "", more: tuple[str, ...] = (), **roles: str
) -> dict[str, int]:
    """Writes a tokenizer as `save_pretrained` does; returns the numbers of its special tokens."""
    special = (*ENDS, *more)
    words = {f"w{i}": i for i in range(TOKENS - len(special))}
    numbers = {token: len(words) + i for i, token in enumerate(special)}
    roles |= {"eos_token": eos, "unk_token": "w0"}
    model = WordLevel({**words, **numbers}, roles["unk_token"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **roles)
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in special if t != eos]})
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)
    return numbers


def lengths(folder: Path) -> int:
    """Returns how many tokens the model of a folder generates of at most five."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([[1]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    return int(out.shape[1]) - 1


@pytest.mark.parametrize("command", ["consolidate", "merge"])
def test_a_report_of_a_model_that_never_stopped(command: str, tmp_path: Path) -> None:
    case, out = REPORTS / f"06-eos-{command}", tmp_path / "out"
    if command == "merge":
        notes = notes_of(ckptkit.merge_adapter, case / "adapter", out, base=case / "base")
    else:
        notes = notes_of(ckptkit.consolidate, case / "ckpt", out, base=case / "base")
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == [2, 0]
    said = [note for note in notes if "turns end with" in note]
    assert len(said) == 1
    assert "(2)" in said[0]
    assert "has 0" in said[0]


@pytest.mark.filterwarnings("ignore")
def test_generate_stops_at_the_end_that_the_tokenizer_has(tmp_path: Path) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    number = write_tokenizer(source, "<|im_end|>")["<|im_end|>"]
    model = stubborn_model(number, eos_token_id=0, bos_token_id=1)
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    model.generation_config.save_pretrained(source)
    ckptkit.consolidate(source, out, generation_config="keep")
    assert lengths(out) == 5
    shutil.rmtree(out)
    ckptkit.consolidate(source, out)
    assert lengths(out) == 1
    (source / "generation_config.json").unlink()
    shutil.rmtree(out)
    ckptkit.consolidate(source, out)
    assert lengths(out) == 1


@pytest.mark.filterwarnings("ignore")
def test_an_end_of_turn_of_the_template_counts_too(tmp_path: Path) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    numbers = write_tokenizer(source, "<|endoftext|>", CHATML)
    model = stubborn_model(numbers["<|im_end|>"], eos_token_id=numbers["<|endoftext|>"])
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    model.generation_config.save_pretrained(source)
    notes = notes_of(ckptkit.consolidate, source, out)
    assert any("'<|im_end|>'" in note for note in notes)
    assert lengths(out) == 1


BY_ROLE = (
    "{%% for m in messages %%}{%% if m['role'] == 'user' %%}<|user|>{{ m['content'] }}\n"
    "{%% elif m['role'] == 'assistant' %%}<|assistant|>{{ m['content'] %s }}%s{%% endif %%}"
    "{%% endfor %%}"
)


@pytest.mark.parametrize(
    ("end", "template"),
    [
        ("<|end|>", "{% for m in messages %}{{ m['content'] + '<|end|>\n' }}{% endfor %}"),
        ("[|endofturn|]", "{% for m in messages %}{{ m.content }}[|endofturn|]\n{% endfor %}"),
        (
            "<end_of_utterance>",
            "{% for m in messages %}{{ m.content or '<image>' }}<end_of_utterance>{% endfor %}",
        ),
        (
            "<|eot_id|>",
            "{% set e = '<|eot_id|>' %}{% for m in messages %}{{ m.content + e }}{% endfor %}",
        ),
        ("<|stop_here|>", BY_ROLE % ("", "<|stop_here|>")),
        ("<|stop_here|>", BY_ROLE % ("| trim + '<|stop_here|>'", "")),
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.quick(
    "<|stop_here|>-template4",
    "[|endofturn|]-{% for m in messages %}{{ m.content }}[|endofturn|]\\n{% endfor %}",
)
def test_an_end_is_found_whatever_a_family_calls_it(
    end: str, template: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    more = () if end in ENDS else (end,)
    numbers = write_tokenizer(source, "</s>", template, more)
    model = stubborn_model(numbers[end], eos_token_id=numbers["</s>"])
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    model.generation_config.save_pretrained(source)
    ckptkit.consolidate(source, out)
    assert lengths(out) == 1
    stops = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [numbers[end], numbers["</s>"]]


CALLS = "{%% if m['role'] == 'assistant' and m.calls %%}%s{%% else %%}{{ m.content }}{%% endif %%}"


@pytest.mark.parametrize(
    ("part", "template"),
    [
        # As gpt-oss: thoughts end with the one token, answers with the other.
        ("<|end|>", BY_ROLE % ("", "<|return|>") + "<|end|>"),
        ("</think>", BY_ROLE % ("", "</think>{{ m.answer }}")),
        ("<|user|>", BY_ROLE % ("", "")),
        ("<call>", CALLS % "{{ m['content'] + '<call>' + m.calls }}"),
        ("<call>", CALLS % "{{ m['content'] + '<call>' }}{{ m.calls }}"),
        ("<bot>", "{% if m['role'] != 'assistant' %}{{ m['content'] + '<bot>' }}{% endif %}"),
        ("<text>", "{% if m.role == 'assistant' %}{% if m.content %}<text>{% endif %}{% endif %}"),
    ],
)
@pytest.mark.quick("<|end|>-template0", "<call>-template3")
def test_what_ends_a_part_of_an_answer_stops_nothing(
    part: str, template: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    numbers = write_tokenizer(source, "<|return|>", template, (part, "<|return|>"))
    model = stubborn_model(3, eos_token_id=numbers["<|return|>"])
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    model.generation_config.save_pretrained(source)
    assert not any("turns end" in note for note in notes_of(ckptkit.consolidate, source, out))


@pytest.mark.parametrize("form", ["several", "processor"])
def test_templates_as_earlier_versions_store_them_count(form: str, tmp_path: Path) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    numbers = write_tokenizer(source, "<|endoftext|>")
    if form == "several":
        path = source / "tokenizer_config.json"
        document = json.loads(path.read_text())
        others = {"name": "tool_use", "template": "{{ messages }}"}
        document["chat_template"] = [others, {"name": "default", "template": CHATML}]
        path.write_text(json.dumps(document))
    else:
        (source / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    model = stubborn_model(3, eos_token_id=numbers["<|endoftext|>"])
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    ckptkit.consolidate(source, out)
    stops = transformers.GenerationConfig.from_pretrained(out).eos_token_id
    assert stops == [numbers["<|im_end|>"], numbers["<|endoftext|>"]]


def generates(folder: Path, auto: Any) -> dict[str, Any]:
    found: dict[str, Any] = auto.from_pretrained(folder).generation_config.to_diff_dict()
    return {
        key: found[key] for key in found.keys() - {"_from_model_config", "transformers_version"}
    }


@pytest.mark.filterwarnings("ignore")
def test_all_else_with_which_a_model_generates_stays_where_it_had_no_generation_config(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    numbers = write_tokenizer(source, "<|im_end|>")
    sizes = {f"{side}_{key}": 1 for side in ("encoder", "decoder") for key in ("layers", "ffn_dim")}
    sizes |= {f"{side}_attention_heads": 1 for side in ("encoder", "decoder")}
    config = transformers.BartConfig(vocab_size=TOKENS, d_model=8, **sizes)
    model = transformers.BartForConditionalGeneration(config)
    save(model.state_dict(), source)
    config.architectures = ["BartForConditionalGeneration"]
    config.save_pretrained(source)
    document = json.loads((source / "config.json").read_text()) | {"num_beams": 3}
    (source / "config.json").write_text(json.dumps(document))
    ckptkit.consolidate(source, out, generation_config="keep")
    before = generates(out, transformers.AutoModelForSeq2SeqLM)
    shutil.rmtree(out)
    ckptkit.consolidate(source, out)
    after = generates(out, transformers.AutoModelForSeq2SeqLM)
    assert before["num_beams"] == 3
    assert after == before | {"eos_token_id": [numbers["<|im_end|>"], 2]}


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "eos_token_id": st.one_of(st.none(), st.integers(0, 9), st.lists(st.integers(0, 9))),
        "pad_token_id": st.one_of(st.none(), st.integers(0, 9)),
        "num_beams": st.integers(1, 3),
        "forced_eos_token_id": st.integers(0, 9),
        "vocab_size": st.just(10),
    },
)


@given(
    config=SETTINGS,
    parts=st.dictionaries(
        st.sampled_from(["decoder", "text_config", "vision_config"]), SETTINGS, max_size=2
    ),
)
def test_settings_of_a_configuration_are_those_that_transformers_takes(
    config: dict[str, Any], parts: dict[str, Any]
) -> None:
    document = {**config, **parts}
    taken = transformers.GenerationConfig.from_model_config(dict(document)).to_diff_dict()
    assert generation_of(document) == {
        key: value for key, value in taken.items() if key in GENERATION_KEYS
    }


@pytest.mark.filterwarnings("ignore")
def test_ids_of_the_configuration_count_where_the_other_file_has_none(tmp_path: Path) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    model = stubborn_model(3, eos_token_id=3)
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    (source / "generation_config.json").write_text('{"do_sample": false}')
    ckptkit.consolidate(source, out)
    assert lengths(out) == 1


@pytest.mark.parametrize(
    ("eos", "stated"), [("<|im_end|>", [11, 14]), ("<|im_end|>", 11), ("<|endoftext|>", [14, 11])]
)
@pytest.mark.quick(1)
def test_what_agrees_is_left_as_it_is(eos: str, stated: int | list[int], tmp_path: Path) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    write_tokenizer(source, eos, CHATML)
    model = stubborn_model(3, eos_token_id=stated)
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    before = {"eos_token_id": stated, "temperature": 0.7, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(before))
    assert not any("turns end" in note for note in notes_of(ckptkit.consolidate, source, out))
    assert json.loads((out / "generation_config.json").read_text()) == before


def test_a_model_that_generates_nothing_gets_no_generation_config(tmp_path: Path) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    write_tokenizer(source, "<|im_end|>")
    config = stubborn_model(3, eos_token_id=0).config
    config.num_labels = 2
    config.pad_token_id = 0
    model = transformers.Qwen2ForSequenceClassification(config)
    save(model.state_dict(), source)
    model.config.architectures = ["Qwen2ForSequenceClassification"]
    model.config.save_pretrained(source)
    ckptkit.consolidate(source, out)
    assert not (out / "generation_config.json").exists()


def test_a_token_that_the_template_writes_and_no_tokenizer_has_is_named(tmp_path: Path) -> None:
    source, out = tmp_path / "step", tmp_path / "out"
    write_tokenizer(source, "</s>", CHATML.replace("im_start", "turn_start"))
    model = stubborn_model(3, eos_token_id=15)
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    notes = notes_of(ckptkit.consolidate, source, out)
    assert any("'<|turn_start|>'" in note and "no token of its own" in note for note in notes)


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    eos=st.sampled_from(ENDS),
    stated=st.one_of(
        st.none(), st.integers(0, TOKENS - 1), st.lists(st.integers(0, TOKENS - 1), max_size=3)
    ),
    of_file=st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {}, optional={"eos_token_id": st.one_of(st.none(), st.integers(0, TOKENS - 1))}
        ),
    ),
    is_chat=st.booleans(),
)
@pytest.mark.slow
def test_every_end_of_a_tokenizer_stops_whatever_the_files_said(
    eos: str,
    stated: int | list[int] | None,
    of_file: dict[str, int | None] | None,
    is_chat: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    source, out = folder / "step", folder / "out"
    numbers = write_tokenizer(source, eos, CHATML if is_chat else "")
    model = stubborn_model(numbers[eos], eos_token_id=stated)
    save(model.state_dict(), source)
    model.config.save_pretrained(source)
    if of_file is not None:
        (source / "generation_config.json").write_text(json.dumps(of_file))
    ckptkit.consolidate(source, out)
    # Of the model: where the configuration says it all, there need be no second file.
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    found = model.generation_config.eos_token_id
    ids = found if isinstance(found, list) else [found]
    assert numbers[eos] in ids
    assert lengths(out) == 1
    before = (of_file or {}).get("eos_token_id") if of_file is not None else stated
    kept = before if isinstance(before, list) else [before]
    assert {number for number in kept if number is not None} <= set(ids)
