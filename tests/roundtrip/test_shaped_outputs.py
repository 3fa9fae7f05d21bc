"""`--dtype base`, `--like` and `--vocab-size` on models that Transformers saved and loads again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import (
    FormatError,
    NotACheckpointError,
    OverflowRefusedError,
    RefusedError,
    UsageError,
)
from ckptkit.options import Layout
from tests.live_truth import refuse
from tests.tensor_images import tensors_in

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    name = {"Bart": "ForConditionalGeneration", "GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")
    return getattr(transformers, f"{kind}{name}")(config).eval()


def trained(model: Any, folder: Path, *, dtype: Any = None) -> Path:
    """Saves every live name in one plain dictionary, as a training loop would."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    folder.mkdir(parents=True)
    torch.save({k: v if dtype is None else v.to(dtype) for k, v in state.items()}, folder / "w.bin")
    model.config.save_pretrained(folder)
    return folder


def weight_map(folder: Path) -> Mapping[str, str]:
    document = json.loads((folder / "model.safetensors.index.json").read_bytes())
    found: dict[str, str] = document["weight_map"]
    return found


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_bytes())


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | values))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several files with norms in float32, as mixed repositories have them."""
    folder = tmp_path_factory.mktemp("llama") / "base"
    model = model_of("Llama").to(torch.bfloat16)
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data = tensor.data.float()
    model.save_pretrained(folder, max_shard_size="3KB")
    assert len(set(weight_map(folder).values())) > 2
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training holds of it: float32 throughout, and other numbers."""
    return trained(model_of("Llama"), tmp_path_factory.mktemp("llama") / "run")


def test_each_tensor_gets_the_type_that_the_base_has_for_it(
    llama: Path, run: Path, tmp_path: Path
) -> None:
    manifest = ckptkit.consolidate(run, tmp_path / "out", dtype="base", base=llama)
    written, base = tensors_in(tmp_path / "out"), tensors_in(llama)
    live = model_of("Llama").state_dict()
    assert {k: v.dtype for k, v in written.items()} == {k: v.dtype for k, v in base.items()}
    assert {v.dtype for v in base.values()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(v, live[k].to(v.dtype)) for k, v in written.items())
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert manifest.options == {"dtype": "base"}
    assert manifest.source["base"] == str(llama)
    assert ckptkit.verify(tmp_path / "out").ok
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(loaded.lm_head.weight, live["lm_head.weight"].bfloat16())


def notes_of(src: Path, out: Path, **options: Any) -> str:
    notes: list[str] = []
    ckptkit.consolidate(
        src, out, **options, listener=lambda event: notes.extend(getattr(event, "notes", ()))
    )
    return "\n".join(notes)


