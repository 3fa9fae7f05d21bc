"""Adapters made of a full fine-tune, loaded by PEFT and measured against numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import ckptkit
from ckptkit.adapters import from_diff
from ckptkit.conversion.names_on_disk import DiskNames
from ckptkit.core.errors import (
    AdapterError,
    OutputExistsError,
    OverflowRefusedError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.geometry import whole_tile
from ckptkit.core.index import Fqn
from ckptkit.hub_names.disk_tensors import HubNames, HubTensor
from ckptkit.lora.config import LoraSettings

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
EVERYTHING = ["*norm*", "*embed*", "*wte*", "*wpe*", "*ln_*", "lm_head*", "*.bias"]
INPUT = torch.arange(12)[None]


def model_of(kind: str = "Llama", **options: Any) -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    end = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return getattr(transformers, kind + end)(config).eval()


def shaken(model: Any, size: float = 0.05, only: Callable[[str], bool] = bool) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if only(name):
                tensor.add_(size * torch.randn(tensor.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("from_diff") / "base"
    model_of().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole model was trained."""
    folder = tmp_path_factory.mktemp("from_diff") / "tuned"
    shaken(model_of()).save_pretrained(folder)
    return folder


def notes_of(tuned: Path, out: Path, **options: Any) -> tuple[Any, str]:
    notes: list[str] = []
    manifest = ckptkit.adapter_from_diff(
        tuned, out, **options, listener=lambda e: notes.extend(getattr(e, "notes", ()))
    )
    return manifest.source["difference"], "\n".join(notes)


def logits_with(out: Path, model: Any) -> Any:
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(model, out)(INPUT).logits


def logits_of(model: Any) -> Any:
    with torch.no_grad():
        return model(INPUT).logits


def factors_in(out: Path) -> dict[str, Any]:
    return load_file(out / "adapter_model.safetensors")


def product(out: Path, module: str) -> Any:
    found, name = factors_in(out), f"base_model.model.{module}"
    return found[f"{name}.lora_B.weight"].double() @ found[f"{name}.lora_A.weight"].double()


def test_a_merged_lora_comes_back_at_its_rank(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "model.layers.1.mlp.down_proj"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    trained = shaken(peft.get_peft_model(model_of(), config), 0.2, lambda name: "lora_" in name)
    expected = logits_of(trained)
    deltas = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in trained.named_modules()
        if hasattr(module, "lora_A")
    }
    trained.merge_and_unload().save_pretrained(tmp_path / "merged")
    out = tmp_path / "out"
    found, told = notes_of(tmp_path / "merged", out, base=base, rank=4)
    assert found["error"] < 1e-5
    assert found["lost"] == {}
    assert found["layers"].keys() == deltas.keys()
    for module, delta in deltas.items():
        wanted = delta.double()
        assert float((product(out, module) - wanted).norm() / wanted.norm()) < 1e-5
    document = json.loads((out / "adapter_config.json").read_bytes())
    assert document["target_modules"] == ["model.layers.1.mlp.down_proj", "q_proj", "v_proj"]
    assert (document["r"], document["lora_alpha"], document["rank_pattern"]) == (4, 4, {})
    assert document["task_type"] == "CAUSAL_LM"
    assert document["base_model_name_or_path"] == str(base)
    assert "9 of 14 matrices did not change and have no factors" in told
    assert torch.allclose(logits_with(out, model_of()), expected, atol=1e-5)
    assert ckptkit.verify(out).ok


