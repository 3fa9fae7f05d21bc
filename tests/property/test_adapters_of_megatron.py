"""LoRA on Megatron's modules: B is split as Megatron lays out the rows of the weights."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptkit
from tests.property.examples import examples
from tests.sampled import sampled
from tests.sharded import write_sharded

FIXTURES = Path(__file__).parents[2] / "fixtures"
HIDDEN = 8
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """Sizes of a model, and how its adapter was trained and stored.

    Attributes:
        groups: Key and value heads.
        per_group: Query heads of each of them.
        head: Elements of a head.
        width: Rows of the gate.
        layers: How many.
        rank: Of the factors.
        alpha: The numerator of the scaling.
        ranks: Of tensor parallelism.
        form: `bridge` or `swift`.
        is_stacked: Whether the layers are one axis of each tensor.
    """

    groups: int
    per_group: int
    head: int
    width: int
    layers: int
    rank: int
    alpha: int
    ranks: int
    form: str
    is_stacked: bool


models = st.builds(
    Model,
    groups=st.sampled_from([2, 4]),
    per_group=st.integers(1, 3),
    head=st.sampled_from([2, 4]),
    width=st.sampled_from([4, 12]),
    layers=st.integers(1, 3),
    rank=st.integers(1, 3),
    alpha=st.integers(1, 9),
    ranks=st.sampled_from([1, 2, 4]),
    form=st.sampled_from(["bridge", "swift"]),
    is_stacked=st.booleans(),
)


def make_parts(model: Model) -> tuple[list[Tensors], Tensors]:
    """Returns B of each projection by its name in Transformers, by layer, and all A."""
    query, key = model.groups * model.per_group * model.head, model.groups * model.head
    rows = {"q": query, "k": key, "v": key, "o": HIDDEN}
    rows |= {"gate": model.width, "up": model.width, "down": HIDDEN}
    ups = [
        {n: torch.randn(size, model.rank) for n, size in rows.items()} for _ in range(model.layers)
    ]
    widths = {"qkv": HIDDEN, "proj": query, "fc1": HIDDEN, "fc2": model.width}
    downs = {
        f"{layer}.{name}": torch.randn(model.rank, width)
        for layer in range(model.layers)
        for name, width in widths.items()
    }
    return ups, downs


def lay_out(model: Model, parts: Tensors) -> Tensors:
    """Returns B as Megatron's layers have their rows.

    Source: `Attention.get_query_key_value_tensors` (of each query group the queries, then key and
    value), `MLP.forward` (gate and up halves, on each rank of tensor parallelism its own).
    """
    groups = [
        torch.cat([part[n] for part in (q, k, v)])
        for q, k, v in [[parts[name].chunk(model.groups) for name in "qkv"]]
        for n in range(model.groups)
    ]
    pieces = model.ranks if model.form == "swift" else 1
    halves = zip(parts["gate"].chunk(pieces), parts["up"].chunk(pieces), strict=True)
    return {
        "qkv": torch.cat(groups),
        "proj": parts["o"],
        "fc1": torch.cat([piece for both in halves for piece in both]),
        "fc2": parts["down"],
    }


def store(model: Model, ups: list[Tensors], downs: Tensors, folder: Path) -> None:
    endings = {
        "bridge": (".adapter.linear_in.weight", ".adapter.linear_out.weight"),
        "swift": (".lora_A.default.weight", ".lora_B.default.weight"),
    }[model.form]
    tensors: Tensors = {}
    for part in ("qkv", "proj", "fc1", "fc2"):
        inside = "mlp" if part.startswith("fc") else "self_attention"
        a = [downs[f"{layer}.{part}"] for layer in range(model.layers)]
        b = [lay_out(model, own)[part] for own in ups]
        for ending, values in zip(endings, (a, b), strict=True):
            module = f"{inside}.linear_{part}{ending}"
            if model.is_stacked:
                tensors[f"decoder.layers.{module}"] = torch.stack(values)
            else:
                tensors |= {f"decoder.layers.{n}.{module}": v for n, v in enumerate(values)}
    write_sharded(folder, tensors, model.ranks)
    arguments = {"tensor_model_parallel_size": model.ranks}
    common = io.BytesIO()
    torch.save({"iteration": 1, "args": arguments}, common)
    (folder / "common.pt").write_bytes(common.getvalue())
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    if model.form == "bridge":
        text = f"peft:\n  _target_: LoRA\n  alpha: {model.alpha}\n  dim: {model.rank}\n"
        (folder / "run_config.yaml").write_text(f"model:\n  num_layers: {model.layers}\n{text}")
    else:
        names = [f"linear_{part}" for part in ("qkv", "proj", "fc1", "fc2")]
        config = {"r": model.rank, "lora_alpha": model.alpha, "target_modules": names}
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))


def describe(model: Model) -> Mapping[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.groups * model.per_group,
        "num_key_value_heads": model.groups,
        "head_dim": model.head,
        "vocab_size": 8,
    }


@given(model=models)
@settings(max_examples=examples(25))
def test_each_projection_gets_its_rows_of_b_and_the_whole_of_a(model: Model) -> None:
    if model.is_stacked:  # `write_sharded` would split the layers
        model = dataclasses.replace(model, ranks=1)
    ups, downs = make_parts(model)
    with tempfile.TemporaryDirectory() as home:
        source, base = Path(home, "iter_0000001"), Path(home, "base")
        store(model, ups, downs, source)
        base.mkdir()
        (base / "config.json").write_text(json.dumps(describe(model)))
        ckptkit.extract_adapter(source, Path(home, "out"), base=base)
        found = load_file(Path(home, "out", "adapter_model.safetensors"))
        config = json.loads(Path(home, "out", "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (model.rank, model.alpha)
    expected: Tensors = {}
    whose = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "proj"}
    whose |= {"gate": "fc1", "up": "fc1", "down": "fc2"}
    for layer, own in enumerate(ups):
        for name, up in own.items():
            inside = "self_attn" if name in "qkvo" else "mlp"
            module = f"base_model.model.model.layers.{layer}.{inside}.{name}_proj"
            expected[f"{module}.lora_B.weight"] = up
            expected[f"{module}.lora_A.weight"] = downs[f"{layer}.{whose[name]}"]
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


ADAPTED = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj"),
    *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *("router", "wq", "wk", "wv", "wo", "w1", "w2", "w3"),
)
FAMILIES = {
    **dict.fromkeys(
        (
            *("megatron_model_llama_tp2_pp2", "megatron_model_qwen2_tp2"),
            *("megatron_model_gemma3", "megatron_model_qwen2_moe_tp2_ep2"),
            "megatron_model_deepseek_v3_pp2_ep2",
        ),
        (".adapter.linear_in.weight", ".adapter.linear_out.weight"),
    ),
    **dict.fromkeys(
        (
            *("torchtitan_family_llama", "torchtitan_family_qwen3"),
            *("torchtitan_family_llama_tied", "torchtitan_family_qwen3_moe"),
        ),
        (".lora_a.weight", ".lora_b.weight"),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "of",
    sampled(
        itertools.product(FAMILIES, [False, True]),
        [
            ("megatron_model_llama_tp2_pp2", False),
            ("megatron_model_deepseek_v3_pp2_ep2", True),
            ("torchtitan_family_llama", True),
            ("torchtitan_family_qwen3_moe", False),
        ],
    ),
    ids=str,
)
def test_a_merge_is_what_the_map_makes_of_the_changed_weights(
    of: tuple[str, bool], tmp_path: Path
) -> None:
    """What a map makes of whole weights is proven against both frameworks elsewhere."""
    name, with_base = of
    case, (rank, alpha) = FIXTURES / name, (2, 6)
    stored = read_model(case)
    adapter: Tensors = {}
    changed: Tensors = {}
    for key, weight in stored.items():
        module = key.removesuffix(".weight")
        if key.endswith(".weight") and module.rpartition(".")[2] in ADAPTED:
            down = torch.randn(*weight.shape[:-2], rank, weight.shape[-1])
            up = torch.randn(*weight.shape[:-1], rank) * 0.1
            adapter |= dict(zip((module + end for end in FAMILIES[name]), (down, up), strict=True))
            changed[key] = (weight.float() + alpha / rank * (up @ down)).to(weight.dtype)
    assert len(changed) >= 4
    save(stored, tmp_path / "before")
    save({**stored, **changed}, tmp_path / "after")
    save({**stored, **adapter} if with_base else adapter, tmp_path / "adapter")
    ckptkit.consolidate(tmp_path / "after", tmp_path / "wanted", base=case)
    options: Any = {"overrides": {"lora_alpha": alpha}, "model_config": case}
    if not with_base:
        ckptkit.consolidate(tmp_path / "before", tmp_path / "base", base=case)
        options["base"] = tmp_path / "base"
    ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "merged", **options)
    wanted, found = (load_file(tmp_path / n / "model.safetensors") for n in ("wanted", "merged"))
    assert found.keys() == wanted.keys()
    for tensor, value in wanted.items():
        torch.testing.assert_close(found[tensor].float(), value.float(), atol=1e-6, rtol=1e-6)
    if not with_base and name.startswith("megatron"):
        options["base"] = tmp_path / "before"  # with Megatron's names itself
        ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "again", **options)
        again = load_file(tmp_path / "again" / "model.safetensors")
        assert all(torch.equal(again[tensor], found[tensor]) for tensor in found)


def read_model(case: Path) -> Tensors:
    folder = next((case / "checkpoint").rglob(".metadata")).parent
    reader = dcp.FileSystemReader(folder)
    held = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for key, tensor in held.items()
        if isinstance(tensor, TensorStorageMetadata)
        and not key.startswith(("optimizer", "chained", "rng"))
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def save(tensors: Tensors, folder: Path) -> None:
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
