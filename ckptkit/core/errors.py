"""The exception tree: one class per kind of failure, each with a stable code and an exit status.

Codes are part of the contract: they are only ever added to. The text of an error says where,
what was found against what was expected, and, as a hint, what to do next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from ckptkit.core.text import without_url_secrets


class CkptkitError(Exception):
    """The base of every error that ckptkit raises on purpose.

    Attributes:
        code: Stable, kebab-case name of the kind of failure.
        exit_status: What the command line exits with.
        where: The file, tensor or option concerned, as the user knows it; may be empty.
        message: What was found against what was expected, one sentence without a full stop.
        hint: What to do next; may be empty.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 3
    usual_hint: ClassVar[str] = ""
    """What to do next, unless the error has its own hint."""

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        message, where, hint = map(without_url_secrets, (message, where, hint))
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.where = where
        self.hint = hint or self.usual_hint
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # for tracebacks, where users meet it in training

    def located(self, where: str) -> CkptkitError:
        """Returns the same error with `where` put in front of what is known already."""
        inner = f"{where}: {self.where}" if self.where else where
        return type(self)(self.message, where=inner, hint=self.hint)

    def hinted(self, hint: str) -> Self:
        """Returns the same error with another hint, where the usual one names options in vain."""
        return type(self)(self.message, where=self.where, hint=hint)

    def to_json(self) -> dict[str, Any]:
        """Returns the error as plain values, from which `error_from_json` makes it again."""
        return {
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "hint": self.hint,
        }


def error_from_json(document: Mapping[str, Any]) -> CkptkitError:
    """Returns the error that another process turned into plain values."""
    kinds: dict[str, type[CkptkitError]] = {}
    for kind in _kinds(CkptkitError):  # one without a code of its own comes after its parent
        kinds.setdefault(kind.code, kind)
    kind = kinds.get(document["code"], CkptkitError)
    return kind(document["message"], where=document["where"], hint=document["hint"])


def _kinds(kind: type[CkptkitError]) -> Iterator[type[CkptkitError]]:
    yield kind
    for further in kind.__subclasses__():
        yield from _kinds(further)


class UsageError(CkptkitError, ValueError):
    """An option or argument does not have the form that it needs."""

    code = "bad-option"
    exit_status = 2


class ArgumentError(UsageError, TypeError):
    """A function was given an option that it does not have, or a value of another kind."""

    code = "bad-argument"


class InputError(CkptkitError):
    """The input is unreadable, damaged or incomplete."""

    code = "unreadable-input"


class NotACheckpointError(InputError):
    """No known checkpoint is at or under the path."""

    code = "not-a-checkpoint"


class FormatError(InputError, ValueError):
    """Bytes do not follow the format that they claim."""

    code = "bad-format"
    usual_hint = "the file is damaged, or not what its name says; take another copy of it"


class TruncatedFileError(FormatError):
    """A file ends before what its header or index promises."""

    code = "truncated-file"
    usual_hint = "the copy was cut short; compare its size with the origin's"


class MissingFileError(InputError):
    """A file that the checkpoint names is not there."""

    code = "missing-file"
    usual_hint = "copy the file back, or take an earlier checkpoint"


class IncompleteCheckpointError(InputError):
    """Some elements of a tensor are in no file, or in two."""

    code = "incomplete-checkpoint"


class ChecksumError(InputError):
    """Bytes do not have the checksum that was stored for them."""

    code = "checksum-mismatch"
    usual_hint = "the file was damaged after it was written; take another copy of it"


class UnsafePickleError(InputError):
    """A pickle names what does harm where it is executed, or has a model that needs code."""

    code = "unsafe-pickle"
    usual_hint = "ckptkit runs no code from a checkpoint; do not load the file elsewhere either"


class UnsafePathError(InputError):
    """A file name inside a checkpoint leads out of it."""

    code = "unsafe-path"
    usual_hint = "the checkpoint is damaged, or was tampered with; take another copy of it"


