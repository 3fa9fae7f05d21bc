"""What is asked of the process that brings steps from a node's own disk to an object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.writer.messages import Proof


@dataclass(frozen=True, slots=True)
class Remote:
    """A run in an object store.

    Attributes:
        url: Of the run, without a slash at its end.
        options: What fsspec is given for it; secrets, and therefore in no `repr`.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Upload:
    """Asks for the files that some ranks wrote to be put into a run's step.

    Attributes:
        attempt: Names the attempt in answers.
        remote: The run.
        step: The name of the step's folder there.
        folder: Where the files lie, absolute.
        records: The ranks' records, relative to the folder; they name the files, and go last.
        further: Files that no record names, relative to the folder; they go as they are.
        earlier: The folder of a step of the run that was uploaded before, empty for none. Files
            that several steps have in common here are copied from there by the store itself.
    """

    attempt: str
    remote: Remote
    step: str
    folder: str
    records: tuple[str, ...]
    further: tuple[str, ...] = ()
    earlier: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """Asks for a step of which all files are uploaded to be made whole, the manifest last.

    Attributes:
        attempt: Names the attempt in answers.
        remote: The run.
        step: The name of the step's folder there.
        job: The nonce that the run's mark has to have: that of the last job that opened it.
        proofs: One per rank.
        manifest: The manifest's document, to which the files are added; those that it lists
            already were uploaded too.
        beside: A local folder, absolute, whose files belong into the step; empty for none.
        remove: Names of steps that go once the new one is whole.
        given_up: Names of steps of which uploads failed: what is left of them goes, too, unless
            they have become whole since.
        scratch: A local folder, absolute, for what is put together before it is uploaded.
        visible_seconds: How long to wait for what other nodes have uploaded to become visible.
    """

    attempt: str
    remote: Remote
    step: str
    job: str
    proofs: tuple[Proof, ...]
    manifest: Mapping[str, Any]
    beside: str = ""
    remove: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    scratch: str = ""
    visible_seconds: float = 60.0
