"""Runs the blocks of a page, one after another, in a folder that has what the page names."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.training import Checkpointer
from tests import pages
from tests.compared_models import model_of
from tests.hub_server import TOKEN, HubServer
from tests.object_store import KEY, SECRET, ObjectStore
from tests.sharded import write_sharded

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CONFIGURATION = ("*.json", "*.jinja")


def make_home(home: Path) -> None:
    """Makes everything that any page uses; a page gets a copy."""
    llama = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
    for run in ("llama", "trainer", "accelerate", "old"):
        save_run(home / "runs" / run, layout="trainer" if run == "trainer" else "accelerate")
    copy(llama, home / "runs/stock/checkpoint_0", without=CONFIGURATION)
    copy(llama, home / "base", without=("*_0", "*.pkl"))
    for node, ranks in (("node0", "__1_*"), ("node1", "__0_*")):
        files = ("optimizer_0", *CONFIGURATION, "random_states_*", ranks)
        copy(llama, home / node / "runs/a", without=files)
    (home / "node1/runs/a/pytorch_model_fsdp_0/.metadata").unlink()
    shutil.copytree(home / "runs/llama", home / "runs/a")
    shutil.copytree(home / "runs/a/checkpoint-300", home / "runs/a/checkpoint-400")
    (home / "runs/a/checkpoint-400/ckptkit.json").unlink()


def make_adapters(home: Path, kind: str) -> None:
    """Makes the runs of the pages about adapters; each run has its own base."""
    if kind == "lora":
        copy(FIXTURES / "peft_trl_fsdp2_ckptkit/checkpoint", home / "runs/lora")
        copy(FIXTURES / "peft_trl_fsdp2_ckptkit/base", home / "base")
        copy(FIXTURES / "peft_trl_fsdp2/checkpoint", home / "runs/stock-lora")
    else:
        copy(FIXTURES / "peft_qlora_fsdp2/checkpoint", home / "runs/stock-qlora")
        copy(FIXTURES / "peft_qlora_fsdp2/base", home / "base")
        copy(
            FIXTURES / "peft_qlora_fsdp2/adapter_config.json",
            home / "runs/stock-qlora/adapter_config.json",
        )


def copy(source: Path, target: Path, *, without: tuple[str, ...] = ()) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copy(source, target)
        return
    ignored = shutil.ignore_patterns(*without) if without else None
    shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)


def save_run(run: Path, *, layout: Any) -> None:
    """Saves three steps of a small Llama, each with other weights, with a metric.

    Weights and gradients are drawn from whole numbers: those of torch and of a loss differ from
    one processor to another, and with them what pages show.
    """
    model = model_of()
    drawn = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_odd_numbers(drawn, parameter.shape) / 2**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(run, layout=layout, every=100) as checkpointer:
        for step, loss in ((100, 2.0141), (200, 1.8772), (300, 1.7203)):
            for parameter in model.parameters():
                parameter.grad = _odd_numbers(drawn, parameter.shape) / 2**14
            optimizer.step()
            checkpointer.save(step, state, metrics={"eval_loss": loss})


def _odd_numbers(drawn: np.random.Generator, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(drawn.integers(-256, 256, shape) * 2 + 1).float()


ADAPTERS = {
    "how-to/trl-lora.md": "lora",
    "how-to/qlora.md": "qlora",
    "reference/adapters.md": "lora",
    "reference/number-formats.md": "lora",
}
OF_A_STORE = {
    *("how-to/s3.md", "how-to/disk-space.md"),
    *("reference/hub.md", "reference/storage.md", "reference/training.md"),
}
"""Pages that name a bucket."""
TRAINED = {
    "how-to/accelerate-fsdp.md": "runs/accelerate",
    "how-to/trainer.md": "runs/trainer",
    "how-to/trl-lora.md": "runs/lora",
}
"""Runs that a page trains, and other pages have."""
STATUSES = {
    "ckptkit doctor runs/llama fsdp.yaml --model-size 70B --keep-last 3": 6,
    "ckptkit consolidate node0/runs/a models/b --base base": 3,
    "ckptkit consolidate runs/stock/checkpoint_1 models/x": 3,
    "ckptkit diff runs/llama/checkpoint-100 runs/llama/checkpoint-300 --html diff.html": 6,
    "ckptkit diff runs/llama/checkpoint-100 runs/llama/checkpoint-300 --numeric": 6,
}
"""Of commands that fail, by line."""
BY_OTHER_TESTS = {"sbatch", "python3", "hf", "make"}
WITHOUT_GPU = "examples/on_cpu.py"
SCRIPT = re.compile(r"(?:-m \S+ )?examples/.*")
OF_A_SHELL = {"export", ".", "rm", "cd", "git"}
CPU_TORCH = "install torch --index-url https://download.pytorch.org/whl/cpu"
FILES = {"fsdp.yaml", "jobs.txt", "rule.json"}
"""Files that pages show and that are in no folder of the repository."""
PROGRAMS = {
    "srun": """#!/bin/bash
