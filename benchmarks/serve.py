"""`ckptkit serve` of a sharded model, beside the S3 server of the tests with the written files.

Usage: python benchmarks/serve.py [--gigabytes 2] [--clients 8] [--repeats 3] [--dtype keep]

A client is a process that reads all objects below a prefix with boto3, in pieces of 1 MiB, and
keeps none of it. One client reads alone for the throughput, and several at a time for the memory of
the server, which is the high-water mark of its process. The S3 server is moto's, unmodified.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from measuring import MB, ROOT, WORK, ckptkit, environment, keep, make_checkpoint, markdown, measure

sys.path.insert(0, str(ROOT))

from tests.object_store import KEY, SECRET, running_object_store

_BUCKET, _NAME, _PIECE = "ckptkit", "m", 1 << 20


def read_all(url: str, key: str, secret: str) -> None:
    """Reads all objects; a client's process runs this."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
    )
    size, began = 0, time.perf_counter()
    for entry in client.list_objects_v2(Bucket=_BUCKET, Prefix=f"{_NAME}/")["Contents"]:
        body = client.get_object(Bucket=_BUCKET, Key=entry["Key"])["Body"]
        while piece := body.read(_PIECE):
            size += len(piece)
    print(json.dumps({"bytes": size, "seconds": time.perf_counter() - began}))


def read_together(server: Mapping[str, str], clients: int) -> list[dict[str, float]]:
    """Runs clients at a time; returns what each of them has read, and how long it took."""
    command = [sys.executable, __file__, "--client", *server.values()]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(clients)
    ]
    answers = [process.communicate()[0] for process in started]
    return [json.loads(answer) for answer in answers]


@contextmanager
def serving(source: Path, *options: str) -> Iterator[tuple[dict[str, str], int]]:
    """Runs `ckptkit serve`; yields endpoint and keys, and the number of its process."""
    command = ckptkit("serve", str(source), "--name", _NAME, "--json", *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            facts: dict[str, Any] = {}
            while facts.get("event") != "serving":
                facts = json.loads((process.stdout or sys.stdin).readline())
            names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            yield {name: facts["environment"][name] for name in names}, process.pid
        finally:
            process.terminate()


def peak_bytes(process: int) -> int:
    """Returns the largest resident memory that a process has had."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main() -> None:
    """Measures, and prints a table."""
    if sys.argv[1:2] == ["--client"]:
        read_all(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="keep")
    asked = parser.parse_args()
    source = make_checkpoint(asked.gigabytes, ranks=2)
    out = WORK / "served"
    options = ("--dtype", asked.dtype, "--max-shard-size", "500MB")
    measure(ckptkit("consolidate", str(source), str(out), *options, "--overwrite", "--quiet"))
    runs: dict[str, list[float]] = {"serve": [], "moto": []}
    with running_object_store() as store, serving(source, *options) as (served, process):
        bucket = store.bucket(_BUCKET)
        for path in sorted(out.iterdir()):
            if path.name != "ckptkit.json":
                with path.open("rb") as body:
                    store.client.put_object(
                        Bucket=bucket.name, Key=f"{_NAME}/{path.name}", Body=body
                    )
        servers = {"serve": served, "moto": {"url": store.direct, "key": KEY, "secret": SECRET}}
        for _ in range(asked.repeats):
            for name, server in servers.items():
                (alone,) = read_together(server, 1)
                runs[name].append(alone["bytes"] / alone["seconds"])
        alone_peak = peak_bytes(process)
        together = read_together(served, asked.clients)
        began = sum(one["bytes"] for one in together) / max(one["seconds"] for one in together)
        peak = peak_bytes(process)
    ratios = [mine / theirs for mine, theirs in zip(runs["serve"], runs["moto"], strict=True)]
    facts = {
        "load": os.getloadavg(),
        "serve_mb_per_s": round(median(runs["serve"]) / MB),
        "moto_mb_per_s": round(median(runs["moto"]) / MB),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "ratio": round(median(ratios), 2),
        "peak_mb_of_one_client": round(alone_peak / MB),
        "clients": asked.clients,
        "mb_per_s_of_clients_together": round(began / MB),
        "peak_mb_of_clients": round(peak / MB),
    }
    keep("serve", facts)
    print(markdown(("figure", "value"), [(name, str(value)) for name, value in facts.items()]))


if __name__ == "__main__":
    main()
