#!/bin/sh
# FSDP1 saves no 8-bit state of bitsandbytes where a parameter is cut, though it is wrapped for FSDP.
#
# Versions: bitsandbytes 0.50.2, torch 2.13.0, gloo, 2 ranks on the CPU, Python 3.11.
#
# Guess: `state_dict()` of the 8-bit optimizers puts what is quantized into a dictionary "for FSDP
# compatibility", so that `FSDP.optim_state_dict` and `get_optimizer_state_dict` save a sharded model.
#
# Seen: FSDP compares what is no tensor between the ranks that have parts of a parameter. Of
# dictionaries of tensors that comparison ends in "Boolean value of Tensor with more than one value
# is ambiguous", for full, sharded and local state dicts alike, at the first save after training.
# Two layers on two ranks are saved, since each is whole on its rank; three are not, as the second
# is cut. On one rank all is saved. With `use_orig_params=False`, three layers are saved, with the
# dictionary of one rank for each, and `optim_state_dict_to_load` ends in "unhashable type: 'dict'".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6
cd "$folder"
cat > save.py <<'PY'
import os
import sys

import torch
from bitsandbytes.optim import AdamW8bit
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

distributed.init_process_group("gloo")
ends = {}
for layers in (2, 3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(layers)])
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = AdamW8bit(model.parameters(), min_8bit_size=64)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    for kind in (*StateDictType, None):
        try:
            if kind is None:
                get_optimizer_state_dict(model, optimizer)
            else:
                with FullyShardedDataParallel.state_dict_type(model, kind):
                    FullyShardedDataParallel.optim_state_dict(model, optimizer)
            ends[layers, kind] = "saved"
        except RuntimeError as error:
            ends[layers, kind] = str(error)
        distributed.barrier()
alone = distributed.get_world_size() == 1
for (layers, kind), end in ends.items():
    if distributed.get_rank() == 0:
        print(f"{distributed.get_world_size()} ranks, {layers} layers, {kind}: {end}", flush=True)
    assert (end == "saved") == (alone or layers == 2), end
    assert end == "saved" or "Boolean value of Tensor" in end
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(3)])
model = FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu"))
optimizer = AdamW8bit(model.parameters(), min_8bit_size=64)
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
try:
    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)
    end = "loaded"
except TypeError as error:
    end = str(error)
if distributed.get_rank() == 0:
    print(f"{distributed.get_world_size()} ranks, use_orig_params=False: saved, and then {end}", flush=True)
assert "unhashable type" in end
distributed.barrier()
os._exit(0)  # the end of the interpreter may abort threads of gloo
PY
for ranks in 1 2; do
  OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc_per_node $ranks save.py 2> log || { tail log; exit 1; }
done
