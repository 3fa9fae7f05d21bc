#!/bin/sh
# Integer and bool buffers of an average of ema-pytorch stay those of the model before training.
#
# Versions: ema-pytorch 0.8.3, torch 2.13.0, Python 3.11.
#
# Guess: `EMA(model)` averages parameters and floating buffers, and copies all others, or it copies
# all at the first update, when `initted` becomes true, and counters lag from then on.
#
# Seen: only floating and complex buffers are listed when it is built; nothing touches the others.
# A flag that says that a codebook was initialized stays False beside the averaged codebook, so that
# the averaged model starts over with it in training mode; a table that training replaced is the old
# one; `num_batches_tracked` is 0 with statistics of 20 batches. `copy_params_from_model_to_ema`
# leaves them, too, and the state dict has the values of training and those from before it.
# `AveragedModel` of torch, without `use_buffers`, copies such buffers.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 ema-pytorch==0.8.3 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from ema_pytorch import EMA
from torch.optim.swa_utils import AveragedModel


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("codebook", torch.zeros(3))
        self.register_buffer("initialized", torch.tensor(False))
        self.register_buffer("permutation", torch.arange(4))


def read(model):
    counter, flag = model.norm.num_batches_tracked.item(), model.initialized.item()
    return counter, flag, model.permutation.tolist(), model.codebook.any().item()


model = Model()
ema, averaged = EMA(model, beta=0.9, update_after_step=0, update_every=1), AveragedModel(model)
for _ in range(20):
    model.norm(torch.randn(4, 4))
    model.codebook.copy_(torch.ones(3))
    model.initialized.fill_(True)
    model.permutation.copy_(torch.tensor([3, 2, 1, 0]))
    ema.update()
    averaged.update_parameters(model)
trained, stale = (20, True, [3, 2, 1, 0], True), (0, False, [0, 1, 2, 3], True)
print(f"model {read(model)}, ema-pytorch {read(ema.ema_model)}, torch {read(averaged.module)}")
assert read(model) == read(averaged.module) == trained
assert ema.initted and read(ema.ema_model) == stale
ema.copy_params_from_model_to_ema()
saved = ema.state_dict()
assert read(ema.ema_model) == stale
assert saved["online_model.initialized"] and not saved["ema_model.initialized"]
PY
