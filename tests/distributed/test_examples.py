"""The examples, as their users run them: to the end, and killed half-way and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptkit

EXAMPLES = Path(__file__).parents[2] / "examples"
HOST = Path(__file__).with_name("examples_host.py")
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
    "fsdp2": ("fsdp2.py", None),
    "accelerate": ("accelerate_fsdp.py", None),
    "trainer": ("trainer.py", None),
    "trl": ("trl_lora.py", None),
    "run": ("unmodified.py", "ckptkit.run"),
}


class Host:
    """Starts scripts on two ranks, in processes that have imported everything already."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HOST)],
            env=os.environ | SETTINGS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def run(
        self,
        module: str | None,
        arguments: list[str],
        logs: Path,
        meanwhile: Callable[[list[int]], None] = lambda _: None,
    ) -> list[int]:
        """Runs a script on both ranks, and does something with their process ids meanwhile.

        Returns:
            How the ranks have ended.
        """
        logs.mkdir()
        command = {"module": module, "arguments": arguments, "folder": str(logs)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        ranks = list(self._answer())
        try:
            meanwhile(ranks)
        finally:
            statuses = list(self._answer())
        return statuses

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    opened = Host()
    try:
        yield opened
    finally:
        opened.close()


def final_loss(log: str) -> str:
    found = re.findall(r"^final loss (\d+\.\d{10})$", log, re.MULTILINE)
    assert len(found) == 1, log[-4_000:]
    return str(found[0])


def kill_after_commit(ranks: list[int], run: Path) -> None:
    """Kills all ranks at once when the first checkpoint is complete."""
    until = time.monotonic() + LIMIT_SECONDS
    while not any((*run.glob(STEPS), *run.glob(f"checkpoints/{STEPS}"))):
        assert time.monotonic() < until, "nothing was saved"
        time.sleep(0.005)
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "example",
    [
        name if name in {"fsdp2", "trainer"} else pytest.param(name, marks=pytest.mark.slow)
        for name in COMMANDS
    ],
)
def test_a_job_that_was_killed_and_started_again_ends_as_if_nothing_had_happened(
    example: str, host: Host, tmp_path: Path
) -> None:
    script, module = COMMANDS[example]
    broken = tmp_path / "broken"

    def run(into: str, logs: str, *meanwhile: Callable[[list[int]], None]) -> tuple[list[int], str]:
        arguments = [str(EXAMPLES / script), str(tmp_path / into)]
        statuses = host.run(module, arguments, tmp_path / logs, *meanwhile)
        said = [(tmp_path / logs / f"rank{rank}.log").read_text() for rank in range(2)]
        return statuses, "\nrank 1:\n".join(said)

    statuses, straight = run("straight", "logs")
    assert statuses == [0, 0], straight[-4_000:]

    statuses, log = run("broken", "killed_logs", lambda ranks: kill_after_commit(ranks, broken))
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL], log[-4_000:]

    statuses, resumed = run("broken", "resumed_logs")
    assert statuses == [0, 0], resumed[-4_000:]
    assert re.search(r"resumed from step \d", resumed), resumed[-4_000:]
    assert final_loss(resumed) == final_loss(straight)
    if example == "trl":
        check_adapter(tmp_path / "straight", tmp_path)


def check_adapter(run: Path, out: Path) -> None:
    """Makes of a run what the example says, with no option, and compares with what PEFT has."""
    for verb in ("extract", "merge"):
        command = [sys.executable, "-m", "ckptkit_cli", "adapter", verb, str(run), str(out / verb)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    adapter = load_file(out / "extract/adapter_model.safetensors")
    saved = load_file(f"{run}-adapter/adapter_model.safetensors")  # by the Trainer, of all ranks
    assert adapter.keys() == saved.keys()
    assert all(np.array_equal(adapter[name], saved[name]) for name in saved)
    assert any(saved[name].any() for name in saved if "lora_B" in name)
    configs = [Path(f"{run}-adapter"), out / "extract"]
    trained, extracted = (json.loads((c / "adapter_config.json").read_text()) for c in configs)
    assert {**trained, "target_modules": None} == {**extracted, "target_modules": None}
    assert sorted(trained["target_modules"]) == sorted(extracted["target_modules"])

    merged = load_file(out / "merge/model.safetensors")
    scaling = trained["lora_alpha"] / trained["r"]
    with ckptkit.open(run, select="base_model_0") as base:
        for name in base.keys():  # noqa: SIM118  not a mapping
            weight = base.read(name, framework="numpy")
            module = name.removesuffix(".weight").replace(".base_layer", "")
            if ".base_layer." in name:
                down, up = (saved[f"{module}.lora_{side}.weight"] for side in "AB")
                weight = weight + scaling * (up @ down)
            found = merged.pop(f"{module.removeprefix('base_model.model.')}.weight")
            np.testing.assert_allclose(found, weight, rtol=1e-6, atol=1e-7)
    assert not merged


@pytest.mark.slow
def test_a_model_with_names_of_its_own_becomes_one_that_transformers_loads(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "name-maps.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert shown == (EXAMPLES / "own_names" / "own.toml").read_text(encoding="utf-8")
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