# One task after another; a wrapper of a shell takes the variables.
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && SLURM_NTASKS=${1#--ntasks=}; shift; done
export SLURM_NTASKS
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & tasks+=($!)
  [[ $SLURM_AT_ONCE ]] || wait "${tasks[-1]}" || exit 1
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
""",
    "sbatch": """#!/bin/bash
# Runs the tasks of an array one after another.
[[ $1 =~ ^--array=([0-9]+)-([0-9]+)$ ]] || exit 1
for ((task = BASH_REMATCH[1]; task <= BASH_REMATCH[2]; task++)); do
  SLURM_ARRAY_TASK_ID=$task bash "$2" || exit 1
done
""",
    "parallel": """#!/bin/bash
# Stands in for GNU parallel, which few machines have: runs one line of its input after another.
while read -r line; do bash -c "$line" || exit 1; done
""",
    "scontrol": "#!/bin/sh\necho localhost\n",
    "ckptkit": f'#!/bin/sh\nexec "{sys.executable}" -m ckptkit_cli "$@"\n',
    "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    "torchrun": f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n',
}


def environment_of(hub: HubServer, store: ObjectStore) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "AWS_ENDPOINT_URL": store.endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "RAY_AUTH_MODE": "disabled",  # or Ray says so in the first line of each process
        "RAY_ADDRESS": "local",  # not the cluster of another test
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves workers beside other tests
    }


def make_world(page: str, home: Path, here: Path, store: ObjectStore) -> None:
    """Fills a folder with what a page names; most pages share `home`."""
    if page in ADAPTERS:
        make_adapters(here, ADAPTERS[page])
    else:
        shutil.copytree(home, here, dirs_exist_ok=True)
    fit_world(page, here)
    if page in OF_A_STORE:
        bucket = store.bucket("bucket")
        bucket.clear()
        bucket.put_tree(here / "runs/llama", "runs/llama")


def fit_world(page: str, here: Path) -> None:
    """Changes what pages share where a page names something else."""
    if page in TRAINED:
        shutil.rmtree(here / TRAINED[page])
    if page == "how-to/trl-lora.md":
        (here / "base").rename(here / "stock-base")
        save_example_base(here / "base")
    if page == "README.md":
        copy(FIXTURES / "peft_trl_fsdp2_ckptkit/checkpoint", here / "runs/lora")
    if page == "explanation/guarantees.md":
        shutil.copytree(here / "runs/llama", here / "runs/damaged")
        flip_bit(next((here / "runs/damaged").rglob("checkpoint-300/**/__0_0.distcp")))
    if page == "reference/number-formats.md":
        ckptkit.consolidate(here / "base", here / "models/published-fp8", dtype="fp8-block")
        ckptkit.merge_adapter(here / "runs/lora", here / "runs/tuned")
    if page == "reference/deltas.md":
        tensors = {f"layers.{layer}.weight": torch.rand(8, 6) for layer in range(3)}
        for step in (100, 101, 102):
            write_sharded(here / f"runs/rl/checkpoint-{step}", tensors, 2)
            tensors = {name: tensor + (tensor > 0.9) for name, tensor in tensors.items()}


def save_example_base(folder: Path) -> None:
    example = runpy.run_path(str(pages.ROOT / "examples/toy.py"))
    example["model"]().save_pretrained(folder)


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def make_programs(here: Path) -> Path:
    """Returns a folder of programs for the path of a shell; Slurm's run everything here."""
    folder = here / "programs"
    folder.mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


class PageRun:
    """A page, the folder in which it runs, and the names of its Python."""

    def __init__(self, page: str, here: Path, environment: Mapping[str, str]) -> None:
        self.path = pages.DOCS / page
        self._here = here
        self._environment = environment
        self.names = names_of(page)

    def run(self) -> None:
        try:
            for block in pages.blocks_of(self.path):
                self._run_block(block)
        finally:
            self._close()

    def _run_block(self, block: pages.Block) -> None:
        if block.title:
            assert block.title in FILES or pages.is_excerpt(block), block.text
            (self._here / Path(block.title).name).write_text(block.text)
        elif block.language == "console":
            self._run_console(block)
        elif block.language == "python":
            self._close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of libraries
                exec(block.text, self.names)  # noqa: S102  our own page
        elif block.language == "bash":
            self._run_shell(block.text)

    def _close(self) -> None:
        """Closes the Checkpointer of a page that shows its beginning only."""
        if "checkpointer" in self.names:
            self.names["checkpointer"].close()

    def _run_console(self, block: pages.Block) -> None:
        outputs = {}
        for command in pages.commands_of(block):
            shown = self.run_command(command.line, pages.words_of(command))
            if shown is None or not command.output:
                continue
            if pages.is_written(command, shown):
                outputs[command.line] = shown
        if outputs:
            pages.write_outputs(self.path, block, outputs)

    def run_command(self, line: str, words: list[str]) -> str | None:
        """Returns what a command shows, or None if it is run by other tests, or shows nothing."""
        program, *arguments = words
        if ">" in words:
            return self._run_shell(line)
        if program == "ckptkit":
            if "watch" in arguments and "--once" not in arguments:
                arguments.append("--once")  # which without it waits for Ctrl-C
            status, shown = pages.show(arguments, self._environment)
            assert status == STATUSES.get(line, 0), f"{line}\n{shown}"
            shown = shown.replace(f"{self._here}/", "")
            return shown.replace(self._environment["HF_ENDPOINT"], "https://huggingface.co")
        if program == "python":
            is_ours = arguments[0].startswith("examples/")
            return run_script(arguments) if is_ours else self._run_shell(line)
        if program == "aws":
            subprocess.run([sys.executable, "-m", "awscli", *arguments], check=True)
        elif program == "pip":
            check_installation(arguments)
        elif program == "rm" or program.startswith("examples/"):
            return self._run_shell(line)
        elif program == "torchrun":
            return self._run_trainer(line)
        else:
            assert program in BY_OTHER_TESTS | OF_A_SHELL, line
            scripts = [word for word in arguments if word.startswith("examples/")]
            assert all((pages.ROOT / script).is_file() for script in scripts), line
        return None

    def _run_trainer(self, line: str) -> str | None:
        """Starts the processes of a line on all of its nodes, which are this machine."""
        on_cpu = SCRIPT.sub(rf"{WITHOUT_GPU} \g<0>", line)
        if WITHOUT_GPU not in line and on_cpu in self.path.read_text(encoding="utf-8"):
            return None  # the page has the same line for machines without a GPU
        if "--nnodes=2" in line:
            line = f"{line.replace('--node-rank=0', '--node-rank=1')} & {line}\nwait $!"
        return self._run_shell(line)

    def _run_shell(self, text: str) -> str:
        path = f"{make_programs(self._here)}:{os.environ['PATH']}"
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if not (self._here / "examples").exists():
            (self._here / "examples").symlink_to(pages.ROOT / "examples")
        done = subprocess.run(
            ["/bin/bash", "-ec", text],
            check=False,
            env=os.environ | quiet | {"PATH": path},
            cwd=self._here,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        return done.stdout


def names_of(page: str) -> dict[str, Any]:
    """Returns what the Python of a page may use without making it."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": scheduler}
    names["scheduler"] = scheduler
    names |= {"state": {"model": model}, "step": 400, "last": 2, "train_step": repr}
    names["tokenizer"] = SimpleNamespace(
        save_pretrained=lambda folder: Path(folder).mkdir(exist_ok=True)
    )
    if page == "how-to/trl-lora.md":
        from peft import LoraConfig

        config = LoraConfig.from_pretrained(FIXTURES / "peft_trl_fsdp2")
        names["trainer"] = SimpleNamespace(model=SimpleNamespace(peft_config={"default": config}))
    return names


def run_script(arguments: list[str]) -> str:
    script = str(pages.ROOT / arguments[0])
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(sys, "argv", [script, *arguments[1:]])
        runpy.run_path(script, run_name="__main__")
    return shown.getvalue()


def check_installation(arguments: list[str]) -> None:
    """Looks whether what pip is to install is this project with an extra that it has."""
    if " ".join(arguments) == CPU_TORCH:
        return
    project = (pages.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert arguments[0] == "install"
    found = re.fullmatch(r"\.(?:\[(\w+)\])?", arguments[1])
    assert found is not None, arguments
    assert all(f'"{package}>=' in project for package in arguments[2:])
    assert not found[1] or re.search(rf"^{found[1]} = \[", project, re.MULTILINE)
