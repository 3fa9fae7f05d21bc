"""Deltas lead from one model to the next, bit by bit, whatever the models are stored in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import InputError, RefusedError, UsageError
from ckptkit.deltas.form import ChecksumFormat, Encoding
from tests.command_line import run_command
from tests.object_store import Bucket, ObjectStore
from tests.sharded import write_sharded
from tests.small_deltas import (
    LEAF,
    Model,
    apply_independently,
    bytes_of,
    change_model,
    make_model,
    model_bytes,
    write_model,
    write_steps,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bucket(object_store: ObjectStore) -> Bucket:
    return object_store.bucket("deltas")


@pytest.fixture(scope="module")
def written_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Model]]:
    """The folder with the four models in a row, and what they hold."""
    folder = tmp_path_factory.mktemp("steps")
    models = write_steps(folder, make_model(), 3)
    for model in models:
        for tensor in model.values():
            tensor.flags.writeable = False
    return folder, models


@pytest.fixture
def steps(tmp_path: Path, written_steps: tuple[Path, list[Model]]) -> list[Model]:
    """Four models in a row, in the folders s0 to s3, which are copies: a test may change them."""
    folder, models = written_steps
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return [dict(model) for model in models]


def make_chain(folder: Path, encodings: list[Encoding]) -> list[Path]:
    """Makes the deltas between the steps; returns their folders."""
    deltas = []
    for number, encoding in enumerate(encodings, start=1):
        out = folder / "deltas" / f"weight_v{number:06d}"
        ckptkit.create_delta(
            folder / f"s{number - 1}", folder / f"s{number}", out, encoding=encoding
        )
        deltas.append(out)
    return deltas


@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.quick("overwrite-blake3", "xor-adler32")
def test_a_delta_leads_to_the_new_model_by_any_reader(
    encoding: Encoding, checksum: ChecksumFormat, tmp_path: Path, steps: list[Model]
) -> None:
    out = tmp_path / "delta"
    ckptkit.create_delta(
        tmp_path / "s0", tmp_path / "s1", out, encoding=encoding, checksum=checksum, version=12
    )

    expected = {name: entry[2] for name, entry in bytes_of(steps[1]).items()}
    assert apply_independently(out, steps[0]) == expected
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {
        "version": "000012",
        "base_version": "000011",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    unchanged = {n for n in steps[0] if steps[0][n].tobytes() == steps[1][n].tobytes()}
    assert unchanged > {"mask", "empty"}
    assert set(index["weight_map"]) == set(steps[0]) - unchanged
    assert ckptkit.verify(out)
    ckptkit.apply_delta(tmp_path / "s0", out, tmp_path / "new")
    assert model_bytes(tmp_path / "new") == bytes_of(steps[1])


@pytest.mark.parametrize(
    "encodings",
    [
        ["xor"] * 3,
        ["overwrite"] * 3,
        ["xor", "overwrite", "xor"],
        ["overwrite", "xor", "overwrite"],
    ],
)
@pytest.mark.quick("encodings3")
def test_a_chain_is_applied_in_one_pass(
    encodings: list[Encoding], tmp_path: Path, steps: list[Model]
) -> None:
    deltas = make_chain(tmp_path, encodings)
    for last in (2, 3):
        out = tmp_path / f"out{last}"
        manifest = ckptkit.apply_delta(tmp_path / "s0", deltas[:last], out, workers=4)
        assert model_bytes(out) == bytes_of(steps[last])
        assert manifest.source["delta"]["version"] == last
        assert ckptkit.verify(out)
    out = tmp_path / "rest"
    ckptkit.apply_delta(tmp_path / "out2", deltas[2], out)
    assert model_bytes(out) == bytes_of(steps[3])


def test_the_files_of_a_delta_depend_on_the_models_alone(
    tmp_path: Path, steps: list[Model]
) -> None:
    for workers in (1, 4):
        out = tmp_path / f"d{workers}"
        ckptkit.create_delta(
            tmp_path / "s0", tmp_path / "s1", out, workers=workers, memory_budget="1GB"
        )
    files = [
        {p.name: p.read_bytes() for p in (tmp_path / d).iterdir() if p.name != "ckptkit.json"}
        for d in ("d1", "d4")
    ]
    assert files[0] == files[1]
    assert steps


def test_equal_models_make_a_delta_without_tensors(tmp_path: Path, steps: list[Model]) -> None:
    ckptkit.create_delta(tmp_path / "s0", tmp_path / "s0", tmp_path / "delta")
    index = json.loads((tmp_path / "delta" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {}
    assert ckptkit.verify(tmp_path / "delta")
    ckptkit.apply_delta(tmp_path / "s0", tmp_path / "delta", tmp_path / "out")
    assert model_bytes(tmp_path / "out") == bytes_of(steps[0])


def sharded_steps(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Writes two steps in float32, of two and of three ranks, into the folders a and b."""
    generator = torch.Generator().manual_seed(1)
    first = {f"layers.{i}.weight": torch.rand(40, 30, generator=generator) for i in range(4)}
    second = {
        name: tensor + (torch.rand(40, 30, generator=generator) < 0.02)
        for name, tensor in first.items()
    }
    write_sharded(folder / "a", first, 2)
    write_sharded(folder / "b", second, 3)
    return [first, second]


