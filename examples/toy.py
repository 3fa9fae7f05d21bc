"""A language model, a tokenizer and texts small enough to make on the spot; nothing is downloaded.

In their place stand a real `AutoModelForCausalLM.from_pretrained(…)`, its tokenizer and a data set.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = [
    "A rank writes down the part it knows and never waits for the rest.",
    "Later, someone joins the parts again and proves that no byte was lost.",
    "Then the whole model leaves the machine that made it and is read anywhere.",
    "Whoever pulls the plug in between finds the last whole step, and goes on from there.",
]
WINDOW = 24  # tokens
END = "<|end|>"


def tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    special = {"eos_token": END, "pad_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


def model(hidden_size: int = 32, intermediate_size: int = 64) -> LlamaForCausalLM:
    """Makes a Llama of some ten thousand parameters, the same one each time; it has dropout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=0.1,  # so that a resume that loses random numbers would be seen
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def write_base(folder: str) -> None:
    """Writes the model's configuration and the tokenizer, without weights."""
    config = model().config
    config.architectures = [LlamaForCausalLM.__name__]
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of the texts, each the inputs and the labels of one example."""

    def __init__(self, count: int | None = None) -> None:
        tokens = tokenizer()("\n".join(TEXTS), return_tensors="pt").input_ids[0]
        self._windows = tokens.repeat(2).unfold(0, WINDOW, 1)[:count]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._windows[index], "labels": self._windows[index]}


def windows(count: int | None = None) -> torch.Tensor:
    """Returns the first pieces of the texts as one tensor, `[count, WINDOW]`."""
    texts = Windows(count)
    return torch.stack([texts[number]["input_ids"] for number in range(len(texts))])
