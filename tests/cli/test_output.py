"""What people see: escaped, aligned, within the terminal, in colour only where it is wanted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ckptkit.core.manifest import FileRecord, Manifest, TensorRecord
from ckptkit_cli._output import cells, escaped, first_of, shortened, table, wrapped
from ckptkit_cli._pages import Consolidated, loading_line
from tests.command_line import run_command

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
TWO_MODELS = ROOT / "fixtures" / "accelerate_fsdp2_two_models" / "checkpoint"
HOSTILE = "evil\x1b[2J\x1b]0;owned\x07\u202egnp.\u2066\r\nerror[x]: \x9b31m"
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PTY = """
import fcntl, os, pty, struct, sys, termios
columns, *command = sys.argv[1:]
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, int(columns), 0, 0))
    os.execv(command[0], command)
while True:
    try:
        data = os.read(terminal, 65536)
    except OSError:
        break
    os.write(1, data)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_messages_take_four_lines_unless_all_of_them_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    hints = {}
    for words in ([], ["--verbose"]):
        lines = run_command("inspect", tmp_path, *words).stderr.splitlines()
        hints[bool(words)] = next(line for line in lines if line.startswith("  hint: "))
    assert len(hints[False]) <= 400 < len(hints[True])
    shown, end = hints[False].split(" …")
    assert end == " (--verbose shows all)"
    assert hints[True].startswith(f"{shown};")
    document = json.loads(run_command("inspect", tmp_path, "--json").stdout)
    assert hints[True].endswith(document["error"]["hint"])


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str | Path, **variables: str) -> str:
    given_here = {"OMP_NUM_THREADS": "1", "TERM": "xterm"} | variables
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | given_here,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    ).stdout.decode()


def into_pipe(*words: str | Path) -> str:
    result = run_command(*words, TERM="xterm")
    assert result.returncode == 0, result.stderr
    return result.stdout


def on_terminal(columns: int, *arguments: str | Path, **variables: str) -> str:
    command = [sys.executable, "-m", "ckptkit_cli", *map(str, arguments)]
    return run("-c", PTY, str(columns), *command, **variables).replace("\r\n", "\n")


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A safetensors file with names, metadata and a path that attack the terminal."""
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": {"format": "pt"}, HOSTILE: tensor}).encode()
    folder = tmp_path / "run\x1b[31m\u202e"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    config = {"model_type": HOSTILE, "architectures": [HOSTILE]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SLOW_CHILD = """
import os, sys, time
if "ckptkit.hub_names.transformers.program" in " ".join(sys.orig_argv):
    time.sleep(float(os.environ["SLOW_SECONDS"]))
    os._exit(9)
