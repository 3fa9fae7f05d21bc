"""Runs with small steps in them, as the training hooks and stock frameworks leave them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.manifest import MANIFEST_NAME, RUN_FACTS, TRAINING, FileRecord, Manifest

RULES: Mapping[str, Any] = {
    "keep_last": 3,
    "keep_every": 1000,
    "keep_for": "7d",
    "keep_best": "loss",
    "best_mode": "max",
}
"""A value for each rule of retention, which is not the usual one."""
_ROOT = Path(__file__).resolve().parents[1]
_SHARDS = _ROOT / "fixtures" / "fsdp2_plain" / "checkpoint"
_STOCK = _ROOT / "fixtures" / "trainer_fsdp2" / "checkpoint" / "checkpoint-2"


def save_step(
    run: Path,
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    save_number: int = 0,
    layout: str = "accelerate",
) -> Path:
    """Puts a complete step there, as a Checkpointer would have; the manifest comes last."""
    folder = run / f"checkpoint-{step}"
    shutil.copytree(_SHARDS, folder if layout == "dcp" else folder / "pytorch_model_fsdp_0")
    (folder / RUN_FACTS).parent.mkdir()
    (folder / RUN_FACTS).write_text("{}")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    source = {"step": step, "metrics": dict(metrics or {}), "save_number": save_number}
    files = {p.relative_to(folder).as_posix(): FileRecord(p.stat().st_size) for p in paths}
    manifest = Manifest(TRAINING, source, {}, {"ckptkit": "0"}, {}, files=files)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return folder


def save_stock_step(run: Path, step: int, *, best: str = "", **metrics: float) -> Path:
    """Puts a step of the stock Trainer there, which calls the folder `best` its best."""
    folder = run / f"checkpoint-{step}"
    shutil.copytree(_STOCK, folder)
    state = json.loads((folder / "trainer_state.json").read_bytes())
    state["log_history"].append({"step": step, "epoch": 1.0, **metrics})
    state["best_model_checkpoint"] = f"somewhere/else/{best}" if best else None
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder
