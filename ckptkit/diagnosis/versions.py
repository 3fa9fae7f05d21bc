"""Installed versions with known faults: one table, and where each fault is described."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct

from ckptkit.diagnosis.findings import Finding

_DIGITS = re.compile(r"\d+")


class KnownFault(Struct, frozen=True):
    """A fault of a package in a range of its versions."""

    package: str  # its name on PyPI
    since: str  # the first version with the fault; empty for all before `until`
    until: str  # the first without it; the first that was not tried, if it is not mended
    found: str
    advice: str
    source: str  # where it is described, or how it was found
    is_mended: bool = True  # whether a later version is without it
    beside: str = ""  # a package without which the fault concerns nobody


KNOWN_FAULTS = (
    KnownFault(
        "peft",
        "0.21",
        "0.22",
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
        "with FSDP2 and FULL_STATE_DICT, only rank 0's part of an adapter is saved",
        "upgrade accelerate to 1.15, or set SHARDED_STATE_DICT",
        "huggingface/accelerate#4206",
        beside="peft",
    ),
    KnownFault(
        "transformers",
        "5.0",
        "5.23",
        "with cpu_ram_efficient_loading, every rank allocates the whole model in host memory",
        "upgrade transformers to 5.23, or load in `defer_weights()` of"
        " ckptkit.integrations.transformers",
        "huggingface/transformers#43749",
    ),
    KnownFault(
        "bitsandbytes",
        "",
        "0.49.2",
        "under FSDP, the state of 8-bit optimizers cannot be gathered, and saves of accelerate"
        " fail",
        "upgrade bitsandbytes to 0.49.2, or save with `install(accelerator)` or `install(trainer)`",
        "bitsandbytes-foundation/bitsandbytes#89, #1840",
    ),
    KnownFault(
        "torch",
        "",
        "2.6",
        "accelerate uses FSDP2 with torch 2.6 and later only",
        "upgrade torch, or set fsdp_version to 1",
        "accelerate 1.15, FSDP2_PYTORCH_VERSION",
        beside="accelerate",
    ),
    KnownFault(
        "deepspeed",
        "",
        "0.20",
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
        "with round_robin_gradients, zero_to_fp32.py mixes up parameters, without an error",
        "make the model with `ckptkit consolidate RUN OUT` instead, or upgrade DeepSpeed to 0.19",
        "tried with 0.14.4 to 0.19.8",
    ),
    KnownFault(
        "fairscale",
        "",
        "0.4.14",
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
        "the last value of a bfloat16 tensor with an odd number of elements is lost",
        "use a nightly release, or pad such tensors",
        "tried with 0.1.0; nightly 2024.7.26 is without it",
        is_mended=False,
    ),
    KnownFault(
        "torch",
        "",
        "2.1",
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


def judge_versions(installed: Mapping[str, str]) -> list[Finding]:
    findings, faulty = [], set()
    for fault in KNOWN_FAULTS:
        text = installed.get(fault.package, "")
        if not text or (fault.beside and fault.beside not in installed):
            continue
        if not _numbers(fault.since) <= _numbers(text) < _numbers(fault.until):
            continue
        faulty.add(fault.package)
        findings.append(
            Finding(
                "known-fault",
                "warning",
                f"{fault.package} {text}",
                fault.found,
                _expected(fault),
                fault.advice,
                fault.source,
            )
        )
    sound = [f"{name} {text}" for name, text in installed.items() if name not in faulty]
    if sound:
        text = f"no known fault: {', '.join(sound)}"
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
