#!/bin/sh
# torch's HuggingFaceStorageWriter writes block scales and 4-bit floats that its reader refuses.
#
# Versions: torch 2.13.0, safetensors 0.8.0, Python 3.11.
#
# Guess: what HuggingFaceStorageWriter saves without an error, HuggingFaceStorageReader of the same
# torch loads; types that safetensors does not know are refused when they are saved.
#
# Seen: tensors of float8_e8m0fnu and float4_e2m1fn_x2 are written as F8_E8M0 and F4, and loading
# them ends in an error that names the type, since the reader has a shorter table of types than the
# library that wrote the file. safetensors itself loads both files, with the same bytes. A
# checkpoint of MXFP8 or MXFP4 weights is saved and cannot be resumed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2>"$folder/log"
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

content = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
for number, kind in enumerate((torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)):
    saved, empty = content.view(kind), torch.zeros_like(content).view(kind)
    dcp.save({"x": saved}, storage_writer=HuggingFaceStorageWriter(f"{number}"), no_dist=True)
    loaded = load_file(f"{number}/model-00001-of-00001.safetensors")["x"]
    assert loaded.dtype == kind and torch.equal(loaded.view(torch.uint8), content)
    try:
        dcp.load({"x": empty}, storage_reader=HuggingFaceStorageReader(f"{number}"), no_dist=True)
        end = f"loaded, equal {torch.equal(empty.view(torch.uint8), content)}"
    except BaseException as error:  # as CheckpointException is
        end = f"{type(error).__name__}, {str(error).strip().splitlines()[-1]}"
    print(f"{kind}: {end}")
    assert ("loaded" in end) == (kind == torch.float8_e4m3fn)
EOF
