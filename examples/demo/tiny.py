"""A language model and a tokenizer small enough to make on the spot; nothing is downloaded."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

TEXT = (
    "A rank writes down the part it knows and never waits for the rest. "
    "Later, someone joins the parts again and proves that no byte was lost. "
    "Then the whole model leaves the machine that made it and is read anywhere. "
)
PROMPT = "A rank writes down"
END = "<|end|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the one text that the model will learn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Describes a Llama of about 0.4 million parameters with tied embeddings."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
