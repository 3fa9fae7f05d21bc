"""What plain torch, DDP, FULL_STATE_DICT, Lightning, torchtitan and TRL leave behind.

Every case was written by the framework itself; the truth is the live state at the save.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import (
    AmbiguousSourceError,
    IncompleteCheckpointError,
    InputError,
    RefusedError,
    UnsafePickleError,
)
from tests.command_line import run_command
from tests.live_truth import refuse

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
HEAD = "lm_head.weight"
WRAPPED = {
    "net": "net",
    "state_dict_ema": "ema",
    "generator": "G",
    "discriminator": "D",
    "teacher": "teacher",
    "model": "deep",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint, what of it is taken, and what is true of it.

    Attributes:
        folder: The fixture.
        inner: The path to give, below `checkpoint/`.
        select: Which of several state dicts to take.
        truth: The file that holds the truth, without its ending.
        optimizer: The file that holds the truth of the optimizer, or an empty text.
        absent: Names of the truth that the output rightly lacks.
    """

    folder: str
    inner: str = ""
    select: str | None = None
    truth: str = "truth"
    optimizer: str = ""
    absent: frozenset[str] = frozenset()

    @property
    def source(self) -> Path:
        return FIXTURES / self.folder / "checkpoint" / self.inner

    def truth_of(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(FIXTURES / self.folder / f"{name}.safetensors")

    def __str__(self) -> str:
        return "-".join(filter(None, (self.folder, self.inner.replace("/", "_"), self.select)))


TIED = frozenset({HEAD})
OPTIMIZER = "truth_optimizer"
CASES = (
    *(Case("torch_wrapped", select=tree, truth=f"truth_{n}") for tree, n in WRAPPED.items()),
    Case("torch_wrapped", select="net", truth="truth_net", optimizer=OPTIMIZER),
    Case("torch_legacy"),
    Case("torch_legacy_training"),
    Case("accelerate_ddp", select="model.safetensors"),
    Case("accelerate_ddp", select="model_1.safetensors", truth="truth_1", absent=TIED),
    Case("accelerate_ddp_bin", optimizer=OPTIMIZER),
    Case("accelerate_fsdp2_full", select="pytorch_model_fsdp.bin", optimizer=OPTIMIZER),
    Case(
        "accelerate_fsdp2_full",
        select="pytorch_model_fsdp_1.bin",
        truth="truth_1",
        optimizer="truth_optimizer_1",
    ),
    Case("trainer_ddp", absent=TIED),
    Case("trainer_ddp", "checkpoint-4", absent=TIED),
    Case("trainer_fsdp2_full", optimizer=OPTIMIZER, absent=TIED),
    Case("trl_ddp", absent=TIED),
    Case("lightning_trainer_ddp", optimizer=OPTIMIZER),
    Case("lightning_trainer_ddp", "last.ckpt"),
    Case("lightning_trainer_ddp", select="epoch=0-step=4.ckpt"),
    Case("lightning_hyperparameters"),
    Case("lightning_trainer_sharded", optimizer=OPTIMIZER),
    Case("lightning_trainer_sharded", "last.ckpt"),
    Case("lightning_trainer_sharded", select="last.ckpt"),
    Case("lightning_fabric_sharded", optimizer=OPTIMIZER),
    Case("torchtitan_steps", optimizer=OPTIMIZER),
    Case("torchtitan_steps", "step-10"),
    Case("torchtitan_model_only"),
    Case("torchtitan_0_3_steps", optimizer=OPTIMIZER),
    Case("verl_0_9_fsdp2", optimizer=OPTIMIZER, absent=TIED),
    Case("fsdp2_wrapped", select="model"),
)
Image = tuple[torch.dtype, tuple[int, ...], bytes]


def images(tensors: dict[str, torch.Tensor]) -> dict[str, Image]:
    return {
        name: (
            t.dtype,
            tuple(t.shape),
            t.contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
        for name, t in tensors.items()
    }


def written(source: Path, out: Path, **options: Any) -> dict[str, Image]:
    ckptkit.consolidate(source, out, **options)
    return images(load_file(out / "model.safetensors"))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.quick(
    "accelerate_ddp-model_1.safetensors",
    "accelerate_fsdp2_full-pytorch_model_fsdp_1.bin",
    "lightning_fabric_sharded",
    "lightning_hyperparameters",
    "lightning_trainer_sharded-last.ckpt0",
    "torch_legacy_training",
    "torch_wrapped-net1",
    "torchtitan_steps-step-10",
    "trainer_ddp",
    "trl_ddp",
)
def test_what_comes_out_is_bit_equal_to_the_live_state(case: Case, tmp_path: Path) -> None:
    truth = {n: t for n, t in case.truth_of(case.truth).items() if n not in case.absent}
    out = tmp_path / "out"
    found = written(case.source, out, select=case.select, optimizer=bool(case.optimizer))
    assert found == images(truth)
    with ckptkit.open(case.source, select=case.select) as checkpoint:
        assert images({name: checkpoint[name] for name in truth}) == images(truth)
    if case.optimizer:
        file = torch.load(out / "optimizer.bin", weights_only=True)  # noqa: TID251 - the oracle
        states = {
            f"state.{name}.{kind}": value
            for name, kinds in file["state"].items()
            for kind, value in kinds.items()
        }
        assert images(states) == images(case.truth_of(case.optimizer))
        members = [name for group in file["param_groups"] for name in group["params"]]
        assert file["state"].keys() <= set(members)


@pytest.mark.parametrize(
    ("folder", "select"),
    [
        ("torch_legacy", None),
        ("accelerate_fsdp2_full", "pytorch_model_fsdp_1.bin"),
        ("lightning_trainer_sharded", None),
        ("torchtitan_steps", None),
    ],
)
@pytest.mark.parametrize("layout", ["torch", "dcp"])
@pytest.mark.quick("dcp-torch_legacy-None", "torch-lightning_trainer_sharded-None")
def test_conversions_hold_the_same(
    folder: str, select: str | None, layout: Literal["torch", "dcp"], tmp_path: Path
) -> None:
    truth = "truth_1" if select else "truth"
    ckptkit.convert(FIXTURES / folder / "checkpoint", tmp_path / "o", to=layout, select=select)
    expected = Case(folder).truth_of(truth)
    with ckptkit.open(tmp_path / "o") as checkpoint:
        assert images({name: checkpoint[name] for name in expected}) == images(expected)


def test_lightnings_own_consolidator_agrees(tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    source = Case("lightning_fabric_sharded").source / "state.ckpt"
    theirs = _load_distributed_checkpoint(source)
    assert written(source, tmp_path / "out") == images(theirs["network"])


def test_torch_loads_what_a_legacy_file_is_converted_to(tmp_path: Path) -> None:
    case = Case("torch_legacy_training")
    ckptkit.convert(case.source, tmp_path / "out", to="torch")
    loaded = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)  # noqa: TID251
    assert images(loaded) == images(case.truth_of("truth"))


FACTS = {
    "torch_wrapped": ("torch.save", "", 12),
    "torch_legacy": ("torch.save", "", None),
    "trainer_ddp": ("Transformers Trainer, safetensors", "", 4),
    "lightning_trainer_ddp": ("Lightning Trainer", "2.6.6", 4),
    "lightning_trainer_sharded": (
        *("torch.distributed.checkpoint of torch 2.9 or later, Lightning Trainer", "2.6.6", 4),
    ),
    "lightning_fabric_sharded": (
        *("torch.distributed.checkpoint of torch 2.9 or later, Lightning Fabric", "", 10),
    ),
    "torchtitan_steps": (
        *("torch.distributed.checkpoint of torch 2.9 or later, torchtitan", "", 10),
    ),
}


@pytest.mark.parametrize("folder", FACTS)
def test_inspect_tells_who_wrote_it_and_when(folder: str) -> None:
    found = ckptkit.inspect(Case(folder).source)
    assert (found.writer, found.version, found.step) == FACTS[folder]
    assert not found.problems


def test_a_legacy_file_says_that_nothing_in_it_can_be_proven() -> None:
    found = ckptkit.inspect(Case("torch_legacy").source)
    assert any("before 1.6, without checksums" in note for note in found.notes)
    assert ckptkit.verify(Case("torch_legacy").source).unverified


def test_several_models_of_one_file_are_told_apart_by_name(tmp_path: Path) -> None:
    with pytest.raises(AmbiguousSourceError, match="holds 6 models: 'net', 'state_dict_ema'"):
        ckptkit.consolidate(Case("torch_wrapped").source, tmp_path / "out")


@pytest.mark.parametrize("folder", ["accelerate_ddp", "accelerate_fsdp2_full"])
def test_several_models_of_one_save_are_told_apart_by_file(folder: str, tmp_path: Path) -> None:
    refuse(r"_1\.", Case(folder).source, tmp_path / "out", kind=AmbiguousSourceError)


def test_models_saved_by_hand_lose_the_segments_of_activation_checkpoints(tmp_path: Path) -> None:
    truth = Case("fsdp2_wrapped").truth_of("truth")
    found = written(Case("fsdp2_wrapped").source, tmp_path / "out", select="by_hand")
    assert found.pop("scratch")  # a buffer that state dicts leave out
    assert found == {name: image for name, image in images(truth).items() if name in found}
    assert truth.keys() - found.keys() == {"head.weight"}  # named once, as the embedding


# Optimizers that number their parameters


@pytest.mark.parametrize("folder", ["trainer_ddp", "trl_ddp"])
def test_numbered_states_whose_parameters_are_not_known_are_refused(
    folder: str, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match="has a number and no name") as caught:
        ckptkit.consolidate(Case(folder).source, tmp_path / "out", optimizer=True)
    assert "named_parameters" in caught.value.hint
    assert not (tmp_path / "out").exists()


def _numbered(folder: Path, groups: list[list[int]], shapes: list[tuple[int, ...]]) -> Path:
    """A file with three parameters, a buffer, and an optimizer that numbers parameters."""
    folder = folder / "run"
    folder.mkdir()
    model = {
        "a.weight": torch.ones(2, 3),
        "n.weight": torch.ones(4),
        "n.running_mean": torch.ones(4),
        "b.weight": torch.ones(5),
    }
    state = {number: {"exp_avg": torch.zeros(shape)} for number, shape in enumerate(shapes)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": g} for g in groups]}
    torch.save({"model": model, "optimizer": optimizer}, folder / "last.pt")
    return folder


FITTING = [(2, 3), (4,), (5,)]


@pytest.mark.parametrize(
    ("groups", "shapes", "named"),
    [
        ([[0, 1, 2]], FITTING, "anb"),
        ([[0, 1], [2]], FITTING, "anb"),
        ([[0], [1, 2]], [(5,), (2, 3), (4,)], "ban"),
        ([[0, 1]], FITTING[1:], "nb"),
    ],
)
def test_numbered_states_get_names_where_every_shape_fits_in_one_way(
    groups: list[list[int]], shapes: list[tuple[int, ...]], named: str, tmp_path: Path
) -> None:
    found = ckptkit.inspect(_numbered(tmp_path, groups, shapes))
    names = [line.name for line in found.tensors if line.part == "optimizer"]
    assert sorted(names) == sorted(f"state.{name}.weight.exp_avg" for name in named)
    (note,) = (note for note in found.notes if "numbers its parameters" in note)
    assert "named_parameters" not in note  # which nothing could prove better


@pytest.mark.parametrize("is_named", [False, True])
def test_where_shapes_are_equal_a_note_says_what_to_do(is_named: bool, tmp_path: Path) -> None:
    """Of equal shapes the order alone tells which is which, and any order may have been given."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    given = {**dict(model[1].named_parameters("1")), **dict(model[0].named_parameters("0"))}
    optimizer = torch.optim.AdamW(given.items() if is_named else given.values())
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    states = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in given.items()}
    source = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    done = run_command("consolidate", source, tmp_path / "out", "--optimizer", "--names", "live")
    said = "leave its states out, and save with `model.named_parameters()`"
    for text in (" ".join(ckptkit.inspect(source).notes), " ".join(done.stderr.split())):
        assert ("numbers its parameters" in text, said in text) == (not is_named, not is_named)
    found = torch.load(tmp_path / "out" / "optimizer.bin")["state"]  # noqa: TID251
    are_right = all(torch.equal(found[name]["exp_avg"], state) for name, state in states.items())
    assert are_right == is_named


@pytest.mark.parametrize(
    ("groups", "shapes"),
    [
        ([[0, 2, 1]], FITTING),
        ([[0, 1, 2]], [(4,), (2, 3), (5,)]),
        ([[0, 1], [2]], [(2, 3), (4,), (4,)]),
        ([[0, 1, 2]], [(3, 2), (4,), (5,)]),
        ([[0, 1, 2]], [(2, 3), (4,), (4,)]),
        ([[0, 1, 2, 3]], [(2, 3), (4,), (4,), (5,)]),
    ],
)
def test_numbered_states_stay_numbered_where_anything_does_not_fit(
    groups: list[list[int]], shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    source = _numbered(tmp_path, groups, shapes)
    names = {line.name for line in ckptkit.inspect(source).tensors if line.part == "optimizer"}
    assert names == {f"state.{number}.exp_avg" for number in range(len(shapes))}
    refuse("has a number and no name", source, tmp_path / "out", kind=RefusedError, optimizer=True)


# Files of optimizers


def test_an_optimizers_file_that_cannot_be_read_is_told_and_keeps_no_model_back(
    tmp_path: Path,
) -> None:
    case = Case("accelerate_ddp_bin")
    source = tmp_path / "step"
    shutil.copytree(case.source, source)
    torch.save({"state": {}, "param_groups": [shutil.rmtree]}, source / "optimizer.bin")
    found = ckptkit.inspect(source)
    assert any("optimizer.bin was left unread" in note and "rmtree" in note for note in found.notes)
    assert written(source, tmp_path / "out") == images(case.truth_of("truth"))
    with pytest.raises(UnsafePickleError, match=r"optimizer\.bin.*rmtree"):
        ckptkit.consolidate(source, tmp_path / "o", optimizer=True)
    (source / "optimizer.bin").write_bytes((case.source / "optimizer.bin").read_bytes()[:-300])
    assert [problem.where for problem in ckptkit.inspect(source).problems] == ["optimizer.bin"]
    assert not ckptkit.verify(source).ok


def test_an_optimizers_file_without_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    shutil.copy(Case("accelerate_ddp_bin").source / "optimizer.bin", tmp_path)
    with pytest.raises(InputError):
        ckptkit.inspect(tmp_path)


def test_a_file_that_is_an_optimizer_alone_holds_no_model(tmp_path: Path) -> None:
    shutil.copy(Case("accelerate_ddp_bin").source / "optimizer.bin", tmp_path / "saved.pt")
    with pytest.raises(IncompleteCheckpointError, match="holds no model tensor"):
        ckptkit.consolidate(tmp_path / "saved.pt", tmp_path / "out")


# Lightning


@pytest.mark.parametrize("change", ["hostile", "cut short", "gone"])
def test_the_weights_do_not_need_meta_pt(change: str, tmp_path: Path) -> None:
    case = Case("lightning_fabric_sharded", "state.ckpt")
    source = tmp_path / "state.ckpt"
    shutil.copytree(case.source, source)
    meta = source / "meta.pt"
    if change == "hostile":
        torch.save({"step": 3, "callback": shutil.rmtree}, meta)
    elif change == "cut short":
        meta.write_bytes(meta.read_bytes()[:-200])
    else:
        meta.unlink()
    assert written(source, tmp_path / "out") == images(case.truth_of("truth"))
    found = ckptkit.inspect(source)
    assert any("rmtree" in note for note in found.notes) == (change == "hostile")
    assert bool(found.problems) == (change == "cut short")
    assert ("Lightning" in found.writer) == (change != "gone")


def test_of_files_named_by_steps_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(Case("lightning_trainer_ddp").source, run)
    assert "epoch=0-step=4.ckpt was taken" in ckptkit.inspect(run).notes
    assert ckptkit.inspect(run, select="epoch=0-step=2.ckpt").step == 2
    newest = run / "epoch=0-step=4.ckpt"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert "last.ckpt was taken" in ckptkit.inspect(run).notes
    (run / "last.ckpt").unlink()
    found = ckptkit.inspect(run)
    assert found.step == 2
    assert any(note.startswith("epoch=0-step=4.ckpt was passed over") for note in found.notes)


def test_the_last_of_a_run_counts_by_the_step_that_it_holds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(Case("lightning_trainer_ddp").source, run)
    (run / "epoch=0-step=4.ckpt").unlink()
    assert "last.ckpt was taken" in ckptkit.inspect(run).notes
    torch.save({"state_dict": {"a.weight": torch.ones(1)}}, run / "last.ckpt")
    with pytest.raises(AmbiguousSourceError, match=r"'last\.ckpt', 'epoch=0-step=2\.ckpt'"):
        ckptkit.inspect(run)


def test_files_that_count_different_things_are_not_one_run(tmp_path: Path) -> None:
    for name in ("generator_epoch_1.pth", "generator_epoch_2.pth", "critic_epoch_9.pth"):
        torch.save({"a.weight": torch.ones(1)}, tmp_path / name)
    assert len({tree.name for tree in ckptkit.inspect(tmp_path).trees}) == 3
    (tmp_path / "critic_epoch_9.pth").unlink()
    assert "generator_epoch_2.pth was taken" in ckptkit.inspect(tmp_path).notes


@pytest.mark.parametrize("case", ["zero3_bf16", "zero2_round_robin"])
def test_lightnings_deepspeed_folders_are_read_as_deepspeeds(case: str, tmp_path: Path) -> None:
    step = next(path for path in (FIXTURES / case / "checkpoint").iterdir() if path.is_dir())
    source = tmp_path / "run" / "epoch=0-step=7.ckpt"
    shutil.copytree(step, source / "checkpoint")
    (source / "latest").write_text("checkpoint")
    (source / "zero_to_fp32.py").write_text("")
    assert written(source, tmp_path / "out") == images(Case(case).truth_of("truth"))
    assert ckptkit.inspect(tmp_path / "run").path == str(source)


# torchtitan


def test_of_torchtitans_steps_the_newest_is_taken_and_step_0_is_a_step(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "checkpoint"
    shutil.copytree(Case("torchtitan_model_only").source / "step-10", run / "step-0")
    assert ckptkit.inspect(tmp_path / "outputs").step == 0
    shutil.copytree(Case("torchtitan_steps").source / "step-10", run / "step-5")
    found = written(tmp_path / "outputs", tmp_path / "out")
    assert found == images(Case("torchtitan_steps").truth_of("truth"))
    (run / "step-5" / "__1_0.distcp").unlink()
    assert ckptkit.inspect(run).step == 0


def test_a_finished_model_beside_a_training_file_is_preferred(tmp_path: Path) -> None:
    source = tmp_path / "run"
    source.mkdir()
    torch.save({"model": {"a.weight": torch.ones(1)}}, source / "epoch_3.pt")
    save_file({"x.weight": torch.ones(2)}, source / "model.safetensors")
    assert written(source, tmp_path / "out").keys() == {"x.weight"}


def _loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)  # noqa: TID251  the oracle


def test_states_have_the_names_of_the_model_that_is_written_where_blocks_were_compiled(
    tmp_path: Path,
) -> None:
    """FSDP1's own state dict of an optimizer keeps the segments of `torch.compile`."""
    names = ["up._orig_mod.weight", "up._orig_mod.bias", "plain.weight"]
    groups = [{"lr": 0.5, "params": names}]
    states = {name: {"exp_avg": torch.full((2,), 0.25 * n)} for n, name in enumerate(names)}
    weights = {name: torch.ones(2) for name in names}
    source = tmp_path / "last.pt"
    whole = {"model": weights, "optimizer": {"state": states, "param_groups": groups}}
    torch.save(whole, source)
    ckptkit.convert(source, tmp_path / "out", to="torch", optimizer=True)
    found = _loaded(tmp_path / "out" / "optimizer.bin")
    model = _loaded(tmp_path / "out" / "pytorch_model.bin")
    assert set(found["state"]) == set(model) == {"up.weight", "up.bias", "plain.weight"}
    assert found["param_groups"][0]["params"] == ["up.weight", "up.bias", "plain.weight"]
    assert found["state"]["up.bias"]["exp_avg"].tolist() == [0.25, 0.25]
    ckptkit.convert(source, tmp_path / "one", to="torch", optimizer=True, include=["up.bias"])
    found = _loaded(tmp_path / "one" / "optimizer.bin")
    assert list(found["state"]) == found["param_groups"][0]["params"] == ["up.bias"]


def test_states_that_differ_by_wrapper_segments_alone_are_refused(tmp_path: Path) -> None:
    states = {name: {"exp_avg": torch.ones(2)} for name in ("a.weight", "_orig_mod.a.weight")}
    optimizer = {"state": states, "param_groups": [{"params": [*states]}]}
    weights = {"_orig_mod.a.weight": torch.ones(2)}
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "last.pt")
    with pytest.raises(RefusedError, match=r"both named 'state\.a\.weight\.exp_avg'"):
        ckptkit.convert(tmp_path / "last.pt", tmp_path / "out", to="torch", optimizer=True)
    assert not (tmp_path / "out").exists()


def test_a_model_that_a_file_keeps_beside_its_optimizer_is_chosen_by_itself(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    student = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    teacher = {"model": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}}
    torch.save({"student": student, "teacher": teacher, "step": 7}, tmp_path / "all.pt")
    with pytest.raises(AmbiguousSourceError, match=r"'student\.model', 'teacher'"):
        ckptkit.consolidate(tmp_path / "all.pt", tmp_path / "out")
    ckptkit.consolidate(tmp_path / "all.pt", tmp_path / "out", select="student.model")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
