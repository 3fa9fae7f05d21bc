#!/bin/sh
# A module that Transformers keeps in float32 has its integer buffer changed too.
#
# Versions: transformers 5.23.0, torch 2.13.0, safetensors 0.8.0, Python 3.11.
#
# Guess: `_keep_in_fp32_modules_strict` of GraniteSpeech5 ("conv.norm") keeps the floating tensors
# of its batch norms in float32 under dtype=bfloat16; the counter `num_batches_tracked` in the same
# module is int64 in the file and int64 in the loaded model.
#
# Seen: the counter is float32 after from_pretrained(dtype=torch.bfloat16), and int64 after
# from_pretrained without a dtype of 16 bits; save_pretrained of the first writes F32 where the
# original file has I64. The element type of a tensor on disk changes by loading and saving.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import torch
from safetensors import safe_open
from transformers import GraniteSpeech5CTCConfig, GraniteSpeech5EncoderConfig, GraniteSpeech5ForCTC

sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_mel_bins": 8}
encoder = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2}
parts = GraniteSpeech5EncoderConfig(**encoder)
config = GraniteSpeech5CTCConfig(encoder_config=parts, vocab_size=32)
GraniteSpeech5ForCTC(config).save_pretrained("first")


def on_disk(folder):
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        name = next(key for key in file.keys() if key.endswith("num_batches_tracked"))
        return name, file.get_slice(name).get_dtype()


def in_memory(**options):
    model = GraniteSpeech5ForCTC.from_pretrained("first", **options)
    model.save_pretrained("second")
    return model.state_dict()[name].dtype, on_disk("second")[1]


name, kind = on_disk("first")
half, whole = in_memory(dtype=torch.bfloat16), in_memory(dtype=torch.float32)
print(f"{name}: {kind} as written first")
print(f"loaded as bfloat16: {half[0]}, written as {half[1]}")
print(f"loaded as float32: {whole[0]}, written as {whole[1]}")
assert kind == "I64"
assert half == (torch.float32, "F32")
EOF
