"""The offline commands where torch is not installed, and where it is but has no business.

The bare environment holds the wheel of this project and its core dependencies at the pinned
versions. It is kept in pytest's cache, and built anew when pins or metadata change.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
CASE = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config"
EXPERTS = ROOT / "fixtures" / "fsdp2_mixtral"

pytestmark = [pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that commands are run in."""

    folder: Path

    @property
    def python(self) -> Path:
        windows = self.folder / "Scripts" / "python.exe"
        return windows if os.name == "nt" else self.folder / "bin" / "python"

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs its Python, without anything that this process added to the search path."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
        return subprocess.run(
            [self.python, *arguments],
            env=clean,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def ckptkit(self, *arguments: str | Path) -> str:
        """Runs one command, which must succeed, and returns its output."""
        done = self.run("-m", "ckptkit_cli", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"],
        cwd=ROOT,
        check=True,
        timeout=600,
        capture_output=True,
    )


def _build_wheel(folder: Path) -> Path:
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _install(environment: Environment, wheel: Path) -> None:
    """Brings the environment up to date: dependencies when pins change, the wheel when we do."""
    into: list[str | Path] = [
        "--python",
        environment.python,
        "install",
        "--constraint",
        ROOT / "constraints.txt",
    ]
    pins = [(ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml")]
    wanted = (
        hashlib.sha256(b"".join(pins)).hexdigest(),
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )
    stamp = environment.folder / "installed.json"
    found = json.loads(stamp.read_text()) if stamp.exists() else ["", ""]
    stamp.unlink(missing_ok=True)
    if found[0] != wanted[0]:
        create: list[str | Path] = [
            sys.executable,
            "-m",
            "venv",
            "--clear",
            "--without-pip",
            environment.folder,
        ]
        subprocess.run(create, check=True, timeout=120)
        _pip(*into, wheel)
    elif found[1] != wanted[1]:
        _pip(*into, "--no-deps", "--force-reinstall", wheel)
    stamp.write_text(json.dumps(wanted))


@pytest.fixture(scope="session")
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment without torch; parallel test processes share one."""
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("bare-environment")
    with FileLock(folder / "lock", timeout=600):
        environment = Environment(folder / "venv")
        _install(environment, _build_wheel(tmp_path_factory.mktemp("wheel")))
    return environment


@pytest.fixture(scope="session")
def consolidated(bare: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the bare environment makes of a real checkpoint."""
    out = tmp_path_factory.mktemp("bare") / "out"
    bare.ckptkit("consolidate", CASE / "checkpoint", out)
    return out


@pytest.mark.parametrize("module", ["torch", "transformers", "accelerate"])
def test_the_bare_environment_is_bare(bare: Environment, module: str) -> None:
    done = bare.run("-c", f"import {module}")
    assert "ModuleNotFoundError" in done.stderr


def test_the_wheel_carries_both_packages_and_the_typing_mark(bare: Environment) -> None:
    code = (
        "import ckptkit, ckptkit_cli, pathlib\n"
        "print(pathlib.Path(ckptkit.__file__).with_name('py.typed').exists())"
    )
    assert bare.run("-c", code).stdout == "True\n"


def test_inspect_works_without_torch(bare: Environment) -> None:
    found = json.loads(bare.ckptkit("inspect", CASE / "checkpoint", "--json"))
    assert found["format"] == "dcp"
    assert found["problems"] == []
    assert any(tensor["part"] == "model" for tensor in found["tensors"])


def test_consolidate_works_without_torch(consolidated: Path) -> None:
    assert {"config.json", "ckptkit.json", "model.safetensors"} <= {
        file.name for file in consolidated.iterdir()
    }


def test_verify_works_without_torch_on_source_and_output(
    bare: Environment, consolidated: Path
) -> None:
    bare.ckptkit("verify", CASE / "checkpoint")
    bare.ckptkit("verify", consolidated)


def test_diff_works_without_torch_across_formats(bare: Environment, consolidated: Path) -> None:
    bare.ckptkit("diff", CASE / "checkpoint", consolidated)


def test_names_that_transformers_alone_knows_are_refused_with_both_ways_out(
    bare: Environment, tmp_path: Path
) -> None:
    command: list[str | Path] = ["consolidate", EXPERTS / "checkpoint", tmp_path / "out"]
    command += ["--base", EXPERTS / "saved_pretrained"]
    done = bare.run("-m", "ckptkit_cli", *command)
    assert done.returncode == 4, done.stderr
    assert "model type 'mixtral'" in done.stderr
    assert "pip install torch transformers" in done.stderr
    assert "--names live" in done.stderr
    assert not (tmp_path / "out").exists()
    bare.ckptkit(*command, "--names", "live")


def _imported_by(arguments: Sequence[str | Path], report: Path) -> set[str]:
    """Runs a command in this process's environment; returns the top-level modules it imported."""
    code = (
        "import sys\n"
        "from ckptkit_cli.main import main\n"
        "report = sys.argv.pop(1)\n"
        "try:\n    status = main()\n"
        "except SystemExit as stop:\n    status = stop.code\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "open(report, 'w').write('\\n'.join(names))\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, report, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(report.read_text().split())


def test_torch_is_here_to_be_imported_by_mistake() -> None:
    done = subprocess.run([sys.executable, "-c", "import torch"], check=False, timeout=120)
    assert done.returncode == 0


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["page", "json"])
def test_inspect_imports_neither_torch_nor_hub_nor_remote_storage(
    tmp_path: Path, flags: list[str]
) -> None:
    imported = _imported_by(["inspect", CASE / "checkpoint", *flags], tmp_path / "modules")
    heavy = {"torch", "transformers", "huggingface_hub", "fsspec", "safetensors", "ml_dtypes"}
    assert "ckptkit" in imported
    assert not imported & heavy


def test_the_other_commands_never_import_torch(tmp_path: Path) -> None:
    source, out = CASE / "checkpoint", tmp_path / "out"
    commands: list[list[str | Path]] = [
        ["consolidate", source, out, "--dtype", "bfloat16"],
        ["verify", source],
        ["verify", out],
        ["diff", out, out],
        [
            "adapter",
            "extract",
            CASE.parent / "peft_trl_fsdp2_ckptkit" / "checkpoint",
            tmp_path / "adapter",
        ],
    ]
    for arguments in commands:
        imported = _imported_by(arguments, tmp_path / "modules")
        assert "ckptkit" in imported
        assert not imported & {"torch", "transformers", "accelerate"}, arguments
