"""Reports about names and parts of a model: they are written as the family writes them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import ckptkit
from ckptkit.conversion import compare_names as comparing
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    RefusedError,
)
from ckptkit.storage.places import PathLike
from tests.command_line import run_command
from tests.compared_models import State, model_of, trained
from tests.reports.folders import assert_same, converted, tensors_of

REPORTS = Path(__file__).resolve().parents[2] / "fixtures" / "reports"
VEOMNI, DINO = REPORTS / "18-veomni-experts", REPORTS / "26-dinov3"
TITAN, COMPOSER = REPORTS / "27-torchtitan-ema", REPORTS / "29-composer-hf"
PREFIXES, GLM = REPORTS / "28-s3-prefix", REPORTS / "12-mtp-promise-glm"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Tensors = dict[str, torch.Tensor]


def refused(src: PathLike, out: Path, **options: Any) -> CkptkitError:
    with pytest.raises(CkptkitError) as caught:
        ckptkit.consolidate(src, out, **options)
    assert not out.exists()
    return caught.value


def commands_in(hint: str) -> list[list[str]]:
    """Returns the whole commands that a message proposes, without `ckptkit`."""
    return [shlex.split(found)[1:] for found in re.findall(r"`(ckptkit [^`]*)`", hint)]


def options_in(hint: str) -> list[list[str]]:
    """Returns the options that a message proposes, apart for each `or`."""
    found = []
    for part in re.split(r", or |; or ", hint):
        words = shlex.split(re.sub(r"[,;]|`", " ", part).replace("'", "'"))
        at = [number for number, word in enumerate(words) if word.startswith("--")]
        found.append([word for n in at for word in words[n : n + 2]])
    return [options for options in found if options]


def ran(*words: object) -> None:
    done = run_command(*words)
    assert done.returncode == 0, done.stderr


# --- what a wrapper put before the names ---


@pytest.mark.parametrize("base", [None, COMPOSER / "base"], ids=["alone", "base"])
def test_names_that_transformers_5_alone_loads_are_written_as_the_class_has_them(
    tmp_path: Path, base: Path | None
) -> None:
    tensors, notes = converted(COMPOSER / "ckpt", tmp_path / "out", base=base)
    assert_same(tensors, load_file(COMPOSER / "truth.safetensors"))
    (note,) = [note for note in notes if "begin with" in note]
    assert note.startswith("all names begin with 'model.'")


def test_without_transformers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "list_missing_libraries", lambda *_: ["transformers"])
    tensors, _ = converted(COMPOSER / "ckpt", tmp_path / "out")
    assert_same(tensors, load_file(COMPOSER / "truth.safetensors"))
    based, _ = converted(COMPOSER / "ckpt", tmp_path / "based", base=COMPOSER / "base")
    assert_same(based, load_file(COMPOSER / "truth.safetensors"))


WRAPPERS = ("model.", "net.", "module.net.", "policy.model.", "model.model.")
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "head_dim": 8,
    },
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.quick(
    "-Llama-model.", "tied-Qwen3Moe-policy.model.", "-Llama-net.", "tied-Llama-module.net."
)
def test_any_wrapper_is_taken_off(tmp_path: Path, wrapper: str, family: str, tied: bool) -> None:
    model = model_of(family, tie_word_embeddings=tied, **FAMILIES[family])
    model.save_pretrained(tmp_path / "saved")
    state = {f"{wrapper}{name}": value for name, value in model.state_dict().items()}
    src = trained(tmp_path / "src", state, model.config)
    tensors, notes = converted(src, tmp_path / "out")
    assert_same(tensors, tensors_of(tmp_path / "saved"))
    # `module.` is that of DDP, and goes unsaid.
    said = wrapper.removeprefix("module.")
    assert [n for n in notes if n.startswith(f"all names begin with '{said}'")], notes


@pytest.mark.parametrize("has_base", [False, True], ids=["alone", "base"])
def test_a_wrapper_is_taken_off_whatever_was_asked_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_base: bool
) -> None:
    """The answer of a first question comes while tensors are copied."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    values = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(num_hidden_layers=1, num_attention_heads=2, **values)
    )
    model.save_pretrained(tmp_path / "base")
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    src = trained(tmp_path / "src", state, None if has_base else model.config)
    tensors, _ = converted(src, tmp_path / "out", base=tmp_path / "base" if has_base else None)
    assert_same(tensors, tensors_of(tmp_path / "base"))


REAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Models whose own names all begin with one prefix.
    "a tied head": ("Llama", "ForCausalLM", {"tie_word_embeddings": True}),
    "a bare model": ("Llama", "Model", {}),
    "a prefix of the family": ("GPT2", "LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "an encoder": ("Bert", "Model", {}),
}


@pytest.mark.parametrize("case", REAL)
def test_a_prefix_that_is_the_models_own_stays(tmp_path: Path, case: str) -> None:
    family, kind, values = REAL[case]
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"intermediate_size": 48}
        | values
    )
    model = getattr(transformers, f"{family}{kind}")(config)
    model.save_pretrained(tmp_path / "saved")
    src = trained(tmp_path / "src", model.state_dict(), model.config)
    tensors, notes = converted(src, tmp_path / "out")
    assert not [note for note in notes if "begin with" in note]
    assert tensors.keys() == tensors_of(tmp_path / "saved").keys()


def test_names_for_training_keep_what_a_wrapper_put_there(tmp_path: Path) -> None:
    ckptkit.convert(COMPOSER / "ckpt", tmp_path / "dcp", to="dcp")
    names = [line.name for line in ckptkit.inspect(tmp_path / "dcp").tensors]
    assert "model.model.norm.weight" in names
    live, _ = converted(COMPOSER / "ckpt", tmp_path / "live", names="live")
    assert "model.model.norm.weight" in live


# --- copies of a model ---


def test_each_copy_of_a_model_is_proposed_with_a_whole_command_that_works(tmp_path: Path) -> None:
    shutil.copytree(DINO / "base", tmp_path / "base")
    src = DINO / "ckpt"
    error = refused(src, tmp_path / "out", base=tmp_path / "base")
    assert "3 copies of the model" in error.message
    proposed = commands_in(error.hint)
    copies = ["teacher.backbone.", "model_ema.backbone.", "student.backbone."]
    assert [words[words.index("--strip-prefix") + 1] for words in proposed] == copies
    with ckptkit.open(src) as checkpoint:
        stored = {n: torch.as_tensor(checkpoint.read(n)) for n in list(checkpoint.keys())}
    for copy, words in zip(copies, proposed, strict=True):
        ran(*words, "--overwrite")
        expected = {n.removeprefix(copy): v for n, v in stored.items() if n.startswith(copy)}
        assert_same(tensors_of(tmp_path / "out"), expected)
    ran(*proposed[0], "--overwrite")
    assert_same(tensors_of(tmp_path / "out"), load_file(DINO / "truth.safetensors"))


def test_a_copy_is_included_by_its_stored_names(tmp_path: Path) -> None:
    options = {"include": ["teacher.backbone.*"], "strip_prefix": "teacher.backbone."}
    tensors, _ = converted(DINO / "ckpt", tmp_path / "out", **options)
    assert_same(tensors, load_file(DINO / "truth.safetensors"))
    stripped = {"include": ["blocks.*"], "strip_prefix": "teacher.backbone."}
    tensors, _ = converted(DINO / "ckpt", tmp_path / "blocks", **stripped)
    assert all(name.startswith("blocks.") for name in tensors)
    left = {
        "exclude": ["student.*", "model_ema.*", "teacher.*"],
        "strip_prefix": "teacher.backbone.",
    }
    tensors, _ = converted(DINO / "ckpt", tmp_path / "left", **left)
    assert_same(tensors, load_file(DINO / "truth.safetensors"))


@pytest.mark.parametrize("head", [{}, {"critic.weight": torch.ones(2, 2)}], ids=["", "head"])
@pytest.mark.parametrize(
    ("copies", "order"),
    [
        (("", "ema."), ["ema.", ""]),
        (("model_ema.module.", ""), ["model_ema.module.", ""]),
        (("student.", "teacher.", "ema."), ["teacher.", "ema.", "student."]),
        (("online.", "target."), ["target.", "online."]),
    ],
)
@pytest.mark.quick("copies0-order0-", "copies1-order1-head")
def test_copies_of_a_model_of_transformers_are_proposed_and_load(
    tmp_path: Path, copies: tuple[str, ...], order: list[str], head: State
) -> None:
    model = model_of()
    state = dict(head)
    for number, copy in enumerate(copies):
        state |= {f"{copy}{n}": v + number for n, v in model.state_dict().items()}
    src = trained(tmp_path / "src", state, model.config)
    proposed = commands_in(refused(src, tmp_path / "out").hint)
    assert len(proposed) == len(copies)
    for copy, words in zip(order, proposed, strict=True):
        ran(*words, "--overwrite")
        number = copies.index(copy)
        expected = {name: value + number for name, value in model.state_dict().items()}
        assert_same(tensors_of(tmp_path / "out"), expected)
        assert "live" not in words


