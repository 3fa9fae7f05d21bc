"""`python -c …`: reads requests from its input, answers, and ends.

Answers go where the command listens; whatever libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.planning.hub_names_wire import NamingRequest, names_to_json


def main() -> None:
    """Answers the request on standard input; an error of ours is an answer too."""
    replies = _replies()
    request = NamingRequest.from_json(sys.stdin.buffer.read())
    with os.fdopen(replies, "wb") as stream:
        stream.write(json.dumps(_answer(request)).encode())


def convert() -> None:
    """Converts groups of tensors for as long as there is someone to ask for it."""
    replies = _replies()
    from ckptkit.naming.converting import serve

    with os.fdopen(replies, "wb") as stream:
        serve(sys.stdin.buffer, stream)


def parameters() -> None:
    """Lists the parameters of a model; the request is a configuration, and names that are known."""
    replies = _replies()
    request = json.loads(sys.stdin.buffer.read())
    with os.fdopen(replies, "wb") as stream:
        stream.write(json.dumps(_parameters(request)).encode())


def _parameters(request: dict[str, Any]) -> dict[str, Any]:
    from ckptkit.naming.parameters import listed_parameters

    try:
        return {"parameters": listed_parameters(request["config"], request["live"])}
    except CkptkitError as error:
        return {"error": error.to_json()}


def _replies() -> int:
    """Returns where answers go, which no library writes to any more."""
    replies = os.dup(1)
    os.dup2(2, 1)
    # No model is looked up anywhere, whatever its configuration names.
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    return replies


def _answer(request: NamingRequest) -> dict[str, Any]:
    if find_spec("transformers.core_model_loading") is None:
        import transformers

        return _too_old(transformers.__version__)
    from ckptkit.naming.answers import answer

    try:
        return names_to_json(answer(request))
    except CkptkitError as error:
        return {"error": error.to_json()}


def _too_old(version: str) -> dict[str, Any]:
    return {
        "error": {
            "code": "cannot-plan",
            "message": f"found transformers {version}, and 5 or newer knows the names on disk",
            "where": "",
            "hint": "run `pip install --upgrade transformers`, or pass --names live",
        }
    }
