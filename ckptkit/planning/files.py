"""Which tensor goes to which output file."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.planning.plan import Product


def name_order(name: str) -> list[tuple[int, str]]:
    """Returns what tensors are sorted by: their names, numbers in them by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def split_by_size(products: Sequence[Product], max_file_bytes: int) -> list[list[Product]]:
    """Fills files in the order of the tensors, each up to `max_file_bytes` of tensor data.

    A tensor larger than that gets a file of its own; no tensor is ever split over files.
    There is always at least one file.

    Args:
        products: The tensors, in model order.
        max_file_bytes: The limit, in bytes, without headers.

    Returns:
        The tensors of each file, in order.
    """
    files: list[list[Product]] = [[]]
    room = max_file_bytes
    for product in products:
        size = product.spec.size_bytes
        if files[-1] and size > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(product)
        room -= size
    return files


def numbered(stem: str, extension: str, count: int) -> list[str]:
    """Names the files of a set as Hugging Face does.

    Returns:
        One name per file.

    >>> numbered("model", "safetensors", 2)
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if count == 1:
        return [f"{stem}.{extension}"]
    return [f"{stem}-{i:05d}-of-{count:05d}.{extension}" for i in range(1, count + 1)]
