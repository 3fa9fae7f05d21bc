#!/bin/sh
# An averaged model with buffers has other index tables than the model that never changed them.
#
# Versions: torch 2.13.0, Python 3.11.
#
# Guess: `AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)` copies
# integer buffers, or their average is rounded: a table that is constant stays as it is.
#
# Seen: `decay * average + (1 - decay) * new` is computed in float32 and cut off. Of the numbers 0 to
# 4095, 846 are lower by one from the second update on with a decay of 0.9999, 1,144 with 0.9 and none
# with 0.999: 11 becomes 10. So position ids and tables of relative positions of the averaged model
# point to other rows. A counter (`num_batches_tracked`) is still 1 after 20 batches. `get_ema_avg_fn`
# does the same. Without `use_buffers`, buffers are copied.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn


def average(decay, make, key):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("table", torch.arange(4096))
    averaged = AveragedModel(model, use_buffers=True, **{key: make(decay)})
    for _ in range(20):
        model(torch.randn(4, 2))
        averaged.update_parameters(model)
    assert torch.equal(model.table, torch.arange(4096)) and model[1].num_batches_tracked == 20
    return model.table - averaged.module.table, int(averaged.module[1].num_batches_tracked)


for key, make in (("multi_avg_fn", get_ema_multi_avg_fn), ("avg_fn", get_ema_avg_fn)):
    for decay, expected in ((0.9, 1144), (0.99, 0), (0.999, 0), (0.9999, 846)):
        lost, counter = average(decay, make, key)
        lower = lost.nonzero().flatten().tolist()
        print(f"{key} {decay}: {len(lower)} numbers lower, first {lower[:3]}, counter {counter} of 20")
        assert len(lower) == expected and set(lost.tolist()) <= {0, 1}
        assert counter < 20 and (counter == 1 or decay == 0.9)
PY
