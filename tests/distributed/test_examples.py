"""The examples, as their users run them: to the end, and killed half-way and started again."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ckptkit
from tests.ranks import RankHost, RunRanks, make_runner

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_A_RANK = Path(__file__).with_name("examples_rank.py")
# What all scripts but one import; the last two are imported by libraries when they are asked.
IMPORTED = (
    *("accelerate", "datasets", "peft", "transformers.trainer", "trl"),
    *("transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer"),
)
LIMIT_SECONDS = 120.0
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}
STEPS = "checkpoint[-_]*/ckptkit.json"
COMMANDS = {  # the script, and the module that runs it
    "fsdp2": ("fsdp2.py", ""),
    "accelerate": ("accelerate_fsdp.py", ""),
    "trainer": ("trainer.py", ""),
    "trl": ("trl_lora.py", ""),
    "qlora": ("trl_qlora.py", ""),
    "run": ("unmodified.py", "ckptkit.run"),
}


@pytest.fixture(scope="module")
def run_with_libraries() -> Iterator[RunRanks]:
    """As `run_ranks`; what most scripts import is imported once, and not by each run."""
    host = RankHost(*IMPORTED)
    yield make_runner(host)
    host.close()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


def run_example(
    run: RunRanks,
    module: str,
    arguments: Sequence[str],
    logs: Path,
    meanwhile: Callable[[Path], None] = lambda _: None,
) -> tuple[int, str]:
    """Runs a script on both ranks, and does something meanwhile; returns status and logs."""
    logs.mkdir()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, ON_A_RANK, 2, logs, module, *arguments, status=None)
        meanwhile(logs)
        status = running.result().returncode
    said = [(logs / f"rank{rank}.log").read_text() for rank in range(2)]
    return status, "\nrank 1:\n".join(said)


def final_loss(log: str) -> str:
    found = re.findall(r"^final loss (\d+\.\d{10})$", log, re.MULTILINE)
    assert len(found) == 1, log[-4_000:]
    return str(found[0])


def has_a_step(run: Path) -> bool:
    return any((*run.glob(STEPS), *run.glob(f"checkpoints/{STEPS}")))


def zero_is_whole(run: Path) -> bool:
    """Whether the first save is: DeepSpeed names it before all ranks have written their files."""
    latest = run / "latest"
    if not latest.exists() or not (tag := latest.read_text(encoding="utf-8")):
        return False
    files = [*(run / tag).glob("*.pt")]
    return len(files) == 4 and all(map(zipfile.is_zipfile, files))


def megatron_is_whole(run: Path) -> bool:
    return (run / "latest_checkpointed_iteration.txt").exists()


def kill_after_save(logs: Path, run: Path, is_saved: Callable[[Path], bool] = has_a_step) -> None:
    """Kills all ranks at once when the first checkpoint is complete, with what they started."""
    until = time.monotonic() + LIMIT_SECONDS
    while not is_saved(run):
        assert time.monotonic() < until, "nothing was saved"
        time.sleep(0.005)
    ranks = [int((logs / f"pid{rank}").read_text()) for rank in range(2)]
    started = [child for rank in ranks for child in psutil.Process(rank).children(recursive=True)]
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("example", COMMANDS)
def test_a_job_that_was_killed_and_started_again_ends_as_if_nothing_had_happened(
    example: str, run_ranks: RunRanks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    script, module = COMMANDS[example]
    if example != "fsdp2":  # which imports no Transformers
        run_ranks = request.getfixturevalue("run_with_libraries")
    broken = tmp_path / "broken"

    def run(into: str, logs: str, *meanwhile: Callable[[Path], None]) -> tuple[int, str]:
        arguments = [str(EXAMPLES / script), str(tmp_path / into)]
        return run_example(run_ranks, module, arguments, tmp_path / logs, *meanwhile)

    status, straight = run("straight", "logs")
    assert status == 0, straight[-4_000:]

    status, log = run("broken", "killed_logs", lambda logs: kill_after_save(logs, broken))
    assert status != 0, log[-4_000:]

    status, resumed = run("broken", "resumed_logs")
    assert status == 0, resumed[-4_000:]
    assert re.search(r"resumed from (?:step |'checkpoint_)\d", resumed), resumed[-4_000:]
    assert final_loss(resumed) == final_loss(straight)
    if example in BASES:
        adapters = (tmp_path / f"{run}-adapter" for run in ("broken", "straight"))
        found, truth = ((a / "adapter_model.safetensors").read_bytes() for a in adapters)
        assert found == truth  # a loss in bfloat16 has few digits
        check_adapter(tmp_path / "straight", tmp_path, BASES[example])
        loss = loss_of_transformers(tmp_path / "merge")
        assert loss == pytest.approx(float(final_loss(straight)), abs=0.05)


STOCK = {  # what tells that the first save of a script is complete
    "deepspeed_zero": zero_is_whole,
    "megatron_core": megatron_is_whole,
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("example", STOCK)
def test_a_job_that_another_library_saves_goes_on_after_a_kill_and_becomes_a_model(
    example: str, run_with_libraries: RunRanks, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"

    def run(into: str, logs: str, *meanwhile: Callable[[Path], None]) -> tuple[int, str]:
        arguments = [str(EXAMPLES / f"{example}.py"), str(tmp_path / into)]
        return run_example(run_with_libraries, "", arguments, tmp_path / logs, *meanwhile)

    def first_save() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in broken.glob("*10/*")}

    status, straight = run("straight", "logs")
    assert status == 0, straight[-4_000:]
    whole = STOCK[example]
    status, log = run("broken", "killed_logs", lambda logs: kill_after_save(logs, broken, whole))
    assert status != 0, log[-4_000:]
    saved = first_save()
    assert saved
    status, resumed = run("broken", "resumed_logs")
    assert status == 0, resumed[-4_000:]
    assert first_save() == saved  # it went on from there
    assert final_loss(resumed) == final_loss(straight)

    models = [tmp_path / f"{name}-model" for name in ("straight", "broken")]
    for out in models:
        consolidate(out.with_name(out.name.removesuffix("-model")), out)
    weights, others = (load_file(out / "model.safetensors") for out in models)
    assert_same(weights, others)
    loss = loss_on_windows(models[1])
    assert loss == pytest.approx(float(final_loss(resumed)), rel=1e-6)
    if example == "deepspeed_zero":
        consolidate(broken, tmp_path / "wide", "--dtype", "float32")
        wide = load_file(tmp_path / "wide/model.safetensors")
        assert {weight.dtype for weight in wide.values()} == {torch.float32}
        assert_same({name: weight.bfloat16() for name, weight in wide.items()}, weights)


def consolidate(run: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "ckptkit_cli", "consolidate", str(run), str(out)]
    command += ["--base", f"{run}-base", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)


def load_whole_model(folder: Path) -> Any:
    """Loads a model folder with Transformers, which has to find every weight in it."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def loss_on_windows(folder: Path) -> float:
    """The loss that examples with savers of other libraries print, of a model made of a save."""
    inputs = runpy.run_path(str(EXAMPLES / "toy.py"))["windows"](8)
    with torch.no_grad():
        return float(load_whole_model(folder)(input_ids=inputs, labels=inputs).loss)