class SourceChangedError(InputError):
    """A source file changed while it was being read."""

    code = "source-changed"


class AccessError(InputError):
    """A storage does not let us in: credentials are missing, wrong or expired."""

    code = "access-denied"
    usual_hint = (
        "see whether the credentials that the options and the environment give are right, have not"
        " expired, and allow it"
    )


class StorageError(InputError):
    """A storage gave no usable answer, however often it was asked."""

    code = "storage-failed"
    usual_hint = "see whether the storage is reachable and healthy, then run again"


class LimitError(InputError):
    """The input asks for more than any real checkpoint of its size would."""

    code = "too-large"
    usual_hint = "the file is damaged, or made to exhaust memory; take another copy of it"


class UnsupportedError(InputError):
    """The input is understood but not modelled, so it is refused by name."""

    code = "unsupported"
    usual_hint = "save it again in a form that is modelled, or leave the tensor out with --exclude"


class AdapterError(InputError):
    """An adapter does not fit its configuration, its base, or itself."""

    code = "bad-adapter"


class RefusedError(CkptkitError):
    """The request is understood, and cannot or should not be done."""

    code = "refused"
    exit_status = 4


class AmbiguousSourceError(RefusedError):
    """Several checkpoints are under the path, and none was selected."""

    code = "ambiguous-source"


class CannotPlanError(RefusedError):
    """No plan satisfies the request."""

    code = "cannot-plan"


class OverflowRefusedError(RefusedError):
    """A cast would turn finite numbers into infinities."""

    code = "cast-overflow"


class NotFiniteError(RefusedError):
    """A tensor has NaN or infinities, which the request refuses."""

    code = "not-finite"
    usual_hint = (
        "`ckptkit stats` of the source shows whether it has them: training diverged then, take an"
        " earlier step; otherwise a cast or an average made them, pass --dtype float32"
    )


class NoSpaceError(RefusedError):
    """The disk or the memory allowed is too small for the request."""

    code = "no-space"


class EngineError(RefusedError):
    """The machines that were to do the work cannot be used, or are gone."""

    code = "engine-failed"


class MissingLibraryError(RefusedError, ImportError):
    """A library is not installed that the request needs."""

    code = "missing-library"


class OutputError(RefusedError):
    """The output cannot be written where it was asked for."""

    code = "unwritable-output"


class OutputBusyError(OutputError):
    """Another run is putting its output there, or was killed at it a short while ago."""

    code = "output-busy"


class OutputExistsError(CkptkitError):
    """The output directory is there already and holds something."""

    code = "output-exists"
    exit_status = 5


class VerificationError(CkptkitError):
    """A check of finished bytes failed."""

    code = "verification-failed"
    exit_status = 6


class HubError(CkptkitError):
    """The Hub refused a request, or could not be reached, or holds something else."""

    code = "hub-error"
    exit_status = 7


class HubUnavailableError(HubError):
    """The Hub could not be reached, or had no time: another try later may succeed."""

    code = "hub-unavailable"
    usual_hint = "see whether the network and the Hub are up; what was uploaded already is kept"


class SaveError(CkptkitError):
    """A save failed; training continues, and the next save is not affected."""

    code = "save-failed"


class WriterError(SaveError):
    """The process that writes a rank's files died, or hangs."""

    code = "writer-died"
    usual_hint = "it is started again for the next save; see the system's log if this repeats"


class PeerError(SaveError):
    """Another rank did not answer in time."""

    code = "rank-missing"
    usual_hint = (
        "look for the first error in the log of that rank; where it is only slow, raise"
        " timeout_seconds"
    )


class ResumeError(InputError):
    """A checkpoint does not fit what is to be resumed from it."""

    code = "cannot-resume"


class LoadError(InputError):
    """A checkpoint does not fit the model that is to be filled from it; nothing was written."""

    code = "cannot-load"


class PartlyFilledError(LoadError):
    """A model was filled in part only; its cause says why."""

    code = "partly-filled"
    usual_hint = "mend what is wrong and load again, or build the model anew; do not train with it"
