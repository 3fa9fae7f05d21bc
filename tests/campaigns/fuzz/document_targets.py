"""Parsers of documents: manifests, configurations, files of a run, name maps, deltas."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import xxhash
import zstandard

from ckptkit.consumers.side_files import rewrite_side_file
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CkptkitError
from ckptkit.core.index import Fqn
from ckptkit.core.manifest import parse_manifest
from ckptkit.core.model_configs import (
    list_model_types,
    model_config_to_json,
    parse_json_object,
    parse_model_config,
)
from ckptkit.deltas.encoding import Change, open_decoder
from ckptkit.deltas.form import Encoding, read_delta
from ckptkit.formats.parsing import find_data_files, read_index_document
from ckptkit.hub.contents import (
    ModelFacts,
    base_model_of,
    scrub_card,
    scrub_content,
    write_card,
)
from ckptkit.lora.config import LoraSettings, find_old_alpha, parse_version
from ckptkit.lora.quantized import compare_bases, identify_base, parse_base_record
from ckptkit.lora.quantized import parse_recorded_base as recorded_base
from ckptkit.name_maps.apply import apply_map
from ckptkit.name_maps.language import invert, parse_map
from ckptkit.name_maps.shipped import list_map_names, read_map_text
from ckptkit.runs.step_manifests import read_findings
from ckptkit.runs.steps import step_of_source
from ckptkit.storage.manifests import EarlierOutput
from ckptkit.storage.overlay import MemorySource
from tests.campaigns.fuzz.judge import Target
from tests.campaigns.fuzz.mutation import (
    mutate_json,
    mutate_safetensors,
    mutate_toml,
    mutate_zstd,
)
from tests.campaigns.fuzz.seeds import found_in_fixtures, prefixed, strict


def _run_manifest(data: bytes) -> None:
    EarlierOutput.from_manifest(data, "x").removable(["a", "../b"])
    manifest = parse_manifest(data, where="x")
    read_findings(manifest)
    json.dumps(dict(step_of_source(1, "checkpoint-1", manifest.source).metrics))
    facts = ModelFacts("m", None, None, manifest.options, manifest)
    write_card(facts).encode()
    parse_base_record(manifest, "x")
    parse_manifest(manifest.to_json(), where="what was written")


_MODULES = (
    "base_model.model.model.layers.0.self_attn.q_proj",
    "model.layers.17.mlp.experts.3.down_proj",
    "lm_head",
)


def _run_adapter(data: bytes) -> None:
    document = parse_json_object(data, where="x")
    settings = LoraSettings.parse(document, where="x")
    for module in _MODULES:
        settings.scaling(module)
        find_old_alpha(settings, module, 8)
    parse_version(settings.peft_version)
    compare_bases(recorded_base(settings), identify_base("/models/x", document))


def _run_model_config(data: bytes) -> None:
    config = parse_model_config(data, where="x")
    list_model_types(config)
    rewrite_side_file("config.json", len(data), lambda: data)
    rewrite_side_file("generation_config.json", len(data), lambda: data)
    base_model_of(config, None, None)
    write_card(ModelFacts("m", None, None, config, None)).encode()
    parse_model_config(model_config_to_json(config), where="what was written")
    for path in ("config.json", "ckptkit.json", "adapter_config.json", "tokenizer_config.json"):
        scrub_content(path, data, None)


def _run_card(data: bytes) -> None:
    scrub_card(data.decode(errors="surrogateescape"))


_CONFIG = {
    "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "n": 4,
    "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_local_experts": 2,
}  # fmt: skip
_SPECS = {
    Fqn(name): (dtype_named("float32"), shape)
    for name, shape in {
        "embedding.word_embeddings.weight": (32, 8),
        "decoder.layers.0.self_attention.linear_qkv.weight": (16, 8),
        "decoder.layers.1.self_attention.linear_qkv.weight": (16, 8),
        "tok_embeddings.weight": (32, 8),
        "layers.0.attention.wq.weight": (8, 8),
        "layers.1.attention.wq.weight": (8, 8),
        "a.0.w": (8, 4),
        "a.1.w": (8, 4),
        "b": (4,),
    }.items()
}
_SMALL_MAP = """
name = "small"
source = "A"
target = "B"
model_types = ["llama"]
[sizes]
heads = "num_attention_heads"
dim = ["head_dim", "hidden_size / heads"]
[[rule]]
from = "a.{l}.w"
to = ["c.{l}.(x|y)", "d.{l}"]
steps = [{ split = ["heads * dim / 2", 4], axis = 0 }]
[[rule]]
from = "b"
to = "e"
steps = [{ reorder = "(p q) -> (q p)", p = 2, q = "n / 2" }]
[[rule]]
from = "*"
drop = "not needed"
optional = true
"""


def _run_map(data: bytes) -> None:
    name_map = parse_map(data.decode("utf-8", "replace"), where="x")
    invert(name_map)
    for names in (_SPECS, map(Fqn, ("a.0.w", "a.1.w", "b")), [Fqn("b")]):
        with suppress(CkptkitError):
            apply_map(name_map, _CONFIG, {name: _SPECS[name] for name in names}, where="x")


def _map_seeds() -> list[bytes]:
    whole = [read_map_text(name).encode() for name in list_map_names()]
    return [_SMALL_MAP.encode(), *(text for text in whole if b"extends" not in text)]


def _run_index(data: bytes) -> None:
    files = {"model.safetensors.index.json": data, "model-00001-of-00002.safetensors": b""}
    source = MemorySource(files)
    read_index_document(source, "model.safetensors.index.json")
    from ckptkit.formats.safetensors.reader import SafetensorsReader

    for candidate in SafetensorsReader().find(sorted(files)):
        find_data_files(source, candidate)


def _delta_files() -> dict[str, bytes]:
    compress = zstandard.ZstdCompressor(level=1).compress
    changes = {"a": compress(bytes(8)), "b": compress(b"\1\2\3")}
    header: dict[str, Any] = {
        "__metadata__": dict.fromkeys(changes, xxhash.xxh3_128(b"").hexdigest())
    }
    at = 0
    for name, change in changes.items():
        end = at + len(change)
        header[name] = {"dtype": "U8", "shape": [len(change)], "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    file = "model-00000-of-00001.safetensors"
    metadata = {
        "version": "000002", "base_version": "000001", "delta_encoding": "xor",
        "compression_format": "zstd", "checksum_format": "xxh3-128",
    }  # fmt: skip
    index = {"metadata": metadata, "weight_map": dict.fromkeys(changes, file)}
    data = struct.pack("<Q", len(raw)) + raw + b"".join(changes.values())
    return {file: data, "model.safetensors.index.json": json.dumps(index).encode()}


def _run_delta(data: bytes) -> None:
    files = _delta_files()
    name = sorted(files)[(data[0] if data else 0) % len(files)]
    delta = read_delta(MemorySource({**files, name: data[1:]}), "x")
    for tensor in delta.tensors.values():
        delta.source.read(tensor.path, tensor.start, tensor.stop)
    _ = delta.base_digests, delta.changed_elements


def _mutate_delta(rng: Random, data: bytes) -> bytes:
    is_file = (data[0] if data else 0) % 2 == 0
    return prefixed(mutate_safetensors if is_file else mutate_json, 1)(rng, data)


_TENSOR_BYTES = 64


def _run_change(data: bytes) -> None:
    """The first byte chooses the encoding; the rest is the frame."""
    encoding: Encoding = "overwrite" if data[:1] < b"\x80" else "xor"
    frame = data[1:]
    decoder = open_decoder(encoding, strict(frame), len(frame), _TENSOR_BYTES, where="x")
    half = _TENSOR_BYTES // 2
    for start in (0, half):
        decoder.fold(start, Change(half))
    decoder.finish()
    open_decoder(encoding, strict(frame), len(frame), 1 << 32, where="x").skim()


def _change_seeds() -> list[bytes]:
    compress = zstandard.ZstdCompressor(level=1).compress
    positions = np.array([1, 5, 63], "<u4").tobytes()
    written = (3).to_bytes(4, "little") + positions + b"\1\2\3"
    return [b"\xff" + compress(bytes(range(_TENSOR_BYTES))), b"\0" + compress(written)]


def _index_seeds() -> list[bytes]:
    return found_in_fixtures("**/*.index.json", 4)


def _manifest_seeds() -> list[bytes]:
    return found_in_fixtures("**/ckptkit.json", 8, 40_000)


def _config_seeds() -> list[bytes]:
    return found_in_fixtures("**/config.json", 10) + found_in_fixtures(
        "**/generation_config.json", 2
    )


def _card_seeds() -> list[bytes]:
    card = "---\nbase_model: /models/x\ntags:\n- base_model:adapter:/x\nlicense: mit\n---\n# A\n"
    return [card.encode(), *found_in_fixtures("**/README.md", 2)]


TARGETS = (
    Target("manifest", _run_manifest, _manifest_seeds, mutate_json, share=6),
    Target(
        "adapter-config",
        _run_adapter,
        lambda: found_in_fixtures("**/adapter_config.json", 10),
        mutate_json,
        share=8,
    ),
    Target("model-config", _run_model_config, _config_seeds, mutate_json, share=8),
    Target("model-card", _run_card, _card_seeds, mutate_toml, share=6),
    Target("name-map", _run_map, _map_seeds, mutate_toml, share=4, free_bytes=8 << 20),
    Target("index-file", _run_index, _index_seeds, mutate_json, share=10),
    Target(
        "delta",
        _run_delta,
        lambda: [bytes([n]) + d for n, (_, d) in enumerate(sorted(_delta_files().items()))],
        _mutate_delta,
        share=6,
    ),
    Target(
        "change-stream",
        _run_change,
        _change_seeds,
        prefixed(mutate_zstd, 1),
        share=8,
        free_bytes=24 << 20,
    ),
)
