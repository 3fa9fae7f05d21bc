"""A Ray cluster of two raylets on this machine, and outputs that its nodes write together.

Prints one JSON document of what happened.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from safetensors.numpy import save_file

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.engine.outcome import BytesWritten, Event, OutputCommitted, Planned, Started
from ckptkit.storage.places import Place

NODE: dict[str, Any] = {
    "num_cpus": 1,
    "include_log_monitor": False,
    "object_store_memory": 80_000_000,
}
Act = Callable[[], None]


@dataclass
class Watch:
    """Listens to a run, and does something once the first part is written."""

    act: Act | None = None
    announced: int = 0
    written: list[int] = field(default_factory=list)
    written_before_the_act: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self.announced = event.total_bytes
        if isinstance(event, BytesWritten):
            self.written.append(event.size_bytes)
            if self.act is not None:
                self.written_before_the_act = sum(self.written)
                self.act()
                self.act = None


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def run(source: Path, out: Path, act: Act | None = None, **options: Any) -> dict[str, Any]:
    """Writes an output with Ray, and compares it with what this process writes alone."""
    watch, began = Watch(act), time.monotonic()
    ckptkit.convert(source, out / "ray", engine="ray", listener=watch, **options)
    seconds = time.monotonic() - began
    options.pop("bandwidth", None)
    ckptkit.convert(source, out / "local", **options)
    return {
        "same": content(out / "ray") == content(out / "local"),
        "verified": ckptkit.verify(out / "ray").ok,
        "announced": watch.announced,
        "written": sum(watch.written),
        "written_before_the_act": watch.written_before_the_act,
        "parts": len(watch.written),
        "seconds": round(seconds, 1),
        "beside": sorted(path.name for path in out.iterdir()),
    }


def damaged(source: Path, out: Path) -> dict[str, Any]:
    copy = out / "damaged"
    shutil.copytree(source, copy)
    data = min(copy.rglob("*.distcp"))
    with data.open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"another")
    try:
        ckptkit.convert(copy, out / "ray", to="hf", engine="ray")
    except CkptkitError as error:
        beside = sorted(path.name for path in out.iterdir())
        return error.to_json() | {"beside": beside}
    return {}


def write_llama(folder: Path, **more: tuple[int, ...]) -> Path:
    """Writes a Llama of one layer, and further tensors of other shapes."""
    proj = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
    mlp = {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (64, 32),
        "model.embed_tokens.weight": (64, 32),
        "model.norm.weight": (32,),
        **{f"model.layers.0.self_attn.{n}_proj.weight": shape for n, shape in proj.items()},
        **{f"model.layers.0.mlp.{n}_proj.weight": shape for n, shape in mlp.items()},
        **{f"model.layers.0.{n}_layernorm.weight": (32,) for n in ("input", "post_attention")},
    }
    shapes |= {f"model.layers.0.self_attn.{name}_proj.bias": s for name, s in more.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "unknown_key": 1,  # so that the shipped shapes do not answer, and transformers is asked
    }
    folder.mkdir()
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compared(out: Path) -> dict[str, Any]:
    """Writes a model, and one with a bias that it lacks; transformers is asked beside the nodes."""
    cache, answers = Path(os.environ["XDG_CACHE_HOME"]), dict[str, int]()

    def count(event: Event) -> None:
        if isinstance(event, Planned | OutputCommitted):
            found = sum(path.is_file() for path in cache.rglob("*"))
            answers[type(event).__name__] = found

    told: dict[str, Any] = {"answers": answers}
    wrong, right = write_llama(out / "wrong", q=(32,)), write_llama(out / "right")
    try:
        ckptkit.consolidate(wrong, out / "ray", engine="ray")
    except CkptkitError as error:
        told |= error.to_json()
    told["beside"] = sorted(path.name for path in out.iterdir())
    ckptkit.consolidate(right, out / "ray", engine="ray", listener=count)
    return told | {"verified": ckptkit.verify(out / "ray").ok}


def raced(out: Path) -> dict[str, Any]:
    """Replaces an output that one process replaces first, while the nodes write."""
    source, target = out / "right", out / "ray"

    def come_first(event: Event) -> None:
        if isinstance(event, Started):
            ckptkit.consolidate(source, target, dtype="bfloat16", overwrite=True)

    told: dict[str, Any] = {}
    try:
        ckptkit.consolidate(source, target, engine="ray", overwrite=True, listener=come_first)
    except CkptkitError as error:
        told = error.to_json()
    options = json.loads((target / "ckptkit.json").read_text())["options"]
    beside = sorted(path.name for path in out.iterdir())
    return told | {"options": options, "beside": beside, "verified": ckptkit.verify(target).ok}


def in_a_bucket(store: dict[str, Any], out: Path, act: Act) -> dict[str, Any]:
    """Writes from a bucket to it with Ray, and from it to the disk, one node being killed."""
    source, target = (Place(store[name], store["options"]) for name in ("source", "target"))
    watch = Watch(act)
    options: dict[str, Any] = {"to": "dcp", "max_shard_size": "30MB", "engine": "ray"}
    ckptkit.convert(source, target, bandwidth="12MB", listener=watch, **options)
    ckptkit.convert(source, out / "ray", **options)
    logs = Path(os.environ["RAY_TMPDIR"], "ray/session_latest/logs")
    secrets = [
        value.encode() for name, value in store["options"].items() if name != "client_kwargs"
    ]
    return {
        "announced": watch.announced,
        "written": sum(watch.written),
        "written_before_the_act": watch.written_before_the_act,
        "beside": sorted(path.name for path in out.iterdir()),
        "told_by": [
            path.name
            for path in logs.iterdir()
            if path.is_file() and any(secret in path.read_bytes() for secret in secrets)
        ],
    }


def main() -> None:
    source, out = map(Path, sys.argv[1:3])
    store = json.loads(sys.stdin.read())
    head = NODE | {"include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        second = cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        os.chdir(out)  # relative paths are those of whoever starts the command

        def kill() -> None:
            cluster.remove_node(second, allow_graceful=False)

        told = {
            "archive": run(source, Path("a"), to="dcp", max_shard_size="15MB"),
            "damaged": damaged(source, out / "b"),
            "compared": compared(out / "e"),
            "raced": raced(out / "e"),
            "killed": run(source, out / "c", kill, to="hf", bandwidth="12MB"),
        }
        second = cluster.add_node(**NODE)
        told["bucket"] = in_a_bucket(store, out / "d", kill)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
