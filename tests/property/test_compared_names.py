"""What is refused is what `from_pretrained` reports of the folder that `--names live` writes.

Of what is written, it reports nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

import ckptkit  # noqa: E402
from ckptkit.core.errors import RefusedError  # noqa: E402
from tests.property.examples import examples  # noqa: E402

TEXT = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**TEXT, "intermediate_size": 20, "num_key_value_heads": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", LLAMA),
    "LlamaForSequenceClassification": ("LlamaConfig", {**LLAMA, "num_labels": 2}),
    "LlamaModel": ("LlamaConfig", LLAMA),
    "Qwen2ForCausalLM": ("Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8},
    ),
    "BertForMaskedLM": (
        "BertConfig",
        {**TEXT, "intermediate_size": 20, "max_position_embeddings": 8},
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


@cache
def saved(family: str) -> tuple[Any, dict[str, Any]]:
    """Returns the configuration of a small model and the tensors of its files."""
    from safetensors.torch import load_file

    name, values = FAMILIES[family]
    model = getattr(transformers, family)(getattr(transformers, name)(**values))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model.config, load_file(Path(folder, "model.safetensors"))


Tensors = dict[str, Any]
EDITS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "drop": lambda found, name: {n: v for n, v in found.items() if n != name},
    "drop a layer": lambda found, _: {n: v for n, v in found.items() if ".1." not in n} or found,
    "rename": lambda found, name: {
        (n.replace("weight", "kernel") if n == name else n): v for n, v in found.items()
    },
    "add a head": lambda found, _: found | {"v_head.weight": torch.ones(2)},
    "add inside": lambda found, _: found | {"model.extra.bias": torch.ones(2)},
    "wrap": lambda found, _: {f"net.{n}": v for n, v in found.items()},
    "prefix": lambda found, _: {f"model.{n}": v for n, v in found.items()},
    "other prefix": lambda found, _: {f"transformer.{n}": v for n, v in found.items()},
    "strip": lambda found, _: {n.removeprefix("model."): v for n, v in found.items()},
    "reshape": lambda found, name: (
        found | {name: torch.ones(found[name].shape[0] + 1, *found[name].shape[1:])}
    ),
}


def reported(family: str, folder: Path) -> bool:
    """Tells whether transformers reports anything of loading a folder, or cannot load it."""
    try:
        _, info = getattr(transformers, family).from_pretrained(folder, output_loading_info=True)
    except RuntimeError:  # shapes, or conversions, that do not fit
        return True
    return any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.slow
@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(family=st.sampled_from(sorted(FAMILIES)), data=st.data())
def test_what_is_refused_is_what_loading_would_report(
    family: str, data: st.DataObject, tmp_path: Path
) -> None:
    config, tensors = saved(family)
    found = tensors
    for edit in data.draw(st.lists(st.sampled_from(sorted(EDITS)), max_size=2)):
        found = EDITS[edit](found, data.draw(st.sampled_from(sorted(found))))
    for folder in ("src", "live", "out"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    (tmp_path / "src").mkdir()
    held = {name: value.contiguous() for name, value in found.items()}
    save_file(held, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path / "src")
    ckptkit.consolidate(tmp_path / "src", tmp_path / "live", names="live")
    try:
        ckptkit.consolidate(tmp_path / "src", tmp_path / "out")
    except RefusedError:
        assert not (tmp_path / "out").exists()
        assert reported(family, tmp_path / "live")
    else:  # a prefix that all names have besides is taken off
        assert not reported(family, tmp_path / "out")
