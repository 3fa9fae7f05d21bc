#!/bin/sh
# A saved tokenizer cuts text in another way once the config.json of a model lies beside it.
#
# Versions: transformers 5.23.0, tokenizers 0.23.1, Python 3.11.
#
# Guess: AutoTokenizer takes the class that tokenizer_config.json names; "TokenizersBackend" there
# means that tokenizer.json is taken as it is, whatever model it belongs to.
#
# Seen: that is so without a config.json, and beside that of a Llama. Beside that of a Qwen2, the
# class is Qwen2Tokenizer, which takes vocabulary and merges from tokenizer.json and makes its own
# pre-tokenizer: "a12" gives the tokens a, 1, 2 where the file alone gives a, 12. No warning. So the
# ids of a run that trained with its own pre-tokenizer are not those that its folder gives.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.1
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

print("transformers", transformers.__version__)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: number for number, letter in enumerate(letters)} | {"12": len(letters)}
backend = Tokenizer(BPE(vocabulary, [("1", "2")]))
backend.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def read(config):
    folder = Path(type(config).__name__)
    tokenizer.save_pretrained(folder)
    stated = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
    if config is not None:
        config.save_pretrained(folder)
    found = transformers.AutoTokenizer.from_pretrained(folder)
    print(f"{folder}: stated {stated}, loaded {type(found).__name__}: {found.tokenize('a12')}")
    return found.tokenize("a12")


assert read(None) == ["a", "12"]
assert read(transformers.LlamaConfig()) == ["a", "12"]
assert read(transformers.Qwen2Config()) == ["a", "1", "2"]
EOF
