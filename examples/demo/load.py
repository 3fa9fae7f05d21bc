"""Loads the consolidated folder with Transformers alone and compares it with the live model."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny import PROMPT


def main() -> None:
    """Loads the model, compares its logits bit for bit, and lets it speak.

    Raises:
        SystemExit: If the logits differ from those of the live model.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what ckptkit consolidate wrote")
    parser.add_argument("live", type=Path, help="the live model's logits, kept by train.py")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = model(**prompt).logits
    live = torch.from_numpy(np.load(arguments.live))
    if not torch.equal(logits, live):
        raise SystemExit(
            f"✗ logits differ from the live model's by up to {(logits - live).abs().max():g}"
        )
    print(f"     {type(model).__name__}, {model.num_parameters():,} parameters, {model.dtype}")
    print("     ✓ logits equal to the live model's: bit for bit")

    tokens = model.generate(**prompt, max_new_tokens=41, do_sample=False)[0]
    words = tokenizer.decode(tokens)
    print(textwrap.fill(words, 80, initial_indent="     it says: ", subsequent_indent=" " * 14))


if __name__ == "__main__":
    main()
