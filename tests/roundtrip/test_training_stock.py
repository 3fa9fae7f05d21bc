"""What the Checkpointer saved is read by the stock readers of several releases of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit

SCRIPTS = Path(__file__).parent / "stock_readers"
SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
LIMIT_SECONDS = 600
OWN = Path(sys.executable)
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def launch(run_ranks: Callable[..., Any]) -> Callable[..., str]:
    """Runs a script, on ranks where they are given, and returns what it said."""

    def run(python: Path, script: str, *arguments: object, ranks: int = 0) -> str:
        if python != OWN:
            return start(python, script, *arguments, ranks=ranks)
        return str(run_ranks(SCRIPTS / script, max(ranks, 1), *arguments).stdout)

    return run


def start(python: Path, script: str, *arguments: object, ranks: int = 0) -> str:
    """Does so with processes of their own, under torchrun where ranks are given."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [str(python), *(torchrun if ranks else []), str(SCRIPTS / script)]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=os.environ | SETTINGS,
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-6_000:]
    return done.stdout


@pytest.fixture(scope="module")
def saved(launch: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `accelerate/checkpoint-3`, `dcp/checkpoint-3`, and the truth of both."""
    folder = tmp_path_factory.mktemp("saved")
    launch(OWN, "save_step.py", folder, ranks=2)
    return folder


@pytest.fixture(params=["this torch", "torch 2.6"])
def python(request: pytest.FixtureRequest, repository: Path) -> Path:
    """An interpreter: that of the tests, and that of an environment with an older torch."""
    if request.param == "this torch":
        return OWN
    older = repository / ".venv-old-torch/bin/python"
    if not older.exists():
        pytest.skip(f"{older} is not there: `make old-torch` builds it")
    return older


def test_dcp_load_and_its_converter_read_every_tensor(
    launch: Callable[..., str], saved: Path, python: Path
) -> None:
    said = launch(python, "read_step.py", "dcp", saved / "accelerate/checkpoint-3", saved)
    assert said.count("read 15 tensors") == said.count("read 42 tensors") == 2
    said = launch(python, "read_step.py", "dcp", saved / "dcp/checkpoint-3", saved)
    assert said.count("read 57 tensors") == 2


def test_the_functions_of_ckptkit_save_and_load_with_it(python: Path, tmp_path: Path) -> None:
    packages = Path(pytest.__file__).parents[1]  # the site-packages of the tests
    repository = Path(ckptkit.__file__).parents[1]
    said = start(python, "through_the_door.py", tmp_path, repository, packages, ranks=2)
    assert said.count("as saved") == 2
    assert all(ckptkit.verify(tmp_path / step).ok for step in ("step-1", "step-2"))


def test_accelerate_merges_the_weights(
    launch: Callable[..., str], saved: Path, python: Path
) -> None:
    said = launch(python, "read_step.py", "merge", saved / "accelerate/checkpoint-3", saved)
    assert "accelerate merge-weights: read 15 tensors" in said


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_loads_the_whole_state(
    launch: Callable[..., str], saved: Path, python: Path, version: int
) -> None:
    step = saved / "accelerate/checkpoint-3"
    said = launch(python, "read_step.py", "accelerate", step, saved, version, ranks=2)
    assert f"load_state under FSDP{version}: read 15 tensors" in said
    assert "its optimizer: read 42 tensors" in said


@pytest.mark.parametrize("layout", ["accelerate", "dcp"])
def test_our_own_commands_prove_it_whole(saved: Path, layout: str) -> None:
    report = ckptkit.verify(saved / layout)
    assert report.problems == ()
    assert report.unverified == ()
    assert report.tensors == 57
    found = ckptkit.inspect(saved / layout)
    assert (found.writer, found.layout, found.step, found.world_size) == ("ckptkit", layout, 3, 2)
    assert found.metrics == {"loss": 0.5}
