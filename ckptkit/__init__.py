"""ckptkit: sharded checkpoints in, models that load out, with proof of every byte."""

from __future__ import annotations

from ckptkit.version import __version__

TYPE_CHECKING = False  # typing.TYPE_CHECKING would import typing
if TYPE_CHECKING:
    from ckptkit.api import (
        AdapterOptions,
        ApplicationOptions,
        AverageOptions,
        CreationOptions,
        DiffOptions,
        DoctorOptions,
        MergeOptions,
        Options,
        ServeOptions,
        StatsOptions,
        Tolerances,
        adapter_from_diff,
        apply_delta,
        average,
        consolidate,
        convert,
        convert_adapter,
        create_delta,
        diff,
        doctor,
        extract_adapter,
        inspect,
        inspect_delta,
        list_run,
        merge_adapter,
        open,  # noqa: A004
        prune,
        seal,
        serve,
        stats,
        verify,
        write_report,
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
    "convert_adapter",
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
    "seal",
    "serve",
    "stats",
    "verify",
    "write_report",
]

# A name's module is imported when the name is first used: the writer's process and the command
# line import `ckptkit` at their start and use none of them.
_PACKAGES = ("hub", "integrations", "readers", "training")


def __getattr__(name: str) -> object:
    if name not in __all__ and name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"ckptkit.{name}")
    module = "ckptkit.core.errors" if name.endswith("Error") else "ckptkit.api"
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
