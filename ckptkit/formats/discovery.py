"""Names of steps: the folders and files of a run, as frameworks name them.

A step of a run is a folder, or a file such as `epoch=0-step=500.ckpt` and `iter_2000.pth`.

Source: lightning/pytorch/callbacks/model_checkpoint.py (`format_checkpoint_name`,
`CHECKPOINT_NAME_LAST`), nemo/lightning/pytorch/callbacks/model_checkpoint.py,
megatron/training/checkpointing.py (`get_checkpoint_tracker_filename`, `read_metadata`),
mmengine/hooks/checkpoint_hook.py, fairseq/checkpoint_utils.py,
composer/callbacks/checkpoint_saver.py, lerobot/utils/train_utils.py (`get_step_checkpoint_dir`),
nemo_automodel/recipes/base_recipe.py (`epoch_E_step_S`), nemo_rl/utils/checkpoint.py (`step_N`),
torchtune/training/checkpointing/_checkpointer.py (`DistributedCheckpointer`: `dist_epoch_N`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

from ckptkit.core.errors import InputError
from ckptkit.core.frameworks import is_unit_folder
from ckptkit.formats.base import Candidate
from ckptkit.formats.ranks.rank_files import RANK_IN_NAME
from ckptkit.formats.ranks.reader import RankFilesReader
from ckptkit.storage.base import Source

# What frameworks count: Composer `ep` and `ba`, NeMo Automodel `epoch` and `step`.
_EPOCHS = frozenset({"epoch", "dist_epoch", "ep"})
# Words before the number of a step. One of `_WORD` may also begin the name of a folder that ends in
# metrics (`_FOLDER`: `step=500-loss=0.25-last`). One that is in `_COUNTER` alone may not: it counts
# in names that are counters only (`ep1-ba40`). One that counts epochs is in `_EPOCHS` as well.
_WORD = r"checkpoint|ckpt|step|global_?step|iter(?:ation)?|(?:dist_)?epoch"
# In the name of a file, any text may be before it (`_STEP_FILE`: `model_step_500.pt`). So a word
# that is part of the names of models makes steps of `model-WORD-3.pt`.
_COUNTER = rf"(?P<kind>{_WORD}|ep|batch|ba)[-_=]?0*(?P<number>\d{{1,15}})"
_EACH_COUNTER = re.compile(_COUNTER, re.IGNORECASE)
_ANY_COUNTER = re.sub(r"\?P<\w+>", "?:", _COUNTER)
_ALL_COUNTERS = rf"(?:(?:checkpoint|ckpt)[-_])?{_ANY_COUNTER}(?:[-_]{_ANY_COUNTER})*"
_COUNTERS = re.compile(_ALL_COUNTERS, re.IGNORECASE)
_STEP_FILE = re.compile(rf"(?P<of>(?:[\w-]+?[-_])??)(?P<counters>{_ALL_COUNTERS})", re.IGNORECASE)
_LIGHTNING = re.compile(
    r"(?:.*[-_])?(?P<kind>step|epoch)=0*(?P<number>\d{1,15})(?:-\D.*)?", re.IGNORECASE
)
_ENDING = re.compile(r"(\.pth\.tar|\.ckpt|\.pth|\.pt|\.bin)$")
_LAST = re.compile(r"(checkpoint_)?(last|latest)(-v\d+)?", re.IGNORECASE)
_FOLDER = re.compile(
    rf"(?:.*\bstep=|(?:{_WORD})?[-_=]?)"
    r"0*(\d{1,15})(?:-\w+=-?[\d.]+)*(?:-last)?(?:\.ckpt)?",  # as NeMo names them
    re.IGNORECASE,
)
_DATE = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\d{4}|\d{6})?")


StepName = tuple[str, int]  # the word for what is counted, and the number


def parse_step_file(path: str) -> StepName | None:
    """Returns the step in the name of a file, or None; the files of all ranks are of one step.

    >>> [parse_step_file(name) for name in ("epoch=3-step=500.ckpt", "iter_2000.pth", "model.pt")]
    [('step', 500), ('iter', 2000), None]
    >>> parse_step_file("ep1-ba40-rank0.pt")
    ('ba', 40)
    """
    stem = _stem(path)
    match = _STEP_FILE.fullmatch(stem)
    if match is not None:
        counted = _parse_counters(match["counters"])
        return counted and (match["of"].lower() + counted[0], counted[1])
    match = _LIGHTNING.fullmatch(stem)
    return None if match is None else (match["kind"].lower(), int(match["number"]))


def _parse_counters(name: str) -> StepName | None:
    """Returns the step of a name that has nothing but counters: the last that counts no epochs."""
    if _COUNTERS.fullmatch(name) is None:
        return None
    found = [(one["kind"].lower(), int(one["number"])) for one in _EACH_COUNTER.finditer(name)]
    if [kind for kind, _ in found] == ["batch"]:
        return None  # the size of one
    return ([one for one in found if one[0] not in _EPOCHS] or found)[-1]


def is_called_last(path: str) -> bool:
    """Returns whether a file or folder is named as the last of a run, without its step.

    >>> is_called_last("run/last.ckpt"), is_called_last("run/epoch=0-step=2.ckpt")
    (True, False)
    """
    return _LAST.fullmatch(_stem(path)) is not None


def _stem(path: str) -> str:
    return _ENDING.sub("", RANK_IN_NAME.sub("", posixpath.basename(path)))


def step_of_files(candidate: Candidate) -> StepName | None:
    """Returns the step in the names of a candidate's files, where these are a step by themselves.

    They are one file, or one for each rank; in other formats the folder is the step.
    """
    is_own = candidate.format == RankFilesReader.name or (
        candidate.format == "torch" and len(candidate.files) == 1
    )
    return parse_step_file(candidate.files[0]) if is_own else None


def find_step_files(candidates: Iterable[Candidate]) -> dict[str, tuple[int, Candidate]]:
    """Returns candidates that are steps of one run as files, by the path of their first file.

    There are none where names count different things, as those of two models do.
    """
    named = [(name, c) for c in candidates if (name := step_of_files(c)) is not None]
    kinds = {(candidate.folder, kind) for (kind, _), candidate in named}
    return {c.files[0]: (number, c) for (_, number), c in named} if len(kinds) == 1 else {}


def name_step(path: str) -> str:
    """Returns the step of a run that a file in the run belongs to: a folder, or its first file.

    Of the files of ranks, that is the one of rank 0, even where it is missing.

    >>> name_step("ep0-ba10/__0_0.distcp"), name_step("ep0-ba10-rank3.pt")
    ('ep0-ba10', 'ep0-ba10-rank0.pt')
    """
    folder, slash, _ = path.partition("/")
    match = RANK_IN_NAME.search(folder)
    if slash or match is None:
        return folder
    start, end = match.span("rank")
    return folder[:start] + "0" * (end - start) + folder[end:]


# In the folder of a run: Megatron-LM's, and those of nanotron and DLRover, whose steps are numbers.
TRACKERS = ("latest_checkpointed_iteration.txt", "latest.txt", "dlrover_latest.txt")
_MAX_TAG_BYTES = 4096
UNFINISHED = "the save was not finished"  # in what a step lacks, which then is not damaged
RELEASE = "release"  # the folder of weights that no training of the run has changed
ITSELF = "."
"""What selects the model in a folder itself, as `.` or `FOLDER/.`; never a step below it."""


def parse_step(folder: str) -> int | None:
    """Returns the step in the name of a folder or file; for the folder of a unit, in that above it.

    >>> parse_step("runs/a/checkpoint-500"), parse_step("checkpoint-500/pytorch_model_fsdp_0")
    (500, 500)
    >>> parse_step("run/epoch_0_step_100"), parse_step("run/ep0-ba10-rank0.pt")
    (100, 10)
    """
    step = find_step(folder)
    return None if step is None else parse_step_name(posixpath.basename(step))


def find_step(folder: str) -> str | None:
    """Returns the folder, or file, of the step that a folder is or belongs to; None without one.

    What a framework names iteration 0 below a step, as Megatron-Core in NeMo-RL, is that step, and
    so is the folder of DeepSpeed in a step of the Trainer.

    >>> find_step("run/step_10/policy/weights/iter_0000000"), find_step("run/model")
    ('run/step_10', None)
    >>> find_step("run/checkpoint-5/global_step5"), find_step("run/global_step5")
    ('run/checkpoint-5', 'run/global_step5')
    """
    path, found, is_unit_below = folder.replace("\\", "/").rstrip("/"), None, False
    while path:
        above, name = posixpath.split(path)
        number = parse_step_name(name)
        if is_tag_in_step(path):
            pass
        elif number is not None and found is None:
            found, is_unit_below = path, False
            if number or not name.startswith("iter_"):  # else Megatron's iteration 0
                break
        elif number is not None and is_unit_below:
            return path
        elif number is None and is_unit_folder(name):
            is_unit_below = True
        else:
            break
        path = above
    return found


def is_tag_in_step(folder: str) -> bool:
    """Returns whether a folder is DeepSpeed's in a step of the Trainer, both of one number."""
    above, name = posixpath.split(folder)
    number = parse_step_name(name) if name.startswith("global_step") else None
    return number is not None and number == parse_step_name(posixpath.basename(above))


