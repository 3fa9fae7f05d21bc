"""Deltas between two steps of reinforcement learning, beside reading both and beside slime's way.

Usage: python benchmarks/delta.py [--gigabytes 2] [--repeats 5] [--cold] [--slime FILE]

The models are bfloat16, in one file each; 1 % of the elements of the second differ from the first
by one unit in the last place. Every tool runs as a process of its own, start included, with both
models in the page cache, or with `--cold` out of it. The order changes from round to round, and
ratios are medians of the ratios within a round. `--slime` names slime/utils/disk_delta.py, whose
functions then read, compare, compress and checksum as slime does when it publishes; what it writes
is not durable. Applying is measured beside a copy of the base, with one delta and with ten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from measuring import (
    MB,
    WORK,
    Sample,
    ckptkit,
    cool,
    files_below,
    keep,
    make_once,
    markdown,
    measure,
    median_ratio,
    settle,
    size_below,
    warm,
)

TENSORS, CHAIN = 40, 10
_MAKE = """
import json, sys
from pathlib import Path
import numpy as np
out, elements, tensors, steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
for step in range(steps):
    folder = out / f"step{step}"
    folder.mkdir(parents=True)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for i in range(tensors):
        place = [at, at + 2 * elements]
        header[f"model.layers.{i}.weight"] = {
            "dtype": "BF16", "shape": [elements // 1000, 1000], "data_offsets": place}
        at += 2 * elements
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in range(tensors):
            random = np.random.default_rng([0, i])
            weight = random.standard_normal(elements, dtype=np.float32) * np.float32(0.02)
            bits = (weight.view(np.uint32) >> 16).astype(np.uint16)
            for past in range(1, step + 1):
                random = np.random.default_rng([past, i])
                changed = np.flatnonzero(random.random(elements, dtype=np.float32) < 0.01)
                bits[changed] += random.choice(np.array([1, 65535], np.uint16), len(changed))
            bits.tofile(file)
(out / "done").touch()
"""
_READ = """
import sys
from concurrent.futures import ThreadPoolExecutor
def read(path):
    block = bytearray(8 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
with ThreadPoolExecutor(2) as pool:
    list(pool.map(read, sys.argv[1:]))
"""
_SLIME = """
import importlib.util, json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np, safetensors.numpy, zstandard
spec = importlib.util.spec_from_file_location("disk_delta", sys.argv[1])
slime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slime)
base, new, out = map(Path, sys.argv[2:])
before, after = slime.make_tensor_reader(str(base)), slime.make_tensor_reader(str(new))
def encode(name):
    old, values = before(name), after(name)
    difference = values ^ old
    if not np.count_nonzero(difference):
        return name, None, None
    stored = zstandard.ZstdCompressor(level=1).compress(difference)
    return name, np.frombuffer(stored, np.uint8), slime.checksum("xxh3-128", values)
with ThreadPoolExecutor(slime.NUM_WORKERS) as pool:
    found = [entry for entry in pool.map(encode, slime._tensor_locations(str(new)))]
out.mkdir()
stored = {name: data for name, data, _ in found if data is not None}
sums = {name: text for name, _, text in found if text is not None}
name = "model-00000-of-00001.safetensors"
(out / name).write_bytes(safetensors.numpy.save(stored, metadata=sums))
index = {"metadata": {"version": "000001"}, "weight_map": dict.fromkeys(stored, name)}
(out / "model.safetensors.index.json").write_text(json.dumps(index))
"""
_SIZES = """
import sys
import numpy as np, zstandard
from safetensors import safe_open
total = 0
with safe_open(sys.argv[1], "pt") as a, safe_open(sys.argv[2], "pt") as b:
    for name in a.keys():
        import torch
        one, other = (f.get_tensor(name).view(torch.int16).numpy() for f in (a, b))
        total += len(zstandard.ZstdCompressor(level=1).compress(one ^ other))
print(total)
"""
_COPY = 'cp -r "$2" "$1" && find "$1" -type f -exec sync {} +'
LABELS = {
    "read": "reading both models, two threads",
    "ckptkit": "`ckptkit delta create`",
    "overwrite": "`ckptkit delta create --encoding overwrite`",
    "slime": "slime's functions: read, compare, compress, checksum, save",
    "cp": "`cp` of the base, then `sync`",
    "one": "`ckptkit delta apply`, one delta",
    "ten": "`ckptkit delta apply`, ten deltas",
}
Samples = dict[str, list[Sample]]


def make_inputs(gigabytes: float) -> Path:
    """Returns a folder with the steps of a chain, made when it is not there yet."""
    out = WORK / f"delta-{gigabytes:g}GB"
    elements = round(gigabytes * 1e9 / 2 / TENSORS) // 1000 * 1000
    words = [str(out), str(elements), str(TENSORS), "2"]
    return make_once(out, "done", [sys.executable, "-c", _MAKE, *words])


def make_chain(inputs: Path) -> list[Path]:
    """Returns ten deltas: the steps forth and back, which is as much to read as ten others."""
    chain = []
    for number in range(1, CHAIN + 1):
        out = inputs / "chain" / f"weight_v{number:06d}"
        sides = [str(inputs / f"step{(number + turn) % 2}") for turn in (1, 0)]
        if not out.exists():
            measure(ckptkit("delta", "create", *sides, str(out), "--quiet"))
        chain.append(out)
    return chain


def run_rounds(
    tools: Mapping[str, list[str]], read: Sequence[Path], out: Path, repeats: int, *, cold: bool
) -> tuple[Samples, dict[str, int]]:
    """Measures every tool once per round; returns the sizes of what they wrote, too."""
    samples: Samples = {name: [] for name in tools}
    sizes = {}
    names = list(tools)
    for number in range(repeats):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            settle(out)
            (cool if cold else warm)(read)
            samples[name].append(measure(tools[name]))
            sizes[name] = size_below(out) if out.exists() else 0
            print(f"  round {number + 1} {name}: {samples[name][-1].seconds:.2f} s", flush=True)
    settle(out)
    return samples, sizes


def table(samples: Samples, sizes: Mapping[str, int], baseline: str) -> str:
    """Formats what was measured, one line a tool."""
    ratio = "x reading" if baseline == "read" else "x cp"
    header = ("", "seconds (median)", "min", "max", ratio, "CPU seconds", "peak MB", "written MB")
    rows = []
    for name, taken in samples.items():
        seconds = [sample.seconds for sample in taken]
        values = (statistics.median(seconds), min(seconds), max(seconds))
        ratio = f"{median_ratio(seconds, [sample.seconds for sample in samples[baseline]]):.2f}"
        cpu = statistics.median(sample.cpu_seconds for sample in taken)
        peak = max(sample.peak_bytes for sample in taken) / MB
        written = f"{sizes[name] / MB:,.1f}" if sizes[name] else ""
        times = [f"{value:.2f}" for value in values]
        rows.append([LABELS[name], *times, ratio, f"{cpu:.2f}", f"{peak:,.0f}", written])
    return markdown(header, rows)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--slime", type=Path)
    given = parser.parse_args()
    inputs = make_inputs(given.gigabytes)
    chain = make_chain(inputs)
    out = inputs / "out"
    sides = [str(inputs / "step0"), str(inputs / "step1")]
    files = [f"{side}/model.safetensors" for side in sides]
    creating = {
        "read": [sys.executable, "-c", _READ, *files],
        "ckptkit": ckptkit("delta", "create", *sides, str(out), "--quiet"),
        "overwrite": ckptkit(
            "delta", "create", *sides, str(out), "--quiet", "--encoding", "overwrite"
        ),
    }
    if given.slime is not None:
        words = [str(given.slime), *sides, str(out)]
        creating["slime"] = [sys.executable, "-c", _SLIME, *words]
    apply = ckptkit("delta", "apply", sides[0])
    applying = {
        "cp": ["sh", "-c", _COPY, "sh", str(out), sides[0]],
        "one": [*apply, str(chain[0]), str(out), "--quiet"],
        "ten": [*apply, *map(str, chain), str(out), "--quiet"],
    }
    document = {}
    for tools, baseline in ((creating, "read"), (applying, "cp")):
        read = [path for step in ("step0", "step1") for path in files_below(inputs / step)]
        samples, sizes = run_rounds(tools, read, out, given.repeats, cold=given.cold)
        document[baseline] = {name: list(map(asdict, taken)) for name, taken in samples.items()}
        print(f"\n{table(samples, sizes, baseline)}\n")
        if baseline == "read":
            stored = int(measure([sys.executable, "-c", _SIZES, *files]).output.splitlines()[-1])
            share = sizes["ckptkit"] / stored
            print(f"zstd -1 of the xor alone: {stored / MB:,.1f} MB; the delta is {share:.3f} x\n")
            document["zstd_bytes"] = stored
    keep(f"delta{'-cold' if given.cold else ''}", json.loads(json.dumps(document)))


if __name__ == "__main__":
    main()
