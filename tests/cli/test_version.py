"""`ckptkit --version`, its short form, and what it says for a bug report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.version import __version__

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "numpy", "huggingface_hub", "fsspec", "botocore"}


def run(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "ckptkit"]
    return subprocess.run(
        [sys.executable, *start, *words],
        env=os.environ | {"SECRET_TOKEN": "hf_neverprinted"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_package_runs_as_a_module_and_says_its_version(word: str) -> None:
    done = run(word)
    assert (done.returncode, done.stdout) == (0, f"ckptkit {__version__}\n")


def test_a_bug_report_has_versions_and_limits_and_no_name_of_the_user() -> None:
    done = run("--version", "--verbose", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["ckptkit"] == __version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"numpy", "safetensors", "huggingface_hub", "fsspec"} <= facts["packages"].keys()
    assert facts["usable_cores"] >= 1
    assert str(Path.home()) not in done.stdout
    assert str(Path.cwd()) not in done.stdout
    assert "neverprinted" not in done.stdout
    page = run("-V", "--verbose").stdout.splitlines()
    assert page[0].split() == ["ckptkit", __version__]
    assert [line[:20].strip().replace(" ", "_") for line in page] == [*facts]


IMPORTED = """
import sys
from ckptkit_cli.main import main
main(["--version", "--verbose"])
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_a_bug_report_imports_none_of_what_it_lists() -> None:
    done = run(code=IMPORTED)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.splitlines()[-1].split())


def test_verbose_alone_is_no_command() -> None:
    assert run("--verbose").returncode == 2
