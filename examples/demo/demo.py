"""The whole way in a minute: train, lose a rank, resume, consolidate, load with Transformers.

Every stage is a command that could be typed by hand, and is printed before it runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN = Path("runs/demo")
OUT = Path("runs/demo-model")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # nothing is downloaded, so nothing should try
    "OMP_NUM_THREADS": "1",  # two ranks share the machine; and sums keep their order
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def stage(title: str, shown: str, command: Sequence[str | Path], *, dies: bool = False) -> None:
    """Announces and runs one command; ends the demo where it does not end as it should.

    Args:
        title: What happens, in words.
        shown: The command as a person would type it.
        command: The command as it is run, by the interpreter of this process.
        dies: Whether it is meant to fail; what it complains of is not shown then.

    Raises:
        SystemExit: If it ends otherwise than it should.
    """
    bold, dim, plain = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    print(f"\n{bold}{title}{plain}\n{dim}   $ {shown}{plain}", flush=True)
    begun = time.perf_counter()
    complaints = subprocess.DEVNULL if dies else None
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, stderr=complaints, check=False
    )
    if bool(done.returncode) != dies:
        print(
            f"\nthe demo stopped: this command ended with status {done.returncode}", file=sys.stderr
        )
        raise SystemExit(done.returncode or 1)
    print(f"{dim}   {time.perf_counter() - begun:.1f} s{plain}", flush=True)


def main() -> None:
    """Runs the stages in the repository's folder."""
    os.chdir(HERE.parent.parent)
    for folder in (RUN, OUT):
        shutil.rmtree(folder, ignore_errors=True)
    ckptkit = shutil.which("ckptkit", path=str(Path(sys.executable).parent)) or "ckptkit"

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train = f"torchrun --standalone --nproc-per-node=2 examples/demo/train.py {RUN}"
    stage(
        "1  Train a tiny Llama with FSDP2 on two processes, and kill one in the middle of a save",
        f"{train} --die-at 40",
        [sys.executable, *torchrun, HERE / "train.py", RUN, "--die-at", "40"],
        dies=True,
    )
    stage(
        "2  Start it again: it goes on from the newest step that is whole",
        train,
        [sys.executable, *torchrun, HERE / "train.py", RUN],
    )
    stage(
        "3  Look at what the run left behind", f"ckptkit inspect {RUN}", [ckptkit, "inspect", RUN]
    )
    stage(
        "4  Make it a folder that Transformers loads",
        f"ckptkit consolidate {RUN} {OUT}",
        [ckptkit, "consolidate", RUN, OUT],
    )
    stage(
        "5  Load it with Transformers, and compare it with the model that was trained",
        f"python examples/demo/load.py {OUT} {RUN / 'live_logits.npy'}",
        [sys.executable, HERE / "load.py", OUT, RUN / "live_logits.npy"],
    )
    print(f"\nThe sharded checkpoint is in {RUN}, the model folder in {OUT}:")
    for file in sorted(OUT.iterdir()):
        print(f"   {file.stat().st_size:>11,} bytes  {file.name}")


if __name__ == "__main__":
    main()
