"""What users and programs rely on stays: commands, options, statuses, JSON fields, Python names.

`public_surface.json` holds it as it is. A line that is added is a feature; one that is
changed or removed breaks scripts. After a feature: `python -m tests.contract.test_public_surface`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import ckptkit.training
from ckptkit.core.errors import CkptkitError
from ckptkit_cli._program import all_commands, make_application
from ckptkit_cli.main import main
from tests.this_checkout import refuse_others

ROOT = Path(__file__).resolve().parents[2]
PINNED = Path(__file__).with_name("public_surface.json")
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
ADAPTER = ROOT / "fixtures" / "peft_fsdp2" / "checkpoint"
MODULES = (
    *("ckptkit", "ckptkit.hub", "ckptkit.readers", "ckptkit.training", "ckptkit.training.dcp"),
    *("ckptkit.integrations.accelerate", "ckptkit.integrations.scalars"),
    "ckptkit.integrations.transformers",
)
ALPHA = ("--lora-alpha", "16", "--no-use-rslora")
# Of modules without an `__all__`, what the documentation names.
PUBLIC = {
    "ckptkit.integrations.accelerate": ("install", "save_state", "load_state", "save_model"),
    "ckptkit.integrations.scalars": ("scalars",),
    "ckptkit.integrations.transformers": ("defer_weights", "install"),
}
METHODS: Mapping[Any, tuple[str, ...]] = {
    ckptkit.training.Checkpointer: (
        *("__init__", "close", "export", "prepare", "request_save", "resume", "save"),
        "should_save",
    ),
    ckptkit.training.SaveHandle: (
        *("done", "exception", "local_result", "pushed", "report", "result", "wait"),
        "wait_staged",
    ),
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def commands() -> dict[str, list[str]]:
    """Returns the parameters of all commands, by their words."""
    return {
        " ".join(words): sorted(map(_parameter, command.params))
        for words, command in all_commands(make_application()).items()
    }


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"argument {parameter.name}{'' if parameter.required else ' (optional)'}"
    many = " (repeated)" if parameter.multiple else ""
    flag = " (flag)" if parameter.is_flag else ""
    return f"option {' / '.join([*parameter.opts, *parameter.secondary_opts])}{flag}{many}"


def errors() -> dict[str, int]:
    return {kind.code: kind.exit_status for kind in _kinds(CkptkitError)}


def _kinds(kind: type[CkptkitError]) -> Iterator[type[CkptkitError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__.startswith("ckptkit"):
            yield from _kinds(below)


def functions() -> dict[str, list[str]]:
    """Returns the parameters of all public functions and methods; types are for mypy to check."""
    return {
        name: [
            text
            for one in inspect.signature(inspect.unwrap(function)).parameters.values()
            for text in _options(one, function)
        ]
        for name, function in _functions()
    }


def _options(one: inspect.Parameter, function: Any) -> Iterator[str]:
    """Yields a parameter; those of a TypedDict one by one."""
    if one.kind is not one.VAR_KEYWORD:
        yield f"{one.kind.description} {one.name}"
        return
    module = sys.modules[inspect.unwrap(function).__module__]
    named = re.fullmatch(r"Unpack\[(\w+)\]", str(one.annotation))
    assert named is not None
    yield from (f"option {name}" for name in sorted(getattr(module, named[1]).__annotations__))


def _functions() -> Iterator[tuple[str, Any]]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in PUBLIC.get(module_name) or module.__all__:
            value = getattr(module, name)
            if isinstance(value, FunctionType):
                yield f"{module_name}.{name}", value
    for kind, names in METHODS.items():
        for name in names:
            yield f"ckptkit.training.{kind.__name__}.{name}", getattr(kind, name)


def documents() -> dict[str, list[str]]:
    """Returns the fields of what commands write with `--json`; names of tensors become `*`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        lines: dict[str, list[str | Path]] = {
            "inspect": ["inspect", LLAMA],
            "inspect of an adapter": ["inspect", ADAPTER],
            "consolidate --dry-run": ["consolidate", LLAMA, out / "a", "--dry-run"],
            "consolidate": ["consolidate", LLAMA, out / "model"],
            "consolidate again": ["consolidate", LLAMA, out / "model"],
            "convert": ["convert", LLAMA, out / "dcp", "--to", "dcp"],
            "verify": ["verify", out / "model"],
            "verify of a source": ["verify", LLAMA],
            "diff": ["diff", out / "model", out / "model"],
            "diff of others": ["diff", out / "model", ADAPTER],
            "diff --numeric": ["diff", out / "model", out / "model", "--numeric"],
            "stats": ["stats", out / "model"],
            "ls": ["ls", out / "run"],
            "seal": ["seal", out / "run"],
            "adapter extract": ["adapter", "extract", ADAPTER, out / "adapter", *ALPHA],
        }
        shutil.copytree(LLAMA, out / "run" / "checkpoint-4")
        return {name: _fields_of(_document(line)) for name, line in lines.items()}


def _fields_of(document: Any) -> list[str]:
    """Returns the paths of all fields, leaving out where a document has none of them."""
    return sorted(set(_fields(document, "")))


def _document(line: list[str | Path]) -> Any:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*map(str, line), "--json"])
    return json.loads(printed.getvalue())


def _fields(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _fields(below, f"{path}.{key if _NAME.fullmatch(key) else '*'}")
    elif isinstance(value, list) and value:
        for below in value:
            yield from _fields(below, f"{path}[]")
    else:
        yield path or "."


def surface() -> dict[str, Any]:
    return {
        "commands": commands(),
        "errors": errors(),
        "functions": functions(),
        "documents": documents(),
    }


@pytest.mark.parametrize("part", ["commands", "errors", "functions", "documents"])
def test_what_users_rely_on_is_as_it_was(part: str) -> None:
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))[part]
    assert {"commands": commands, "errors": errors, "functions": functions, "documents": documents}[
        part
    ]() == pinned


def write() -> None:
    """Writes the file again. What the commands print meanwhile, such as an error, is not shown."""
    before = PINNED.read_text(encoding="utf-8")
    with tempfile.TemporaryFile() as rest:
        stderr = os.dup(2)
        os.dup2(rest.fileno(), 2)
        try:
            now = json.dumps(surface(), indent=1, sort_keys=True) + "\n"
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    PINNED.write_text(now, encoding="utf-8")
    changed = "it is as it was" if now == before else "`git diff` shows what changed"
    sys.stdout.write(f"wrote {PINNED.relative_to(ROOT)}: {changed}\n")


if __name__ == "__main__":
    refuse_others()
    write()
