"""Checkpoints of all formats loaded into live models that are sharded over several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankHost, RunRanks, make_runner

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("load_run.py")
MODELS = ("llama", "mixtral", "gpt2", "qwen3_moe")


@pytest.fixture(scope="module")
def run_with_models() -> Iterator[RunRanks]:
    """As `run_ranks`; PEFT and Transformers are imported once, and not by each run."""
    host = RankHost("peft", *(f"transformers.models.{m}.modeling_{m}" for m in MODELS), "deepspeed")
    yield make_runner(host)
    host.close()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "half"), [(2, 0), (4, 1)])
def test_every_format_fills_tensors_that_are_cut_in_any_way_without_a_collective(
    ranks: int, half: int, run_with_models: Callable[..., Any], tmp_path: Path
) -> None:
    run_with_models(SCRIPT, ranks, tmp_path, f"fixtures:{half}")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, "wrappers:one"),
        pytest.param(4, "wrappers:grid", marks=pytest.mark.slow),
        pytest.param(
            2, "wrappers:all back:fsdp1_flat back:fsdp1_orig halves", marks=pytest.mark.slow
        ),
        pytest.param(
            4, "wrappers:all back:fsdp1_flat back:fsdp1_orig halves", marks=pytest.mark.slow
        ),
    ],
)
def test_every_wrapper_is_filled_from_shards_and_from_what_was_made_of_them(
    ranks: int, cases: str, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, ranks, tmp_path, *cases.split())


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "ranks"), [("llama", 2), ("mixtral gpt2", 2), ("qwen3_moe", 4)])
def test_a_model_is_filled_as_from_pretrained_would(
    kinds: str, ranks: int, run_with_models: Callable[..., Any], tmp_path: Path
) -> None:
    run_with_models(SCRIPT, ranks, tmp_path, *(f"pretrained:{kind}" for kind in kinds.split()))


@pytest.mark.slow
def test_a_folder_that_is_no_step_is_resumed_from_as_a_model_alone(
    run_with_models: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_with_models(SCRIPT, 2, tmp_path, "resumed")
    assert "only the model was loaded; as before: optimizer, progress" in done.stderr


def test_damage_in_the_bytes_of_one_rank_stops_that_rank_alone(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "damaged")


@pytest.mark.slow
def test_the_stage_of_a_pipeline_is_filled_from_the_whole_model(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "stages")


@pytest.mark.slow
def test_a_rank_that_is_killed_is_not_waited_for(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 4, tmp_path, "dies", status=1)
    filled = {path.name for path in (tmp_path / "dies").glob("filled_*")}
    assert filled == {"filled_0", "filled_2", "filled_3"}
