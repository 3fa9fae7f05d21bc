"""Does a model folder say the truth about itself? One check, before any output is committed.

Weights can be right while the files beside them make another model of them: one that never stops,
that recomputes every token, or whose configuration promises layers that are not there. What
training alone explains is put right, and said; all else is said.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.consumers.class_facts import (
    caches_by_default,
    find_class,
    find_text_model,
    generation_of,
)
from ckptkit.consumers.table import CONFIG, GENERATION
from ckptkit.core.errors import FormatError
from ckptkit.core.model_configs import (
    CLASS_NAME,
    architecture_of,
    class_of,
    model_config_to_json,
    parse_json_object,
    parse_model_config,
    to_json,
)
from ckptkit.core.text import Aside, counted, list_first

Document = Mapping[str, Any]
_LISTED = 3
_NESTING = 3  # of the parts of a configuration; real ones nest twice


class FolderTexts(Struct, frozen=True, kw_only=True):
    """The small files of a model folder, parsed; those that are absent are None or empty."""

    config: Document | None = None
    generation: Document | None = None
    tokenizer: Document | None = None
    # with what `special_tokens_map.json` adds
    tokenizer_config: Document = field(default_factory=dict)
    template: str = ""


MAX_JSON_BYTES = 16 << 20  # larger ones are copied without being parsed
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
TELLING = {
    CONFIG: MAX_JSON_BYTES,
    GENERATION: MAX_JSON_BYTES,
    TOKENIZER: 48 << 20,  # the largest in use, of 262,144 tokens, has 33 MB
    TOKENIZER_CONFIG: MAX_JSON_BYTES,
    SPECIAL_TOKENS: MAX_JSON_BYTES,
    TEMPLATE: MAX_JSON_BYTES,
    PROCESSOR_TEMPLATE: MAX_JSON_BYTES,
}
"""The files that say what a model is, and the size in bytes up to which they are parsed."""


def parse_texts(contents: Mapping[str, bytes], where: str = "") -> FolderTexts:
    """Parses the files of `TELLING`; those but `config.json` that cannot be parsed are left out."""
    parsed: dict[str, dict[str, Any]] = {}
    for name in (GENERATION, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, PROCESSOR_TEMPLATE):
        if name in contents:
            with suppress(FormatError):
                parsed[name] = parse_json_object(contents[name], where=name)
    settings = {**parsed.get(SPECIAL_TOKENS, {}), **parsed.get(TOKENIZER_CONFIG, {})}
    holders = (settings, parsed.get(PROCESSOR_TEMPLATE, {}))
    templates = (_default_template(one.get("chat_template")) for one in holders)
    template = next(filter(None, templates), "")
    if TEMPLATE in contents:
        template = contents[TEMPLATE].decode(errors="replace")
    config = None
    if CONFIG in contents:
        config = parse_model_config(contents[CONFIG], where=posixpath.join(where, CONFIG))
    return FolderTexts(
        config=config,
        generation=parsed.get(GENERATION),
        tokenizer=parsed.get(TOKENIZER),
        tokenizer_config=settings,
        template=template,
    )


def _default_template(value: object) -> str:
    """Returns a template that a configuration holds, as a text or as one of several with names."""
    if isinstance(value, list):
        named = [one for one in value if isinstance(one, Mapping)]
        value = next((t.get("template") for t in named if t.get("name") == "default"), None)
    return value if isinstance(value, str) else ""


class Truth(Struct, frozen=True):
    """What a folder has to say instead."""

    # files with another content, or that are new, by name
    changed: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _Notes(Struct, frozen=True):
    """Notes on a folder, in the words of one who writes it, or of one who cannot change it."""

    lines: list[str]
    set_to: str = "is set to"
    left_out: str = "is left out"
    written: str = "is written with"
    option: str = "; --generation-config keep leaves it"


def tell_truth(
    folder: FolderTexts,
    base: FolderTexts | None,
    names: Iterable[str],
    *,
    keep_generation: bool = False,
    writes: bool = True,
) -> Truth:
    """Compares the files of a folder with each other, with its tensors, and with the base.

    Without `writes`, notes say what the folder should have.
    """
    if folder.config is None:
        return Truth()
    notes = _Notes([])
    if not writes:
        notes = _Notes([], "should be", "should be left out", "should have", "")
    names = list(names)
    of_base = None if base is None else base.config
    config = _undo_training(folder.config, of_base, notes, "", generates=_generates(folder.config))
    path = config.get("_name_or_path")
    if isinstance(path, str) and is_local_path(path):
        del config["_name_or_path"]
        text = f"'_name_or_path' {path!r} of config.json, a local path, {notes.left_out}"
        notes.lines.append(Aside(text))
    kind = config.get("model_type")
    if not config.get("architectures") and isinstance(kind, str) and names:
        found = find_class(config, names)
        if found:
            config["architectures"] = [found]
        else:
            notes.lines.append(
                "config.json names no class in 'architectures', and the tensors may be those of"
                f" several of model type {kind!r}: AutoModel takes the one without a head, and"
                " engines refuse it; name the class that was trained, in config.json of the source"
                " or of --base"
            )
    generation = folder.generation
    if generation is not None and not keep_generation:
        stated = {} if base is None or base.generation is None else base.generation
        if generation.get(_CACHE) is False and stated.get(_CACHE) is not False:
            generation = {**generation, _CACHE: True}
            notes.lines.append(f"'use_cache' of {GENERATION} {notes.set_to} true")
    told = replace(folder, config=config, generation=generation)
    generation = _settle_stopping(told, notes, keep=keep_generation)
    notes.lines.extend(_find_lost_tokens(told))
    notes.lines.extend(find_unkept_promises(config, names))
    changed = {CONFIG: model_config_to_json(config)}
    if generation is not None and generation != folder.generation:
        changed[GENERATION] = to_json(generation)
    return Truth(changed, tuple(notes.lines))


def tell_class(config: Document) -> Truth:
    """Names the class of a model of diffusers as that library knows it, which has no such note."""
    name = class_of(config)
    if name == config.get(CLASS_NAME):
        return Truth()
    note = f"{CLASS_NAME!r} of {CONFIG} is set to {name!r}, as fully_shard had renamed the class"
    return Truth({CONFIG: to_json({**config, CLASS_NAME: name})}, (note,))


# --- what training leaves in a configuration ---

_ATTENTION = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal")
_SWITCHES = ("output_hidden_states", "output_attentions")
_OF_STEP = re.compile(r"(?:^|/)(?:checkpoint|step|epoch)[-_]\d+/?$")  # a model that a run saved
_DROPOUT = re.compile(r"dropout|pdrop|layerdrop")
_CACHE = "use_cache"


def _undo_training(
    config: Document, base: Document | None, notes: _Notes, where: str, *, generates: bool
) -> dict[str, Any]:
    """Returns a configuration without what only training needs, at each of its levels."""
    changed = dict(config)
    # A part of the base that states nothing has the defaults of its class; without a base, training
    # explains `use_cache: false` where the model generates at all: the Trainer of Transformers 5
    # sets it for each model, gradient checkpointing in all versions.
    kind = changed.get("model_type")
    usual = isinstance(kind, str) and caches_by_default(kind)
    caches = usual and generates if base is None else base.get(_CACHE, usual) is True
    if changed.get(_CACHE) is False and caches:
        changed[_CACHE] = True
        reason = "as in the base" if base is not None else "as training alone turns it off"
        notes.lines.append(f"'{where}use_cache' of config.json {notes.set_to} true, {reason}")
    elif changed.get(_CACHE) is False and _generates(changed):
        slow = "generation computes the whole text anew for each token"
        notes.lines.append(f"'{where}use_cache' of config.json is false, as in the base: {slow}")
    for key in (*_ATTENTION, "gradient_checkpointing"):
        value = changed.get(key)
        if value and isinstance(value, (str, bool)) and (base or {}).get(key) != value:
            del changed[key]
            notes.lines.append(f"'{where}{key}' {value!r} of config.json {notes.left_out}")
    for key in _SWITCHES:
        if changed.get(key) is not True:
            continue
        if base is None:
            notes.lines.append(
                f"'{where}{key}' of config.json is true: models return more than usual"
            )
        elif not base.get(key):
            changed[key] = False
            notes.lines.append(
                f"'{where}{key}' of config.json {notes.set_to} false, as in the base"
            )
    for key in filter(_DROPOUT.search, changed):
        here, there = changed[key], (base or {}).get(key)
        if {type(here), type(there)} <= {int, float} and here != there:
            notes.lines.append(
                f"'{where}{key}' of config.json is {here} against {there} in the base"
            )
    for key, value in changed.items():
        if isinstance(value, Mapping) and where.count(".") < _NESTING:
            inner = None if base is None else base.get(key)
            part = inner if isinstance(inner, Mapping) else None if base is None else {}
            changed[key] = _undo_training(value, part, notes, f"{where}{key}.", generates=generates)
    return changed


def is_local_path(text: str) -> bool:
    """Returns whether a name is a path on this machine, and not that of a model on the Hub.

    >>> is_local_path("/data/llama"), is_local_path("org/name"), is_local_path("./out")
    (True, False, True)
    """
    is_path = text.startswith(("/", "./", "../", "~", "\\")) or text.count("/") > 1
    return is_path or ":\\" in text or _OF_STEP.search(text) is not None


# --- where generation stops ---

_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
# Tokens with which turns end, by the names that model families give them. `<|end|>` is one too, but
# where a template writes the tokenizer's own end as well, as for gpt-oss: there it ends thoughts.
_END_OF_TURN = re.compile(
    r"im_end|eot_id|\beot\b|end_?of_?(?:turn|utterance|message|assistant|response)"
    r"|turn_?end|end_turn|eoturn|(?:assistant|role|message)_end\b|^<turn\|>$|^<\|end\|>$",
    re.IGNORECASE,
)
_END = "<|end|>"
# A branch for answers that writes the content, and a token with which the branch ends.
_ANSWER = re.compile(
    r"==\s*['\"](?:assistant|model|bot)['\"]\s*-?%}(?:(?!{%)[\s\S]){0,200}?(?<!\w)content\b"
    r"(?:['\"\]\s)}{+~-]|\|\s*trim|\.strip\(\))*"
)
_ENDS_BRANCH = re.compile(r"(?:\\n|['\"\s})-])*{%-?\s*(?:elif|else|endif|endfor)\b")
# Some families write the bar of full width.
_SPECIAL = re.compile(r"[<\[][|\uff5c]?[^\s<>{}'\"|\uff5c\[\]]+[|\uff5c]?[>\]]")
_GENERATES = re.compile(r"For(?:CausalLM|ConditionalGeneration|Seq2SeqLM|ImageTextToText)$|LMHead")


def _settle_stopping(folder: FolderTexts, notes: _Notes, *, keep: bool) -> Document | None:
    """Returns a generation configuration that stops where the tokenizer ends a turn.

    Source: transformers 5.23, `trainer_utils._align_special_token`: the token goes first, and those
    that were there stay. `_from_model_config` is left out, with which the ids of config.json count.
    """
    config, generation = folder.config or {}, folder.generation
    if generation is None and not _generates(config):
        return generation
    of_config = generation_of(config)
    stated = _ids_in(of_config if generation is None else generation, "eos_token_id")
    # Where there is a generation configuration, the ids of config.json do not count.
    ends = {number: text for text, number in _ends_of_turns(folder)}
    if not stated:
        ends |= {number: "" for number in _ids_in(of_config, "eos_token_id") if number not in ends}
    lacking = {number: text for number, text in ends.items() if number not in stated}
    if lacking:
        ids = [*lacking, *stated]
        listed = " and ".join(f"{t!r} ({n})" if t else f"{n}" for n, t in lacking.items())
        file = "config.json" if generation is None else "generation_config.json"
        has = ", ".join(map(str, stated)) or "none"
        said = f"turns end with {listed}, and 'eos_token_id' of {file} has {has}"
        if keep:
            notes.lines.append(f"{said}: generation does not stop there")
            return generation
        generation = dict(of_config if generation is None else generation)
        generation.pop("_from_model_config", None)
        generation["eos_token_id"] = ids if len(ids) > 1 else ids[0]
        notes.lines.append(f"{said}: {GENERATION} {notes.written} {ids}{notes.option}")
    notes.lines.extend(_other_ids(folder, of_config if generation is None else generation))
    return generation


def _generates(config: Document) -> bool:
    name, kind = architecture_of(config), config.get("model_type")
    if name:
        return _GENERATES.search(name) is not None
    return isinstance(kind, str) and bool(find_text_model(kind))


def _ids_in(document: Document, key: str) -> list[int]:
    values = document.get(key)
    listed = values if isinstance(values, list) else [values]
    return [value for value in listed if type(value) is int]


def _ends_of_turns(folder: FolderTexts) -> Iterator[tuple[str, int]]:
    """Yields the end that a tokenizer names, and that with which its template ends turns.

    A template ends turns with tokens that are named so, or stand behind an answer.
    """
    numbers, template = token_numbers(folder), folder.template
    eos = token_text(folder.tokenizer_config.get("eos_token"))
    if eos in numbers:
        yield eos, numbers[eos]
    nexts = (_SPECIAL.match(template, at.end()) for at in _ANSWER.finditer(template))
    behind = {at[0] for at in nexts if at is not None and _ENDS_BRANCH.match(template, at.end())}
    for token in dict.fromkeys(_SPECIAL.findall(template)):
        is_end = token in numbers and (token in behind or _END_OF_TURN.search(token))
        if is_end and token != eos and (token != _END or not eos or eos not in template):
            yield token, numbers[token]


def _other_ids(folder: FolderTexts, generation: Document) -> Iterator[str]:
    """Yields notes on the beginning and the padding of texts, where files disagree."""
    numbers, config = token_numbers(folder), folder.config or {}
    for key in _IDS[1:]:
        name = key.removesuffix("_id")
        token = token_text(folder.tokenizer_config.get(name))
        stated = _ids_in(generation, key)
        if token in numbers and stated and numbers[token] not in stated:
            said = f"the tokenizer's '{name}' is {token!r} ({numbers[token]})"
            yield f"{said}, and '{key}' of the configuration is {', '.join(map(str, stated))}"
    text = config.get("text_config")
    sizes = [part.get("vocab_size") for part in (config, text) if isinstance(part, Mapping)]
    rows = next((size for size in sizes if type(size) is int), 1 << 62)
    for key in _IDS:
        beyond = [one for one in _ids_in(generation, key) if one >= rows]
        if beyond:
            yield f"'{key}' is {beyond[0]:,}, and the vocabulary has {rows:,} tokens"


def token_text(value: object) -> str:
    """Returns the text of a token, which configurations have as a text or as an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def token_numbers(folder: FolderTexts) -> dict[str, int]:
    """Returns the numbers of the tokens that are added to a vocabulary, and of named ones in it."""
    numbers: dict[str, int] = {}
    tokenizer = folder.tokenizer or {}
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    named = {token_text(folder.tokenizer_config.get(f"{key.removesuffix('_id')}")) for key in _IDS}
    if isinstance(vocabulary, Mapping):
        numbers |= {name: vocabulary[name] for name in named if type(vocabulary.get(name)) is int}
    elif isinstance(vocabulary, list):  # a Unigram's tokens are numbered in order
        firsts = (
            (n, piece[0]) for n, piece in enumerate(vocabulary) if piece and isinstance(piece, list)
        )
        numbers |= {text: n for n, text in firsts if isinstance(text, str) and text in named}
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, Mapping) and type(token.get("id")) is int:
            numbers[token_text(token)] = token["id"]
    decoder = folder.tokenizer_config.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if str(number).isdecimal() and len(str(number)) < len("1000000000"):
            numbers.setdefault(token_text(token), int(number))
    return numbers


