"""`ckptkit adapter from-diff`: a full fine-tune as a LoRA adapter."""

from __future__ import annotations

from ckptkit_cli import _options as options
from ckptkit_cli import _storage_options as storage
from ckptkit_cli._failures import told
from ckptkit_cli._job_options import Events
from ckptkit_cli._output import Output


def from_diff(
    tuned: options.Tuned,
    out: options.Destination,
    base: options.TrainedFrom,
    rank: options.Rank,
    include: options.IncludeMatrix = None,
    exclude: options.ExcludeMatrix = None,
    full: options.Full = None,
    dtype: options.FactorDType = "float32",
    select: options.Selection = None,
    report: options.Report = False,
    overwrite: options.Overwrite = False,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: Events = False,
) -> None:
    """Make a LoRA adapter of what full training changed.

    Each linear layer's change is approximated by the nearest product of two factors. What the
    factors miss is measured layer by layer, and what changed besides is named: norms, biases and
    embeddings have no factors.
    """
    output = Output(as_json=as_json, quiet=quiet, events=events)
    given = {**locals(), "src": tuned, "also": None}
    with told(output):
        from ckptkit.pipeline.adapters.from_diff import make_diff_request
        from ckptkit_cli._difference_page import DiffJob

        request = make_diff_request(
            rank,
            dtype,
            include=include or (),
            exclude=exclude or (),
            full=full or (),
            select=select,
        )
        places = storage.located(given)
        job = DiffJob(
            *(places["src"], places["out"], places["base"]),
            request,
            overwrite=overwrite,
            report=report,
        )
        job.run(output)
