"""The commands as a shell sees them: statuses, streams, documents, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.command_line import Result, run_command, started
from tests.sampled import sampled

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
LLAMA = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
PLAIN = FIXTURES / "fsdp2_plain" / "checkpoint"
TWO_MODELS = FIXTURES / "accelerate_fsdp2_two_models" / "checkpoint"
UNCHECKED = FIXTURES / "fsdp2_without_checksums" / "checkpoint"


def environment(**more: str) -> Mapping[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def run(*arguments: str | Path, code: str = "") -> Result:
    """Runs the command; with `code` in a process of its own, which begins with that."""
    if not code:
        return run_command(*arguments)
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def document(result: Result) -> Any:
    assert result.stdout.isascii()
    return json.loads(result.stdout)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(PLAIN, folder)
    (folder / "__1_0.distcp").unlink()
    return folder


def test_help_names_exactly_the_commands_that_exist() -> None:
    lines = run("--help").stdout.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == [
        *("inspect", "consolidate", "convert", "average", "verify", "diff", "stats", "save-now"),
        *("ls", "seal", "prune", "du", "push", "pull", "watch", "serve", "doctor"),
        *("adapter", "delta"),
    ]
    assert not any(line.endswith("...") for line in lines)


def test_an_error_names_code_place_and_hint() -> None:
    result = run("consolidate", LLAMA, "o", "--max-shard-size", "5XB")
    assert result.stderr == (
        "error[bad-option]: --max-shard-size 5XB: 'XB' is not a unit; expected B, KB, MB, GB or"
        " TB (powers of 1,000)\n  hint: pass --max-shard-size 5GB\n"
    )


def test_with_json_an_error_is_the_one_document() -> None:
    result = run("inspect", "/no/such/place", "--json")
    assert result.returncode == 3
    error = document(result)["error"]
    assert set(error) == {"code", "where", "message", "hint"}
    assert error["code"] == "not-a-checkpoint"
    assert result.stderr.startswith("error[not-a-checkpoint]: /no/such/place: ")


def test_two_checkpoints_are_named_with_the_way_to_choose(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(PLAIN, tmp_path / name / "checkpoint-1")
    result = run("consolidate", tmp_path, tmp_path.with_name("out"))
    assert result.returncode == 4
    assert "'a', 'b'" in result.stderr
    assert "--select a" in result.stderr
    unknown = run("consolidate", TWO_MODELS, tmp_path / "out", "--select", "third")
    assert unknown.returncode == 4
    assert "'third'" in unknown.stderr
    assert "pytorch_model_fsdp_1" in unknown.stderr
    chosen = run("inspect", tmp_path, "--select", "a", "--json")
    assert document(chosen)["path"] == str(tmp_path / "a" / "checkpoint-1")


def test_inspect_json_has_what_the_contract_promises() -> None:
    found = document(run("inspect", PLAIN, "--json"))
    assert {"format", "path", "world_size", "step", "problems", "tensors"} <= set(found)
    assert (found["format"], found["world_size"], found["problems"]) == ("dcp", 2, [])
    embed = next(t for t in found["tensors"] if t["name"] == "embed.weight")
    assert embed == {
        "name": "embed.weight",
        "tree": "model",
        "part": "model",
        "dtype": "float32",
        "shape": [41, 7],
        "chunks": 2,
        "bytes": 41 * 7 * 4,
    }


def test_a_pattern_narrows_the_page_and_the_document() -> None:
    page = run("inspect", PLAIN, "--tensors", "embed*").stdout
    assert "model: 1 of 15 tensors, 1.15 KB" in page
    assert "[41, 7]" in page
    found = document(run("inspect", PLAIN, "--tensors", "embed*", "--json"))
    assert [tensor["name"] for tensor in found["tensors"]] == ["embed.weight"]
    assert "No tensor matches 'x*'" in run("inspect", PLAIN, "--tensors", "x*").stdout


def test_inspect_of_a_damaged_checkpoint_shows_the_problems_and_succeeds(damaged: Path) -> None:
    result = run("inspect", damaged)
    assert result.returncode == 0
    assert "Problems: " in result.stdout
    assert "__1_0.distcp" in result.stdout
    assert f"ckptkit verify {damaged}" in result.stdout
    assert "ckptkit consolidate" not in result.stdout
    assert document(run("inspect", damaged, "--json"))["problems"]


def test_consolidate_tells_what_it_wrote_and_how_to_load_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("consolidate", LLAMA, out)
    assert result.returncode == 0
    assert not result.stderr
    assert result.stdout.startswith(f"{out}\n  wrote      11 tensors in ")
    assert "11 tensors proven by CRC-32" in result.stdout
    assert f"transformers.AutoModelForCausalLM.from_pretrained('{out}')" in result.stdout
    assert run("verify", out).stdout.startswith(f"ok: {out}, an output of ckptkit: 11 tensors")


def test_consolidate_json_sums_up_the_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = document(run("consolidate", LLAMA, out, "--dtype", "bfloat16", "--json"))
    assert (found["out"], found["tensors"], found["proven"]) == (str(out), 11, 11)
    assert found["options"] == {"dtype": "bfloat16"}
    assert found["unverified"] == []
    for file in found["files"]:
        assert (out / file["path"]).stat().st_size == file["bytes"]


def test_quiet_prints_nothing_but_errors(tmp_path: Path) -> None:
    done = run("consolidate", LLAMA, tmp_path / "out", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    again = run("consolidate", LLAMA, tmp_path / "out", "--quiet")
    assert (again.returncode, again.stdout) == (5, "")
    assert again.stderr.startswith("error[output-exists]: ")


@pytest.mark.parametrize(
    "path", ["model-2.safetensors", "llama/model.safetensors", "checkpoint-3/optimizer_0/.metadata"]
)
def test_overwrite_replaces_no_checkpoint_that_is_not_of_the_output(
    tmp_path: Path, path: str
) -> None:
    run("consolidate", LLAMA, tmp_path / "out")
    other = tmp_path / "out" / path
    other.parent.mkdir(parents=True, exist_ok=True)
    other.touch()
    refused = run("consolidate", LLAMA, tmp_path / "out", "--overwrite")
    assert refused.returncode == 4
    assert f"'{path}'" in refused.stderr
    assert other.exists()


def test_patterns_may_be_repeated(tmp_path: Path) -> None:
    arguments = ["--include", "lm_head*", "--include", "model.norm*", "--workers", "1"]
    found = document(run("consolidate", LLAMA, tmp_path / "out", "--json", *arguments))
    assert found["tensors"] == 2


def test_a_source_without_checksums_is_said_to_be_unverified(tmp_path: Path) -> None:
    found = document(run("consolidate", UNCHECKED, tmp_path / "out", "--json"))
    assert found["proven"] == 0
    assert len(found["unverified"]) == found["tensors"]
    assert "no checksum was stored" in run("verify", UNCHECKED).stdout


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    found = document(run("consolidate", LLAMA, out, "--dry-run", "--json"))
    assert list(tmp_path.iterdir()) == []
    page = run("consolidate", LLAMA, out, "--dry-run")
    assert page.returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert "model.safetensors" in page.stdout
    done = document(run("consolidate", LLAMA, out, "--json"))
    assert [(f["path"], f["bytes"]) for f in found["files"]] == [
        (f["path"], f["bytes"]) for f in done["files"]
    ]
    assert found["bytes_written"] == done["bytes"]
    again = run("consolidate", LLAMA, out, "--dry-run")
    assert (again.returncode, again.stdout) == (5, "")


def test_verify_exits_6_and_lists_what_is_wrong(flipped: Path) -> None:
    result = run("verify", flipped)
    assert (result.returncode, result.stderr) == (6, "")
    assert result.stdout.startswith(f"damaged: {flipped}")
    report = document(run("verify", flipped, "--json"))
    assert not report["ok"]
    assert report["problems"]
    damaged = run("verify", flipped, "--quiet")
    assert (damaged.returncode, damaged.stdout) == (6, "")
    assert damaged.stderr.startswith("problem[checksum-mismatch]: ")


def test_diff_exits_0_on_equal_and_6_on_different_checkpoints(tmp_path: Path) -> None:
    run("consolidate", LLAMA, tmp_path / "same")
    run("consolidate", LLAMA, tmp_path / "cast", "--dtype", "bfloat16")
    same = run("diff", LLAMA, tmp_path / "same")
    assert (same.returncode, same.stderr) == (0, "")
    assert same.stdout.startswith("same: ")
    other = run("diff", LLAMA, tmp_path / "cast")
    assert other.returncode == 6
    assert "model.norm.weight: float32 [16] against bfloat16 [16]" in other.stdout
    report = document(run("diff", LLAMA, tmp_path / "cast", "--json"))
    assert (report["same"], report["equal"]) == (False, 0)


def test_diff_tells_that_training_has_other_names_than_model_folders(tmp_path: Path) -> None:
    names = {"live": "mlp.experts.down_proj", "disk": "mlp.experts.0.down_proj.weight"}
    for side, name in names.items():
        tensors = {name: np.ones(4, np.float32), "norm.weight": np.ones(4, np.float32)}
        (tmp_path / side).mkdir()
        save_file(tensors, tmp_path / side / "model.safetensors", metadata={"format": "pt"})
    for kind, is_told in (("qwen3_moe", True), ("llama", False)):
        (tmp_path / "disk" / "config.json").write_text(json.dumps({"model_type": kind}))
        result = run("diff", tmp_path / "live", tmp_path / "disk")
        assert result.returncode == 6
        assert ("consolidate it first" in " ".join(result.stdout.split())) is is_told


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m ckptkit_cli inspect {PLAIN} --tensors '*' --json | true"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],  # noqa: S607
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


BUG = """
import os, sys, ckptkit.conversion.inspect as inspecting
def broken(*_, **__): raise RuntimeError('no \\x1b[31m idea' * 500)
inspecting.run_inspection = broken
from ckptkit_cli.main import main
"""


def test_a_bug_exits_1_with_a_traceback_and_asks_for_a_report() -> None:
    result = run("inspect", PLAIN, "--json", code=f"{BUG}\nsys.exit(main(sys.argv[1:]))")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "please report it" in result.stderr
    assert "\x1b" not in result.stderr
    assert document(result)["error"]["code"] == "internal-error"
    if Path("/dev/full").exists():
        full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"
        result = run("inspect", PLAIN, code=f"{BUG}\n{full}\nsys.exit(main(sys.argv[1:]))")
        assert result.returncode == 1


@pytest.mark.slow
def test_the_directory_of_the_shell_is_filled_and_stays_that_of_the_shell(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    program = [sys.executable, "-m", "ckptkit_cli", "consolidate", str(LLAMA), "."]
    result = subprocess.run(
        ["bash", "-c", '"$@" && ls && "$@"', "-", *program],  # noqa: S607
        cwd=tmp_path / "out",
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "\nmodel.safetensors\n" in result.stdout
    assert result.returncode == 5, result.stderr


@pytest.mark.skipif(os.name == "nt", reason="the system keeps the current directory")
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        pytest.param(["consolidate", LLAMA, "{}/out"], 0, "load it", marks=pytest.mark.slow),
        (["consolidate", LLAMA, "out"], 2, "error[bad-option]: out: is relative to the current"),
        (["--version", "--verbose"], 0, "file system           unknown"),
    ],
)
def test_absolute_paths_work_in_a_directory_that_was_removed(
    tmp_path: Path, words: list[object], status: int, said: str
) -> None:
    line = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"'
    gone = str(tmp_path / "gone")
    command = ["bash", "-c", line, gone, sys.executable, "-P", "-m", "ckptkit_cli"]
    result = subprocess.run(
        [*command, *(str(word).format(tmp_path) for word in words)],
        env=environment(XDG_CACHE_HOME=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status, result.stderr
    assert said in result.stdout + result.stderr


NO_ROOM = "error[unwritable-output]: standard output: No space left on device\n"


def with_full(stream: str, *words: str | Path) -> Result:
    """Runs the command with a full disk behind `stdout` or `stderr`."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        streams: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.run(
            [sys.executable, "-m", "ckptkit_cli", *map(str, words)],
            env=environment(),
            text=True,
            check=False,
            **(streams | {stream: full}),
        )


