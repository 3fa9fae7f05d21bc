"""Writes a tokenizer of 256 bytes and a text for torchtitan: torchtitan_inputs.py FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

folder = Path(sys.argv[1])
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {character: number for number, character in enumerate(["</s>", *alphabet])}
tokenizer = Tokenizer(models.BPE(vocabulary, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.add_special_tokens(["</s>"])
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
texts = (" ".join(str(number**power) for power in range(40)) for number in range(2, 200))
(folder / "texts").mkdir()
(folder / "texts/data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
