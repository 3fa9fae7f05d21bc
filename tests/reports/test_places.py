"""Reports about where frameworks put configurations and steps: they are found there."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import ckptkit
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import AmbiguousSourceError, CkptkitError, NotACheckpointError
from ckptkit.runs.find_run import find_run
from ckptkit.runs.listing import list_run
from ckptkit.storage.places import PathLike, Place
from tests.command_line import Result, run_command
from tests.compared_models import model_of, trained
from tests.hub_server import TOKEN, HubServer
from tests.object_store import ObjectStore
from tests.reports.folders import assert_same, notes_of

REPORTS = Path(__file__).resolve().parents[2] / "fixtures" / "reports"
AUTOMODEL, NEMO_RL = REPORTS / "07-automodel", REPORTS / "07-nemo-rl"
VEOMNI, LEROBOT = REPORTS / "18-veomni-experts", REPORTS / "19-lerobot"
PREFIXES, COMPOSER = REPORTS / "28-s3-prefix", REPORTS / "29-composer-hf"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Tensors = dict[str, torch.Tensor]


def converted(src: PathLike, out: Path, **options: Any) -> tuple[Tensors, list[str]]:
    """Returns the tensors of the model alone, and the notes."""
    notes = notes_of(ckptkit.consolidate, src, out, **options)
    return load_file(out / "model.safetensors"), notes


def values_of(tensors: Tensors) -> set[float]:
    return {value for tensor in tensors.values() for value in tensor.flatten().tolist()}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def loads(folder: Path) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def names_of(run: PathLike) -> list[str]:
    return [step.name for step in list_run(run).steps]


def states_of(run: PathLike) -> list[bool]:
    return [step.complete for step in list_run(run).steps]


# --- configurations ---

HF = ".hf_metadata: config.json, generation_config.json, tokenizer.json, tokenizer_config.json"
PLACES = {
    # What is converted, and where its files come from.
    "automodel": (AUTOMODEL, "ckpt", f"epoch_0_step_100/model/{HF}"),
    "automodel, the step": (AUTOMODEL, "ckpt/epoch_0_step_100", HF),
    "automodel, the model": (AUTOMODEL, "ckpt/epoch_0_step_100/model", HF),
    "nemo-rl": (NEMO_RL, "ckpt", f"step_10/policy/weights/model/{HF}"),
    "nemo-rl, from above": (NEMO_RL, ".", f"ckpt/step_10/policy/weights/model/{HF}"),
    "nemo-rl, the weights": (NEMO_RL, "ckpt/step_10/policy/weights", HF),
    "veomni": (VEOMNI, "ckpt", "model_assets: config.json"),
    "veomni, the run": (VEOMNI, "ckpt/checkpoints", "model_assets, above the source: config.json"),
    "veomni, the step": (
        *(VEOMNI, "ckpt/checkpoints/global_step_5"),
        "model_assets, above the source: config.json",
    ),
    "composer": (
        *(COMPOSER, "ckpt"),
        "ep0-ba10-rank0.pt: state.integrations.huggingface: config.json, tokenizer_config.json",
    ),
    "composer, the file": (
        *(COMPOSER, "ckpt/ep0-ba10-rank0.pt"),
        "state.integrations.huggingface: config.json, tokenizer_config.json",
    ),
}


def copied(report: Path, tmp_path: Path) -> Path:
    """Copies the checkpoint alone, without its base and the right result."""
    shutil.copytree(report / "ckpt", tmp_path / "here/ckpt", symlinks=True)
    return tmp_path / "here"


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.quick("automodel, the step", "composer, the file", "nemo-rl", "veomni, the run")
def test_the_configuration_is_taken_from_where_the_framework_put_it(
    tmp_path: Path, case: str
) -> None:
    report, path, named = PLACES[case]
    tensors, notes = converted(copied(report, tmp_path) / path, tmp_path / "out")
    assert_same(tensors, load_file(report / "truth.safetensors"))
    assert [note for note in notes if note.startswith("from ") and note.endswith(named)], notes
    config = config_of(tmp_path / "out")
    theta = 10000.0 if report == VEOMNI else 12345.0
    assert config["rope_parameters"]["rope_theta"] == theta
    loads(tmp_path / "out")


@pytest.mark.parametrize("report", [AUTOMODEL, NEMO_RL, VEOMNI, COMPOSER], ids=lambda r: r.name)
@pytest.mark.quick("07-automodel")
def test_it_goes_before_that_of_the_base(tmp_path: Path, report: Path) -> None:
    here = copied(report, tmp_path)
    _, _ = converted(here / "ckpt", tmp_path / "first")
    base = tmp_path / "base"
    shutil.copytree(tmp_path / "first", base, ignore=shutil.ignore_patterns("ckptkit.json"))
    other = config_of(base)
    other["rope_parameters"]["rope_theta"] = 1.0
    (base / "config.json").write_text(json.dumps(other))
    converted(here / "ckpt", tmp_path / "out", base=base)
    assert config_of(tmp_path / "out") == config_of(tmp_path / "first")


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.quick("automodel", "composer", "veomni")
def test_from_a_store_the_same_is_written(
    tmp_path: Path, object_store: ObjectStore, case: str
) -> None:
    report, path, named = PLACES[case]
    here = copied(report, tmp_path)
    bucket = object_store.bucket(f"places-{abs(hash(case))}")
    bucket.put_tree(here, "run")
    src = Place(f"{bucket.url}/run/{path}".removesuffix("/."), object_store.options)
    tensors, notes = converted(src, tmp_path / "out")
    assert_same(tensors, load_file(report / "truth.safetensors"))
    assert [note for note in notes if note.endswith(named)], notes
    converted(here / path, tmp_path / "local")
    for file in (tmp_path / "local").glob("*.json"):
        if file.name != "ckptkit.json":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_no_folder_of_side_files_is_shown_as_ignored() -> None:
    for report in (AUTOMODEL, NEMO_RL, VEOMNI):
        ignored = ckptkit.inspect(report / "ckpt").ignored
        assert not [group for group in ignored if "hf_metadata" in str(group)]


def consolidated(tmp_path: Path) -> Path:
    """A step of NeMo Automodel with `save_consolidated`, and nothing in `.hf_metadata`."""
    step = copied(AUTOMODEL, tmp_path) / "ckpt/epoch_0_step_100"
    whole = step / "model/consolidated"
    whole.mkdir()
    for file in (step / "model/.hf_metadata").iterdir():
        if not file.name.startswith("fqn"):
            file.rename(whole / file.name)
    tensors = load_file(AUTOMODEL / "truth.safetensors")
    save_file(tensors, whole / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    document = json.dumps({"metadata": {}, **index})
    (whole / "model.safetensors.index.json").write_text(document)
    return step


def test_a_model_that_automodel_consolidated_is_taken_and_its_shards_are_left(
    tmp_path: Path,
) -> None:
    step = consolidated(tmp_path)
    tensors, notes = converted(step, tmp_path / "out")
    assert_same(tensors, load_file(AUTOMODEL / "truth.safetensors"))
    assert "'model' holds the shards of the same model: left alone" in notes
    assert config_of(tmp_path / "out")["rope_parameters"]["rope_theta"] == 12345.0
    found = ckptkit.inspect(step.parent)
    assert (found.step, found.model_type) == (100, "qwen2")


def test_a_consolidated_model_that_differs_from_its_shards_is_a_choice(tmp_path: Path) -> None:
    step = consolidated(tmp_path)
    file = step / "model/consolidated/model-00001-of-00001.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
    (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AmbiguousSourceError) as caught:
        ckptkit.consolidate(step, tmp_path / "out")
    assert "--select model " in caught.value.hint
    again, _ = converted(step, tmp_path / "out", select="model")
    assert_same(again, load_file(AUTOMODEL / "truth.safetensors"))


def veomni_step(run: Path, step: int, *, value: float) -> None:
    """A step in the layout of VeOmni's main branch: parts of one model in folders of their own.

    Source: veomni/checkpoint/layout.py.
    """
    folder = run / f"checkpoints/global_step_{step}"
    model = model_of("Qwen2")
    state = {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}
    trained(folder / "model/ckpt", state)
    moments = {f"state.{name}.exp_avg": torch.ones(2) for name in state}
    dcp.save({"optimizer": moments}, checkpoint_id=folder / "model/optimizer", no_dist=True)
    for part in ("extra_state", "loader"):
        (folder / part).mkdir()
        for rank in range(2):
            torch.save({"rng": torch.zeros(4), "step": step}, folder / part / f"rank_{rank}.pt")
    (folder / "checkpoint_manifest.json").write_text(json.dumps({"global_step": step}))
    (folder / "hf_ckpt").mkdir()
    save_file(state, folder / "hf_ckpt/model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(run / "model_assets")


def test_the_parts_of_a_step_of_veomni_are_one_checkpoint(tmp_path: Path) -> None:
    for step in (9, 10):
        veomni_step(tmp_path / "run", step, value=step)
    for src in ("run", "run/checkpoints", "run/checkpoints/global_step_10"):
        tensors, notes = converted(tmp_path / src, tmp_path / "out", overwrite=True)
        assert values_of(tensors) == {10.0}
        assert config_of(tmp_path / "out")["model_type"] == "qwen2"
        assert [note for note in notes if "hf_ckpt/model.safetensors" in note]
    assert names_of(tmp_path / "run/checkpoints") == ["global_step_9", "global_step_10"]
    copy, _ = converted(
        tmp_path / "run", tmp_path / "copy", select="checkpoints/global_step_9/hf_ckpt"
    )
    assert values_of(copy) == {9.0}


# --- files inside a state dict ---


UNKNOWN = "<unk>"


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate([UNKNOWN, "a", "b", "café", "d"])}
    inner = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=UNKNOWN)


def metadata_of(model: Any, folder: Path) -> dict[str, Any]:
    """What Composer's `HuggingFaceModel.get_metadata` returns: files by their stems."""
    tokenizer().save_pretrained(folder)
    config = json.loads(model.config.to_json_string(use_diff=False))
    files: dict[str, Any] = {}
    for path in folder.iterdir():
        files[path.stem] = {
            "file_extension": path.suffix,
            "content": json.loads(path.read_text())
            if path.suffix == ".json"
            else path.read_text().split("\n"),
        }
    files["merges"] = {"file_extension": ".txt", "content": ["#version", "a b", ""]}
    files["tokenizer"] = files.pop("tokenizer")
    content = {"file_extension": ".json", "content": config, "class": "x.LlamaForCausalLM"}
    return {"model": {"config": content}, "tokenizer": files}


