"""Evaluates each new step of a run while training goes on.

python examples/evaluate.py runs/llama
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ckptkit
from ckptkit.training import load_into


def evaluate(step: str) -> float:
    """Returns the loss of a step; put your own evaluation here."""
    config = AutoConfig.from_pretrained(f"{step}/ckptkit")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    load_into(model, step)  # reads the shards; no converted copy is written
    model.eval()  # without dropout
    tokens = torch.arange(32).unsqueeze(0) % config.vocab_size
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def main() -> None:
    """Looks for new steps every ten seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--once", action="store_true", help="end after the steps that exist")
    arguments = parser.parse_args()
    known: set[str] = set()
    while True:
        for step in ckptkit.list_run(arguments.run).steps:
            if step.complete and step.name not in known:
                print(f"{step.name}  loss {evaluate(step.path):.4f}")
                known.add(step.name)
        if arguments.once:
            return
        time.sleep(10)


if __name__ == "__main__":
    main()
