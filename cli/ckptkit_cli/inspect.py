"""`ckptkit inspect`: what lies at a path, from headers alone."""

from __future__ import annotations

from ckptkit_cli._failures import told
from ckptkit_cli._options import Also, AsJson, Selection, Source, TensorPattern
from ckptkit_cli._output import Output
from ckptkit_cli._part_options import ModelConfig
from ckptkit_cli._storage_options import SrcOption, sources_of


def inspect(
    src: Source,
    as_json: AsJson = False,
    tensors: TensorPattern = None,
    select: Selection = None,
    also: Also = None,
    model_config: ModelConfig = None,
    src_option: SrcOption = None,
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

        sources = sources_of(src, src_option)
        inspection = run_inspection(
            sources.first,
            select=select,
            also=sources.further(also or ()),
            model_config=sources.optional(model_config),
        )
        if tensors is not None:
            inspection = matching(inspection, tensors)
        if as_json:
            output.document(inspection.to_json())
            return
        given = Given(src, select, tuple(also or ()))
        page = inspection_page(output, inspection, given, pattern=tensors)
        output.lines(page)