def test_two_sharded_steps_make_a_delta_without_a_model_between(tmp_path: Path) -> None:
    sharded_steps(tmp_path)
    for name in ("a", "b"):
        ckptkit.consolidate(tmp_path / name, tmp_path / f"whole-{name}", dtype="bfloat16")
    ckptkit.create_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta", dtype="bfloat16")
    inspection = ckptkit.inspect_delta(tmp_path / "delta")
    assert inspection.changed_share is not None
    assert 0.01 < inspection.changed_share < 0.03
    assert {line.dtype for line in inspection.tensors} == {"bfloat16"}

    # Shards as a base, and the model of the same step as a base, lead to the same model.
    ckptkit.apply_delta(tmp_path / "a", tmp_path / "delta", tmp_path / "one", dtype="bfloat16")
    ckptkit.apply_delta(tmp_path / "whole-a", tmp_path / "delta", tmp_path / "other")
    expected = model_bytes(tmp_path / "whole-b")
    assert model_bytes(tmp_path / "one") == expected
    assert model_bytes(tmp_path / "other") == expected


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("accelerate_fsdp2_tied_with_config", {}),
        ("verl_fsdp2", {"select": "actor"}),
        ("zero3_bf16", {}),
        ("torchtitan_family_llama_tied", {"base": True}),
        ("megatron_model_llama_tp2_pp2", {"base": True}),
    ],
)
@pytest.mark.quick("accelerate_fsdp2_tied_with_config-options0", "zero3_bf16-options2")
def test_shards_that_a_framework_wrote_are_a_base(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    shards = ROOT / "fixtures" / case / "checkpoint"
    if "base" in options:
        options = {"base": shards.parent}
    ckptkit.consolidate(shards, tmp_path / "base", **options)
    model = load_file(tmp_path / "base" / "model.safetensors")
    changed = {name: tensor.clone() for name, tensor in model.items()}
    first = next(name for name, tensor in changed.items() if tensor.dim() > 1)
    changed[first][0, ::3] *= -1
    shutil.copytree(tmp_path / "base", tmp_path / "new")
    (tmp_path / "new" / "ckptkit.json").unlink()
    save_file(changed, tmp_path / "new" / "model.safetensors", {"format": "pt"})

    if "select" in options:  # of the one side that needs it
        shards = shards / "global_step_4" / options["select"]
        options = {}
    ckptkit.create_delta(shards, tmp_path / "new", tmp_path / "delta", **options)
    inspection = ckptkit.inspect_delta(tmp_path / "delta")
    assert [line.name for line in inspection.tensors] == [first]
    for base in (shards, tmp_path / "base"):
        out = tmp_path / "out" / base.name
        ckptkit.apply_delta(base, tmp_path / "delta", out, **options)
        assert model_bytes(out) == model_bytes(tmp_path / "new")


@pytest.mark.slow
def test_models_and_deltas_are_read_from_a_store_and_written_there(
    bucket: Bucket, tmp_path: Path, steps: list[Model]
) -> None:
    options = bucket.store.options
    base = bucket.put_tree(tmp_path / "s0", "s0")
    new = bucket.put_tree(tmp_path / "s1", "s1")
    delta = f"{bucket.url}/deltas/weight_v000001"
    ckptkit.create_delta(base, new, delta, src_options=options, dst_options=options)
    assert ckptkit.inspect_delta(delta, src_options=options).version == 1
    assert ckptkit.verify(delta, src_options=options)
    ckptkit.apply_delta(base, [delta], tmp_path / "out", src_options=options)
    assert model_bytes(tmp_path / "out") == bytes_of(steps[1])
    out = f"{bucket.url}/models/new"
    ckptkit.apply_delta(base, delta, out, src_options=options, dst_options=options)
    assert ckptkit.verify(out, src_options=options)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "model.safetensors").write_bytes(
        bucket.get("models/new/model.safetensors")
    )
    assert model_bytes(tmp_path / "copy") == bytes_of(steps[1])


