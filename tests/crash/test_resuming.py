"""Consolidations that are killed or interrupted, and gone on with: only the rest is written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import ckptkit
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    NoSpaceError,
    OutputExistsError,
    RefusedError,
)
from ckptkit.engine.checksum_tracker import ChecksumTracker
from ckptkit.engine.outcome import BytesWritten, Event, Planned, Started, WorkKept
from ckptkit.options import Layout
from ckptkit.plan.packed_forms import FORMS
from ckptkit.storage.local.target import LocalTarget
from tests.files import contents, flip_bit, wait_until

FLAT = Path(__file__).resolve().parents[2] / "fixtures" / "zero3_float32"
SIZE = "9MB"
Events = list[Event]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose records have checksums, and lie in several files of the output each."""
    folder = tmp_path_factory.mktemp("resuming")
    chance = np.random.default_rng(0)
    tensors = {f"layers.{n}.weight": chance.random((1_000_000,), np.float32) for n in range(6)}
    tensors |= {f"layers.{n}.norm": chance.random((7,), np.float32) for n in range(6)}
    (folder / "model").mkdir()
    safetensors.numpy.save_file(tensors, folder / "model/model.safetensors", {"format": "pt"})
    ckptkit.convert(folder / "model", folder / "dcp", to="dcp", max_shard_size="25MB")
    return folder / "dcp"


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What an uninterrupted run writes, by layout."""
    folder = tmp_path_factory.mktemp("whole")
    layouts: tuple[Layout, ...] = ("hf", "dcp")
    for layout in layouts:
        ckptkit.convert(source, folder / layout, to=layout, max_shard_size=SIZE)
    return {layout: contents(folder / layout) for layout in layouts}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights can be packed in every form."""
    folder = tmp_path_factory.mktemp("llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 41,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        **dict.fromkeys([f"self_attn.{name}_proj" for name in "qkvo"], (128, 128)),
        **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (256, 128)),
        "mlp.down_proj": (128, 256),
        **dict.fromkeys(["input_layernorm", "post_attention_layernorm"], (128,)),
    }
    all_shapes = {f"model.layers.{n}.{name}": s for n in range(2) for name, s in shapes.items()}
    all_shapes |= {"model.embed_tokens": (41, 128), "model.norm": (128,), "lm_head": (41, 128)}
    chance = np.random.default_rng(0)
    tensors = {f"{n}.weight": chance.random(s, np.float32) for n, s in all_shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def hidden(out: Path) -> list[Path]:
    return [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.")]


def noted(out: Path) -> list[str]:
    """The files that are finished, as far as the hidden folder tells."""
    return [
        path
        for folder in hidden(out)
        for note in sorted((folder / "parts").glob("[0-9]/content"))
        for path in json.loads(note.read_bytes().partition(b" ")[2])["files"]
    ]


def resumed(source: Path, out: Path, **options: Any) -> Events:
    events: Events = []
    given = {"to": "hf", "max_shard_size": SIZE, "resume": True, **options}
    ckptkit.convert(source, out, listener=events.append, **given)
    return events


def notes(events: Events) -> str:
    return " ".join(note for event in events if isinstance(event, Planned) for note in event.notes)


class Stop(BaseException):
    """What a signal raises."""


def interrupted(
    source: Path, out: Path, *, files: int, error: BaseException, **options: Any
) -> Events:
    """Runs until so many files are finished, and then fails in the next one."""
    events: Events = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, BytesWritten) and len(noted(out)) >= files:
            raise error

    given = {"to": "hf", "max_shard_size": SIZE, "resume": True, "workers": 1, **options}
    with pytest.raises(type(error)):
        ckptkit.convert(source, out, listener=listen, **given)
    return events


def killed(source: Path, out: Path, files: int, *more: str) -> None:
    """Kills a process once it has finished so many files."""
    command = [
        *(sys.executable, "-m", "ckptkit_cli", "consolidate", str(source), str(out)),
        *("--max-shard-size", SIZE, "--workers", "1", "--bandwidth", "12MB", *more),
    ]
    with subprocess.Popen(command, env=os.environ) as process:
        try:
            wait_until(lambda: len(noted(out)) >= files)
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("files", "options"), [(1, ()), (2, ("--resume",))])
@pytest.mark.quick(1)
def test_a_killed_run_is_gone_on_with_where_its_finished_files_are_proven(
    source: Path,
    tmp_path: Path,
    whole: dict[str, dict[str, bytes]],
    files: int,
    options: tuple[str, ...],
) -> None:
    out = tmp_path / "out"
    killed(source, out, files, *options)
    kept = noted(out)
    before = {path: (hidden(out)[0] / "files" / path).stat() for path in kept}
    events = resumed(source, out)
    assert contents(out) == whole["hf"]
    assert not hidden(out)
    assert ckptkit.verify(out).ok
    for path, status in before.items():
        now = (out / path).stat()
        assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    total = sum(len(data) for path, data in whole["hf"].items() if path != "ckptkit.json")
    started = [event.total_bytes for event in events if isinstance(event, Started)]
    assert started == [
        sum(one.st_size for one in before.values()),
        total - sum(one.st_size for one in before.values()),
    ]
    assert f"{len(kept)} of 4 files" in notes(events)


