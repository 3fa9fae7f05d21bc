"""Requests: the options of a conversion, read from what users pass and checked once."""

from __future__ import annotations

import glob
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypedDict, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from ckptkit.core.errors import ArgumentError, UsageError
from ckptkit.core.text import a_kind

if TYPE_CHECKING:
    from ckptkit.engine.outcome import Listener

DTypeChoice = Literal["keep", "float32", "bfloat16", "float16"]
PackedForm = Literal["fp8-block", "fp8-channel", "int8-channel", "int4-group", "nvfp4", "mxfp4"]
OutputDType = Literal[DTypeChoice, "base", PackedForm]
CountLike = int | str  # as a user gives it; see `positive_number`
DTypeLike = Any  # a name or alias, or a dtype of torch or numpy; see `choose_dtype`
FACTOR_DTYPES = ("float32", "bfloat16", "float16")
Layout = Literal["hf", "torch", "dcp", "megatron", "torchtitan", "universal"]
FRAMEWORKS_BY_LAYOUT = {"megatron": "Megatron-Core", "torchtitan": "torchtitan"}
"""The framework whose names a layout has, as name maps call it."""
NameChoice = Literal["auto", "live", "hub"]
GenerationChoice = Literal["align", "keep"]
AdapterLayout = Literal["peft", "vllm"]
TokenizerOrigin = Literal["auto", "step", "base"]
IfExists = Literal["error", "verify"]
Engine = Literal["local", "ray"]
Sharing = Literal["auto", "always", "never"]
Proof = Literal["read", "stored"]
NotFinite = Literal["nan", "inf"]
"""Numbers that a check can refuse."""
DEFAULT_MAX_FILE_BYTES = 5_000_000_000
DEFAULT_BUDGET_BYTES = 64_000_000
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?) ?({'|'.join(_SECONDS)})", re.IGNORECASE)
GGUF = "gguf"
BestMode = Literal["min", "max"]
PushKind = Literal["auto", "model", "adapter", "merged"]
"""What is built from a step: `auto` is the adapter if PEFT trained one, else the model; `merged` is
the base with the adapter of the step in it."""
Encoding = Literal["xor", "overwrite"]
ChecksumFormat = Literal["xxh3-128", "blake3", "adler32"]
SOME_MODEL = "ORG/NAME"
"""What stands in proposed commands for a model that is not known."""
_LEAST_WITHOUT_UNIT = 1_000_000
_MOST_DIGITS = 12
_ALIKE = 0.54  # similarity that makes a proposal; that of 'FP16' and 'float16' is 0.545
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*")


class ProgressOptions(TypedDict, total=False):
    """The options of all functions that work on data for a while.

    Attributes:
        progress: Whether progress is shown: as a bar of tqdm in a terminal or a notebook, and as
            lines on stderr where that is a log, after two seconds and then every ten.
        listener: Receives progress events, from several threads.
    """

    progress: bool
    listener: Listener | None


class RetentionOptions(TypedDict, total=False):
    """The rules of retention. A step stays if one rule keeps it; without a rule, all steps stay.

    Attributes:
        keep_last: How many of the newest complete steps stay.
        keep_every: Steps divisible by this stay.
        keep_for: Steps saved in that time, such as "12h" or "7d", stay, by the time in their
            manifest or of their files.
        keep_best: The metric by which the best step stays; given to `save(…, metrics=…)`.
        best_mode: Whether the smallest ("min", default) or the largest ("max") is best.
    """

    keep_last: int | None
    keep_every: int | None
    keep_for: str | None
    keep_best: str | None
    best_mode: BestMode


