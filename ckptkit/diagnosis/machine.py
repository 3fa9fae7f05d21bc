"""This machine: memory for staging, `/dev/shm`, limits, and versions with known faults."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from ckptkit.core.text import size_text
from ckptkit.diagnosis.findings import Finding, SaveDemand, Severity, judged
from ckptkit.storage.local.control_groups import available_bytes, memory_bytes, tasks_left

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it
_DEVICES = Path("/dev")
_LEAST_SHARED_BYTES = 1 << 30
_LEAST_OPEN_FILES = 8192
_WELL_OPEN_FILES = 65_536
_DIGITS = re.compile(r"\d+")
_LEAST_TASKS = 4096
_SPARE_SHARE = 1.1  # of memory, beside the copy of the state


class MachineFacts(Struct, frozen=True):
    """What is known of this machine and its process; None where it is not, or without a limit."""

    memory_bytes: int | None = None  # of the machine, or of the control group of this process
    available_bytes: int | None = None
    shared_bytes: int | None = None  # the size of /dev/shm
    free_shared_bytes: int | None = None
    gives_unnamed_memory: bool = True  # `memfd_create` works, which no size of a mount limits
    open_files: int | None = None
    most_open_files: int | None = None  # to which this user may raise it
    locked_bytes: int | None = None
    tasks: int | None = None
    file_bytes: int | None = None
    tasks_left: int | None = None  # that the control groups leave
    accelerators: int = 0  # devices of NVIDIA or AMD


def gather_machine() -> MachineFacts:
    """Looks at this machine, and at the limits of this process."""
    shared = free_shared = None
    with suppress(OSError, AttributeError):  # there is no statvfs on Windows
        status = os.statvfs(_SHARED_MEMORY)
        shared, free_shared = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    open_files, most_open_files = _limit("RLIMIT_NOFILE")
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return MachineFacts(
        memory_bytes=memory_bytes(),
        available_bytes=available_bytes(),
        shared_bytes=shared,
        free_shared_bytes=free_shared,
        gives_unnamed_memory=_gives_unnamed_memory(),
        open_files=open_files,
        most_open_files=most_open_files,
        locked_bytes=_limit("RLIMIT_MEMLOCK")[0],
        tasks=None if is_root else _limit("RLIMIT_NPROC")[0],  # which does not bind root
        file_bytes=_limit("RLIMIT_FSIZE")[0],
        tasks_left=tasks_left(),
        accelerators=_count_accelerators(),
    )


def _limit(name: str) -> tuple[int | None, int | None]:
    """Returns the soft and the hard limit of this process."""
    try:
        import resource  # not there on Windows

        soft, hard = resource.getrlimit(getattr(resource, name))
    except (ImportError, AttributeError, OSError):
        return None, None
    unlimited = resource.RLIM_INFINITY
    return None if soft == unlimited else soft, None if hard == unlimited else hard


def _gives_unnamed_memory() -> bool:
    try:
        os.close(os.memfd_create("ckptkit-doctor", os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        return False
    return True


def _count_accelerators() -> int:
    with suppress(OSError):
        names = [path.name for path in _DEVICES.iterdir()]
        nvidia = sum(name.removeprefix("nvidia").isdecimal() for name in names)
        return nvidia or int("kfd" in names)
    return 0


def judge_machine(facts: MachineFacts, demand: SaveDemand) -> list[Finding]:
    return [*_memory(facts, demand), *_shared_memory(facts, demand), *_limits(facts, demand)]


def _memory(facts: MachineFacts, demand: SaveDemand) -> Iterator[Finding]:
    """Compares memory with the copies that saves take before they write."""
    if facts.available_bytes is None:
        return
    found = f"{size_text(facts.available_bytes)} available"
    if facts.memory_bytes is not None:
        found += f" of {size_text(facts.memory_bytes)}"
    need, expected = demand.node_bytes, ""
    severity: Severity = "ok"
    if need is not None:
        expected = f"{size_text(need)} for the copy of this node's part of"
        expected += f" {size_text(demand.step_bytes or 0)} ({demand.basis})"
        if need * _SPARE_SHARE > facts.available_bytes:
            severity = "error" if need > facts.available_bytes else "warning"
    if severity == "ok":
        found, expected = ", ".join(filter(None, (found, expected))), ""
    yield judged(
        "memory",
        severity,
        "memory of this node",
        found,
        f"{expected}, in addition to what training takes",
        'set staging_limit="4GB" or so in the Checkpointer, which stages in waves; pass --nodes if'
        " there are several; raise the memory of the container or job",
    )


def _shared_memory(facts: MachineFacts, demand: SaveDemand) -> Iterator[Finding]:
    least = f"at least {size_text(_LEAST_SHARED_BYTES)}"
    where, need = str(_SHARED_MEMORY), demand.node_bytes or 0
    if facts.shared_bytes is None or facts.free_shared_bytes is None:
        if sys.platform == "linux":
            advice = "mount a tmpfs there: DataLoader workers and NCCL fail without it"
            yield Finding("shared-memory", "warning", where, "is not there", least, advice)
        return
    found = f"{size_text(facts.shared_bytes)}, {size_text(facts.free_shared_bytes)} free"
    if facts.shared_bytes < _LEAST_SHARED_BYTES:
        advice = "DataLoader workers and NCCL end with a bus error where it is full: start the"
        advice += " container with `--ipc=host` or `--shm-size=16g`; on Kubernetes mount an"
        advice += " emptyDir with `medium: Memory`"
        yield Finding("shared-memory", "warning", where, found, least, advice)
    elif not facts.gives_unnamed_memory and need > facts.free_shared_bytes:
        expected = f"{size_text(need)}, since memfd_create is refused"
        advice = "saves are staged in a file below TMPDIR, slower: enlarge /dev/shm"
        yield Finding("shared-memory", "warning", where, found, expected, advice)
    else:
        yield Finding("shared-memory", "ok", where, found)


def _limits(facts: MachineFacts, demand: SaveDemand) -> Iterator[Finding]:
    files = facts.open_files
    most = min(facts.most_open_files or _WELL_OPEN_FILES, _WELL_OPEN_FILES)
    yield judged(
        "open-files",
        "ok" if files is None or files >= _LEAST_OPEN_FILES else "warning",
        "ulimit -n",
        "no limit" if files is None else f"{files:,} open files",
        f"{_LEAST_OPEN_FILES:,}: DataLoader workers pass descriptors for each tensor",
        f"run `ulimit -n {most}` before the launch"
        if most >= _LEAST_OPEN_FILES
        else "raise it in /etc/security/limits.conf, or with `docker run --ulimit nofile=65536`",
    )
    tasks = {"ulimit -u": facts.tasks, "pids.max of the control group": facts.tasks_left}
    for where, count in tasks.items():
        if count is not None:
            yield judged(
                "tasks",
                "ok" if count >= _LEAST_TASKS else "warning",
                where,
                f"{count:,} processes and threads",
                f"{_LEAST_TASKS:,}: each rank has threads of torch and NCCL, and DataLoader"
                " workers",
                "raise it: `ulimit -u`, `docker run --pids-limit`, podPidsLimit of Kubernetes",
            )
    # Pinned memory and RDMA lock pages; without a device nothing does.
    locked, need = facts.locked_bytes, demand.node_bytes
    found = "no limit" if locked is None else f"{size_text(locked)} of locked memory"
    if locked is not None and not facts.accelerators:
        found += ", and no GPU that would need it"
    is_enough = locked is None or (need is not None and need <= locked)
    yield judged(
        "locked-memory",
        "ok" if is_enough or not facts.accelerators else "warning",
        "ulimit -l",
        found,
        "no limit" if need is None else f"{size_text(need)} for staging, or no limit",
        "run `ulimit -l unlimited` before the launch, or `docker run --ulimit memlock=-1`: RDMA"
        " fails otherwise, and copies from a device may be slower",
    )
    if facts.file_bytes is not None:
        size = demand.step_bytes
        size = None if size is None else -(-size // max(demand.ranks, 1))
        yield Finding(
            "file-size",
            "warning" if size is None or size <= facts.file_bytes else "error",
            "ulimit -f",
            f"files of at most {size_text(facts.file_bytes)}",
            "no limit" if size is None else f"{size_text(size)}, which one rank writes",
            "run `ulimit -f unlimited` before the launch",
        )


class KnownFault(Struct, frozen=True):
    """A fault of a package in a range of its versions."""

    package: str  # its name on PyPI
    since: str  # the first version with the fault; empty for all before `until`
    until: str  # the first without it; the first that was not tried, if it is not mended
    found: str
    advice: str
    source: str  # where it is described, or how it was found
    is_mended: bool = True  # whether a later version is without it
    requires: str = ""  # the fault matters only where this package is installed too


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
        requires="peft",
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
        "0.51",
        "under FSDP1, the state of 8-bit optimizers cannot be gathered, and saves of accelerate"
        " fail, or are refused when they are loaded",
        "save with `install(accelerator)` or `install(trainer)`",
        "bitsandbytes-foundation/bitsandbytes#89, #1840, tried with 0.50.2",
        is_mended=False,
    ),
    KnownFault(
        "bitsandbytes",
        "0.49",
        "0.51",
        "after an evaluation on a CPU with AVX512-BF16, 4-bit weights are saved and merged with"
        " wrong numbers, and adapters on them get no gradient",
        "save, merge and train in a process that evaluated nothing on the CPU",
        "tried with 0.50.2; the saved numbers with 0.49.2, too",
        is_mended=False,
    ),
    KnownFault(
        "torch",
        "",
        "2.6",
        "accelerate uses FSDP2 with torch 2.6 and later only",
        "upgrade torch, or set fsdp_version to 1",
        "accelerate 1.15, FSDP2_PYTORCH_VERSION",
        requires="accelerate",
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
        "2.14",
        "with flatten_optimizer_state_dict, a schedule-free optimizer is loaded without its state",
        "resume with Checkpointer, or save the nested state dict",
        "tried with torch 2.13.0 and schedulefree 1.4.1",
        is_mended=False,
        requires="schedulefree",
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
    *("accelerate", "bitsandbytes", "deepspeed", "fairscale", "lightning", "peft"),
    *("schedulefree", "torch", "torchao", "torchsnapshot", "transformers", "trl"),
)


def installed_versions() -> dict[str, str]:
    """Returns the versions of packages that are installed here; none of them is imported."""
    found = {}
    for package in LOOKED_UP:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def judge_versions(installed: Mapping[str, str]) -> list[Finding]:
    findings, faulty = [], set()
    for fault in KNOWN_FAULTS:
        text = installed.get(fault.package, "")
        if not text or (fault.requires and fault.requires not in installed):
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
