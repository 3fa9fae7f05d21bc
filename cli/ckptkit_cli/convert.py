"""`ckptkit convert`: a model in another layout."""

from __future__ import annotations

from typing import Any, get_args

from ckptkit.options import GGUF, Layout, check_choice, refuse_gguf
from ckptkit_cli._options import CONVERSION, WRITTEN, make_job
from ckptkit_cli._output import Output
from ckptkit_cli._program import Option, command
from ckptkit_cli.consolidate import run_conversion


def _parse_layout(text: str) -> str:
    """Reads `--to`; the command itself refuses GGUF, since it knows the paths."""
    if text.lower() == GGUF:
        return GGUF
    check_choice("--to", text, get_args(Layout))
    return text


_TO = Option(
    "--to",
    WRITTEN,
    "Format of the output.",
    choices=get_args(Layout),
    required=True,
    parse=_parse_layout,
)


@command(*CONVERSION, _TO, order=3)
def convert(output: Output, to: Layout, **values: Any) -> None:
    """Write a model in another layout.

        ckptkit convert runs/llama shards/llama --to dcp

    'hf' is a folder that Transformers loads, 'torch' a pytorch_model.bin, and 'dcp' a sharded
    checkpoint that FSDP training starts from. 'megatron' is one that Megatron-LM starts from at
    any parallel size, 'torchtitan' one for torchtitan, 'universal' one that DeepSpeed loads with
    `load_universal`, on any number of GPUs. With --optimizer, the run goes on there. Checks and
    options are those of consolidate. GGUF is made of a model folder by llama.cpp.
    """
    if str(to) == GGUF:
        refuse_gguf(values["src"], values["out"])
    run_conversion(output, "convert", make_job(to, values), values)