def test_state_dicts_that_are_copies_are_all_proposed(tmp_path: Path) -> None:
    model = model_of()
    state = dict(model.state_dict())
    both = {"model": state, "ema": {name: value + 1 for name, value in state.items()}}
    torch.save(both, tmp_path / "src.pt")
    error = refused(tmp_path / "src.pt", tmp_path / "out")
    assert isinstance(error, AmbiguousSourceError)
    assert options_in(error.hint) == [["--select", "ema"], ["--select", "model"]]
    for number, options in enumerate(options_in(error.hint)):
        ran("consolidate", tmp_path / "src.pt", tmp_path / "out", *options, "--overwrite")
        expected = both["model" if number else "ema"]
        assert_same(tensors_of(tmp_path / "out"), expected)


@pytest.mark.parametrize("parts", [("student.", "teacher."), ("actor.module.", "ref.")])
def test_a_copy_that_holds_the_model_as_an_attribute_is_proposed_without_it(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    model = model_of()
    copies = [f"{part}model." for part in parts]
    state = {f"{copy}{name}": v for copy in copies for name, v in model.state_dict().items()}
    src = trained(tmp_path / "src", state, model.config)
    proposed = commands_in(refused(src, tmp_path / "out").hint)
    assert {words[words.index("--strip-prefix") + 1] for words in proposed} == set(copies)
    for words in proposed:
        ran(*words, "--overwrite")
        assert_same(tensors_of(tmp_path / "out"), model.state_dict())


BESIDE: dict[str, State] = {
    "a metric": {"metric.total": torch.ones(())},
    "several": {
        "acc.mean": torch.ones(()),
        "acc.weight": torch.ones(()),
        "loss.weight": torch.ones(4),
        "class_weights": torch.ones(4),
    },
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize(
    ("wrapper", "family"),
    [
        *((wrapper, "Llama") for wrapper in ("", "model.", "net.", "policy.model.")),
        ("net.", "Qwen3Moe"),  # whose names on disk are converted
    ],
)
@pytest.mark.quick("-Llama-several", "net.-Qwen3Moe-a metric")
def test_what_a_module_holds_beside_the_model_is_left_out_by_the_hint(
    tmp_path: Path, wrapper: str, family: str, beside: str
) -> None:
    model = model_of(family, **FAMILIES[family])
    model.save_pretrained(tmp_path / "base")
    saved = tensors_of(tmp_path / "base")
    state = {f"{wrapper}{name}": value for name, value in model.state_dict().items()}
    src = trained(tmp_path / "src", state | BESIDE[beside])
    out, base = tmp_path / "out", tmp_path / "base"
    hint = refused(src, out, base=base).hint
    whole = ["consolidate", src, out, "--base", base, *options_in(hint)[0]]
    done = run_command(*next(iter(commands_in(hint)), whole))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert "AutoModelForCausalLM.from_pretrained" in done.stdout
    assert_same(tensors_of(tmp_path / "out"), saved)


def test_what_a_wrapper_put_inside_the_model_is_left_out_by_the_hint(tmp_path: Path) -> None:
    model = model_of()
    model.save_pretrained(tmp_path / "base")
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    src = trained(tmp_path / "src", state | {"model.head.weight": torch.ones(2, 32)})
    (command,) = commands_in(refused(src, tmp_path / "out", base=tmp_path / "base").hint)
    assert "live" not in command
    ran(*command)
    assert_same(tensors_of(tmp_path / "out"), model.state_dict())


@pytest.mark.parametrize("beside", [{}, BESIDE["a metric"]], ids=["", "a metric"])
@pytest.mark.parametrize("wrapper", ["model.", "net.", "policy.model."])
@pytest.mark.quick("net.-", "model.-a metric")
def test_a_wrapped_model_whose_frozen_parts_were_not_saved_is_filled(
    tmp_path: Path, wrapper: str, beside: State
) -> None:
    model, base, out = model_of(), tmp_path / "base", tmp_path / "out"
    model.save_pretrained(base)
    frozen = ("model.embed_tokens.", "lm_head.")
    state = {n: v + 1 for n, v in model.state_dict().items() if not n.startswith(frozen)}
    src = trained(tmp_path / "src", {f"{wrapper}{n}": v for n, v in state.items()} | beside)
    (command,) = commands_in(refused(src, out, base=base).hint)
    assert "--fill-from-base" in command
    ran(*command)
    expected = tensors_of(base) | state
    assert_same(tensors_of(out), expected)
    if not beside:
        filled, notes = converted(src, tmp_path / "found", base=base, fill_from_base=True)
        assert_same(filled, expected)
        assert any(note.startswith(f"all names begin with '{wrapper}'") for note in notes)


def test_no_hint_proposes_to_write_a_part_of_a_model(tmp_path: Path) -> None:
    model = model_of()
    state = {f"net.{n}": v for n, v in model.state_dict().items() if ".layers.1." not in n}
    src = trained(tmp_path / "src", state, model.config)
    error = refused(src, tmp_path / "out")
    assert isinstance(error, RefusedError)
    assert "names begin with 'net.'" in error.message
    assert not commands_in(error.hint)
    assert "the model that was trained" in error.hint


@pytest.mark.parametrize("parts", [("teacher.", "student."), ("net.",)])
def test_hints_are_the_same_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]
) -> None:
    model = model_of()
    model.save_pretrained(tmp_path / "base")
    state = {f"{part}{name}": v for part in parts for name, v in model.state_dict().items()}
    src = trained(tmp_path / "src", state | BESIDE["a metric"])
    with_it = refused(src, tmp_path / "out", base=tmp_path / "base").hint
    monkeypatch.setattr(comparing, "list_missing_libraries", lambda *_: ["transformers"])
    without = refused(src, tmp_path / "out", base=tmp_path / "base").hint
    assert commands_in(without) == commands_in(with_it)
    assert len(commands_in(without)) == len(parts)


