"""Checkpoints are read from object stores as from disks: the same results, and little more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

import ckptkit
from ckptkit.core.errors import HubError
from ckptkit.storage.places import Place
from tests.command_line import Result, run_command
from tests.hub_server import TOKEN, HubServer
from tests.live_truth import refuse
from tests.object_store import Bucket, ObjectStore

CASES = (
    "accelerate_fsdp2_tied_with_config/checkpoint",
    "dcp_hf_two_files/checkpoint",
    "dcp_images_grid/checkpoint",
    "dcp_zstd_grid/checkpoint",
    "dtensor_column_split/checkpoint",
    "fsdp1_hybrid_shard_flat/checkpoint",
    "hf_sharded/checkpoint",
    "orbax_two_hosts/checkpoint",
    "torch_bin_sharded/checkpoint",
    "trainer_fsdp2/checkpoint",
    "zero3_float32/checkpoint",
)
LLAMA = CASES[0]
ADAPTER = "peft_fsdp2"


@pytest.fixture(scope="module")
def bucket(running_store: ObjectStore, repository: Path) -> Bucket:
    bucket = running_store.bucket("sources")
    for case in CASES:
        bucket.put_tree(repository / "fixtures" / case, case)
    bucket.put_tree(repository / "fixtures" / ADAPTER, ADAPTER)
    return bucket


@pytest.fixture
def store(object_store: ObjectStore, bucket: Bucket) -> ObjectStore:
    assert bucket.store is object_store
    return object_store


def at(store: ObjectStore, path: str) -> Place:
    return Place(f"s3://sources/{path}", store.options)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "ckptkit.json"}


def tensors(folder: Path) -> dict[str, object]:
    document = json.loads((folder / "ckptkit.json").read_bytes())
    found: dict[str, object] = document["tensors"]
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(
    "dcp_zstd_grid/checkpoint",
    "hf_sharded/checkpoint",
    "torch_bin_sharded/checkpoint",
    "zero3_float32/checkpoint",
)
def test_what_is_read_from_a_bucket_is_what_is_read_from_a_disk(
    store: ObjectStore, real_checkpoints: Path, tmp_path: Path, case: str
) -> None:
    ckptkit.consolidate(at(store, case), tmp_path / "remote")
    ckptkit.consolidate(real_checkpoints / case, tmp_path / "local")
    assert files(tmp_path / "remote") == files(tmp_path / "local")
    assert tensors(tmp_path / "remote") == tensors(tmp_path / "local")
    ours = ckptkit.inspect(at(store, case)).to_json()
    assert ours | {"path": ""} == ckptkit.inspect(real_checkpoints / case).to_json() | {"path": ""}


@pytest.mark.slow
def test_verify_diff_and_open_read_from_a_bucket(
    store: ObjectStore, real_checkpoints: Path, tmp_path: Path
) -> None:
    report, same = ckptkit.verify(at(store, LLAMA)), ckptkit.verify(real_checkpoints / LLAMA)
    assert report.ok
    assert (report.tensors, report.size_bytes) == (same.tensors, same.size_bytes)
    assert ckptkit.diff(at(store, LLAMA), real_checkpoints / LLAMA).same
    with (
        ckptkit.open(at(store, LLAMA)) as remote,
        ckptkit.open(real_checkpoints / LLAMA) as local,
    ):
        assert remote.keys() == local.keys()
        for name in remote.keys()[:2]:
            ours, theirs = (side.read(name, framework="numpy") for side in (remote, local))
            np.testing.assert_array_equal(ours, theirs)
    ckptkit.consolidate(real_checkpoints / LLAMA, tmp_path / "out")
    store.bucket("outputs").put_tree(tmp_path / "out", "out")
    output = ckptkit.verify(Place("s3://outputs/out", store.options))
    assert output.ok
    assert output.kind == "output"


@pytest.mark.slow
def test_an_adapter_is_extracted_and_merged_from_a_bucket(
    store: ObjectStore, real_checkpoints: Path, tmp_path: Path
) -> None:
    case = real_checkpoints / ADAPTER
    for name, src, base in (
        ("remote", at(store, f"{ADAPTER}/checkpoint"), at(store, f"{ADAPTER}/base")),
        ("local", case / "checkpoint", case / "base"),
    ):
        config = f"{os.fspath(src)}/../adapter_config.json" if name == "local" else None
        given = config or at(store, f"{ADAPTER}/adapter_config.json")
        ckptkit.extract_adapter(src, tmp_path / f"{name}-adapter", adapter_config=given)
        ckptkit.merge_adapter(src, tmp_path / name, base=base, adapter_config=given)
    assert files(tmp_path / "remote-adapter") == files(tmp_path / "local-adapter")
    assert files(tmp_path / "remote") == files(tmp_path / "local")


def test_a_checkpoint_is_united_from_a_bucket_and_a_disk(
    store: ObjectStore, real_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(real_checkpoints / LLAMA, tmp_path / "here")
    nodes = store.bucket("nodes")
    for file in list((tmp_path / "here").glob("*/__1_*.distcp")):
        nodes.put(f"there/{file.relative_to(tmp_path / 'here').as_posix()}", file.read_bytes())
        file.unlink()
    there = Place("s3://nodes/there", store.options)
    ckptkit.consolidate(tmp_path / "here", tmp_path / "one", also=[there])
    ckptkit.consolidate(real_checkpoints / LLAMA, tmp_path / "whole")
    assert files(tmp_path / "one") == files(tmp_path / "whole")


def test_memory_and_file_urls_are_sources_too(real_checkpoints: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(real_checkpoints / LLAMA), "/runs/checkpoint-3", recursive=True)
    ckptkit.consolidate("memory://runs", tmp_path / "memory")
    ckptkit.consolidate(f"file://{real_checkpoints / LLAMA}", tmp_path / "file")
    ckptkit.consolidate(real_checkpoints / LLAMA, tmp_path / "plain")
    assert files(tmp_path / "memory") == files(tmp_path / "file") == files(tmp_path / "plain")
    assert ckptkit.inspect("memory://runs").step == 3
    memory.rm("/runs", recursive=True)


def _large(folder: Path) -> int:
    """Writes a sharded model of 24 MB, most of it in large tensors; returns its size."""
    from safetensors.numpy import save_file

    folder.mkdir()
    generator = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    size = 0
    for part in range(2):
        name = f"model-{part + 1:05}-of-00002.safetensors"
        arrays = {
            f"layers.{part}.{i}.weight": generator.random((512, 1024), np.float32) for i in range(5)
        } | {f"layers.{part}.{i}.bias": generator.random(64, np.float32) for i in range(40)}
        save_file(arrays, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
        size += sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.quick("safetensors")
def test_little_more_is_read_than_the_model_has_and_with_few_questions(
    store: ObjectStore, tmp_path: Path, kind: str
) -> None:
    size = _large(tmp_path / "model")
    if kind == "dcp":
        ckptkit.convert(tmp_path / "model", tmp_path / "dcp", to="dcp")
    url = store.bucket("large").put_tree(
        tmp_path / ("model" if kind == "safetensors" else "dcp"), kind
    )
    planned = _shell("consolidate", url, str(tmp_path / "out"), *store.arguments(), "--dry-run")
    assert "  requests   about " in planned.stdout, planned.stderr
    asked = int(planned.stdout.split("  requests   about ")[1].split()[0])
    store.proxy.reset()
    ckptkit.consolidate(url, tmp_path / "out", src_options=store.options, workers=2)
    read = store.proxy.sent["GET"]
    assert asked <= store.proxy.requests["GET"] <= asked + 15
    assert size <= read <= 1.02 * size + 100_000  # what does not grow with the model
    assert store.proxy.requests["GET"] < 30
    assert (tmp_path / "out" / "model.safetensors").stat().st_size >= size


def _shell(*words: str, **environment: str) -> Result:
    return run_command(*words, **environment)


def test_the_command_line_reads_from_a_bucket_and_shows_no_option(
    store: ObjectStore, real_checkpoints: Path, tmp_path: Path
) -> None:
    options = store.arguments()
    done = _shell("consolidate", f"s3://sources/{LLAMA}", str(tmp_path / "out"), *options)
    assert done.returncode == 0, done.stderr
    ckptkit.consolidate(real_checkpoints / LLAMA, tmp_path / "local")
    assert files(tmp_path / "out") == files(tmp_path / "local")
    wrong = [word.replace("store-secret", "other-secret") for word in options]
    store.proxy.fail("GET", 403, "SignatureDoesNotMatch", times=None)
    refused = _shell("inspect", f"s3://sources/{LLAMA}", *wrong)
    assert refused.returncode == 3
    assert "let us in" in refused.stderr
    shown = done.stdout + done.stderr + refused.stdout + refused.stderr
    assert not [w for w in (*options, *wrong) if "=" in w and w.partition("=")[2] in shown]


@pytest.mark.slow
def test_a_path_on_this_machine_needs_no_client_of_any_store(real_checkpoints: Path) -> None:
    program = (
        "import sys\nfrom ckptkit_cli.main import main\n"
        f"main(['inspect', {str(real_checkpoints / LLAMA)!r}])\n"
        "found = {'fsspec', 's3fs', 'huggingface_hub', 'aiohttp', 'asyncio', 'ray'}\n"
        "sys.exit(sorted(found & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parents[2]}/cli"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer(xet=False) as server:
        yield server


def test_a_model_of_the_hub_is_a_source_and_a_base(
    hub: HubServer,
    real_checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = real_checkpoints / "hf_sharded/checkpoint"
    hub.put("org/model", {p.name: p.read_bytes() for p in model.iterdir()})
    options = {"endpoint": hub.url, "token": TOKEN}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    ckptkit.consolidate("hf://org/model", tmp_path / "remote", src_options=options)
    ckptkit.consolidate(model, tmp_path / "local")
    assert files(tmp_path / "remote") == files(tmp_path / "local")
    manifest = (tmp_path / "remote/ckptkit.json").read_text()
    assert TOKEN not in manifest
    assert "hf://org/model" in manifest
    base = Place("hf://org/model@main", options)
    src = real_checkpoints / "fsdp2_llama_flat/checkpoint"
    ckptkit.consolidate(src, tmp_path / "with-base", base=base)
    assert (tmp_path / "with-base/config.json").exists()
    ckptkit.consolidate(model, tmp_path / "alike", like=base, base=base, dtype="base")
    assert files(tmp_path / "alike").keys() == files(model).keys()
    odd = "-a [1]*?#%20+{b}&e\u0301\U0001f680"  # no name is a pattern, or a part of a URL
    moved = {f"{odd}/{p.name}": p.read_bytes() for p in model.iterdir()}
    hub.put("org/odd", moved | {f"{odd[:3]}1/config.json": b"{}", "a/config.json": b"{}"})
    ckptkit.consolidate(f"hf://org/odd/{odd}", tmp_path / "odd", src_options=options)
    assert files(tmp_path / "odd") == files(tmp_path / "local")
    hub.put("org/gated", {"config.json": b"{}"})
    hub.gated.add("org/gated")
    anonymous = Place("hf://org/gated", {"endpoint": hub.url, "token": False})
    caught = refuse("hf://org/gated", src, tmp_path / "never", kind=HubError, base=anonymous)
    assert "terms" in caught.value.hint
