"""`batch`, `--events` and `--if-exists`: many jobs that can be started again, told to programs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

import ckptkit
from ckptkit.core.errors import OutputExistsError, UsageError, VerificationError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.places import Place
from ckptkit_cli._application import make_application
from ckptkit_cli.batch.jobs import read_jobs
from tests.command_line import Result, run_command, started
from tests.made_up_runs import save_step
from tests.object_store import ObjectStore

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")]),
    "OMP_NUM_THREADS": "1",
}

COMMANDS = typer.main.get_command(make_application()).commands  # type: ignore[attr-defined]


def run(*arguments: str | Path, given: str = "") -> Result:
    return run_command(*arguments, given=given)


def lines(text: str) -> list[dict[str, Any]]:
    assert text.isascii()
    return [json.loads(line) for line in text.splitlines()]


def command_line(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


def written(*jobs: Mapping[str, Any]) -> str:
    return "\n".join(json.dumps(job) for job in jobs)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A consolidation of LLAMA, which tests copy before they change it."""
    out = tmp_path_factory.mktemp("consolidated") / "out"
    ckptkit.consolidate(LLAMA, out)
    return out


@pytest.fixture
def out(output: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(output, tmp_path / "out"))


def test_jobs_that_fail_do_not_stop_the_others_and_the_first_gives_the_status(
    tmp_path: Path,
) -> None:
    jobs = written(
        {"command": "consolidate", "src": str(LLAMA), "out": str(tmp_path / "a"), "id": "first"},
        {"command": "verify", "path": str(tmp_path / "a")},
        {"command": "consolidate", "src": str(tmp_path / "none"), "out": str(tmp_path / "b")},
    )
    result = run("batch", "-", "--events", given=f"\n{jobs}\n\n")
    found = {line["line"]: line for line in lines(result.stdout)}
    assert [found[n]["exit_status"] for n in (2, 3, 4)] == [0, 0, 3]
    assert (found[2]["id"], found[2]["result"]["tensors"]) == ("first", 11)
    assert found[3]["result"]["ok"]
    assert found[4]["error"]["code"] == "not-a-checkpoint"
    assert result.returncode == 3
    events = [(event["event"], event.get("line")) for event in lines(result.stderr)]
    assert ("committed", 2) in events
    assert ("failed", 4) in events
    assert ("ended", None) in events


def test_nothing_is_run_while_a_line_is_wrong_and_all_wrong_lines_are_named(tmp_path: Path) -> None:
    good = {"command": "consolidate", "src": str(LLAMA), "out": str(tmp_path / "a")}
    wrong = [
        good | {"dtyp": "keep"},
        good | {"dtype": "int3"},
        {"command": "consolidate", "out": "x"},
        {"command": "batch", "jobs": "x"},
        good | {"overwrite": "yes"},
        {"command": "convert", "src": "a", "out": "b"},
        {"command": "extract", "src": "a", "out": "s3://key:never-to-be-seen@bucket/b"},
    ]
    result = run("batch", "-", given=written(good, *wrong) + "\n{")
    assert (result.returncode, result.stdout) == (2, "")
    for number in range(2, 10):
        assert f"line {number}: " in result.stderr
    assert "never-to-be-seen" not in result.stderr
    assert "write 'dtype'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_with_one_output_are_refused(tmp_path: Path) -> None:
    job = {"command": "consolidate", "src": str(LLAMA), "out": str(tmp_path / "a")}
    pull = {"command": "pull", "repo_id": "org/model", "dir": str(tmp_path / "a")}
    result = run("batch", "-", given=written(job, job | {"out": f"{tmp_path}/./a"}, pull))
    assert result.returncode == 2
    for number in (1, 2, 3):
        assert f"line {number}" in result.stderr