def parse_size(text: str | int, *, option: str) -> int:
    """Turns `5GB` into bytes; units are powers of 1,000, `GiB` and the like powers of 1,024.

    For options that bound what is written, read or listed, where a number without a unit is bytes;
    where a slip would remove data, `parse_total` is taken.

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
            f"{text!r} is not a size; expected a number and a unit",
            where=option,
            hint=f"pass {option} 5GB",
        )
    unit = match[2].upper() or "B"
    factor = (_UNITS | _BINARY_UNITS).get(unit)
    if factor is None:
        raise UsageError(
            f"{match[2]!r} is not a unit; expected B, KB, MB, GB or TB (powers of 1,000)",
            where=f"{option} {text}",
            hint=f"pass {option} 5GB",
        )
    size = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size < 1:
        raise UsageError(
            "must be at least 1 byte", where=f"{option} {text}", hint=f"pass {option} 5GB"
        )
    return size


def parse_total(size: str | int, *, option: str) -> int:
    """Turns a size into bytes as `parse_size` does; a small text without a unit is refused.

    For options such as `prune --max-total-size`, where `500` for `500GB` would remove all steps.

    Returns:
        The size in bytes.

    Raises:
        UsageError: If it is not a size, or a small one without a unit.
    """
    number = parse_size(size, option=option)
    if isinstance(size, str) and size.strip().isdigit() and number < _LEAST_WITHOUT_UNIT:
        raise UsageError(
            f"{size.strip()} has no unit, and would be bytes",
            where=option,
            hint=f"pass {option} {size.strip()}GB, or {size.strip()}B for bytes",
        )
    return number


def parse_duration(text: str, *, option: str) -> float:
    """Turns `7d` into seconds; units are s, min, h, d and w, and one has to be there.

    Returns:
        The time in seconds.

    Raises:
        UsageError: If the text is no positive time with a unit.

    >>> parse_duration("12h", option="--keep-for")
    43200.0
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2].lower()] if match else 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"{text!r:.100} is not a time; expected a number and one of {', '.join(_SECONDS)}",
            where=option,
            hint=f"pass {option} 12h, or 7d",
        )
    return seconds


def refuse_gguf(src: object, out: object) -> NoReturn:
    """Refuses an output in GGUF, with the commands that make one.

    Args:
        src: The checkpoint, as the user typed it.
        out: The model folder to make first, or the file in GGUF.

    Raises:
        UsageError: In any case.
    """
    folder = str(out).removesuffix(f".{GGUF}")
    first = shlex.join(["ckptkit", "consolidate", str(src), folder])
    converter = ["python", "llama.cpp/convert_hf_to_gguf.py", folder]
    converter += ["--outfile", f"{folder}.{GGUF}"]
    raise UsageError(
        "GGUF is made of a model folder by llama.cpp",
        where=f"--to {GGUF}",
        hint=f"run `{first}`, then `{shlex.join(converter)}`",
    )


def parse_file_limit(size: str | int | None, *, like: str | None) -> int:
    """Reads `--max-shard-size`, which cannot be combined with `--like`.

    Returns:
        The limit, in bytes.

    Raises:
        UsageError: If it is not a size, or if there is a `--like`.
    """
    if size is None:
        return DEFAULT_MAX_FILE_BYTES
    if like is not None:
        raise UsageError(
            "cannot be combined with --like, which decides which tensor is in which file",
            where=f"--max-shard-size {size}",
            hint="leave one of the two out",
        )
    return parse_total(size, option="--max-shard-size")


def positive_number(text: str | int | None, *, option: str, example: int) -> int | None:
    """Reads a positive whole number; None for None.

    Args:
        text: The number as the user passed it.
        option: Its option, for messages.
        example: A valid number, for the hint.

    Raises:
        UsageError: If it is not a positive whole number.
    """
    if text is None:
        return None
    digits = str(text)
    number = int(digits) if digits.isdecimal() and len(digits) < _MOST_DIGITS else 0
    if number < 1:
        raise UsageError(
            f"{text!r} is not a positive whole number",
            where=option,
            hint=f"pass a number such as {option} {example}",
        )
    return number


