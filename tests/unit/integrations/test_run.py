"""`python -m ckptkit.run`: the script runs as if it had been started itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sampled import sampled

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]

ACCELERATE = """
class Accelerator:
    def __init__(self, *, name="a"):
        self.name = name
    def save_state(self, output_dir=None, safe_serialization=True):
        print("stock save")
    def load_state(self, input_dir=None):
        print("stock load")
    def save_model(self, model, save_directory):
        print("stock model")
    def get_state_dict(self, model, unwrap=True):
        print("stock state")
"""
SCRIPT = """
from accelerate import Accelerator
Accelerator()
print(Accelerator.save_state.__code__.co_filename.rsplit("/", 1)[-1], Accelerator(name="b").name)
"""
# In the place of ours, which would import torch: they tell what they are called with.
OURS = """
import sys, types
from ckptkit.core.errors import UnsupportedError
def save_like_stock(accelerator, *arguments, **options):
    print("save", arguments, options)
def load_like_stock(accelerator, *arguments, **options):
    print("load", arguments, options)
def save_model_like_stock(accelerator, *arguments, **options):
    print("model", arguments, options)
def get_state_like_stock(accelerator, *arguments, **options):
    print("state", arguments, options)
def install(trainer, **options):
    if trainer.odd:
        raise UnsupportedError("it is odd")
    print("install", trainer.name, options)
ours = types.SimpleNamespace(**globals())
for name in ("accelerate", "transformers"):
    sys.modules["ckptkit.integrations." + name] = ours
