"""ckptkit: sharded checkpoints in, models that load out, with proof of every byte."""

from __future__ import annotations

from ckptkit.version import __version__

TYPE_CHECKING = False  # typing.TYPE_CHECKING would import typing
if TYPE_CHECKING:
    from ckptkit.adapter_api import (
        AdapterOptions,
        DiffOptions,
        MergeOptions,
        adapter_from_diff,
        extract_adapter,
        merge_adapter,
    )
    from ckptkit.api import (
        AverageOptions,
        Options,
        StatsOptions,
        Tolerances,
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
    from ckptkit.core.errors import (
        AccessError,
        AdapterError,
        AmbiguousSourceError,
        ArgumentError,
        CannotPlanError,
        ChecksumError,
        CkptkitError,
        EngineError,
        FormatError,
        HubError,
        HubUnavailableError,
        IncompleteCheckpointError,
        InputError,
        LimitError,
        LoadError,
        MissingFileError,
        MissingLibraryError,
        NoSpaceError,
        NotACheckpointError,
        NotFiniteError,
        OutputBusyError,
        OutputError,
        OutputExistsError,
        OverflowRefusedError,
        PartlyFilledError,
        PeerError,
        RefusedError,
        ResumeError,
        SaveError,
        SourceChangedError,
        StorageError,
        TruncatedFileError,
        UnsafePathError,
        UnsafePickleError,
        UnsupportedError,
        UsageError,
        VerificationError,
        WriterError,
    )
    from ckptkit.delta_api import (
        ApplicationOptions,
        CreationOptions,
        apply_delta,
        create_delta,
        inspect_delta,
    )
    from ckptkit.doctor_api import DoctorOptions, doctor
    from ckptkit.report_api import write_report
    from ckptkit.serve_api import ServeOptions, serve

__all__ = [
    "AccessError",
    "AdapterError",
    "AdapterOptions",
    "AmbiguousSourceError",
    "ApplicationOptions",
    "ArgumentError",
    "AverageOptions",
    "CannotPlanError",
    "ChecksumError",
    "CkptkitError",
    "CreationOptions",
    "DiffOptions",
    "DoctorOptions",
    "EngineError",
    "FormatError",
    "HubError",
    "HubUnavailableError",
    "IncompleteCheckpointError",
    "InputError",
    "LimitError",
    "LoadError",
    "MergeOptions",
    "MissingFileError",
    "MissingLibraryError",
    "NoSpaceError",
    "NotACheckpointError",
    "NotFiniteError",
    "Options",
    "OutputBusyError",
    "OutputError",
    "OutputExistsError",
    "OverflowRefusedError",
    "PartlyFilledError",
    "PeerError",
    "RefusedError",
    "ResumeError",
    "SaveError",
    "ServeOptions",
    "SourceChangedError",
    "StatsOptions",
    "StorageError",
    "Tolerances",
    "TruncatedFileError",
    "UnsafePathError",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "WriterError",
    "__version__",
    "adapter_from_diff",
    "apply_delta",
    "average",
    "consolidate",
    "convert",
    "create_delta",
    "diff",
    "doctor",
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
    "write_report",
]

# A name's module is imported when the name is first used: the writer's process and the command
# line import `ckptkit` at their start and use none of them.
_MODULES = {
    "adapter_api": (
        *("AdapterOptions", "DiffOptions", "MergeOptions"),
        *("adapter_from_diff", "extract_adapter", "merge_adapter"),
    ),
    "delta_api": (
        *("ApplicationOptions", "CreationOptions"),
        *("apply_delta", "create_delta", "inspect_delta"),
    ),
    "doctor_api": ("DoctorOptions", "doctor"),
    "report_api": ("write_report",),
    "serve_api": ("ServeOptions", "serve"),
}
_PACKAGES = ("hub", "integrations", "readers", "training")


def __getattr__(name: str) -> object:
    if name not in __all__ and name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"ckptkit.{name}")
    module = next((module for module, names in _MODULES.items() if name in names), "api")
    module = "core.errors" if name.endswith("Error") else module
    value = getattr(import_module(f"ckptkit.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
