"""`watch --exec` and `watch --seal`: each step once, whatever ends the watch or the command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.hub.watch.commands import StepCommand
from ckptkit.hub.watch.watch import Pauses, WatchEvent, WatchRequest, run_watch
from ckptkit.runs.retention import Retention
from tests.command_line import run_command
from tests.crash.test_seal import flip_data, put
from tests.hub_server import TOKEN, HubServer
from tests.made_up_runs import save_step

# Appends its words to a file, and then sleeps where it is told to.
PROGRAM = """
import os, subprocess, sys, time
with open(sys.argv[1], "a") as file:
    file.write(" ".join(sys.argv[2:]) + "\\n")
print("told", *sys.argv[2:], flush=True)
if os.path.exists(sys.argv[1] + ".slow"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    own = f"{sys.argv[1]}.{child.pid}"  # two jobs run at once
    with open(own, "w") as file:
        file.write(str(child.pid))
    os.rename(own, sys.argv[1] + ".child")
    time.sleep(600)
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (100, 200):
        save_step(tmp_path / "run", step, save_number=step)
    return tmp_path / "run"


@pytest.fixture
def told(tmp_path: Path) -> Path:
    return tmp_path / "told"


def command(tmp_path: Path, *words: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return " ".join([sys.executable, str(program), str(tmp_path / "told"), *words])


def watch(run: Path, *options: object, status: int = 0, **environment: str) -> list[dict[str, Any]]:
    done = run_command("watch", run, "--once", "--json", *options, **environment)
    assert done.returncode == status, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(events: list[dict[str, Any]], name: str) -> list[int]:
    return [event["step"] for event in events if event["event"] == name]


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_command_runs_once_for_each_step_with_its_number_and_folder(
    run: Path, told: Path, tmp_path: Path
) -> None:
    words = command(tmp_path, "{step}", "at={dir}", "'a b'", "{}")
    events = watch(run, "--exec", words)
    assert told.read_text().splitlines() == [
        f"{step} at={run}/checkpoint-{step} a b {{}}" for step in (100, 200)
    ]
    done = [event for event in events if event["event"] == "executed"]
    assert [event["status"] for event in done] == [0, 0]
    assert Path(done[0]["log"]).read_text().startswith("told 100 at=")
    assert of(watch(run, "--exec", words), "executing") == []
    save_step(run, 300, save_number=300)
    assert of(watch(run, "--exec", words), "executed") == [300]
    assert len(told.read_text().splitlines()) == 3
    shutil.rmtree(run / "checkpoint-300")
    save_step(run, 300, save_number=301)  # saved again
    assert of(watch(run, "--exec", words), "executed") == [300]
    assert of(watch(run, "--exec", f"{words} more", "--every", 200), "executed") == [200]


def test_an_exit_status_is_in_the_list_and_not_tried_again(run: Path, tmp_path: Path) -> None:
    words = command(tmp_path, "{step}")
    events = watch(run, "--exec", words, ENDS_WITH="3")
    assert [event["status"] for event in events if event["event"] == "executed"] == [3, 3]
    assert of(watch(run, "--exec", words), "executed") == []
    listed = ckptkit.list_run(run).steps
    assert [(one.state, one.status) for step in listed for one in step.commands] == [
        ("ended", 3),
        ("ended", 3),
    ]
    assert f"{Path(sys.executable).name} (exit 3)" in run_command("ls", run).stdout


def test_after_its_time_a_command_is_stopped_with_all_that_it_started(
    run: Path, told: Path, tmp_path: Path
) -> None:
    told.with_name("told.slow").touch()
    began = time.monotonic()
    events = watch(
        run, "--exec", command(tmp_path, "{step}"), "--exec-timeout", "2s", "--jobs", "2"
    )
    assert [event["status"] for event in events if event["event"] == "executed"] == [124, 124]
    assert time.monotonic() - began < 60
    assert not is_alive(int(told.with_name("told.child").read_text()))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_command_ends_with_its_watch_and_runs_again_in_the_next(
    number: signal.Signals, status: int, run: Path, told: Path, tmp_path: Path
) -> None:
    told.with_name("told.slow").touch()
    words = command(tmp_path, "{step}")
    line = [sys.executable, "-m", "ckptkit_cli", "watch", str(run), "--exec", words, "--json"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(told.with_name("told.child").exists)
        child = int(told.with_name("told.child").read_text())
        assert is_alive(child)
        process.send_signal(number)
        assert process.wait(60) == status
    wait_for(lambda: not is_alive(child))
    told.with_name("told.slow").unlink()
    assert "begun" in run_command("ls", run).stdout
    assert of(watch(run, "--exec", words), "executed") == [100, 200]
    assert told.read_text().splitlines() == ["100", "100", "200"]


def test_no_more_run_at_once_than_jobs(run: Path, told: Path, tmp_path: Path) -> None:
    for step in range(300, 900, 100):
        save_step(run, step, save_number=step)
    counts = tmp_path / "counts"
    counts.mkdir()
    program = tmp_path / "count.sh"
    program.write_text(f"cd {counts}; touch $1; ls | wc -l >> {told}; sleep 0.3; rm $1\n")
    watch(run, "--exec", f"sh {program} {{step}}", "--jobs", "3")
    seen = [int(line) for line in told.read_text().split()]
    assert len(seen) == 8
    assert max(seen) == 3


def test_a_step_stays_until_its_command_has_ended(run: Path) -> None:
    words = f"{sys.executable} -c 'import os,sys,time; time.sleep(1); os.listdir(sys.argv[1])'"
    events = watch(run, "--exec", f"{words} {{dir}}", "--keep-last", "1")
    assert [event["status"] for event in events if event["event"] == "executed"] == [0, 0]
    assert [path.name for path in sorted(run.glob("checkpoint-*"))] == ["checkpoint-200"]


def test_a_step_whose_turn_comes_while_others_are_pruned_has_its_command_too(run: Path) -> None:
    save_step(run, 300, save_number=300)
    events: list[WatchEvent] = []

    def listen(event: WatchEvent) -> None:
        events.append(event)
        if event.name == "pruned":  # until the command that runs meanwhile has ended
            seen = len(events)
            wait_for(lambda: any(one.name == "executed" for one in events[seen:]))
            time.sleep(0.1)

    slow = StepCommand.parse("sleep 0.3", jobs=1, timeout_seconds=None)
    request = WatchRequest(run, "", command=slow, retention=Retention(keep_last=1))
    run_watch(request, Pauses(ending=True, reads_input=False), listen, lambda _: None)
    assert [event.step for event in events if event.name == "executed"] == [100, 200, 300]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_push_does_not_wait_for_a_command(
    hub: HubServer, run: Path, told: Path, tmp_path: Path
) -> None:
    told.with_name("told.slow").touch()
    line = [sys.executable, "-m", "ckptkit_cli", "watch", str(run), "--json", "--weights-only"]
    line += ["--push", "org/commands", "--exec", command(tmp_path, "{step}"), "--interval", "0.1"]
    settings = os.environ | hub.environment | {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=settings) as process:
        assert process.stdout is not None
        pushed = []
        for text in process.stdout:
            event = json.loads(text)
            assert event["event"] != "executed"
            pushed += [event["step"]] if event["event"] == "pushed" else []
            if pushed == [100, 200]:
                break
        process.terminate()
        assert process.wait(60) == 143


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--exec", "ls {epoch}"], "{epoch}"),
        (["--exec", "no-such-program {dir}"], "no-such-program"),
        (["--exec", "ls 'open"], "cannot be split"),
        (["--exec", ""], "no program"),
        (["--exec", "ls {dir} | wc"], "without one"),
        (["--exec", "ls", "--exec-timeout", "10"], "is not a time"),
        (["--exec", "ls", "--jobs", "0"], "--jobs"),
        (["--jobs", "2", "--seal"], "needs --exec"),
        (["--exec-timeout", "2h", "--push", "org/x"], "needs --exec"),
        (["--seal", "--whole-step", "last"], "needs --push"),
        (["--seal", "--delta", "3"], "needs --into"),
        ([], "--seal and --exec"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(
    options: list[str], said: str, run: Path
) -> None:
    done = run_command("watch", run, "--once", *options)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (run / ".ckptkit" / "watch" / "commands").exists()


@pytest.mark.parametrize("text", ["ls {{dir}} > {out}/{{step}}.txt", "ls '{{dir}}' > {out}/x"])
def test_what_the_refusal_of_a_shell_proposes_does_it(run: Path, tmp_path: Path, text: str) -> None:
    renamed = run.rename(run.with_name("the user's run"))
    done = run_command("watch", renamed, "--once", "--exec", text.format(out=tmp_path))
    proposed = " ".join(done.stderr.split()).partition("pass --exec ")[2]
    script = tmp_path / "script.sh"
    script.write_text(f'ls "$2" > {tmp_path}/$1.txt')
    words = [sys.executable, "-m", "ckptkit_cli", "watch", str(renamed), "--once", "--exec"]
    line = f"{shlex.join(words)} {proposed.replace('SCRIPT', str(script))}"
    subprocess.run(["/bin/sh", "-c", line], check=True)
    assert (tmp_path / "200.txt").read_text().split() == [
        "ckptkit",
        "ckptkit.json",
        "pytorch_model_fsdp_0",
    ]


def test_a_program_that_goes_away_is_an_exit_status(run: Path, tmp_path: Path) -> None:
    program = tmp_path / "gone.sh"
    program.write_text(f"#!/bin/sh\nrm {program}\n")
    program.chmod(0o755)
    events = watch(run, "--exec", str(program))
    done = [event for event in events if event["event"] == "executed"]
    assert [event["status"] for event in done] == [0, 127]
    assert "No such file" in Path(done[1]["log"]).read_text()


def test_a_damaged_journal_counts_as_none(run: Path, tmp_path: Path) -> None:
    words = command(tmp_path, "{step}")
    watch(run, "--exec", words)
    (journal,) = (run / ".ckptkit" / "watch" / "commands").glob("*.json")
    journal.write_text("{")
    assert ckptkit.list_run(run).steps[0].commands == ()
    assert of(watch(run, "--exec", words), "executed") == [100, 200]


def test_each_step_of_another_saver_is_sealed_before_its_command_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20, 30):
        put(run, "trainer", step)
    flip_data(run / "checkpoint-20" / "pytorch_model_fsdp_0" / "__0_0.distcp")
    events = watch(run, "--seal", "--exec", f"ls {{dir}}/{MANIFEST_NAME}", status=6)
    assert of(events, "sealed") == [10, 30]
    assert of(events, "failed") == [20]
    done = [event for event in events if event["event"] == "executed"]
    assert [(event["step"], event["status"]) for event in done] == [(10, 0), (30, 0)]
    assert [event["event"] for event in events].index("executing") > 2
    assert of(watch(run, "--seal", status=6), "sealed") == []


def test_a_run_is_pruned_after_its_steps_are_sealed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, "trainer", step)
    events = watch(tmp_path, "--seal", "--keep-last", "1")
    assert of(events, "sealed") == [10, 20, 30]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-30"]
