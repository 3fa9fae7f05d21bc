"""`ckptkit watch` as a shell, and cron see it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ckptkit.hub import pull
from ckptkit_cli.main import main
from tests.hub_models import add_step
from tests.hub_server import TOKEN, HubServer

STEP = Path(__file__).parents[2] / "fixtures/peft_trl_fsdp2_ckptkit/checkpoint/checkpoint-2"
REPO = "org/run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def add(run: Path, step: int) -> None:
    add_step(run, step, STEP)


@contextmanager
def started(hub: HubServer, run: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    settings = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "ckptkit_cli", "watch", str(run), "--push", REPO, *options]
    process = subprocess.Popen(
        command,
        env=os.environ | hub.environment | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        assert abs(found["time"] - time.time()) < 600
        if found["event"] == name:
            return found
    raise AssertionError(process.stderr.read() if process.stderr else "")


def test_events_tell_what_happens_and_a_signal_ends_it(hub: HubServer, run: Path) -> None:
    run.mkdir()
    options = ("--json", "--interval", "0.05")
    with started(hub, run, *options) as process:
        assert event(process, "started")["repo_id"] == REPO
        add(run, 30)
        assert event(process, "seen")["step"] == 30
        pushed = event(process, "pushed")
        assert pushed["tag"] == "step-30"
        assert pushed["commit"] == hub.repo(REPO).tags["step-30"]
        assert pushed["uploaded_bytes"] > 0
        process.send_signal(signal.SIGTERM)
        assert event(process, "stopped")["signal"] == "SIGTERM"
        assert process.wait() == 143
        assert process.stderr is not None
        assert TOKEN not in process.stderr.read()


@pytest.mark.slow
def test_at_the_end_of_standard_input_it_pushes_what_is_there_and_ends(
    hub: HubServer, run: Path
) -> None:
    run.mkdir()
    with started(hub, run, "--until-eof", "--interval", "3600", "--at-end", "--last-only") as one:
        assert one.stdin is not None
        assert one.stdout is not None
        assert "watching" in one.stdout.readline()
        add(run, 1)
        add(run, 2)
        one.stdin.close()
        told = one.stdout.read()
        assert one.wait() == 0, told
    assert "step 2: pushed as step-2" in told
    assert list(hub.repo(REPO).tags) == ["step-2"]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_once_exits_as_the_steps_went(
    own_hub: HubServer, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["watch", str(run), "--push", REPO, "--once"]
    assert main(command) == 3  # there is no run
    run.mkdir()
    assert main(command) == 3  # no step yet
    add(run, 1)
    capfd.readouterr()
    assert main([*command, "--as", "model"]) == 4  # an adapter is no model
    told = capfd.readouterr().out
    assert "adapter merge" in told
    assert told.endswith("nothing left to do; 1 step failed: 1\n")
    assert main([*command, "--json"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["event"] for line in lines][-2:] == ["pushed", "stopped"]
    own_hub.users.clear()
    add(run, 2)
    assert main([*command, "--json"]) == 7
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert lines[-1]["error"]["code"] == "hub-error"
    assert main(command) == 7
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("token is wrong or expired") == 1
    own_hub.users[TOKEN] = ("me", ("org",))


@pytest.mark.parametrize(
    "words",
    [
        ["--every", "0"],
        ["--interval", "x"],
        ["--as", "both"],
        ["--best", "loss", "--best-mode", "low"],
        ["--whole-step", "../out"],
        ["--keep-last", "0"],
        ["--src-options-from", "NO_SUCH_VARIABLE"],
    ],
)
def test_an_option_that_is_wrong_is_named(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path), "--push", REPO, "--once", *words]) == 2
    assert words[-2].removeprefix("--").replace("-", "_") in capfd.readouterr().err.replace(
        "-", "_"
    )


@pytest.mark.slow
def test_the_map_of_names_is_that_of_the_command_line(hub: HubServer, run: Path) -> None:
    megatron = STEP.parents[3] / "fixtures/megatron_model_llama_tp2_pp2"
    shutil.copytree(megatron / "checkpoint", run)
    pushed = {}
    for names, more in (
        ("megatron-llama", ("--base", str(megatron))),
        ("none", ("--weights-only",)),
    ):
        hub.clear()
        state = ("--state", f"{run}-{names}")
        with started(hub, run, "--once", "--map", names, *more, *state) as process:
            output = "".join(process.communicate(timeout=120))
        assert process.returncode == 0, output
        folder = run.with_name(f"pulled-{names}")
        pull(REPO, folder, token=TOKEN, endpoint=hub.url)
        pushed[names] = set(load_file(folder / "model.safetensors"))
    assert pushed["megatron-llama"] == set(load_file(megatron / "truth.safetensors"))
    assert "decoder.final_layernorm.weight" in pushed["none"]
