"""Makes the input of the merge benchmark: a bfloat16 Llama and a LoRA on all its linear layers.

    python benchmarks/make_base_and_adapter.py OUT --gigabytes 2 --rank 16 [--attention-only]

`OUT/base` is what `save_pretrained` writes, in files of about 1 GB, and `OUT/adapter` what PEFT
writes. All weights are random.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

_VOCABULARY = 32000
_FILE_BYTES = 1_000_000_000
_POOL = 1 << 25
_NAMES: Mapping[DTypeLike, str] = {ml_dtypes.bfloat16: "BF16", np.float32: "F32"}
_POSITIONS = 2048
_WIDE_FROM = 6.0  # gigabytes
Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Size:
    """The dimensions of a Llama."""

    hidden: int
    intermediate: int
    layers: int

    @classmethod
    def of(cls, gigabytes: float) -> Size:
        """Returns those with about that many bytes of bfloat16 weights."""
        hidden, intermediate = (4096, 11008) if gigabytes >= _WIDE_FROM else (2048, 5632)
        per_layer = 2 * (4 * hidden * hidden + 3 * hidden * intermediate)
        outside = 2 * 2 * _VOCABULARY * hidden
        return cls(hidden, intermediate, max(1, round((gigabytes * 1e9 - outside) / per_layer)))

    def linear_layers(self) -> Shapes:
        """Returns the modules that get an adapter, with the shapes of their weights."""
        square = self.hidden, self.hidden
        shapes = {f"self_attn.{name}_proj": square for name in "qkvo"}
        shapes |= {f"mlp.{name}_proj": (self.intermediate, self.hidden) for name in ("gate", "up")}
        shapes |= {"mlp.down_proj": (self.hidden, self.intermediate)}
        return {
            f"model.layers.{number}.{name}": shape
            for number in range(self.layers)
            for name, shape in shapes.items()
        }


class _Weights:
    """Normal numbers out of one pool: making a thousand million afresh takes minutes."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        pool = self._random.standard_normal(_POOL, np.float32)
        self._pool: dict[str, NDArray[np.generic]] = {
            "BF16": (pool * np.float32(0.02)).astype(ml_dtypes.bfloat16),
            "F32": pool * np.float32(0.02),
        }

    def take(self, elements: int, name: str) -> Iterator[bytes]:
        pool = self._pool[name]
        while elements:
            start = int(self._random.integers(0, _POOL // 2))
            piece = pool[start : start + min(elements, _POOL // 2)]
            elements -= len(piece)
            yield piece.tobytes()


def _write(path: Path, shapes: Mapping[str, tuple[int, ...]], name: str, weights: _Weights) -> None:
    """Writes a safetensors file."""
    itemsize = 2 if name == "BF16" else 4
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, shape in shapes.items():
        size = int(np.prod(shape)) * itemsize
        header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            for data in weights.take(int(np.prod(shape)), name):
                file.write(data)


def _files(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    held: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        held[key] = shape
        if 2 * sum(int(np.prod(shape)) for shape in held.values()) >= _FILE_BYTES:
            yield held
            held = {}
    if held:
        yield held


def make_base(out: Path, size: Size, weights: _Weights) -> None:
    """Writes the model's folder."""
    out.mkdir(parents=True)
    edge = _VOCABULARY, size.hidden
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": edge}
    shapes |= {f"{name}.weight": shape for name, shape in size.linear_layers().items()}
    for number in range(size.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{number}.{norm}.weight"] = (size.hidden,)
    shapes |= {"model.norm.weight": (size.hidden,), "lm_head.weight": edge}
    files = list(_files(shapes))
    places: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        path = out / f"model-{number:05}-of-{len(files):05}.safetensors"
        _write(path, held, "BF16", weights)
        places |= dict.fromkeys(held, path.name)
    total = 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // 128,
        "num_key_value_heads": size.hidden // 128,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))


def make_adapter(out: Path, base: Path, layers: Shapes, rank: int, weights: _Weights) -> None:
    """Writes the adapter's folder."""
    out.mkdir(parents=True)
    shapes = {}
    for name, (rows, columns) in layers.items():
        shapes[f"base_model.model.{name}.lora_A.weight"] = (rank, columns)
        shapes[f"base_model.model.{name}.lora_B.weight"] = (rows, rank)
    _write(out / "adapter_model.safetensors", shapes, "F32", weights)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--attention-only", action="store_true", help="of the adapter")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    size, weights = Size.of(options.gigabytes), _Weights()
    layers = size.linear_layers()
    if options.attention_only:
        layers = {name: shape for name, shape in layers.items() if ".self_attn." in name}
    make_adapter(options.out / "adapter", options.out / "base", layers, options.rank, weights)
    make_base(options.out / "base", size, weights)
    (options.out / "done").touch()


if __name__ == "__main__":
    main()