@pytest.mark.parametrize(
    "words",
    sampled(
        [["--version"], ["--help"], ["inspect", "--help"], ["adapter", "-h"], ["inspect", PLAIN]],
        [["--help"], ["inspect", PLAIN]],
    ),
)
@pytest.mark.quick("words1")
def test_a_full_disk_behind_stdout_is_named_whatever_is_shown(words: list[str]) -> None:
    result = with_full("stdout", *words)
    assert (result.returncode, result.stderr) == (4, NO_ROOM)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["stats", "--all"], marks=pytest.mark.slow),
        ["stats", "--json"],
        ["serve", "--help"],
    ],
)
@pytest.mark.quick("words2")
def test_a_full_disk_behind_stdout_is_named_for_texts_larger_than_a_buffer(
    tmp_path: Path, words: list[str]
) -> None:
    many = {f"layers.{i}.mlp.gate_proj.weight": np.zeros(4, np.float32) for i in range(400)}
    save_file(many, tmp_path / "model.safetensors")
    command, option = words
    result = with_full("stdout", command, *([tmp_path] if command == "stats" else []), option)
    assert (result.returncode, result.stderr) == (4, NO_ROOM)


@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_an_event_where_stderr_has_events(tmp_path: Path) -> None:
    result = with_full("stdout", "consolidate", LLAMA, tmp_path / "out", "--events")
    *_, committed, failed = map(json.loads, result.stderr.splitlines())
    assert (committed["event"], failed["event"], failed["code"]) == (
        "committed",
        "failed",
        "unwritable-output",
    )
    assert result.returncode == failed["exit_status"] == 4


