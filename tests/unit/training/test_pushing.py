"""Training that has its steps pushed by a process of its own."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from ckptkit.core.display import plain_fields
from ckptkit.core.errors import HubError, RefusedError, UsageError
from ckptkit.hub.secrets import secrets_in
from ckptkit.runs.push_journal import WATCH_FOLDER
from ckptkit.training import Checkpointer
from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.handle import SaveReport
from ckptkit.training.pushing import (
    FollowedPushes,
    HubSettings,
    HubStrategy,
    Pushing,
    PushState,
    program_end,
)
from ckptkit.training.settings import check_options
from ckptkit_cli._program import make_application
from tests.hub_server import TOKEN, HubServer
from tests.planted_secrets import SECRETS
from tests.sampled import sampled

REPO = "org/trained"
WAIT = 240
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return hub


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ids of the processes that push, in the order in which they are started."""
    found: list[int] = []
    launch = Pushing._launch

    def launched(self: Pushing) -> None:
        launch(self)
        assert self._process is not None
        found.append(self._process.pid)

    monkeypatch.setattr(Pushing, "_launch", launched)
    yield found
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture(autouse=True)
def this_program_ends_as_it_did() -> Iterator[None]:
    yield
    vars(program_end())["_pushings"] = []


def state() -> dict[str, Any]:
    model = nn.Linear(4, 3)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


def checkpointer(run: Path, **options: Any) -> Checkpointer:
    known: dict[str, Any] = {"push_to_hub": REPO}
    return Checkpointer(run, **({"hub_token": TOKEN} | known | options))


def wait_for_end(saver: Checkpointer) -> bool:
    """Waits until the process that pushes has ended; returns whether an error was not heard."""
    pushing = saver._pushing
    assert isinstance(pushing, Pushing)
    assert pushing._reader is not None
    pushing._reader.join(WAIT)
    assert not pushing._reader.is_alive()
    return pushing.finish()


def steps(hub: HubServer) -> list[str]:
    return [commit.message.split(" (")[0] for commit in hub.repo(REPO).commits]


@pytest.mark.slow
def test_every_save_is_pushed_once_though_the_process_is_killed_and_steps_are_retired(
    hub: HubServer, tmp_path: Path, processes: list[int]
) -> None:
    run, saved = tmp_path / "run", state()
    with checkpointer(run, hub_private_repo=True, keep_last=1) as saver:
        report = saver.save(1, saved).pushed(WAIT)
        command = Path(f"/proc/{processes[0]}/cmdline").read_bytes().decode()
        assert "watch" in command
        assert TOKEN not in command
        assert report is not None
        assert (report.tag, report.path.name) == ("step-1", "checkpoint-1")
        os.kill(processes[0], signal.SIGKILL)
        handles = [saver.save(step, saved) for step in (2, 3, 4)]
        assert [handle.result(WAIT).name for handle in handles][-1] == "checkpoint-4"
    assert handles[-1].pushed(WAIT) is not None
    assert not wait_for_end(saver)
    assert steps(hub) == ["Step 1", "Step 2", "Step 3", "Step 4"]
    assert list(hub.repo(REPO).tags) == ["step-1", "step-2", "step-3", "step-4"]
    assert hub.repo(REPO).private
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]
    assert TOKEN not in (run / WATCH_FOLDER / "log").read_text()


