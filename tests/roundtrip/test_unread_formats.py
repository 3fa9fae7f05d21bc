"""Formats that are known and not read: named, and what each message says to do works.

The files are of `fixtures/generators/unread_formats.py`, written by the library of each format.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import ckptkit
from ckptkit.core.errors import NotACheckpointError
from ckptkit.core.text import Aside
from tests.command_line import run_command
from tests.live_truth import FIXTURES, refuse
from tests.tensor_images import images

UNREAD = FIXTURES / "unread_formats"
TRUTH = UNREAD / "truth.safetensors"
TRAINER = FIXTURES / "trainer_ddp" / "checkpoint" / "checkpoint-4"
NAMES = {
    "gguf": "model.gguf: GGUF",
    "flax": r"flax_model.msgpack: Flax \(msgpack\)",
    "flax_checkpoint": r"checkpoint_3: Flax \(msgpack\)",
    "tensorflow": "model.ckpt.data-00000-of-00001: TensorFlow",
    "keras_h5": r"tf_model.h5: Keras \(HDF5\)",
    "keras": "model.keras: Keras",
    "paddle": "model_state.pdparams: PaddlePaddle",
    "nemo": "model.nemo: NeMo 1",
    "onnx": "model.onnx: ONNX",
    "numpy": "weights.npz: numpy",
}
# Installed below, pinned; TensorFlow and PaddlePaddle, which are large, were run by hand.
PACKAGES = ["gguf==0.19.0", "flax==0.12.8", "h5py==3.16.0", "onnx==1.23.2", "tensorizer==2.12.1"]


@pytest.mark.parametrize("case", NAMES)
def test_a_format_that_is_not_read_is_named(case: str, tmp_path: Path) -> None:
    refuse(f"{NAMES[case]}, which is not read", UNREAD / case, tmp_path / "out")
    (path, *_) = (p for p in sorted((UNREAD / case).iterdir()) if p.name != "checkpoint")
    if case != "tensorflow":
        refuse(f"{NAMES[case]}, which is not read", path, tmp_path / "out")
    with pytest.raises(NotACheckpointError, match=NAMES[case]):
        ckptkit.inspect(UNREAD / case)


@pytest.mark.parametrize("case", NAMES)
def test_a_model_beside_it_is_read(case: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(UNREAD / case, tmp_path / "both"))
    shutil.copy(TRUTH, folder / "model.safetensors")
    ckptkit.consolidate(folder, tmp_path / "out", names="live")
    assert images(tmp_path / "out" / "model.safetensors") == images(TRUTH)


@pytest.mark.parametrize("case", NAMES)
def test_a_newer_step_that_holds_it_alone_is_told(case: str, tmp_path: Path) -> None:
    """A step of a run was taken without a word, though a newer one was there."""
    run = tmp_path / "run"
    (run / "step-3").mkdir(parents=True)
    shutil.copy(TRUTH, run / "step-3" / "model.safetensors")
    for step in (2, 20):
        shutil.copytree(UNREAD / case, run / f"step-{step}")
    done = run_command("consolidate", run, tmp_path / "out", "--names", "live")
    assert done.returncode == 0, done.stderr
    (text,) = (note for note in ckptkit.inspect(run).notes if "was passed over" in note)
    assert not isinstance(text, Aside)
    assert text.startswith(f"step-20 was passed over: step-20/{NAMES[case]}".replace("\\", ""))
    assert text.endswith(f"which is not read; {_advice(run / 'step-20')}")
    said = " ".join(done.stderr.split())
    assert f"warning: step-20 was passed over: step-20/{NAMES[case]}".replace("\\", "") in said
    assert "step-2 " not in said
    assert text in ckptkit.list_run(run).notes
    listed = run_command("ls", run)
    assert "step-20 was passed over" in listed.stdout
    shutil.copytree(run / "step-3", run / "step-4")
    averaged = run_command("average", run, tmp_path / "mean", "--last", "2", "--names", "live")
    assert "warning: step-20 was passed over" in averaged.stderr
    chosen = run_command("consolidate", run, tmp_path / "chosen", "--select", "step-20")
    assert chosen.returncode == 3
    assert f"step-20/{NAMES[case]}".replace("\\", "") in " ".join(chosen.stderr.split())


def test_a_newer_step_that_is_a_file_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoint_2").mkdir(parents=True)
    shutil.copy(TRUTH, run / "checkpoint_2" / "model.safetensors")
    shutil.copy(UNREAD / "flax_checkpoint" / "checkpoint_3", run)
    shutil.copy(UNREAD / "nemo" / "model.nemo", run / "epoch=0-step=4.nemo")
    notes = [note for note in ckptkit.inspect(run).notes if "was passed over" in note]
    assert [note.partition(", which")[0] for note in notes] == [
        "epoch=0-step=4 was passed over: epoch=0-step=4.nemo: NeMo 1",
        "checkpoint_3 was passed over: checkpoint_3: Flax (msgpack)",
    ]


def test_a_newer_step_without_weights_is_told_as_one_that_is_cut_short_is(tmp_path: Path) -> None:
    """As a killed save leaves it: its optimizer was listed as a complete step."""
    run = tmp_path / "run"
    for step in (1, 2):
        shutil.copytree(TRAINER, run / f"step-{step}")
    assert not [note for note in ckptkit.inspect(run).notes if "passed over" in note]
    (run / "step-2" / "model.safetensors").unlink()
    (text,) = (note for note in ckptkit.inspect(run).notes if "was passed over" in note)
    assert text == "step-2 was passed over: it holds no checkpoint of a known format"
    one, two = ckptkit.list_run(run).steps
    assert (one.complete, two.problem) == (True, "it holds no checkpoint of a known format")
    assert "from step-1\n" in run_command("ls", run).stdout


def test_a_step_with_an_optimizer_alone_is_not_complete(tmp_path: Path) -> None:
    """It counted as the newest whole step, and `prune` removed those with models before it."""
    run = tmp_path / "run"
    shutil.copytree(UNREAD.parent / "trainer_fsdp2" / "checkpoint", run)
    assert [step.complete for step in ckptkit.list_run(run).steps] == [True, True]
    shutil.rmtree(run / "checkpoint-4" / "pytorch_model_fsdp_0")
    steps = ckptkit.list_run(run).steps
    assert [step.problem for step in steps] == [
        "",
        "it holds the state of an optimizer, and no model",
    ]
    pruned = ckptkit.prune(run, keep_last=1)
    assert [one.action for one in pruned.steps] == ["keep", "keep"]
    assert "trainer.train(resume_from_checkpoint" in run_command("ls", run).stdout


def test_where_nothing_is_read_the_newest_step_is_named(tmp_path: Path) -> None:
    """The Python of the message merged the files of all steps: the last by name won."""
    for step in (3, 20):
        shutil.copy(UNREAD / "flax_checkpoint" / "checkpoint_3", tmp_path / f"checkpoint_{step}")
    with pytest.raises(NotACheckpointError) as caught:
        ckptkit.inspect(tmp_path)
    assert "checkpoint_20: Flax" in str(caught.value)
    assert "checkpoint_3'" not in caught.value.hint


def test_a_step_that_is_not_read_is_never_pruned(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoint-9").mkdir(parents=True)
    shutil.copy(TRUTH, run / "checkpoint-9" / "model.safetensors")
    shutil.copytree(UNREAD / "gguf", run / "checkpoint-2")
    for path in run.rglob("*"):
        os.utime(path, (1e9, 1e9))
    pruned = ckptkit.prune(run, keep_last=1, incomplete=True)
    assert [one.action for one in pruned.steps] == ["keep", "keep"]
    assert "checkpoint-2/model.gguf: GGUF, which is not read" in pruned.steps[0].why


def _advice(source: Path) -> str:
    with pytest.raises(NotACheckpointError) as caught:
        ckptkit.inspect(source)
    return str(caught.value.hint)


def _run(advice: str, python: str, folder: Path) -> None:
    """Runs the Python of an advice in a folder."""
    assert advice.startswith("in Python: "), advice
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [python, "-c", advice.removeprefix("in Python: ")],
        cwd=folder,
        env=environment,
        check=True,
        timeout=300,
    )


def test_arrays_of_numpy_become_a_model_as_the_message_says(tmp_path: Path) -> None:
    _run(_advice(UNREAD / "numpy"), sys.executable, tmp_path)
    assert images(tmp_path / "model.safetensors") == images(TRUTH)


@pytest.mark.parametrize(("case", "inside"), [("nemo", "unpacked"), ("keras", ".")])
def test_an_archive_is_unpacked_as_the_message_says(case: str, inside: str, tmp_path: Path) -> None:
    command = _advice(UNREAD / case).split("`")[1]
    (tmp_path / "in").mkdir()
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path / "in", check=True)
    if case == "keras":
        refuse(r"model.weights.h5: Keras \(HDF5\)", tmp_path / "in", tmp_path / "out")
        return
    ckptkit.consolidate(tmp_path / "in" / inside, tmp_path / "out", names="live")
    assert images(tmp_path / "out" / "model.safetensors") == images(TRUTH)


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))


@pytest.mark.parametrize("separator", [".", "_"])
def test_matrices_of_flexflow_are_named(separator: str, tmp_path: Path) -> None:
    """Written with the calls of FlexFlow's `convert_hf_model`; older ones have underscores."""
    model, folder = _llama(), tmp_path / "weights" / "full-precision"
    folder.mkdir(parents=True)
    for name, parameter in model.state_dict().items():
        plain = name.replace("model.", "")
        if separator == "_":
            plain = plain.replace(".", "_").replace("self_attn", "attention")
            plain = plain.replace("q_proj", "wq").replace("o_proj", "wo")
        parameter.numpy().tofile(folder / plain)
    refuse("FlexFlow, which is not read", folder.parent, tmp_path / "out")
    if separator == "_":
        return
    model.config.save_pretrained(tmp_path / "base")
    advice = _advice(folder.parent).replace("'BASE'", "'base'").replace("float16", "float32", 1)
    _run(advice, sys.executable, tmp_path)
    ckptkit.consolidate(tmp_path / "OUT", tmp_path / "out")
    save_file(dict(model.state_dict()), tmp_path / "truth.safetensors")
    assert images(tmp_path / "out" / "model.safetensors") == images(tmp_path / "truth.safetensors")