def test_a_batch_is_run_again_for_what_is_missing(tmp_path: Path, out: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    other = {"command": "convert", "to": "torch", "src": str(LLAMA), "out": str(tmp_path / "bin")}
    jobs.write_text(written({"command": "consolidate", "src": str(LLAMA), "out": str(out)}, other))
    result = run("batch", jobs, "--if-exists", "verify", "--jobs", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert {one["line"]: one["result"]["kept"] for one in lines(result.stdout)} == {
        1: True,
        2: False,
    }


@pytest.mark.slow
def test_a_batch_that_is_terminated_takes_its_jobs_along(tmp_path: Path) -> None:
    jobs = [
        {"command": "verify", "path": str(LLAMA), "src_option": ["secret=never-to-be-seen"]}
    ] * 500
    (tmp_path / "jobs").write_text(written(*jobs))
    command = [sys.executable, "-m", "ckptkit_cli", "batch", str(tmp_path / "jobs"), "--jobs", "2"]
    with started(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as batch:
        assert batch.stdout is not None
        assert json.loads(batch.stdout.readline())["exit_status"] == 0
        tasks = list(Path(f"/proc/{batch.pid}/task").glob("*/children"))
        children = {child for task in tasks for child in task.read_text().split()}
        shown = [command_line(child) for child in children]
        batch.send_signal(signal.SIGTERM)
        said, told = batch.communicate(timeout=60)
    assert batch.returncode == 143
    assert "stopped by SIGTERM" in told.decode()
    assert len(said.splitlines()) < 400
    assert children
    assert not any("never-to-be-seen" in text for text in shown)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_a_job_ends_when_its_batch_is_killed(tmp_path: Path) -> None:
    """The job's stdin is open for as long as the batch lives; here the test is the batch."""
    command = [sys.executable, "-P", "-m", "ckptkit_cli.batch.child"]
    with started(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdin is not None
        fifo = tmp_path / "jobs"
        os.mkfifo(fifo)  # whoever reads it waits for a writer, who never comes
        job.stdin.write(json.dumps(["batch", str(fifo)]).encode() + b"\n")
        job.stdin.close()
        assert job.wait(60) in {143, -signal.SIGTERM}


DYING_CHILD = """
import os, sys
if "ckptkit_cli.batch.child" in sys.orig_argv:
    os._exit(9)
"""


def test_a_job_that_dies_before_it_reads_its_command_line_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DYING_CHILD)
    environment = ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    }
    # More than a pipe holds, so that the line is not written before the job has ended.
    long = job(LLAMA, tmp_path / "out", exclude=["x" * 100] * 2_000)
    (tmp_path / "jobs").write_text(written(long, job(LLAMA, tmp_path / "other")))
    command = [sys.executable, "-m", "ckptkit_cli", "batch", str(tmp_path / "jobs")]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert [line["exit_status"] for line in lines(ran.stdout)] == [9, 9], ran.stderr
    assert "Traceback" not in ran.stderr


def test_events_are_all_that_stderr_holds_and_tell_the_whole_story(
    tmp_path: Path, out: Path
) -> None:
    done = run("consolidate", LLAMA, tmp_path / "new", "--events", "--json")
    events = lines(done.stderr)
    assert [event["event"] for event in events] == ["planned", "started", "progress", "committed"]
    assert events[2]["done_bytes"] == events[2]["total_bytes"] == events[1]["total_bytes"]
    assert abs(events[0]["time"] - time.time()) < 600
    failed = run("consolidate", LLAMA, out, "--events")
    (event,) = lines(failed.stderr)
    assert (event["event"], event["code"]) == ("failed", "output-exists")
    assert event["exit_status"] == failed.returncode == 5
    kept = run("consolidate", LLAMA, out, "--events", "--if-exists", "verify", "--json")
    assert [event["event"] for event in lines(kept.stderr)][-1] == "kept"
    assert json.loads(kept.stdout)["kept"]


def test_the_same_output_is_kept_as_it_is(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    manifest = ckptkit.consolidate(LLAMA, out, if_exists="verify")
    assert manifest.to_json() == (out / MANIFEST_NAME).read_bytes()
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_another_output_is_refused_with_what_differs(out: Path, tmp_path: Path) -> None:
    def refusal(src: Path, **options: Any) -> str:
        with pytest.raises(OutputExistsError) as caught:
            ckptkit.consolidate(src, out, if_exists="verify", **options)
        return caught.value.message

    assert "option dtype" in refusal(LLAMA, dtype="bfloat16")
    assert "option exclude" in refusal(LLAMA, exclude=["*norm*"])
    ckptkit.consolidate(save_step(tmp_path, 7), tmp_path / "seven")
    with pytest.raises(OutputExistsError, match="step was 7 against 8"):
        ckptkit.consolidate(save_step(tmp_path, 8), tmp_path / "seven", if_exists="verify")
    again = tmp_path / "again"
    shutil.copytree(LLAMA, again)  # with its times, so it is the same
    assert ckptkit.consolidate(again, out, if_exists="verify").tensors
    shard = next(again.rglob("*.distcp"))
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    assert "written again" in refusal(again)
    config = json.loads((again / "config.json").read_bytes())
    (again / "config.json").write_text(json.dumps(config | {"bos_token_id": 11}))
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns - 1))
    assert "config.json" in refusal(again)


def test_what_is_no_output_of_ours_is_refused_as_ever(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(OutputExistsError, match="empty"):
        ckptkit.consolidate(LLAMA, tmp_path / "out", if_exists="verify")
    assert ckptkit.consolidate(LLAMA, tmp_path / "new", if_exists="verify").tensors
    with pytest.raises(UsageError, match="overwrite"):
        ckptkit.consolidate(LLAMA, tmp_path / "new", if_exists="verify", overwrite=True)


def test_a_damaged_output_exits_6(out: Path) -> None:
    weights = out / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(VerificationError, match="another digest"):
        ckptkit.consolidate(LLAMA, out, if_exists="verify")
    assert run("consolidate", LLAMA, out, "--if-exists", "verify").returncode == 6


def test_an_output_on_a_store_is_confirmed_too(object_store: ObjectStore) -> None:
    bucket = object_store.bucket("outputs-to-confirm")
    place = Place(f"{bucket.url}/out", object_store.options)
    ckptkit.consolidate(LLAMA, place)
    before = bucket.keys()
    object_store.proxy.reset()
    assert ckptkit.consolidate(LLAMA, place, if_exists="verify").tensors
    assert object_store.proxy.requests["PUT"] == object_store.proxy.requests["POST"] == 0
    assert bucket.keys() == before


def job(src: str | Path, out: str | Path, **more: Any) -> dict[str, Any]:
    return {"command": "consolidate", "src": str(src), "out": str(out), **more}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"command": "consolidate", "src": "a", "out": 5}', "out: is an int, where a text was"),
        ('{"command": "consolidate", "src": NaN, "out": "b"}', "is not JSON, which has no NaN"),
        ('{"command": "consolidate", "src": -Infinity, "out": "b"}', "which has no -Infinity"),
        ('{"command": "consolidate", "src": "a\\u0000", "out": "b"}', "an invalid character"),
        ('{"command": "consolidate", "src": "a", "out": "\\ud800"}', "an invalid character"),
        ('{"command": "consolidate", "src": ["a"], "out": "b"}', "src: is a list, where one value"),
        ('{"command": "consolidate", "src": "a", "out": ""}', "out: is empty, where a path was"),
        ('{"command": "consolidate", "src": "a", "out": null}', "out: is missing"),
        ('{"command": ["consolidate"], "src": "a"}', "command: is a list, where a text was"),
        ('{"command": "consolidate", "src": "a", "src": "b", "out": "c"}', "src: is given twice"),
        (
            '{"command": "verify", "path": "a", "src-option": "k=1", "src_option": "k=2"}',
            "src-option: is given twice",
        ),
        ('{"command": "consolidate", "src": "a", "out": "b", "base": 5}', "base: is an int"),
        (
            '{"command": "consolidate", "src": "a", "out": "b", "workers": 1e999}',
            "is not a finite number",
        ),
        ('{"command": "consolidate", "src": "a", "out": "b", "include": [1, {}]}', "is a dict"),
        ('{"command": "push", "folder": "a", "repo_id": 5}', "repo-id: is an int"),
        ("5", "is an int, where an object was expected"),
    ],
)
def test_a_malformed_line_is_wrong_usage(line: str, message: str) -> None:
    result = run("batch", "-", given=f"\n{line}\n")
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert "line 2: " in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("a", "a/", "writes to the same directory as line 1"),
        ("a", "b/../a", "writes to the same directory as line 1"),
        ("a", "link/a", "writes to the same directory as line 1"),
        ("a", "a/b", "writes inside the output of line 1"),
        ("a/b/c", "link/a", "writes around the output of line 1"),
        ("s3://bucket/a", "s3://bucket/a/b", "writes inside the output of line 1"),
        ("s3://bucket/a/", "s3a://bucket//a", "writes to the same directory as line 1"),
    ],
)
def test_outputs_that_lie_inside_one_another_are_refused(
    tmp_path: Path, first: str, second: str, message: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    places = [place if "://" in place else f"{tmp_path}/{place}" for place in (first, second)]
    result = run("batch", "-", given=written(*(job(LLAMA, place) for place in places)))
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert "line 2: " in result.stderr
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_one_url_at_two_endpoints_is_two_places() -> None:
    ends = [f"client_kwargs.endpoint_url=http://127.0.0.1:{port}" for port in (9, 10)]
    two = [job(LLAMA, "s3://bucket/a", dst_option=[end]) for end in ends]
    found, errors = read_jobs([json.dumps(one) for one in two], COMMANDS, {})
    assert (len(found), errors) == (2, [])
    same = [job(LLAMA, "s3://bucket/a", dst_option=[ends[0]]) for _ in range(2)]
    _, errors = read_jobs([json.dumps(one) for one in same], COMMANDS, {})
    assert "writes to the same directory as line 1" in str(errors[0])


def test_slices_of_one_output_may_share_it_and_nothing_else_may(tmp_path: Path) -> None:
    slices = [job(LLAMA, tmp_path / "a", slice=f"{part}/2") for part in range(2)]
    found, errors = read_jobs([json.dumps(one) for one in slices], COMMANDS, {})
    assert ([one.after for one in found], errors) == ([frozenset(), frozenset()], [])
    _, errors = read_jobs(
        [json.dumps(one) for one in (*slices, job(LLAMA, tmp_path / "a" / "b"))], COMMANDS, {}
    )
    assert {str(error) for error in errors}


def test_a_job_waits_for_those_that_write_or_remove_what_it_reads(tmp_path: Path) -> None:
    lines_ = [
        job(LLAMA, tmp_path / "a"),
        {"command": "verify", "path": f"{tmp_path}/./a"},
        job(LLAMA, tmp_path / "b", base=str(tmp_path / "a")),
        job(tmp_path / "run", tmp_path / "c"),
        job(tmp_path / "run", tmp_path / "d", delete_source=True),
        {"command": "diff", "a": str(tmp_path / "run" / "checkpoint-1"), "b": str(LLAMA)},
        job(LLAMA, tmp_path / "e"),
    ]
    found, errors = read_jobs([json.dumps(line) for line in lines_], COMMANDS, {})
    assert errors == []
    after = {one.line: set(one.after) for one in found}
    assert after == {1: set(), 2: {1}, 3: {1}, 4: set(), 5: {4}, 6: {5}, 7: set()}


@pytest.mark.slow
def test_jobs_that_depend_on_one_another_run_in_order(tmp_path: Path) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    jobs = [job(LLAMA, a), job(a, b), job(b, c), {"command": "verify", "path": c}]
    result = run("batch", "-", "--jobs", "4", given=written(*jobs))
    assert result.returncode == 0, result.stderr
    assert [line["line"] for line in lines(result.stdout)] == [1, 2, 3, 4]
