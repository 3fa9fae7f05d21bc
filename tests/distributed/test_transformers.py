"""The Trainer and TRL's SFTTrainer saving through ckptkit, beside the stock ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptkit

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
HERE = Path(__file__).parent
SCRIPT = HERE / "transformers_run.py"
RESUMING = ("fsdp2", "fsdp1", "lora2", "lora1")
OPTIONS = (
    "keeping",
    "only_model",
    "failing",
    "model",
    "signals",
    "pushing",
    "secrets",
    "native",
    "nothing",
)
EDGES = ("narrow", "asked", "hints", "skipping", "adding", "uploading", "adapters")
Found = dict[str, list[str]]  # by check


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE / 'pretending'}:{HERE.parents[1]}")
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def found(run_ranks: Callable[..., object], folder: Path) -> Found:
    """What all checks found."""
    done = run_ranks(SCRIPT, 2, folder, *RESUMING, *OPTIONS, *EDGES, status=None)
    output = f"{done.stdout}{done.stderr}"  # type: ignore[attr-defined]
    lines = re.findall(r"^FOUND (\S+) (.*?) *$", output, re.MULTILINE)
    by_check: Found = {}
    for check, line in lines:
        by_check.setdefault(check, []).append(line)
    missing = [
        check for check in (*RESUMING, *OPTIONS, *EDGES) if "done" not in by_check.get(check, [])
    ]
    assert not missing, f"{missing}: {output[-8_000:]}"
    return by_check


@pytest.mark.parametrize("kind", RESUMING)
def test_saving_changes_nothing_in_training(kind: str, found: Found) -> None:
    assert "undisturbed []" in found[kind]
    assert "steps [2, 4, 6]" in found[kind]


@pytest.mark.parametrize("kind", RESUMING)
def test_a_step_holds_what_the_trainer_puts_there_and_no_arguments(kind: str, found: Found) -> None:
    base = ["base_model_0"] if kind.startswith("lora") else []
    ours = ["ckptkit", "ckptkit.json"]
    stock = ["optimizer_0", "pytorch_model_fsdp_0", "rng_state_0.pth", "rng_state_1.pth"]
    assert f"files {[*base, *ours, *stock, 'scheduler.pt', 'trainer_state.json']}" in found[kind]
    assert "own state as stock's True" in found[kind]


@pytest.mark.parametrize(("kind", "files"), [("fsdp2", 0), ("lora1", 2), ("lora2", 2)])
def test_the_frozen_base_is_linked_into_later_steps(kind: str, files: int, found: Found) -> None:
    assert f"linked {files}" in found[kind]


@pytest.mark.parametrize("kind", RESUMING)
def test_the_newest_complete_step_resumes_bit_for_bit(kind: str, found: Found) -> None:
    assert "ours from ours []" in found[kind]
    assert "losses True" in found[kind]


def test_a_model_in_bfloat16_that_accelerate_widens_is_resumed_bit_for_bit(found: Found) -> None:
    assert "undisturbed []" in found["narrow"]
    assert "ours from ours []" in found["narrow"]
    assert "losses True" in found["narrow"]


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "lora2"])
def test_stock_steps_resume_bit_for_bit(kind: str, found: Found) -> None:
    assert "ours from stock []" in found[kind]


def test_the_empty_adapter_of_a_stock_fsdp1_step_is_refused(found: Found) -> None:
    (line,) = [line for line in found["lora1"] if line.startswith("ours from stock")]
    assert "8 of 8 tensors are not in the checkpoint" in line
    assert "lora_A" in line


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "lora2"])
def test_the_stock_trainer_resumes_as_from_its_own_step(kind: str, found: Found) -> None:
    assert "stock from ours []" in found[kind]


@pytest.mark.parametrize("kind", RESUMING)
def test_the_steps_stand_up_to_verification(kind: str, found: Found, folder: Path) -> None:
    assert found[kind]
    step = folder / f"{kind}-ours/checkpoint-4"
    assert ckptkit.verify(step).problems == ()
    if kind.startswith("fsdp"):
        with ckptkit.open(step) as checkpoint:
            assert all(not name.startswith("base_model") for name in checkpoint)


def test_the_best_step_stays_beside_the_newest_and_is_loaded_at_the_end(found: Found) -> None:
    assert "limit 2 [4, 6] []" in found["keeping"]
    assert "limit 1 [4] []" in found["keeping"]
    assert found["keeping"].count("best checkpoint-4 0.1") == 2


def test_save_strategies_are_kept(found: Found) -> None:
    assert "when best [2, 4] [True, True]" in found["keeping"]
    assert "epochs [3, 6] [True, True]" in found["keeping"]


def test_metrics_lie_in_the_manifest(found: Found) -> None:
    assert any("metrics" in line and "'eval_score'" in line for line in found["keeping"])


def test_the_model_alone_is_saved_and_loaded(found: Found) -> None:
    files = ["ckptkit", "ckptkit.json", "pytorch_model_fsdp_0", "trainer_state.json"]
    assert str(files) in found["only_model"]
    assert "loaded []" in found["only_model"]


def test_training_outlives_a_failed_save_and_raises_if_it_was_the_last(found: Found) -> None:
    assert "between 6 [2, 6]" in found["failing"]
    assert any(line.startswith("end OutputExistsError") for line in found["failing"])
    assert "end 6 [2, 4]" in found["failing"]


def test_a_callback_that_saves_there_as_well_is_refused_or_fails(found: Found) -> None:
    assert "beside install RefusedError 0" in found["failing"]
    assert "beside stock OutputExistsError 2" in found["failing"]
    assert "stock's True" in found["failing"]


@pytest.mark.parametrize("kind", RESUMING)
def test_save_model_writes_model_or_adapter_with_all_that_belongs_to_it(
    kind: str, found: Found
) -> None:
    lora = kind.startswith("lora")
    lines = [line.removeprefix(f"{kind} ") for line in found["model"] if line.startswith(kind)]
    assert f"{8 if lora else 21} lacking []" in lines
    always = ["ckptkit.json", "tokenizer.json", "tokenizer_config.json", "training_args.bin"]
    model = ["config.json", "generation_config.json", "model.safetensors"]
    adapter = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    files = sorted([*always, *(adapter if lora else model)])
    assert f"secret False {files}" in lines
    assert str(sorted([*files, ".ckptkit"])) in lines


def test_a_signal_to_one_rank_saves_and_stops_all(found: Found) -> None:
    assert found["signals"][:2] == ["stopped at its step True", "early True"]


def test_the_saving_of_the_trainer_s_own_that_a_signal_asks_for_still_works(found: Found) -> None:
    assert "own [2] []" in found["signals"]


def test_every_sharded_step_is_pushed_with_its_model_by_a_process_of_its_own(found: Found) -> None:
    steps = [f"checkpoint-{step}" for step in (2, 4, 6)]
    pushed = [str([f"Step {step}" for step in (2, 4, 6)]), f"{steps} True"]
    assert found["pushing"] == [*pushed, "6", "True", "done"]


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints", "every_save", "end"])
def test_no_secret_of_a_run_or_a_step_is_pushed_by_the_trainer_itself(
    strategy: str, found: Found
) -> None:
    assert f"FULL_STATE_DICT {strategy} leaked [] True" in found["secrets"]


def test_no_secret_of_a_sharded_step_is_pushed(found: Found) -> None:
    assert "SHARDED_STATE_DICT checkpoint leaked [] True" in found["secrets"]


def test_a_model_sharded_by_transformers_resumes_bit_for_bit(found: Found) -> None:
    again = ["trained again []", "rates True"]
    assert found["native"] == ["[2, 4, 6]", "ours from ours []", *again, "done"]


def test_without_shards_or_known_places_the_trainer_stays_as_it_is(found: Found) -> None:
    assert found["nothing"].count("replaced False") == 2
    assert "set save_total_limit in the arguments of the Trainer" in found["nothing"]


def test_a_save_that_was_asked_for_is_not_lost_to_the_best_one(found: Found) -> None:
    assert "True True [True, True]" in found["asked"]


def test_what_saves_cost_is_reported_where_the_trainer_reports(found: Found) -> None:
    assert "reported True" in found["asked"]


def test_a_user_of_install_is_told_how_the_trainer_takes_an_option(found: Found) -> None:
    assert found["hints"][:2] == ["True", "3"]


def test_the_final_model_starts_no_process_of_transformers(found: Found) -> None:
    assert found["hints"][2] == "True"


def test_neither_the_best_step_nor_the_last_is_skipped(found: Found) -> None:
    assert "True []" in found["skipping"]


def test_the_save_model_of_a_subclass_is_called_for_each_step(found: Found) -> None:
    assert found["adding"][0] == "['checkpoint-2', 'final']"
    assert found["adding"][1] == "['final']"


def test_pushes_take_whole_models_and_nothing_that_is_being_written(found: Found) -> None:
    assert found["uploading"][:2] == [
        "2 True",
        "['.checkpoint-*', '.ckptkit*', '_*', 'checkpoint-*']",
    ]


def test_adapters_of_all_kinds_resume_and_export_what_belongs_to_them(found: Found) -> None:
    assert found["adapters"][:3] == ["resized []", "embeddings True 10", "prompt []"]