def test_files_of_engines_are_known_by_how_they_begin(tmp_path: Path) -> None:
    spec = b"TransformerSpec\0"
    (tmp_path / "ct2").mkdir()
    (tmp_path / "ct2" / "model.bin").write_bytes(
        np.array([6], "<u4").tobytes() + np.array([len(spec)], "<u2").tobytes() + spec + bytes(99)
    )
    (tmp_path / "ggml").mkdir()
    (tmp_path / "ggml" / "ggml-model-q4_0.bin").write_bytes(b"tjgg\3\0\0\0" + bytes(99))
    refuse("CTranslate2, which is not read", tmp_path / "ct2", tmp_path / "out")
    refuse("GGML, from before GGUF, which is not read", tmp_path / "ggml", tmp_path / "out")
    (tmp_path / "ggml" / "ggml-model-q4_0.bin").write_bytes(bytes(99))
    caught = refuse(None, tmp_path / "ggml", tmp_path / "out")
    assert "GGML" not in str(caught.value)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the libraries of the formats, and torch of this one."""
    folder = tmp_path_factory.mktemp("libraries") / "venv"
    venv.create(folder, with_pip=True)
    found = str(folder / "bin" / "python")
    subprocess.run([found, "-m", "pip", "install", "-q", *PACKAGES[:-1]], check=True)
    subprocess.run([found, "-m", "pip", "install", "-q", "--no-deps", PACKAGES[-1]], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    others = ["libnacl", "redis", "hiredis", "protobuf", "psutil", "safetensors"]
    subprocess.run([found, "-m", "pip", "install", "-q", *others], check=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gguf", "flax", "flax_checkpoint", "keras_h5", "onnx"])
def test_the_python_of_a_message_makes_the_model(case: str, python: str, tmp_path: Path) -> None:
    _run(_advice(UNREAD / case), python, tmp_path)
    ckptkit.consolidate(tmp_path / "model.safetensors", tmp_path / "out", names="live")
    assert images(tmp_path / "out" / "model.safetensors") == images(TRUTH)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_arrays_without_a_tree_are_named_and_their_python_makes_the_model(
    driver: str, python: str, tmp_path: Path
) -> None:
    """As T5X and Levanter write them: a folder for each parameter, with tensorstore."""
    code = (
        "import tensorstore as ts; from safetensors.numpy import load_file;"
        " [ts.open({'driver': " + repr(driver) + ", 'kvstore': {'driver': 'file', 'path':"
        f" {str(tmp_path / 'run')!r} + '/' + n.replace('.', '/')" + "}}, create=True,"
        f" dtype=a.dtype, shape=a.shape).result().write(a).result() for n, a in"
        f" load_file({str(TRUTH)!r}).items()]"
    )
    _run(f"in Python: {code}", python, tmp_path)
    refuse("zarr arrays of JAX, which is not read", tmp_path / "run", tmp_path / "out")
    _run(_advice(tmp_path / "run"), python, tmp_path)
    assert images(tmp_path / "model.safetensors") == images(TRUTH)


@pytest.mark.slow
def test_a_file_of_tensorizer_is_named_and_its_python_makes_the_model(
    python: str, tmp_path: Path
) -> None:
    code = (
        "from safetensors.torch import load_file; from tensorizer import TensorSerializer;"
        f" s = TensorSerializer('model.tensors'); s.write_state_dict(load_file({str(TRUTH)!r}));"
        " s.close()"
    )
    _run(f"in Python: {code}", python, tmp_path)
    _run(_advice(tmp_path), python, tmp_path)
    assert images(tmp_path / "model.safetensors") == images(TRUTH)


def test_files_named_alike_that_hold_something_else_are_not_taken_for_these(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"not that")
    torch.save({}, folder / "checkpoint_7")
    caught = refuse("no checkpoint of a known format", folder, tmp_path / "out")
    assert "GGUF" not in str(caught.value)
