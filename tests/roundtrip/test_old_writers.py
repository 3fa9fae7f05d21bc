"""What older releases of torch, accelerate and transformers wrote, against their live state.

Their distributed checkpoints (`dcp_torch_*`) are among the cases of `test_fixtures.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import UnsupportedError
from tests.live_truth import FIXTURES, refuse, written
from tests.tensor_images import images

WITH_FSDP = ("2_4", "2_6", "2_9")
RELEASES = ("2_1", *WITH_FSDP)
FILES = [
    *((release, part) for release in RELEASES for part in ("plain", "legacy", "dtypes")),
    *((release, "full") for release in WITH_FSDP),
]


@pytest.mark.parametrize(("release", "part"), FILES)
@pytest.mark.quick("2_1-legacy", "2_1-plain", "2_4-full", "2_6-dtypes", "2_9-plain")
def test_a_file_of_an_old_release_is_bit_equal_to_the_live_model(
    release: str, part: str, tmp_path: Path
) -> None:
    folder = FIXTURES / f"files_torch_{release}"
    truth = images(folder / f"truth_{part.replace('legacy', 'plain')}.safetensors")
    assert written(folder / "checkpoint" / part, tmp_path / "out") == truth


@pytest.mark.parametrize("release", WITH_FSDP)
def test_local_state_of_an_old_release_is_refused_with_what_is_missing(
    release: str, tmp_path: Path
) -> None:
    source = FIXTURES / f"files_torch_{release}" / "checkpoint" / "local"
    refused = refuse("flat parameters of FSDP1", source, tmp_path / "out", kind=UnsupportedError)
    assert "--model-config" in refused.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "inner", "truth"),
    [
        ("accelerate_0_26_fsdp1", "", "truth"),
        ("accelerate_0_26_fsdp1", "pytorch_model_fsdp_0", "truth"),
        ("trainer_4_36_fsdp1", "", "truth"),
        ("trainer_4_36_fsdp1", "checkpoint-2", "truth_step_2"),
    ],
)
def test_what_accelerate_0_26_and_transformers_4_36_saved_is_the_live_model(
    case: str, inner: str, truth: str, tmp_path: Path
) -> None:
    expected = images(FIXTURES / case / f"{truth}.safetensors")
    assert written(FIXTURES / case / "checkpoint" / inner, tmp_path / "out") == expected


def test_the_optimizer_of_accelerate_0_26_is_the_live_one(tmp_path: Path) -> None:
    folder = FIXTURES / "accelerate_0_26_fsdp1"
    ckptkit.convert(folder / "checkpoint", tmp_path / "out", to="torch", optimizer=True)
    saved = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)  # noqa: TID251
    truth = load_file(folder / "truth_optimizer.safetensors")
    found = {f"state.{n}.{k}": v for n, kinds in saved["state"].items() for k, v in kinds.items()}
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())