"""


@pytest.mark.slow
def test_a_terminal_shows_what_is_waited_for_once_all_is_copied(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_CHILD)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    slow = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = on_terminal(100, "consolidate", LLAMA, tmp_path / "out", SLOW_SECONDS="2.5", **slow)
    waited = "waiting until transformers has compared the names with the model"
    assert waited in shown
    assert shown.index(waited) < shown.index("wrote")
    quick = on_terminal(100, "consolidate", LLAMA, tmp_path / "again", SLOW_SECONDS="0", **slow)
    assert "waiting" not in quick


@given(st.text())
def test_escaped_text_is_printable_and_printable_text_is_unchanged(text: str) -> None:
    assert escaped(text).isprintable()
    assert escaped(escaped(text)) == escaped(text)
    if text.isprintable():
        assert escaped(text) == text


def test_hostile_text_is_shown_as_what_it_is() -> None:
    assert escaped("a\x1b[31m\u202e\n\x9b\udcff") == r"a\x1b[31m\u202e\n\x9b\udcff"


@pytest.mark.parametrize("arguments", [[], ["--tensors", "*"]])
@pytest.mark.quick(1)
def test_no_control_character_of_a_checkpoint_reaches_a_terminal(
    hostile: Path, arguments: list[str]
) -> None:
    shown = on_terminal(100, "inspect", hostile, *arguments)
    assert not FORBIDDEN.search(without_colour(shown))
    assert r"evil\x1b[2J" in shown
    assert "\nerror[x]" not in shown


def test_other_commands_escape_too(hostile: Path, tmp_path: Path) -> None:
    out = tmp_path / "out\x07"
    for arguments in (
        ("verify", hostile),
        ("diff", hostile, hostile),
        ("consolidate", hostile, out, "--dry-run"),
        ("consolidate", hostile, out),
    ):
        shown = into_pipe(*arguments)
        assert not FORBIDDEN.search(shown), arguments
        assert r"\x1b[31m\u202e" in shown or r"out\x07" in shown, arguments


def test_json_is_ascii_and_keeps_the_name(hostile: Path) -> None:
    text = into_pipe("inspect", hostile, "--json")
    assert text.isascii()
    assert not FORBIDDEN.search(text)
    assert json.loads(text)["tensors"][0]["name"] == HOSTILE


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("source", [LLAMA, TWO_MODELS])
@pytest.mark.quick("source0-80")
def test_a_page_keeps_to_the_terminal(source: Path, columns: int) -> None:
    lines = without_colour(on_terminal(columns, "inspect", source)).splitlines()
    own = [line for line in lines if str(source) not in line]  # commands and paths stay whole
    assert len(own) > 10
    assert max(map(len, own)) <= columns


@pytest.mark.slow
def test_a_terminal_shows_the_first_200_of_many_tensors(tmp_path: Path) -> None:
    tensors = {f"layers.{n:03}.weight": np.zeros(1, np.int8) for n in range(300)}
    save_file(tensors, tmp_path / "model.safetensors")
    shown = on_terminal(80, "inspect", tmp_path, "--tensors", "*")
    assert shown.count(".weight") == 200
    assert "... and 100 more (--all)" in shown
    assert on_terminal(80, "inspect", tmp_path, "--all").count(".weight") == 300
    numbers = on_terminal(120, "stats", tmp_path)
    assert numbers.count(".weight") == 200
    assert "... and 100 more (--all)" in numbers.splitlines()[-2]
    assert numbers.splitlines()[-1].split()[0] == "total"
    assert on_terminal(120, "stats", tmp_path, "--all").count(".weight") == 300
    assert into_pipe("stats", tmp_path).count(".weight") == 300


def test_colours_are_for_terminals_that_want_them() -> None:
    assert "\x1b[1m" in on_terminal(80, "inspect", LLAMA)
    assert "\x1b" not in on_terminal(80, "inspect", LLAMA, NO_COLOR="1")
    assert "\x1b" not in on_terminal(80, "inspect", LLAMA, TERM="dumb")
    assert "\x1b" not in into_pipe("inspect", LLAMA)


def test_a_pipe_gets_whole_names_and_one_line_for_each_fact() -> None:
    text = into_pipe("inspect", TWO_MODELS)
    assert "..." not in text
    assert "checkpoint: " not in text
    assert "  pytorch_model_fsdp_1  model " in text


@pytest.mark.slow
def test_progress_is_drawn_on_a_terminal_and_wiped_off(tmp_path: Path) -> None:
    slowly = ("--bandwidth", "12KB")  # so that it is drawn
    shown = on_terminal(100, "consolidate", LLAMA, tmp_path / "out", *slowly)
    assert "consolidate: " in shown
    assert "B/s" in shown
    silent = on_terminal(100, "consolidate", LLAMA, tmp_path / "quiet", "--quiet")
    assert silent == ""


@given(st.text(), st.integers(5, 60))
def test_shortened_text_fits(text: str, width: int) -> None:
    shown = shortened(escaped(text), width)
    assert cells(shown) <= width
    if cells(escaped(text)) <= width:
        assert shown == escaped(text)


def test_columns_are_aligned_by_the_cells_they_take() -> None:
    rows = [("NAME", "SIZE"), ("重み", "1 B"), ("w", "12 B")]
    assert table(rows, width=None, right=(1,)) == [
        "  NAME  SIZE",
        "  重み   1 B",
        "  w     12 B",
    ]


def test_a_text_without_end_is_cut_off() -> None:
    assert wrapped("x" * 5000, width=None)[0].endswith("xxx... (5,000 characters)")


def test_a_long_list_says_how_much_it_leaves_out() -> None:
    assert first_of(["a", "b"], 2) == ["a", "b"]
    assert first_of(["a", "b", "c"], 1) == ["a", "... and 2 more"]


def line_of(kind: str, files: list[str], out: str = "out", **of: Any) -> str:
    """Returns the line that loads an output with these files and tensors."""
    names = of.pop("names", {})
    tensors = {
        name: TensorRecord(dtype, shape, "model.safetensors", "", "crc32")
        for name, (dtype, shape) in names.items()
    }
    records = {name: FileRecord(2) for name in files}
    manifest = Manifest(kind, {}, of.get("options", {}), {}, tensors, files=records)
    return loading_line(Consolidated(out, manifest, 1.0, ()))


EMBEDDING = (
    "model.embed_tokens.weight"  # of our own output: neither head nor tie is in its manifest
)
HEAD: dict[str, Any] = {"lm_head.weight": ("float32", (1,))}


@pytest.mark.parametrize(
    ("names", "options", "config", "loaded_by"),
    [
        (HEAD, {}, {}, "AutoModelForCausalLM"),
        ({EMBEDDING: ("float32", (1,))}, {}, {"tie_word_embeddings": True}, "AutoModelForCausalLM"),
        ({EMBEDDING: ("float32", (1,))}, {}, {"tie_word_embeddings": False}, "AutoModel"),
        (HEAD, {"include": ["lm_head*"]}, {}, "load_file"),
        (HEAD, {"exclude": ["model*"]}, {}, "load_file"),
        # What Transformers would fill with random numbers is not said to be loaded by it.
        ({"base_model.model.q_proj.base_layer.weight": ("float32", (1,))}, {}, {}, "load_file"),
        ({"fc1.weight": ("int8", (8, 8))}, {}, {}, "load_file"),
        ({"q_proj.weight": ("float32", (32, 1))}, {}, {}, "load_file"),
    ],
)
def test_the_line_that_loads_an_output_fits_what_is_in_it(
    names: dict[str, Any],
    options: dict[str, Any],
    config: dict[str, Any],
    loaded_by: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    files, out = ["config.json", "model.safetensors"], str(tmp_path)
    expected = f"transformers.{loaded_by}.from_pretrained({out!r})"
    if loaded_by == "load_file":
        expected = f"safetensors.torch.load_file('{out}/model.safetensors')"
    assert line_of("model", files, out, names=names, options=options) == expected


def test_torch_files_and_shards_are_not_said_to_be_loaded_by_transformers() -> None:
    assert line_of("torch", ["optimizer.bin", "pytorch_model.bin"]) == (
        "torch.load('out/pytorch_model.bin', weights_only=True)"
    )
    assert line_of("dcp", ["config.json", "folder/.metadata"]) == (
        "torch.distributed.checkpoint.load({'model': model.state_dict()}, 'out/folder')"
    )


def test_commands_that_start_training_say_how_the_optimizer_is_loaded() -> None:
    place = Path("out").absolute()
    assert line_of("megatron", []) == f"pretrain_gpt.py --finetune --load {place}"
    assert line_of("torchtitan", []).endswith(f"initial-load-path {place}")
    assert "model-only" not in line_of("torchtitan", [])
    with_states = {"optimizer": True}
    assert "--finetune" not in line_of("megatron", [], options=with_states)
    assert "no-initial-load-model-only" in line_of("torchtitan", [], options=with_states)
