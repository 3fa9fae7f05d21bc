"""`ckptkit inspect`: what lies at a path, from headers alone."""

from __future__ import annotations

from ckptkit_cli._failures import told
from ckptkit_cli._options import Also, AsJson, Selection, Source, TensorPattern
from ckptkit_cli._output import Output


def inspect(
    src: Source,
    as_json: AsJson = False,
    tensors: TensorPattern = None,
    select: Selection = None,
    also: Also = None,
) -> None:
    """Show what lies in a checkpoint.

    Tensors, how they are split over ranks, tied weights, what is wrong, and what to run next.
    Headers alone are read.
    """
    output = Output(as_json=as_json)
    with told(output):
        from ckptkit.pipeline.inspecting import run_inspection
        from ckptkit_cli._inspection_page import inspection_page, matching
        from ckptkit_cli._next_command import Given

        inspection = run_inspection(src, select=select, also=also or ())
        if tensors is not None:
            inspection = matching(inspection, tensors)
        if as_json:
            output.document(inspection.to_json())
            return
        given = Given(src, select, tuple(also or ()))
        page = inspection_page(output, inspection, given, pattern=tensors)
        output.lines(page)