def test_without_resume_what_a_kill_left_is_cleared_away(
    source: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    out = tmp_path / "out"
    interrupted(source, out, files=1, error=Stop())
    assert hidden(out)
    ckptkit.consolidate(source, out, max_shard_size=SIZE)
    assert contents(out) == whole["hf"]
    assert not hidden(out)


def test_an_interrupted_run_without_resume_leaves_nothing(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out", files=1, error=Stop(), resume=False)
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_interrupted_again_and_again_gets_done(
    source: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    out = tmp_path / "out"
    for files in (1, 2, 3):
        events = interrupted(source, out, files=files, error=Stop())
        assert events[-1] == WorkKept(str(hidden(out)[0].resolve()))
    assert len(noted(out)) >= 3
    resumed(source, out)
    assert contents(out) == whole["hf"]


@pytest.mark.parametrize("form", FORMS)
def test_packing_is_gone_on_with_where_scales_and_numbers_are_in_several_files(
    llama: Path, tmp_path: Path, form: str
) -> None:
    options: dict[str, Any] = {"dtype": form, "max_shard_size": "20KB"}
    ckptkit.consolidate(llama, tmp_path / "whole", **options)
    out = tmp_path / "out"
    interrupted(llama, out, files=1, error=Stop(), **options)
    finished = noted(out)
    for name in finished[::2]:  # files this small are finished together
        (hidden(out)[0] / "files" / name).unlink()
    kept = len(finished[1::2])
    assert kept > 3
    assert f"{kept} of " in notes(resumed(llama, out, **options))
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("flips", ["finished", "note", "torn"])
@pytest.mark.quick("finished")
def test_a_finished_file_that_was_changed_meanwhile_is_written_again(
    source: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]], flips: str
) -> None:
    out = tmp_path / "out"
    interrupted(source, out, files=2, error=Stop())
    folder = hidden(out)[0]
    first, *others = noted(out)
    path = folder / ("files/" + first if flips == "finished" else "parts/1/content")
    data = bytearray(path.read_bytes())
    if flips == "torn":
        del data[-20:]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    events = resumed(source, out)
    assert contents(out) == whole["hf"]
    assert f"{len(others)} of 4 files" in notes(events)
    assert (f"'{first}' is not as the interrupted run wrote it" in notes(events)) == (
        flips == "finished"
    )


@pytest.mark.parametrize("at", [0, 3, 2_000_000, -1])
@pytest.mark.quick("0", "2000000")
def test_every_byte_of_a_finished_archive_is_proven(
    source: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]], at: int
) -> None:
    """Headers, elements, and the checksums at the end of an archive."""
    out = tmp_path / "out"
    interrupted(source, out, files=1, error=Stop(), to="dcp")
    path = hidden(out)[0] / "files" / noted(out)[0]
    flip_bit(path, at)
    events = resumed(source, out, to="dcp")
    assert "is not as the interrupted run wrote it" in notes(events)
    assert contents(out) == whole["dcp"]


@pytest.mark.parametrize("change", ["source", "option"])
@pytest.mark.quick("option")
def test_another_plan_starts_over_and_says_so(source: Path, tmp_path: Path, change: str) -> None:
    copy, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, copy)
    interrupted(copy, out, files=2, error=Stop())
    options: dict[str, Any] = {"dtype": "bfloat16"} if change == "option" else {}
    if change == "source":
        for path in copy.rglob("*.distcp"):
            os.utime(path, ns=(1, 1))
    events = resumed(copy, out, **options)
    assert "of another plan" in notes(events)
    ckptkit.consolidate(copy, tmp_path / "whole", max_shard_size=SIZE, **options)
    assert contents(out) == contents(tmp_path / "whole")
    assert not hidden(out)