# --- tokens without rows, layers without weights ---


def _find_lost_tokens(folder: FolderTexts) -> Iterator[str]:
    """Yields notes on tokens that a template writes and the tokenizer splits into pieces."""
    if folder.tokenizer is None or not folder.template:
        return
    known = token_numbers(folder)
    model = folder.tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    whole = vocabulary if isinstance(vocabulary, Mapping) else {}
    written = dict.fromkeys(_SPECIAL.findall(folder.template))
    special = (t for t in written if t.startswith(("<|", "<\uff5c")) or _END_OF_TURN.search(t))
    split = [token for token in special if token not in known and token not in whole]
    if split:
        yield (
            f"the chat template writes {list_first(split, _LISTED)}, for which the tokenizer has no"
            " token of its own"
        )


_PREDICTING = re.compile(r"(?:^|\.)(?:mtp\w*|nextn\w*)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
_MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "n_mtp_layers")


def find_unkept_promises(config: Document, names: Iterable[str]) -> Iterator[str]:
    """Yields notes on layers for further tokens that a configuration counts and nobody wrote."""
    listed = list(names)
    parts = [("", config)]
    parts += [(f"{k}.", v) for k, v in config.items() if isinstance(v, Mapping)]
    for where, part in parts:
        layers = part.get("num_hidden_layers")
        for key in _MTP_KEYS:
            count = part.get(key)
            if type(count) is not int or count < 1 or type(layers) is not int:
                continue
            if any(is_for_further_tokens(name, layers) for name in listed):
                continue
            what, them = counted(count, "layer"), "it" if count == 1 else "them"
            yield (
                f"'{where}{key}' of config.json promises {what} for further tokens, and no tensor"
                f" of {them} is written; --fill-from MODEL takes {them} from a model that has"
                f" {them}"
            )