@pytest.mark.slow
def test_what_goes_wrong_is_raised_by_the_handle_and_told_at_the_close(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = "hf_" + "Bb2" * 12
    saver = checkpointer(tmp_path / "run", hub_token=wrong)
    handle = saver.save(1, state())
    assert handle.result(WAIT).name == "checkpoint-1"
    with pytest.raises(HubError, match="token is wrong or expired"):
        handle.pushed(WAIT)
    assert not wait_for_end(saver)  # it was heard
    saver.save(2, state())
    saver.close()
    assert wait_for_end(saver)
    assert "steps 1, 2 not pushed to org/trained: the token is wrong" in caplog.text
    assert "step 2 is not pushed: org/trained: the token is wrong or expired" in caplog.text
    assert not hub.has(REPO)
    assert wrong not in caplog.text


@pytest.mark.slow
def test_steps_that_can_never_be_pushed_are_retired_as_others_are(
    hub: HubServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with checkpointer(run, hub_token="hf_" + "Bb2" * 12, keep_last=1) as saver:
        for step in (1, 2, 3):
            with pytest.raises(HubError, match="token is wrong or expired"):
                saver.save(step, state()).pushed(WAIT)
    assert not wait_for_end(saver)  # all were heard
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]
    assert not hub.has(REPO)


@pytest.mark.slow
def test_a_hub_that_is_down_does_not_hold_the_close_up_and_the_command_pushes_the_rest(
    hub: HubServer, tmp_path: Path, processes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("", [503] * 10_000)
    saver = checkpointer(tmp_path / "run", keep_last=1, hub_strategy="checkpoint")
    for step in (1, 2):
        saver.save(step, state()).result(WAIT)
    began = time.monotonic()
    saver.close()
    assert time.monotonic() - began < 5
    assert "steps 1, 2 not pushed to org/trained yet" in caplog.text
    os.kill(processes[0], 0)  # it goes on
    told = CliRunner().invoke(make_application(), ["ls", str(tmp_path / "run")]).stdout
    assert told.count("org/trained (waits)") == 2
    hub.clear()
    (command,) = re.findall(r"or `ckptkit (watch [^`]*)`", caplog.text)
    words = [sys.executable, "-m", "ckptkit_cli", *shlex.split(command)]
    subprocess.run(words, env=os.environ | {"HF_TOKEN": TOKEN}, check=True, timeout=WAIT)
    assert steps(hub) == ["Step 1", "Step 2"]
    assert "last-checkpoint/ckptkit.json" in hub.repo(REPO).files()
    assert not wait_for_end(saver)
    told = CliRunner().invoke(make_application(), ["ls", str(tmp_path / "run")]).stdout
    assert "org/trained@step-2" in told
    assert "waits" not in told


@pytest.mark.slow
def test_the_next_start_spares_what_an_earlier_one_has_not_pushed_and_pushes_it_once(
    hub: HubServer, tmp_path: Path, processes: list[int]
) -> None:
    hub.fail("", [503] * 10_000)
    run = tmp_path / "run"
    with checkpointer(run, keep_last=1) as saver:
        for step in (1, 2):
            saver.save(step, state()).result(WAIT)
    os.kill(processes[-1], signal.SIGKILL)
    wait_for_end(saver)
    with checkpointer(run, keep_last=1) as saver:  # still away, and this one is killed too
        saver.save(3, state()).result(WAIT)
    os.kill(processes[-1], signal.SIGKILL)
    wait_for_end(saver)
    assert sorted(path.name[-1] for path in run.glob("checkpoint-*")) == ["1", "2", "3"]
    hub.clear()
    with checkpointer(run, keep_last=1) as saver:
        assert saver.save(4, state()).pushed(WAIT)
    assert not wait_for_end(saver)
    assert steps(hub) == ["Step 1", "Step 2", "Step 3", "Step 4"]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.slow
def test_a_step_that_the_process_of_the_job_before_pushes_is_known_as_pushed(
    hub: HubServer, tmp_path: Path, processes: list[int]
) -> None:
    hub.fail("", [503] * 10_000)
    run = tmp_path / "run"
    with checkpointer(run) as saver:
        saver.save(1, state()).result(WAIT)
    with checkpointer(run) as later:
        handles = [later.save(step, state()) for step in (2, 3)]
    assert len(processes) == 2  # both are alive
    hub.clear()
    reports = [handle.pushed(WAIT) for handle in handles]
    assert [report and report.tag for report in reports] == ["step-2", "step-3"]
    assert not wait_for_end(saver)
    assert not wait_for_end(later)
    assert steps(hub) == ["Step 1", "Step 2", "Step 3"]


@pytest.mark.slow
def test_a_step_that_is_passed_over_is_an_error_of_its_handle_and_of_the_program(
    hub: HubServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with checkpointer(run) as saver:
        handles = [saver.save(step, state()) for step in (1, 2)]
    assert handles[-1].pushed(WAIT)
    assert not wait_for_end(saver)
    for path in run.glob("checkpoint-*"):
        shutil.rmtree(path)
    saver = checkpointer(run)
    handle = saver.save(1, state())
    saver.close()
    assert wait_for_end(saver)
    with pytest.raises(HubError, match="not pushed: step 1, since"):
        handle.pushed(WAIT)
    assert steps(hub) == ["Step 1", "Step 2"]


@pytest.mark.slow
def test_at_the_end_the_last_step_alone_is_pushed(hub: HubServer, tmp_path: Path) -> None:
    with checkpointer(tmp_path / "run", hub_strategy="end") as saver:
        for step in (1, 2):
            assert saver.save(step, state()).pushed(WAIT) is None
        saver.save(2, state(), name="kept")
    assert not wait_for_end(saver)
    assert steps(hub) == ["Step 2"]


@pytest.mark.slow
def test_at_the_end_the_step_that_was_saved_last_is_pushed_though_another_is_higher(
    hub: HubServer, tmp_path: Path
) -> None:
    waiting: list[set[int]] = []
    saver: Checkpointer
    with checkpointer(
        tmp_path / "run",
        hub_strategy="end",
        listener=lambda _: waiting.append(set(saver.unpushed)),
    ) as saver:
        for step in (1, 2, 1):
            saver.save(step, state()).result(WAIT)
    assert waiting == [{1}, {2}, {1}]
    assert not wait_for_end(saver)
    assert steps(hub) == ["Step 1"]


@pytest.mark.slow
def test_at_the_end_a_step_of_an_earlier_job_waits_until_a_lower_one_is_saved(
    hub: HubServer, tmp_path: Path, processes: list[int]
) -> None:
    hub.fail("", [503] * 10_000)
    run = tmp_path / "run"
    with checkpointer(run, hub_strategy="end") as saver:
        saver.save(2, state()).result(WAIT)
    os.kill(processes[-1], signal.SIGKILL)
    wait_for_end(saver)
    hub.clear()
    with checkpointer(run, hub_strategy="end") as later:
        assert set(later.unpushed) == {2}
        later.save(1, state()).result(WAIT)
    assert not wait_for_end(later)
    assert not later.unpushed
    assert steps(hub) == ["Step 1"]


@pytest.mark.parametrize(
    ("strategy", "text"), [("end", "step 1 not pushed"), ("every_save", "steps 1, 2 not pushed")]
)
def test_another_rank_names_what_waits_after_a_commit_that_rank_0_has_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: HubStrategy, text: str
) -> None:
    store = LocalKeyValueStore()
    store.set("pushes", json.dumps(plain_fields(PushState(2, [1, 2], (), ""))).encode())
    run: Any = SimpleNamespace(place=tmp_path, path=tmp_path)
    pushes = FollowedPushes(run, HubSettings(REPO, strategy=strategy), store)
    pushes.listen(SaveReport(1, tmp_path / "checkpoint-1", 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    pushes.close()
    assert text in caplog.text


SCRIPT = """
import sys, time, torch
from ckptkit.training import Checkpointer
with Checkpointer(sys.argv[1], push_to_hub="org/trained") as saver:
    saver.save(1, {"model": torch.nn.Linear(4, 3)}).result()
print("saved", flush=True)
time.sleep(float(sys.argv[2]))
raise SystemExit(0)
"""


def wait_until_pushed(hub: HubServer) -> None:
    until = time.monotonic() + WAIT
    while not hub.has(REPO) or list(hub.repo(REPO).tags) != ["step-1"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert steps(hub) == ["Step 1"]


def be_slow(hub: HubServer) -> threading.Event:
    """No request is answered until the event is set."""
    goes_on = threading.Event()

    def wait() -> None:
        goes_on.wait(WAIT)

    hub.before.append((re.compile(""), wait))
    return goes_on


@pytest.mark.slow
def test_a_pipe_ends_with_the_program_and_a_signal_to_the_job_ends_no_push(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    goes_on = be_slow(hub)
    script = shlex.join([sys.executable, "-c", SCRIPT, str(tmp_path / "piped"), "0"])
    words = ["sh", "-c", f"{script} | cat"]
    done = subprocess.run(words, capture_output=True, check=True, timeout=WAIT)
    assert done.stdout == b"saved\n"
    assert not hub.has(REPO)
    goes_on.set()
    wait_until_pushed(hub)
    hub.clear()
    goes_on = be_slow(hub)
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "killed"), "600"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saved\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(WAIT) == -signal.SIGTERM
    assert not hub.has(REPO)
    goes_on.set()
    wait_until_pushed(hub)


@pytest.mark.slow
def test_a_program_whose_push_failed_ends_with_a_status_unless_it_fails_by_itself(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Bb2" * 12)

    def status(end: str, name: str, *host: str) -> int:
        script = SCRIPT.replace('"org/trained"', '"org/trained", hub_timeout_seconds=60')
        path = tmp_path / f"{name}.py"
        path.write_text(script.replace("raise SystemExit(0)", end))
        words = [sys.executable, *host, str(path), str(tmp_path / name), "0"]
        return subprocess.run(words, check=False, timeout=WAIT).returncode

    assert status("", "returned") == 7
    assert status("sys.exit()", "ended") == 7
    assert status("raise SystemExit(3)", "failed") == 3
    assert status("1 / 0", "raising") == 1
    assert status("", "without_gpu", str(EXAMPLES / "on_cpu.py")) == 7
    assert not hub.has(REPO)


CAUGHT = """
try:
    sys.exit({})
except SystemExit as end:
    assert end.code == {}
"""
ENDS = {
    "": 7,
    "sys.exit(0)": 7,
    "sys.exit(None)": 7,
    "exit()": 7,
    "quit(code=0)": 7,
    CAUGHT.format(1, 1): 7,
    "threading.Thread(target=sys.exit, args=[3]).start()": 7,
    "atexit._run_exitfuncs(); os._exit(program_end().status)": 7,
    "sys.exit(3)": 3,
    "exit(3)": 3,
    "raise SystemExit(3)": 3,
    "def main():\n" + indent(CAUGHT.format(0, 0), " ") + " raise SystemExit(3)\nmain()": 3,
    CAUGHT.format(0, 0) + "    raise SystemExit(3)": 3,
    "threading.Thread(target=sys.exit, args=[0]).start(); raise SystemExit(3)": 3,
    "sys.exit('why')": 1,
    CAUGHT.format(0, 0) + "1 / 0": 1,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "raise SystemExit(0)": 0,  # whose status cannot be told from that of the one with 3
}
FORKED = """
import atexit, gc, json, os, signal, sys, threading
from ckptkit.training.pushing import program_end
gc.freeze()  # or each end would look through all of torch
statuses = []
for end in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        program_end().has_failed = True
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    end = "print(json.dumps(statuses))"
exec(end)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_failed_pushes_take_the_place_of_the_status_0_alone(how: str, tmp_path: Path) -> None:
    (tmp_path / "forked.py").write_text(FORKED)
    words = {"-c": ["-c", FORKED], "-m": ["-m", "forked"], "script": ["forked.py"]}[how]
    done = subprocess.run(
        [sys.executable, *words, json.dumps(list(ENDS))],
        check=True,
        timeout=WAIT,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert dict(zip(ENDS, json.loads(done.stdout), strict=True)) == ENDS


@pytest.mark.parametrize(
    "options",
    [
        {"push_to_hub": 3},
        {"push_to_hub": "--once"},
        {"push_to_hub": REPO, "hub_strategy": "often"},
        {"push_to_hub": REPO, "hub_private_repo": "yes"},
        {"push_to_hub": REPO, "hub_timeout_seconds": -1},
        {"hub_strategy": "end"},
        {"hub_include": [3], "hub_strategy": "checkpoint", "push_to_hub": REPO},
        {"hub_include": ["*"], "push_to_hub": REPO},
    ],
)
def test_options_of_the_hub_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as raised:
        check_options(options)  # type: ignore[arg-type]
    assert raised.value.where in options


def test_a_strategy_says_what_is_pushed_and_the_token_is_in_no_text() -> None:
    whole = HubSettings(REPO, "all_checkpoints", private=True, token=TOKEN)
    assert whole.arguments == [
        *("--push", REPO, "--private", "--whole-step", "checkpoint-{step}"),
    ]
    assert HubSettings(REPO, "checkpoint").arguments[-1] == "last-checkpoint"
    assert HubSettings(REPO, "end").arguments[-2:] == ["--at-end", "--last-only"]
    assert TOKEN not in f"{whole!r} {whole.shared()}"


@pytest.mark.parametrize(
    "strategy", sampled(["every_save", "checkpoint", "all_checkpoints"], ["checkpoint"])
)
def test_no_secret_that_lies_in_a_step_is_pushed(
    hub: HubServer, tmp_path: Path, strategy: HubStrategy
) -> None:
    text = f"export HF_TOKEN={TOKEN} WANDB_API_KEY=0f3a9c4e7b1d5826af90c3e71b4d8265ea7f3019"
    strangers = dict.fromkeys([".env", "train.sh", "more/train.log", "id.pem"], text.encode())
    files = {**strangers, "kept.json": b"{}", "asked.log": b"step 1"}
    more = {} if strategy == "every_save" else {"hub_include": ["asked.log"]}
    with checkpointer(tmp_path / "run", hub_strategy=strategy, **more) as saver:
        handle = saver.save(1, state(), files=files)
    assert handle.pushed(WAIT)
    assert not wait_for_end(saver)
    there = {path: hub.read(REPO, path) for path in hub.repo(REPO).files()}
    assert not [path for path, data in there.items() if secrets_in([data], [TOKEN])]
    folder = {"checkpoint": "last-checkpoint/", "all_checkpoints": "checkpoint-1/"}.get(strategy)
    whole = {path.removeprefix(folder) for path in there if folder and path.startswith(folder)}
    assert bool(whole) == (folder is not None)
    assert not whole & strangers.keys()
    assert not whole or {"kept.json", "asked.log"} < whole


@pytest.mark.slow
def test_a_step_with_a_secret_that_is_asked_for_is_not_pushed(
    hub: HubServer, tmp_path: Path
) -> None:
    more = {"hub_strategy": "checkpoint", "hub_include": "*.log"}
    saver = checkpointer(tmp_path / "run", **more)
    handle = saver.save(1, state(), files={"train.log": SECRETS["github classic"].encode()})
    saver.close()
    with pytest.raises(RefusedError, match=r"a GitHub token in last-checkpoint/train\.log"):
        handle.pushed(WAIT)
    assert not wait_for_end(saver)
    told = CliRunner().invoke(make_application(), ["ls", str(tmp_path / "run")]).stdout
    assert "org/trained (failed)" in told
    assert "step 1 cannot be pushed to org/trained" in told
    assert "a GitHub token" in told
    assert not hub.has(REPO)


@dataclass
class Uploads:
    """What the trainer itself would upload, through `api`; `ignored` has what it leaves out."""

    api: Any
    filter_uploads: Any
    ignored: list[list[str]] = field(default_factory=list)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    """Imports transformers here: each process that collects this file would else import it."""
    api = importlib.import_module("transformers.utils.hub").hf_api()
    integration = importlib.import_module("ckptkit.integrations.transformers")
    found = Uploads(api, integration.filter_uploads)
    monkeypatch.setattr(
        api, "upload_folder", lambda **given: found.ignored.append(given["ignore_patterns"])
    )
    return found


def test_files_with_secrets_are_left_out_where_the_trainer_itself_uploads(
    tmp_path: Path, uploads: Uploads, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (".env", "logs/[a]*.txt", "train.sh", "_out/x.txt", "checkpoint-1/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SECRETS["wandb netrc"])
    (tmp_path / "README.md").write_text("nothing")
    (tmp_path / "tokens.gz").write_bytes(gzip.compress(TOKEN.encode()))
    with uploads.filter_uploads():
        uploads.api.upload_folder(folder_path=str(tmp_path), token=TOKEN, ignore_patterns="_*")
    (patterns,) = uploads.ignored
    names = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")]
    kept = [name for name in names if not any(fnmatchcase(name, one) for one in patterns)]
    assert sorted(kept) == ["README.md", "checkpoint-1", "logs"]
    assert "train.sh is not pushed: it holds a Weights & Biases key" in caplog.text


@pytest.mark.parametrize(("gone", "tries"), [(".ckptkit/8a2d0af7/1", 3), ("checkpoint-1", 1)])
def test_folders_of_a_run_that_go_while_it_is_listed_do_not_end_an_upload(
    gone: str, tries: int, tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def upload(**_given: Any) -> None:
        called.append(1)
        if len(called) < 3:
            os.scandir(tmp_path / gone)

    monkeypatch.setattr(uploads.api, "upload_folder", upload)
    with uploads.filter_uploads(), nullcontext() if tries > 1 else pytest.raises(FileNotFoundError):
        uploads.api.upload_folder(folder_path=str(tmp_path), token=None)
    assert len(called) == tries


def test_a_token_of_any_form_that_the_environment_has_is_looked_for_by_value(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "company-93hf7Kq20dLw81")
    (tmp_path / "state.dat").write_bytes(b"\0\1company-93hf7Kq20dLw81\0")
    with uploads.filter_uploads():
        uploads.api.upload_folder(folder_path=str(tmp_path), token=None)
    assert "state.dat" in uploads.ignored[0]
