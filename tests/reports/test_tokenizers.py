"""The files of a base's tokenizer are written where training changed none of its tokens."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE

import ckptkit
from ckptkit.core.errors import NotACheckpointError, UsageError
from tests.reports.folders import REPORTS, notes_of, save

OF_5 = REPORTS / "09-tokenizer-v5"
PIECES = REPORTS / "20-tokenizer-model"
OF_4 = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json")


def equal(out: Path, base: Path, *names: str) -> bool:
    return all(filecmp.cmp(out / name, base / name, shallow=False) for name in names)


def test_a_report_of_files_that_engines_do_not_read(tmp_path: Path) -> None:
    notes = notes_of(ckptkit.consolidate, OF_5 / "ckpt", tmp_path / "out", base=OF_5 / "base")
    assert equal(tmp_path / "out", OF_5 / "base", *OF_4, "merges.txt", "added_tokens.json")
    assert sum("tokens of the base" in note for note in notes) == 1
    ckptkit.consolidate(OF_5 / "ckpt", tmp_path / "base", base=OF_5 / "base", tokenizer_from="base")
    assert equal(tmp_path / "base", OF_5 / "base", *OF_4)


def test_the_files_of_the_step_are_written_on_request_with_what_readers_refuse(
    tmp_path: Path,
) -> None:
    step = OF_5 / "ckpt" / "checkpoint-1"
    notes = notes_of(
        *(ckptkit.consolidate, OF_5 / "ckpt", tmp_path / "out"),
        base=OF_5 / "base",
        tokenizer_from="step",
    )
    assert equal(tmp_path / "out", step, "tokenizer.json", "tokenizer_config.json")
    assert not (tmp_path / "out" / "vocab.json").exists()
    assert any("'extra_special_tokens' as a list" in note for note in notes)
    assert any("--tokenizer-from base" in note for note in notes)


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_report_of_a_missing_sentencepiece_model(is_merged: bool, tmp_path: Path) -> None:
    base, out = PIECES / "base", tmp_path / "out"
    if is_merged:
        ckptkit.merge_adapter(PIECES / "adapter", out, base=base)
    else:
        ckptkit.consolidate(PIECES / "ckpt", out, base=base)
    assert equal(out, base, "tokenizer.model", "tokenizer.json")


def write_tokenizer(
    folder: Path, words: list[str], added: list[str], *, template: str = "", **roles: Any
) -> None:
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocabulary, [])), **roles
    )
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, tokens: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=tokens,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    model.config.architectures = ["LlamaForCausalLM"]
    save(model.state_dict(), folder)
    model.config.save_pretrained(folder)


@pytest.mark.parametrize(
    ("case", "old"), [(PIECES, ("tokenizer.model",)), (OF_5, ("vocab.json", "merges.txt"))]
)
def test_a_base_with_old_files_alone_gives_them(
    case: Path, old: tuple[str, ...], tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(case / "base", base)
    (base / "tokenizer.json").unlink()
    ckptkit.consolidate(case / "ckpt", out, base=base)
    assert equal(out, base, *old, "tokenizer_config.json")
    step = next((case / "ckpt").iterdir())
    assert equal(out, step, "tokenizer.json")
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (out, step))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours("a b 12").input_ids == theirs("a b 12").input_ids


def test_parts_that_a_class_makes_anew_are_no_difference(tmp_path: Path) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    shutil.copytree(PIECES / "base", base)
    document = json.loads((base / "tokenizer.json").read_text())
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepended = [{"type": "Prepend", "prepend": "\u2581"}, spaces]
    document["normalizer"] = {"type": "Sequence", "normalizers": prepended}
    document["pre_tokenizer"] = None  # as transformers 4 wrote those of Llama 2
    (base / "tokenizer.json").write_text(json.dumps(document))
    shutil.copytree(PIECES / "ckpt" / "checkpoint-5", step)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(step)
    assert not equal(step, base, "tokenizer.json")
    notes = notes_of(ckptkit.consolidate, step, out, base=base)
    assert equal(out, base, "tokenizer.model", "tokenizer.json")
    assert any("'normalizer', 'pre_tokenizer' in another way" in note for note in notes)
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (out, step))
    assert ours("a b 12 c").input_ids == theirs("a b 12 c").input_ids


WORDS = ["a", "b", "c", "<s>", "</s>"]
PLAIN, CHAT, BEGIN = {"eos_token": "</s>"}, {"eos_token": "<|im_end|>"}, {"bos_token": "<s>"}


def test_roles_and_template_of_the_step_are_kept_in_the_form_of_the_base(tmp_path: Path) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    write_model(step, 8)
    write_tokenizer(step, WORDS, ["<|im_end|>", "</s>"], template="{{ 'new' }}", **CHAT)
    write_tokenizer(base, WORDS, ["<|im_end|>"], template="{{ 'old' }}", **PLAIN)
    settings_of_4 = json.loads((base / "tokenizer_config.json").read_text())
    settings_of_4 |= {"extra_special_tokens": {}, "tokenizer_class": "LlamaTokenizerFast"}
    settings_of_4["chat_template"] = "{{ 'old' }}"
    (base / "chat_template.jinja").unlink()
    (base / "tokenizer_config.json").write_text(json.dumps(settings_of_4))
    (base / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    notes = notes_of(ckptkit.consolidate, step, out, base=base)
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written | CHAT == written
    assert written["tokenizer_class"] == "LlamaTokenizerFast"
    assert written["extra_special_tokens"] == {}
    assert written["chat_template"] == "{{ 'new' }}"
    assert (out / "chat_template.jinja").read_text() == "{{ 'new' }}"
    assert json.loads((out / "special_tokens_map.json").read_text()) == CHAT
    assert any("'eos_token', the chat template of the step" in note for note in notes)


def test_a_tokenizer_with_further_tokens_is_that_of_the_step(tmp_path: Path) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    write_model(step, 8)
    write_tokenizer(step, WORDS, ["<tool>"])
    write_tokenizer(base, WORDS, [])
    (base / "vocab.json").write_text("{}")
    ckptkit.consolidate(step, out, base=base)
    assert equal(out, step, "tokenizer.json")
    assert not (out / "vocab.json").exists()


DIGITS = {"type": "Digits", "individual_digits": True}
END = {
    "type": "TemplateProcessing",
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"</s>": {"id": "</s>", "ids": [4], "tokens": ["</s>"]}},
}


@pytest.mark.parametrize(("part", "value"), [("pre_tokenizer", DIGITS), ("post_processor", END)])
def test_a_tokenizer_that_cuts_otherwise_is_that_of_the_step(
    part: str, value: dict[str, Any], tmp_path: Path
) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    write_model(step, 8)
    write_tokenizer(step, WORDS, [])
    write_tokenizer(base, WORDS, [])
    document = json.loads((step / "tokenizer.json").read_text())
    (step / "tokenizer.json").write_text(json.dumps({**document, part: value}))
    notes = notes_of(ckptkit.consolidate, step, out, base=base)
    assert equal(out, step, "tokenizer.json")
    assert any(f"as it has another {part!r}" in note for note in notes)
    assert not any("--tokenizer-from base" in note for note in notes)


@pytest.mark.parametrize("change", [{"special": False}, {"lstrip": True}, {"single_word": True}])
def test_tokens_that_are_found_otherwise_are_those_of_the_step(
    change: dict[str, bool], tmp_path: Path
) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    write_model(step, 8)
    for folder in (step, base):
        write_tokenizer(folder, WORDS, ["<tool>"])
    document = json.loads((step / "tokenizer.json").read_text())
    document["added_tokens"][0] |= change
    (step / "tokenizer.json").write_text(json.dumps(document))
    notes = notes_of(ckptkit.consolidate, step, out, base=base)
    assert equal(out, step, "tokenizer.json")
    assert any("as it finds '<tool>' otherwise" in note for note in notes)


@pytest.mark.parametrize("setting", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_what_a_class_makes_of_its_settings_is_that_of_the_step(
    setting: str, tmp_path: Path
) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    words = [*"abcdeABCDEé", "\u6f22", "\u5b57", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    tokenizer = transformers.BertTokenizer({word: number for number, word in enumerate(words)})
    write_model(step, len(words))
    tokenizer.save_pretrained(base)
    other = transformers.AutoTokenizer.from_pretrained(base, **{setting: False})
    other.save_pretrained(step)
    ckptkit.consolidate(step, out, base=base)
    ours = transformers.BertTokenizer.from_pretrained(out)
    for text in ("A b", "\u00e9 a", "\u6f22\u5b57"):
        assert ours(text).input_ids == other(text).input_ids
    assert equal(out, base, "tokenizer.json")


def test_settings_of_the_step_are_kept_and_what_it_took_away(tmp_path: Path) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    write_model(step, 8)
    write_tokenizer(step, WORDS, [], padding_side="left", model_max_length=77, **PLAIN)
    write_tokenizer(base, WORDS, ["<s>"], **PLAIN, **BEGIN)
    document = json.loads((step / "tokenizer_config.json").read_text()) | {"bos_token": None}
    (step / "tokenizer_config.json").write_text(json.dumps(document))
    shutil.copy(base / "tokenizer.json", step)
    (base / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    notes = notes_of(ckptkit.consolidate, step, out, base=base)
    found = transformers.AutoTokenizer.from_pretrained(out)
    assert (found.padding_side, found.model_max_length, found.bos_token) == ("left", 77, None)
    changed = "'bos_token', 'padding_side', 'model_max_length' of the step"
    assert any(changed in note for note in notes)


def test_tokens_that_an_option_loses_are_named(tmp_path: Path) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    write_model(step, 8)
    write_tokenizer(step, WORDS, ["<tool>"])
    write_tokenizer(base, WORDS, [])
    options: dict[str, Any] = {"base": base, "tokenizer_from": "base"}
    notes = notes_of(ckptkit.consolidate, step, out, **options)
    assert equal(out, base, "tokenizer.json")
    assert any("1 token that the base lacks: '<tool>'" in note for note in notes)


def test_rows_for_new_tokens_count_though_the_configuration_is_that_of_the_base(
    tmp_path: Path,
) -> None:
    step, base, out = tmp_path / "step", tmp_path / "base", tmp_path / "out"
    write_model(step, 8)
    (step / "config.json").unlink()  # as accelerate saves
    write_tokenizer(step, WORDS, ["<tool>"])
    write_model(base, 5)
    write_tokenizer(base, WORDS, [])
    notes = notes_of(ckptkit.consolidate, step, out, base=base)
    assert any("'vocab_size' of config.json is set to 8" in note for note in notes)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert len(model.model.embed_tokens.weight) == 8


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    step, out = tmp_path / "step", tmp_path / "out"
    write_model(step, 8)
    write_tokenizer(step, WORDS, [])
    with pytest.raises(NotACheckpointError, match="no --base was named"):
        ckptkit.consolidate(step, out, tokenizer_from="base")
    with pytest.raises(UsageError, match="cannot be combined"):
        ckptkit.consolidate(step, out, tokenizer=step, tokenizer_from="step")
    with pytest.raises(UsageError, match="not among"):
        ckptkit.consolidate(step, out, tokenizer_from="here")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    added=st.lists(st.sampled_from(["<x>", "<y>", "<z>"]), unique=True),
    of_base=st.lists(st.sampled_from(["<x>", "<y>", "<z>"]), unique=True),
    eos=st.sampled_from(["</s>", "<s>", None]),
    template=st.sampled_from(["", "{{ 'one' }}", "{{ 'two' }}"]),
    has_merges_as_texts=st.booleans(),
)
@pytest.mark.slow
def test_what_is_written_tokenizes_as_the_step_does(
    added: list[str],
    of_base: list[str],
    eos: str | None,
    template: str,
    has_merges_as_texts: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    step, base, out = folder / "step", folder / "base", folder / "out"
    write_model(step, 12)
    roles: dict[str, Any] = {} if eos is None else {"eos_token": eos}
    write_tokenizer(step, WORDS, added, template=template, **roles)
    write_tokenizer(base, WORDS, of_base, template="{{ 'one' }}", **PLAIN)
    (base / "vocab.json").write_text("{}")
    if has_merges_as_texts:  # as older libraries write them
        document = json.loads((base / "tokenizer.json").read_text())
        document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
        (base / "tokenizer.json").write_text(json.dumps(document))
    ckptkit.consolidate(step, out, base=base)
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (out, step))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours("a<x>b<z></s>").input_ids == theirs("a<x>b<z></s>").input_ids
    assert eos is None or ours.eos_token == eos
    assert not template or ours.chat_template == template
    assert added == of_base or not (out / "vocab.json").exists()
    assert (added, eos) != (of_base, "</s>") or (out / "vocab.json").exists()
