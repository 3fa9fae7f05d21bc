"""What a configuration or a base has and an output lacks is said, or filled from another model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import NotACheckpointError, RefusedError, UsageError
from ckptkit_cli.main import main
from tests.reports.folders import REPORTS, assert_same, notes_of, save, tensors_of
from tests.small_models import class_named, small_model_config

GLM, QWEN, VISION = (
    REPORTS / name
    for name in ("12-mtp-promise-glm", "12-mtp-promise-qwen3-next", "08-frozen-vision")
)


@pytest.mark.parametrize(("case", "count"), [(GLM, 21), (QWEN, 19)])
@pytest.mark.quick("case1-19")
def test_layers_for_further_tokens_that_the_base_has_are_named(
    case: Path, count: int, tmp_path: Path
) -> None:
    notes = notes_of(ckptkit.consolidate, case / "ckpt", tmp_path / "out", base=case / "base")
    said = [note for note in notes if "further tokens" in note]
    assert len(said) == 1
    assert f"{count} tensors that the output lacks" in said[0]
    assert "--fill-from-base" in said[0]


@pytest.mark.parametrize("case", [GLM, QWEN])
@pytest.mark.quick("case1")
def test_they_are_taken_from_the_base_and_their_origin_is_recorded(
    case: Path, tmp_path: Path
) -> None:
    base, out = load_file(case / "base" / "model.safetensors"), tmp_path / "out"
    ckptkit.consolidate(case / "ckpt", tmp_path / "alone", base=case / "base")
    trained = tensors_of(tmp_path / "alone")
    manifest = ckptkit.consolidate(case / "ckpt", out, base=case / "base", fill_from_base=True)
    filled = sorted(base.keys() - trained.keys())
    expected = trained | {name: base[name] for name in filled}
    assert_same(tensors_of(out), expected)
    assert manifest.source["filled"]["tensors"] == filled
    assert str(case / "base") in manifest.source["filled"]["path"]
    assert ckptkit.verify(out).ok


def test_a_promise_is_seen_without_a_base(tmp_path: Path) -> None:
    out = tmp_path / "out"
    notes = notes_of(ckptkit.consolidate, GLM / "ckpt", out, config=GLM / "base" / "config.json")
    assert any("'num_nextn_predict_layers'" in note for note in notes)
    ckptkit.consolidate(
        GLM / "ckpt", tmp_path / "whole", config=GLM / "base", fill_from=GLM / "base"
    )
    assert len(tensors_of(tmp_path / "whole")) == len(tensors_of(out)) + 21


def test_generation_with_further_tokens_works_once_they_are_there(tmp_path: Path) -> None:
    ckptkit.consolidate(GLM / "ckpt", tmp_path / "out", base=GLM / "base", fill_from_base=True)
    base = load_file(GLM / "base" / "model.safetensors")
    found = tensors_of(tmp_path / "out")
    further = [name for name in base if ".layers.46." in name]
    assert further
    assert all(torch.equal(found[name], base[name]) for name in further)


def test_frozen_parts_are_filled_by_the_command_that_the_refusal_proposes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["consolidate", str(VISION / "ckpt"), str(tmp_path / "out")]
    assert main([*words, "--base", str(VISION / "base")]) == 4
    said = " ".join(capfd.readouterr().err.split())
    option = re.search(r"pass (--fill-from-base)", said)
    assert option is not None
    assert main([*words, "--base", str(VISION / "base"), *shlex.split(option[1])]) == 0
    assert_same(tensors_of(tmp_path / "out"), load_file(VISION / "truth.safetensors"))
    told = " ".join(capfd.readouterr().err.split())
    assert "18 tensors taken from" in told
    loaded = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert loaded is not None


def test_without_a_base_the_refusal_names_the_option_for_another_model(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as caught:
        ckptkit.consolidate(
            VISION / "ckpt", tmp_path / "out", config=VISION / "base" / "config.json"
        )
    assert "--fill-from MODEL" in caught.value.hint
    ckptkit.consolidate(
        *(VISION / "ckpt", tmp_path / "out"),
        config=VISION / "base" / "config.json",
        fill_from=VISION / "base",
    )
    assert_same(tensors_of(tmp_path / "out"), load_file(VISION / "truth.safetensors"))


def test_what_is_filled_is_cast_and_averaged_like_the_rest(tmp_path: Path) -> None:
    options: dict[str, Any] = {"base": VISION / "base", "fill_from_base": True}
    ckptkit.consolidate(VISION / "ckpt", tmp_path / "half", dtype="float32", **options)
    assert {t.dtype for t in tensors_of(tmp_path / "half").values()} == {torch.float32}
    truth = load_file(VISION / "truth.safetensors")
    shifted = {n: (t.float() + 1).to(t.dtype) for n, t in truth.items() if "visual" not in n}
    ckptkit.consolidate(VISION / "ckpt", tmp_path / "first", names="live")
    live = tensors_of(tmp_path / "first")
    second = save({n: shifted.get(n, t) for n, t in live.items()}, tmp_path / "second")
    ckptkit.average([VISION / "ckpt", second], tmp_path / "mean", weights=[0.3, 0.7], **options)
    mean = tensors_of(tmp_path / "mean")
    visual = [name for name in truth if "visual" in name]
    assert visual
    assert all(torch.equal(mean[name], truth[name]) for name in visual)


SMALL = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def write_base(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(folder)
    return dict(model.state_dict())


def test_nothing_is_filled_from_another_model_by_mistake(tmp_path: Path) -> None:
    state, base, out = write_base(tmp_path / "base"), tmp_path / "base", tmp_path / "out"
    half = {name: tensor for name, tensor in state.items() if ".1." not in name}
    step = save(half, tmp_path / "step")
    with pytest.raises(UsageError, match="none was named"):
        ckptkit.consolidate(step, out, fill_from_base=True)
    with pytest.raises(UsageError, match="cannot be combined"):
        ckptkit.consolidate(step, out, base=base, fill_from=base, fill_from_base=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((base / "config.json").read_text())
    with pytest.raises(NotACheckpointError, match="no weights"):
        ckptkit.consolidate(step, out, base=base, fill_from=empty)
    other = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=24)
    )
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(RefusedError, match="has none of the"):
        ckptkit.consolidate(step, out, base=base, fill_from=tmp_path / "other")
    inner = transformers.LlamaModel(transformers.LlamaConfig(**SMALL))
    inner.save_pretrained(tmp_path / "inner")
    with pytest.raises(RefusedError, match=r"has none of the|with or without the prefix"):
        ckptkit.consolidate(step, out, base=base, fill_from=tmp_path / "inner")
    packed = {n: t.to(torch.float8_e4m3fn) for n, t in state.items()}
    save_file(packed, base / "model.safetensors")
    with pytest.raises(RefusedError, match="packed form"):
        ckptkit.consolidate(step, out, base=base, fill_from_base=True)
    assert not out.exists()


def test_what_a_wrapper_put_before_names_is_taken_off_as_the_refusal_proposes(
    tmp_path: Path,
) -> None:
    state, base = write_base(tmp_path / "base"), tmp_path / "base"
    half = {f"net.{name}": tensor for name, tensor in state.items() if ".1." not in name}
    step = save({**half, "loss.weight": torch.ones(3)}, tmp_path / "step")
    with pytest.raises(RefusedError, match="has none of the") as caught:
        ckptkit.consolidate(step, tmp_path / "out", base=base, fill_from_base=True)
    options = shlex.split(caught.value.hint.removeprefix("pass ").removesuffix(" as well"))
    out = str(tmp_path / "out")
    command = ["consolidate", str(step), out, "--base", str(base), "--fill-from-base"]
    assert main([*command, *options]) == 0
    assert_same(tensors_of(tmp_path / "out"), state)


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state = write_base(tmp_path / "base")
    half = {name: tensor for name, tensor in state.items() if ".1." not in name}
    step = save(half, tmp_path / "step")
    wide = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, "hidden_size": 16}))
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(RefusedError, match=r"other shapes|another shape"):
        ckptkit.consolidate(
            step, tmp_path / "out", base=tmp_path / "base", fill_from=tmp_path / "wide"
        )
    assert not (tmp_path / "out").exists()


def test_a_damaged_base_is_not_taken(tmp_path: Path) -> None:
    state, base = write_base(tmp_path / "base"), tmp_path / "base"
    half = {name: tensor for name, tensor in state.items() if ".1." not in name}
    step = save(half, tmp_path / "step")
    data = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(Exception, match=r"ends at byte|missing"):
        ckptkit.consolidate(step, tmp_path / "out", base=base, fill_from_base=True)
    assert not (tmp_path / "out").exists()


def test_a_deepspeed_checkpoint_without_frozen_parameters_is_filled(tmp_path: Path) -> None:
    """As `exclude_frozen_parameters` leaves it: the trained half of the names."""
    state, base = write_base(tmp_path / "base"), tmp_path / "base"
    trained = {name: tensor + 1 for name, tensor in state.items() if "mlp" in name}
    step = save({"module": trained}, tmp_path / "step")
    ckptkit.consolidate(step, tmp_path / "out", base=base, fill_from_base=True)
    found = tensors_of(tmp_path / "out")
    assert all(torch.equal(found[n], trained.get(n, t)) for n, t in state.items())
    manifest = json.loads((tmp_path / "out" / "ckptkit.json").read_text())
    assert set(manifest["source"]["filled"]["tensors"]) == state.keys() - trained.keys()


@pytest.mark.filterwarnings("ignore")
def test_a_tied_head_whose_embedding_is_filled_is_no_tensor_of_its_own(tmp_path: Path) -> None:
    kind = class_named("Gemma3ForConditionalGeneration")
    model = kind(small_model_config(kind))
    model.save_pretrained(tmp_path / "base")
    state = {n: t for n, t in model.state_dict().items() if "vision" not in n and "embed" not in n}
    assert "lm_head.weight" in state
    step = save(state, tmp_path / "step")
    out = tmp_path / "out"
    notes = notes_of(*(ckptkit.consolidate, step, out), base=tmp_path / "base", fill_from_base=True)
    assert not any("has no tensor" in note for note in notes)
    loaded = kind.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in model.state_dict().items())


def write_base_with_further_layer(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Writes a model whose class loads no layer for further tokens, and such a layer with it."""
    config = transformers.DeepseekV3Config(
        **{**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2},
        moe_intermediate_size=8,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        kv_lora_rank=4,
        q_lora_rank=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    model.save_pretrained(folder)
    stored = tensors_of(folder)
    further = {n.replace(".1.", ".2.", 1): t + 1 for n, t in stored.items() if "layers.1." in n}
    save_file({**stored, **further}, folder / "model.safetensors", {"format": "pt"})
    return model, further


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_the_configuration_counts_and_no_class_loads_is_no_misfit(
    tmp_path: Path,
) -> None:
    from peft import LoraConfig, get_peft_model

    base = tmp_path / "base"
    model, further = write_base_with_further_layer(base)
    step = save(model.state_dict(), tmp_path / "step")
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "alone", base=base)
    assert any("further tokens" in note and "--fill-from-base" in note for note in notes)
    ckptkit.consolidate(step, tmp_path / "filled", base=base, fill_from_base=True)
    ckptkit.consolidate(base, tmp_path / "again")
    adapted = get_peft_model(model, LoraConfig(r=1, target_modules=["o_proj"]))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    source, merged = tmp_path / "adapter", tmp_path / "merged"
    ckptkit.merge_adapter(source, merged, base=base, allow_untrained=True)
    for out in ("filled", "again", "merged"):
        found = tensors_of(tmp_path / out)
        assert found.keys() == tensors_of(base).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in further.items())


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_no_configuration_counts_is_a_misfit(tmp_path: Path) -> None:
    write_base_with_further_layer(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 0}))
    with pytest.raises(RefusedError, match="would not be used"):
        ckptkit.consolidate(tmp_path / "base", tmp_path / "out")