@pytest.mark.slow
def test_a_chain_of_ten_reads_the_base_once(tmp_path: Path) -> None:
    models = [make_model()]
    write_model(tmp_path / "s0", models[0])
    deltas = []
    for number in range(1, 11):
        models.append(change_model(models[-1], 4 * number, 0.001))
        write_model(tmp_path / f"s{number}", models[-1])
        out = tmp_path / f"weight_v{number:06d}"
        ckptkit.create_delta(tmp_path / f"s{number - 1}", tmp_path / f"s{number}", out)
        deltas.append(str(out))
    program = f"""
import ckptkit, pathlib
from ckptkit.storage.local import source
def read(): return int(pathlib.Path("/proc/self/io").read_text().split()[1])
import ckptkit.deltas.patching, zstandard, ml_dtypes  # so that their own bytes do not count
ckptkit.apply_delta({str(tmp_path / "s0")!r}, {deltas[:1]!r}, {str(tmp_path / "one")!r})
before = read()
ckptkit.apply_delta({str(tmp_path / "s0")!r}, {deltas!r}, {str(tmp_path / "ten")!r})
print(read() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    base = (tmp_path / "s0" / "model.safetensors").stat().st_size
    stored = sum(p.stat().st_size for d in deltas for p in Path(d).iterdir())
    # Deltas are read to prove their files, and to apply them.
    assert int(done.stdout) < base + 2 * stored + 2_000_000
    assert model_bytes(tmp_path / "ten") == bytes_of(models[-1])


def test_models_that_are_not_alike_are_refused_by_name(tmp_path: Path, steps: list[Model]) -> None:
    lacking = dict(steps[0])
    del lacking["model.norm.weight"]
    write_model(tmp_path / "lacking", lacking)
    reshaped = {**steps[0], "count": np.array([3], np.int64)}
    write_model(tmp_path / "reshaped", reshaped)
    for base, new, text in (
        ("s0", "lacking", r"lacking.*lacks 'model.norm.weight'"),
        ("lacking", "s0", r"lacking.*lacks 'model.norm.weight'"),
        ("s0", "reshaped", r"tensor 'count' is int64 \[1\].*int64 \[\]"),
    ):
        with pytest.raises(RefusedError, match=text):
            ckptkit.create_delta(tmp_path / base, tmp_path / new, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
    ckptkit.create_delta(
        tmp_path / "s0", tmp_path / "lacking", tmp_path / "delta", exclude=["model.norm.*"]
    )


def test_options_that_cannot_be_met_are_refused(tmp_path: Path, steps: list[Model]) -> None:
    sides = tmp_path / "s0", tmp_path / "s1"
    with pytest.raises(UsageError, match="--encoding"):
        ckptkit.create_delta(*sides, tmp_path / "d", encoding="diff")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--version"):
        ckptkit.create_delta(*sides, tmp_path / "d", version=0)
    with pytest.raises(UsageError, match="is 5, and the name of OUT has 2"):
        ckptkit.create_delta(*sides, tmp_path / "weight_v000002", version=5)
    with pytest.raises(UsageError, match="is 0, where a number from 1"):
        ckptkit.create_delta(*sides, tmp_path / "weight_v000000")
    assert not [*tmp_path.glob("weight_v*")]
    with pytest.raises(UsageError, match="at least one delta"):
        ckptkit.apply_delta(tmp_path / "s0", [], tmp_path / "d")
    with pytest.raises(RefusedError, match="inside the source"):
        ckptkit.create_delta(*sides, tmp_path / "s1" / "d")
    assert steps
    assert not (tmp_path / "d").exists()


def test_a_tensor_too_large_for_positions_is_refused_by_overwrite(tmp_path: Path) -> None:
    # A sparse file: nothing of it is read.
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        size = (1 << 32) + 2
        header = {"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
    with pytest.raises(RefusedError, match="positions in at most 4,294,967,296"):
        ckptkit.create_delta(tmp_path / "a", tmp_path / "b", tmp_path / "d", encoding="overwrite")


def test_the_commands_say_what_they_wrote(tmp_path: Path, steps: list[Model]) -> None:
    deltas = [tmp_path / "deltas" / f"weight_v{n:06d}" for n in (1, 2)]
    for number, out in enumerate(deltas):
        done = run_command(
            "delta", "create", tmp_path / f"s{number}", tmp_path / f"s{number + 1}", out
        )
        assert done.returncode == 0, done.stderr
        assert f"version {number + 1}, to be applied to version {number}" in done.stdout
    shown = run_command("inspect", deltas[1])
    assert "version     2, to be applied to version 1" in shown.stdout
    assert "of the elements of" in shown.stdout
    listed = json.loads(run_command("inspect", deltas[1], "--json", "--tensors", "model.*").stdout)
    assert listed["base_version"] == 1
    assert all(line["name"].startswith("model.") for line in listed["tensors"])
    assert "a delta" in run_command("verify", deltas[1]).stdout
    done = run_command("delta", "apply", tmp_path / "s0", *deltas, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert model_bytes(tmp_path / "out") == bytes_of(steps[2])
    assert "run the same `ckptkit delta apply` with `--base ORG/NAME --overwrite`" in done.stderr


def test_a_delta_is_no_model(tmp_path: Path, steps: list[Model]) -> None:
    (delta,) = make_chain(tmp_path, ["xor"])
    done = run_command("consolidate", delta, tmp_path / "out")
    assert done.returncode == 3
    assert "is a delta" in done.stderr
    assert "ckptkit delta apply" in done.stderr
    done = run_command("delta", "apply", tmp_path / "s0", tmp_path / "s1", tmp_path / "out")
    assert done.returncode == 3
    assert steps
    with pytest.raises(InputError, match="which every delta has"):
        ckptkit.inspect_delta(tmp_path / "s1")


@pytest.mark.slow
def test_memory_does_not_grow_with_one_large_tensor(tmp_path: Path) -> None:
    size = 300 << 20  # above the limit: one copy of the tensor would be too much
    header = {"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, size, LEAF):
                block = np.full(min(LEAF, size - start), 7, np.uint8)
                if name == "b":
                    block[random.integers(0, len(block), 20_000)] = 1
                file.write(block.tobytes())
    program = f"""
import ckptkit
from pathlib import Path
root = {str(tmp_path)!r}
for encoding in ("xor", "overwrite"):
    ckptkit.create_delta(f"{{root}}/a", f"{{root}}/b", f"{{root}}/{{encoding}}", encoding=encoding)
    ckptkit.apply_delta(f"{{root}}/a", [f"{{root}}/{{encoding}}"], f"{{root}}/out-{{encoding}}")
status = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 250_000_000
    expected = (tmp_path / "b" / "model.safetensors").read_bytes()[-size:]
    for encoding in ("xor", "overwrite"):
        assert (tmp_path / f"out-{encoding}" / "model.safetensors").read_bytes()[-size:] == expected
