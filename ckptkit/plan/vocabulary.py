"""Padded vocabularies: which tensors have a row for each token, and what cutting rows changes.

Training pads embeddings and heads so that their rows divide evenly (`pad_to_multiple_of` of
`resize_token_embeddings`, Megatron's `make-vocab-size-divisible-by`). The rows after the last
token of the tokenizer belong to no token.

Source: transformers 5.23, the modules that its model classes give `vocab_size` rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.plan.plan import TensorSpec

_INPUTS = re.compile(
    r"(^|\.)(embed_tokens|word_embeddings?|shared|wte|tok_embeddings|embed_in|tokens_embed"
    r"|token_embedding|embeddings|embedding)\.weight$"
)
_HEADS = re.compile(
    r"(^|\.)(lm_head(\.decoder)?|embed_out|predictions\.decoder|generator_lm_head|proj_out"
    r"|lm_loss|vocab_projector|output_projection|pred_layer\.proj)\.(weight|bias)$"
)
# Names that other models have for other things: taken only where they have as many rows.
_MAYBE = re.compile(
    r"(^|\.)((output|decoder|head|ctc_head)\.(weight|bias)|predictions\.bias"
    r"|final_logits_bias)$"
)
_SIZE = "vocab_size"
_TOKEN = re.compile(r"(.*_)?token_(id|ids|index)")
_NESTING = 4  # real configurations nest twice


class Trim(Struct, frozen=True):
    """Tensors of `rows` rows that keep the first `size` of them."""

    names: frozenset[Fqn]
    rows: int
    size: int

    def shape(self, spec: TensorSpec) -> Shape:
        """Returns the shape that a tensor is written in."""
        if spec.name not in self.names:
            return spec.shape
        axis = _axis(spec.shape, self.rows)
        return (*spec.shape[:axis], self.size, *spec.shape[axis + 1 :])


def is_embedding(name: str) -> bool:
    return _INPUTS.search(name) is not None


def is_head(name: str) -> bool:
    return _HEADS.search(name) is not None


def choose_trim(
    specs: Sequence[TensorSpec],
    size: int | None,
    config: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any] | None,
    *,
    location: str,
) -> tuple[Trim | None, list[str]]:
    """Chooses the rows of embeddings and heads: those that were asked for, or that training added.

    `specs`: everything that is to be written. `size`: how many tokens `--vocab-size` names.
    `config`: it may be that of the model before training. Returns None where all is written as it
    is, and notes.
    """
    tokens = 0 if tokenizer is None else count_tokens(tokenizer)
    if size is not None:
        trim = _plan_trim(specs, size, config, location)
        if size < min(tokens, trim.rows):
            raise RefusedError(
                f"the tokenizer has {tokens:,} tokens against the {size:,} rows that --vocab-size"
                " leaves",
                where=location,
                hint=f"pass --vocab-size {min(tokens, trim.rows)} or more",
            )
        if trim.rows == size:
            return trim, [f"embeddings and heads have {size:,} rows already: none was cut"]
        listed = ", ".join(sorted(map(repr, trim.names)))
        return trim, [f"the rows {size:,} to {trim.rows - 1:,} were cut from {listed}"]
    stated = tokens if config is None else _rows_of(config, tokens)
    if config is None or config.get(_SIZE) == tokens or tokens <= stated:
        return None, []
    found = {s.shape[0] for s in specs if s.shape and (is_embedding(s.name) or is_head(s.name))}
    rows = max(found, default=0)
    if len(found) == 1 and tokens <= rows:  # training enlarged them for these tokens
        note = (
            f"'vocab_size' of config.json is set to {rows:,}, which are the rows of embeddings and"
            f" heads: the tokenizer has {tokens:,} tokens"
        )
        return _plan_trim(specs, rows, config, location), [note]
    text = f"tokenizer.json has tokens up to number {tokens - 1:,}, and config.json has"
    return None, [
        f"{text} {stated:,} rows for them: see if they belong together, or pass --tokenizer"
    ]


def _plan_trim(
    specs: Sequence[TensorSpec], size: int, config: Mapping[str, Any] | None, location: str
) -> Trim:
    """Finds the tensors that have a row for each token."""
    inputs = [spec for spec in specs if is_embedding(spec.name)]
    heads = [spec for spec in specs if is_head(spec.name)]
    rows = _find_rows(inputs or heads, config, location)
    if size > rows:
        raise RefusedError(
            f"{size:,} tokens were asked for and the embeddings have {rows:,} rows",
            where=location,
            hint=f"pass --vocab-size {rows} or less, or resize the model while training it",
        )
    for key, token in _tokens(config or {}, _NESTING):
        if size <= token < rows:
            raise RefusedError(
                f"the configuration has {key} {token:,}, whose row would be cut with"
                f" --vocab-size {size}",
                where=location,
                hint=f"pass --vocab-size {token + 1} or more",
            )
    maybe = [spec for spec in specs if _MAYBE.search(spec.name)]
    full = {s.name for s in (*inputs, *heads, *maybe) if _axis(s.shape, rows) >= 0}
    other = next((s for s in heads if s.name not in full and s.shape[:1] != (size,)), None)
    if other is not None:
        raise RefusedError(
            f"tensor {other.name!r} has shape {list(other.shape)} against {rows:,} rows of the"
            " embeddings",
            where=location,
            hint="leave --vocab-size out, or the tensor with --exclude",
        )
    return Trim(frozenset(full), rows, size)


def count_tokens(tokenizer: Mapping[str, Any]) -> int:
    """Returns how many rows the tokens of a `tokenizer.json` need: the largest number, plus 1.

    `tokenizer`: its content; what is not understood of it needs no row.

    Source: tokenizers 0.22, the serialized `Tokenizer`, `BPE`, `WordPiece`, `WordLevel`, `Unigram`.
    """
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    needed = 0
    if isinstance(vocabulary, list):  # a Unigram's tokens are numbered in order
        needed = len(vocabulary)
    elif isinstance(vocabulary, Mapping):
        needed = 1 + max((n for n in vocabulary.values() if type(n) is int), default=-1)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        number = token.get("id") if isinstance(token, Mapping) else None
        needed = max(needed, number + 1) if type(number) is int else needed
    return needed


def _rows_of(config: Mapping[str, Any], default: int) -> int:
    nested = config.get("text_config")
    sizes = [part.get(_SIZE) for part in (config, nested) if isinstance(part, Mapping)]
    return max((size for size in sizes if type(size) is int), default=default)


def trim_config(config: Mapping[str, Any], trim: Trim) -> dict[str, Any]:
    """Returns a copy of the configuration with the new number of tokens.

    It stands wherever the old one stood, at the top or in the configuration of the text model.
    """
    sizes = set(_sizes(config, _NESTING))
    changed = _with_size(config, trim, _NESTING)
    if not sizes & {trim.rows, trim.size}:
        text = changed.get("text_config")
        if isinstance(text, Mapping):
            return changed | {"text_config": {**text, _SIZE: trim.size}}
        changed[_SIZE] = trim.size
    return changed


def _axis(shape: Shape, rows: int) -> int:
    """Returns the dimension that tokens are counted in; BART's bias of the logits is one row."""
    if shape[:1] == (rows,):
        return 0
    return 1 if shape == (1, rows) else -1


