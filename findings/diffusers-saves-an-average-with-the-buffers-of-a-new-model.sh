#!/bin/sh
# The averaged model that EMAModel of diffusers saves has the buffers of a model that was just built.
#
# Versions: diffusers 0.42.1, torch 2.13.0, transformers 5.23.0, Python 3.11.
#
# Guess: `EMAModel.save_pretrained` writes a model like that it was made from, with averaged
# parameters: statistics of latents, which are buffers in the file of AutoencoderKLLTXVideo, are kept.
# A model in bfloat16 is saved in bfloat16.
#
# Seen: it builds a model from the configuration and copies parameters alone. `latents_mean` and
# `latents_std` are zeros and ones in the file, whatever the model had, and after
# `EMAModel.from_pretrained` and the next save as well. All is float32. No warning; a VAE of which
# the averaged weights are published normalizes latents with the wrong numbers.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 diffusers==0.42.1 \
    safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> "$folder/log"
import torch
from diffusers import AutoencoderKLLTXVideo
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file

widths, ones = (8, 8), {"layers_per_block": (1, 1, 1), "decoder_layers_per_block": (1, 1, 1)}
sizes = {"latent_channels": 8, "block_out_channels": widths, "decoder_block_out_channels": widths}
steps = {"spatio_temporal_scaling": (True, False), "decoder_spatio_temporal_scaling": (True, False)}
kinds = {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "decoder_inject_noise": (False,) * 3}
more = {"upsample_residual": (False, False), "upsample_factor": (1, 1), **steps, **kinds}
model = AutoencoderKLLTXVideo(**sizes, **ones, **more).to(torch.bfloat16)
model.latents_mean.fill_(0.25)
model.latents_std.fill_(3)
model.save_pretrained("model")
ema = EMAModel(model.parameters(), model_cls=AutoencoderKLLTXVideo, model_config=model.config)
ema.step(model.parameters())
ema.save_pretrained("average")
EMAModel.from_pretrained("model", AutoencoderKLLTXVideo).save_pretrained("average of the saved model")


def read(folder):
    tensors = load_file(f"{folder}/diffusion_pytorch_model.safetensors")
    mean, std = tensors.pop("latents_mean"), tensors.pop("latents_std")
    assert tensors.keys() == dict(model.named_parameters()).keys()
    return mean.unique().tolist(), std.unique().tolist(), {tensor.dtype for tensor in tensors.values()}


assert read("model") == ([0.25], [3.0], {torch.bfloat16})
for folder in ("average", "average of the saved model"):
    print(f"{folder}: mean {read(folder)[0]}, standard deviation {read(folder)[1]}, {read(folder)[2]}")
    assert read(folder) == ([0.0], [1.0], {torch.float32})
PY
