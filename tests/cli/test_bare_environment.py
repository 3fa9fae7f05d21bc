"""The offline commands where torch is not installed, and where it is but has no business.

The bare environment holds the wheel of this project and its core dependencies at the pinned
versions. It is kept in pytest's cache, and built anew when pins or metadata change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from safetensors.numpy import load_file

from ckptkit.formats.registry import READERS
from tests.contract.fault_bench import consolidated as consolidated_weights
from tests.contract.fault_bench import weights_in
from tests.contract.format_faults import CASES, FaultCase

ROOT = Path(__file__).resolve().parents[2]
CASE = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config"
EXPERTS = ROOT / "fixtures" / "fsdp2_mixtral"
PEFT_CHECKPOINT = ROOT / "fixtures" / "peft_trl_fsdp2_ckptkit" / "checkpoint"

pytestmark = [pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path

    @property
    def python(self) -> Path:
        windows = self.folder / "Scripts" / "python.exe"
        return windows if os.name == "nt" else self.folder / "bin" / "python"

    further: Path | None = None

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs its Python, without anything that this process added to the search path."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
        if self.further is not None:
            clean["PYTHONPATH"] = str(self.further)
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


def _build_wheel(folder: Path, project: Path = ROOT) -> Path:
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, project)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _install(environment: Environment, wheel: Path) -> None:
    """Brings the environment up to date: dependencies when pins change, the wheel when we do."""
    pins_of = ROOT / "constraints.txt"
    into: list[str | Path] = ["--python", environment.python, "install", "--constraint", pins_of]
    pins = [(ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml")]
    wanted = (
        hashlib.sha256(b"".join(pins)).hexdigest(),
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )
    stamp = environment.folder / "installed.json"
    found = json.loads(stamp.read_text()) if stamp.exists() else ["", ""]
    stamp.unlink(missing_ok=True)
    if found[0] != wanted[0]:
        create: list[str | Path] = ["-m", "venv", "--clear", "--without-pip", environment.folder]
        subprocess.run([sys.executable, *create], check=True, timeout=120)
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
    out = tmp_path_factory.mktemp("bare") / "out"
    bare.ckptkit("consolidate", CASE / "checkpoint", out)
    return out


FRAMEWORKS = ["torch", "transformers", "accelerate", "deepspeed", "lightning", "torchsnapshot"]


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_the_bare_environment_is_bare(bare: Environment, module: str) -> None:
    done = bare.run("-c", f"import {module}")
    assert "ModuleNotFoundError" in done.stderr


def test_the_wheel_carries_both_packages_and_the_typing_mark(bare: Environment) -> None:
    code = (
        "import ckptkit, ckptkit_cli, pathlib\n"
        "print(pathlib.Path(ckptkit.__file__).with_name('py.typed').exists())"
    )
    assert bare.run("-c", code).stdout == "True\n"


def test_doctor_and_versions_work_without_torch(bare: Environment) -> None:
    facts = json.loads(bare.ckptkit("--version", "--verbose", "--json"))
    assert "torch" not in facts["frameworks"]
    found = json.loads(bare.ckptkit("doctor", "--no-probe", "--json"))
    assert {"disk-space", "memory"} <= {finding["id"] for finding in found["findings"]}
    assert bare.run("-m", "ckptkit", "-V").stdout.startswith("ckptkit ")


def test_the_wheel_carries_what_pages_are_made_of(bare: Environment, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    bare.ckptkit("inspect", CASE / "checkpoint", "--html", page, "--stats")
    assert "Content-Security-Policy" in page.read_text(encoding="utf-8")


def test_commands_work_without_torch(bare: Environment, consolidated: Path) -> None:
    found = json.loads(bare.ckptkit("inspect", CASE / "checkpoint", "--json"))
    assert (found["format"], found["problems"]) == ("dcp", [])
    assert any(tensor["part"] == "model" for tensor in found["tensors"])
    assert {"config.json", "ckptkit.json", "model.safetensors"} <= {
        file.name for file in consolidated.iterdir()
    }
    bare.ckptkit("verify", CASE / "checkpoint")
    bare.ckptkit("verify", consolidated)
    bare.ckptkit("diff", CASE / "checkpoint", consolidated)


CONVERT_ALL = """
import json, sys
import ckptkit
for path, out, options in json.loads(sys.argv[1]):
    with ckptkit.open(path, select=options.get("select")) as checkpoint:
        name = next(iter(checkpoint.keys()))
        checkpoint.read(name, framework="numpy")
    ckptkit.convert(path, out, **{"to": "hf", **options})
    print(ckptkit.inspect(path, select=options.get("select")).format)