def _find_rows(
    tensors: Sequence[TensorSpec], config: Mapping[str, Any] | None, location: str
) -> int:
    counts = {spec.shape[0]: spec.name for spec in tensors if spec.shape}
    if len(counts) > 1:
        counts = {n: name for n, name in counts.items() if n in set(_sizes(config or {}, _NESTING))}
    if len(counts) == 1:
        return next(iter(counts))
    listed = ", ".join(f"{spec.name!r} {list(spec.shape)}" for spec in tensors)
    raise RefusedError(
        f"embeddings with different numbers of rows were found: {listed}"
        if tensors
        else "no tensor has a name that embeddings or heads are known by",
        where=location,
        hint="leave --vocab-size out; the rows that no token has do no harm",
    )


def _tokens(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and depth > 0:
            yield from _tokens(value, depth - 1)
        elif _TOKEN.fullmatch(key):
            listed: Iterable[object] = value if isinstance(value, list) else (value,)
            yield from ((key, token) for token in listed if type(token) is int)


def _sizes(config: Mapping[str, Any], depth: int) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, Mapping) and depth > 0:
            yield from _sizes(value, depth - 1)
        elif key == _SIZE and type(value) is int:
            yield value


def _with_size(config: Mapping[str, Any], trim: Trim, depth: int) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and depth > 0:
            changed[key] = _with_size(value, trim, depth - 1)
        else:
            changed[key] = trim.size if key == _SIZE and value == trim.rows else value
    return changed
