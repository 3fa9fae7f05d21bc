"""Trains a small model with names of its own, and saves it with torch.distributed.checkpoint.

    python examples/own_names/train.py runs/own
    ckptkit consolidate runs/own models/own --base runs/own/hub --map examples/own_names/own.toml
    python examples/own_names/train.py runs/own --compare models/own

The model is a Llama, written as many are: queries, keys and values in one matrix, group by group;
gate and up in another; rotary pairs next to each other; norms that multiply with 1 + scale. The
map beside this file says so to ckptkit. The last command loads the folder with Transformers, and
compares its logits with those of the trained model.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY, HIDDEN, LAYERS, HEADS, GROUPS, HEAD, FFN = 256, 64, 2, 4, 2, 16, 96
EPSILON, THETA = 1e-6, 10_000.0


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), eps=EPSILON) * (1 + self.scale)


def rotate(x: Tensor) -> Tensor:
    """Rotates neighbouring elements of each head; shape [batch, heads, length, HEAD]."""
    frequencies = THETA ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.arange(x.shape[2])[:, None] * frequencies
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * GROUPS) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        each = HEADS // GROUPS
        groups = self.qkv(x).view(batch, length, GROUPS, each + 2, HEAD).permute(0, 2, 3, 1, 4)
        query, key, value = groups.split([each, 1, 1], 2)
        key, value = key.expand_as(query), value.expand_as(query)
        shape = (batch, HEADS, length, HEAD)
        mixed = F.scaled_dot_product_attention(
            rotate(query.reshape(shape)),
            rotate(key.reshape(shape)),
            value.reshape(shape),
            is_causal=True,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_gate = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_gate(x).chunk(2, -1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.attention = Norm(), Attention()
        self.before_ffn, self.ffn = Norm(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        change: Tensor = self.ffn(self.before_ffn(x))
        return x + change


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def train(run: Path, steps: int) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        tokens = torch.randint(VOCABULARY, (4, 32))
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=run / f"step-{steps}", no_dist=True)
    # The configuration of the same model in Transformers.
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        rms_norm_eps=EPSILON,
        rope_theta=THETA,
        tie_word_embeddings=True,
    ).save_pretrained(run / "hub")


@torch.no_grad()
def compare(run: Path, folder: Path) -> None:
    model = Model()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=next(run.glob("step-*")), no_dist=True)
    tokens = torch.randint(VOCABULARY, (1, 16))
    ours = model(tokens)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    difference = (ours - theirs).abs().max().item()
    print(f"logits up to {ours.abs().max():.2f} differ by at most {difference:.1e}")
    torch.testing.assert_close(ours, theirs)


def main() -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compare", type=Path, help="a folder that ckptkit wrote")
    options = parser.parse_args()
    if options.compare is None:
        train(options.run, options.steps)
    else:
        compare(options.run, options.compare)


if __name__ == "__main__":
    main()
