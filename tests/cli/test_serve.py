"""`ckptkit serve` as a program: what it shows, how it ends, and a run that is followed."""

from __future__ import annotations

import json
import os
import shlex
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
from botocore.exceptions import ClientError

import ckptkit
from ckptkit.api import ServeOptions
from ckptkit.core.errors import RefusedError
from ckptkit.serving import plans
from ckptkit.serving.plans import ServePlan
from ckptkit.serving.serving import ServeEvent, Serving
from ckptkit.storage.locations import resolve_places
from ckptkit_cli._program import make_application
from tests.command_line import run_command, started
from tests.files import wait_until
from tests.s3_client import client_of

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
PEFT = FIXTURES / "peft_fsdp2"
ANY = "0.0.0.0"  # noqa: S104  what is tested
ADAPTER = FIXTURES / "peft_qdora_fsdp2_ckptkit" / "checkpoint"


@contextmanager
def running(*words: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Runs a server; yields its process, and its events until it is ready, by their names."""
    command = [sys.executable, "-m", "ckptkit_cli", "serve", *map(str, words), "--json"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        events: dict[str, Any] = {}
        while "serving" not in events:
            event = json.loads(next_line(process))
            events[event["event"]] = event
        yield process, events


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line: str = process.stdout.readline()
    assert line, process.communicate()
    return line


def keys_of(client: Any) -> list[str]:
    listed = client.list_objects_v2(Bucket="ckptkit").get("Contents", ())
    return [entry["Key"] for entry in listed]


@pytest.mark.slow
def test_what_is_shown_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptkit_cli", "serve", str(STEP), "--name", "llama"]
    command += ["--access-key", "A+b=", "--secret-key", 'it\'s a $(secret); "quoted"']
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(next_line(process))
        exports = "\n".join(line for line in lines if line.startswith("export "))
        shown = next(line for line in lines if "aws s3 sync" in line).split("aws ")[1]
        shown = shown.replace("FOLDER", str(tmp_path / "copy"))
        script = f"{exports}\n{shlex.quote(sys.executable)} -m awscli {shown}"
        pytest.importorskip("awscli")
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        subprocess.run(["/bin/sh", "-ec", script], env=environment, check=True, capture_output=True)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted: stopped by SIGINT\n"
    assert rest.startswith("answered ")
    ckptkit.consolidate(STEP, tmp_path / "out")
    for path in (tmp_path / "copy").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert len(list((tmp_path / "copy").iterdir())) == 6


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_ends_it_at_once(number: int, status: int) -> None:
    with running(STEP) as (process, events):
        assert keys_of(client_of(events["serving"]["environment"]))
        began = time.monotonic()
        process.send_signal(number)
        lines, _ = process.communicate(timeout=30)
        assert time.monotonic() - began < 5
    assert process.returncode == status
    assert json.loads(lines)["event"] == "stopped"


def test_keys_and_port_can_be_chosen() -> None:
    with running(STEP, "--access-key", "AK", "--secret-key", "SK", "--name", "x") as (_, events):
        environment = events["serving"]["environment"]
        assert (environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]) == (
            "AK",
            "SK",
        )
        assert "x/model.safetensors" in keys_of(client_of(environment))
        taken = environment["AWS_ENDPOINT_URL"].rpartition(":")[2]
        again = run_command("serve", STEP, "--port", taken)
        assert again.returncode == 4
        assert f"cannot listen on port {taken} of 127.0.0.1" in again.stderr
        assert "hint: pass another --port" in again.stderr


def peft_folder(tmp_path: Path) -> Path:
    """Returns an adapter alone, as PEFT saves it."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copy(PEFT / "adapter_config.json", folder)
    shutil.copy(PEFT / "adapter_truth.safetensors", folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("has_base", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_adapter_is_served_merged(tmp_path: Path, has_base: bool) -> None:
    words: list[object] = [ADAPTER, "--dtype", "bfloat16"]
    if has_base:
        words = [peft_folder(tmp_path), "--base", PEFT / "base"]
    merged = run_command("adapter", "merge", words[0], tmp_path / "out", *words[1:])
    assert merged.returncode == 0, merged.stderr
    with running(*words, "--name", "m") as (_, events):
        client = client_of(events["serving"]["environment"])
        found = {key: client.get_object(Bucket="ckptkit", Key=key) for key in keys_of(client)}
        for key, answer in found.items():
            written = (tmp_path / "out" / key.removeprefix("m/")).read_bytes()
            assert answer["Body"].read() == written
        assert "m/model.safetensors" in found


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--no-auth", "--host", ANY], 2, "serves everything to every machine"),
        (["--access-key", "AK"], 2, "--access-key and --secret-key belong together"),
        (["--access-key", "", "--secret-key", ""], 2, "neither may be empty"),
        (["--no-auth", "--access-key", "A", "--secret-key", "S"], 2, "cannot be combined with"),
        (["--quiet"], 2, "hides the random keys"),
        (["--access-key", "A", "--secret-key-from", "CKPT_NO_SUCH"], 2, "contains no key"),
        (["--secret-key", "S", "--secret-key-from", "HOME"], 2, "which it replaces"),
        (["--port", "70000"], 2, "'70000' is not a port from 0 to 65,535"),
        (["--port", "x"], 2, "'x' is not a port"),
        (["--name", "../x"], 2, "'../x' is not a name of letters"),
        (["--interval", "0"], 2, "'0' is not a number from 0.05"),
        (["--interval", "3"], 2, "needs --follow"),
        (["--host", "256.1.1.1"], 4, "--host: '256.1.1.1' is no address of this machine"),
        (["--access-key", "a/b", "--secret-key", "S"], 2, "'a/b' has characters that"),
        (["--qlora-base", "original"], 4, ""),
        (["--dtype", "int8"], 2, "'int8' is not among"),
        (["--dtype", "fp8"], 2, "pass --dtype fp8-block or fp8-channel"),
        (["--follow"], 3, "is a step, where a run was expected"),
    ],
)
def test_what_cannot_be_served_is_refused(
    words: list[str], status: int, message: str, tmp_path: Path
) -> None:
    step = tmp_path / "checkpoint-1"
    step.symlink_to(STEP)
    result = run_command("serve", step, *words)
    assert message in result.stderr
    assert result.returncode == status


def test_options_of_conversions_are_refused_with_an_adapter() -> None:
    result = run_command("serve", ADAPTER, "--include", "*.weight")
    assert result.returncode == 2
    assert "--include: cannot be combined with an adapter" in result.stderr


def test_an_installation_without_the_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "find_spec", lambda name: None if name == "aiohttp" else name)
    with pytest.raises(RefusedError, match="needs aiohttp, which this installation lacks") as error:
        ckptkit.serve(STEP)
    assert error.value.hint == "run `pip install aiohttp`"


