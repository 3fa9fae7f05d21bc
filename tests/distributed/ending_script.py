"""The ending that accelerate documents, in the forms in which scripts have it, twice.

Usage, through `ckptkit.run`: ending_script.py OUT. What `OUT/stock` holds was gathered by
accelerate's own method, and what `OUT/ours` holds by the one that stands in its place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint import state_dict as gathering
from transformers import LlamaConfig, LlamaForCausalLM

GATHERED: list[int] = []


def llama() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def end(accelerator: Accelerator, model: Any, state: dict[str, Any], out: Path) -> None:
    """By all ranks, by the first alone, and by hand."""
    plain = accelerator.unwrap_model(model)
    plain.save_pretrained(
        out / "all",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=dict(state),  # which it empties
    )
    if accelerator.is_main_process:
        if isinstance(plain, LlamaForCausalLM):
            plain.save_pretrained(out / "first", state_dict=dict(state), max_shard_size="8KB")
        torch.save({name: value.half() for name, value in state.items()}, out / "half.bin")
    else:
        assert not state
    accelerator.wait_for_everyone()


def main() -> None:
    out = Path(sys.argv[1])
    gather = gathering.get_model_state_dict

    def counted(*arguments: Any, **options: Any) -> Any:
        GATHERED.append(1)
        return gather(*arguments, **options)

    gathering.get_model_state_dict = counted
    accelerator = Accelerator()
    stock: Any = vars(Accelerator.get_state_dict)["ckptkit_stock"]
    for name in ("model", "adapter"):
        made = llama()
        if name == "adapter":
            made = get_peft_model(made, LoraConfig(target_modules=["q_proj"]))
        trained = [p for p in made.parameters() if p.requires_grad]
        model, _ = accelerator.prepare(made, torch.optim.SGD(trained, lr=0.1))
        end(accelerator, model, accelerator.get_state_dict(model), out / "ours" / name)
        assert not GATHERED
        end(accelerator, model, stock(accelerator, model), out / "stock" / name)
        assert GATHERED
        GATHERED.clear()
    accelerator.end_training()


if __name__ == "__main__":
    main()
