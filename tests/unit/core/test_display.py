"""Results at a prompt and in a notebook, and what `import ckptkit` makes reachable."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckptkit
from ckptkit.conversion.verify import Verification
from ckptkit.core import errors
from ckptkit.core.display import Displayed, Facts
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer
from ckptkit.training.handle import SaveHandle

ROOT = Path(__file__).resolve().parents[3]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
_LONGEST = 300


def test_an_open_checkpoint_says_how_another_process_gets_one() -> None:
    with ckptkit.open(LLAMA) as checkpoint:
        for another in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=r"pass its path, and call ckptkit\.open"):
                another(checkpoint)


def test_fields_of_a_result_at_a_url_are_values_of_json() -> None:
    place = Place("s3://bucket/model", {"key": "secret"})
    fields = Verification(place, "output", (), 1, 8, ()).to_json()
    assert fields["path"] == "s3://bucket/model"
    assert type(fields["path"]) is str


def test_results_are_one_short_line_at_a_prompt(tmp_path: Path) -> None:
    manifest = ckptkit.consolidate(LLAMA, tmp_path / "out")
    ckptkit.consolidate(LLAMA, tmp_path / "cast", dtype="bf16")
    with ckptkit.open(LLAMA) as checkpoint:
        results = [checkpoint, checkpoint.get_slice("model.norm.weight")]
    results += [manifest, ckptkit.inspect(LLAMA), ckptkit.verify(tmp_path / "out")]
    results += [ckptkit.diff(tmp_path / "out", tmp_path / "cast"), ckptkit.stats(LLAMA)]
    for result in results:
        shown = repr(result)
        assert shown.startswith(f"<{type(result).__name__} ")
        assert len(shown) < _LONGEST
        assert "\n" not in shown
        assert "<table>" in result._repr_html_()
    assert "12 tensors" in repr(results[0])
    assert "no problems" in repr(results[3])
    assert "different, 11 tensors" in repr(results[5])


class Hostile(Displayed):
    def _facts(self) -> Facts:
        rows = [(f"<b>{number}</b>", "&") for number in range(30)]
        return Facts("<script>", [("empty", ""), ("kind", "a & b")], ("name", "x"), rows)


def test_a_notebook_shows_a_short_table_without_markup_of_the_checkpoint() -> None:
    shown = Hostile()._repr_html_()
    assert "<script>" not in shown
    assert "&lt;b&gt;19&lt;/b&gt;" in shown
    assert "&lt;b&gt;20" not in shown
    assert "… and 10 more" in shown
    assert "empty" not in shown
    assert repr(Hostile()) == "<Hostile '<script>': a & b>"


def test_a_notebook_and_a_prompt_show_what_is_not_printable() -> None:
    name = "a\u202eb\u2028c\nd"

    class Odd(Displayed):
        def _facts(self) -> Facts:
            return Facts(name, [("line", name)], (name, "x"), [(name, name)])

    visible = "a\\u202eb\\u2028c\\nd"
    assert Odd()._repr_html_().count(visible) == 5
    assert Odd()._repr_html_().isprintable()
    assert repr(Odd()) == f"<Odd {name!r}: {visible}>"


def test_saves_say_where_they_are_and_show_no_internals(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert repr(checkpointer) == (
            f"<Checkpointer {str(tmp_path / 'run')!r}: rank 0 of 1, no save under way>"
        )
        handle = checkpointer.save(1, {"model": model})
        path = handle.result()
        report = handle.report()
    assert repr(handle) == f"<SaveHandle of the save of step 1: done: {path}>"
    assert repr(report).startswith("<SaveReport: step 1 saved in ")
    assert "closed" in repr(checkpointer)
    assert {"heard", "keep", "free", "fail", "succeed"}.isdisjoint(dir(handle))
    assert {"done", "result", "blocked_seconds"} <= set(dir(handle))
    failed = SaveHandle(3)
    failed.fail(errors.SaveError("the disk is full"))
    assert repr(failed) == "<SaveHandle of the save of step 3: failed: the disk is full>"


def test_a_checkpoint_is_read_as_safe_open_reads_a_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(24, dtype=torch.bfloat16).reshape(4, 3, 2),
        "layer.weight": torch.arange(4.0),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    indexes: list[Any] = [
        1,
        -1,
        slice(1, 3),
        slice(None, None, 2),
        slice(3, 1),
        (slice(1, 4, 2), 2),
    ]
    indexes += [(..., 0), (slice(-2, None), slice(None), 1), (3, 2, 1), (None, 1), ()]
    with (
        ckptkit.open(tmp_path) as ours,
        safe_open(tmp_path / "model.safetensors", framework="pt") as theirs,
    ):
        assert [pair[0] for pair in ours.items()] == list(ours.keys())
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs.get_tensor(name))
            assert torch.equal(ours.get_tensor(name), tensor)
            slices = ours.get_slice(name), theirs.get_slice(name)
            assert slices[0].get_shape() == slices[1].get_shape()
            assert slices[0].get_dtype() == slices[1].get_dtype()
        for index in indexes:
            assert torch.equal(ours.get_slice("a")[index], tensors["a"][index]), index
        assert torch.equal(ours.get_slice("scalar")[()], tensors["scalar"])
        assert ours.get_slice("empty")[0:0].shape == (0, 3)
        with pytest.raises(IndexError):
            ours.get_slice("a")[7]
        with pytest.raises(KeyError, match="did you mean 'layer"):
            ours["layer.wieght"]


def test_a_slice_reads_the_rows_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptkit.conversion.source import read

    spans = []
    whole = read._read_rows

    def watched(opened: object, entry: object, span: object) -> bytearray:
        spans.append(span)
        return whole(opened, entry, span)  # type: ignore[arg-type]

    monkeypatch.setattr(read, "_read_rows", watched)
    with ckptkit.open(LLAMA) as checkpoint:
        name = "model.embed_tokens.weight"
        rows, width = checkpoint.shape(name)
        part = checkpoint.get_slice(name)[2:4]
        assert torch.equal(part, checkpoint[name][2:4])
    assert (spans[0].start, spans[0].stop) == (2 * width, 4 * width)  # type: ignore[attr-defined]
    assert rows > 4


def test_errors_and_options_are_reached_from_the_top() -> None:
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.CkptkitError)
    }
    assert kinds <= set(ckptkit.__all__)
    assert all(getattr(ckptkit, name) is getattr(errors, name) for name in kinds)
    assert ckptkit.Options.__annotations__.keys() >= {"dtype", "base"}


@pytest.mark.slow
def test_packages_are_imported_once_they_are_asked_for() -> None:
    code = (
        "import sys, ckptkit\n"
        "assert 'ckptkit.hub' not in sys.modules and 'huggingface_hub' not in sys.modules\n"
        "assert callable(ckptkit.hub.push) and 'hub' in dir(ckptkit)\n"
        "assert ckptkit.training.Checkpointer\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_training_without_torch_says_what_to_install() -> None:
    code = (
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "try:\n"
        "    from ckptkit.training import Checkpointer\n"
        "except ImportError as error:\n"
        "    print(error, '|', error.hint)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "needs torch, which is not installed | run `pip install torch`" in done.stdout


def test_what_messages_say_to_install_is_on_pypi_and_in_an_extra() -> None:
    """The name ckptkit on PyPI is another project's, so that no message names an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    known = {re.split(r"[\[<>=;~! ]", requirement)[0] for requirement in listed} | {"peft"}
    sources = [*(ROOT / "ckptkit").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    texts = [path.read_text() for path in sources]
    assert not any("pip install 'ckptkit" in text for text in texts)
    named = {
        word
        for text in texts
        for match in re.findall(r"pip install ([\w -]+)`", text)
        for word in match.split()
        if not word.startswith("-")
    }
    assert {"torch", "blake3", "ray"} <= named <= known