def test_a_tensor_that_the_base_lacks_keeps_its_type_and_is_named(
    run: Path, llama: Path, tmp_path: Path
) -> None:
    small = tmp_path / "base"
    small.mkdir()
    rest = {k: v for k, v in tensors_in(llama).items() if k != "lm_head.weight"}
    save_file(rest, small / "model.safetensors")
    told = notes_of(run, tmp_path / "out", dtype="base", base=small)
    assert f"{small} has no tensor 'lm_head.weight': written in the element type" in told
    assert tensors_in(tmp_path / "out")["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("packed", ["float8_e4m3fn", "int8"])
def test_a_packed_base_is_refused_by_the_name_of_the_tensor(
    packed: str, run: Path, llama: Path, tmp_path: Path
) -> None:
    small, name = tmp_path / "base", "model.layers.1.mlp.up_proj.weight"
    small.mkdir()
    rest = tensors_in(llama)
    save_file(rest | {name: rest[name].to(getattr(torch, packed))}, small / "model.safetensors")
    with pytest.raises(RefusedError, match=f"'{name}' is {packed} in the base model") as caught:
        ckptkit.consolidate(run, tmp_path / "out", dtype="base", base=small)
    assert caught.value.exit_status == 4
    assert not (tmp_path / "out").exists()
    ckptkit.consolidate(run, tmp_path / "out", dtype="base", base=small, keep_dtype=[name])
    assert tensors_in(tmp_path / "out")[name].dtype == torch.float32


def test_types_of_a_base_need_a_base_that_has_the_tensors(run: Path, tmp_path: Path) -> None:
    caught = refuse("none was named", run, tmp_path / "out", kind=RefusedError, dtype="base")
    assert caught.value.exit_status == 4
    other = tmp_path / "other"
    other.mkdir()
    save_file({"h.0.weight": torch.ones(2)}, other / "model.safetensors")
    with pytest.raises(RefusedError, match="has none of the 21 tensors"):
        ckptkit.consolidate(run, tmp_path / "out", dtype="base", base=other)
    half = tmp_path / "half"
    half.mkdir()
    save_file({"a": torch.ones(1, dtype=torch.float16)}, half / "model.safetensors")
    save_file({"a": torch.full((1,), 1e9)}, tmp_path / "huge.safetensors")
    with pytest.raises(OverflowRefusedError):
        ckptkit.consolidate(tmp_path / "huge.safetensors", tmp_path / "o", dtype="base", base=half)


def test_the_file_map_of_another_model_is_kept(llama: Path, run: Path, tmp_path: Path) -> None:
    manifest = ckptkit.consolidate(run, tmp_path / "out", like=llama, dtype="base", base=llama)
    assert weight_map(tmp_path / "out") == weight_map(llama)
    assert manifest.options["like"] == str(llama)
    for file in set(weight_map(llama).values()):  # the same order of tensors in each file
        with safe_open(tmp_path / "out" / file, "np") as ours, safe_open(llama / file, "np") as has:
            assert list(ours.offset_keys()) == list(has.offset_keys())
    assert ckptkit.verify(tmp_path / "out").ok
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    again = tmp_path / "again"
    ckptkit.consolidate(tmp_path / "out", again, like=tmp_path / "out")
    for file in set(weight_map(llama).values()):
        assert (again / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


def test_the_index_of_another_model_is_enough(llama: Path, run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    index = (llama / "model.safetensors.index.json").read_bytes()
    (alone / "model.safetensors.index.json").write_bytes(index)
    ckptkit.consolidate(run, tmp_path / "out", like=alone)
    assert weight_map(tmp_path / "out") == weight_map(llama)


def test_an_untied_head_goes_to_a_file_that_the_model_has(tmp_path: Path) -> None:
    base, model = tmp_path / "base", model_of("Qwen2", tie_word_embeddings=True)
    model.save_pretrained(base, max_shard_size="3KB")
    tied = trained(model, tmp_path / "tied")
    ckptkit.consolidate(tied, tmp_path / "same", like=base)
    assert weight_map(tmp_path / "same") == weight_map(base)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    model.config.tie_word_embeddings = False
    told = notes_of(trained(model, tmp_path / "run"), tmp_path / "out", like=base)
    assert f"{base} has no tensor 'lm_head.weight': it is in" in told
    found = weight_map(tmp_path / "out")
    assert set(found.values()) == set(weight_map(base).values())
    assert {k: v for k, v in found.items() if k != "lm_head.weight"} == weight_map(base)
    loaded = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_one_file_stays_one_file(run: Path, tmp_path: Path) -> None:
    model_of("Llama").save_pretrained(tmp_path / "base")
    ckptkit.consolidate(run, tmp_path / "out", like=tmp_path / "base")
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_what_the_other_model_has_may_not_be_lost_unasked(llama: Path, tmp_path: Path) -> None:
    run = trained(model_of("Llama", num_hidden_layers=1), tmp_path / "run")
    with pytest.raises(RefusedError, match=r"'model\.layers\.1\.\S+' and 8 more, which") as caught:
        ckptkit.consolidate(run, tmp_path / "out", like=llama)
    assert caught.value.exit_status == 4
    assert caught.value.where == f"--like {llama}"
    told = notes_of(run, tmp_path / "out", like=llama, exclude=["model.layers.1.*"])
    assert "would hold nothing are not written: model-0000" in told
    there = {p.name for p in (tmp_path / "out").glob("*.safetensors")}
    assert there == set(weight_map(tmp_path / "out").values()) < set(weight_map(llama).values())


def test_what_is_no_model_folder_has_no_file_map(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refuse("no such directory", run, out, kind=NotACheckpointError, like=tmp_path / "nothing")
    refuse(r"neither 'model\.safetensors' nor", run, out, kind=NotACheckpointError, like=run)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.bin"}}))
    refuse(r"the file 'model\.bin', against safetensors", run, out, kind=FormatError, like=tmp_path)
    index.write_text(json.dumps({"weight_map": {}}))
    refuse("no tensor", run, out, kind=FormatError, like=tmp_path)
    with pytest.raises(UsageError, match="cannot be combined with --like"):
        ckptkit.consolidate(run, out, like=tmp_path, max_shard_size="5GB")
    with pytest.raises(UsageError, match="--to dcp writes none"):
        ckptkit.convert(run, out, to="dcp", like=tmp_path)


Padded = Callable[[Any], None]


def by_resize(model: Any) -> None:
    model.resize_token_embeddings(48, pad_to_multiple_of=32, mean_resizing=False)


def by_hand(model: Any) -> None:
    """Megatron pads the tensors, and its converters leave the configuration as it was."""
    size = model.config.vocab_size
    by_resize(model)
    model.config.vocab_size = size


@pytest.mark.parametrize(
    ("kind", "padded", "options"),
    [
        ("Llama", by_resize, {}),
        ("Llama", by_hand, {}),
        ("Qwen2", by_resize, {"tie_word_embeddings": True}),
        ("Phi", by_hand, {}),  # a head with a bias
        ("GPT2", by_resize, {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}),
        ("Bart", by_hand, {"d_model": 16, "decoder_layers": 1, "encoder_layers": 1}),
    ],
)
@pytest.mark.quick("GPT2-by_resize-options4", "Llama-by_hand-options1")
def test_a_padded_vocabulary_is_cut_to_what_the_model_had(
    kind: str, padded: Padded, options: dict[str, Any], tmp_path: Path
) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = model_of(kind, **options, **ids)
    model.save_pretrained(tmp_path / "expected")
    padded(model)
    assert model.get_input_embeddings().weight.shape[0] == 64
    out = tmp_path / "out"
    told = notes_of(trained(model, tmp_path / "run"), out, vocab_size=48)
    assert "the rows 48 to 63 were cut from" in told
    expected, found = tensors_in(tmp_path / "expected"), tensors_in(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert config_of(out)["vocab_size"] == 48
    assert config_of(out) == config_of(tmp_path / "expected")
    assert ckptkit.verify(out).ok
    type(model).from_pretrained(out)


def test_rows_are_cut_while_elements_are_cast_and_in_every_layout(tmp_path: Path) -> None:
    model = model_of("Qwen2", tie_word_embeddings=True)
    live = {name: value.clone() for name, value in model.state_dict().items()}
    by_resize(model)
    run = trained(model, tmp_path / "run")
    layouts: tuple[Layout, ...] = ("hf", "torch", "dcp")
    for to in layouts:
        out = tmp_path / to
        ckptkit.convert(run, out, to=to, vocab_size=48, dtype="bfloat16")
        assert ckptkit.verify(out).ok
        with ckptkit.open(out) as found:
            assert ("lm_head.weight" in found) == (to == "dcp")
            for name in found:
                assert torch.equal(found[name], live[name].bfloat16())


def test_a_vocabulary_inside_another_configuration_is_cut_there(tmp_path: Path) -> None:
    model = model_of("Llama")
    by_resize(model)
    run = trained(model, tmp_path / "run")
    text = config_of(run)
    (run / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": text, "audio": {"vocab_size": 5}})
    )
    ckptkit.consolidate(run, tmp_path / "out", vocab_size=40, names="live")  # of no such model
    changed = config_of(tmp_path / "out")
    assert changed["text_config"] == text | {"vocab_size": 40}
    assert changed["audio"] == {"vocab_size": 5}
    assert "vocab_size" not in changed


def test_a_vocabulary_is_neither_stretched_nor_cut_into_its_tokens(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(RefusedError, match="49 tokens were asked for and the embeddings have 48"):
        ckptkit.consolidate(run, out, vocab_size=49)
    assert "48 rows already: none was cut" in notes_of(run, out, vocab_size=48)
    with pytest.raises(RefusedError, match="eos_token_id 2, whose row would be cut") as caught:
        ckptkit.consolidate(run, tmp_path / "o", vocab_size=2)
    assert caught.value.hint == "pass --vocab-size 3 or more"
    vocabulary = {f"w{number}": number for number in range(44)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": [{"id": 44}]}
    (run / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RefusedError, match="the tokenizer has 45 tokens against the 44") as caught:
        ckptkit.consolidate(run, tmp_path / "o", vocab_size=44)
    assert caught.value.hint == "pass --vocab-size 45 or more"
    assert "the rows 45 to 47 were cut" in notes_of(run, tmp_path / "fits", vocab_size=45)
    (run / "tokenizer.json").unlink()
    with pytest.raises(RefusedError, match="no tensor has a name"):
        ckptkit.consolidate(run, tmp_path / "o", vocab_size=40, include=["*.mlp.*"])
    for size in (0, -1, "many", 2.5):
        with pytest.raises(UsageError, match="is not a positive whole number"):
            ckptkit.consolidate(run, tmp_path / "o", vocab_size=size)  # type: ignore[arg-type]


def test_tensors_that_disagree_on_the_vocabulary_are_refused(tmp_path: Path) -> None:
    state = {
        "model.embed_tokens.weight": torch.ones(64, 4),
        "lm_head.weight": torch.ones(56, 4),
    }
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(RefusedError, match=r"'lm_head\.weight' has shape \[56, 4\] against 64"):
        ckptkit.consolidate(tmp_path / "w.safetensors", tmp_path / "out", vocab_size=48)
    both = {"encoder.embed_tokens.weight": torch.ones(9, 4), "decoder.wte.weight": torch.ones(8, 4)}
    save_file(both, tmp_path / "two.safetensors")
    with pytest.raises(RefusedError, match="different numbers of rows were found"):
        ckptkit.consolidate(tmp_path / "two.safetensors", tmp_path / "out", vocab_size=8)
