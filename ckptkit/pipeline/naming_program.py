"""Starts the program that asks transformers for names on disk, and hears its answer.

It is the only way from here to transformers: a process of its own, without a GPU, without the
network and without anyone's code but that of installed libraries, which ends with the command.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, RefusedError, error_from_json
from ckptkit.planning.hub_names import HubNames
from ckptkit.planning.hub_names_wire import NamingRequest, names_from_json

_LOG = logging.getLogger(__name__)
_PROGRAM = "import sys; sys.path[:] = {!r}; from ckptkit.naming.program import {}; {}()"
_NEEDED = ("torch", "transformers")
_SECONDS = 600  # the largest models take ten, and importing from a slow disk a minute
_LAYOUT = "call `ckptkit.training.write_flat_layout` in the training script instead"
_LIVE = "pass --names live to write the names that training holds, which Transformers 5 loads too"


def ask_transformers(request: NamingRequest) -> HubNames:
    """Asks the installed transformers what a model's tensors are called on disk.

    Raises:
        RefusedError: If transformers is not installed, fails, or cannot be followed.
    """  # noqa: DOC501  `_refusal` makes it
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise RefusedError(
            f"model type {request.config.get('model_type')!r} is kept under other names on disk,"
            f" and {' and '.join(missing)}, which would tell them, cannot be imported",
            hint=f"run `pip install {' '.join(missing)}`, or {_LIVE}",
        )
    document = _reply(_run(request.to_json()))
    if "error" in document:
        raise _refusal(error_from_json(document["error"]), request)
    return names_from_json(document)


def ask_parameters(config: Mapping[str, Any], live: Sequence[str]) -> list[Mapping[str, Any]]:
    """Asks the installed transformers for the parameters of a model, which it does not load.

    Args:
        config: The model's parsed `config.json`.
        live: Names that the checkpoint tells.

    Returns:
        For each parameter, in the order of modules, its `names` and its `shape`.

    Raises:
        RefusedError: If transformers is not installed, fails, or has no such model.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise RefusedError(
            f"{' and '.join(missing)}, which would build the model, cannot be imported",
            where="--model-config",
            hint=f"run `pip install {' '.join(missing)}`",
        )
    request = json.dumps({"config": config, "live": list(live)}).encode()
    document = _reply(_run(request, "parameters", _LAYOUT), _LAYOUT)
    if "error" in document:
        error = error_from_json(document["error"])
        raise RefusedError(error.message, where="--model-config", hint=error.hint or _LAYOUT)
    found: list[Mapping[str, Any]] = document["parameters"]
    return found


def program_command(entry: str) -> list[str]:
    """Returns the command that starts the program.

    Args:
        entry: The function of it that is run.
    """
    # Where a model folder is at hand, its python files must not pass for libraries.
    here = {"", str(Path.cwd())}
    roots = [path for path in sys.path if path not in here]
    roots.append(str(Path(__file__).resolve().parents[2]))
    return [sys.executable, "-P", "-c", _PROGRAM.format(roots, entry, entry)]


def _run(data: bytes, entry: str = "main", hint: str = _LIVE) -> bytes:
    command, pipe = program_command(entry), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:  # noqa: S603
        try:
            answer, said = process.communicate(data, _SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RefusedError(
                f"transformers gave no answer within {_SECONDS} s", hint=hint
            ) from error
        finally:  # it is ours alone: nothing outlives the command, however that ends
            process.kill()
            process.wait()
    log = said.decode(errors="replace").strip()
    _LOG.debug("the program that asks transformers said: %s", log)
    if process.returncode != 0:
        last = log.splitlines()[-1] if log else f"it ended with status {process.returncode}"
        raise RefusedError(f"transformers could not tell the names on disk: {last}", hint=hint)
    return answer


def _reply(data: bytes, hint: str = _LIVE) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise RefusedError(
            "the program that asks transformers gave no answer", hint=hint
        ) from error
    return document


def _refusal(error: CkptkitError, request: NamingRequest) -> RefusedError:
    return RefusedError(
        f"the names on disk of model type {request.config.get('model_type')!r} cannot be told:"
        f" {error.message}",
        hint=error.hint or _LIVE,
    )
