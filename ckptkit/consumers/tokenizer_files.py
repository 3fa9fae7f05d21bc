"""Whether a step's tokenizer is that of its base, and what its files tell engines.

Transformers 5 saves a tokenizer in a form that version 4, and the engines with it, do not read, and
without `vocab.json`, `merges.txt` and `tokenizer.model`. Where training changed no token, the files
of the base serve all readers.

Source: transformers 5.23, `PreTrainedTokenizerBase.save_pretrained` and
`TokenizersBackend.convert_to_native_format`; tokenizers 0.23, the serialized `Tokenizer`, whose
merges are pairs or texts; sentencepiece 0.2, `sentencepiece_model.proto`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ckptkit.consumers.folder_truth import (
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS,
    FolderTexts,
    token_text,
)
from ckptkit.core.errors import FormatError
from ckptkit.core.model_configs import parse_json_object
from ckptkit.core.text import counted, list_first

VOCABULARY, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"
PIECES = "tokenizer.model"
OLD_FILES = (VOCABULARY, MERGES, ADDED, PIECES)
"""What describes a tokenizer where there is no `tokenizer.json`."""

_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# What a reader does with texts, and what it does where a configuration says nothing.
_SETTINGS: Mapping[str, Any] = {
    "add_bos_token": None,
    "add_eos_token": None,
    "add_prefix_space": None,
    "clean_up_tokenization_spaces": False,
    "do_lower_case": None,
    "padding_side": "right",
    "split_special_tokens": False,
    "strip_accents": None,
    "tokenize_chinese_chars": None,
    "truncation_side": "right",
}
_MAX_LENGTH, _NO_LENGTH = "model_max_length", 1e20
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
# Classes that take all parts from `tokenizer.json`; the others make theirs anew.
_GENERIC = {"", "PreTrainedTokenizer", "TokenizersBackend"}
_LISTED = 3


class TokenizerChange(Struct, frozen=True):
    """What training changed in a tokenizer whose tokens are those of the base."""

    settings: Mapping[str, Any]  # of `tokenizer_config.json`, with their new values
    template: str  # empty where it is that of the base
    parts: tuple[str, ...]  # of `tokenizer.json` that are written in another way


def compare_tokenizers(step: FolderTexts, base: FolderTexts) -> TokenizerChange | str:
    """Compares the tokenizers of two folders; where they are not the same, returns what differs."""
    if step.tokenizer is None or base.tokenizer is None:
        return "one of both has no file that says which tokens it has"
    (kind, tokens, merges), (kind_there, tokens_there, merges_there) = (
        _read_model(texts.tokenizer) for texts in (step, base)
    )
    if not tokens:
        return "it names no token"
    added, added_there = _added(step.tokenizer), _added(base.tokenizer)
    # Added ones are never split. A role makes one of a token of the vocabulary, in any reader.
    roles = {token_text(step.tokenizer_config.get(role)) for role in _ROLES}
    is_old = kind_there is None  # its files say nothing of what follows
    is_same = is_old or added_there.keys() <= added.keys() <= added_there.keys() | roles
    if tokens != tokens_there or not is_same:
        return _describe_tokens(tokens, tokens_there, added.keys() ^ added_there.keys())
    flags, flags_there = (_flags(texts, roles) for texts in (step, base))
    changed = sorted(t for t in flags.keys() & flags_there if flags[t] != flags_there[t])
    if changed and not is_old:
        return f"it finds {', '.join(map(repr, changed[:_LISTED]))} otherwise"
    if not is_old and kind != kind_there:
        return "its model is of another kind"
    if merges != merges_there and (merges_there or not is_old):
        return "it joins pieces in another order"
    parts = () if is_old else tuple(_differing_parts(step.tokenizer, base.tokenizer))
    differing = parts and _cuts_otherwise(step, base, parts)
    if differing:
        return f"it has another {' and '.join(map(repr, differing))}"
    return TokenizerChange(
        dict(_changed_settings(step.tokenizer_config, base.tokenizer_config)),
        step.template if step.template.strip() != base.template.strip() else "",
        parts,
    )


def _describe_tokens(tokens: Collection[str], there: Collection[str], added: set[str]) -> str:
    further = [name for name in tokens if name not in there]
    lacking = [name for name in there if name not in tokens]
    for differing, said in (
        (further, "has {} that the base lacks"),
        (lacking, "lacks {} of the base"),
    ):
        if differing:
            count = counted(len(differing), "token")
            return f"it {said.format(count)}: {list_first(differing, _LISTED)}"
    if added:
        return f"it splits {', '.join(map(repr, sorted(added)[:_LISTED]))} otherwise"
    return "its tokens have other numbers"


def _changed_settings(
    step: Mapping[str, Any], base: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    for role in _ROLES:
        # One that is null was taken away; one that is not named is that of the class.
        if role in step and _plain(step[role]) != _plain(base.get(role)):
            yield role, step[role]
    for key, usual in _SETTINGS.items():
        if step.get(key) is not None and step[key] != base.get(key, usual):
            yield key, step[key]
    length, there = (one.get(_MAX_LENGTH, _NO_LENGTH) for one in (step, base))
    numbers = [value for value in (length, there) if isinstance(value, (int, float))]
    is_stated = _MAX_LENGTH in step and len(numbers) > 1
    if is_stated and length != there and min(numbers) < _NO_LENGTH:
        yield _MAX_LENGTH, length


def _differing_parts(step: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    models = [_mapping(document.get("model")) for document in (step, base)]
    keys = dict.fromkeys(key for model in models for key in model)
    ours, theirs = ([m.get(key) or None for key in keys if key not in _OF_TOKENS] for m in models)
    if ours != theirs:
        yield "model"
    for part in (*_PARTS, "post_processor"):
        if step.get(part) != base.get(part):
            yield part


_OF_TOKENS = {"type", "vocab", "merges", "unk_id"}


def _cuts_otherwise(
    step: FolderTexts, base: FolderTexts, parts: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the parts that give texts other tokens, and are not only written otherwise.

    Classes other than the generic ones make all parts but the last anew when a folder is loaded, so
    that what stands in its file is what the version that wrote it makes.
    """
    classes = [
        str(texts.tokenizer_config.get("tokenizer_class") or "").removesuffix("Fast")
        for texts in (step, base)
    ]
    is_made_anew = classes[0] == classes[1] and classes[0] not in _GENERIC
    differing = [part for part in parts if part != "post_processor" and not is_made_anew]
    both = [
        _written_around(_mapping(texts.tokenizer).get("post_processor")) for texts in (step, base)
    ]
    if both[0] != both[1]:
        differing.append("post_processor")
    return tuple(differing)


