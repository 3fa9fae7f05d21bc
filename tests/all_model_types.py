"""Consolidates a small model of every class of Transformers: is it what `save_pretrained` writes?

    python -m tests.all_model_types --results results.jsonl --page docs/reference/model-families.md

Each class is built with random weights; its live state dict is saved by
`torch.distributed.checkpoint`, consolidated, and compared with what `save_pretrained` writes: the
names, element types, shapes and bytes of all tensors, and the configuration. Then the output is
loaded by `from_pretrained`, which must miss nothing, ignore nothing and hold the live values. All
1,700 classes take an hour on one core. Classes that have a result in the file are not tried again:
delete their lines, or the file, to do so.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

import ckptkit
from ckptkit.conversion.naming_program import NamingProgram
from ckptkit.core.errors import CannotPlanError, CkptkitError
from ckptkit.engine.outcome import Event, Planned
from ckptkit.hub_names.transformers.program import answer_question
from tests.small_models import class_named, model_classes, small_model_config, time_limit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "model-families.md"
SECONDS_PER_CLASS = 300
CLASSES_PER_PROCESS = 200
LONGEST = 300


@dataclass(frozen=True)
class Result:
    """What came of one class."""

    name: str  # of the class
    model_type: str  # of its configuration
    # `ok`, `not built`, `not saved` where `save_pretrained` fails, `not reloaded` where stock
    # files do not load as they were saved, `refused too` where neither stock files load nor
    # ckptkit writes any, `refused`, or `differs`.
    outcome: str
    reason: str = ""  # why it is not `ok`
    tensors: int = 0  # number of tensors that `save_pretrained` writes
    left_out: int = 0  # number of live names that it leaves out
    # Why its names were not compared with the model of its configuration, which `consolidate` does
    # before it writes; empty where they were.
    not_compared: str = ""


@contextmanager
def asking_in_process() -> Iterator[None]:
    """Asks Transformers in this process, which saves the start of another per model."""

    def ask(_program: NamingProgram, question: bytes) -> Future[bytes]:
        found: Future[bytes] = Future()
        try:
            reply = answer_question(json.loads(question))
        except Exception as error:  # noqa: BLE001  what ends the program is an error there
            reply = {"error": CannotPlanError(_said(error)).to_json()}
        found.set_result(json.dumps(reply).encode())
        return found

    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict(os.environ, {"XDG_CACHE_HOME": cache, "HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        patch.object(NamingProgram, "ask", ask),
    ):
        yield


def try_class(name: str, folder: Path) -> Result:
    """Consolidates a small model of a class, and compares."""
    model_class = class_named(name)
    kind = model_class.config_class.model_type or "(none)"
    try:
        model = model_class(small_model_config(model_class))
    except Exception as error:  # noqa: BLE001  any class may want what is not here
        return Result(name, kind, "not built", _said(error))
    return try_model(model, folder)


def try_model(model: Any, folder: Path, **options: Any) -> Result:
    """Consolidates a model and compares; `options` are those of `save_pretrained`."""
    name, kind = type(model).__name__, type(model).config_class.model_type or "(none)"
    reference, out = folder / "reference", folder / "out"
    fill(model)
    try:
        model.save_pretrained(reference, **options)
    except Exception as error:  # noqa: BLE001  and may not be saved
        return Result(name, kind, "not saved", _said(error))
    theirs = load_folder(reference)
    notes: list[str] = []
    outcome, reason = _compared(model, folder / "source", out, reference, notes)
    left_out = len(model.state_dict().keys() - theirs.keys())
    not_compared = _said(next((n for n in notes if "not compared" in n), ""))
    return Result(name, kind, outcome, reason, len(theirs), left_out, not_compared)


def equal_classes() -> list[str]:
    """Returns the classes of the installed Transformers that are no exceptions on the page."""
    return [name for name in model_classes() if name not in exceptions()]


@cache
def exceptions() -> dict[str, str]:
    """Returns the outcome of each exception on the page, by the name of its class."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Exceptions\n")[2]
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| (`.*) \|$", text.partition("\n## ")[0], re.MULTILINE
    )
    return {name: outcome for outcome, names in rows for name in re.findall(r"`(\w+)`", names)}


def load_folder(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in folder.glob("model*.safetensors"):
        found |= load_file(path)
    return found


def _compared(
    model: Any, source: Path, out: Path, reference: Path, notes: list[str]
) -> tuple[str, str]:
    """Consolidates what training holds; returns the outcome and its reason, and adds notes."""
    dcp.save(dict(model.state_dict()), checkpoint_id=source, no_dist=True)
    model.config.save_pretrained(source)

    def listen(event: Event) -> None:
        notes.extend(event.notes if isinstance(event, Planned) else ())

    try:
        ckptkit.consolidate(source, out, listener=listen)
    except CkptkitError as error:
        found = _own_fault(model, reference)
        return ("refused too", found) if found else ("refused", _said(error))
    found = differences(load_folder(out), load_folder(reference))
    found = found or _of_configs(out, reference)
    if found:
        return "differs", found
    found = _own_fault(model, out)  # as the files are the same
    return ("not reloaded", found) if found else ("ok", "")


def _own_fault(model: Any, folder: Path) -> str:
    """Says what is wrong with the files of `save_pretrained`; empty if they load as they were."""
    try:
        return _reloaded(model, folder)
    except Exception as error:  # noqa: BLE001  loading may fail in any way
        return _said(error)


def fill(model: Any) -> None:
    """Gives all floating tensors of a model values of their own; tied ones stay tied."""
    torch.manual_seed(7)
    seen = set()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensor.normal_()


def _said(error: BaseException | str) -> str:
    text = re.sub(r"/\S*/model-types-\w+/", "", " ".join(str(error).split()))
    name = "" if isinstance(error, (CkptkitError, str)) else f"{type(error).__name__}: "
    return f"{name}{text}"[:LONGEST]


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Says how the tensors of two files differ; empty where they do not."""
    more, fewer = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if more or fewer:
        return f"{len(more)} names more {more[:3]}, {len(fewer)} fewer {fewer[:3]}"
    unlike = [name for name, tensor in theirs.items() if not _equal(ours[name], tensor)]
    return f"{len(unlike)} tensors have other bytes {unlike[:3]}" if unlike else ""


def _equal(one: Any, other: Any) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*as_bytes)


def _of_configs(out: Path, reference: Path) -> str:
    ours, theirs = (json.loads((f / "config.json").read_bytes()) for f in (out, reference))
    unlike = [k for k in ours.keys() | theirs.keys() if ours.get(k, ...) != theirs.get(k, ...)]
    return f"config.json differs in {sorted(unlike)[:5]}" if unlike else ""


def _reloaded(model: Any, folder: Path) -> str:
    """Loads a folder; says what it lacks against the live model."""
    loaded, loading = type(model).from_pretrained(folder, output_loading_info=True)
    wrong = {key: sorted(map(str, value))[:3] for key, value in loading.items() if value}
    if wrong:
        return f"loads with {wrong}"[:LONGEST]
    return differences(saved_state(loaded), saved_state(model))


def saved_state(model: Any) -> dict[str, Any]:
    """Returns the tensors of a model but for those that loading makes anew."""
    ignored = set(model._keys_to_ignore_on_save or ())
    return {k: v for k, v in model.state_dict().items() if k not in ignored}


def run_class(name: str) -> Result:
    """Tries a class in a folder of its own; what fails unexpectedly is an outcome too."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    gc.freeze()  # what libraries hold is not looked through again for each model
    with tempfile.TemporaryDirectory(prefix="model-types-") as folder, asking_in_process():
        try:
            with time_limit(SECONDS_PER_CLASS):
                return try_class(name, Path(folder))
        except Exception as error:  # noqa: BLE001 - is listed, and the others go on
            return Result(name, "", "failed", _said(error))


def main() -> None:
    """Runs the classes that have no result yet, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON Lines, appended to")
    parser.add_argument("--only", default="", help="regular expression of class names")
    parser.add_argument("--workers", type=int, default=1, help="processes; 1 unless given")
    parser.add_argument("--page", type=Path, help="Markdown page to write from all results")
    options = parser.parse_args()
    done = {result.name for result in read_results(options.results)}
    names = [n for n in _main_first() if n not in done and re.search(options.only, n)]
    chunk = CLASSES_PER_PROCESS * options.workers
    for start in range(0, len(names), chunk):
        run_classes(names[start : start + chunk], options.results, options.workers)
    if options.page:
        options.page.write_text(page_of(read_results(options.results)), encoding="utf-8")


HEADER = """# Model families

A small model of every class that transformers {version} exports was tried. `ckptkit consolidate`
has to write what `save_pretrained` writes: names, element types, shapes and bytes of all tensors,
and `config.json`. `from_pretrained` has to load the output, find every tensor, ignore none, and
return the values of the trained model.

`python -m tests.all_model_types --results results.jsonl --page docs/reference/model-families.md`
writes this page. The tests run a sample of the classes.

| outcome | classes | model types |
|---|--:|--:|
"""
OUTCOMES = {
    "ok": "equal",
    "not reloaded": "equal; `from_pretrained` restores neither output",
    "refused too": "refused; `from_pretrained` does not load what `save_pretrained` writes",
    "not saved": "`save_pretrained` fails",
    "not built": "no small model could be built",
    "refused": "refused",
    "differs": "differs",
    "failed": "fails",
}


def page_of(results: Sequence[Result]) -> str:
    """Returns the page as Markdown: totals, and the exceptions with their reasons."""
    rows = [HEADER.format(version=transformers.__version__)]
    for outcome, words in OUTCOMES.items():
        found = [result for result in results if result.outcome == outcome]
        if found:
            types = len({result.model_type for result in found})
            rows.append(f"| {words} | {len(found):,} | {types:,} |\n")
    rows.append("\n## Exceptions\n\nEvery class that is not listed is equal.\n\n")
    rows.append("| outcome | reason | classes |\n|---|---|---|\n")
    by_reason: dict[tuple[str, str], list[str]] = {}
    for result in sorted(results, key=lambda r: (list(OUTCOMES).index(r.outcome), r.name)):
        if result.outcome != "ok":
            cause = (OUTCOMES[result.outcome], shorten(result.reason))
            by_reason.setdefault(cause, []).append(f"`{result.name}`")
    rows += [f"| {words} | {why} | {', '.join(n)} |\n" for (words, why), n in by_reason.items()]
    rows += _not_compared(results)
    return "".join(rows)


def shorten(reason: str) -> str:
    """Returns a reason without what differs between classes that fail alike."""
    if library := re.search(r"requires the (\w+) library", reason):
        return f"`{library[1]}` is not installed"
    if "smallest configuration has" in reason:
        return "the smallest configuration is too large"
    return re.split(r"\. |\n", reason.replace("|", "\\|"))[0]


def _not_compared(results: Sequence[Result]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for result in results:
        if result.not_compared:
            why = result.not_compared.rpartition(": ")[2]
            found.setdefault(why, []).append(f"`{result.name}`")
    if found:
        yield "\n## Classes whose names `consolidate` did not compare with `config.json`\n\n"
        yield "| reason | classes |\n|---|---|\n"
        yield from (f"| {why} | {', '.join(names)} |\n" for why, names in found.items())


def _main_first() -> list[str]:
    """Returns the classes, those first that tie something, then one of each type."""
    classes = model_classes()
    tied = [n for n, one in classes.items() if getattr(one, "_tied_weights_keys", None)]
    others = sorted(classes, key=lambda n: ("For" not in n, n))
    by_type: dict[str, str] = {}
    for name in [*tied, *others]:
        by_type.setdefault(classes[name].config_class.model_type, name)
    return list(dict.fromkeys([*by_type.values(), *tied, *others]))


def run_classes(names: list[str], results: Path, workers: int) -> None:
    """Tries classes in new processes, which end with them, and appends what came of them."""
    with (
        results.open("a") as file,
        ProcessPoolExecutor(workers, get_context("spawn")) as pool,
    ):
        for future in as_completed([pool.submit(run_class, name) for name in names]):
            file.write(json.dumps(asdict(future.result())) + "\n")
            file.flush()


def read_results(path: Path) -> list[Result]:
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