def test_a_part_by_its_patterns_loses_what_a_wrapper_put_there_too(tmp_path: Path) -> None:
    model = model_of()
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    src = trained(tmp_path / "src", state | BESIDE["a metric"], model.config)
    tensors, _ = converted(src, tmp_path / "out", exclude=["metric.*"])
    assert_same(tensors, model.state_dict())


# --- averages beside the weights ---


def test_averages_of_torchtitan_are_a_model_that_can_be_selected(tmp_path: Path) -> None:
    for number, select in enumerate(("ema", "ema.decay_0p999")):
        tensors, notes = converted(
            TITAN / "ckpt", tmp_path / f"{number}", base=TITAN / "base", select=select
        )
        assert_same(tensors, load_file(TITAN / "truth_ema.safetensors"))
        assert not [note for note in notes if "averages" in note]
        config = json.loads((tmp_path / f"{number}/config.json").read_text())
        assert config["dtype"] == "float32"


def test_the_weights_are_written_with_a_note_of_the_averages(tmp_path: Path) -> None:
    notes: list[str] = []
    for number, select in enumerate(("", "step-10/.", None)):
        tensors, notes = converted(
            TITAN / "ckpt", tmp_path / f"{number}", base=TITAN / "base", select=select
        )
        assert_same(tensors, load_file(TITAN / "truth.safetensors"))
    (note,) = [note for note in notes if "averages" in note]
    (options,) = options_in(note)
    ran("consolidate", TITAN / "ckpt", tmp_path / "ema", "--base", TITAN / "base", *options)
    assert_same(tensors_of(tmp_path / "ema"), load_file(TITAN / "truth_ema.safetensors"))


def test_averages_are_no_optimizer() -> None:
    trees = {tree.name: tree.part for tree in ckptkit.inspect(TITAN / "ckpt").trees}
    assert trees == {"": "model", "ema.decay_0p999": "average", "optimizer": "optimizer"}


