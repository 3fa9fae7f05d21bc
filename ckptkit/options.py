"""What was asked for, checked once, at the border."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from ckptkit.core.errors import ArgumentError, UsageError
from ckptkit.core.text import a_kind

DTypeChoice = Literal["keep", "float32", "bfloat16", "float16"]
OutputDType = Literal[DTypeChoice, "base"]
CountLike = int | str  # as a user gives it; see `positive_number`
DTypeLike = Any  # a name or alias, or a dtype of torch or numpy; see `choose_dtype`
FACTOR_DTYPES = ("float32", "bfloat16", "float16")
Layout = Literal["hf", "torch", "dcp"]
NameChoice = Literal["auto", "live", "hub"]
IfExists = Literal["error", "verify"]
Engine = Literal["local", "ray"]
DEFAULT_MAX_FILE_BYTES = 5_000_000_000
DEFAULT_BUDGET_BYTES = 64_000_000
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MOST_DIGITS = 12
_ALIKE = 0.5  # from which two words are taken for one; 'fp16' and 'float16' are so by 0.55
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


def file_limit(size: str | int | None, *, like: str | None) -> int:
    """Reads the size of weight files as the user gives it; None where it is not given.

    Returns:
        The limit, in bytes.

    Raises:
        UsageError: If it is no size, or if a model says already what lies in which file.
    """
    if size is None:
        return DEFAULT_MAX_FILE_BYTES
    if like is not None:
        raise UsageError(
            "stands beside --like, which says already what lies in which file",
            where=f"--max-shard-size {size}",
            hint="leave one of the two out",
        )
    return parse_size(size, option="--max-shard-size")


def positive_number(text: str | int | None, *, option: str, example: int) -> int | None:
    """Reads a number of things as the user gives it; None where it is not given.

    Args:
        text: What was given.
        option: Its option, for messages.
        example: A number that would do.

    Raises:
        UsageError: If it is no positive whole number.
    """
    if text is None:
        return None
    digits = str(text)
    number = int(digits) if digits.isdecimal() and len(digits) < _MOST_DIGITS else 0
    if number < 1:
        raise UsageError(
            f"{text!r} is no positive whole number",
            where=option,
            hint=f"pass a number such as {option} {example}",
        )
    return number


def vocabulary_size(text: str | int | None) -> int | None:
    """Reads the number of tokens as the user gives it; None where it is not given.

    Raises:
        UsageError: If it is no positive whole number.
    """
    return positive_number(text, option="--vocab-size", example=151_643)


def name_prefixes(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Reads what names begin with as the user gives it; each ends with a dot afterwards.

    Raises:
        UsageError: If one is empty.

    >>> name_prefixes("net"), name_prefixes(["net.", "module"])
    (('net.',), ('net.', 'module.'))
    """
    listed = (given,) if isinstance(given, str) else tuple(given or ())
    if not all(prefix.strip(".") for prefix in listed):
        raise UsageError(
            "a prefix has at least one character besides dots",
            where="--strip-prefix",
            hint="pass what the names begin with, such as --strip-prefix net.",
        )
    return tuple(prefix if prefix.endswith(".") else f"{prefix}." for prefix in listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateRequest:
    """What the output of a consolidation should hold.

    Attributes:
        dtype: The element type of floating tensors, `keep` for the stored one, or `base` for
            the one that each has in the files of a base model.
        keep_dtype: Patterns of names that keep their stored type whatever `dtype` says.
        include: Patterns of names to take; empty for all.
        exclude: Patterns of names to leave out, after `include`.
        select: The state dict to take where a checkpoint holds several.
        max_file_bytes: Bytes of tensor data after which a new weight file is begun.
        layout: The kind of output.
        names: `live` writes what training holds, whatever it is; `auto` writes what
            `save_pretrained` would write where that can be told, and refuses what no library
            would load; `hub` refuses where it cannot be told, too.
        allow_code: Whether `*.py` files and `auto_map` entries are copied.
        like: A model folder whose file names and distribution of tensors are kept, or None.
        vocab_size: How many rows embeddings and heads are cut to, or None for all.
        optimizer: Whether the states of the optimizer are written too.
        model_config: A folder with the `config.json` of the model that flat parameters of FSDP1
            are made of, or None.
        strip_prefix: What is taken from the beginning of names, before anything else looks at
            them; each ends with a dot.
    """

    dtype: OutputDType = "keep"
    keep_dtype: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    select: str | None = None
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    layout: Layout = "hf"
    names: NameChoice = "auto"
    allow_code: bool = False
    like: str | None = None
    vocab_size: int | None = None
    optimizer: bool = False
    model_config: str | None = None
    strip_prefix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.strip_prefix and self.optimizer:
            raise UsageError(
                "cannot be combined with --optimizer, whose states have the names of training",
                where=f"--strip-prefix {self.strip_prefix[0]}",
                hint="leave one of the two out",
            )
        object.__setattr__(self, "dtype", choose_dtype(self.dtype, get_args(OutputDType)))
        check_choice("--names", self.names, get_args(NameChoice))
        check_choice("--to", self.layout, get_args(Layout))
        if self.names == "hub" and self.layout != "hf":
            raise UsageError(
                f"is how a model folder names its tensors, and --to {self.layout} writes none",
                where="--names hub",
                hint="leave --names out",
            )
        if self.like is not None and self.layout != "hf":
            raise UsageError(
                f"keeps the safetensors files of a model, and --to {self.layout} writes none",
                where=f"--like {self.like}",
                hint="leave --like out",
            )

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


_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}