def _written_around(processor: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the tokens that a processor writes before and behind a text."""
    processor = _mapping(processor)
    if processor.get("type") == "Sequence":
        both = [_written_around(inner) for inner in _listed(processor.get("processors"))]
        return tuple(t for one, _ in both for t in one), tuple(t for _, one in both for t in one)
    if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
        before, behind = (_listed(processor.get(key))[:1] for key in ("cls", "sep"))
        return tuple(map(str, before)), tuple(map(str, behind))
    tokens: tuple[list[str], list[str]] = ([], [])
    is_behind = False
    for item in _listed(processor.get("single")):
        is_behind = is_behind or "Sequence" in _mapping(item)
        token = _mapping(_mapping(item).get("SpecialToken")).get("id")
        if isinstance(token, str):
            tokens[is_behind].append(token)
    return tuple(tokens[0]), tuple(tokens[1])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def read_old_files(contents: Mapping[str, bytes]) -> dict[str, Any] | None:
    """Returns what the files of `OLD_FILES` say of a tokenizer, as `tokenizer.json` would.

    These are the parts `model`, without its kind, and `added_tokens`; None where no file names
    tokens.
    """
    documents: dict[str, dict[str, Any]] = {}
    for name in (VOCABULARY, ADDED):
        with suppress(FormatError):
            documents[name] = parse_json_object(contents.get(name, b"{}"), where=name)
    vocabulary = documents.get(VOCABULARY) or dict(_number_pieces(contents.get(PIECES, b"")))
    if not vocabulary:
        return None
    lines = contents.get(MERGES, b"").decode(errors="replace").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    added = [{"content": text, "id": number} for text, number in documents.get(ADDED, {}).items()]
    return {"model": {"vocab": vocabulary, "merges": merges}, "added_tokens": added}


def _number_pieces(data: bytes) -> Iterator[tuple[str, int]]:
    """Yields the tokens of a sentencepiece model; its field 1 repeats them, with the text in 1."""
    pieces = (value for field, value in _fields(data) if field == 1)
    for number, piece in enumerate(pieces):
        text = next((value for field, value in _fields(piece) if field == 1), b"")
        yield text.decode(errors="replace"), number


_VARINT, _LONG, _WITH_LENGTH, _SHORT = 0, 1, 2, 5  # the wire types of protobuf
_MORE, _MOST_BITS = 0x80, 63


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the fields of a protobuf message that have a length; ends where it is damaged."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, size = tag & 7, {_LONG: 8, _SHORT: 4}.get(tag & 7, len(data))
        if kind in {_VARINT, _WITH_LENGTH}:
            size, at = _varint(data, at)
            size = size if kind == _WITH_LENGTH else 0
        if kind == _WITH_LENGTH and at + size <= len(data):
            yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift <= _MOST_BITS:
        byte = data[at]
        value |= (byte & ~_MORE) << shift
        at, shift = at + 1, shift + 7
        if byte < _MORE:
            break
    return value, at


def _plain(value: object) -> object:
    return token_text(value) if isinstance(value, (str, Mapping)) else value


def _read_model(tokenizer: object) -> tuple[object, dict[str, Any], list[Any]]:
    """Returns the kind of a tokenizer's model, the numbers of all tokens, and the merges."""
    tokenizer = _mapping(tokenizer)
    model = _mapping(tokenizer.get("model"))
    merges, vocabulary = model.get("merges"), model.get("vocab")
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in _listed(merges)]
    if isinstance(vocabulary, list):  # a Unigram's tokens are numbered in order
        pieces = (
            (n, str(text)) for n, piece in enumerate(vocabulary) for text in _listed(piece)[:1]
        )
        pairs, vocabulary = [vocabulary], {text: n for n, text in pieces}
    return model.get("type"), {**_mapping(vocabulary), **_added(tokenizer)}, pairs


def _added(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    tokens = _listed(tokenizer.get("added_tokens"))
    return {token_text(t): t.get("id") for t in tokens if isinstance(t, Mapping)}


def _flags(texts: FolderTexts, roles: Collection[object]) -> dict[str, list[bool]]:
    """Returns how added tokens are found and whether they are special; those with a role are."""
    tokens = [
        token
        for token in _listed(_mapping(texts.tokenizer).get("added_tokens"))
        if isinstance(token, Mapping)
    ]
    return {
        token_text(token): [
            bool(token.get("special")) or token_text(token) in roles,
            *(bool(token.get(key)) for key in ("lstrip", "rstrip", "single_word")),
        ]
        for token in tokens
    }


def change_settings(
    name: str, document: Mapping[str, Any], change: TokenizerChange
) -> dict[str, Any]:
    """Returns a configuration of the base's tokenizer with what training changed."""
    changed = dict(document)
    if name == SPECIAL_TOKENS:
        changed |= {key: change.settings[key] for key in _ROLES if key in change.settings}
        return {key: value for key, value in changed.items() if value is not None}
    if name != PROCESSOR_TEMPLATE:
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
