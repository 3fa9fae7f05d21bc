"""What a newcomer tries: short options, help, wrong paths, sizes without units, other formats."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptkit
from ckptkit.conversion.source.paths import describe_hub_name
from ckptkit.core.errors import UsageError
from ckptkit.version import __version__
from ckptkit_cli._output import cells, table
from tests.command_line import run_command
from tests.files import flip_bit
from tests.other_user import as_nobody, needs_root, open_folder

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "fixtures/fsdp2_plain/checkpoint"


def test_short_options_and_help_of_a_command() -> None:
    assert run_command("-V").stdout == f"ckptkit {__version__}\n"
    assert run_command("help").stdout == run_command("--help").stdout
    assert run_command("help", "adapter", "merge").stdout == (
        run_command("adapter", "merge", "--help").stdout
    )
    unknown = run_command("help", "consolidat")
    assert unknown.returncode == 2
    assert "Did you mean 'consolidate'?" in unknown.stderr
    quiet = run_command("verify", PLAIN, "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["inspect", "verify", "ls"])
def test_no_path_is_proposed_that_cannot_exist(command: str, tmp_path: Path) -> None:
    (tmp_path / "llama.log").touch()
    missing = run_command(command, tmp_path / "llama" / "iter_0000007")
    assert f"hint: {tmp_path} contains llama.log" in missing.stderr
    (tmp_path / "llama-8b" / "iter_0000005").mkdir(parents=True)
    other = run_command(command, tmp_path / "llama" / "iter_0000007")
    assert f"hint: did you mean {tmp_path}/llama-8b/iter_0000005?" in other.stderr


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate"])
def test_a_missing_path_is_hinted_at(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama-8b" / "checkpoint-5").mkdir(parents=True)
    out = [tmp_path / "out"] if command == "consolidate" else []
    near = run_command(command, tmp_path / "lama-8b" / "checkpoint-5", *out)
    assert near.returncode == 3
    assert f"hint: did you mean {tmp_path}/llama-8b/checkpoint-5?" in near.stderr
    far = run_command(command, tmp_path / "zzz", *out)
    assert f"hint: {tmp_path} contains llama-8b\n" in far.stderr
    hub = run_command(command, "meta-llama/Llama-3.2-1B", *out)
    assert "hint: a model on the Hub is written hf://meta-llama/Llama-3.2-1B\n" in hub.stderr
    (tmp_path / "runs" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    both = run_command(command, "runs/stock", *out).stderr
    assert "/runs contains one; a model on the Hub is written hf://runs/stock\n" in both


TAKE_PATHS: dict[str, list[str | Path]] = {
    "average": ["PATH", "PATH", "OUT"],
    "convert": ["PATH", "OUT", "--to", "torch"],
    "diff": ["PATH", PLAIN],
    "du": ["PATH"],
    "ls": ["PATH"],
    "prune": ["PATH", "--keep-last", "1"],
    "save-now": ["PATH"],
    "serve": ["PATH"],
    "stats": ["PATH"],
    "watch": ["PATH", "--push", "org/name", "--once"],
    "adapter extract": ["PATH", "OUT"],
    "adapter merge": ["PATH", "OUT"],
    "delta apply": [PLAIN, "PATH", "OUT"],
    "delta create": [PLAIN, "PATH", "OUT"],
    "push": ["PATH", "org/name"],
}


@pytest.mark.parametrize("command", TAKE_PATHS)
def test_every_command_hints_at_a_missing_path(command: str, tmp_path: Path) -> None:
    (tmp_path / "llama-8b").mkdir()
    put = {"PATH": tmp_path / "lama-8b", "OUT": tmp_path / "out"}
    words = [put.get(str(word), word) for word in TAKE_PATHS[command]]
    missing = run_command(*command.split(), *words)
    assert missing.returncode == 3
    assert re.search(r"^error\[(not-a-checkpoint|missing-file|unreadable-input)", missing.stderr)
    assert f"hint: did you mean {tmp_path}/llama-8b?" in missing.stderr


@pytest.mark.parametrize("command", ["du", "ls", "prune", "save-now"])
def test_a_file_in_the_place_of_a_run_is_called_one(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = run_command(command, tmp_path / "file")
    assert refused.returncode == 3
    assert "is a file, where the directory of a run was expected" in refused.stderr


@pytest.mark.parametrize(
    ("page", "hint"),
    [
        ("gpt2", "a model on the Hub is written hf://OWNER/gpt2; its page shows the owner"),
        ("org/name/", "a model on the Hub is written hf://org/name"),
        ("org/name/tree/main", "a model on the Hub is written hf://org/name@main"),
        ("models", ""),
        ("org/name/resolve/main/x", ""),
    ],
)
def test_a_page_of_the_hub_is_hinted_at(page: str, hint: str) -> None:
    assert describe_hub_name(f"https://huggingface.co/{page}") == hint


@needs_root
def test_a_path_that_may_not_be_read_is_an_error_of_the_input() -> None:
    with open_folder() as folder:
        inner = folder / "secret" / "checkpoint-5"
        inner.mkdir(parents=True)
        (folder / "secret").chmod(0o700)

        def inspect_as_nobody() -> list[object]:
            try:
                ckptkit.inspect(inner)
            except ckptkit.CkptkitError as error:
                return [error.exit_status, str(error), error.hint]
            return []

        ckptkit.inspect(PLAIN)  # another user cannot import what root has installed
        status, said, hint = as_nobody(inspect_as_nobody)
    assert (status, "permission denied" in said) == (3, True)
    assert "see who may enter it" in hint


@pytest.mark.parametrize(
    "act",
    [
        lambda out: ckptkit.consolidate(PLAIN, out, max_shard_size="5"),
        lambda out: ckptkit.prune(out, max_total_size="500"),
    ],
)
def test_a_small_size_without_a_unit_is_refused(
    act: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="has no unit, and would be bytes") as caught:
        act(tmp_path / "out")
    assert "GB, or " in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_sizes_in_bytes_are_taken_where_they_are_meant(tmp_path: Path) -> None:
    manifest = ckptkit.consolidate(PLAIN, tmp_path / "a", max_shard_size="1000B", names="live")
    again = ckptkit.consolidate(PLAIN, tmp_path / "b", max_shard_size=1000, names="live")
    assert len(manifest.files) == len(again.files) > 2


def test_gguf_is_made_by_llama_cpp(tmp_path: Path) -> None:
    source, out = tmp_path / "my runs", tmp_path / "out"
    done = run_command("convert", source, out, "--to", "GGUF")
    assert done.returncode == 2
    commands = [shlex.split(words) for words in done.stderr.split("`")[1::2]]
    assert commands == [
        ["ckptkit", "consolidate", str(source), str(out)],
        ["python", "llama.cpp/convert_hf_to_gguf.py", str(out), "--outfile", f"{out}.gguf"],
    ]
    with pytest.raises(UsageError, match="llama") as caught:
        ckptkit.convert(source, out, to="gguf")  # type: ignore[arg-type]
    assert "convert_hf_to_gguf.py" in caught.value.hint
    named = run_command("convert", source, f"{out}.gguf", "--to", "gguf").stderr
    assert f"{out}.gguf.gguf" not in named
    assert f"--outfile {out}.gguf" in named


def test_names_of_one_table_stay_different_when_they_are_cut() -> None:
    kinds = ("q", "k", "v", "o")
    names = [f"model.layers.{n}.self_attn.{kind}_proj.weight" for n in range(2) for kind in kinds]
    names += ["model.embed_tokens.weight", "lm_head.weight"]
    for width in range(20, 80):
        lines = table([("SIZE", "NAME"), *(("1 KB", name) for name in names)], width=width)
        assert len(set(lines)) == len(lines)
    narrow = table([("SIZE", "NAME"), *(("1", n) for n in names)], width=34, elastic=(1,))
    assert max(map(cells, narrow)) <= 34


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    tensors = {f"layers.{n:05}.weight": np.zeros(n % 7 + 1, np.int8) for n in range(10_000)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_a_pipe_gets_all_tensors_in_any_order(many: Path) -> None:
    piped = run_command("inspect", many, "--tensors", "*").stdout
    assert piped.count("weight") == 10_000
    by_size = run_command("inspect", many, "--sort", "size").stdout.splitlines()
    sizes = [int(line.split()[0]) for line in by_size if line.endswith("weight")]
    assert sizes == sorted(sizes, reverse=True)


def test_a_file_that_was_cut_short_is_one_problem(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(PLAIN, cut)
    with (cut / "__1_0.distcp").open("r+b") as file:
        file.truncate(20_000)
    for command in ("verify", "inspect"):
        page = run_command(command, cut).stdout
        assert page.count("__1_0.distcp") == 1, page
        assert "more parts of this file" in page
        assert "1 problem" in page
    assert len(json.loads(run_command("verify", cut, "--json").stdout)["problems"]) > 20


def test_a_flipped_bit_in_a_directory_is_hinted_at(tmp_path: Path) -> None:
    flipped = tmp_path / "flipped"
    shutil.copytree(PLAIN, flipped)
    shard = flipped / "__0_0.distcp"
    flip_bit(shard, shard.read_bytes().index(b"PK\x01\x02") + 10)  # the method of compression
    done = run_command("consolidate", flipped, tmp_path / "out")
    assert done.returncode == 3
    assert "hint: a flipped bit looks like this: take another copy of the file" in done.stderr


def test_the_hint_for_flat_parameters_is_what_helps(tmp_path: Path) -> None:
    flat = ROOT / "fixtures/rank_files_local_flat/checkpoint"
    done = run_command("consolidate", flat, tmp_path / "out")
    assert done.returncode == 3
    message, hint = done.stderr.split("\n  hint: ")
    assert "--model-config" not in message
    assert "--model-config DIR" in hint
    assert "save it again" not in done.stderr


@pytest.mark.parametrize("name", ["checkpoint-1", "run"])
def test_a_folder_that_holds_links_names_what_they_lead_to(name: str, tmp_path: Path) -> None:
    run = tmp_path / "there" / "run"
    shutil.copytree(PLAIN, run / "checkpoint-1")
    target = run if name == "run" else run / name
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / name).symlink_to(target)
    for command in ("inspect", "consolidate", "du", "ls"):
        out = [tmp_path / "out"] if command == "consolidate" else []
        done = run_command(command, tmp_path / "links", *out)
        expected = target if command in {"inspect", "consolidate"} else run
        assert done.returncode == 3
        assert f"{name}: links, which are not followed" in done.stderr
        assert f"pass what they lead to: {expected}" in done.stderr
    for command, place in (("inspect", target), ("du", run), ("ls", run)):
        assert run_command(command, place).returncode == 0


def test_a_model_to_write_alike_is_a_folder_or_its_index(tmp_path: Path) -> None:
    like, out = tmp_path / "like", tmp_path / "out"
    ckptkit.consolidate(PLAIN, like, max_shard_size="1000B", names="live")
    absent = run_command("consolidate", PLAIN, out, "--like", like / "absent.json")
    assert (absent.returncode, "no such directory" in absent.stderr) == (3, True)
    wrong = run_command("consolidate", PLAIN, out, "--like", like / "ckptkit.json")
    assert (wrong.returncode, "did you mean" in wrong.stderr) == (3, False)
    assert "where a model folder or its 'model.safetensors.index.json' was expected" in wrong.stderr
    assert f"pass its folder: {like}\n" in wrong.stderr
    base = run_command("consolidate", PLAIN, out, "--base", like / "ckptkit.json")
    assert "is a file, where a directory was expected" in base.stderr
    shutil.copy(next(like.glob("*-00001-of-*")), like / "model.safetensors")  # of another save
    index = like / "model.safetensors.index.json"
    ckptkit.consolidate(PLAIN, out, like=index, names="live")
    written = json.loads((out / index.name).read_text())["weight_map"]
    assert written == json.loads(index.read_text())["weight_map"]


@pytest.mark.parametrize("kind", ["a directory", "a named pipe"])
def test_what_is_in_the_place_of_a_configuration_is_named(kind: str, tmp_path: Path) -> None:
    shutil.copytree(PLAIN, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.unlink(missing_ok=True)
    config.mkdir() if kind == "a directory" else os.mkfifo(config)
    done = run_command("consolidate", tmp_path / "model", tmp_path / "out", "--names", "live")
    assert done.returncode == 0, done.stderr
    assert f"config.json: {kind} was found where a regular file was expected" in done.stderr
    assert "without which from_pretrained does not load the output" in done.stderr
