"""What configurations of accelerate and arguments of the Trainer say of steps and their bytes.

Only scalars at the top of a file are read, as text: nothing is expanded, and no tag is obeyed.

Source: accelerate 1.15, `commands/config/config_args.py`; transformers 5.23, `training_args.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path

import yaml
from msgspec import Struct
from msgspec.structs import asdict

from ckptkit.core.errors import FormatError, InputError, UnsupportedError, UsageError
from ckptkit.core.text import quote
from ckptkit.storage.locations import place_of

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES = 1 << 20
_MOST_NUMBER = 10**9
_SAVE_STEPS = "500"  # of the Trainer, where no file says it
_MERGE = "tag:yaml.org,2002:merge"
_NULL = "tag:yaml.org,2002:null"
_TRUE = frozenset({"1", "on", "true", "y", "yes"})
_ACCELERATE = frozenset({"compute_environment", "distributed_type"})
_TRAINER = frozenset({"output_dir", "per_device_train_batch_size", "save_strategy", "save_steps"})
_8_BIT = re.compile(r"8bit|8_bit")


class TrainingArguments(Struct, frozen=True):
    """What files say of a job; None or empty where they say nothing."""

    ranks: int | None = None
    nodes: int | None = None
    optimizer: str = ""
    only_model: bool = False  # the Trainer saves no optimizer
    keep_last: int | None = None
    output_dir: str = ""
    max_steps: int | None = None
    save_every: int | None = None  # steps; 0 if saves are not counted in steps

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of a saved step: weights in float32, and two moments of Adam."""
        if self.only_model:
            return 4
        return 4 + (2 if _8_BIT.search(self.optimizer) else 8)

    def joined(self, other: TrainingArguments) -> TrainingArguments:
        """Returns what both say; the other one wins."""
        unsaid = asdict(TrainingArguments())
        said = {name: value for name, value in asdict(other).items() if value != unsaid[name]}
        return TrainingArguments(**{**asdict(self), **said})


def read_arguments(path: Path) -> TrainingArguments:
    texts = _read_scalars(path)
    if not texts.keys() & (_ACCELERATE | _TRAINER):
        listed = ", ".join(sorted(name[:40] for name in texts)[:5])
        raise UnsupportedError(
            "expected a configuration of accelerate, or arguments of the Trainer;"
            f" found the names {listed or 'of nothing'}",
            where=str(path),
            hint="pass the file that `accelerate launch --config_file` or HfArgumentParser takes",
        )
    output_dir = texts.get("output_dir", "")
    try:
        if output_dir:
            place_of(output_dir)
    except UsageError as error:
        raise InputError(
            f"output_dir is {quote(output_dir)}, where a path or a URL was expected",
            where=str(path),
        ) from error
    return TrainingArguments(
        ranks=_count(texts, "num_processes"),
        nodes=_count(texts, "num_machines"),
        optimizer=texts.get("optim", "").lower(),
        only_model=texts.get("save_only_model", "").lower() in _TRUE,
        keep_last=_count(texts, "save_total_limit"),
        output_dir=output_dir,
        max_steps=_count(texts, "max_steps"),
        save_every=_save_every(texts) if texts.keys() & _TRAINER else None,
    )


def _number(text: str) -> float | None:
    """Returns a number of a sensible size that is above 0."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < _MOST_NUMBER else None


def _count(texts: Mapping[str, str], name: str) -> int | None:
    number = _number(texts.get(name, ""))
    return int(number) if number is not None and number.is_integer() else None


def _save_every(texts: Mapping[str, str]) -> int | None:
    """Returns the steps between saves; None if they are a share of an unknown number of steps."""
    if texts.get("save_strategy", "steps").lower() != "steps":
        return 0
    number, most = _number(texts.get("save_steps", _SAVE_STEPS)), _count(texts, "max_steps")
    if number is None or number >= 1:
        return int(number) if number is not None and number.is_integer() else None
    return None if most is None else ceil(most * number)


def _read_scalars(path: Path) -> dict[str, str]:
    """Reads the texts at the top of a YAML or JSON file, JSON as YAML with spaces for tabs."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a ValueError for a NUL in the path
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(f"cannot be read: {reason}", where=str(path)) from error
    if len(data) > _MOST_BYTES:
        raise FormatError(f"has more than {_MOST_BYTES:,} bytes", where=str(path))
    try:
        root = yaml.compose(data.replace(b"\t", b" "), yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ArithmeticError, ValueError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f" at line {line + 1}"
        raise FormatError(
            f"is neither YAML nor JSON{at}",
            where=str(path),
            hint="see whether it is the file that the launcher takes",
        ) from error
    if not isinstance(root, yaml.MappingNode):
        raise FormatError("has no names at its top", where=str(path))
    if any(key.tag == _MERGE for key, _ in root.value):
        raise FormatError(
            "merges settings with '<<' at its top",
            where=str(path),
            hint="write the settings without '<<'",
        )
    return {
        key.value: value.value.strip() if isinstance(value, yaml.ScalarNode) else ""
        for key, value in root.value
        if isinstance(key, yaml.ScalarNode) and value.tag != _NULL
    }
