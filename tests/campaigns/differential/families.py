"""Models of Transformers with random configurations, saved by Transformers and by DCP.

Each is a class that docs/reference/model-families.md calls equal. `consolidate` has to write of its
live state dict what `save_pretrained` writes, and of that folder the same again; `from_pretrained`
and `load_into` have to fill other models with the live values from both.
"""

from __future__ import annotations

import copy
import logging
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import ckptkit
from ckptkit.training import load_into
from tests.all_model_types import (
    Result,
    asking_in_process,
    differences,
    equal_classes,
    load_folder,
    saved_state,
    try_model,
)
from tests.campaigns.report import Table, write_report
from tests.small_models import class_named, small_model_config, time_limit

SECONDS = 240
DTYPES = ("float32", "float32", "bfloat16", "float16")
SIZES = ("50GB", "50GB", "100KB", "20KB")
FIELDS: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (True, False),
    "num_hidden_layers": (1, 2, 3),
    "vocab_size": (256, 259, 300),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "num_key_value_heads": (1, 2, 4),
    "intermediate_size": (24, 40),
    "hidden_size": (64, 128),
}
OUTCOMES = {
    "ok": "equal",
    "not reloaded": "`from_pretrained` restores neither output",
    "refused too": "refused; `from_pretrained` does not load what `save_pretrained` writes",
    "not saved": "`save_pretrained` fails",
    "not built": "no model could be built",
}


def build_drawn(name: str, chance: random.Random) -> tuple[Any, dict[str, Any]]:
    """Returns a model, and what was changed in its small configuration; less where that fails."""
    kind = class_named(name)
    plain = small_model_config(kind)
    own = [field for field in FIELDS if hasattr(plain, field)]
    changes = {
        field: chance.choice(FIELDS[field])
        for field in chance.sample(own, min(len(own), chance.choice((0, 1, 2, 3))))
    }
    while True:
        try:
            config = copy.deepcopy(plain)
            for field, value in changes.items():
                setattr(config, field, value)
            return kind(config), changes
        except Exception:  # not every value fits the others
            if not changes:
                raise
            changes = dict(list(changes.items())[:-1])


def try_drawn(name: str, seed: str, folder: Path) -> tuple[Result, dict[str, Any]]:
    """Draws a configuration of a class, and compares what is made of the model."""
    chance = random.Random(seed)
    torch.manual_seed(chance.getrandbits(32))
    try:
        model, changes = build_drawn(name, chance)
    except Exception as error:  # noqa: BLE001  any class may want what is not here
        return Result(name, "", "not built", str(error)[:200]), {}
    dtype = chance.choice(DTYPES)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    size = chance.choice(SIZES)
    drawn = {"dtype": dtype, "max_shard_size": size, **changes}
    result = try_model(model, folder, max_shard_size=size)
    if result.outcome != "ok":
        return result, drawn
    wrong = next(_unequal(model, folder), "")
    if wrong:
        result = Result(name, result.model_type, "differs", wrong, result.tensors)
    return result, drawn


def _unequal(model: Any, folder: Path) -> Iterator[str]:
    reference = folder / "reference"
    ckptkit.consolidate(reference, folder / "again")
    if found := differences(load_folder(folder / "again"), load_folder(reference)):
        yield f"consolidated from save_pretrained: {found}"
    for source in ("reference", "source", "out"):
        other = type(model)(copy.deepcopy(model.config)).to(model.dtype)
        load_into(other, folder / source)
        if found := differences(saved_state(other), saved_state(model)):
            yield f"load_into from {source}: {found}"


def run_families(runs: int, seed: int) -> int:
    """Draws classes and configurations, prints what differs, and writes the report."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    began, names = time.monotonic(), equal_classes()
    order = random.Random(seed).sample(names, min(runs, len(names)))
    found: list[tuple[Result, dict[str, Any]]] = []
    for number, name in enumerate(order):
        with tempfile.TemporaryDirectory(prefix="family-") as folder, asking_in_process():
            try:
                with time_limit(SECONDS):
                    one = try_drawn(name, f"{seed} {number}", Path(folder))
            except Exception as error:  # noqa: BLE001  is shown, and the others go on
                one = (Result(name, "", "failed", f"{type(error).__name__}: {error}"[:600]), {})
        found.append(one)
        if one[0].outcome not in OUTCOMES:
            print(f"FAILED: {name}, number {number} of seed {seed}: {one[1]}\n{one[0].reason}")
    command = f"python -m tests.campaigns.differential --families --runs {runs} --seed {seed}"
    write_report("differential-families", command, [*_tables(found)])
    failed = sum(result.outcome not in OUTCOMES for result, _ in found)
    print(f"{len(found)} models in {time.monotonic() - began:.0f} s, {failed} failed")
    return int(bool(failed))


def _tables(found: Sequence[tuple[Result, Mapping[str, Any]]]) -> Iterator[Table]:
    rows = []
    for outcome in dict.fromkeys(["ok", *(result.outcome for result, _ in found)]):
        of_it = [result for result, _ in found if result.outcome == outcome]
        types = len({result.model_type for result in of_it})
        tensors = sum(result.tensors for result in of_it)
        rows.append([OUTCOMES.get(outcome, outcome), len(of_it), types, tensors])
    yield Table("Models of Transformers", ("outcome", "models", "model types", "tensors"), rows)
    drawn = Counter(f"{field} {value}" for _, changes in found for field, value in changes.items())
    yield Table("What was drawn", ("field", "models"), sorted(drawn.items()))
