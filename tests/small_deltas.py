"""Small models for deltas, changes of them, and a reader of deltas that shares no code with ours.

The reader has `json`, `zstandard`, `numpy` and a hash function each, as an engine has.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import blake3
import ml_dtypes
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray
from safetensors.numpy import load_file

Model = dict[str, NDArray[np.generic]]
ModelBytes = dict[str, tuple[str, tuple[int, ...], str]]
LEAF = 8 << 20
_DTYPES = {
    "bfloat16": "BF16",
    "float32": "F32",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "int64": "I64",
    "bool": "BOOL",
    "uint8": "U8",
    "complex64": "C64",
}
HASHES = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def make_model(seed: int = 0, *, large: int = 3 * LEAF // 2 + 10) -> Model:
    """Returns tensors of many kinds; one has several leaves of bfloat16."""
    random = np.random.default_rng(seed)
    return {
        "model.layers.0.mlp.weight": random.standard_normal((33, 17)).astype(ml_dtypes.bfloat16),
        "model.layers.1.mlp.weight": random.standard_normal(large // 2).astype(ml_dtypes.bfloat16),
        "model.layers.10.mlp.weight": random.standard_normal((5, 4)).astype(np.float32),
        "model.norm.weight": random.standard_normal(7).astype(np.float16),
        'a name/with spaces \u00e9"': random.standard_normal(9).astype(ml_dtypes.float8_e4m3fn),
        "count": np.array(3, np.int64),
        "mask": random.integers(0, 2, 11).astype(bool),
        "phases": (random.standard_normal(6) + 1j).astype(np.complex64),
        "empty": np.zeros((0, 3), np.float32),
    }


def change_model(model: Model, seed: int, share: float = 0.05) -> Model:
    """Returns the model with a share of the elements of some tensors flipped in a few bits."""
    random = np.random.default_rng(seed)
    changed = {}
    for number, (name, tensor) in enumerate(model.items()):
        raw = np.frombuffer(tensor.tobytes(), np.uint8).copy()
        if number % 4 != seed % 4 and tensor.dtype != bool:
            flipped = random.random(len(raw)) < share
            raw[flipped] ^= random.integers(1, 256, int(flipped.sum())).astype(np.uint8)
        changed[name] = np.frombuffer(raw.tobytes(), tensor.dtype).reshape(tensor.shape)
    return changed


def write_model(folder: Path, model: Model) -> Path:
    """Writes a folder of one file, without a configuration; scalars stay scalars."""
    folder.mkdir(parents=True)
    header, data = {}, b""
    for name, tensor in sorted(model.items(), key=lambda item: -item[1].itemsize):
        place = [len(data), len(data) + tensor.nbytes]
        dtype = _DTYPES[str(tensor.dtype)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": place}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def write_steps(folder: Path, first: Model, changes: int) -> list[Model]:
    """Writes a model and what becomes of it into the folders s0, s1 and so on; returns them."""
    models = [first]
    for number in range(1, changes + 1):
        models.append(change_model(models[-1], number))
    for number, model in enumerate(models):
        write_model(folder / f"s{number}", model)
    return models


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def model_bytes(folder: Path) -> ModelBytes:
    """Returns element type, shape and a digest of every tensor in the files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                shape = tuple(entry["shape"])
                found[name] = entry["dtype"], shape, digest_of(raw[start + first : start + last])
    return found


def bytes_of(model: Model) -> ModelBytes:
    return {
        name: (_DTYPES[str(t.dtype)], t.shape, digest_of(t.tobytes())) for name, t in model.items()
    }


def apply_independently(folder: Path, base: Model) -> dict[str, str]:
    """Applies a delta, compares the checksums of changed tensors, and returns digests of all."""
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    metadata, after = index["metadata"], {n: t.tobytes() for n, t in base.items()}
    assert metadata["compression_format"] == "zstd"
    stored: dict[str, NDArray[np.generic]] = {}
    checksums: dict[str, str] = {}
    for file in sorted(set(index["weight_map"].values())):
        raw = (folder / file).read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        checksums |= header["__metadata__"]
        found = load_file(folder / file)
        assert set(found) == {n for n, f in index["weight_map"].items() if f == file}
        stored |= found
    for name, compressed in stored.items():
        data = zstandard.ZstdDecompressor().decompress(compressed.tobytes())
        change = np.frombuffer(data, np.uint8)
        new = np.frombuffer(after[name], np.uint8).copy()
        if metadata["delta_encoding"] == "xor":
            new ^= change
        else:
            count = int.from_bytes(data[:4], "little")
            positions = np.frombuffer(data, "<u4", count, 4)
            new[positions] = change[4 + 4 * count :]
        assert HASHES[metadata["checksum_format"]](new.tobytes()) == checksums[name]
        after[name] = new.tobytes()
    return {name: digest_of(data) for name, data in after.items()}
