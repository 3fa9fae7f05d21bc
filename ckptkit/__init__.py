"""ckptkit: sharded checkpoints in, models that load out, with proof of every byte."""

from __future__ import annotations

from ckptkit.version import __version__

TYPE_CHECKING = False  # typing.TYPE_CHECKING would import typing
if TYPE_CHECKING:
    from ckptkit.adapter_api import adapter_from_diff, extract_adapter, merge_adapter
    from ckptkit.api import (
        average,
        consolidate,
        convert,
        diff,
        inspect,
        list_run,
        open,  # noqa: A004
        prune,
        stats,
        verify,
    )
    from ckptkit.delta_api import apply_delta, create_delta, inspect_delta
    from ckptkit.serve_api import serve

__all__ = [
    "__version__",
    "adapter_from_diff",
    "apply_delta",
    "average",
    "consolidate",
    "convert",
    "create_delta",
    "diff",
    "extract_adapter",
    "inspect",
    "inspect_delta",
    "list_run",
    "merge_adapter",
    "open",
    "prune",
    "serve",
    "stats",
    "verify",
]

# A function's module is imported when the function is first used: the writer's process and the
# command line import `ckptkit` at their start and use none of them.
_MODULES = {
    **dict.fromkeys(("adapter_from_diff", "extract_adapter", "merge_adapter"), "adapter_api"),
    **dict.fromkeys(("apply_delta", "create_delta", "inspect_delta"), "delta_api"),
    "serve": "serve_api",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = f"ckptkit.{_MODULES.get(name, 'api')}"
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
