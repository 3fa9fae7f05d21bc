"""Scripts that know nothing of ckptkit, through `ckptkit.run`, on two ranks that shard."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from tests.ranks import RankHost, RunRanks, make_runner

HERE = Path(__file__).parent
# What scripts import, or their libraries do, except for what ckptkit patches.
IMPORTED = ("bitsandbytes", "datasets", "deepspeed", "torchao", "torchdata.stateful_dataloader")
# For processes that are not forks.
PRETENDING = os.pathsep.join(filter(None, (str(HERE / "pretending"), os.environ.get("PYTHONPATH"))))
SCRIPT = HERE / "plain_script.py"
TOY = HERE.parents[1] / "examples/toy.py"
# What `accelerate launch` sets for a configuration with FSDP.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
TELLS = "go through ckptkit; CKPTKIT_RUN=off switches it off"
Launch = Callable[..., Any]


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunRanks]:
    """As that of all tests; what takes long to import is imported once."""
    host = RankHost(*IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))  # read by the imports
        yield make_runner(host)
    host.close()


@pytest.fixture
def launch(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs a script on two ranks with FSDP through `ckptkit.run`, as `torchrun` if asked."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name, value in FSDP2.items():
        monkeypatch.setenv(name, value)

    def run(
        *arguments: object, wraps: str, status: int | None = 0, torchrun: bool = False
    ) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", wraps)
        if not torchrun:
            return run_ranks(HERE / "unmodified_run.py", 2, *arguments, status=status)
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", PRETENDING)
            return run_ranks("-m", 2, "ckptkit.run", *arguments, status=status)

    return run


def accelerate_launch(home: Path, *arguments: object, wraps: str) -> Any:
    """Runs a script as `launch` does, by accelerate's own launcher and its options.

    A configuration of the user's is not looked at, since `home` has none.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--use_fsdp"]
    command += ["--fsdp_version=2", "--fsdp_state_dict_type=SHARDED_STATE_DICT"]
    command += ["--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"]
    command += [f"--fsdp_transformer_layer_cls_to_wrap={wraps}"]
    command += ["--fsdp_cpu_ram_efficient_loading=false", "-m", "ckptkit.run"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env={k: v for k, v in os.environ.items() if k not in FSDP2}
        | {"HF_HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": PRETENDING},
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8_000:]
    return done


def final_loss(stdout: str) -> str:
    found = re.search(r"final loss (\S+)", stdout)
    assert found, stdout
    return found[1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.distributed
@pytest.mark.slow
def test_a_script_of_accelerates_that_is_killed_goes_on_to_the_same_end(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CKPTKIT_RUN", "off")
        stock = launch(SCRIPT, tmp_path / "stock", wraps="Block")
    assert "INFO ckptkit" not in stock.stderr
    assert not (tmp_path / "stock/checkpoints/checkpoint_2/ckptkit.json").exists()

    words = (SCRIPT, tmp_path / "ours", "--die-at", 8)
    killed = launch(*words, wraps="Block", status=None, torchrun=True)
    assert killed.returncode == 1
    assert signal.SIGKILL.name in killed.stderr
    run = tmp_path / "ours/checkpoints"
    assert ckptkit.verify(run).ok  # although `total_limit` is 1, and another was being written

    resumed = accelerate_launch(tmp_path, *(SCRIPT, tmp_path / "ours", "--resume"), wraps="Block")
    assert re.search(r"resumed from [48]\b", resumed.stdout)
    assert final_loss(resumed.stdout) == final_loss(stock.stdout)
    assert names(run) == names(tmp_path / "stock/checkpoints") == ["checkpoint_2"]
    assert resumed.stderr.count(TELLS) == 1
    told = re.findall(r"'checkpoint_(\d+)' saved in", resumed.stderr)
    assert told  # on one rank, and once for each save
    assert len(told) == len(set(told))
    assert (run / "checkpoint_2/ckptkit.json").exists()


@pytest.mark.distributed
@pytest.mark.slow
def test_the_documented_ending_gathers_nothing_and_writes_what_it_wrote(
    launch: Launch, tmp_path: Path
) -> None:
    done = launch(HERE / "ending_script.py", tmp_path, wraps="LlamaDecoderLayer")
    assert "itself gathers" not in done.stderr
    stock = {
        path.relative_to(tmp_path / "stock"): path.read_bytes()
        for path in sorted((tmp_path / "stock").rglob("*"))
        if path.is_file()
    }
    assert {Path("model/all/model.safetensors"), Path("adapter/half.bin")} <= stock.keys()
    assert len([path for path in stock if path.suffix == ".safetensors"]) > 3
    for path, data in stock.items():
        assert (tmp_path / "ours" / path).read_bytes() == data, path


@pytest.mark.distributed
@pytest.mark.slow
def test_the_sft_script_of_trl_saves_its_checkpoints_through_ckptkit(
    launch: Launch, tmp_path: Path
) -> None:
    toy = runpy.run_path(str(TOY))
    toy["model"]().save_pretrained(tmp_path / "model")
    toy["tokenizer"]().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in toy["TEXTS"] * 8]
    (tmp_path / "data/train.jsonl").write_text("\n".join(lines), encoding="utf-8")

    done = launch(
        *("-m", "trl.scripts.sft", "--output_dir", tmp_path / "out"),
        *("--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "data"),
        *("--max_steps", 4, "--save_steps", 2, "--save_total_limit", 1, "--max_length", 24),
        *("--per_device_train_batch_size", 2, "--gradient_checkpointing", "false"),
        *("--bf16", "false", "--report_to", "none", "--disable_tqdm", "true"),
        wraps="LlamaDecoderLayer",
    )
    assert done.stderr.count(TELLS) == 1
    steps = [name for name in names(tmp_path / "out") if name.startswith("checkpoint")]
    assert steps == ["checkpoint-4"]
    assert ckptkit.verify(tmp_path / "out/checkpoint-4").ok
    assert ckptkit.verify(tmp_path / "out").ok  # the model, which the script saves at its end
    assert json.loads((tmp_path / "out/ckptkit.json").read_text())["kind"] == "model"
    assert (tmp_path / "out/model.safetensors").is_file()
    state = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())
    assert state["global_step"] == 4