def titan(folder: Path, keys: dict[str, float], *, frozen: str = "") -> State:
    """Writes weights, and averages of those that are not frozen, as torchtitan's containers."""
    weights = {"layers.0.weight": torch.ones(2, 2), "embed.weight": torch.ones(3, 2)}
    averages = {
        f"state.{name}.ema_params{key}": value.float() * factor
        for name, value in weights.items()
        for key, factor in keys.items()
        if name != frozen
    }
    groups = {f"param_groups.{name}.foreach": False for name in weights}
    state = {**weights, "ema": {**averages, **groups}, "train_state": {"step": torch.tensor(3)}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return weights


def test_of_several_averages_one_is_chosen(tmp_path: Path) -> None:
    keys = {".decay_0p9": 2.0, ".decay_0p999": 3.0, ".half_life_0p05": 4.0}
    run, out = tmp_path / "run", tmp_path / "out"
    weights = titan(run / "step-3", keys)
    error = refused(run, tmp_path / "none", select="ema")
    proposed = options_in(error.hint)
    assert len(proposed) == 3
    for options in proposed:
        ran("consolidate", run, out, *options, "--overwrite")
        factor = keys[f".{options[1].partition('.')[2]}"]
        assert_same(tensors_of(out), {name: value * factor for name, value in weights.items()})
    missing = refused(run, tmp_path / "none", select="ema.decay_0p5")
    assert "ema.decay_0p9" in missing.hint


@pytest.mark.slow
def test_an_average_without_a_key_is_one_too(tmp_path: Path) -> None:
    weights = titan(tmp_path / "src", {"": 2.0})
    tensors, _ = converted(tmp_path / "src", tmp_path / "out", select="ema")
    assert_same(tensors, {name: value * 2 for name, value in weights.items()})


def test_what_has_no_average_is_taken_from_the_weights(tmp_path: Path) -> None:
    weights = titan(tmp_path / "src", {".decay_0p9": 2.0}, frozen="embed.weight")
    tensors, notes = converted(tmp_path / "src", tmp_path / "out", select="ema")
    expected = {"layers.0.weight": weights["layers.0.weight"] * 2}
    assert_same(tensors, expected | {"embed.weight": weights["embed.weight"]})
    assert [note for note in notes if "1 tensor without an average" in note]


# --- experts ---


def test_stacked_experts_are_unstacked_into_the_names_of_transformers(tmp_path: Path) -> None:
    for number, base in enumerate((None, VEOMNI / "base")):
        tensors, notes = converted(VEOMNI / "ckpt", tmp_path / f"{number}", base=base)
        assert_same(tensors, load_file(VEOMNI / "truth.safetensors"))
        assert "names were converted by map 'experts-stacked'" in notes


def stacked(tensors: Tensors) -> Tensors:
    """Stacks experts as VeOmni trains them."""
    found: Tensors = {}
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+_proj)\.weight", name)
        if match is None:
            found[name] = value
        else:
            groups.setdefault(f"{match[1]}{match[3]}", {})[int(match[2])] = value
    stacks = {n: torch.stack([held[i] for i in range(len(held))]) for n, held in groups.items()}
    return found | stacks


EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "mlp_only_layers": [0], "head_dim": 8},
    "Qwen2Moe": {"num_experts": 3, "shared_expert_intermediate_size": 16},
    "Glm4Moe": {"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8},
    "Olmoe": {"num_experts": 4},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
}
_OF_PRIME_RL = {
    "experts.gate_proj": "experts.w1",
    "experts.down_proj": "experts.w2",
    "experts.up_proj": "experts.w3",
    "shared_experts.gate_proj.weight": "shared_expert.w1",
    "shared_experts.down_proj.weight": "shared_expert.w2",
    "shared_experts.up_proj.weight": "shared_expert.w3",
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
}


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.quick("Qwen3Moe")
def test_experts_of_related_families_are_unstacked(tmp_path: Path, family: str) -> None:
    values = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, **EXPERTS[family]}
    model = model_of(family, **values)
    model.save_pretrained(tmp_path / "saved")
    saved = tensors_of(tmp_path / "saved")
    assert [name for name in stacked(saved) if name.endswith("experts.gate_proj")]
    src = trained(tmp_path / "src", stacked(saved), model.config)
    tensors, _ = converted(src, tmp_path / "out")
    assert_same(tensors, saved)
    fewer = {
        name: v[:-1] if "experts." in name and v.dim() > 2 else v
        for name, v in stacked(saved).items()
    }
    error = refused(trained(tmp_path / "fewer", fewer, model.config), tmp_path / "none")
    assert isinstance(error, (FormatError, IncompleteCheckpointError))


