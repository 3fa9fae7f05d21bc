#!/bin/sh
# A StatefulDataLoader resumes `shuffle=True` exactly, and `sampler=RandomSampler(data)` not at all.
#
# Versions: torchdata 0.11.0, torch 2.13.0, Python 3.11.
#
# Guess: `shuffle=True` is short for `sampler=RandomSampler(data)`, as in torch's DataLoader. A loader
# that loads the state of the middle of an epoch gives the rest of that epoch for both.
#
# Seen: with `shuffle=True` the loader makes a sampler of its own, whose generator is in the state.
# For torch's RandomSampler the state has a count of samples alone. The resumed loader draws a new
# order and skips that many: of the second half of the epoch, samples were seen before, and as many
# are never seen. A sampler with its own seeded generator is no better: it begins again with the
# order of the first epoch. The state loads without an error or a warning. torchdata has a sampler of
# the same name, `torchdata.stateful_dataloader.sampler.RandomSampler`, with which it is exact.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchdata==0.11.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> log || { tail log; exit 1; }
import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader, sampler

DATA = list(range(40))


def shuffled():
    return StatefulDataLoader(DATA, batch_size=5, shuffle=True)


def sampled():
    return StatefulDataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA))


def sampled_by_torchdata():
    return StatefulDataLoader(DATA, batch_size=5, sampler=sampler.RandomSampler(DATA))


def seeded():
    order = RandomSampler(DATA, generator=torch.Generator().manual_seed(1))
    return StatefulDataLoader(DATA, batch_size=5, sampler=order)


def third_epoch(make):
    """Returns what a run sees of its third epoch before and after a restart, and all first epochs."""
    torch.manual_seed(0)
    loader = make()
    epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
    batches = iter(loader)
    seen = torch.cat([next(batches) for _ in range(4)]).tolist()
    state = loader.state_dict()
    expected = torch.cat(list(batches)).tolist()
    torch.manual_seed(0)
    resumed = make()
    resumed.load_state_dict(state)
    return epochs, seen, expected, torch.cat(list(resumed)).tolist()


for make, exact in [
    (shuffled, True),
    (sampled, False),
    (sampled_by_torchdata, True),
    (seeded, False),
]:
    epochs, seen, expected, found = third_epoch(make)
    twice = len(set(seen) & set(found))
    print(f"{make.__name__}: {twice} of {len(found)} samples after the restart were seen before it")
    assert (found == expected) is exact
    assert (twice == 0) is exact
    if make is seeded:
        assert found == epochs[0][20:]
EOF
