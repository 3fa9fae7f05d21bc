"""What the ranks of a node download when all load one model from S3, and how long they take.

Each round loads twice, in turns: with what the ranks share, and without (`LOCAL_WORLD_SIZE=1`).
With `--link`, all runs in a network namespace of its own, with a loopback device that passes no
more than so many megabytes a second, as the network card of a node does (Linux, as root).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import MB, ROOT, environment

sys.path.insert(0, str(ROOT))

from tests.object_store import ObjectStore, running_object_store

_WIDTH = 2048  # in files of one layer each, since moto reads all of an object for each range
_START_SECONDS = 15.0  # in which all ranks have imported torch


def peak_bytes() -> int:
    """Returns the largest resident set of this process so far, shared memory included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel says no VmHWM")


def load(layers: int, url: str, options: Mapping[str, Any], start: float) -> None:
    """Fills a model at a point in time; the process of a rank runs this."""
    import torch
    from torch import nn

    from ckptkit.storage.places import Place
    from ckptkit.training import load_into

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    before = peak_bytes()
    time.sleep(max(start - time.time(), 0))
    began = time.time()
    result = load_into(model, Place(url, options))
    seconds = time.time() - began
    total = sum(float(value.double().sum()) for value in model.state_dict().values())
    found = {
        "seconds": seconds,
        "late": began - start,
        "beyond": peak_bytes() - before,
        "total": total,
    }
    print(json.dumps(found | {"read": result.bytes_read, "shared": result.bytes_shared}))


def limit_link(megabytes_per_second: int) -> None:
    """Starts this benchmark again, in a network namespace with a slow loopback device."""
    rate = f"rate {8 * megabytes_per_second}mbit burst 4mb latency 100ms"
    words = "ip link set lo up && tc qdisc add dev lo root tbf " + rate + ' && exec "$@"'
    again = [sys.executable, *sys.argv, "--limited"]
    subprocess.run(["unshare", "--net", "sh", "-c", words, "sh", *again], check=True)


def sent_bytes() -> int:
    """Returns how much the loopback device of this network namespace has passed."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise OSError("no loopback device")


def run_ranks(
    store: ObjectStore, ranks: int, layers: int, *, share: bool, limited: bool
) -> dict[str, float]:
    """Starts all ranks; returns figures of the slowest or largest of them."""
    store.proxy.reset()
    start, passed = time.time() + _START_SECONDS, sent_bytes()
    options = store.direct_options if limited else store.options  # the proxy sends all once more
    words = [str(layers), "s3://sharing/model", json.dumps(options), str(start)]
    settings = environment() | {"OMP_NUM_THREADS": "1"}
    settings["LOCAL_WORLD_SIZE"] = str(ranks if share else 1)
    command = [sys.executable, __file__, "--rank", *words]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings)
        for _ in range(ranks)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    if len({one["total"] for one in found}) > 1:
        raise RuntimeError("the ranks have other values than each other")
    return {
        "seconds": max(one["seconds"] for one in found),
        "late": max(one["late"] for one in found),
        "beyond": max(one["beyond"] for one in found),
        "sent": sent_bytes() - passed if limited else store.proxy.sent["GET"],
        "requests": store.proxy.requests["GET"],
    }


def put_model(store: ObjectStore, layers: int) -> int:
    """Puts a model into the store; returns its size."""
    import torch
    from safetensors.torch import save

    torch.manual_seed(1)
    bucket, size, places = store.bucket("sharing"), 0, {}
    for layer in range(layers):
        name = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        weight, bias = torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH)
        data = save({f"{layer}.weight": weight, f"{layer}.bias": bias})
        places |= {f"{layer}.weight": name, f"{layer}.bias": name}
        bucket.put(f"model/{name}", data)
        size += len(data)
    index = json.dumps({"metadata": {}, "weight_map": places})
    bucket.put("model/model.safetensors.index.json", index.encode())
    return size


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", nargs=4, metavar=("LAYERS", "URL", "OPTIONS", "START"))
    parser.add_argument("--link", type=int, metavar="MEGABYTES_PER_SECOND")
    parser.add_argument("--limited", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments: Any = parser.parse_args()
    if arguments.rank:
        layers, url, options, start = arguments.rank
        load(int(layers), url, json.loads(options), float(start))
        return
    limited = arguments.limited
    if arguments.link and not limited:
        limit_link(arguments.link)
        return
    layers = max(round(arguments.gigabytes * 1e9 / (4 * _WIDTH * (_WIDTH + 1))), 1)
    with running_object_store() as store:
        size = put_model(store, layers)
        link = f"link of {arguments.link} MB/s, " if limited else ""
        print(f"{size / MB:.0f} MB, {arguments.ranks} ranks, {link}load {os.getloadavg()[0]:.1f}\n")
        print("| | downloaded / model | requests | seconds | rounds | beyond the model MB |")
        print("|:--|--:|--:|--:|:--|--:|")
        found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for number in range(arguments.rounds):
            for share in (False, True) if number % 2 else (True, False):
                figures = run_ranks(store, arguments.ranks, layers, share=share, limited=limited)
                found[share].append(figures)
    for share, rounds in found.items():
        columns = {name: [one[name] for one in rounds] for name in rounds[0]}
        print(
            f"| {'shared' if share else 'each for itself'} |"
            f" {statistics.median(columns['sent']) / size:.3f} |"
            f" {'' if limited else format(statistics.median(columns['requests']), '.0f')} |"
            f" {statistics.median(columns['seconds']):.2f} |"
            f" {', '.join(f'{seconds:.1f}' for seconds in columns['seconds'])} |"
            f" {max(columns['beyond']) / MB:.0f} |"
        )


if __name__ == "__main__":
    main()
