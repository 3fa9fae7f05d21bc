"""Whether an export would load as the model of its configuration; only rank 0 asks.

It does so while the other ranks wait for the commit in the background, as they do for its bytes.
A process of its own answers, though training may have imported transformers: building a model
changes torch's default element type for a moment, and may communicate under ZeRO-3.
"""

from __future__ import annotations

import json
import logging

from ckptkit.conversion.compare_names import Subject, compare_now
from ckptkit.plan.load_report import EXPORT
from ckptkit.plan.plan import Literal, Plan
from ckptkit.plan.side_files import CONFIG
from ckptkit.training.export.plan import ExportRequest

logger = logging.getLogger(__name__)


def compare_with_model(plan: Plan, request: ExportRequest) -> None:
    """Compares names and shapes with the model of the configuration that is written."""
    config = _config_of(plan)
    if config is None or request.options.names == "live":
        return
    tensors = {str(spec.name): (spec.dtype, spec.shape) for _, _, spec in plan.specs()}
    subject = Subject(config, tensors, frozenset(), str(request.out), advice=EXPORT)
    for note in compare_now(subject):
        logger.warning("%s: %s", request.out, note)


def _config_of(plan: Plan) -> dict[str, object] | None:
    for file in plan.files:
        body = file.segments[0].body if file.path == CONFIG and file.segments else None
        if isinstance(body, Literal):
            found = json.loads(body.data)
            return found if isinstance(found, dict) else None
    return None
