"""The checkpoints whose bytes are damaged, and what each is used for.

Foreign formats are fixtures that their own tools wrote. What ckptkit writes is made anew, so that
the campaign shows what is written today.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.core.manifest import parse_manifest
from ckptkit.storage.local.disk import Disk
from ckptkit.training import Checkpointer, load_into
from ckptkit.writer.commit import commit
from ckptkit.writer.messages import ByteCounter
from ckptkit.writer.persist import Persister
from tests.crash import writing
from tests.dataloaders import Data
from tests.small_deltas import change_model, make_model, write_model

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
TRUTH = FIXTURES / "accelerate_fsdp2_tied_with_config" / "truth.safetensors"
LLAMA = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
CHECKPOINT = "checkpoint"
STEP = 2
Use = Callable[[Path, Path], str]
"""Uses the case in a folder, may write to a second folder; returns a digest of the result."""


@dataclass(frozen=True)
class Case:
    """A checkpoint in a folder, and what is done with it."""

    make: Callable[[Path], None]  # writes it into an empty folder
    uses: Mapping[str, Use]
    reason: str = ""  # why some faults cannot be found
    is_ours: bool = False  # whether ckptkit wrote it, so that every fault has to be found
    damaged: str = CHECKPOINT  # what the faults are in, relative to the folder
    spared: tuple[str, ...] = field(default=())  # files that have no part in what is promised


def _digest_folder(folder: Path) -> str:
    """Digests an output but for what names the source and the time of its files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "ckptkit.json":
                manifest = parse_manifest(data, where=str(path))
                facts = {
                    key: value
                    for key, value in manifest.source.items()
                    if key not in {"identity", "path", "writer", "deltas", "base", "delta"}
                }
                manifest = replace(manifest, source=facts, options={})
                # Proofs of checksums that are gone are `unverified`: that is no other model.
                tensors = {n: replace(t, proof="") for n, t in manifest.tensors.items()}
                data = replace(manifest, tensors=tensors).to_json()
            digest.update(f"{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _consolidating(**options: Any) -> Use:
    def consolidate(folder: Path, out: Path) -> str:
        ckptkit.consolidate(folder / CHECKPOINT, out, names="live", **options)
        return _digest_folder(out)

    return consolidate


def _open(folder: Path, _out: Path) -> str:
    digest = hashlib.sha256()
    with ckptkit.open(folder / CHECKPOINT) as checkpoint:
        for name in sorted(checkpoint.keys()):
            tensor: Any = checkpoint.read(name, framework="numpy")
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return digest.hexdigest()


def _copy(name: str, inner: str = CHECKPOINT) -> Callable[[Path], None]:
    def copy(folder: Path) -> None:
        shutil.copytree(FIXTURES / name / inner, folder / CHECKPOINT)

    return copy


def _foreign(name: str, reason: str = "", inner: str = CHECKPOINT, **options: Any) -> Case:
    uses = {"consolidate": _consolidating(**options)}
    if not options:
        uses["open"] = _open
    return Case(_copy(name, inner), uses, reason)


def _make_state(seed: int) -> dict[str, Any]:
    for sow in (random.seed, np.random.seed, torch.manual_seed):
        sow(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "dataloader": Data(),
        "progress": {"tokens": seed, "nested": [1.5, {"name": "a", "at": torch.arange(3)}]},
    }


def _train(state: dict[str, Any]) -> None:
    state["model"](torch.randn(4, 7)).pow(2).mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["dataloader"].at += 2
    state["progress"]["tokens"] += 14


def _digest_state(state: Mapping[str, Any], step: int | None) -> str:
    digest = hashlib.sha256(f"step {step}".encode())

    def add(place: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            digest.update(f"{place} {value.dtype} {tuple(value.shape)}".encode() + data)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{place}.{key}", inner)
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                add(f"{place}.{number}", inner)
        else:
            digest.update(f"{place} {value!r}".encode())

    for name, held in state.items():
        add(name, held.state_dict() if hasattr(held, "state_dict") else held)
    add("random", [random.getstate(), np.random.get_state(), torch.get_rng_state()])
    return digest.hexdigest()


def _make_run(layout: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        state = _make_state(1)
        sidecar = {name: LLAMA / name for name in ("config.json", "tokenizer.json")}
        options: Any = {"layout": layout, "sidecar": sidecar}
        with Checkpointer(folder / CHECKPOINT, **options) as checkpointer:
            checkpointer.prepare(state)
            _train(state)
            checkpointer.save(STEP, state).result(60)

    return make


def _resume(folder: Path, _out: Path) -> str:
    state = _make_state(7)
    with Checkpointer(folder / CHECKPOINT) as checkpointer:
        step = checkpointer.resume(state)
    if step is None:
        raise CkptkitError("no complete step was found")
    return _digest_state(state, step)


def _make_output(how: Callable[[Path, Path], Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        how(LLAMA, folder / CHECKPOINT)

    return make


def _load(folder: Path, _out: Path) -> str:
    shapes = load_file(TRUTH)
    model = nn.Module()
    for name, tensor in shapes.items():
        at = model
        *path, last = name.split(".")
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_buffer(last, torch.zeros(tensor.shape, dtype=torch.float64))
    load_into(model, folder / CHECKPOINT, strict=False)
    return _digest_state({"model": model}, None)


def _consolidate_cast(folder: Path, out: Path) -> str:
    ckptkit.consolidate(folder / CHECKPOINT, out, names="live", dtype="bfloat16")
    return _digest_folder(out)


_OUTPUT_USES = {
    "consolidate": _consolidating(),
    "cast": _consolidate_cast,
    "open": _open,
    "load": _load,
}
_PEFT = FIXTURES / "peft_fsdp2"


def _make_adapter(folder: Path) -> None:
    config = _PEFT / "adapter_config.json"
    ckptkit.extract_adapter(_PEFT / CHECKPOINT, folder / CHECKPOINT, adapter_config=config)
    shutil.copytree(_PEFT / "base", folder / "base")


def _make_merging(folder: Path) -> None:
    _make_adapter(folder)
    shutil.rmtree(folder / "base")
    ckptkit.consolidate(_PEFT / "base", folder / "base", names="live")


def _merge(folder: Path, out: Path) -> str:
    ckptkit.merge_adapter(folder / CHECKPOINT, out, base=folder / "base", names="live")
    return _digest_folder(out)


def _make_delta(folder: Path) -> None:
    before = make_model(large=1000)
    write_model(folder / "before", before)
    write_model(folder / "after", change_model(before, 1))
    ckptkit.create_delta(folder / "before", folder / "after", folder / CHECKPOINT)
    shutil.rmtree(folder / "after")


def _apply(folder: Path, out: Path) -> str:
    ckptkit.apply_delta(folder / "before", [folder / CHECKPOINT], out)
    return _digest_folder(out)


def _make_parts(folder: Path) -> None:
    """Makes a step of two ranks, each on a node of its own, which no drain has copied yet."""
    attempt = "0123abcd-1"
    for rank, node in enumerate("ab"):
        save = writing.Save(folder / CHECKPOINT / node, world_size=2, attempt=attempt)
        memory, request = save.persist(rank, writing.usual_units(rank, 2))
        persister = Persister(Disk())
        size_bytes = memory.share().size_bytes
        persister.attach(memory.descriptor, size_bytes)
        proof = persister.persist(request, ByteCounter()).proof
        assert proof is not None
        whole = save.commit([proof], node_ranks=(rank,))
        source = {"step": save.step, "attempt": save.attempt, "world_size": 2}
        commit(replace(whole, manifest={**whole.manifest, "source": source}), Disk(), ByteCounter())


def _join_parts(folder: Path, out: Path) -> str:
    first, second = sorted((folder / CHECKPOINT).iterdir())
    ckptkit.convert(first, out, to="torch", also=[second], names="live", optimizer=True)
    return _digest_folder(out)


NO_CHECKSUMS = "the format has no checksums: bytes of tensors"
NOTHING = f"{NO_CHECKSUMS}, numbers in `config.json`"
FLAT_NAMES = "names in `.metadata` have no second copy"

CASES: dict[str, Case] = {
    "DCP": _foreign("fsdp2_hsdp", FLAT_NAMES),
    "DCP, zstd": _foreign("dcp_zstd_fsdp2", FLAT_NAMES),
    "DCP in safetensors": _foreign("dcp_images_fsdp2", NO_CHECKSUMS),
    "DCP of Hugging Face": _foreign("dcp_hf_fsdp2", NO_CHECKSUMS),
    "torch zip": _foreign("torch_nested"),
    "legacy torch": _foreign("torch_legacy", NO_CHECKSUMS),
    "safetensors, HF folder": _foreign("hf_sharded", NOTHING),
    "ZeRO 2": _foreign("zero2_adam_float32"),
    "ZeRO 3": _foreign("zero3_bf16"),
    "universal": _foreign("universal_small_zero1"),
    "per-rank files, verl": _foreign("verl_hsdp"),
    "per-rank files, FairScale": _foreign("fairscale_pair"),
    "torchsnapshot": _foreign("torchsnapshot_fsdp1", NO_CHECKSUMS),
    "Megatron-Core": _foreign("megatron_model_llama_tp2_pp2"),
    "Megatron-LM": _foreign("megatron_ranks_llama_tp2_pp2"),
    "nanotron": _foreign("nanotron_llama_tp2_pp2", NO_CHECKSUMS),
    "Meta": _foreign("meta_llama_2"),
    "torch_checkpointing": _foreign("torch_checkpointing_safetensors", NO_CHECKSUMS),
    "ckptkit: step, accelerate's layout": Case(
        _make_run("accelerate"),
        {"resume": _resume, "consolidate": _consolidating(), "open": _open},
        is_ours=True,
    ),
    "ckptkit: step, DCP layout": Case(
        _make_run("dcp"), {"resume": _resume, "consolidate": _consolidating()}, is_ours=True
    ),
    "ckptkit: step in parts on nodes": Case(_make_parts, {"join": _join_parts}, is_ours=True),
    "ckptkit: output, safetensors": Case(
        _make_output(lambda src, out: ckptkit.consolidate(src, out, max_shard_size="8KB")),
        _OUTPUT_USES,
        is_ours=True,
    ),
    "ckptkit: output, torch": Case(
        _make_output(lambda src, out: ckptkit.convert(src, out, to="torch")),
        _OUTPUT_USES,
        is_ours=True,
    ),
    "ckptkit: output, DCP": Case(
        _make_output(lambda src, out: ckptkit.convert(src, out, to="dcp")),
        _OUTPUT_USES,
        is_ours=True,
    ),
    "ckptkit: adapter": Case(_make_adapter, {"merge": _merge}, is_ours=True),
    "ckptkit: base of an adapter": Case(
        _make_merging, {"merge": _merge}, is_ours=True, damaged="base"
    ),
    "ckptkit: delta": Case(_make_delta, {"apply": _apply}, is_ours=True),
}