def test_damage_in_what_kept_files_were_made_of_is_found_though_nothing_else_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are finished, and the run is stopped before it proves what it read in part."""
    copy, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(FLAT / "checkpoint", copy)
    options = {"names": "live", "max_shard_size": 100, "include": ["up.weight", "down.weight"]}
    other = safetensors.numpy.load_file(FLAT / "truth.safetensors")["short"].tobytes()[:8]
    for path in copy.rglob("*_optim_states.pt"):  # in one record with `up.weight`, read by nobody
        path.write_bytes(path.read_bytes().replace(other, bytes(8)))

    def stop(_: ChecksumTracker) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(ChecksumTracker, "finish", stop)
        with pytest.raises(Stop):
            resumed(copy, out, **options)
    assert noted(out)
    with pytest.raises(ChecksumError):
        resumed(copy, out, **options)
    assert not out.exists()


def test_a_full_disk_can_be_gone_on_with(
    source: Path,
    tmp_path: Path,
    whole: dict[str, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    interrupted(source, out, files=2, error=NoSpaceError("the disk is full"))
    with monkeypatch.context() as patch:
        patch.setattr(LocalTarget, "free_bytes", lambda _: 0)
        with pytest.raises(NoSpaceError):
            resumed(source, out)
    assert len(noted(out)) >= 2
    resumed(source, out)
    assert contents(out) == whole["hf"]


def test_what_finished_files_take_counts_as_room(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(source, out, files=2, error=Stop())
    taken = sum(path.stat().st_size for path in (hidden(out)[0] / "files").glob("*"))
    target = LocalTarget(out, resume=True)
    try:
        assert target.free_bytes() >= shutil.disk_usage(tmp_path).free - 10_000_000 + taken
    finally:
        target.leave()


def test_a_run_that_is_still_at_work_is_not_gone_on_with(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(source, out, files=1, error=Stop())
    other = LocalTarget(out, resume=True)
    try:
        events = resumed(source, out)
        assert "found no interrupted run" in notes(events)
        assert out.is_dir()
    finally:
        other.abandon()


def test_resume_where_nothing_was_begun_just_runs(
    source: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    events = resumed(source, tmp_path / "out")
    assert contents(tmp_path / "out") == whole["hf"]
    assert "found no interrupted run" in notes(events)


@pytest.mark.parametrize(
    ("out", "options", "kind"),
    [("memory://out", {}, RefusedError), ("out", {"engine": "ray"}, RefusedError)],
)
def test_where_nothing_can_be_resumed_it_is_refused(
    source: Path, tmp_path: Path, out: str, options: dict[str, Any], kind: type[CkptkitError]
) -> None:
    place = out if "://" in out else str(tmp_path / out)
    with pytest.raises(kind, match="--resume") as caught:
        resumed(source, place, **options)  # type: ignore[arg-type]
    assert "--slice" in caught.value.hint


def started(source: Path, out: Path) -> subprocess.Popen[str]:
    """Starts a run that takes long enough for others to begin meanwhile."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "ckptkit_cli", "consolidate", str(source), str(out)),
            *("--resume", "--max-shard-size", SIZE, "--bandwidth", "12MB", "--names", "live"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_of_three_runs_at_once_one_wins_and_the_others_leave_nothing(
    source: Path, tmp_path: Path, *, dies: bool
) -> None:
    out = tmp_path / "out"
    runs = [started(source, out) for _ in range(3)]
    wait_until(lambda: len(hidden(out)) >= 3)
    wait_until(lambda: noted(out))
    if dies:
        runs[0].kill()
    told = [run.communicate(timeout=120)[1] for run in runs]
    statuses = sorted(run.returncode for run in runs)
    assert statuses == ([-9, 0, 5] if dies else [0, 5, 5]), told
    losers = [text for run, text in zip(runs, told, strict=True) if run.returncode == 5]
    assert all("error[output-exists]" in text and "Traceback" not in text for text in losers)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert ckptkit.verify(out)


def test_what_a_killed_run_left_goes_once_another_run_has_filled_the_place(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupted(source, out, files=1, error=Stop())
    assert len(hidden(out)) == 1
    (out / "mine").mkdir(parents=True)
    (out / "mine" / "x").touch()
    with pytest.raises(OutputExistsError):
        LocalTarget(out, resume=True)
    assert hidden(out) == []
    assert (out / "mine" / "x").exists()
