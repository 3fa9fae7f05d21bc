#!/bin/sh
# Of a module that accelerate keeps on the disk, the buffers of the checkpoint are never loaded.
#
# Versions: accelerate 1.15.0, safetensors 0.8.0, torch 2.13.0, Python 3.11.
#
# Guess: a model that `load_checkpoint_and_dispatch` keeps on the disk in part computes the same as
# the model that was saved, with its buffers and tied weights, in float32, bfloat16 and float16.
#
# Seen: with `offload_buffers=False`, the default, that is not so. For a module with the device
# "disk", a buffer is neither offloaded nor set. It stays as the constructor made it: the statistics
# of a batch norm are zeros and ones. The file has the right values, parameters are loaded, and no
# log speaks of it. With the device "cpu", or with `offload_buffers=True`, all is right. A folder of
# the same weights answers otherwise on a machine with less memory, where "auto" picks the disk.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0 safetensors==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> "$folder/log"
from pathlib import Path

import torch
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.second(self.first(x)))


torch.manual_seed(0)
inputs = torch.randn(4, 8)
model = Model()
for _ in range(20):  # moves the statistics
    model(torch.randn(16, 8) * 3 + 1)
model.eval()
expected = model(inputs)
Accelerator().save_model(model, "model")

for device in ("cpu", "disk"):
    for offload_buffers in (False, True):
        with init_empty_weights():
            loaded = Model().eval()
        loaded = load_checkpoint_and_dispatch(
            loaded,
            "model",
            device_map={"first": "cpu", "second": "cpu", "norm": device},
            offload_folder=f"offload-{device}-{offload_buffers}",
            offload_buffers=offload_buffers,
        )
        apart = float((loaded(inputs) - expected).detach().abs().max())
        print(f"norm on {device}, offload_buffers={offload_buffers}: outputs differ by {apart:.4f}")
        wrong = device == "disk" and not offload_buffers
        assert (apart > 0.1) == wrong
        if wrong:
            assert torch.equal(loaded.norm.running_mean, torch.zeros(8))
            assert torch.equal(loaded.norm.running_var, torch.ones(8))
log = Path("log").read_text()
assert "buffer" not in log, log
PY
