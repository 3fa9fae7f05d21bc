"""What was asked for, checked once, at the border."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from ckptkit.core.errors import UsageError

DTypeChoice = Literal["keep", "float32", "bfloat16", "float16"]
Layout = Literal["hf", "torch", "dcp"]
NameChoice = Literal["auto", "live"]
DEFAULT_MAX_FILE_BYTES = 5_000_000_000
DEFAULT_BUDGET_BYTES = 64_000_000
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, *, option: str) -> int:
    """Turns `5GB` into bytes; units are powers of 1,000, `GiB` and its kin powers of 1,024.

    Returns:
        The size in bytes.

    Raises:
        UsageError: If the text is no positive size.

    >>> parse_size("5GB", option="--max-shard-size")
    5000000000
    """
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise UsageError(
            f"{text!r} is no size; expected a number and a unit",
            where=option,
            hint=f"pass {option} 5GB",
        )
    unit = match[2].upper() or "B"
    factor = (_UNITS | _BINARY_UNITS).get(unit)
    if factor is None:
        raise UsageError(
            f"{match[2]!r} is no unit; found against B, KB, MB, GB, TB (powers of 1,000)",
            where=f"{option} {text}",
            hint=f"pass {option} 5GB",
        )
    size = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size < 1:
        raise UsageError(
            "must be at least 1 byte", where=f"{option} {text}", hint=f"pass {option} 5GB"
        )
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateRequest:
    """What the output of a consolidation should hold.

    Attributes:
        dtype: The element type of floating tensors, or `keep` for the stored one.
        keep_dtype: Patterns of names that keep their stored type whatever `dtype` says.
        include: Patterns of names to take; empty for all.
        exclude: Patterns of names to leave out, after `include`.
        select: The state dict to take where a checkpoint holds several.
        max_file_bytes: Bytes of tensor data after which a new weight file is begun.
        layout: The kind of output.
        names: `live` writes what training holds, whatever it is; `auto` refuses what no
            library would load under these names.
        allow_code: Whether `*.py` files and `auto_map` entries are copied.
    """

    dtype: DTypeChoice = "keep"
    keep_dtype: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    select: str | None = None
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    layout: Layout = "hf"
    names: NameChoice = "auto"
    allow_code: bool = False

    def __post_init__(self) -> None:
        _check_choice("--dtype", self.dtype, get_args(DTypeChoice))
        _check_choice("--names", self.names, get_args(NameChoice))
        _check_choice("--to", self.layout, get_args(Layout))

    def selecting(self, select: str | None) -> ConsolidateRequest:
        """Returns the same request with another selection."""
        return replace(self, select=select)

    def wants(self, name: str) -> bool:
        """Tells whether a tensor of that name is to be written."""
        taken = not self.include or matches(name, self.include)
        return taken and not matches(name, self.exclude)


def changed_options(request: ConsolidateRequest) -> Mapping[str, Any]:
    """Returns the options that differ from their defaults, as JSON values."""
    default = ConsolidateRequest()
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in fields(request)
        if (value := getattr(request, field.name)) != getattr(default, field.name)
    }


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Tells whether any shell pattern (`*`, `?`, `[…]`) fits the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(
            f"{value!r} is not among {', '.join(choices)}",
            where=option,
            hint=f"pass {option} {choices[0]}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What an execution may use of the machine; None lets ckptkit choose."""

    workers: int | None = None
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(
                f"{self.workers} is not at least 1", where="--workers", hint="leave it out"
            )


def make_resources(
    workers: int | None, budget: int | str | None, limit: int | str | None
) -> Resources:
    """Reads sizes as the user gives them.

    Returns:
        The limits, in bytes.

    Raises:
        UsageError: If one is no size, or if there would be no worker.
    """
    return Resources(
        workers=workers,
        memory_budget_bytes=DEFAULT_BUDGET_BYTES
        if budget is None
        else parse_size(budget, option="--memory-budget"),
        memory_limit_bytes=None if limit is None else parse_size(limit, option="--memory-limit"),
    )
