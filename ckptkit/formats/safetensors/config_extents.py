"""What a model's `config.json` tells of the size of its tensors, for formats that do not tell it.

Of all tensors only embeddings are named and shaped alike in nearly every architecture: a row for
each token, a column for each hidden unit. Whatever shortens all tensors shortens them, too.

Source: transformers 5.23, configuration_utils.py (`PreTrainedConfig.attribute_map` of the models).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import InputError
from ckptkit.core.index import Shape
from ckptkit.core.model_configs import parse_model_config
from ckptkit.storage.base import Source, is_there

CONFIG_NAME = "config.json"
_MAX_CONFIG_BYTES = 4 << 20
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|word_embeddings|shared|wte|tok_embeddings|embed_in)\.weight$"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d{1,9})\.")
_TEXT = "text_config"
_TOKENS = ("vocab_size",)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_OTHER_WIDTHS = ("embedding_size", "word_embed_proj_dim", "embedding_dim", "hidden_size_per_layer")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_MATRIX = 2


@dataclass(frozen=True, slots=True)
class ConfigExtents:
    """Sizes that a configuration tells; 0 where it does not.

    Attributes:
        path: The configuration, relative to the source's root; empty where there is none.
        tokens: Rows of the embeddings, at least: they may be padded.
        hidden: Columns of the embeddings.
        layers: How many there are, at least.
    """

    path: str = ""
    tokens: int = 0
    hidden: int = 0
    layers: int = 0

    def least(self, name: str) -> Shape | None:
        """Returns the smallest shape that a tensor can have; None where nothing tells it."""
        if not self.tokens or _EMBEDDING.search(name) is None:
            return None
        return self.tokens, self.hidden

    def layers_lacking(self, names: Iterable[str]) -> int:
        """Returns how many layers come after the last one that a name is of."""
        found = [int(match[1]) for match in map(_LAYER.search, names) if match]
        return max(0, self.layers - 1 - max(found)) if found else 0

    def proves(self, shapes: Mapping[str, Shape]) -> bool:
        """Tells whether some tensor is as large as it has to be, and there are all layers."""
        sized = [
            (shape, least)
            for name, shape in shapes.items()
            if (least := self.least(name)) is not None and len(shape) == _MATRIX
        ]
        return bool(sized) and not self.layers_lacking(shapes)


def config_beside(source: Source, folders: Sequence[str]) -> ConfigExtents:
    """Returns what the first configuration in some folders tells; nothing where it is damaged."""
    for folder in folders:
        path = posixpath.join(folder, CONFIG_NAME)
        if is_there(source, path):
            return _extents(path, _parsed(source, path))
    return ConfigExtents()


def _parsed(source: Source, path: str) -> Mapping[str, Any]:
    try:
        size = source.stat(path).size_bytes
        if size > _MAX_CONFIG_BYTES:
            return {}
        return parse_model_config(source.read(path, 0, size), where=path)
    except InputError:
        return {}  # is told by those who need more of it


def _extents(path: str, config: Mapping[str, Any]) -> ConfigExtents:
    text = config.get(_TEXT)
    if isinstance(text, dict) and not _first(config, _TOKENS):
        config = text
    plain = not any(name in config for name in _OTHER_WIDTHS)
    hidden = _first(config, _HIDDEN) if plain else 0
    return ConfigExtents(path, _first(config, _TOKENS), hidden, _first(config, _LAYERS))


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)
