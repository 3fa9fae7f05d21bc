"""Megatron-Core goes on from what `--to megatron --optimizer` writes: the next ten losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckptkit

SCRIPT = Path(__file__).with_name("megatron_optimizer_run.py")
STEPS, NEXT = 3, 10
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    """Trains on what `draw_tokens` of `fixtures/generators/megatron_optimizer.py` draws."""
    losses = []
    for number in range(first, first + count):
        tokens = torch.randint(0, 30, (2, 6), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        logits = model(tokens).logits
        loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_by_torch(folder: Path) -> list[float]:
    """Saves a run of Transformers' Llama, and returns the losses after it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False)
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    flat = [p for p in model.parameters() if p.ndim <= 1]
    wide = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": wide, "weight_decay": 0.1},
        {"params": flat, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
    train(model, optimizer, 0, STEPS)
    weights, states = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": states}
    dcp.save(content, checkpoint_id=folder / f"step-{STEPS}", no_dist=True)
    config.save_pretrained(folder / "base")
    return train(model, optimizer, STEPS, NEXT)


def test_megatron_core_goes_on_from_a_run_of_torch(
    run_ranks: Callable[..., object], tmp_path: Path
) -> None:
    losses = saved_by_torch(tmp_path)
    source, out, base = tmp_path / f"step-{STEPS}", tmp_path / "out", tmp_path / "base"
    ckptkit.convert(source, out, to="megatron", base=base, optimizer=True)
    assert ckptkit.verify(out).ok
    assert (out / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    one = {"source": str(out / f"iter_{STEPS:07d}"), "dtype": "float32"}
    runs = [{**one, "tp": tp, "out": str(tmp_path / f"losses_{tp}.json")} for tp in (1, 2)]
    run_ranks(SCRIPT, 2, json.dumps(runs))
    for run in runs:
        theirs = json.loads(Path(str(run["out"])).read_text())
        assert theirs == pytest.approx(losses, abs=1e-5)
        assert len(theirs) == NEXT
