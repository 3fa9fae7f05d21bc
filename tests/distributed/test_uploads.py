"""Two ranks of FSDP2 that save to a URL, a store in trouble, and a kill in the middle."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer
from tests.object_store import Bucket, Fault, ObjectStore

sys.path.append(str(Path(__file__).parents[1] / "crash"))
troubles: Any = importlib.import_module("troubles")
SCRIPT = Path(__file__).with_name("uploads_run.py")
RUNS = "exp[1]*?#%20 +{b}"  # no name is a pattern, or a part of a URL


def steps_of(bucket: Bucket, run: str) -> dict[str, bool]:
    """Returns the folders of a run, and whether they look whole."""
    keys = [key.removeprefix(f"{RUNS}/{run}/") for key in bucket.keys(f"{RUNS}/{run}/")]
    folders = {key.partition("/")[0] for key in keys if not key.startswith(".")}
    return {name: f"{name}/ckptkit.json" in keys for name in sorted(folders)}


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_save_to_a_url_through_errors_and_a_kill_leaves_whole_steps(
    run_ranks: Callable[..., Any], object_store: ObjectStore, tmp_path: Path
) -> None:
    bucket, proxy = object_store.bucket("two-ranks"), object_store.proxy
    options = tmp_path / "options.json"
    options.write_text(json.dumps(object_store.options), encoding="utf-8")
    proxy.fail("PUT .*normal/checkpoint-1/.*distcp", 503, "SlowDown", times=2)
    proxy.fail("POST .*normal/checkpoint-2/.*__1_0.distcp.*uploadId", 500, times=2)
    proxy.add(Fault("PUT .*normal/checkpoint-3/ckptkit.json", lose_answer=True))
    proxy.hide("normal/checkpoint-3/.*distcp")

    def kill() -> None:
        for rank in (0, 1):
            with suppress(ProcessLookupError):
                os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)

    proxy.add(Fault(r"PUT .*killed/checkpoint-2/.*__1_0.distcp", before=kill, status=500))
    arguments = (tmp_path, f"{bucket.url}/{RUNS}", options, "normal", "killed")
    done = run_ranks(SCRIPT, 2, *arguments, status=None)
    for rank in (0, 1):
        assert f"normal, rank {rank}: done" in done.stdout, done.stdout + done.stderr[-8_000:]
    assert done.returncode != 0
    proxy.reset()
    assert steps_of(bucket, "normal") == {"checkpoint-2": True, "checkpoint-3": True}
    assert steps_of(bucket, "killed") == {"checkpoint-1": True, "checkpoint-2": False}
    assert ckptkit.inspect(Place(f"{bucket.url}/{RUNS}/killed", object_store.options)).step == 1
    shutil.copytree(tmp_path / "killed/node0", tmp_path / "node")
    goes_on_alone(tmp_path / "empty", bucket, 1, tmp_path / "weights-1.safetensors")
    assert steps_of(bucket, "killed") == {"checkpoint-1": True}
    goes_on_alone(tmp_path / "node", bucket, 2, tmp_path / "weights-2.safetensors")
    assert steps_of(bucket, "killed") == {"checkpoint-1": True, "checkpoint-2": True}
    assert ckptkit.verify(
        Place(f"{bucket.url}/{RUNS}/killed/checkpoint-2", object_store.options)
    ).ok
    assert bucket.unfinished_uploads() == []


def goes_on_alone(local: Path, bucket: Bucket, step: int, weights: Path) -> None:
    """One process goes on from what two ranks left on their node, or at the URL without it."""
    state = troubles.state_of(troubles.network(3, 12_000), 3)
    options = bucket.store.options
    with Checkpointer(
        f"{bucket.url}/{RUNS}/killed", local=local, storage_options=options
    ) as checkpointer:
        assert checkpointer.resume(state) == step
    for name, tensor in load_file(weights).items():
        assert torch.equal(state["model"].state_dict()[name], tensor)
