"""Time and memory of committing a step of many ranks, in the process that does it.

Usage: python benchmarks/commit_scale.py [--sizes 64x900,256x900,512x2000]

The ranks are simulated: their records say what a run of fully sharded ranks would say, and their
data files are holes of the right sizes. The merged index is read back by our own parser.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from measuring import MB, ROOT, WORK, keep, markdown

sys.path.insert(0, str(ROOT))

from ckptkit.core.manifest import Manifest
from ckptkit.training.save.writer_process import writer_command
from ckptkit.writer.messages import Channel, Commit, RecordProof, StepCommitted, WriteProgress

UNIT = "pytorch_model_fsdp_0"
ROWS, COLUMNS = 4, 4096  # of a tensor, on one rank
BLOB_BYTES = 4 * ROWS * COLUMNS + 1536


def _record(rank: int, ranks: int, tensors: int) -> bytes:
    name = f"__{rank}_0.distcp"
    size_bytes = tensors * BLOB_BYTES
    unit = {
        "tensors": [
            {
                "path": ["model", f"layers.{number}.mlp.weight"],
                "dtype": "float32",
                "shape": [ranks * ROWS, COLUMNS + number],
                "aliases": [],
            }
            for number in range(tensors)
        ],
        "chunks": [
            [n, [rank * ROWS, 0], [ROWS, COLUMNS + n], 0, n * BLOB_BYTES, BLOB_BYTES]
            for n in range(tensors)
        ],
        "objects": [],
        "data_files": [name],
        "expected": [],
    }
    document = {
        "rank": rank,
        "world_size": ranks,
        "attempt": "a-1",
        "step": 1,
        "units": {UNIT: unit},
        "files": [{"path": f"{UNIT}/{name}", "size_bytes": size_bytes, "crc32": None}],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _prepare(folder: Path, ranks: int, tensors: int) -> tuple[list[RecordProof], int]:
    shutil.rmtree(folder.parent, ignore_errors=True)
    (folder / ".ranks").mkdir(parents=True)
    (folder / UNIT).mkdir()
    proofs, total = [], 0
    for rank in range(ranks):
        data = _record(rank, ranks, tensors)
        (folder / f".ranks/{rank}.json").write_bytes(data)
        with (folder / UNIT / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(tensors * BLOB_BYTES)
        proofs.append(RecordProof(rank, f".ranks/{rank}.json", len(data), zlib.crc32(data)))
        total += len(data)
    return proofs, total


def _commit(request: Commit) -> tuple[StepCommitted, float, float, int]:
    """Returns the answer, processor time, the longest silence, and peak memory in bytes."""
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        process = subprocess.Popen(writer_command(descriptor), pass_fds=(descriptor,))
    channel = Channel(ours)
    heard = time.perf_counter()
    silence = 0.0
    channel.send(request)
    while True:
        answer = channel.receive()
        now = time.perf_counter()
        silence, heard = max(silence, now - heard), now
        if not isinstance(answer, WriteProgress):
            break
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    channel.close()
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    if not isinstance(answer, StepCommitted):
        raise TypeError(f"not committed: {answer}")
    return answer, usage.ru_utime + usage.ru_stime, silence, int(peak.split()[1]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64x900,256x900,512x2000")
    options = parser.parse_args(arguments)
    rows, document = [], {}
    for size in options.sizes.split(","):
        ranks, tensors = map(int, size.split("x"))
        run = WORK / f"commit-{size}"
        folder = run / ".checkpoint-1.ckptkit-a-1"
        proofs, record_bytes = _prepare(folder, ranks, tensors)
        manifest = json.loads(Manifest("training", {"step": 1}, {}, {}, {}).to_json())
        request = Commit("a-1", str(folder), str(run / "checkpoint-1"), tuple(proofs), manifest)
        answer, cpu_seconds, silence, peak = _commit(request)
        index = (run / "checkpoint-1" / UNIT / ".metadata").stat().st_size
        document[size] = {
            "seconds": answer.seconds,
            "cpu_seconds": cpu_seconds,
            "silence_seconds": silence,
            "record_bytes": record_bytes,
            "metadata_bytes": index,
            "peak_bytes": peak,
        }
        rows.append(
            [
                f"{ranks:,} x {tensors:,}",
                f"{record_bytes / MB:,.1f}",
                f"{answer.seconds:.2f}",
                f"{cpu_seconds:.2f}",
                f"{index / MB:,.1f}",
                f"{peak / MB:,.0f}",
                f"{silence:.2f}",
            ]
        )
        shutil.rmtree(run)
    header = (
        *("ranks x tensors", "records MB", "commit seconds", "CPU seconds", "`.metadata` MB"),
        *("peak MB", "longest silence s"),
    )
    print(f"{markdown(header, rows)}\n")
    keep("commit_scale", document)


if __name__ == "__main__":
    main()
