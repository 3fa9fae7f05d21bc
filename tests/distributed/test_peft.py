"""Steps of adapters of every method of PEFT that FSDP sharded: none becomes a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import RefusedError
from ckptkit.plan.weight_kinds import LORA, METHODS
from ckptkit_cli.inspect import InspectArguments, next_step

peft = pytest.importorskip("peft", minversion="0.21")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("peft_run.py")
ALL = [one.value for one in peft.PeftType]
# Of the names and the parts there are of a tensor, FSDP1 differs for all methods alike.
BY_FSDP1 = ["ADAPTION_PROMPT", "IA3", LORA, "LN_TUNING", "OFT", "PROMPT_TUNING", "VBLORA", "VERA"]
CASES = [("fsdp2", method) for method in ALL] + [("fsdp1", method) for method in BY_FSDP1]


@pytest.fixture(scope="module")
def steps(run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    run_ranks(SCRIPT, 2, folder, *(f"{version}:{method}" for version, method in CASES))
    return folder


@pytest.mark.parametrize(("version", "method"), CASES)
def test_a_sharded_adapter_is_called_what_it_is_and_never_becomes_a_model(
    version: str, method: str, steps: Path, tmp_path: Path
) -> None:
    step, out = steps / version / method, tmp_path / "out"
    inspection = ckptkit.inspect(step)
    proposed = next_step(inspection, InspectArguments(str(step)))
    assert inspection.peft is not None
    assert inspection.peft.method == method
    if method == LORA:
        assert proposed.command.startswith("ckptkit adapter merge")
    else:
        assert f"{METHODS[method].title} of PEFT" in proposed.remark
        assert not proposed.command
        assert "consolidate" not in proposed.remark
    places = [step, *step.glob("pytorch_model*")]
    assert len(places) == (2 if version == "fsdp2" else 1)
    for place in places:
        with pytest.raises(RefusedError, match="--names live") as caught:
            ckptkit.consolidate(place, out)
        assert (METHODS[method].title if method != LORA else "of PEFT") in caught.value.message
        assert not out.exists()
