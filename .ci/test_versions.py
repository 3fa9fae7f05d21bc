"""Runs quick tests that need no torch with other versions of the dependencies, and another Python.

    python .ci/test_versions.py lowest|newest PYTHON|each [--may-skip]

`lowest` takes the oldest versions that pyproject.toml allows, `newest` the newest ones. `each`
stands for one interpreter of each later Python that is found on the path, or that pyenv has; of
3.14, say, if this interpreter is a 3.13. The environment is made anew in `.venv-lowest` or
`.venv-newest`, by the uv beside this interpreter. With `--may-skip`, it is no failure if the
packages cannot be had.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
TOOLS = ("certifi", "filelock", "hypothesis", "psutil", "pytest", "pytest-xdist")
TESTED = (
    *("tests/unit/core", "tests/unit/engine", "tests/unit/formats", "tests/unit/lora"),
    *("tests/unit/name_maps", "tests/unit/plan", "tests/unit/runs", "tests/unit/storage"),
    *("tests/unit/diagnosis", "tests/cli/test_help.py", "tests/cli/test_version.py"),
)
_NEEDS_MORE = re.compile(
    r"^\s*(?:from|import) (?:accelerate|peft|torch|transformers)\b", re.MULTILINE
)


def main(mode: str, python: str) -> int:
    """Returns the exit status of the tests; of several interpreters, the first that is not 0."""
    if python == "each":
        later = list(later_interpreters())
        print(f"later Pythons found here: {', '.join(map(str, later)) or 'none'}")
        return next(filter(None, (main(mode, str(found)) for found in later)), 0)
    folder = ROOT / f".venv-{mode}"
    pins = folder / "pins.txt"
    uv("venv", "--clear", "--python", python, folder)
    interpreter = folder / "bin" / "python"
    found = subprocess.run(
        [interpreter, "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    resolution = ["--resolution", RESOLUTIONS[mode], "--python-version", found]
    uv("pip", "compile", *resolution, "--extra", "s3", "pyproject.toml", "--output-file", pins)
    uv("pip", "install", "--python", interpreter, "--requirement", pins, *TOOLS)
    print(f"testing with Python {found} and the {mode} versions in {pins.relative_to(ROOT)}")
    return subprocess.run(
        [
            *(interpreter, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"),
            # The checks of warnings are for the pinned versions.
            *("-o", "addopts=--import-mode=importlib --strict-markers"),
            *("-o", "filterwarnings=default", *TESTED),
            *(f"--ignore={path}" for path in needing_more()),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "cli"},
        check=False,
    ).returncode


def later_interpreters() -> Iterator[Path]:
    """Yields one interpreter of each later minor version."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for minor in range(sys.version_info.minor + 1, 100):
        program = f"python3.{minor}"
        on_path = shutil.which(program)
        found = [*([Path(on_path)] if on_path else ()), *pyenv.glob(f"versions/*/bin/{program}")]
        # pyenv puts a program of each version on the path, which fails unless it is chosen.
        yield from islice(filter(starts, found), 1)


def starts(interpreter: Path) -> bool:
    """Whether it starts at all."""
    return not subprocess.run([interpreter, "-V"], capture_output=True, check=False).returncode


def needing_more() -> list[str]:
    """Returns the test files that import a framework."""
    files = (file for start in TESTED for file in (ROOT / start).rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in sorted(files)
        if _NEEDS_MORE.search(file.read_text(encoding="utf-8"))
    ]


def uv(*arguments: str | Path) -> None:
    done = subprocess.run([UV, "--quiet", *arguments], cwd=ROOT, check=False)
    if done.returncode:
        print(
            f"nothing was tested: uv {' '.join(map(str, arguments))} ended with {done.returncode}"
        )
        sys.exit(0 if "--may-skip" in sys.argv else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
