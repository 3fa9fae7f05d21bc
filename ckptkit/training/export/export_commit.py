"""The end of an export on rank 0: compare it with its model, prove its parts, make it visible.

The comparison runs while the other ranks wait for the commit in the background. A process of its
own does it, though training may have imported transformers: building a model changes torch's
default element type for a moment, and may communicate under ZeRO-3.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.conversion.compare_names import Subject, compare_now
from ckptkit.core.checksums import CRC32_SCHEME, ChecksumShare, digest_of, is_whole
from ckptkit.core.errors import OutputError, SaveError
from ckptkit.core.index import Fqn
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord
from ckptkit.options import changed_options
from ckptkit.plan.load_report import EXPORT
from ckptkit.plan.plan import Literal, OutputFile, Plan, Segment
from ckptkit.plan.side_files import CONFIG
from ckptkit.storage.base import Row
from ckptkit.storage.local.shared_target import SharedTarget
from ckptkit.training.agree.peers import name_ranks, poll_until
from ckptkit.training.export.output_plan import ExportRequest, digest_of_plan
from ckptkit.version import __version__

logger = logging.getLogger(__name__)
_KIND = {False: "model", True: "adapter"}
_PROOF = "live"


def compare_with_model(plan: Plan, request: ExportRequest) -> None:
    """Compares names and shapes with the model of the configuration that is written."""
    bodies = (file.segments[0].body for file in plan.files if file.path == CONFIG and file.segments)
    data = next((body.data for body in bodies if isinstance(body, Literal)), b"null")
    config = json.loads(data)
    if not isinstance(config, dict) or request.options.names == "live":
        return
    tensors = {str(spec.name): (spec.dtype, spec.shape) for _, _, spec in plan.specs()}
    subject = Subject(config, tensors, frozenset(), str(request.out), advice=EXPORT)
    for note in compare_now(subject):
        logger.warning("%s: %s", request.out, note)


def answer_of(
    plan: Plan,
    shares: Mapping[Fqn, ChecksumShare],
    size_bytes: int,
    *,
    out: str,
    rows: Sequence[Row],
) -> dict[str, Any]:
    """Returns what a rank reports of its part, as JSON values.

    Args:
        plan: Of the whole, as this rank has it.
        shares: What this rank wrote of each tensor.
        size_bytes: How many bytes that are.
        out: The output, as this rank calls it.
        rows: Of what it has written for rank 0 to put in its place.
    """
    return {
        "plan": digest_of_plan(plan),
        "shares": [shares.get(spec.name, ChecksumShare()) for _, _, spec in plan.specs()],
        "size_bytes": size_bytes,
        "out": out,
        "rows": rows,
    }


def part_of(rank: int) -> str:
    """Returns the file in the hidden folder that has the bytes of a rank for rank 0."""
    return f"part-{rank}"


def mark_of(rank: int) -> str:
    return f"rank-{rank}"


def commit(
    target: SharedTarget,
    plan: Plan,
    request: ExportRequest,
    answers: Sequence[Mapping[str, Any]],
    *,
    is_adapter: bool,
    patience_seconds: float,
) -> dict[str, Any]:
    """Makes the parts of all ranks one directory, the manifest last.

    Args:
        target: Where the parts are.
        plan: Of the whole.
        request: The request.
        answers: By rank, what `answer_of` returned.
        is_adapter: Whether it is an adapter.
        patience_seconds: How long to wait until the marks of the others are seen here.

    Returns:
        What all ranks get to know.
    """
    where = str(request.out)
    digest = digest_of_plan(plan)
    other = [rank for rank, answer in enumerate(answers) if answer["plan"] != digest]
    if other:
        raise SaveError(
            f"{name_ranks(other)} planned other files than rank 0",
            where=where,
            hint="give all ranks the same model, sidecar and options",
        )
    _await_marks(target, where, [answer["out"] for answer in answers], patience_seconds)
    parts = {part_of(rank): a["rows"] for rank, a in enumerate(answers) if a["rows"]}
    if parts:
        target.unite({file.path: file.size_bytes for file in plan.files}, parts)
    manifest = _manifest(plan, request, [a["shares"] for a in answers], is_adapter=is_adapter)
    target.commit(MANIFEST_NAME, manifest.to_json())
    return {"size_bytes": plan.bytes_written}


def _await_marks(
    target: SharedTarget, where: str, outs: Sequence[str], patience_seconds: float
) -> None:
    """Waits until what all ranks wrote is seen on this one."""
    marks = [mark_of(rank) for rank in range(len(outs))]
    is_same = set(outs) == {where}
    poll_until(lambda: None if target.absent(marks) else True, patience_seconds if is_same else 0)
    absent = [marks.index(mark) for mark in target.absent(marks)]
    if absent:
        elsewhere = next((outs[rank] for rank in absent if outs[rank] != where), "")
        raise OutputError(
            f"rank 0 does not see what {name_ranks(absent)} wrote"
            + (f", to {elsewhere!r}" if elsewhere else ""),
            where=where,
            hint="name the same directory on all ranks, on storage that they share",
        )


def _manifest(
    plan: Plan, request: ExportRequest, shares: Sequence[Sequence[Any]], *, is_adapter: bool
) -> Manifest:
    tensors = {
        str(spec.name): TensorRecord(
            dtype=spec.dtype.name,
            shape=spec.shape,
            file=file.path,
            digest=f"{CRC32_SCHEME}:{_joined(spec.name, segment, of_ranks):08x}",
            proof=_PROOF,
        )
        for (file, segment, spec), *of_ranks in zip(plan.specs(), *shares, strict=True)
    }
    return Manifest(
        kind=_KIND[is_adapter],
        source=request.source,
        options=changed_options(request.options),
        versions={"ckptkit": __version__, **request.versions},
        tensors=tensors,
        tied={str(target): str(source) for target, source in plan.dropped.items()},
        files={file.path: FileRecord(file.size_bytes, _digest(file)) for file in plan.files},
    )


def _joined(name: Fqn, segment: Segment, of_ranks: Sequence[Sequence[int]]) -> int:
    whole = ChecksumShare()
    for share in of_ranks:
        whole = whole.joined(ChecksumShare(*share))
    if not is_whole(whole, segment.stop - segment.start):
        raise SaveError(
            "not every byte was written once",
            where=f"tensor {name!r}",
            hint="the ranks hold other parts of it than their sharding says, or several stages of a"
            " pipeline have a tensor of that name",
        )
    return whole.crc32


def _digest(file: OutputFile) -> str:
    """Returns the digest of a file without tensors."""
    bodies = [segment.body for segment in file.segments]
    if len(bodies) == 1 and isinstance(bodies[0], Literal):
        return digest_of(memoryview(bodies[0].data))
    return ""
