#!/bin/sh
# One complex tensor makes torch's consolidated safetensors file unreadable; an integer ends the
# save.
#
# Versions: torch 2.13.0, safetensors 0.8.0, Python 3.11.
#
# Guess: the consolidation of `HuggingFaceStorageWriter(path, save_distributed=True,
# enable_consolidation=True)` gives whole tensors: of scalars, empty tensors and FP8, too, and of
# tensors cut along any dimension.
#
# Seen: the consolidation takes the size of an element from `torch.finfo`. That of complex64 is the
# size of its real part, 4 bytes for 8, so the file has half of the tensor, and a header that
# contradicts itself. The save ends without an error, and the load of any tensor in that file, also
# of those in float32, ends in "invalid shape, data type, or offset". A model that registers its
# rotary factors as a complex buffer is saved so. Integers and booleans, such as counters of batch
# norms or position ids, have no `finfo`: the save ends in TypeError, after the shards were written.
# These are whole in each case.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> log || { tail log; exit 1; }
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageWriter

kinds = {
    torch.float32: "read",
    torch.bfloat16: "read",
    torch.float8_e4m3fn: "read",
    torch.complex64: "unreadable",
    torch.int64: "not saved",
    torch.bool: "not saved",
}
for number, (kind, expected) in enumerate(kinds.items()):
    state = {"weight": torch.ones(3), "other": torch.arange(4).to(kind)}
    writer = HuggingFaceStorageWriter(f"{number}", save_distributed=True, enable_consolidation=True)
    file = Path(f"{number}/model-00001-of-00001.safetensors")
    try:
        dcp.save(state, storage_writer=writer, no_dist=True)
    except BaseException as error:  # as CheckpointException is
        end, said = "not saved", str(error).strip().splitlines()[-1]
    else:
        try:
            with safe_open(file, framework="pt") as opened:
                said = str(opened.get_tensor("weight").tolist())
            end = "read"
        except Exception as error:
            end, said = "unreadable", str(error)
    print(f"{kind}: {end}, {said}")
    assert end == expected, end
    assert end != "unreadable" or "invalid shape, data type, or offset" in said
    assert end != "not saved" or "torch.finfo() requires" in said
    shard = load_file(f"{number}/sharded/shard-00001-model-00001-of-00001.safetensors")
    assert all(torch.equal(shard[name], tensor) for name, tensor in state.items())
PY
