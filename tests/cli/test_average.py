"""`ckptkit average` against torch's arithmetic, bit by bit, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import get_ema_avg_fn

import ckptkit
from ckptkit.core.errors import (
    AmbiguousSourceError,
    ArgumentError,
    CannotPlanError,
    OverflowRefusedError,
    RefusedError,
    SourceChangedError,
    UsageError,
)
from ckptkit.engine.outcome import Event, Started
from tests.command_line import run_command as run
from tests.files import contents
from tests.object_store import ObjectStore
from tests.sharded import write_sharded

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
Tensors = dict[str, torch.Tensor]
FLOATS = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
STEPS = (9, 10, 100, 1000, 1500)


def make_step(run: Path, step: int) -> Path:
    """Writes a step with floats of every type, in odd shapes, and what has no mean."""
    chance = torch.Generator().manual_seed(step)
    tensors = {
        f"layer.{str(dtype).partition('.')[2]}": torch.randn(37, 129, generator=chance).to(dtype)
        for dtype in FLOATS
    }
    tensors |= {
        "a name/with %?#[0]": torch.randn(3, generator=chance),
        "ids": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(float(step)),
    }
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "other", "step": step}))
    (folder / "tokenizer.json").write_text(json.dumps({"step": step}))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("average") / "run"
    for step in STEPS:
        make_step(folder, step)
    return folder


@pytest.fixture
def steps(made: Path) -> list[Path]:
    return [made / f"checkpoint-{step}" for step in STEPS]


def weights(folder: Path) -> Tensors:
    found: Tensors = load_file(folder / "model.safetensors")
    return found


def by_torch(
    sources: Sequence[Path], combine: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the average of each float as torch computes it, in float32 or wider."""
    stored = [weights(source) for source in sources]
    for name, last in stored[-1].items():
        if last.is_floating_point():
            wide = torch.float64 if last.dtype == torch.float64 else torch.float32
            yield name, combine([tensors[name].to(wide) for tensors in stored])
        else:
            yield name, last


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compares bits."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def sum_and_divide(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for further in values[1:]:
        total += further
    return total / len(values)


def test_the_mean_is_that_of_torch_rounded_once(steps: list[Path], tmp_path: Path) -> None:
    manifest = ckptkit.average(steps, tmp_path / "out")
    found, last = weights(tmp_path / "out"), weights(steps[-1])
    for name, wanted in by_torch(steps, sum_and_divide):
        assert_same(found[name], wanted.to(last[name].dtype))
    for name, wanted in by_torch(steps, lambda values: torch.stack(values).mean(0)):
        # The last elements, which fill no vector of the processor, torch adds in another order.
        count = found[name].numel() // 32 * 32
        whole = wanted.to(last[name].dtype).reshape(-1)
        assert_same(found[name].reshape(-1)[:count], whole[:count])
    assert manifest.source["average"] == [
        {"path": str(step), "step": number, "weight": 0.2}
        for step, number in zip(steps, STEPS, strict=True)
    ]
    assert manifest.source["step"] == STEPS[-1]
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == {"step": STEPS[-1]}
    assert json.loads((tmp_path / "out/config.json").read_text())["step"] == STEPS[-1]
    assert ckptkit.verify(tmp_path / "out").ok