def test_damaged_headers_are_refused_before_anything_is_served(tmp_path: Path) -> None:
    shutil.copytree(STEP, tmp_path / "step")
    metadata = next((tmp_path / "step").rglob(".metadata"))
    metadata.write_bytes(metadata.read_bytes()[:-20])
    result = run_command("serve", tmp_path / "step")
    assert result.returncode == 3
    assert "error[" in result.stderr


def test_another_address_is_served_with_a_warning() -> None:
    with running(STEP, "--host", ANY) as (_, events):
        url = events["serving"]["url"]
        assert ANY not in url  # which no other machine could use
        assert f"at {url}: requests are signed" in events["warning"]["message"]
        assert "nothing is encrypted" in events["warning"]["message"]
        assert keys_of(client_of(events["serving"]["environment"]))


def test_options_of_the_command_and_of_python_are_the_same() -> None:
    program: Any = make_application()
    command = program.commands["serve"] if hasattr(program, "commands") else program
    ours = {parameter.name for parameter in command.params}
    placed = {"host", "port", "label", "access_key", "secret_key", "secret_key_from", "no_auth"}
    placed |= {"follow", "interval"}
    shown = {"json_lines", "quiet", "verbose", "help"}
    hints = {"lora_alpha", "use_rslora", "fan_in_fan_out", "token_indices", "adapter", "src_option"}
    theirs = {*ServeOptions.__annotations__} - {"overrides", "adapters", "src_options"}
    assert ours - placed - shown - hints - {"src"} == theirs


# --- a run that is followed ---


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def add_step(run: Path, number: int) -> None:
    shutil.copytree(STEP, run / f"checkpoint-{number}")  # with its times: it is not new


def prefixes(client: Any) -> set[str]:
    return {key.split("/")[1] for key in keys_of(client)}