"""
TRAINER = """
class Trainer:
    odd = False
    def __init__(self, name):
        self.name = name
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run_it(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ckptkit.run", *arguments],
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run_it


def put(folder: Path, text: str) -> str:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text(text, encoding="utf-8")
    return str(folder)


def put_accelerate(tmp_path: Path, version: str) -> None:
    put(
        tmp_path / "accelerate/__init__.py",
        f"__version__ = {version!r}\nfrom .accelerator import Accelerator\n",
    )
    put(tmp_path / "accelerate/accelerator.py", ACCELERATE)


def test_a_script_sees_its_own_name_arguments_and_folder(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "inner/beside.py", "value = 3")
    script = put(
        tmp_path / "inner/script.py",
        "import sys, beside\nprint(__name__, sys.argv[1:], beside.value, __file__ == sys.argv[0])",
    )
    done = run(script, "--lr", "3", "-h")
    assert done.stdout == "__main__ ['--lr', '3', '-h'] 3 True\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_script_finds_in_its_main_module_what_python_would_put_there(
    run: Run, tmp_path: Path
) -> None:
    body = """
import atexit, sys
kept = [__file__, sys.argv[0], __spec__, __loader__.path, __package__]
def show(main: "Any" = None) -> None:
    main = sys.modules["__main__"]
    print(main.kept, main.show is show, show.__annotations__)
atexit.register(show)
"""
    put(tmp_path / "inner/script.py", body)
    alone = subprocess.run(
        [sys.executable, "inner/script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    done = run("inner/script.py")
    assert done.stdout == alone.stdout, done.stderr
    assert str(tmp_path / "inner/script.py") in done.stdout


def test_a_folder_with_a_main_module_is_run_as_well(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "tool/beside.py", "value = 3")
    put(tmp_path / "tool/__main__.py", "import beside\nprint(__name__, beside.value)")
    assert run("tool").stdout == "__main__ 3\n"


def test_a_module_is_run_by_its_name(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "pack/part.py", "import sys\nprint(__name__, __spec__.name, sys.argv[1:])")
    done = run("-m", "pack.part", "-m", "x")
    assert done.stdout == "__main__ pack.part ['-m', 'x']\n", done.stderr


@pytest.mark.parametrize(
    ("body", "status", "shown"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('it is over')", 1, "it is over"),
        ("def f():\n    raise ValueError('broken')\nf()", 1, "ValueError: broken"),
        ("import nothing_of_the_kind", 1, "No module named 'nothing_of_the_kind'"),
        ("x = = 3", 1, "SyntaxError"),
    ],
)
def test_the_exit_status_and_the_traceback_are_the_scripts_own(
    run: Run, tmp_path: Path, body: str, status: int, shown: str
) -> None:
    script = put(tmp_path / "script.py", body)
    done = run(script)
    alone = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == alone.returncode == status
    assert shown in done.stderr
    assert "ckptkit" not in done.stderr
    assert done.stderr == alone.stderr


def test_objects_of_a_script_can_be_sent_to_processes_that_it_spawns(
    run: Run, tmp_path: Path
) -> None:
    script = put(
        tmp_path / "script.py",
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n",
    )
    assert run(script).stdout == "[2, 4]\n"


def test_a_known_accelerate_is_changed_and_the_log_says_so_once(run: Run, tmp_path: Path) -> None:
    put_accelerate(tmp_path, "1.15.0")
    done = run(put(tmp_path / "script.py", SCRIPT))
    assert done.stdout == "run.py b\n"
    assert done.stderr.count("\n") == 1
    assert "sharded saves of accelerate 1.15.0 go through ckptkit; CKPTKIT_RUN=off" in done.stderr
    assert not run(put(tmp_path / "script.py", SCRIPT), RANK="1").stderr


@pytest.mark.parametrize(
    "version", sampled(["1.6.0", "1.16.0", "2.0.0.dev0", "of late"], ["1.16.0", "of late"])
)
def test_an_unknown_accelerate_stays_as_it_is_with_a_warning(
    run: Run, tmp_path: Path, version: str
) -> None:
    put_accelerate(tmp_path, version)
    done = run(put(tmp_path / "script.py", SCRIPT))
    assert done.stdout == "accelerator.py b\n"
    assert f"accelerate {version} was found, and ckptkit is known to fit 1.7 to" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("version", "file"), [("2.15.1", "run.py"), ("2.5.1", "saver.py"), ("2.16.0", "saver.py")]
)
def test_the_functions_of_torch_are_replaced_by_version(
    run: Run, tmp_path: Path, version: str, file: str
) -> None:
    put(tmp_path / "torch/__init__.py", f"__version__ = {version!r}")
    put(tmp_path / "torch/distributed/__init__.py", "")
    package = tmp_path / "torch/distributed/checkpoint"
    put(package / "__init__.py", "from .state_dict_saver import save, async_save")
    put(package / "state_dict_saver.py", "def save():\n    pass\nasync_save = lambda: None")
    body = """
from torch.distributed.checkpoint import async_save
import torch.distributed.checkpoint as dcp
found = (async_save, dcp.save, dcp.state_dict_saver.save)
print({function.__code__.co_filename.rsplit("_", 1)[-1].rsplit("/", 1)[-1] for function in found})
"""
    done = run(put(tmp_path / "script.py", body))
    assert done.stdout == f"{{{file!r}}}\n", done.stderr
    warning = f"torch {version} was found, and ckptkit is known to fit 2.6 to 2.15"
    assert done.stderr.count(warning) == (file != "run.py")


def test_an_accelerate_that_lacks_one_of_its_methods_keeps_all_others(
    run: Run, tmp_path: Path
) -> None:
    put_accelerate(tmp_path, "1.15.0")
    put(tmp_path / "accelerate/accelerator.py", ACCELERATE.replace("load_state", "load_it"))
    done = run(put(tmp_path / "script.py", SCRIPT + "Accelerator().save_state()\n"))
    assert done.stdout == "accelerator.py b\nstock save\n"
    assert done.stderr.count("\n") == 1
    assert "accelerate 1.15.0 was found, which is not as expected" in done.stderr
    assert "'load_state'; its saves stay as they are" in done.stderr


@pytest.mark.parametrize("choice", sampled(["off", "0", "No"], ["No"]))
def test_one_variable_switches_it_off(run: Run, tmp_path: Path, choice: str) -> None:
    put_accelerate(tmp_path, "1.15.0")
    done = run(put(tmp_path / "script.py", SCRIPT), CKPTKIT_RUN=choice)
    assert (done.stdout, done.stderr) == ("accelerator.py b\n", "")


@pytest.mark.parametrize("choice", sampled(["", "ON", "1"], ["ON"]))
def test_it_is_on_however_that_is_said(run: Run, tmp_path: Path, choice: str) -> None:
    put_accelerate(tmp_path, "1.15.0")
    done = run(put(tmp_path / "script.py", SCRIPT), CKPTKIT_RUN=choice)
    assert done.stdout == "run.py b\n"


def test_a_script_that_has_its_own_log_shows_ours_in_it(run: Run, tmp_path: Path) -> None:
    put_accelerate(tmp_path, "1.15.0")
    begin = "import logging\nlogging.basicConfig(format='own: %(message)s')\n"
    done = run(put(tmp_path / "script.py", begin + SCRIPT))
    assert done.stderr.startswith("own: ckptkit 0.")
    assert done.stderr.count("\n") == 1


def test_a_script_that_imports_nothing_pays_for_nothing(run: Run, tmp_path: Path) -> None:
    body = "import sys\nprint([m for m in ('torch', 'accelerate', 'numpy') if m in sys.modules])"
    assert run(put(tmp_path / "script.py", body)).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "no script to run was given"),
        (["-m"], "no module to run was given"),
        (["nowhere.py"], "nowhere.py: no such script"),
        (["--verbose", "x.py"], "--verbose: no such option"),
    ],
)
def test_wrong_arguments_are_told_with_the_usage(
    run: Run, arguments: list[str], shown: str
) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert shown in done.stderr
    assert "usage: python -m ckptkit.run" in done.stderr


def test_a_wrong_choice_is_refused_before_the_script_runs(run: Run, tmp_path: Path) -> None:
    done = run(put(tmp_path / "script.py", "print('ran')"), CKPTKIT_RUN="maybe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "CKPTKIT_RUN: is 'maybe', where one of on, wait, off was expected" in done.stderr


def test_help_is_shown(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "CKPTKIT_RUN=off" in done.stdout


@pytest.mark.slow
def test_a_save_that_fails_at_the_end_is_told_and_changes_the_exit_status(
    run: Run, tmp_path: Path
) -> None:
    body = """
from pathlib import Path
from ckptkit.integrations.checkpointers import OpenRun
run = OpenRun().of(Path("run"), {})
Path("run/checkpoint-1").mkdir()
Path("run/checkpoint-1/mine").touch()
run.save(1, {"counts": {"a": 1}})
print("the end")
"""
    done = run(put(tmp_path / "script.py", body), CUDA_VISIBLE_DEVICES="")
    assert done.stdout == "the end\n"
    assert done.returncode == 5, done.stderr
    assert "found something without a ckptkit.json" in done.stderr


@pytest.mark.parametrize(("choice", "waits"), [("on", False), ("wait", True)])
def test_saves_and_loads_of_an_accelerator_go_to_ckptkit_with_their_arguments(
    run: Run, tmp_path: Path, choice: str, waits: bool
) -> None:
    put_accelerate(tmp_path, "1.9.3")
    body = f"""{OURS}
from accelerate import Accelerator
class Mine(Accelerator):
    def save_state(self, output_dir):
        super().save_state(output_dir + "/mine", safe_serialization=False)
Accelerator().save_state("out")
Mine().save_state("out")
Mine().load_state("out")
Mine().save_model("it", "out", max_shard_size=3)
Mine().get_state_dict("it", unwrap=False)
"""
    done = run(put(tmp_path / "script.py", body), CKPTKIT_RUN=choice)
    assert done.stdout.splitlines() == [
        f"save ('out',) {{'waits': {waits}}}",
        f"save ('out/mine',) {{'waits': {waits}, 'safe_serialization': False}}",
        "load ('out',) {}",
        "model ('it', 'out') {'max_shard_size': 3}",
        "state ('it',) {'unwrap': False}",
    ], done.stderr
    assert ("and are waited for" in done.stderr) is waits


def test_a_trainer_is_handed_over_once_it_is_built(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "transformers/__init__.py", "__version__ = '5.8.1'")
    put(tmp_path / "transformers/trainer.py", TRAINER)
    body = f"""{OURS}
from transformers.trainer import Trainer
class Mine(Trainer):
    def __init__(self, name):
        super().__init__(name)
        print("built")
class Odd(Trainer):
    odd = True
class Whole(Trainer):
    plugin = types.SimpleNamespace(state_dict_type="StateDictType.FULL_STATE_DICT")
    accelerator = types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin))
Mine("a")
print(Odd("b").name)
Whole("c")
"""
    done = run(put(tmp_path / "script.py", body))
    assert done.stdout.splitlines() == ["install a {'wait': None}", "built", "b"], done.stderr
    assert "an Odd saves as it always does: it is odd" in done.stderr


def test_an_unknown_transformers_stays_as_it_is_beside_a_known_accelerate(
    run: Run, tmp_path: Path
) -> None:
    put_accelerate(tmp_path, "1.15.0")
    put(tmp_path / "transformers/__init__.py", "__version__ = '6.1.0'")
    put(tmp_path / "transformers/trainer.py", TRAINER)
    body = f"{OURS}\nfrom transformers.trainer import Trainer\nTrainer('a')\n{SCRIPT}"
    done = run(put(tmp_path / "script.py", body))
    assert done.stdout == "run.py b\n"
    assert "transformers 6.1.0 was found, and ckptkit is known to fit" in done.stderr
    assert "sharded saves of accelerate 1.15.0 go through" in done.stderr


def test_a_trainer_is_left_alone_where_accelerate_is_unknown(run: Run, tmp_path: Path) -> None:
    put_accelerate(tmp_path, "1.99.0")
    put(tmp_path / "transformers/__init__.py", "__version__ = '5.8.1'")
    put(tmp_path / "transformers/trainer.py", f"import accelerate\n{TRAINER}")
    body = f"{OURS}\nfrom transformers.trainer import Trainer\nTrainer('a')\n{SCRIPT}"
    done = run(put(tmp_path / "script.py", body))
    assert done.stdout == "accelerator.py b\n"
    assert "transformers 5.8.1 was found, and saves with accelerate, which is left" in done.stderr


def test_a_library_that_was_imported_before_is_changed_as_well(run: Run, tmp_path: Path) -> None:
    put_accelerate(tmp_path, "1.15.0")
    put(tmp_path / "sitecustomize.py", "import accelerate")
    assert run(put(tmp_path / "script.py", SCRIPT)).stdout == "run.py b\n"
