"""Values of every type beside sharded tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("values_run.py")


@pytest.mark.parametrize("layout", ["accelerate", pytest.param("dcp", marks=pytest.mark.slow)])
def test_values_beside_sharded_tensors_come_back_on_two_ranks(
    run_ranks: Callable[..., object], tmp_path: Path, layout: str
) -> None:
    done = run_ranks(SCRIPT, 2, tmp_path, layout)
    assert f"{done.stdout}".count("KEPT") == 2  # type: ignore[attr-defined]
