"""Every command and every line of Python of the pages does what the page says.

What the pages show of the commands is compared, but for times and sizes.
`CKPTKIT_WRITE_PAGES=1 pytest tests/documentation` writes it again.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import ckptkit
from tests import pages
from tests.hub_server import HubServer
from tests.object_store import ObjectStore
from tests.page_runs import PageRun, environment_of, make_home, make_programs, make_world

HOW_TO = (*("check-before-a-run", "evaluate", "reports", "troubleshooting"),)
REFERENCE = ("adapters", "consolidate", "number-formats", "several-steps", "training")
PAGES = (
    "index.md",
    *(f"how-to/{name}.md" for name in HOW_TO),
    *(f"reference/{name}.md" for name in REFERENCE),
    "explanation/guarantees.md",
)
SLOW_PAGES = (
    *("how-to/disk-space.md", "how-to/many-checkpoints.md", "how-to/slurm.md"),
    *(f"reference/{name}.md" for name in ("deltas", "hub", "runs", "storage")),
)
TRAINERS = (
    *("how-to/accelerate-fsdp.md", "how-to/deepspeed.md", "how-to/hub.md", "how-to/megatron.md"),
    *("how-to/other-world-size.md", "how-to/qlora.md", "how-to/ray.md", "how-to/s3.md"),
    *("how-to/torchrun.md", "how-to/trainer.md", "how-to/trl-lora.md", "tutorial/index.md"),
)
"""Pages that start trainers, or a cluster."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages") / "home"
    make_home(made)
    return made


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def environment(
    hub: HubServer, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    found = environment_of(hub, object_store)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page", [*PAGES, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW_PAGES)]
)
def test_the_commands_and_the_python_of_a_page_do_what_it_says(
    page: str, home: Path, here: Path, environment: dict[str, str], object_store: ObjectStore
) -> None:
    make_world(page, home, here, object_store)
    PageRun(page, here, environment).run()


def test_the_commands_of_the_readme_print_what_it_shows(
    home: Path, here: Path, environment: dict[str, str], object_store: ObjectStore
) -> None:
    make_world("README.md", home, here, object_store)
    readme = pages.ROOT / "README.md"
    run = PageRun(str(readme), here, environment)
    run.names["train_step"] = lambda: None
    printed = {}
    for block in pages.blocks_of(readme):
        if block.language == "python":
            exec(block.text.replace("runs/a", "runs/new"), run.names)  # noqa: S102  our own page
        elif block.language == "console":
            for command in pages.commands_of(block):
                line = command.line.replace("ORG/NAME", "base").replace("org/llama", "org/readme")
                shown = run.run_command(line, shlex.split(line, comments=True))
                if command.output:
                    printed[line] = shown
                    assert without_figures(shown or "") == without_figures(command.output)
    assert len(printed) == 2  # sizes are those of a larger model


def without_figures(shown: str) -> str:
    """Returns an output without figures, and without lines about other steps of the run."""
    text = re.sub(r"^(?:note|warning): checkpoint-.*\n", "", shown, flags=re.MULTILINE)
    return re.sub(r"\d[\d.]*(?: [KMG]?B\b)?", "N", text)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", TRAINERS)
def test_a_page_that_starts_trainers_does_what_it_says(
    page: str, home: Path, here: Path, environment: dict[str, str], object_store: ObjectStore
) -> None:
    if page != "tutorial/index.md":
        make_world(page, home, here, object_store)
    run = PageRun(page, here, environment)
    run.run()
    if "tokens" in run.names:
        (said,) = re.findall(r"# b'(.*)'", run.path.read_text(encoding="utf-8"))
        assert bytes(run.names["tokens"].tolist()).decode() == said


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_prints_what_its_page_shows(tmp_path: Path) -> None:
    page = pages.DOCS / "tutorial/demo.md"
    (block,) = pages.blocks_of(page)
    (command,) = pages.commands_of(block)
    assert command.line == "make demo"
    demo = tmp_path / "examples/demo"
    shutil.copytree(pages.ROOT / "examples/demo", demo)  # it writes into the folder above
    done = subprocess.run(
        [sys.executable, demo / "demo.py"],
        check=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    shown, expected = map(without_race, (done.stdout.removeprefix("\n"), command.output))
    differences = pages.differs(shown, expected)
    assert not differences, differences
    first, resumed = re.findall(r"step 30   loss (\S+)", done.stdout)
    assert first == resumed
    assert "rank 1 is killed in the middle of this save" in done.stdout


def without_race(shown: str) -> str:
    """Returns the output of the demo without what rank 0 prints while rank 1 is killed."""
    return re.sub(r"^ +(?:step 40 |rank 1 is killed).*\n", "", shown, flags=re.MULTILINE)


def test_each_page_with_code_is_run() -> None:
    with_code = {
        path.relative_to(pages.DOCS).as_posix()
        for folder in ("how-to", "tutorial", "explanation", "reference")
        for path in (pages.DOCS / folder).glob("*.md")
        if any(block.language in {"console", "python", "bash"} for block in pages.blocks_of(path))
    }
    assert with_code <= {*PAGES, *SLOW_PAGES, *TRAINERS, *BY_OTHER_TESTS}


BY_OTHER_TESTS = (
    "tutorial/demo.md",  # the test of the demo above
    "reference/formats.md",
    "reference/integrations.md",  # the examples have the same lines
    "reference/loading.md",  # test_live_models.py, deferred_run.py
    "reference/name-maps.md",  # test_examples.py
    "reference/scale.md",  # test_slices.py, test_ray.py
    "reference/serving.md",  # test_file_system.py, test_serve.py
)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_job_of_slurm_that_is_signalled_saves_and_ends(here: Path) -> None:
    run = here / "runs/slurm"
    script = (pages.ROOT / "examples/slurm/train.sbatch").read_text(encoding="utf-8")
    (here / "examples").symlink_to(pages.ROOT / "examples")
    settings = {
        "PATH": f"{make_programs(here)}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "SLURM_AT_ONCE": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    script = script.replace("29500", str(free_port()))
    job = subprocess.Popen(
        ["/bin/bash", "-c", script.replace("runs/slurm'", "runs/slurm --steps 1000000'")],
        env=os.environ | settings,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 120
        while not any(run.glob("checkpoint-*/ckptkit.json")):
            assert job.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        for task in psutil.Process(job.pid).children(recursive=True):
            if "examples/fsdp2.py" in task.cmdline():
                task.send_signal(signal.SIGUSR2)  # as Slurm does
        assert job.wait(60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert all(step.complete for step in ckptkit.list_run(run).steps)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("writes", [True, False])
def test_a_block_that_leaves_lines_out_is_edited_by_hand(
    monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    monkeypatch.setattr(pages, "WRITES", writes)
    whole = pages.Command("ckptkit ls run", "one\ntwo\n")
    cut = pages.Command("ckptkit ls run", f"one\n{pages.ANYTHING}\nthree\n")
    assert pages.is_written(whole, "one\ntwo\n") == writes
    assert not pages.is_written(cut, "one\ntwo\nthree\n")
    with pytest.raises(AssertionError, match="edit this block by hand"):
        pages.is_written(cut, "one\ntwo\nfour\n")
