"""Makes a model that a form packs which ckptkit only unpacks, of random numbers.

    python benchmarks/make_packed.py gpt-oss|gptq|awq BASE OUT

The layers are those of `BASE`, a bfloat16 Llama. For GPT-OSS, one layer is made with experts that
take as many bytes unpacked.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
_GROUP, _HELD, _BLOCK = 128, 8, 32
_GPT_OSS, _VOCABULARY = 2880, 1024  # its hidden and its intermediate size; fewer words
_CONFIGS = {
    "gpt-oss": {"quant_method": "mxfp4"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm"},
}


def _words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns), dtype=torch.int32)


def _pack(form: str, rows: int, columns: int) -> Tensors:
    """Returns the tensors of one weight."""
    groups = columns // _GROUP
    made = {
        "qweight": _words(columns // _HELD, rows) if form == "gptq" else _words(columns, rows // 8),
        "qzeros": _words(groups, rows // _HELD),
        "scales": (torch.rand(groups, rows) / 256 + 0.001).half(),
    }
    if form == "gptq":
        made["g_idx"] = torch.arange(columns, dtype=torch.int32) // _GROUP
    return made


def _make_gpt_oss(size_bytes: int, out: Path) -> Tensors:
    """Returns one layer of GPT-OSS with so many experts; saves its configuration."""
    from transformers import GptOssConfig, GptOssForCausalLM  # no other form needs it

    count = max(1, size_bytes // (2 * 3 * _GPT_OSS * _GPT_OSS))
    config = GptOssConfig(num_hidden_layers=1, num_local_experts=count, vocab_size=_VOCABULARY)
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    config.save_pretrained(out)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    made = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = torch.randn(value.shape).bfloat16()
            continue
        experts, columns, rows = value.shape
        shape = experts, rows, columns // _BLOCK
        made[f"{name}_blocks"] = torch.randint(0, 256, (*shape, _BLOCK // 2), dtype=torch.uint8)
        made[f"{name}_scales"] = torch.randint(115, 125, shape, dtype=torch.uint8)
    return made


def main(form: str, base: Path, out: Path) -> None:
    """Writes the folder."""
    torch.manual_seed(0)
    files = sorted(base.glob("*.safetensors"))
    tensors: Tensors = {}
    if form == "gpt-oss":
        tensors = _make_gpt_oss(sum(path.stat().st_size for path in files), out)
    else:
        for path in files:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  no mapping
                    value = file.get_tensor(name)
                    if "_proj" not in name:
                        tensors[name] = value
                        continue
                    stem = name.removesuffix("weight")
                    tensors |= {stem + part: t for part, t in _pack(form, *value.shape).items()}
        out.mkdir(parents=True)
        shutil.copy(base / "config.json", out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = _CONFIGS[form]
    (out / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
