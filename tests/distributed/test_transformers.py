"""The Trainer and TRL's SFTTrainer saving through ckptkit, beside the stock ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptkit

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
HERE = Path(__file__).parent
SCRIPT = HERE / "transformers_run.py"
RESUMING = ("fsdp2", "fsdp1", "lora2", "lora1")
CHECKS = {
    "keeping": "the best step stays beside the newest, and is loaded at the end; save strategies",
    "only_model": "the model alone is saved and loaded",
    "failing": "training outlives a failed save, and raises if it was the last",
    "model": "save_model writes model or adapter with all that belongs to it, and no token",
    "signals": "a signal to one rank saves and stops all",
    "secrets": "no secret of a run or a step is pushed, whoever pushes it",
    "native": "a model sharded by Transformers resumes bit for bit",
    "nothing": "without shards or known places the Trainer stays as it is",
    "narrow": "a model in bfloat16 that accelerate widens is resumed bit for bit",
    "asked": "a save that was asked for is not lost to the best one, and is reported",
    "hints": "a user of install reads how the Trainer takes an option",
    "skipping": "neither the best step nor the last is skipped",
    "adding": "the save_model of a subclass is called for each step",
    "uploading": "pushes take whole models, and nothing that is being written",
    "adapters": "adapters of all kinds resume, and export what belongs to them",
}


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
def output(run_ranks: Callable[..., object], folder: Path) -> str:
    """What all checks print; the first that fails is the last."""
    done = run_ranks(SCRIPT, 2, folder, *RESUMING, *CHECKS, status=None)
    return f"{done.stdout}{done.stderr}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", RESUMING)
def test_training_is_as_without_ckptkit_and_resumes_bit_for_bit_from_either(
    kind: str, output: str, folder: Path
) -> None:
    assert f"PASSED {kind}\n" in output, output[-8_000:]
    step = folder / f"{kind}-ours/checkpoint-4"
    assert ckptkit.verify(step).problems == ()
    if kind.startswith("fsdp"):
        with ckptkit.open(step) as checkpoint:
            assert all(not name.startswith("base_model") for name in checkpoint)


@pytest.mark.parametrize("check", CHECKS)
def test_the_trainer_keeps_its_promises(check: str, output: str) -> None:
    assert f"PASSED {check}\n" in output, f"{CHECKS[check]}: {output[-8_000:]}"