def parse_prefixes(prefixes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Reads `--strip-prefix`: one prefix or several. Each of the result ends with a dot.

    Raises:
        UsageError: If one is empty.

    >>> parse_prefixes("net"), parse_prefixes(["net.", "module"])
    (('net.',), ('net.', 'module.'))
    """
    listed = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes or ())
    if not all(prefix.strip(".") for prefix in listed):
        raise UsageError(
            "a prefix needs at least one character besides dots",
            where="--strip-prefix",
            hint="pass the beginning of the names, such as --strip-prefix net.",
        )
    return tuple(prefix if prefix.endswith(".") else f"{prefix}." for prefix in listed)


def parse_not_finite(kinds: Sequence[str], *, option: str) -> tuple[NotFinite, ...]:
    """Reads one or several kinds of numbers that are refused, `nan` and `inf`.

    Raises:
        UsageError: If one is neither.

    >>> parse_not_finite(["inf", "nan"], option="--check")
    ('nan', 'inf')
    """
    for kind in kinds:
        check_choice(option, kind, get_args(NotFinite))
    return tuple(kind for kind in get_args(NotFinite) if kind in kinds)


def _parse_patterns(patterns: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(patterns or ())


def _keep(value: Any) -> Any:
    return value


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "keep_dtype": _parse_patterns,
    "include": _parse_patterns,
    "exclude": _parse_patterns,
    "map": os.fspath,
    "vocab_size": partial(positive_number, option="--vocab-size", example=151_643),
    "strip_prefix": parse_prefixes,
    "check": tuple,
}
"""How `ConsolidateRequest.from_options` reads what a user passed; the others stay as they are."""


class ConsolidateRequest(Struct, frozen=True, kw_only=True):
    """What the output of a consolidation holds.

    A field has the name, the meaning and the default of an option in `ckptkit.api.Options`; below
    are those that differ. `from_options` reads them from what a user passed.

    Attributes:
        max_file_bytes: Bytes of tensor data after which a new weight file starts.
        layout: The kind of output; `--to` of `ckptkit convert`.
        strip_prefix: Prefixes that names lose before any other option sees them; each ends with
            a dot.
    """

    dtype: OutputDType = "keep"
    keep_dtype: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    select: str | None = None
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    layout: Layout = "hf"
    names: NameChoice = "auto"
    map: str = "auto"
    allow_code: bool = False
    like: str | None = None
    vocab_size: int | None = None
    optimizer: bool = False
    model_config: str | None = None
    strip_prefix: tuple[str, ...] = ()
    check: tuple[NotFinite, ...] = ()
    cast_all: bool = False
    generation_config: GenerationChoice = "align"
    fill_from: str | None = None
    fill_from_base: bool = False
    into_base: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any], layout: Layout = "hf") -> Self:
        """Reads the options of a conversion as a user passes them; ignores all others.

        Args:
            options: By the names in `ckptkit.api.Options`; paths are places already.
            layout: The kind of output.

        Raises:
            UsageError: If an option has no valid value, or two cannot be combined.
        """
        given = {name: options[name] for name in cls.__struct_fields__ if name in options}
        values = {name: _PARSERS.get(name, _keep)(value) for name, value in given.items()}
        limit = parse_file_limit(options.get("max_shard_size"), like=options.get("like"))
        return cls(**values, layout=layout, max_file_bytes=limit)

    def __post_init__(self) -> None:
        if self.check:
            force_setattr(self, "check", parse_not_finite(self.check, option="--check"))
        if self.strip_prefix and self.optimizer:
            raise UsageError(
                "cannot be combined with --optimizer, whose states have the names of training",
                where=f"--strip-prefix {self.strip_prefix[0]}",
                hint="leave one of the two out",
            )
        if self.layout == "universal":
            self._choose_for_universal()
        if self.vocab_size is not None and self.optimizer:
            raise UsageError(
                "cannot be combined with --optimizer, whose states keep the rows of training",
                where=f"--vocab-size {self.vocab_size}",
                hint="leave one of the two out",
            )
        force_setattr(self, "dtype", choose_dtype(self.dtype, get_args(OutputDType)))
        check_choice("--names", self.names, get_args(NameChoice))
        check_choice("--generation-config", self.generation_config, get_args(GenerationChoice))
        if self.is_packed:
            self._refuse_beside_packed()
        if self.fill_from is not None and (self.fill_from_base or self.into_base):
            option = "--fill-from-base" if self.fill_from_base else "--into-base"
            raise UsageError(
                f"cannot be combined with {option}, which takes them from the --base",
                where=f"--fill-from {self.fill_from}",
                hint="leave one of the two out",
            )
        check_choice("--to", self.layout, get_args(Layout))
        if self.names == "hub" and self.layout != "hf":
            raise UsageError(
                f"names the tensors of a model folder, and --to {self.layout} writes none",
                where="--names hub",
                hint="leave --names out",
            )
        if self.names == "live" and self.map not in {"auto", "none"}:
            raise UsageError(
                "cannot be combined with --names live, which keeps all names",
                where=f"--map {self.map}",
                hint="leave one of the two out",
            )
        if self.layout in FRAMEWORKS_BY_LAYOUT:
            self._refuse_names_of_training()
        if self.like is not None and self.layout != "hf":
            raise UsageError(
                f"keeps the safetensors files of a model, and --to {self.layout} writes none",
                where=f"--like {self.like}",
                hint="leave --like out",
            )

    def _choose_for_universal(self) -> None:
        """DeepSpeed takes weights from float32 copies, beside the states of the optimizer."""
        if self.dtype not in {"keep", "float32"}:
            raise UsageError(
                "a universal checkpoint has float32 copies of the weights",
                where=f"--dtype {self.dtype}",
                hint="leave it out: the engine that loads them has the type of its own settings",
            )
        force_setattr(self, "dtype", "float32")
        force_setattr(self, "optimizer", True)  # noqa: FBT003

    @property
    def is_packed(self) -> bool:
        """Whether the weights of linear layers are packed."""
        return self.dtype in get_args(PackedForm)

    @property
    def element_type(self) -> OutputDType:
        """What `dtype` says of tensors that are not packed, and of packed ones before they are."""
        return "bfloat16" if self.is_packed else self.dtype

    def _refuse_beside_packed(self) -> None:
        wrong = {
            "--optimizer, whose states are those of unpacked weights": self.optimizer,
            f"--to {self.layout}: training loads no packed weights": self.layout != "hf",
            "--names live: training loads no packed weights": self.names == "live",
            "--like: a packed model there says itself how weights are packed": self.like
            is not None,
        }
        for option in (option for option, is_given in wrong.items() if is_given):
            raise UsageError(
                f"cannot be combined with {option}",
                where=f"--dtype {self.dtype}",
                hint="leave one of the two out",
            )

    def _refuse_names_of_training(self) -> None:
        wrong = {
            "--names live": self.names == "live",
            "--map none": self.map == "none",
        }
        for option in (option for option, is_given in wrong.items() if is_given):
            raise UsageError(
                f"cannot be combined with --to {self.layout}, which converts the names of weights",
                where=option,
                hint="leave one of the two out",
            )

    def wants(self, *names: str, before: str = "") -> bool:
        """Returns whether a tensor is written; where a map renames it, it has several names.

        Args:
            names: Its names.
            before: Its name before a prefix was stripped, which may be included by that, too.
        """
        given = (*names, before)
        is_included = not self.include or any(matches(name, self.include) for name in given)
        return is_included and not any(matches(name, self.exclude) for name in names)


def changed_options(request: ConsolidateRequest) -> Mapping[str, Any]:
    """Returns the options that differ from their defaults, as JSON values."""
    default = ConsolidateRequest()
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name in request.__struct_fields__
        if (value := getattr(request, name)) != getattr(default, name)
    }


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether any shell pattern (`*`, `?`, `[…]`) fits the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def find_patterns(unwanted: Iterable[str], wanted: Collection[str]) -> list[str]:
    """Returns shell patterns that fit all of some names of tensors, and none of some others.

    >>> find_patterns(["layers.2.a.bias", "layers.2.b.bias"], ["layers.0.a.bias", "norm.bias"])
    ['layers.2.*']
    >>> find_patterns(["layers.0.bias", "layers.1.bias"], ["layers.0.weight", "layers.1.weight"])
    ['layers.*.bias']
    >>> find_patterns([f"probe_{letter}.scale" for letter in "abcde"], ["model.scale"])
    ['probe_*']
    """
    heads = {name[:at] for name in wanted for at, letter in enumerate(name) if letter == "."}
    patterns: dict[str, None] = {}
    fits_wanted: dict[str, bool] = {}
    for name in unwanted:
        ends = [at for at, letter in enumerate(name) if letter == "."]
        end = next((at for at in ends if name[:at] not in heads), len(name))
        pattern = glob.escape(name[:end]) + (".*" if end < len(name) else "")
        wide = _NUMBER.sub("*", pattern)
        if wide not in fits_wanted:
            fits_wanted[wide] = any(fnmatchcase(other, wide) for other in wanted)
        patterns[pattern if fits_wanted[wide] else wide] = None
    first, last = min(patterns, default=""), max(patterns, default="")
    pairs = enumerate(zip(first, last, strict=False))
    common = first[: next((at for at, (a, b) in pairs if a != b), len(first))]
    is_apart = len(common) >= _LEAST_COMMON and not any(map("[*?".__contains__, common))
    if (
        len(patterns) > _MOST_PATTERNS
        and is_apart
        and not any(n.startswith(common) for n in wanted)
    ):
        return [f"{common}*"]
    return list(patterns)


_MOST_PATTERNS, _LEAST_COMMON = 4, 3  # patterns of a proposal; letters that these have in common
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
    if option == "--to" and value.lower() == GGUF:
        refuse_gguf("SRC", "OUT")
    if value not in choices:
        typed = value.lower()
        parts = [c for c in choices if typed and (c.startswith(typed) or c.endswith(typed))]
        # What has other digits is no slip of the hand, but another thing.
        possible = [c for c in choices if set(filter(str.isdigit, typed)) <= set(c)]
        near = parts or get_close_matches(typed, possible, n=1, cutoff=_ALIKE)
        raise UsageError(
            f"{value!r} is not among {', '.join(choices)}",
            where=option,
            hint=f"pass {option} {' or '.join(near)}" if near else "pass one of these",
        )


def check_if_exists(value: str, *, overwrite: bool) -> None:
    """Refuses an unknown value of `--if-exists`, and `verify` together with `--overwrite`."""
    check_choice("--if-exists", value, get_args(IfExists))
    if value == "verify" and overwrite:
        raise UsageError(
            "cannot be combined with --overwrite, which replaces the output",
            where="--if-exists verify",
            hint="leave one of the two out",
        )


class Resources(Struct, frozen=True, kw_only=True):
    """Limits of an execution on each machine that takes part in it.

    Attributes:
        workers: Threads; None for a number that fits the cores.
        memory_budget_bytes: Most bytes of all buffers together.
        memory_limit_bytes: Most bytes of the whole process, or None.
        bytes_per_second: Most bytes read, and most bytes written, per second; None for no limit.
        engine: `local` for this machine, `ray` for the nodes of a Ray cluster.
        sharing: Whether the file system makes blocks of the sources those of the output: `auto`
            where it can, `always` or else refused, `never`.
        proof: What proves bytes that are shared so: that they are `read` and compared, or, much
            faster, the checksums that a save of ckptkit has `stored`.
    """

    workers: int | None = None
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES
    memory_limit_bytes: int | None = None
    bytes_per_second: int | None = None
    engine: Engine = "local"
    sharing: Sharing = "auto"
    proof: Proof = "read"

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Reads the limits as a user passes them; ignores all other options.

        Raises:
            UsageError: If a size or a number is not valid, or if there is no such engine.
        """

        def size_of(name: str) -> int | None:
            size = options.get(name)
            return None if size is None else parse_size(size, option=f"--{name.replace('_', '-')}")

        return cls(
            workers=options.get("workers"),
            memory_budget_bytes=size_of("memory_budget") or DEFAULT_BUDGET_BYTES,
            memory_limit_bytes=size_of("memory_limit"),
            bytes_per_second=size_of("bandwidth"),
            engine=options.get("engine", "local"),
            sharing=options.get("share", "auto"),
            proof=options.get("proof", "read"),
        )

    def __post_init__(self) -> None:
        check_choice("--engine", self.engine, get_args(Engine))
        check_choice("--share", self.sharing, get_args(Sharing))
        check_choice("--proof", self.proof, get_args(Proof))
        if self.workers is not None and self.workers < 1:
            raise UsageError(
                f"{self.workers} is not at least 1", where="--workers", hint="leave it out"
            )