def test_weights_are_divided_by_their_sum(steps: list[Path], tmp_path: Path) -> None:
    def combine(values: list[torch.Tensor]) -> torch.Tensor:
        return values[0] * (1 / 8) + values[1] * (5 / 8) + values[2] * (2 / 8)

    ckptkit.average(steps[:3], tmp_path / "out", weights=[1, 5, 2])
    found, last = weights(tmp_path / "out"), weights(steps[2])
    for name, wanted in by_torch(steps[:3], combine):
        assert_same(found[name], wanted.to(last[name].dtype))
    result = run("average", *steps[:3], tmp_path / "typed", "--weights", "0.1,0.5,0.2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert sum(one["weight"] for one in document["source"]["average"]) == pytest.approx(1)


def test_a_moving_average_is_that_of_torch(steps: list[Path], tmp_path: Path) -> None:
    step_of: Any = get_ema_avg_fn(0.9)  # type: ignore[no-untyped-call]

    def combine(values: list[torch.Tensor]) -> torch.Tensor:
        average = values[0]
        for number, value in enumerate(values[1:], 1):
            average = step_of(average, value, number)
        return average

    result = run("average", *steps, tmp_path / "out", "--ema", "0.9", "--dtype", "fp32")
    assert result.returncode == 0, result.stderr
    found = weights(tmp_path / "out")
    for name, wanted in by_torch(steps, combine):
        wide = wanted.float() if wanted.is_floating_point() else wanted
        assert_same(found[name], wide)


def test_a_cast_rounds_once(steps: list[Path], tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "keep_dtype": ["layer.float16"]}
    ckptkit.average(steps, tmp_path / "out", **options)  # type: ignore[arg-type]
    found = weights(tmp_path / "out")
    for name, wanted in by_torch(steps, sum_and_divide):
        kept = torch.float16 if name == "layer.float16" else torch.bfloat16
        assert_same(found[name], wanted.to(kept) if wanted.is_floating_point() else wanted)


@pytest.mark.slow
def test_large_tensors_are_the_same_in_shards_with_any_number_of_threads(tmp_path: Path) -> None:
    stored, chance = [], torch.Generator().manual_seed(0)
    for step in (1, 2, 3):
        tensors = {
            "w": torch.randn(1_100, 4_001, generator=chance),
            "b": torch.randn(5 << 20, generator=chance).bfloat16(),
        }
        stored.append(tensors)
        write_sharded(tmp_path / f"checkpoint-{step}", tensors, ranks=3)
    ckptkit.average(tmp_path, tmp_path / "out", last=3, workers=5)
    ckptkit.average(tmp_path, tmp_path / "again", last=3, workers=1)
    found = weights(tmp_path / "out")
    for name, last in stored[-1].items():
        wanted = sum_and_divide([tensors[name].float() for tensors in stored]).to(last.dtype)
        assert_same(found[name], wanted)
    for name, other in weights(tmp_path / "again").items():
        assert_same(found[name], other)


REAL = (
    "accelerate_fsdp2_tied_with_config",
    "fsdp1_full_shard_flat",
    "fsdp2_mixtral",
    "dcp_zstd_fsdp2",
    "deepspeed_0_18_zero3",
    "zero3_bf16",
    "megatron_model_llama_tp2_pp2",
    "hf_tied",
)


@pytest.mark.parametrize("dtype", ["keep", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REAL)
@pytest.mark.quick("dcp_zstd_fsdp2-keep", "hf_tied-keep", "zero3_bf16-keep")
def test_two_copies_of_a_real_step_have_the_step_as_their_mean(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Halves and doubles are exact: names, maps, ties, masters and shards are as for one step."""
    copies = [tmp_path / "a", tmp_path / "b"]
    for copy in copies:
        shutil.copytree(FIXTURES / name / "checkpoint", copy)
    beside = FIXTURES / name
    base = beside if (beside / "config.json").exists() else None
    single = ckptkit.consolidate(copies[0], tmp_path / "single", dtype=dtype, base=base)
    double = ckptkit.average(copies, tmp_path / "double", dtype=dtype, base=base)
    assert {n: t.digest for n, t in single.tensors.items()} == {
        n: t.digest for n, t in double.tensors.items()
    }
    assert single.tied == double.tied
    files = sorted(path.name for path in (tmp_path / "single").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "double").iterdir())


def test_the_newest_complete_steps_of_a_run_are_taken(made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(made, copy)
    (copy / "checkpoint-2000").mkdir()  # incomplete
    (copy / "checkpoint-2000" / "model-00001-of-00002.safetensors").write_bytes(b"x")
    result = run("average", copy, tmp_path / "out", "--last", "3", "--json")
    assert result.returncode == 0, result.stderr
    listed = json.loads(result.stdout)["source"]["average"]
    assert [source["step"] for source in listed] == [100, 1000, 1500]
    assert "checkpoint-2000 was passed over: 1 of 2 files are there" in result.stderr
    few = run("average", copy, tmp_path / "more", "--last", "9")
    assert few.returncode == 4
    assert "5 complete steps were found" in few.stderr
    assert f"pass --last 5; `ckptkit ls {copy}` lists" in few.stderr
    assert run("average", copy, tmp_path / "five", "--last", "5").returncode == 0
    assert "checkpoint-2000 is not complete" in run("ls", copy).stdout
    only = tmp_path / "only"
    shutil.copytree(copy / "checkpoint-2000", only / "checkpoint-2000")
    none = run("average", only, tmp_path / "more", "--last", "1")
    assert none.returncode == 4
    assert "pass --last" not in none.stderr
    shutil.copytree(made / "checkpoint-9", copy / "epoch-3")
    with pytest.raises(AmbiguousSourceError, match="steps of 2 kinds"):
        ckptkit.average(copy, tmp_path / "more", last=2)
    with pytest.raises(UsageError, match="newest steps of one run"):
        ckptkit.average([copy, made], tmp_path / "more", last=2)
    assert not (tmp_path / "more").exists()


def changed(folder: Path, to: Path, **tensors: torch.Tensor | None) -> Path:
    """Copies a step; a tensor that is None is left out, others are replaced."""
    shutil.copytree(folder, to)
    stored = weights(folder) | tensors
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, to / "model.safetensors", {"format": "pt"})
    return to


def test_sources_that_do_not_fit_together_are_refused_by_name(
    steps: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    cases: Mapping[str, dict[str, torch.Tensor | None]] = {
        "'ids' is absent against int64 [5]": {"ids": None},
        "'more' is float32 [2] against absent": {"more": torch.ones(2)},
        "'scalar' is float32 [1] against float32 []": {"scalar": torch.ones(1)},
        "'empty' is float64 [0, 4] against float32": {"empty": torch.zeros(0, 4).double()},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        other = changed(steps[0], tmp_path / f"other-{number}", **tensors)
        result = run("average", other, steps[1], out)
        assert result.returncode == 4
        assert message in result.stderr
        assert str(other) in result.stderr
        assert str(steps[1]) in result.stderr
        assert not out.exists()
    with pytest.raises(CannotPlanError, match="and 19 more"):
        ckptkit.average([FIXTURES / "hf_tied" / "checkpoint", steps[0]], out)


def test_integers_that_differ_need_a_decision(steps: list[Path], tmp_path: Path) -> None:
    other = changed(
        steps[0], tmp_path / "other", ids=torch.arange(5) + 1, flags=torch.tensor([True, True])
    )
    arguments = [other, *steps[1:3], tmp_path / "out"]
    result = run("average", *arguments)
    assert result.returncode == 4
    assert "'ids' (int64) and 'flags' (bool) have other elements" in result.stderr
    assert "--take-last 'ids'" in result.stderr
    assert not (tmp_path / "out").exists()
    result = run("average", *arguments, "--take-last", "flags", "--take-last", "ids")
    assert result.returncode == 0, result.stderr
    found, last = weights(tmp_path / "out"), weights(steps[2])
    assert_same(found["ids"], last["ids"])
    ckptkit.average(steps, tmp_path / "two", take_last=["layer.*"], dtype="float32")
    found, last = weights(tmp_path / "two"), weights(steps[-1])
    assert_same(found["layer.bfloat16"], last["layer.bfloat16"].float())
    with pytest.raises(UsageError, match="none of 11 tensors has such a name"):
        ckptkit.average(steps, tmp_path / "three", take_last=["*.running_mean"])


def test_packed_numbers_are_not_averaged(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        tensors = {
            "w.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
            "w.weight_scale_inv": torch.full((1,), float(step)),
        }
        save_file(tensors, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(RefusedError, match=r"'w.weight(_scale_inv)?' is quantized"):
        ckptkit.average(tmp_path, tmp_path / "out", last=2)
    for step in (1, 2):
        scales = torch.full((3,), float(step)).to(torch.float8_e8m0fnu)
        save_file({"scales": scales}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(RefusedError, match="'scales' is quantized, or a scale"):
        ckptkit.average(tmp_path, tmp_path / "out", last=2)


def test_a_folder_and_a_file_in_it_are_one_source(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(3)}, tmp_path / name / "model.safetensors")
    file = tmp_path / "one" / "model.safetensors"
    with pytest.raises(UsageError, match="named twice"):
        ckptkit.average([tmp_path / "one", tmp_path / "two", file], tmp_path / "out")


def test_options_without_a_meaning_are_refused(steps: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    wrong: Sequence[tuple[dict[str, Any], str]] = [
        ({"weights": [1]}, "number of weights is 1 against 5 sources"),
        ({"weights": [1, 0, 1, 1, 1]}, "no weight that changes anything"),
        ({"weights": [1, -1, 1, -1, -5]}, "the sum of all weights is -5"),
        ({"weights": [1e308] * 5}, "the sum of all weights is inf"),
        ({"weights": [1, -1, 1, -1, 1e-300]}, "divided by the sum of all weights, 1e-300, is 1e"),
        ({"weights": [1, 1, 1, 1, 1e-60]}, "is 2.5e-61; expected from 1.4013e-45"),
        ({"weights": [1] * 5, "ema": 0.5}, "cannot be combined"),
        ({"ema": 1.0}, "not between 0 and 1"),
        ({"ema": float("nan")}, "not between 0 and 1"),
        ({"last": 0}, "not a positive whole number"),
    ]
    for options, message in wrong:
        with pytest.raises(UsageError, match=message):
            ckptkit.average(steps, out, **options)
    with pytest.raises(UsageError, match="an average needs two"):
        ckptkit.average(steps[0], out)
    with pytest.raises(UsageError, match="no source"):
        ckptkit.average([], out)
    with pytest.raises(UsageError, match="named twice"):
        ckptkit.average([steps[0], steps[1], str(steps[0])], out)
    with pytest.raises(RefusedError, match="100, 10, 1000, and the oldest has to come first"):
        ckptkit.average([steps[2], steps[1], steps[3]], out, ema=0.5)
    with pytest.raises(ArgumentError, match="unknown option 'optimizer'"):
        ckptkit.average(steps, out, optimizer=True)  # type: ignore[call-arg]
    assert run("average", *steps, out, "--weights", "1,much").returncode == 2
    assert run("average", *steps, steps[0] / "inside").returncode == 4
    assert not out.exists()


def test_numbers_at_the_edge_stay_what_torch_makes_of_them(tmp_path: Path) -> None:
    edge = torch.tensor([3.4e38, -3.4e38, float("inf"), float("nan"), -0.0, 1e-45])
    for step, factor in ((1, 1.0), (2, 1.0), (3, -1.0)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": edge * factor}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    folders = [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
    ckptkit.average(folders, tmp_path / "out")
    found = weights(tmp_path / "out")["w"]
    wanted = sum_and_divide([edge, edge])
    assert_same(torch.nan_to_num(found, 7), torch.nan_to_num(wanted, 7))
    opposite = ckptkit.average([folders[0], tmp_path / "checkpoint-3"], tmp_path / "opposite")
    assert opposite.tensors["w"].dtype == "float32"
    bits = weights(tmp_path / "opposite")["w"].view(torch.int32)
    assert {bits[2].item(), bits[3].item()} == {0x7FC00000}  # one NaN on every processor
    both = [folders[0], tmp_path / "checkpoint-3"]
    with pytest.raises(OverflowRefusedError):
        ckptkit.average(both, tmp_path / "half", weights=[3, 1], dtype="float16")
    assert not (tmp_path / "half").exists()


def write_steps(folder: Path, rows: int) -> Path:
    """Writes three steps in shards whose records have checksums."""
    chance = torch.Generator().manual_seed(1)
    for step in (1, 2, 3):
        tensors = {f"w.{n}": torch.randn(rows, 1_000, generator=chance) for n in range(5)}
        write_sharded(folder / f"checkpoint-{step}", tensors, ranks=2)
    return folder


@pytest.fixture(scope="module", params=[1_000])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_steps(tmp_path_factory.mktemp("steps") / "run", rows=request.param)


@pytest.fixture
def shards(written: Path, tmp_path: Path) -> list[Path]:
    shutil.copytree(written, tmp_path / "shards")
    return [tmp_path / "shards" / f"checkpoint-{step}" for step in (1, 2, 3)]


small = pytest.mark.parametrize("written", [40], indirect=True, scope="module")


@small
def test_a_source_that_changes_meanwhile_is_found(shards: list[Path], tmp_path: Path) -> None:

    def listen(event: Event) -> None:
        if isinstance(event, Started):
            os.utime(shards[0] / "__0_0.distcp", ns=(5, 5))

    with pytest.raises(SourceChangedError, match="checkpoint-1"):
        ckptkit.average(shards, tmp_path / "out", listener=listen)
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


SIZE = ("--max-shard-size", "5MB")


def test_slices_make_what_one_process_makes(shards: list[Path], tmp_path: Path) -> None:
    plan = run("average", *shards, tmp_path / "out", *SIZE, "--dry-run", "--json")
    assert json.loads(plan.stdout)["bytes_read"] == 3 * 5 * 4_000_000
    for number in ("1/2", "0/2"):
        assert not (tmp_path / "out").exists()
        done = run("average", *shards, tmp_path / "out", *SIZE, "--slice", number)
        assert done.returncode == 0, done.stderr
    assert run("average", *shards, tmp_path / "whole", *SIZE).returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    same = ("--if-exists", "verify")
    assert run("average", *shards, tmp_path / "out", *SIZE, *same).returncode == 0
    other = run("average", *shards, tmp_path / "out", *SIZE, *same, "--weights", "1,2,3")
    assert other.returncode == 5
    assert "option average" in other.stderr


@small
@pytest.mark.slow
def test_steps_and_the_output_can_be_at_urls(
    shards: list[Path], tmp_path: Path, object_store: ObjectStore
) -> None:
    bucket = object_store.bucket("averages")
    url = bucket.put_tree(shards[0].parent, "run")
    stores: Any = {"src_options": object_store.options, "dst_options": object_store.options}
    ckptkit.average(url, f"{bucket.url}/out", last=3, **stores)
    ckptkit.average(shards, tmp_path / "local")
    local = (tmp_path / "local" / "model.safetensors").read_bytes()
    assert bucket.get("out/model.safetensors") == local
    ckptkit.average([f"{url}/checkpoint-1", shards[1]], tmp_path / "mixed", **stores)
    ckptkit.average(shards[:2], tmp_path / "two")
    assert (tmp_path / "mixed" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_number_of_sources(tmp_path: Path) -> None:
    values = np.ones(3_000_000, np.float32)
    for step in range(1, 11):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"w": torch.from_numpy(values * step)}, folder / "model.safetensors")
    peaks = []
    for count in (2, 10):
        line = ("average", tmp_path, tmp_path / f"out-{count}", "--last", str(count))
        code = (
            "import resource, runpy, sys; sys.argv[0] = 'ckptkit'\n"
            "from ckptkit_cli.main import main\n"
            "status = main(sys.argv[1:])\n"
            "print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, line), "--quiet", "--workers", "2"],
            capture_output=True,
            text=True,
            check=True,
        )
        status, peak = map(int, done.stdout.split())
        assert status == 0
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 20_000  # KB; another 8 sources of 12 MB


def test_sources_of_different_types_are_averaged_in_the_type_that_is_asked_for(
    tmp_path: Path,
) -> None:
    values = torch.randn(37, generator=torch.Generator().manual_seed(1))
    dtypes = (torch.bfloat16, torch.float64, torch.float32)
    sources = [tmp_path / f"checkpoint-{step}" for step in range(3)]
    for source, dtype in zip(sources, dtypes, strict=True):
        source.mkdir()
        save_file({"w": values.to(dtype)}, source / "model.safetensors")
    with pytest.raises(CannotPlanError, match="'w' is bfloat16") as caught:
        ckptkit.average(sources, tmp_path / "out")
    assert "--dtype" in caught.value.hint
    ckptkit.average(sources, tmp_path / "out", dtype="float32")
    wide = [values.to(dtype).double() for dtype in dtypes]
    assert_same(weights(tmp_path / "out")["w"], sum_and_divide(wide).float())


def test_without_a_configuration_the_average_is_advised_to_run_again_itself(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    done = run("average", tmp_path, tmp_path / "out", "--last", "2")
    assert "run the same `ckptkit average` with `--base ORG/NAME --overwrite` added" in done.stderr
    assert "ckptkit consolidate" not in done.stderr
