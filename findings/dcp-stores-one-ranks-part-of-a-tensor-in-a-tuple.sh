#!/bin/sh
# A DTensor in a tuple is saved as an object of one rank: the parts of the others are not written.
#
# Versions: torch 2.13.0, gloo, 2 ranks, Python 3.11.
#
# Guess: `torch.distributed.checkpoint.save` goes through dictionaries, lists and tuples alike, so
# that a sharded tensor in a tuple is saved in shards; at the least it refuses what it cannot shard.
#
# Seen: dictionaries and lists are taken apart, tuples are not. A tuple is pickled by one rank with
# its own part of the DTensor, without an error. The checkpoint has the rows of that rank alone,
# and loading on two ranks gives these rows to both.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
cat > save.py <<'EOF'
import os

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

distributed.init_process_group("gloo")
rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (2,))


def parts(factor):
    whole = factor * torch.arange(8.0).reshape(4, 2)
    return distribute_tensor(whole, mesh, [Shard(0)])


def save_and_load():
    dcp.save({"listed": [parts(1)], "paired": (parts(1), 3)}, checkpoint_id="step")
    loaded = {"listed": [parts(0)], "paired": (parts(0), 0)}
    dcp.load(loaded, checkpoint_id="step")
    listed, paired = loaded["listed"][0].to_local(), loaded["paired"][0].to_local()
    expected = parts(1).to_local()
    found = [torch.equal(listed, expected), torch.equal(paired, expected)]
    print(f"rank {rank}: equal in the list {found[0]}, in the tuple {found[1]}", flush=True)
    kinds = dcp.FileSystemReader("step").read_metadata().state_dict_metadata
    assert type(kinds["listed.0"]).__name__ == "TensorStorageMetadata"
    assert type(kinds["paired"]).__name__ == "BytesStorageMetadata"
    return found


found = torch.tensor(save_and_load(), dtype=torch.int32)
distributed.all_reduce(found)
assert found.tolist() == [2, 1], found
distributed.barrier()
os._exit(0)  # the end of the interpreter may abort threads of gloo
EOF
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc_per_node 2 save.py 2> log || { tail -20 log; exit 1; }
