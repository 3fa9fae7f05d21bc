"""Small model folders to push, and what a test needs to talk to the stand-in Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptkit
from ckptkit.hub import client as retrying
from ckptkit.storage.remote.errors import RetryPolicy
from tests.hub_server import HubServer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "made_up",  # a llama would have all the other tensors too
    "_name_or_path": "/home/alice/models/llama",
}


def write_model(folder: Path, *, seed: int = 0, names: int = 4) -> Path:
    """Writes a folder as `save_pretrained` would, of a few KB."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {
        f"model.layers.{n}.mlp.up_proj.weight": random.standard_normal((8, 16), np.float32)
        for n in range(names)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def consolidated(folder: Path, *, seed: int = 0, step: int = 30, shard: str = "5GB") -> Path:
    """Writes a folder with our manifest, as if it came from a step of training."""
    source = write_model(folder / f"checkpoint-{step}", seed=seed)
    out = folder / f"out-{step}-{seed}-{shard}"
    if out.exists():
        return out
    ckptkit.consolidate(source, out, max_shard_size=shard)
    return out


def add_step(run: Path, step: int, source: Path, **facts: object) -> Path:
    """Puts a whole step into a run at once, in the place of an earlier save of it."""
    draft, final = run / f".draft-{step}", run / f"checkpoint-{step}"
    shutil.copytree(source, draft)
    path = draft / "ckptkit.json"
    manifest = json.loads(path.read_text())
    manifest["source"] |= {"step": step, "save_number": step} | facts
    manifest.pop("checksum", None)
    path.write_text(json.dumps(manifest))
    if final.exists():
        shutil.rmtree(final)
    return draft.rename(final)


@contextmanager
def running_hub(*, xet: bool = True) -> Iterator[HubServer]:
    """A Hub that this process may talk to, though tests are offline otherwise."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _xet

    with HubServer(xet=xet) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)
        patch.setattr(retrying, "HUB_RETRIES", RetryPolicy(first_wait_seconds=0.02))
        patch.delenv("HF_TOKEN", raising=False)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setattr(_xet, "XET_CONNECTION_INFO_CACHE", {})
        yield hub