def check_adapter(run: Path, out: Path, base: Callable[[Path], dict[str, torch.Tensor]]) -> None:
    """Makes of a run what the example says, with no option, and compares with what PEFT has."""
    for verb in ("extract", "merge"):
        command = [sys.executable, "-m", "ckptkit_cli", "adapter", verb, str(run), str(out / verb)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    adapter = load_file(out / "extract/adapter_model.safetensors")
    saved = load_file(f"{run}-adapter/adapter_model.safetensors")  # by the Trainer, of all ranks
    assert adapter.keys() == saved.keys()
    assert all(torch.equal(adapter[name], saved[name]) for name in saved)
    assert any(saved[name].any() for name in saved if "lora_B" in name)
    configs = [Path(f"{run}-adapter"), out / "extract"]
    trained, extracted = (json.loads((c / "adapter_config.json").read_text()) for c in configs)
    assert {**trained, "target_modules": None} == {**extracted, "target_modules": None}
    assert sorted(trained["target_modules"]) == sorted(extracted["target_modules"])

    merged = load_file(out / "merge/model.safetensors")
    weights = base(run)
    assert merged.keys() == weights.keys()
    scaling = trained["lora_alpha"] / trained["r"]
    for name, weight in weights.items():
        truth = weight.float()
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if "_proj." in name:
            down, up = (saved[f"{module}.lora_{side}.weight"].float() for side in "AB")
            truth = truth + scaling * (up @ down)
        rounding = 1e-6 if merged[name].dtype == torch.float32 else 2**-8
        assert merged[name].dtype == weight.dtype
        torch.testing.assert_close(merged[name].float(), truth, rtol=rounding, atol=1e-7)


def loss_of_transformers(folder: Path) -> float:
    """The loss of a model on the texts that the examples train on and evaluate with."""
    toy = runpy.run_path(str(EXAMPLES / "toy.py"))
    encode = AutoTokenizer.from_pretrained(folder)
    options = {"truncation": True, "max_length": toy["WINDOW"], "return_tensors": "pt"}
    tokens = encode(toy["TEXTS"], **options).input_ids
    with torch.no_grad():
        return float(load_whole_model(folder)(input_ids=tokens, labels=tokens).loss)


def base_in(run: Path) -> dict[str, torch.Tensor]:
    """The frozen weights that are stored with a run."""
    with ckptkit.open(run, select="base_model_0") as stored:
        return {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): torch.as_tensor(
                stored.read(name)
            )
            for name in stored.keys()  # noqa: SIM118  not a mapping
        }


def dequantized_base_of(run: Path) -> dict[str, torch.Tensor]:
    """The weights that training began with, as bitsandbytes packs and unpacks them."""
    bitsandbytes = importlib.import_module("bitsandbytes.functional")  # it has no types
    weights = load_file(f"{run}-base/model.safetensors")
    with torch.compiler.set_stance("force_eager"):
        for name in weights:
            if "_proj." in name:
                packed = bitsandbytes.quantize_4bit(
                    weights[name], quant_type="nf4", compress_statistics=True
                )
                weights[name] = bitsandbytes.dequantize_4bit(*packed)
    return weights


# Where the weights come from that adapters are merged into.
BASES = {"trl": base_in, "qlora": dequantized_base_of}


@pytest.mark.slow
def test_a_model_with_names_of_its_own_becomes_one_that_transformers_loads(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "reference" / "name-maps.md").read_text(encoding="utf-8")
    shown = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    own_map = (EXAMPLES / "own_names" / "own.toml").read_text(encoding="utf-8")
    assert [part in own_map for part in shown] == [True, True]
    lines = [line[2:] for line in page.splitlines() if line.startswith("$ ")]
    commands = [line.split() for line in lines if "own_names" in line]
    assert len(commands) == 4
    (tmp_path / "examples").symlink_to(EXAMPLES)
    program = {"python": [sys.executable], "ckptkit": [sys.executable, "-m", "ckptkit_cli"]}
    printed = []
    for name, *arguments in commands:
        done = subprocess.run(
            [*program[name], *arguments],
            check=False,
            cwd=tmp_path,
            env=os.environ | SETTINGS,
            timeout=LIMIT_SECONDS,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert "logits up to" in printed[-1]
