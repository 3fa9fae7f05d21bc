"""Installed versions with known faults: one table, and where each fault is described."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct

from ckptkit.diagnosis.config_checks import TrainingSetup
from ckptkit.diagnosis.findings import Finding, Severity

_DIGITS = re.compile(r"\d+")
Applies = Callable[[TrainingSetup, Mapping[str, str]], Severity | None]


class KnownFault(Struct, frozen=True):
    """A fault of a package in a range of its versions.

    Attributes:
        package: Its name on PyPI.
        since: The first version with the fault; empty for all before `until`.
        until: The first version without it; the first that was not tried, if it is not mended.
        applies: Returns how bad it is for a job, and None if it does not concern it. It gets what
            the configurations say, and the installed versions.
        found: What happens.
        advice: What to do.
        source: Where it is described, or how it was found.
        is_mended: Whether a later version is without it.
    """

    package: str
    since: str
    until: str
    applies: Applies
    found: str
    advice: str
    source: str
    is_mended: bool = True


def _adapter_under_fsdp1(setup: TrainingSetup, _installed: Mapping[str, str]) -> Severity | None:
    if setup.strategy not in {"", "fsdp1"} or setup.trains_adapter is False:
        return None
    return "error" if setup.strategy and setup.trains_adapter else "warning"


def _gathered_adapter(setup: TrainingSetup, installed: Mapping[str, str]) -> Severity | None:
    is_other = setup.strategy not in {"", "fsdp2"} or setup.state_dict == "SHARDED_STATE_DICT"
    if "peft" not in installed or is_other or setup.trains_adapter is False:
        return None
    return "error" if setup.strategy and setup.trains_adapter else "warning"


def _efficient_loading(setup: TrainingSetup, _installed: Mapping[str, str]) -> Severity | None:
    return "warning" if setup.is_fsdp and setup.efficient_loading else None


def _8_bit_under_fsdp(setup: TrainingSetup, _installed: Mapping[str, str]) -> Severity | None:
    return "error" if setup.is_fsdp and "8bit" in setup.optimizer else None


def _fsdp2(setup: TrainingSetup, _installed: Mapping[str, str]) -> Severity | None:
    return "error" if setup.strategy == "fsdp2" else None


def _zero(setup: TrainingSetup, _installed: Mapping[str, str]) -> Severity | None:
    return "warning" if setup.strategy.startswith("zero") else None


def _round_robin(setup: TrainingSetup, _installed: Mapping[str, str]) -> Severity | None:
    return "warning" if setup.round_robin else None


def _always(_setup: TrainingSetup, _installed: Mapping[str, str]) -> Severity | None:
    return "warning"


KNOWN_FAULTS = (
    KnownFault(
        "peft",
        "0.21",
        "0.22",
        _adapter_under_fsdp1,
        "with FSDP1, the Trainer and TRL save an empty adapter, without an error",
        "train with FSDP2 or PEFT 0.20, or call `install(trainer)` of"
        " ckptkit.integrations.transformers, which saves it",
        "huggingface/peft#3490, tried with 0.20.0 and 0.21.2",
        is_mended=False,
    ),
    KnownFault(
        "accelerate",
        "",
        "1.15",
        _gathered_adapter,
        "with FSDP2 and FULL_STATE_DICT, only rank 0's part of an adapter is saved",
        "upgrade accelerate to 1.15, or set SHARDED_STATE_DICT",
        "huggingface/accelerate#4206",
    ),
    KnownFault(
        "transformers",
        "5.0",
        "5.23",
        _efficient_loading,
        "with cpu_ram_efficient_loading, every rank allocates the whole model in host memory",
        "upgrade transformers to 5.23, or load in `defer_weights()` of"
        " ckptkit.integrations.transformers",
        "huggingface/transformers#43749",
    ),
    KnownFault(
        "bitsandbytes",
        "",
        "0.49.2",
        _8_bit_under_fsdp,
        "under FSDP, the state of 8-bit optimizers cannot be gathered, and saves of accelerate"
        " fail",
        "upgrade bitsandbytes to 0.49.2, or save with `install(accelerator)` or `install(trainer)`",
        "bitsandbytes-foundation/bitsandbytes#89, #1840",
    ),
    KnownFault(
        "torch",
        "",
        "2.6",
        _fsdp2,
        "accelerate uses FSDP2 with torch 2.6 and later only",
        "upgrade torch, or set fsdp_version to 1",
        "accelerate 1.15, FSDP2_PYTORCH_VERSION",
    ),
    KnownFault(
        "deepspeed",
        "",
        "0.20",
        _zero,
        "zero_to_fp32.py loses frozen parameters of ZeRO-1, and before 0.19.8 makes floats of"
        " integer buffers",
        "make the model with `ckptkit consolidate RUN OUT` instead",
        "tried with 0.14.4 to 0.19.8",
        is_mended=False,
    ),
    KnownFault(
        "deepspeed",
        "",
        "0.19",
        _round_robin,
        "with round_robin_gradients, zero_to_fp32.py mixes up parameters, without an error",
        "make the model with `ckptkit consolidate RUN OUT` instead, or upgrade DeepSpeed to 0.19",
        "tried with 0.14.4 to 0.19.8",
    ),
    KnownFault(
        "fairscale",
        "",
        "0.4.14",
        _always,
        "consolidate_shard_weights loses the shared parameters of all units but the last, and"
        " raises KeyError for buffers that are not saved",
        "make the model with `ckptkit consolidate RUN OUT` instead",
        "tried with 0.4.13",
        is_mended=False,
    ),
    KnownFault(
        "torchsnapshot",
        "",
        "0.1.1",
        _always,
        "the last value of a bfloat16 tensor with an odd number of elements is lost",
        "use a nightly release, or pad such tensors",
        "tried with 0.1.0; nightly 2024.7.26 is without it",
        is_mended=False,
    ),
    KnownFault(
        "torch",
        "",
        "2.1",
        _always,
        "ckptkit.training needs torch 2.1 or later",
        "upgrade torch",
        "pyproject.toml of ckptkit",
    ),
)
LOOKED_UP = (
    *("accelerate", "bitsandbytes", "deepspeed", "fairscale", "lightning", "peft", "torch"),
    *("torchao", "torchsnapshot", "transformers", "trl"),
)


def installed_versions(packages: tuple[str, ...] = LOOKED_UP) -> dict[str, str]:
    """Returns the versions of packages that are installed here; none of them is imported."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def judge_versions(installed: Mapping[str, str], setup: TrainingSetup) -> list[Finding]:
    """Judges installed versions for a job; without a configuration, for any job."""
    findings, faulty = [], set()
    for fault in KNOWN_FAULTS:
        text = installed.get(fault.package, "")
        if not text or not _numbers(fault.since) <= _numbers(text) < _numbers(fault.until):
            continue
        severity = fault.applies(setup, installed)
        if severity is None:
            continue
        faulty.add(fault.package)
        findings.append(
            Finding(
                "known-fault",
                severity,
                f"{fault.package} {text}",
                fault.found,
                _expected(fault),
                fault.advice,
                fault.source,
            )
        )
    sound = [f"{name} {text}" for name, text in installed.items() if name not in faulty]
    if sound:
        text = f"no known fault that concerns this job: {', '.join(sound)}"
        findings.append(Finding("versions", "ok", "installed packages", text))
    return findings


def _expected(fault: KnownFault) -> str:
    others = [f"{fault.until} or later"] if fault.is_mended else []
    others += [f"before {fault.since}"] if fault.since else []
    return f"{fault.package} {' or '.join(others)}" if others else "another way"


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a release; what follows them, such as `+cpu` or `rc1`, is left out.

    >>> _numbers("2.13.0+cpu"), _numbers("0.22.0.dev0"), _numbers("")
    ((2, 13), (0, 22), ())
    """
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = _DIGITS.match(part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