"""


def test_every_format_is_opened_and_consolidated_without_any_framework(
    bare: Environment, tmp_path: Path
) -> None:
    # Its files tell no shapes, which another model has to prove.
    like = tmp_path / "like"
    like.mkdir()
    fairseq2 = FaultCase("fairseq2_0_8_fsdp2", options={"like": str(like)})
    shutil.copy(fairseq2.path.parent / "truth.safetensors", like / "model.safetensors")
    cases = [*CASES, fairseq2]
    places = [str(tmp_path / "bare" / case.fixture) for case in cases]
    jobs = [
        (str(case.path), place, dict(case.options))
        for case, place in zip(cases, places, strict=True)
    ]
    done = bare.run("-c", CONVERT_ALL, json.dumps(jobs))
    assert done.returncode == 0, done.stderr
    by_themselves = {reader.name for reader in READERS} - {"foreign", "torch optimizer"}
    assert set(done.stdout.replace(" + ", "\n").split("\n")) >= by_themselves
    for case, place in zip(cases, places, strict=True):
        here = consolidated_weights(case.path, tmp_path / case.fixture, case.options)
        assert here, case
        assert weights_in(Path(place)) == here, case


@pytest.fixture(scope="module")
def with_example(bare: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The bare environment, and the example of a reader as pip installs it."""
    folder = tmp_path_factory.mktemp("example")
    project = shutil.copytree(ROOT / "examples" / "reader_plugin", folder / "project")
    wheel = _build_wheel(folder, project)
    installed = folder / "installed"
    _pip("--python", bare.python, "install", "--no-deps", "--target", installed, wheel)
    return Environment(bare.folder, further=installed)


def test_a_reader_that_pip_installs_teaches_every_command_its_format(
    bare: Environment, with_example: Environment, tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    np.save(rows / "up.0-of-2.npy", np.arange(6, dtype="float32").reshape(2, 3))
    np.save(rows / "up.1-of-2.npy", np.full((1, 3), 7, "float32"))
    without = bare.run("-m", "ckptkit_cli", "inspect", rows)
    assert without.returncode == 3
    assert "up.*-of-*.npy (2)" in without.stderr
    found = json.loads(with_example.ckptkit("inspect", rows, "--json"))
    assert (found["format"], found["world_size"], found["problems"]) == ("npy-rows", 2, [])
    with_example.ckptkit("consolidate", rows, tmp_path / "out")
    with_example.ckptkit("diff", rows, tmp_path / "out")
    with_example.ckptkit("verify", rows)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["up"].tolist() == [[0, 1, 2], [3, 4, 5], [7, 7, 7]]


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


def test_the_other_commands_never_import_torch(tmp_path: Path) -> None:
    source, out = CASE / "checkpoint", tmp_path / "out"
    commands: list[list[str | Path]] = [
        ["consolidate", source, out, "--dtype", "bfloat16"],
        ["verify", source],
        ["verify", out],
        ["diff", out, out],
        ["adapter", "extract", PEFT_CHECKPOINT, tmp_path / "adapter"],
    ]
    for arguments in commands:
        imported = _imported_by(arguments, tmp_path / "modules")
        assert "ckptkit" in imported
        assert not imported & {"torch", "transformers", "accelerate"}, arguments
