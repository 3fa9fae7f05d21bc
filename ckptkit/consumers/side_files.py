"""Which further files belong to a model folder, and what is changed in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.consumers.table import CONFIG, GENERATION, Consumer, fits
from ckptkit.core.dtypes import DType
from ckptkit.core.index import TensorEntry
from ckptkit.core.model_configs import parse_json_object, to_json

# What `from_pretrained` of models, tokenizers and processors reads, and nothing else: the folder of
# a run also has optimizer state, random states and `training_args.bin`, which contains the token.
_MODEL = (CONFIG, GENERATION)
_TOKENIZER = (  # the others of the group are useless without one of these
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_BESIDE_TOKENIZER = (
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
)
_CODE = "*.py"
_AUTO_MAP = "auto_map"
_DTYPES = ("dtype", "torch_dtype")
_QUANTIZATION = "quantization_config"
# Methods whose files hold packed numbers always. Others also pack weights while they are loaded.
_PACKING = frozenset({"awq", "fp8", "gptq", "mxfp4"})


class SideFile(Struct, frozen=True):
    """A file to write with the weights, and the folder that it comes from."""

    name: str
    origin: str
    path: str
    size_bytes: int


def is_tokenizer_file(name: str) -> bool:
    """Says whether a file makes a folder that of a tokenizer."""
    return fits(name, _TOKENIZER)


def is_of_tokenizer(name: str) -> bool:
    return fits(name, (*_TOKENIZER, *_BESIDE_TOKENIZER))


def is_of_processor(name: str) -> bool:
    """Says whether a file is part of a processor of images, sound or videos."""
    return fits(name, _PROCESSOR)


def is_side_file(name: str) -> bool:
    """Says whether a file belongs to a model folder of any kind, by its path in the folder."""
    return fits(name, (*_MODEL, *_TOKENIZER, *_BESIDE_TOKENIZER, *_PROCESSOR, _CODE))


Listed = tuple[str, Mapping[str, int]]
"""A folder, and the sizes of its files in bytes by their names."""


def choose_side_files(
    folders: Sequence[Listed],
    *,
    allow_code: bool,
    config: Sequence[Listed] = (),
    tokenizer: Sequence[Listed] = (),
) -> tuple[list[SideFile], list[str]]:
    """Takes each kind of file from the first folder that has it.

    Files that only make sense together come from one folder: those of a tokenizer, those of a
    processor, and python files, which belong to the configuration that names them.

    The nearest to the weights are first; `config` and `tokenizer` are those that the user named.
    Returns python files of the folder of the configuration that were left out, too.
    """
    chosen: dict[str, SideFile] = {}

    def take(
        wanted: tuple[str, ...], *, leading: tuple[str, ...], first: Sequence[Listed] = ()
    ) -> None:
        for origin, names in (*first, *folders):
            if any(fits(name, leading) for name in names):
                for name, size_bytes in names.items():
                    if fits(name, wanted):
                        chosen[name] = SideFile(name, origin, name, size_bytes)
                return

    for name in _MODEL:
        take((name,), leading=(name,), first=config)
    wanted = (*_TOKENIZER, *_BESIDE_TOKENIZER)
    has_tokenizer = any(fits(n, _TOKENIZER) for _, names in (*tokenizer, *folders) for n in names)
    take(wanted, leading=_TOKENIZER if has_tokenizer else wanted, first=tokenizer)
    take(_PROCESSOR, leading=_PROCESSOR, first=tokenizer)
    if allow_code:
        take((_CODE,), leading=(CONFIG,), first=config)
    home = chosen[CONFIG].origin if CONFIG in chosen else None
    code = {
        name
        for origin, names in (*config, *folders)
        for name in names
        if origin == home and fits(name, (_CODE,))
    }
    return [chosen[name] for name in sorted(chosen)], sorted(code - chosen.keys())


def choose_companions(folders: Sequence[Listed], consumer: Consumer, config: str) -> list[SideFile]:
    """Takes the files that a consumer has besides those of all models, from one folder.

    Behind `config`, the folder of the configuration, none is searched.
    """
    for origin, names in folders:
        own = [name for name in names if consumer.has_companion(name)]
        if own and (not consumer.leading or consumer.leading in own):
            return [SideFile(name, origin, name, names[name]) for name in sorted(own)]
        if origin == config:
            break
    return []


def drop_stale_quantization(
    config: Mapping[str, Any] | None, entries: Iterable[TensorEntry]
) -> Mapping[str, Any] | None:
    """Removes the quantization from a configuration whose model has no packed weights.

    A model that was trained unpacked from a packed base has the configuration of that base. Any
    integers among `entries`, all tensors of the model, leave the configuration unchanged.
    """
    quantization = (config or {}).get(_QUANTIZATION)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if config is None or method not in _PACKING:
        return config
    is_packed = any(e.dtype.kind == "int" or e.dtype.itemsize == 1 for e in entries)
    rest = {key: value for key, value in config.items() if key != _QUANTIZATION}
    return config if is_packed else rest


def update_config(
    config: Mapping[str, Any], dtypes: Mapping[DType, int], *, allow_code: bool
) -> dict[str, Any]:
    """Returns a model's configuration with the dtype of the written weights."""
    changed = dict(config)
    # Floats of 8 bits are stored and not computed with: with such a type no model is built. What
    # packed weights are computed in, no other tensor tells.
    floating = {d: size for d, size in dtypes.items() if d.kind == "float" and d.itemsize > 1}
    is_stated = any(config.get(key) for key in _DTYPES)
    if floating and not (is_stated and config.get(_QUANTIZATION)):
        main = max(floating, key=lambda dtype: floating[dtype]).name
        before = {changed.get(key) for key in _DTYPES} - {None, main}
        if "torch_dtype" in changed:  # the key of Transformers 4, still read by 5
            changed["torch_dtype"] = main
        if "dtype" in changed or "torch_dtype" not in changed:
            changed["dtype"] = main
        for name, part in config.items():  # parts that had the type of the whole
            if isinstance(part, Mapping) and any(part.get(key) in before for key in _DTYPES):
                stated = {key: main for key in _DTYPES if part.get(key) in before}
                changed[name] = {**part, **stated}
    return changed if allow_code else drop_auto_map(changed)


def rewrite_side_file(name: str, size_bytes: int, read: Callable[[], bytes]) -> bytes | None:
    """Returns a side file without `auto_map`, which names python files; None where it has none.

    `read` is called only where the content has to be parsed.
    """
    if not name.endswith("config.json") or size_bytes > MAX_JSON_BYTES:
        return None
    document = parse_json_object(read(), where=name)
    return to_json(drop_auto_map(document)) if has_auto_map(document) else None


def drop_auto_map(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != _AUTO_MAP}


def has_auto_map(document: Mapping[str, Any]) -> bool:
    return _AUTO_MAP in document


def sum_bytes_by_dtype(sizes: Iterable[tuple[DType, int]]) -> dict[DType, int]:
    total: dict[DType, int] = {}
    for dtype, size_bytes in sizes:
        total[dtype] = total.get(dtype, 0) + size_bytes
    return total
