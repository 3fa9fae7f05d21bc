#!/bin/sh
# torch's HuggingFaceStorageWriter keeps one rank's part of each sharded tensor, without an error.
#
# Versions: torch 2.13.0, safetensors 0.8.0, gloo, 2 ranks, Python 3.11.
#
# Guess: without `save_distributed`, the writer gathers DTensors into one file of whole tensors, or
# refuses them.
#
# Seen: both ranks write a file of the same name, and the last one stays: rows of one rank alone
# under the name of the tensor. The index says that the tensors have twice the bytes that the file
# holds. A record in the file's metadata (`DCP_SHARDING_INFO`) tells the offset of the part, which
# no loader of Hugging Face reads: `load_file` returns half a tensor under its name.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
cat > save.py <<'EOF'
import os

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(8.0).reshape(4, 2)
dcp.save({"x": distribute_tensor(whole, mesh, [Shard(0)])}, storage_writer=HuggingFaceStorageWriter("hub"))
os._exit(0)  # the end of the interpreter may abort threads of gloo
EOF
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc_per_node 2 save.py 2> log
"$folder/venv/bin/python" - <<'EOF'
import json
import os

from safetensors.torch import load_file

index = json.load(open("hub/model.safetensors.index.json"))
tensors = load_file(f"hub/{index['weight_map']['x']}")
total, held = index["metadata"]["total_size"], tensors["x"].numel() * 4
print(sorted(os.listdir("hub")))
print(f"saved {[4, 2]}, loaded {list(tensors['x'].shape)}: {tensors['x'].tolist()}")
print(f"the index says {total} bytes, the file holds {held}")
assert list(tensors["x"].shape) == [2, 2]
assert (total, held) == (32, 16)
EOF