def test_what_the_factors_miss_is_told_truthfully(base: Path, tuned: Path, tmp_path: Path) -> None:
    out, after, before = tmp_path / "out", model_of(), model_of().state_dict()
    found, told = notes_of(tuned, out, base=base, rank=6)
    shaken(after)
    changes = {k: v.double() - before[k].double() for k, v in after.state_dict().items()}
    assert len(found["layers"]) == 14
    total = missed = 0.0
    for module, layer in found["layers"].items():
        change = changes.pop(f"{module}.weight")
        values = np.linalg.svd(change.numpy(), compute_uv=False)
        best = float(np.sqrt(np.sum(values[6:] ** 2) / np.sum(values**2)))
        assert layer["error"] == pytest.approx(best, rel=1e-5)
        assert layer["energy"] == pytest.approx(1 - best**2, rel=1e-5)
        assert layer["change"] == pytest.approx(float(change.norm()), rel=1e-5)
        gap = float((product(out, module) - change).norm())
        assert layer["error"] * layer["change"] == pytest.approx(gap, rel=1e-4)
        total, missed = total + float(change.norm()) ** 2, missed + gap**2
    assert found["error"] == pytest.approx((missed / total) ** 0.5, rel=1e-4)
    assert found["lost"].keys() == changes.keys()  # norms, embedding and head
    for name, norm in found["lost"].items():
        assert norm == pytest.approx(float(changes[name].norm()), rel=1e-5)
    lost = sum(norm**2 for norm in found["lost"].values())
    assert found["change"] == pytest.approx((total + lost) ** 0.5, rel=1e-5)
    assert found["error_with_lost"] == pytest.approx(((missed + lost) / (total + lost)) ** 0.5)
    assert "7 tensors changed that a LoRA has no factors for, and the adapter LACKS" in told
    assert f"rank 6 keeps {found['energy']:.1%} of the energy" in told
    with torch.no_grad():  # what PEFT computes is what was measured
        expected = model_of()
        for module in found["layers"]:
            expected.get_submodule(module).weight += product(out, module).float()
    assert torch.allclose(logits_with(out, model_of()), logits_of(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Qwen2", {"tie_word_embeddings": True}),  # biases beside factors, and a tied head
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}),  # [in, out]
    ],
)
@pytest.mark.quick("Llama-options0")
def test_with_full_rank_and_the_rest_saved_whole_nothing_is_lost(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model_of(kind, **options).save_pretrained(tmp_path / "base")
    model = shaken(model_of(kind, **options))
    (tmp_path / "run").mkdir()
    torch.save(model.state_dict(), tmp_path / "run" / "pytorch_model.bin")
    out = tmp_path / "out"
    found, told = notes_of(
        tmp_path / "run", out, base=tmp_path / "base", rank=1000, full=EVERYTHING
    )
    assert not told
    assert (found["lost"], found["unchanged"]) == ({}, [])
    settings = LoraSettings.parse(json.loads((out / "adapter_config.json").read_bytes()))
    for module, layer in found["layers"].items():
        assert settings.rank(module) == layer["rank"] == min(layer["shape"])
        assert settings.scaling(module) == 1
    reloaded = logits_with(out, model_of(kind, **options))
    assert torch.allclose(reloaded, logits_of(model), atol=2e-5)
    assert not torch.allclose(reloaded, logits_of(model_of(kind, **options)), atol=1e-2)
    assert ckptkit.verify(out).ok


def test_the_same_numbers_make_the_same_bytes(base: Path, tuned: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        ckptkit.adapter_from_diff(tuned, tmp_path / name, base=base, rank=3, dtype="bfloat16")
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]
    assert {v.dtype for v in factors_in(tmp_path / "a").values()} == {torch.bfloat16}
    rounded, _ = notes_of(tuned, tmp_path / "c", base=base, rank=32, dtype="bfloat16")
    exact, _ = notes_of(tuned, tmp_path / "d", base=base, rank=32)
    assert exact["error"] < 1e-5
    assert 1e-3 < rounded["error"] < 1e-2  # the rounding is measured too


def test_patterns_choose_the_matrices(base: Path, tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = {"include": ["*q_proj*", "lm_head*"], "exclude": ["*layers.0*"]}
    found, _ = notes_of(tuned, out, base=base, rank=2, **options)
    assert list(found["layers"]) == ["lm_head", "model.layers.1.self_attn.q_proj"]
    assert "model.layers.0.self_attn.q_proj.weight" in found["lost"]
    document = json.loads((out / "adapter_config.json").read_bytes())
    assert document["target_modules"] == ["lm_head", "model.layers.1.self_attn.q_proj"]
    logits_with(out, model_of())
    with pytest.raises(OutputExistsError):
        ckptkit.adapter_from_diff(tuned, out, base=base, rank=2)
    ckptkit.adapter_from_diff(tuned, out, base=base, rank=2, overwrite=True)


def changed(tuned: Path, folder: Path, **tensors: Any) -> Path:
    """A copy of a model in which tensors are others; None takes one away."""
    folder.mkdir()
    state = load_file(tuned / "model.safetensors") | tensors
    save_file({k: v for k, v in state.items() if v is not None}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((tuned / "config.json").read_bytes())
    return folder


def test_two_models_that_do_not_fit_are_refused(base: Path, tuned: Path, tmp_path: Path) -> None:
    name, out = "model.layers.0.mlp.up_proj.weight", tmp_path / "out"

    def refused(kind: type[Exception], text: str, side: Path, **options: Any) -> Any:
        with pytest.raises(kind, match=text) as caught:
            ckptkit.adapter_from_diff(side, out, base=base, **({"rank": 2} | options))
        assert not out.exists()
        return caught.value

    other = changed(tuned, tmp_path / "shape", **{name: torch.ones(40, 16)})
    error = refused(RefusedError, r"shape \[40, 16\] after training and \[40, 32\] before", other)
    assert error.where == f"tensor '{name}'"
    lacking = changed(tuned, tmp_path / "lacking", **{name: None})
    refused(RefusedError, f"is in {base} and not in", lacking)
    found, told = notes_of(lacking, tmp_path / "without", base=base, rank=2, exclude=[name])
    assert found["left_out"] == [name]
    assert "left out by --exclude and not compared" in told
    nan = changed(tuned, tmp_path / "nan", **{name: torch.full((40, 32), float("nan"))})
    refused(AdapterError, "NaN or infinity", nan)
    tiny = changed(tuned, tmp_path / "tiny", **{name: torch.ones(40, 32).to(torch.float8_e4m3fn)})
    refused(UnsupportedError, "in the tuned model, whose numbers cannot be compared", tiny)
    refused(RefusedError, "the same numbers as the base model in all 21 tensors", base)
    norms = changed(base, tmp_path / "norms", **{"model.norm.weight": torch.full((32,), 2.0)})
    refused(RefusedError, r"only 'model\.norm\.weight'", norms)
    refused(RefusedError, "only", tuned, include=["nothing"])
    huge = changed(tuned, tmp_path / "huge", **{name: torch.full((40, 32), 1e15)})
    refused(OverflowRefusedError, "does not fit float16", huge, dtype="float16")
    for options in ({"rank": 0}, {"rank": "much"}, {"dtype": "int8"}):
        refused(UsageError, "is not a positive whole number|is not among", tuned, **options)


def test_a_module_that_peft_cannot_name_alone_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    state = {"norm.weight": torch.ones(4), "a_norm.weight": torch.ones(4), "q.weight": torch.eye(4)}
    save_file(state, bare / "model.safetensors")
    more = changed_all(bare, tmp_path / "more", ("norm.weight", "q.weight"))
    with pytest.raises(RefusedError, match="would match 'a_norm' too"):
        ckptkit.adapter_from_diff(more, tmp_path / "o", base=bare, rank=2, full=["norm.weight"])


def changed_all(base: Path, folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    state = load_file(base / "model.safetensors")
    save_file(state | {n: state[n] + 1 for n in names}, folder / "model.safetensors")
    return folder


def test_a_packed_model_is_refused_by_its_configuration(
    base: Path, tuned: Path, tmp_path: Path
) -> None:
    packed = changed(tuned, tmp_path / "packed")
    config = json.loads((packed / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "gptq"}
    (packed / "config.json").write_text(json.dumps(config))
    for after, before in ((packed, base), (tuned, packed)):
        with pytest.raises(RefusedError, match="'quantization_config'"):
            ckptkit.adapter_from_diff(after, tmp_path / "out", base=before, rank=2)


@pytest.mark.parametrize(
    "packed",
    [
        torch.ones(40, 32, dtype=torch.int8),
        torch.ones(640, 1, dtype=torch.uint8),
        torch.ones(320, 1, dtype=torch.bfloat16),
    ],
)
def test_packed_numbers_have_no_difference_though_both_sides_hold_them(
    packed: Any, base: Path, tuned: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    before = changed(base, tmp_path / "before", **{name: packed})
    after = changed(tuned, tmp_path / "after", **{name: 2 * packed})
    with pytest.raises(RefusedError, match=rf"'{name}' belongs to a packed") as caught:
        ckptkit.adapter_from_diff(after, tmp_path / "out", base=before, rank=2)
    assert "element type that it was trained in" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_modules_have_the_names_that_they_have_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk, a prefix is missing and each expert is a tensor of its own."""
    live = {Fqn("model.q.weight"): (4, 4), Fqn("model.experts.up"): (2, 3, 4)}
    tensors = [_piece("q.weight", (4, 4), "model.q.weight", 0)]
    tensors += [_piece(f"experts.{i}.up.weight", (3, 4), "model.experts.up", i) for i in (0, 1)]
    names = HubNames("5.23", live, {tensor.name: tensor for tensor in tensors})
    monkeypatch.setattr(from_diff, "find_disk_names", lambda *_, **__: DiskNames(names))
    state = {str(tensor.name): torch.ones(tensor.shape) for tensor in tensors}
    save_file(state, tmp_path / "base.safetensors")
    save_file({k: v + torch.eye(*v.shape) for k, v in state.items()}, tmp_path / "new.safetensors")
    run = {"model.q.weight": torch.eye(4), "model.experts.up": torch.ones(2, 3, 4)}
    save_file(run, tmp_path / "run.safetensors")
    options: dict[str, Any] = {"base": tmp_path / "base.safetensors", "rank": 4}
    found, told = notes_of(
        tmp_path / "new.safetensors", tmp_path / "out", **options, full=["*experts*"]
    )
    assert list(found["layers"]) == ["model.q"]
    assert list(found["lost"]) == ["experts.0.up.weight", "experts.1.up.weight"]
    assert "LACKS" in told
    with pytest.raises(RefusedError, match="and not in") as caught:
        ckptkit.adapter_from_diff(tmp_path / "run.safetensors", tmp_path / "o", **options)
    assert "`ckptkit consolidate` writes a model folder" in caught.value.hint


def _piece(name: str, shape: tuple[int, int], source: str, row: int) -> HubTensor:
    size = shape[0] * shape[1]
    tile = replace(whole_tile(shape), corners=((0, 0), (row * size,)))
    return HubTensor(Fqn(name), shape, ((Fqn(source), tile),))


def test_a_tuned_adapter_is_no_model(base: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file({name: torch.ones(2, 2)}, tmp_path / "adapter.safetensors")
    with pytest.raises(RefusedError, match="belongs to an adapter of PEFT, expected the weights"):
        ckptkit.adapter_from_diff(
            tmp_path / "adapter.safetensors", tmp_path / "out", base=base, rank=2
        )
