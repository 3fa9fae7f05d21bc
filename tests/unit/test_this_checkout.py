"""Tests run on the packages of their own checkout only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import this_checkout


@pytest.mark.parametrize(
    ("place", "is_refused"),
    [("checkout/cli", False), ("checkout/.venv-lowest/lib", False), ("other/cli", True)],
)
def test_packages_of_another_checkout_are_not_tested(
    place: str, is_refused: bool, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for package in (checkout / "ckptkit", tmp_path / place / "ckptkit_cli"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (checkout / "tests").mkdir()
    shutil.copy(this_checkout.__file__, checkout / "tests")
    code = "import sys; sys.path[:0] = sys.argv[1:]; from tests.this_checkout import *"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; refuse_others()", checkout, tmp_path / place],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    refusal = f"ckptkit_cli is imported from {tmp_path / place}; set PYTHONPATH={checkout}:"
    assert (done.returncode, refusal in done.stderr) == (is_refused, is_refused), done.stderr