def test_newer_steps_appear_and_the_oldest_goes(run: Path) -> None:
    add_step(run, 1)
    words = (run, "--follow", "--name", "m", "--interval", "0.1")
    with running(*words) as (process, events):
        client = client_of(events["serving"]["environment"])
        assert prefixes(client) == {"checkpoint-1"}
        add_step(run, 2)
        assert json.loads(next_line(process))["name"] == "m/checkpoint-2"
        assert prefixes(client) == {"checkpoint-1", "checkpoint-2"}
        pruned = run_command("prune", run, "--keep-last", 1)
        assert (run / "checkpoint-1").is_dir(), pruned.stdout  # it is held
        add_step(run, 3)
        wait_until(lambda: prefixes(client) == {"checkpoint-2", "checkpoint-3"})
        wait_until(
            lambda: (
                run_command("prune", run, "--keep-last", 2).returncode == 0
                and not (run / "checkpoint-1").exists()
            )
        )
        listed = client.list_objects_v2(Bucket="ckptkit", Prefix="m/", Delimiter="/")
        named = [entry["Prefix"] for entry in listed["CommonPrefixes"]]
        assert named == ["m/checkpoint-2/", "m/checkpoint-3/"]


def test_the_step_that_is_taken_is_a_note(run: Path) -> None:
    add_step(run, 1)
    add_step(run, 2)
    with running(run) as (_, events):
        assert "checkpoint-2 is used; 1 older step left alone" in events["note"]["message"]
        assert "warning" not in events
    command = [sys.executable, "-m", "ckptkit_cli", "serve", str(run), "--no-auth"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while "Ctrl-C" not in next_line(process):
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert errors.startswith("note: checkpoint-2 is used; 1 older step left alone\n")


def test_a_run_without_steps_is_waited_for(run: Path) -> None:
    with running(run, "--follow", "--name", "m", "--interval", "0.1") as (process, events):
        client = client_of(events["serving"]["environment"])
        assert "has no complete step yet" in events["waiting"]["message"]
        assert keys_of(client) == []
        add_step(run, 7)
        assert json.loads(next_line(process))["name"] == "m/checkpoint-7"
        assert prefixes(client) == {"checkpoint-7"}


def test_a_step_that_cannot_be_planned_is_reported_once_and_the_one_before_stays(run: Path) -> None:
    add_step(run, 1)
    with running(run, "--follow", "--name", "m", "--interval", "0.1") as (process, events):
        client = client_of(events["serving"]["environment"])
        shutil.copytree(STEP, run / "bad")
        for path in (run / "bad").rglob("*.distcp"):
            path.write_bytes(path.read_bytes()[:50])
        (run / "bad").rename(run / "checkpoint-2")
        time.sleep(1)
        assert prefixes(client) == {"checkpoint-1"}
        add_step(run, 3)
        while (event := json.loads(next_line(process)))["event"] != "added":
            assert event["event"] == "skipped"
        assert event["name"] == "m/checkpoint-3"


def test_a_dropped_step_is_readable_until_its_last_body_has_ended(run: Path) -> None:
    add_step(run, 1)
    plan = ServePlan.from_options(resolve_places(run, None, {}))
    with Serving(plan, name="m", follow=True, poll_seconds=0.1) as serving:
        folder = serving.folders["m/checkpoint-1"]
        with folder.used() as is_open:
            assert is_open
            for number in (2, 3):
                add_step(run, number)
                wait_until(lambda: f"m/checkpoint-{number}" in serving.folders)  # noqa: B023  it waits
            wait_until(lambda: "m/checkpoint-1" not in serving.folders)
            planned = folder.files["model.safetensors"]
            data = memoryview(bytearray(planned.size_bytes))
            folder.read_into(planned, 0, data)
            assert any(data)
        with folder.used() as is_open:
            assert not is_open


def test_a_listener_that_fails_changes_nothing(run: Path) -> None:
    add_step(run, 1)
    added: list[str] = []

    def listen(event: ServeEvent) -> None:
        if event.name == "added":
            added.append(event.facts["name"])
        raise BrokenPipeError

    plan = ServePlan.from_options(resolve_places(run, None, {}))
    with Serving(plan, listen, name="m", follow=True, poll_seconds=0.1) as serving:
        for number in (2, 3):
            add_step(run, number)
            wait_until(lambda: f"m/checkpoint-{number}" in serving.folders)  # noqa: B023
        wait_until(lambda: "m/checkpoint-1" not in serving.folders)
        time.sleep(0.5)
    assert added == [f"m/checkpoint-{number}" for number in (1, 2, 3)]


def test_a_missing_key_of_a_dropped_step_is_missing(run: Path) -> None:
    add_step(run, 1)
    with ckptkit.serve(run, follow=True, name="m") as serving:
        client = client_of(serving.environment)
        with pytest.raises(ClientError) as raised:
            client.get_object(Bucket="ckptkit", Key="m/checkpoint-0/config.json")
        assert raised.value.response["Error"]["Code"] == "NoSuchKey"
