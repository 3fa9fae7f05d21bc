"""Whether a model was given another number of tokens than the base that it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptkit.adapters.config import LoraSettings
from ckptkit.adapters.dialects import plain_name
from ckptkit.adapters.names import is_input_embedding, vocabulary_of
from ckptkit.core.errors import InputError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.model_configs import parse_model_config
from ckptkit.planning.side_files import CONFIG, MAX_JSON_BYTES
from ckptkit.storage.local import LocalSource
from ckptkit.storage.places import is_url

_MATRIX = 2


def resized_embeddings(
    settings: LoraSettings,
    base: Mapping[Fqn, TensorEntry],
    rest: Mapping[Fqn, TensorEntry],
) -> Iterator[str]:
    """Yields the embeddings that PEFT saves with an adapter because their size was changed.

    The base has to be a folder on this machine; of one on the Hub, nothing is known.

    Args:
        settings: The adapter's configuration, which names the base.
        base: The tensors of the base in the checkpoint, by their plain names.
        rest: The same by their names in the PEFT model.

    Source: peft 0.21, `get_peft_model_state_dict` with `save_embedding_layers="auto"`.
    """
    tokens = _tokens_of(settings.base_model_name_or_path)
    weights = {
        name.rpartition(".")[0]: entry.shape
        for name, entry in base.items()
        if name.endswith(".weight") and len(entry.shape) == _MATRIX
    }
    ends = vocabulary_of(weights)
    sizes = {weights[module][0] for module in ends if is_input_embedding(module)}
    if tokens is None or not sizes or tokens in sizes:
        return
    for name in rest:
        module = name.rpartition(".")[0]
        own = plain_name(module)
        if own in ends and weights[own][0] in sizes:
            yield module


def _tokens_of(folder: str | None) -> int | None:
    """Returns the number of tokens of the model in a folder; None where that is unknown."""
    if not folder or "\0" in folder or is_url(folder) or not Path(folder).is_dir():
        return None  # of the Hub, mostly; what a record names is not asked for over a network
    try:
        with LocalSource(Path(folder)) as source:
            size_bytes = min(source.stat(CONFIG).size_bytes, MAX_JSON_BYTES)
            document = parse_model_config(source.read(CONFIG, 0, size_bytes), where=CONFIG)
    except InputError:
        return None
    tokens = document.get("vocab_size")
    return tokens if isinstance(tokens, int) else None