@pytest.mark.parametrize("family", ["Qwen3Moe", "Glm4Moe", "DeepseekV3"])
def test_layers_of_experts_of_prime_rl_get_the_names_of_transformers(
    tmp_path: Path, family: str
) -> None:
    """Its trainer needs a GPU: names and stacks are those of its conversion."""
    values = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, **EXPERTS[family]}
    model = model_of(family, **values)
    model.save_pretrained(tmp_path / "saved")
    saved, state = tensors_of(tmp_path / "saved"), Tensors()
    for name, value in stacked(saved).items():
        ending = next((end for end in _OF_PRIME_RL if name.endswith(f".{end}")), "")
        state[name.removesuffix(ending) + _OF_PRIME_RL.get(ending, "")] = value
    assert any(name.endswith("mlp.experts.w1") for name in state)
    tensors, notes = converted(trained(tmp_path / "src", state, model.config), tmp_path / "out")
    assert_same(tensors, saved)
    assert "names were converted by map 'prime-rl-moe'" in notes


def test_stacked_experts_of_a_family_without_a_map_are_refused_by_that_name(tmp_path: Path) -> None:
    model = model_of("Mixtral", num_local_experts=2)
    state = {"model.layers.0.mlp.experts.gate_proj": torch.ones(2, 4, 4)}
    src = trained(tmp_path / "src", {**model.state_dict(), **state}, model.config)
    error = refused(src, tmp_path / "out")
    assert "no map has names of stacked experts for the model type 'mixtral'" in error.message


# --- hints ---


def test_what_like_proposes_leaves_no_tensor_of_the_model_out(tmp_path: Path) -> None:
    """The base has a layer for further tokens, whose names are like those of all layers."""
    base = GLM / "base"
    error = refused(GLM / "ckpt", tmp_path / "out", base=base, like=base)
    words = shlex.split(re.sub(r"^pass (.*) if the output.*$", r"\1", error.hint.split("; or ")[0]))
    assert words[0] == "--exclude", error.hint
    out, plain = tmp_path / "out", tmp_path / "plain"
    ran("consolidate", GLM / "ckpt", out, "--base", base, "--like", base, *words)
    ran("consolidate", GLM / "ckpt", plain, "--base", base)
    assert_same(tensors_of(out), tensors_of(plain))


@pytest.mark.slow
def test_a_numbered_module_is_not_proposed_to_be_left_out(tmp_path: Path) -> None:
    """A dense layer behind an encoder, as sentence-transformers has one, makes the vectors."""
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    model = transformers.BertModel(config)
    state = {**model.state_dict(), "2.linear.weight": torch.ones(4, 16)}
    error = refused(trained(tmp_path / "src", state, model.config), tmp_path / "out")
    assert "--exclude" not in error.hint
    named = {**model.state_dict(), "v_head.weight": torch.ones(4, 16)}
    error = refused(trained(tmp_path / "named", named, model.config), tmp_path / "out")
    assert "--exclude 'v_head.*'" in error.hint


def test_a_state_dict_at_the_root_is_selected_by_a_dot(tmp_path: Path) -> None:
    own = {"a.weight": torch.ones(2), "ema": {"a.weight": torch.zeros(2)}}
    torch.save(own, tmp_path / "src.pt")
    error = refused(tmp_path / "src.pt", tmp_path / "out")
    assert options_in(error.hint) == [["--select", "ema"], ["--select", ""]]
    for options in options_in(error.hint):
        ran("consolidate", tmp_path / "src.pt", tmp_path / "out", *options, "--overwrite")
    assert_same(tensors_of(tmp_path / "out"), {"a.weight": torch.ones(2)})
    wrong = refused(tmp_path / "src.pt", tmp_path / "none", select="emaa")
    assert isinstance(wrong, CannotPlanError)
    assert options_in(wrong.hint) == [["--select", "ema"], ["--select", ""]]


def test_no_checkpoint_that_lacks_a_file_is_proposed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in ("step-1", "step-2"):
        shutil.copytree(PREFIXES / "ckpt/step-5", run / step)
        (run / step / "0000000000/epoch_5/__0_0.distcp").unlink()
    save_file({"a.weight": torch.ones(2)}, run / "model.safetensors")
    error = refused(run, tmp_path / "out")
    (options,) = options_in(error.hint)
    ran("consolidate", run, tmp_path / "out", *options)
    assert_same(tensors_of(tmp_path / "out"), {"a.weight": torch.ones(2)})
