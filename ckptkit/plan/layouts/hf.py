"""The weights of a Hugging Face folder: safetensors files and their index.

Sources: the safetensors format description; huggingface_hub `split_torch_state_dict_into_shards`
for file names and the index; Transformers fails to load an index without the key `metadata`.

Files are filled in the order of the names, or as those of another model are (`FileMap`): an upload
that replaces that model then has the same files, and only the changed parts of a file are sent.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from ckptkit.core.errors import (
    CannotPlanError,
    RefusedError,
)
from ckptkit.core.index import Fqn
from ckptkit.core.object_parts import MIN_PART_BYTES
from ckptkit.options import find_patterns
from ckptkit.plan.plan import (
    Body,
    Literal,
    OutputFile,
    Product,
    TensorSpec,
    lay_out_file,
    literal_file,
    name_order,
    name_shards,
    split_by_size,
)

STEM = "model"


def make_index_file(
    path: str, names: Sequence[str], groups: Sequence[Sequence[Product]]
) -> OutputFile:
    """Returns the index `path`, which maps each tensor to one of the files `names`."""
    specs = [product.spec for group in groups for product in group]
    document = {
        "metadata": {
            "total_parameters": sum(spec.elements for spec in specs),
            "total_size": sum(spec.size_bytes for spec in specs),
        },
        "weight_map": {
            product.spec.name: name
            for name, group in zip(names, groups, strict=True)
            for product in group
        },
    }
    data = (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    return literal_file(path, data)


ADAPTER_STEM = "adapter_model"
SINGLE_NAME = f"{STEM}.safetensors"
INDEX_NAME = f"{SINGLE_NAME}.index.json"
DATA_ALIGNMENT = 4096
_LENGTH_BYTES = 8  # of a header, before it
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
METADATA_KEY = "__metadata__"  # what a header calls its own facts; no tensor may be named so
_METADATA = {"format": "pt"}


def layout_hf_weights(
    products: Sequence[Product], max_file_bytes: int, stem: str = STEM
) -> list[OutputFile]:
    """Lays tensors out as `model.safetensors`, or as several files with an index.

    Files are filled in the order of the names, so that they depend on the model alone, and not on
    the order in which ranks saved their tensors.

    `max_file_bytes`: bytes of tensor data after which a new file starts. `stem`: what names of
    files begin with. Returns the weight files, and their index where there are several.
    """
    ordered = sorted(products, key=lambda product: name_order(product.spec.name))
    groups = split_by_size(ordered, max_file_bytes)
    names = name_shards(stem, "safetensors", len(groups))
    return layout_hf_files(list(zip(names, groups, strict=True)), stem)


def layout_hf_files(
    groups: Sequence[tuple[str, Sequence[Product]]], stem: str = STEM
) -> list[OutputFile]:
    """Lays tensors out in the given files.

    `groups`: `(name of the file, its tensors)`. `stem`: what the name of the index begins with.
    Returns the weight files, and their index unless the only file is `model.safetensors`.
    """
    files = [_weights_file(*group, {}) for group in groups]
    names = [name for name, _ in groups]
    single = f"{stem}.safetensors"
    if names != [single]:
        index = f"{single}.index.json"
        files.append(make_index_file(index, names, [products for _, products in groups]))
    return files


def layout_adapter(
    products: Sequence[Product], stem: str = ADAPTER_STEM, metadata: Mapping[str, str] | None = None
) -> OutputFile:
    """Lays the tensors of an adapter out as PEFT reads them: always one file.

    `stem`: what the name of the file begins with. `metadata`: further texts of the header.
    """
    return _weights_file(f"{stem}.safetensors", products, metadata or {})


def _weights_file(
    path: str, products: Sequence[Product], metadata: Mapping[str, str]
) -> OutputFile:
    ordered = _follow(sorted(products, key=_order))
    document: dict[str, object] = {METADATA_KEY: {**_METADATA, **metadata}}
    at = 0
    for product in ordered:
        spec = product.spec
        refusal = ""
        if spec.dtype.safetensors is None:
            refusal = f"dtype {spec.dtype.name} has no name in safetensors"
        elif spec.name == METADATA_KEY:
            refusal = "safetensors keeps this name for the metadata of a file"
        if refusal:
            raise CannotPlanError(
                refusal,
                where=f"tensor {spec.name!r}",
                hint="leave the tensor out with --exclude",
            )
        document[spec.name] = {
            "dtype": spec.dtype.safetensors,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.size_bytes],
        }
        at += spec.size_bytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % DATA_ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise CannotPlanError(
            f"a header of {len(text):,} bytes is over the limit of {_MAX_HEADER_BYTES:,}",
            where=path,
            hint="write more, smaller files with --max-shard-size",
        )
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    bodies: list[tuple[int, Body, TensorSpec | None]] = [(len(header), Literal(header), None)]
    bodies += [(product.spec.size_bytes, product.body, product.spec) for product in ordered]
    return lay_out_file(path, bodies)


def pad_header(file: OutputFile, padding_bytes: int) -> OutputFile:
    """Adds spaces to the header of a file, which moves all that is behind it."""
    first, *others = file.segments
    assert isinstance(first.body, Literal)  # noqa: S101  every file begins with its header
    text = first.body.data[_LENGTH_BYTES:] + b" " * padding_bytes
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    bodies = [(s.stop - s.start, s.body, s.spec) for s in others]
    return lay_out_file(file.path, [(len(header), Literal(header), None), *bodies])


def _order(product: Product) -> tuple[int, bool, str]:
    """Puts larger item sizes first, which aligns every tensor without gaps, as the format demands.

    Of one item size, tensors that are too small for a part of an object come first: they are sent
    together in one part, and do not interrupt the ranges that a store can copy itself.
    """
    spec = product.spec
    return -spec.dtype.itemsize, spec.size_bytes >= MIN_PART_BYTES, spec.name


def _follow(ordered: Sequence[Product]) -> Sequence[Product]:
    """Puts tensors right behind those that they are made with, if all of them stay aligned.

    What is read for one is then still in memory, here or in the page cache, for the other.
    """
    followers: dict[Fqn, list[Product]] = {product.spec.name: [] for product in ordered}
    leading: list[Product] = []
    for product in ordered:
        known = None if product.after is None else followers.get(product.after)
        (leading if known is None else known).append(product)
    made = [one for product in leading for one in (product, *followers[product.spec.name])]
    at = 0
    for product in made:
        if at % product.spec.dtype.itemsize:
            return ordered
        at += product.spec.size_bytes
    return made


_LISTED = 3
_MOST_PATTERNS = 12


class FileMap(Struct, frozen=True):
    """The files of a model, and the tensors in them."""

    location: str
    files: Mapping[Fqn, str]  # the file's name by the name of the tensor


def distribute(
    products: Sequence[Product],
    file_map: FileMap,
    *,
    is_wanted: Callable[[str], bool],
    tied: Collection[Fqn],
) -> tuple[Sequence[tuple[str, Sequence[Product]]], Sequence[str]]:
    """Puts each tensor into the file that it has in another model.

    A tensor that the other model lacks, such as a head that is no longer tied, goes to the file
    of the tensor before it in the order of the names, so that no file is new.

    `products`: what is to be written. `file_map`: the other model's files. `is_wanted`: whether the
    user left a name in. `tied`: names that are not written because another tensor holds their
    bytes. Returns the files that hold something, by name, and notes.
    """
    there = {*tied, *(product.spec.name for product in products)}
    lacking = [name for name in file_map.files if name not in there and is_wanted(name)]
    if lacking:
        more = f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
        patterns = [f"--exclude {shlex.quote(one)}" for one in find_patterns(lacking, there)]
        what = "them" if len(lacking) > 1 else "it"
        hint = f"pass {' '.join(patterns)} if the output is to lack {what}"
        if len(patterns) > _MOST_PATTERNS:
            hint = "leave --like out if the output is to lack them"
        if len(lacking) == len(file_map.files):
            hint = "name the model that the run was started from; see --names for names on the Hub"
        raise RefusedError(
            f"holds tensor {lacking[0]!r}{more}, which the output would lack",
            where=f"--like {file_map.location}",
            hint=hint,
        )
    groups: dict[str, list[Product]] = {}
    added: dict[str, str] = {}
    ordered = sorted(products, key=lambda product: name_order(product.spec.name))
    mapped = (file_map.files[p.spec.name] for p in ordered if p.spec.name in file_map.files)
    file = next(mapped, min(file_map.files.values()))
    for product in ordered:
        name = product.spec.name
        file = file_map.files.get(name, file)
        if name not in file_map.files:
            added[name] = file
        groups.setdefault(file, []).append(product)
    named = tuple((name, tuple(groups[name])) for name in sorted(groups))
    return named, _notes(added, file_map, groups)


def _notes(added: Mapping[str, str], file_map: FileMap, written: Collection[str]) -> Sequence[str]:
    notes = []
    for name, file in list(added.items())[:_LISTED]:
        notes.append(f"{file_map.location} has no tensor {name!r}: it is in {file!r}")
    if len(added) > _LISTED:
        notes.append(
            f"{len(added) - _LISTED:,} more tensors that {file_map.location} lacks are in the files"
            " of the tensors before them"
        )
    left = sorted(set(file_map.files.values()) - set(written))
    if left:
        notes.append(
            f"files of {file_map.location} that would hold nothing are not written:"
            f" {', '.join(left)}"
        )
    return notes
