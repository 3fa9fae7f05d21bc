"""`ckptkit --version --verbose`: what a bug report needs, and nothing that identifies the user."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ckptkit.core.text import size_text
from ckptkit.storage.local.control_groups import available_bytes, core_quota, memory_bytes
from ckptkit.storage.place_identity import find_filesystem_type
from ckptkit.version import __version__
from ckptkit_cli._output import Output

_USED = (
    *("numpy", "ml_dtypes", "safetensors", "huggingface_hub", "hf_xet", "fsspec", "isal", "xxhash"),
    *("zstandard", "regex", "PyYAML", "typer", "blake3", "s3fs", "botocore", "gcsfs", "adlfs"),
    *("aiohttp", "ray"),
)
_BESIDE = (
    *("torch", "transformers", "accelerate", "peft", "trl", "lightning", "deepspeed"),
    *("bitsandbytes", "torchao", "megatron-core"),
)


def show_environment(*, as_json: bool) -> None:
    """Prints the versions, the machine and the limits of this process."""
    output = Output(as_json=as_json)
    facts = describe_environment()
    output.document(facts)
    output.lines(_page(facts))


def describe_environment() -> dict[str, Any]:
    """Returns what matters in a bug report, as plain values; nothing is imported for it."""
    kind = ""
    with suppress(OSError):  # the directory may be gone
        kind = find_filesystem_type(Path.cwd())
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "ckptkit": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "virtual_environment": sys.prefix != sys.base_prefix,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "packages": _versions(_USED),
        "frameworks": _versions(_BESIDE),
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity is not None else os.cpu_count(),
        "core_quota": core_quota(),
        "memory_bytes": memory_bytes(),
        "available_bytes": available_bytes(),
        "file_system": kind,
        "file_system_encoding": sys.getfilesystemencoding(),
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _page(facts: Mapping[str, Any]) -> Iterator[str]:
    inside = ", in a virtual environment" if facts["virtual_environment"] else ""
    quota = "" if facts["core_quota"] is None else f", {facts['core_quota']:g} by quota"
    sizes = [facts["available_bytes"], facts["memory_bytes"]]
    texts = ["unknown" if size is None else size_text(size) for size in sizes]
    rows = {
        "python": f"{facts['implementation']} {facts['python']}{inside}",
        "platform": f"{facts['platform']}, {facts['machine']}, {facts['libc']}".rstrip(", "),
        "cores": f"{facts['usable_cores']} of {facts['cores']}{quota}",
        "memory": f"{texts[0]} available of {texts[1]}",
        "directory": facts["file_system"] or "on an unknown file system",
        "packages": _listed(facts["packages"]),
        "frameworks": _listed(facts["frameworks"]),
    }
    yield f"ckptkit {facts['ckptkit']}"
    yield from (f"  {name:<10}  {text}" for name, text in rows.items())


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items()) or "none"