def is_for_further_tokens(name: str, layers: int) -> bool:
    match = _LAYER.search(name)
    return bool(_PREDICTING.search(name)) or (match is not None and int(match[1]) >= layers)


_TOWERS = re.compile(
    r"(?:^|\.)(visual|vision\w*|audio\w*|image\w*|multi_modal_projector|mm_projector)\."
)
_VALUE = re.compile(r"(?:^|\.)(v_head|value_head|score)\.")


def describe_lacking(base: str, lacking: Collection[str], config: Document, *, option: str) -> str:
    ordered = sorted(lacking)
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    counts = [part.get("num_hidden_layers") for part in parts]
    layers = next((count for count in counts if type(count) is int), 1 << 30)
    kinds = {
        "layers for further tokens": sum(is_for_further_tokens(n, layers) for n in ordered),
        "towers for images or sound": sum(bool(_TOWERS.search(name)) for name in ordered),
        "a value head": sum(bool(_VALUE.search(name)) for name in ordered),
    }
    said = " and ".join(kind for kind, count in kinds.items() if count)
    return (
        f"{base} has {counted(len(ordered), 'tensor')} that the output lacks"
        f"{f', of {said}' if said else ''}: {list_first(ordered, _LISTED)};"
        f" {option} takes {'it' if len(ordered) == 1 else 'them'} from there"
    )
