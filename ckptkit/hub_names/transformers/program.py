"""`python -c …`: reads requests from its input, answers, and ends.

Answers go where the command listens; whatever libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from typing import Any

from ckptkit.core.errors import CannotPlanError, CkptkitError
from ckptkit.hub_names.disk_tensors import NamingRequest, names_to_json
from ckptkit.plan.load_report import LoadRequest


def main() -> None:
    """Answers questions, a JSON value a line; an error of ours is an answer too."""
    replies = _replies()
    with os.fdopen(replies, "wb") as stream:
        for line in sys.stdin.buffer:
            stream.write(json.dumps(answer_question(json.loads(line))).encode() + b"\n")
            stream.flush()


def convert() -> None:
    """Converts groups of tensors for as long as there is someone to ask for it."""
    replies = _replies()
    from ckptkit.hub_names.transformers.answers import serve

    with os.fdopen(replies, "wb") as stream:
        serve(sys.stdin.buffer, stream)


def parameters() -> None:
    """Lists the parameters of a model; the request is a configuration, and names that are known."""
    replies = _replies()
    request = json.loads(sys.stdin.buffer.readline())
    with os.fdopen(replies, "wb") as stream:
        stream.write(json.dumps(_parameters(request)).encode() + b"\n")


def _parameters(request: dict[str, Any]) -> dict[str, Any]:
    from ckptkit.hub_names.transformers.model_classes import list_parameters

    try:
        return {"parameters": list_parameters(request["config"], request["live"])}
    except CkptkitError as error:
        return {"error": error.to_json()}


def _replies() -> int:
    """Returns where answers go, which no library writes to any more."""
    replies = os.dup(1)
    os.dup2(2, 1)
    # No model is looked up anywhere, whatever its configuration names.
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # training may hold all of a GPU's memory
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # tensors without elements need no threads
    return replies


def answer_question(question: dict[str, Any]) -> dict[str, Any]:
    """Answers what a model keeps in float32, its names, or what loading would report.

    `question`: as a line of JSON holds it.
    """
    if "library" not in question and find_spec("transformers.core_model_loading") is None:
        import transformers

        error = CannotPlanError(
            f"found transformers {transformers.__version__}, and 5 or newer knows the names on"
            " disk",
            hint="run `pip install --upgrade transformers`, or pass --names live",
        )
        return {"error": error.to_json()}
    try:
        if "kept" in question:
            from ckptkit.hub_names.transformers.model_classes import build_model, list_kept

            return {"kept": list_kept(build_model(question["kept"], ()))}
        if question.get("library") == "diffusers":
            from ckptkit.hub_names.transformers.diffusers_classes import report_on_diffusers

            return report_on_diffusers(LoadRequest.from_json(question["loading"])).to_json()
        if "loading" in question:
            from ckptkit.hub_names.transformers.loading import report_loading

            return report_loading(LoadRequest.from_json(question["loading"])).to_json()
        from ckptkit.hub_names.transformers.answers import answer_names

        return names_to_json(answer_names(NamingRequest.from_document(question)))
    except CkptkitError as error:
        return {"error": error.to_json()}
