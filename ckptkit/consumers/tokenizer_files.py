"""Whether a step's tokenizer is that of its base, and what its files tell engines.

Transformers 5 saves a tokenizer in a form that version 4, and the engines with it, do not read, and
without `vocab.json`, `merges.txt` and `tokenizer.model`. Where training changed no token, the files
of the base serve all readers.

Source: transformers 5.23, `PreTrainedTokenizerBase.save_pretrained`; tokenizers 0.23, the
serialized `Tokenizer`, whose merges are pairs or texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.consumers.folder_truth import SPECIAL_TOKENS, FolderTexts, token_text

_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SETTINGS = ("add_bos_token", "add_eos_token")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


@dataclass(frozen=True, slots=True)
class TokenizerChange:
    """What training changed in a tokenizer whose tokens are those of the base.

    Attributes:
        settings: Keys of `tokenizer_config.json`, with their new values.
        template: The new chat template; empty where it is that of the base.
        parts: The parts of `tokenizer.json` that are written in another way.
    """

    settings: Mapping[str, Any]
    template: str
    parts: tuple[str, ...]


def compare_tokenizers(step: FolderTexts, base: FolderTexts) -> TokenizerChange | None:
    """Compares the tokenizers of two folders; None where they do not have the same tokens."""
    if step.tokenizer is None or base.tokenizer is None:
        return None
    tokens, there = _tokens(step.tokenizer), _tokens(base.tokenizer)
    added, added_there = _added(step.tokenizer), _added(base.tokenizer)
    if not tokens.vocabulary or tokens != there:
        return None
    # Added ones are never split. A role makes one of a token of the vocabulary, in any reader.
    roles = {_plain(step.tokenizer_config.get(role)) for role in _ROLES}
    if not added_there.keys() <= added.keys() <= added_there.keys() | roles:
        return None
    settings = {
        key: step.tokenizer_config[key]
        for key in (*_ROLES, *_SETTINGS)
        if step.tokenizer_config.get(key) is not None
        and _plain(step.tokenizer_config[key]) != _plain(base.tokenizer_config.get(key))
    }
    template = step.template if step.template.strip() != base.template.strip() else ""
    parts = [p for p in _PARTS if step.tokenizer.get(p) != base.tokenizer.get(p)]
    return TokenizerChange(settings, template, tuple(parts))


def _plain(value: object) -> object:
    return token_text(value) if isinstance(value, (str, Mapping)) else value


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a tokenizer: those of its model, with added ones, and what it joins."""

    kind: object
    vocabulary: object
    merges: object


def _tokens(tokenizer: Mapping[str, Any]) -> _Tokens:
    model = tokenizer.get("model")
    model = model if isinstance(model, Mapping) else {}
    merges, vocabulary = model.get("merges"), model.get("vocab")
    pairs = [
        merge.split(" ", 1) if isinstance(merge, str) else merge
        for merge in (merges if isinstance(merges, list) else ())
    ]
    if isinstance(vocabulary, Mapping):
        return _Tokens(model.get("type"), {**vocabulary, **_added(tokenizer)}, pairs)
    added = sorted(_added(tokenizer).items(), key=repr)
    return _Tokens(model.get("type"), vocabulary and [vocabulary, added], pairs)


def _added(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of added tokens."""
    listed = tokenizer.get("added_tokens")
    tokens = (token for token in (listed if isinstance(listed, list) else ()))
    return {token_text(t): t.get("id") for t in tokens if isinstance(t, Mapping)}


def change_settings(
    name: str, document: Mapping[str, Any], change: TokenizerChange
) -> dict[str, Any]:
    """Returns a configuration of the base's tokenizer with what training changed.

    Args:
        name: `tokenizer_config.json` or `special_tokens_map.json`.
        document: Its content.
        change: What is changed.
    """
    changed = dict(document)
    if name == SPECIAL_TOKENS:
        return changed | {key: change.settings[key] for key in _ROLES if key in change.settings}
    changed |= change.settings
    if change.template and "chat_template" in changed:
        changed["chat_template"] = change.template
    return changed


def list_forms_of_5(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what readers with Transformers 4 refuse in a `tokenizer_config.json`."""
    if isinstance(config.get("extra_special_tokens"), list):
        yield "'extra_special_tokens' as a list"
    if config.get("tokenizer_class") == "TokenizersBackend":
        yield "tokenizer class 'TokenizersBackend'"
