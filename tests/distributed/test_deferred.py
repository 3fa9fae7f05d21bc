"""Models of `defer_weights`: filled by each rank under the Trainer and accelerate, or refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
Outputs = dict[str, str]
SCRIPT = Path(__file__).with_name("deferred_run.py")
CHECKS = {
    "models": "training begins and ends as without deferring, and as sending it from one rank",
    "heads": "new heads are those of the stock way, and of rank 0",
    "accelerate": "accelerate prepares a deferred model with its optimizer",
    "adapters": "adapters that are added in the block keep their values",
    "methods": "adapters that need the weights are refused at once, others keep their values",
    "evaluating": "evaluating before training is as usual; what nothing would fill gets no memory",
    "page": "the example of the documentation runs",
    "resuming": "a step is resumed without reading the base",
    "refusing": "a model that was changed, or edited where its weights are not, is refused",
    "leaving": "what cannot be deferred is loaded as usual; on one rank only it is refused",
}
KINDS = ("fsdp1", "fsdp2")


@pytest.fixture(scope="module")
def output(run_ranks: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """What all checks print, by the kind of FSDP."""
    by_kind: Outputs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        for kind in KINDS:
            folder = tmp_path_factory.mktemp(kind)
            # The ranks of the other kind are forks, which share what they import.
            words, by_torchrun = (folder, kind, *CHECKS), kind == "fsdp2"
            done = run_ranks(SCRIPT, 2, *words, status=None, torchrun=by_torchrun)
            by_kind[kind] = f"{done.stdout}{done.stderr}"  # type: ignore[attr-defined]
    return by_kind


@pytest.mark.parametrize(("kind", "check"), [*product(KINDS, CHECKS)])
def test_a_deferred_model_is_filled_by_each_rank_or_refused(
    kind: str, check: str, output: Outputs
) -> None:
    assert f"PASSED {check}\n" in output[kind], f"{CHECKS[check]}: {output[kind][-8_000:]}"


def test_the_log_says_why_a_model_is_loaded_as_usual(output: Outputs) -> None:
    log = "".join(output.values())
    assert "loaded as without ckptkit: its files are not safetensors" in log
    assert "loaded as without ckptkit: key_mapping is given" in log
    assert "it is not known where its weights are" in log