def parse_step_name(name: str) -> int | None:
    """Returns the step in the name of a folder or file, without what is above it."""
    match = _FOLDER.fullmatch(name)
    if match is not None:
        return None if _DATE.fullmatch(name) else int(match[1])
    counted = parse_step_file(name) if _ENDING.search(name) else _parse_counters(name)
    return None if counted is None else counted[1]


def parse_step_entry(name: str, *, is_file: bool) -> StepName | None:
    """Returns the name without the ending, and the number, of a step of any format; or None.

    >>> parse_step_entry("ckpt-9.data-00000-of-00001", is_file=True)
    ('ckpt-9', 9)
    """
    stem = posixpath.splitext(name)[0]
    counted = parse_step_file(stem) if is_file else None
    if counted is not None:
        return stem, counted[1]
    number = parse_step_name(name)
    return None if number is None else (name, number)


def find_step_above(path: str) -> StepName | None:
    """Returns the outermost step that a file of any format is, or is in; None without one.

    A number alone does not count, since layers may have folders.

    >>> find_step_above("run/step-20/model.tensors"), find_step_above("layers/0/.zarray")
    (('run/step-20', 20), None)
    """
    parts = path.split("/")
    for at, name in enumerate(parts):
        step = parse_step_entry(name, is_file=at == len(parts) - 1)
        if step is not None and not name.isdigit():
            return posixpath.join(*parts[:at], step[0]), step[1]
    return None


def names_step(tag: str, folder: str) -> bool:
    """Returns whether the tag in a tracker names the folder of a step.

    >>> names_step("5", "iter_0000005"), names_step("release", "release"), names_step("5", "iter_7")
    (True, True, False)
    """
    is_number = tag.isascii() and tag.isdigit()
    return folder == tag or (is_number and parse_step(folder) == int(tag))


def read_tag(source: Source, path: str) -> str | None:
    """Returns the tag in a file that names the latest one, or None if there is none."""
    try:
        size = min(source.stat(path).size_bytes, _MAX_TAG_BYTES)
        return source.read(path, 0, size).decode("utf-8", "replace").strip()
    except InputError:
        return None