@pytest.mark.slow
def test_a_full_disk_behind_stderr_changes_nothing_but_the_messages(tmp_path: Path) -> None:
    out = tmp_path / "out"
    statuses = [
        with_full("stderr", "consolidate", source, out, *options).returncode
        for source, *options in (
            (LLAMA, "--events"),
            (LLAMA,),
            (tmp_path / "absent", "--overwrite"),
            (LLAMA, "--unknown"),
        )
    ]
    assert statuses == [0, 5, 3, 2]
    assert (out / "ckptkit.json").exists()


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.quick(1)
def test_a_command_imports_what_it_needs_and_nothing_that_is_slow_to_import(
    flags: list[str],
) -> None:
    code = (
        "import sys\n"
        "from ckptkit_cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "absent = {'torch', 'rich', 'pydantic', 'huggingface_hub', 'fsspec', 'safetensors', 'tqdm',"
        " 'transformers', 'ml_dtypes',"
        " 'ckptkit_cli.watch', 'ckptkit_cli.consolidate', 'ckptkit.hub', 'ckptkit.writer.merge',"
        " 'ckptkit.engine.bitsandbytes'}\n"
        "print(sorted(absent & set(sys.modules)), file=sys.__stderr__)\n"
        "sys.exit(status)\n"
    )
    result = run("inspect", PLAIN, *flags, code=code)
    assert (result.returncode, result.stderr) == (0, "[]\n")


def test_the_list_of_commands_imports_no_array_and_no_conversion() -> None:
    code = (
        "import sys\n"
        "from ckptkit_cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "ours = {name for name in sys.modules if name.startswith('ckptkit.')}\n"
        "few = {'core', 'name_maps', 'options', 'storage', 'version'}\n"
        "found = {name for name in ours if name.split('.')[1] not in few}\n"
        "print(sorted(found | {'numpy'} & set(sys.modules)),"
        " file=sys.__stderr__)\n"
        "sys.exit(status)\n"
    )
    result = run("--help", code=code)
    assert (result.returncode, result.stderr) == (0, "[]\n")


SLOW = r"""
import os, signal, sys, time
from ckptkit.storage.local.target import LocalTarget
from ckptkit_cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it

write = LocalTarget.write

def slow(self, *arguments):
    os.write(2, b"writing\n")  # in one piece: several threads come here
    time.sleep(0.7)
    return write(self, *arguments)

LocalTarget.write = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGTERM], 143),
        pytest.param([signal.SIGINT, signal.SIGINT, signal.SIGTERM], 130, marks=pytest.mark.slow),
        ([signal.SIGTERM, signal.SIGTERM], 143),
    ],
)
@pytest.mark.quick("signals3-143")
def test_a_signal_leaves_nothing_behind(
    signals: Sequence[signal.Signals], status: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SLOW, "consolidate", str(LLAMA), str(tmp_path / "a" / "out")]
    with started(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "writing\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)  # of two at once, either can reach the handlers first
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == status
    assert list(tmp_path.iterdir()) == []
    assert stdout == ""
    assert f"stopped by {signals[0].name}" in stderr
    assert "Traceback" not in stderr


def test_a_place_that_holds_nothing_to_read_is_told_by_what_it_is(tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        empty = run(command, tmp_path)
        assert (empty.returncode, empty.stdout) == (3, "")
        assert empty.stderr.startswith(f"error[not-a-checkpoint]: {tmp_path}: no file is here\n")
        assert "\n  hint: " in empty.stderr
    device = run("inspect", "/dev/null")
    assert device.stderr == "error[not-a-checkpoint]: /dev/null: neither a file nor a directory\n"
