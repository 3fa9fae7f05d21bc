#!/bin/sh
# A 4-bit layer that computed once on a CPU saves its scales in another order, and computes so too.
#
# Versions: bitsandbytes 0.50.2, torch 2.13.0, Python 3.11.
#
# Guess: `Linear4bit.state_dict()` gives the same tensors before and after an evaluation, and changes
# nothing in the layer.
#
# Seen: on CPUs with AVX512-BF16, the first forward in eval mode packs the weight for a kernel, and
# turns the scales into a transposed bfloat16 matrix. `state_dict()` takes that back for the codes,
# but for the scales with double quantization only, which Transformers leaves off by default. Without,
# the transposed matrix is saved as `absmax`; read in its order, the scales are those of other blocks:
# a relative error of 0.6 instead of 0.09, without an error or a warning. The live layer computes with
# the same wrong scales from then on. Double quantization only rounds the scales anew with each save.
# A CPU without these instructions makes the same steps here by the functions that the layer calls.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> "$folder/log"
import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Params4bit

torch.manual_seed(0)
original = torch.randn(128, 256) * torch.linspace(0.1, 2, 128)[:, None]
inputs = torch.randn(4, 256, dtype=torch.bfloat16)


def error_of_saved(layer):
    tensors = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    scales = {name: tensor for name, tensor in tensors.items() if name != "weight"}
    loaded = Params4bit.from_prequantized(tensors["weight"], scales, device="cpu")
    absmax = tensors["weight.absmax"]
    return error(loaded), (tuple(absmax.shape), absmax.dtype), tensors["weight"]


def error(packed):
    unpacked = functional.dequantize_4bit(packed.data, packed.quant_state).float()
    return round(((unpacked - original).norm() / original.norm()).item(), 2)


for double in (False, True):
    layer = Linear4bit(256, 128, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=double)
    layer.load_state_dict({"weight": original})
    layer = layer.to("cpu").eval().requires_grad_(False)
    before, kind_before, codes = error_of_saved(layer)
    if functional.has_avx512bf16():
        with torch.no_grad():
            layer(inputs)
    else:
        weight = layer.weight
        weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    after, kind_after, codes_after = error_of_saved(layer)
    live = error(layer.weight)
    print(f"double quantization {double}: saved {before} {kind_before}, after a forward {after} {kind_after}, live {live}")
    assert torch.equal(codes, codes_after) and before == 0.09
    assert (after > 0.5) == (live > 0.5) == (not double)
    assert (kind_after == ((4, 128), torch.bfloat16)) == (not double)
PY
