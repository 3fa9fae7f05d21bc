"""Packs or unpacks a model folder with the library that owns the format, tensor by tensor.

    python benchmarks/packing_own_way.py FORM pack|unpack SOURCE OUT

Nothing is loaded but the tensors that a call of the library takes, so that this is the fastest way
through it on a CPU. Each form needs its library only.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
# How the tensors of one weight end, and what turns them into those of the output.
Way = tuple[tuple[str, ...], Callable[[Tensors], Mapping[str, torch.Tensor]]]
_GROUP = 128
_FILE_BYTES = 1_000_000_000


def _fp8_block(task: str) -> Way:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    quantizer: Any = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    if task == "pack":
        made = Fp8Quantize(quantizer)
        return ("weight",), lambda held: made._quantize_one("weight", held["weight"])  # noqa: SLF001
    back = Fp8Dequantize(quantizer)

    def unpack(held: Tensors) -> Tensors:
        scale = held["weight_scale_inv"]
        return {"weight": back._dequantize_one(held["weight"], scale, torch.bfloat16)}  # noqa: SLF001

    return ("weight", "weight_scale_inv"), unpack


def _gpt_oss(_task: str) -> Way:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def unpack(held: Tensors) -> Tensors:
        return {"": convert_moe_packed_tensors(held["_blocks"], held["_scales"])}

    return ("_blocks", "_scales"), unpack


def _compressed_tensors(form: str, task: str) -> Way:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures" / "generators"))
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from packed_weights import FORMS, pack

    preset, name = next((preset, name) for choice, preset, name in FORMS if choice == form)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if task == "pack":
        return ("weight",), lambda held: pack(held["weight"], scheme, name)
    compressor = BaseCompressor.get_value_from_registry(name)
    parts = {
        "fp8-channel": ("weight",),
        "int8-channel": ("weight",),
        "int4-group": ("weight_packed", "weight_shape"),
        "nvfp4": ("weight_packed", "weight_global_scale"),
        "mxfp4": ("weight_packed",),
    }[form]
    return (*parts, "weight_scale"), lambda held: compressor.decompress(held, scheme)


def _gptq(_task: str) -> Way:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    def unpack(held: Tensors) -> Tensors:
        made = TorchLinear(
            bits=4,
            group_size=_GROUP,
            desc_act=False,
            sym=False,
            in_features=held["qweight"].shape[0] * 8,
            out_features=held["qweight"].shape[1],
            bias=False,
            pack_dtype=torch.int32,
        )
        made.load_state_dict(held)
        made.post_init()
        return {"weight": made.dequantize_weight().T.bfloat16()}

    return ("qweight", "qzeros", "scales", "g_idx"), unpack


def _awq(_task: str) -> Way:
    from awq.utils.packing_utils import dequantize_gemm

    def unpack(held: Tensors) -> Tensors:
        made = dequantize_gemm(held["qweight"], held["qzeros"], held["scales"], 4, _GROUP)
        return {"weight": made.T.bfloat16()}

    return ("qweight", "qzeros", "scales"), unpack


_WAYS = {"fp8-block": _fp8_block, "gpt-oss": _gpt_oss, "gptq": _gptq, "awq": _awq}


def _convert(source: Path, way: Way) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the output."""
    files = [safe_open(path, "pt") for path in sorted(source.glob("*.safetensors"))]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118  no mapping
    parts, change = way
    for name, file in places.items():
        if "_proj" not in name:
            yield name, file.get_tensor(name)
        elif name.endswith(parts[0]):
            stem = name.removesuffix(parts[0])
            held = {part: places[stem + part].get_tensor(stem + part) for part in parts}
            for part, value in change(held).items():
                yield stem + part, value.contiguous()


def main(form: str, task: str, source: Path, out: Path) -> None:
    """Writes the files of the output, and those of the source that are no weights."""
    make = _WAYS.get(form)
    way = make(task) if make else _compressed_tensors(form, task)
    out.mkdir()
    held: Tensors = {}
    places: dict[str, str] = {}
    number = 0
    for name, value in _convert(source, way):
        held[name] = value
        if sum(one.nbytes for one in held.values()) >= _FILE_BYTES:
            save_file(held, out / f"{number}.safetensors", metadata={"format": "pt"})
            held, number = {}, number + 1
        places[name] = f"{number}.safetensors"
    if held:
        save_file(held, out / f"{number}.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    shutil.copy(source / "config.json", out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