def composer_state(model: Any, folder: Path, batch: int) -> dict[str, Any]:
    return {
        "state": {
            "model": {f"model.{name}": value for name, value in model.state_dict().items()},
            "timestamp": {"Timestamp": {"epoch": 1, "batch": batch}},
            "integrations": {"huggingface": metadata_of(model, folder)},
        },
        "rng": [{"torch": torch.zeros(8, dtype=torch.uint8)}],
    }


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_side_files_inside_a_state_dict_are_written_as_the_files_that_they_were(
    tmp_path: Path, kind: str
) -> None:
    model = model_of(rope_theta=4321.0)
    state = composer_state(model, tmp_path / "tokenizer", 7)
    run = tmp_path / "run"
    if kind == "file":
        run.mkdir()
        torch.save(state, run / "ep1-ba7-rank0.pt")
    else:
        dcp.save(state, checkpoint_id=run / "ep1-ba7", no_dist=True)
    out = tmp_path / "out"
    tensors, notes = converted(run, out)
    assert_same(tensors, dict(model.state_dict()))
    assert [note for note in notes if note.startswith("all names begin with 'model.'")]
    for file in (tmp_path / "tokenizer").iterdir():
        assert json.loads((out / file.name).read_text()) == json.loads(file.read_text()), file
    assert (out / "merges.txt").read_text() == "#version\na b\n"
    assert config_of(out)["rope_parameters"]["rope_theta"] == 4321.0
    assert config_of(out)["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    loads(out)
    assert AutoTokenizer.from_pretrained(out)("a café")["input_ids"] == [1, 3]
    found = ckptkit.inspect(run)
    assert (found.step, found.model_type) == (7, "llama")


@pytest.mark.parametrize(
    "content",
    [
        torch.ones(2),
        {"vocab_size": torch.float32},
        {"a": {1: float("nan"), 2: b"bytes"}},
        [[{}], []],
        None,
    ],
    ids=["tensor", "an object", "bytes", "a list", "nothing"],
)
def test_what_is_no_configuration_in_its_place_is_not_taken_for_one(
    tmp_path: Path, content: Any
) -> None:
    model = model_of()
    state = composer_state(model, tmp_path / "tokenizer", 7)
    state["state"]["integrations"]["huggingface"]["model"]["config"]["content"] = content
    torch.save(state, tmp_path / "ep1-ba7-rank0.pt")
    try:
        _, notes = converted(tmp_path / "ep1-ba7-rank0.pt", tmp_path / "out")
    except CkptkitError:
        assert not (tmp_path / "out").exists()
    else:
        assert not (tmp_path / "out/config.json").exists()
        assert [note for note in notes if "config.json" in note]


# --- LeRobot ---


def test_a_policy_of_lerobot_is_one_model(tmp_path: Path) -> None:
    for path in ("ckpt", "ckpt/000200", "ckpt/000200/pretrained_model"):
        tensors, _ = converted(LEROBOT / path, tmp_path / "out", overwrite=True)
        assert_same(tensors, load_file(LEROBOT / "truth.safetensors"))
    found = ckptkit.inspect(LEROBOT / "ckpt")
    assert [(tree.name, tree.part) for tree in found.trees] == [("", "model")]
    assert found.step == 200


def test_files_like_those_of_a_processor_are_models_without_its_description(tmp_path: Path) -> None:
    """Only beside NAME.json is NAME_step_1.safetensors a part of a processor."""
    state = {"a.weight": torch.ones(2)}
    save_file(state, tmp_path / "policy_preprocessor_step_1.safetensors")
    assert ckptkit.inspect(tmp_path).tensors
    (tmp_path / "policy_preprocessor.json").write_text("{}")
    with pytest.raises(NotACheckpointError):
        ckptkit.inspect(tmp_path)


@pytest.mark.parametrize("kind", ["link", "text", "copy"])
def test_the_last_step_of_lerobot_is_no_further_one(tmp_path: Path, kind: str) -> None:
    run = copied(LEROBOT, tmp_path) / "ckpt"
    (run / "last").unlink()
    if kind == "link":
        (run / "last").symlink_to("000200")
    elif kind == "text":
        (run / "last").write_text("000200")
    else:  # as `aws s3 sync` makes it of a link
        shutil.copytree(run / "000200", run / "last")
    tensors, notes = converted(run, tmp_path / "out")
    assert_same(tensors, load_file(LEROBOT / "truth.safetensors"))
    assert "000200 is used; 1 older step left alone" in notes
    assert names_of(run) == ["000100", "000200"]


# --- runs ---


def at_names(report: Path, *names: str) -> Callable[[Path], Path]:
    """Returns what makes a run whose steps are copies of the only one of a report."""
    (step,) = [path for path in sorted((report / "ckpt").iterdir()) if path.name[0] in "es"]

    def make(folder: Path) -> Path:
        folder.mkdir()
        for name in names:
            if step.is_dir():
                shutil.copytree(step, folder / name)
            else:
                shutil.copy(step, folder / name)
        return folder

    return make


def sharded(*names: str, state: Callable[[int], dict[str, Any]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for number, name in enumerate(names):
            dcp.save(state(number), checkpoint_id=folder / name, no_dist=True)
        return folder

    return make


def prefixed(*names: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for name in names:
            shutil.copytree(PREFIXES / "ckpt/step-5", folder / name)
        return folder

    return make


def weights(number: int) -> dict[str, Any]:
    return {"state": {"model": {"a.weight": torch.full((2, 2), float(number))}}}


# In the order of their steps, with the number of the newest.
RUNS = {
    "automodel": (
        at_names(AUTOMODEL, "epoch_0_step_99", "epoch_0_step_100", "epoch_1_step_150"),
        150,
    ),
    "nemo-rl": (at_names(NEMO_RL, "step_9", "step_10", "step_100"), 100),
    "composer": (sharded("ep0-ba9", "ep0-ba10", "ep1-ba100", state=weights), 100),
    "composer, files": (
        at_names(COMPOSER, "ep0-ba9-rank0.pt", "ep0-ba10-rank0.pt", "ep1-ba100-rank0.pt"),
        100,
    ),
    "megatron in nemo-rl": (
        sharded(
            *(f"step_{step}/policy/weights/iter_0000000" for step in (9, 10, 100)), state=weights
        ),
        100,
    ),
    "prefixes": (prefixed("step-9", "step-10", "step-100"), 100),
}


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.quick("composer", "prefixes")
def test_steps_are_listed_pruned_and_taken_by_their_numbers(tmp_path: Path, case: str) -> None:
    make, newest = RUNS[case]
    run = make(tmp_path / "exp")
    names = names_of(run)
    assert len(names) == 3
    assert [step.step for step in list_run(run).steps] == [
        9 if newest == 100 else 99,
        *([10, 100] if newest == 100 else [100, 150]),
    ]
    assert states_of(run) == [True] * 3
    assert os.fspath(find_run(tmp_path)) == str(run)
    listed = run_command("ls", tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert f"resume from {names[2]}" in listed.stdout
    for src in (run, tmp_path):
        assert (
            ckptkit.inspect(src).path.split("/")[-1]
            == (run.name if case == "composer, files" else names[2])
            or case == "megatron in nemo-rl"
        )
        assert ckptkit.inspect(src).step == newest or case == "composer, files"
    dry = run_command("prune", run, "--keep-last", "1", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert names_of(run) == names
    ckptkit.consolidate(run, tmp_path / "out")
    one = run / names[2]
    (shutil.rmtree if one.is_dir() else os.unlink)(one)
    assert names_of(run) == names[:2]
    _, notes = converted(run, tmp_path / "next")
    assert [note for note in notes if "1 older step left alone" in note], notes


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.quick("automodel")
def test_pruning_leaves_the_newest_steps(tmp_path: Path, case: str) -> None:
    run = RUNS[case][0](tmp_path / "exp")
    names = names_of(run)
    for number, name in enumerate(names):  # as they were saved, one after the other
        for path in [run / name, *(run / name).rglob("*")]:
            os.utime(path, (number + 1e9, number + 1e9))
    pruned = ckptkit.prune(run, keep_last=1)
    assert [step.name for step in pruned.removed] == names[:2]
    assert [path.name for path in run.iterdir()] == names[2:]


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.quick("composer")
def test_a_run_on_a_store_is_listed_and_pruned_as_one_on_a_disk(
    tmp_path: Path, object_store: ObjectStore, case: str
) -> None:
    run = RUNS[case][0](tmp_path / "exp")
    bucket = object_store.bucket(f"runs-{abs(hash(case))}")
    bucket.put_tree(run, "exp")
    place = Place(f"{bucket.url}/exp", object_store.options)
    assert names_of(place) == names_of(run)
    assert states_of(place) == [True] * 3
    assert ckptkit.inspect(place).step == ckptkit.inspect(run).step
    pruned = ckptkit.prune(place, keep_last=1)
    newest = names_of(run)[2]
    removed = {step.name for step in pruned.removed}
    assert removed
    assert newest not in removed
    left = {key.split("/")[1] for key in bucket.keys("exp/")}
    assert left == set(names_of(run)) - removed


def test_a_step_that_is_files_of_several_ranks_is_removed_as_a_whole(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for batch in (1, 2):
        for rank in range(2):
            state = {"state": {"model": {"a.weight": torch.full((2, 2), batch)}}}
            torch.save(state, run / f"ep0-ba{batch}-rank{rank}.pt")
            os.utime(run / f"ep0-ba{batch}-rank{rank}.pt", (1e9 + batch, 1e9 + batch))
    assert names_of(run) == ["ep0-ba1-rank0.pt", "ep0-ba2-rank0.pt"]
    assert [len(step.files) for step in list_run(run).steps] == [2, 2]
    ckptkit.prune(run, keep_last=1)
    left = sorted(path.name for path in run.iterdir())
    assert left == ["ep0-ba2-rank0.pt", "ep0-ba2-rank1.pt"]
    tensors, _ = converted(run, tmp_path / "out")
    assert values_of(tensors) == {2.0}


def test_a_step_that_is_being_read_stays_though_it_is_a_file(tmp_path: Path) -> None:
    run = RUNS["composer, files"][0](tmp_path / "exp")
    with open_checkpoint(run / "ep0-ba9-rank0.pt"):
        pruned = ckptkit.prune(run, keep_last=1)
    assert "ep0-ba9-rank0.pt" not in [step.name for step in pruned.removed]


@pytest.fixture(params=["link", "folder link", "text", "store's text", "dangling", "copy"])
def latest(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run of Composer with each form of what it names the latest checkpoint."""
    kind = request.param
    run = RUNS["composer" if kind == "folder link" else "composer, files"][0](tmp_path / "exp")
    target = "ep1-ba100" if kind == "folder link" else "ep1-ba100-rank0.pt"
    name = run / "latest-rank0.pt"
    if kind == "text":
        name.write_text(target)
    elif kind == "store's text":
        (run / "latest-rank0.pt.symlink").write_text(f"exp/{target}")
    elif kind == "copy":
        torch.save(composer_state(model_of(), tmp_path / "tokenizer", 100), name)
    else:
        name.symlink_to("ep2-ba999-rank0.pt" if kind == "dangling" else target)
    return run


@pytest.mark.quick(1)
def test_what_composer_names_the_latest_is_no_further_step(latest: Path, tmp_path: Path) -> None:
    assert len(names_of(latest)) == 3
    _, notes = converted(latest, tmp_path / "out")
    assert [note for note in notes if "2 older steps left alone" in note], notes
    assert not [note for note in notes if "passed over" in note]


def test_a_text_in_the_place_of_a_link_is_answered_with_what_it_names(tmp_path: Path) -> None:
    run = RUNS["composer"][0](tmp_path / "exp")
    (run / "latest-rank0.pt").write_text("ep1-ba100")
    with pytest.raises(NotACheckpointError, match="names 'ep1-ba100'") as caught:
        ckptkit.inspect(run / "latest-rank0.pt")
    named = caught.value.hint.removeprefix("pass ")
    assert ckptkit.inspect(named).step == 100


def test_a_save_into_prefixes_that_was_interrupted_is_passed_over(tmp_path: Path) -> None:
    run = prefixed("step-5", "step-6")(tmp_path / "exp")
    for step in ("step-7", "step-8"):
        shutil.copytree(PREFIXES / f"ckpt/step-{5 if step == 'step-7' else 15}", run / step)
        (run / step / ".metadata").unlink()
    assert ckptkit.inspect(run).path == str(run / "step-6")
    assert ckptkit.inspect(tmp_path).path == str(tmp_path / "exp/step-6")
    assert states_of(run) == [True, True, False, False]
    assert os.fspath(find_run(tmp_path)) == str(run)


def test_data_beside_a_metadata_of_its_own_stays_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """Only data that has no `.metadata` joins one above, which has no data beside it."""
    shutil.copytree(PREFIXES / "ckpt/step-5", tmp_path / "src")
    dcp.save({"b.weight": torch.ones(2, 2)}, checkpoint_id=tmp_path / "src/ema", no_dist=True)
    assert {tree.name for tree in ckptkit.inspect(tmp_path / "src").trees} == {".metadata", "ema"}
    found = ckptkit.inspect(tmp_path / "src", select="ema")
    assert [line.name for line in found.tensors] == ["b.weight"]


def test_a_checkpoint_in_prefixes_is_verified_and_damage_is_found(tmp_path: Path) -> None:
    src = tmp_path / "step-5"
    shutil.copytree(PREFIXES / "ckpt/step-5", src)
    assert ckptkit.verify(src).ok
    file = src / "1000000000/epoch_5/__1_0.distcp"
    file.rename(tmp_path / "gone")
    with pytest.raises(CkptkitError, match="__1_0"):
        ckptkit.consolidate(src, tmp_path / "out")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_watch_pushes_steps_that_are_files(tmp_path: Path, own_hub: HubServer) -> None:
    run = RUNS["composer, files"][0](tmp_path / "exp")
    for file in run.iterdir():
        os.utime(file, (1e9, 1e9))
    done = watch(run, own_hub.url)
    assert done.returncode == 0, done.stderr + done.stdout
    data = own_hub.read("me/model", "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(data)
    assert_same(
        load_file(tmp_path / "model.safetensors"), load_file(COMPOSER / "truth.safetensors")
    )


def watch(run: Path, url: str) -> Result:
    words = ["--push", "me/model", "--once", "--last-only", "--interval", "0.1"]
    return run_command("watch", run, *words, HF_ENDPOINT=url, HF_TOKEN=TOKEN, HF_HUB_OFFLINE="0")


# --- names ---


@pytest.mark.parametrize(
    "name", ["20240501", "20240501123000", "Qwen3-30B-A3B", "batch_32", "layer_3"]
)
def test_a_name_with_a_number_is_no_step(tmp_path: Path, name: str) -> None:
    for folder in (name, f"{name}-b"):
        torch.save({"a.weight": torch.ones(2)}, buffer := io.BytesIO())
        (tmp_path / "src" / folder).mkdir(parents=True)
        (tmp_path / "src" / folder / "model.pt").write_bytes(buffer.getvalue())
    with pytest.raises(AmbiguousSourceError, match="holds 2 models"):
        ckptkit.consolidate(tmp_path / "src", tmp_path / "out")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def test_torchtunes_recipe_state_is_no_checkpoint(tmp_path: Path) -> None:
    """A run of torchtune has `epoch_0/` and `recipe_state/recipe_state.pt`."""
    model = model_of()
    model.save_pretrained(tmp_path / "run/epoch_0")
    (tmp_path / "run/recipe_state").mkdir()
    state = {"epochs_run": 1, "seed": 0, "optimizer": {"state": {}, "param_groups": []}}
    torch.save(state, tmp_path / "run/recipe_state/recipe_state.pt")
    tensors, _ = converted(tmp_path / "run", tmp_path / "out")
    assert_same(tensors, load_file(tmp_path / "run/epoch_0/model.safetensors"))
    assert ckptkit.verify(tmp_path / "run").ok