def choose_dtype(value: object, choices: tuple[str, ...]) -> Any:
    """Reads an element type: a name, a common alias such as `bf16`, or a dtype of torch or numpy.

    Returns:
        One of the choices.

    Raises:
        UsageError: If it is none of them.
        ArgumentError: If it is no element type.
    """
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, str):
        name = value.removeprefix("torch.")
    elif kind.__module__.partition(".")[0] in {"torch", "numpy", "ml_dtypes"}:
        name = str(getattr(value, "__name__", value)).removeprefix("torch.")
    else:
        raise ArgumentError(f"is {a_kind(value)}, where a text was expected", where="--dtype")
    name = _DTYPE_ALIASES.get(name, name)
    check_choice("--dtype", name, choices)
    return name


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a value that is not among those of an option.

    Raises:
        UsageError: If it is not.
        ArgumentError: If it is no text.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"is {a_kind(value)}, where a text was expected", where=option)
    if value not in choices:
        nearest = get_close_matches(value, choices, n=1, cutoff=_ALIKE) or choices
        raise UsageError(
            f"{value!r} is not among {', '.join(choices)}",
            where=option,
            hint=f"pass {option} {nearest[0]}",
        )


def check_if_exists(value: str, *, overwrite: bool) -> None:
    """Refuses values that are none for an output that is there, and a contradiction.

    Raises:
        UsageError: If there is one.
    """
    check_choice("--if-exists", value, get_args(IfExists))
    if value == "verify" and overwrite:
        raise UsageError(
            "stands beside --overwrite, which replaces what is there",
            where="--if-exists verify",
            hint="leave one of the two out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What an execution may use of the machine, or of each where there are several.

    Attributes:
        workers: Threads; None lets ckptkit choose.
        memory_budget_bytes: What all buffers together may take.
        memory_limit_bytes: What the whole process may take, or None.
        bytes_per_second: How much may be read, and how much written; None for no limit.
        engine: `local` for this machine, `ray` for the nodes of a Ray cluster.
    """

    workers: int | None = None
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES
    memory_limit_bytes: int | None = None
    bytes_per_second: int | None = None
    engine: Engine = "local"

    def __post_init__(self) -> None:
        check_choice("--engine", self.engine, get_args(Engine))
        if self.workers is not None and self.workers < 1:
            raise UsageError(
                f"{self.workers} is not at least 1", where="--workers", hint="leave it out"
            )


def make_resources(
    workers: int | None,
    budget: int | str | None,
    limit: int | str | None,
    *,
    bandwidth: int | str | None = None,
    engine: Engine = "local",
) -> Resources:
    """Reads sizes as the user gives them.

    Returns:
        The limits, in bytes.

    Raises:
        UsageError: If one is no size, if there would be no worker, or if there is no such engine.
    """

    def size_of(text: int | str | None, option: str) -> int | None:
        return None if text is None else parse_size(text, option=option)

    return Resources(
        workers=workers,
        memory_budget_bytes=size_of(budget, "--memory-budget") or DEFAULT_BUDGET_BYTES,
        memory_limit_bytes=size_of(limit, "--memory-limit"),
        bytes_per_second=size_of(bandwidth, "--bandwidth"),
        engine=engine,
    )
