"""The readers of DeepSpeed's checkpoints, and the choice of a tag.

ZeRO checkpoints are of stages 1 to 3, or without ZeRO. Of a model with experts the weights are
read, up to stage 2: optimizer states of experts belong to groups of ranks. Universal checkpoints
are made of them by `ds_to_universal.py`: every parameter has a folder below `zero/`, with its
master copy and the optimizer's states in a file each; the files of weights of the save are copied
as they were. Up to stage 2 a file holds the tensor in its shape, and values that a change of tensor
parallelism needs; in stage 3 it holds the elements only, without steps and frozen parameters. Those
are in the files of weights, and the steps in `zero/optimizer_state.pt`.

A run has one folder per tag, and the file `latest` with the last tag; `latest_universal` names a
universal checkpoint, whose folder usually is next to its tag's, with a suffix in its name.

Source: deepspeed/runtime/engine.py (`save_checkpoint`, which writes `latest` last),
deepspeed/checkpoint/ds_to_universal.py (`main`, `merge_tp_slices`, `merge_zero3_slices`,
`_save_optimizer_state`), deepspeed 0.14 to 0.19.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Sequence

from ckptkit.core.errors import InputError
from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.discovery import is_unit_folder, parse_step
from ckptkit.formats.parsing import group_by_folder
from ckptkit.formats.zero.tag_files import (
    find_unsupported_part,
    open_zero_file,
    parse_name,
    parse_universal_path,
    sort_tag_files,
)
from ckptkit.storage.base import Source


class ZeroReader(FormatReader):
    """Reads what DeepSpeed's `save_checkpoint` writes into the folder of a tag."""

    name = "zero"
    order = 90
    expected = "'mp_rank_00_model_states.pt' beside '..._optim_states.pt'"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups the files by folder, together with those that are only refused."""
        files = [path for path in paths if find_unsupported_part(path) or parse_name(path)]
        candidates = []
        for folder, inside in group_by_folder(files).items():
            count = sum(find_unsupported_part(path) is None for path in inside)
            reason = f"{count} files named as DeepSpeed names those of its ranks"
            candidates.append(Candidate(self.name, folder, tuple(inside), reason))
        return candidates

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        # Imported late: every source is searched for this format, and few are of it.
        from ckptkit.formats.pickle.torch_archives import ArchiveTable
        from ckptkit.formats.zero.flat_vectors import collect_states, find_rank_states
        from ckptkit.formats.zero.saves import WeightEntries, ZeroSave, make_index

        where = posixpath.join(source.location, candidate.folder)
        files = sort_tag_files(candidate.files, where)
        table = ArchiveTable()
        models = [open_zero_file(table, source, file) for file in files["model"]]
        experts = [open_zero_file(table, source, file) for file in files["expert"]]
        optimizers = [] if experts else files["optim"]
        ranks = [open_zero_file(table, source, file) for file in optimizers]
        save = ZeroSave(models, where, ranks, experts=experts)
        save.check()
        weights = WeightEntries(table, save)
        groups = [list(group) for group in save.groups()]
        pairs = zip(save.ranks, save.states, strict=True)
        of_ranks = [find_rank_states(*pair) for pair in pairs]
        states = collect_states(table, of_ranks, weights.masters, weights.names, groups)
        return make_index(self.name, table, weights, states, save.facts(states.notes))


class UniversalReader(FormatReader):
    """Reads what `ds_to_universal.py` writes into the folder of a tag."""

    name = "universal"
    order = 80  # before ZeRO, whose files of weights it contains
    expected = "'zero/<parameter>/fp32.pt'"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with files of parameters, and the files of weights in them."""
        folders: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            parsed = parse_universal_path(path)
            if parsed is not None:
                folders[parsed.folder].append(path)
        counts = {folder: len(files) for folder, files in folders.items()}
        for path in paths:
            folder = posixpath.dirname(path)
            if folder in counts and parse_name(path) is not None:
                folders[folder].append(path)
        return [
            Candidate(
                self.name,
                folder,
                tuple(sorted(files)),
                f"{counts[folder]} files named as ds_to_universal.py names those of parameters",
            )
            for folder, files in sorted(folders.items())
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        from ckptkit.formats.pickle.torch_archives import ArchiveTable
        from ckptkit.formats.zero.saves import UniversalSave, WeightEntries, make_index

        where = posixpath.join(source.location, candidate.folder)
        table = ArchiveTable()
        save = UniversalSave.open(table, source, candidate.files, where)
        weights = WeightEntries(table, save)
        states = save.states(table, weights.names)
        return make_index(self.name, table, weights, states, save.facts())


_LATEST = {ZeroReader.name: "latest", UniversalReader.name: "latest_universal"}
TAG_FILES = frozenset(_LATEST.values())
"""Files that name a tag, in the folder of the tags' folders."""
_CONVERTED = re.compile(r"(.+?)[-_.]?(?:universal|ucp|uni)", re.IGNORECASE)
_MAX_TAG_BYTES = 4096


def drop_older_tags(
    source: Source, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], tuple[str, ...]]:
    """Drops all tags but the one that `latest` names, where tags are not numbered by step.

    Universal checkpoints next to the tags from which they were made are dropped too.

    Args:
        source: The source of the candidates.
        candidates: All candidates.

    Returns:
        The remaining candidates, and notes about the others.
    """
    zero = {candidate.folder for candidate in candidates if candidate.format == ZeroReader.name}
    dropped = [
        candidate
        for candidate in candidates
        if candidate.format == UniversalReader.name
        and (match := _CONVERTED.fullmatch(candidate.folder)) is not None
        and match[1] in zero
    ]
    notes = [f"{c.folder!r} was made of a checkpoint beside it, and left alone" for c in dropped]
    runs: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.format in _LATEST and candidate.folder and candidate not in dropped:
            runs[posixpath.dirname(candidate.folder), candidate.format].append(candidate)
    for (run, name), tags in runs.items():
        file = _LATEST[name]
        names = [posixpath.basename(tag.folder) for tag in tags]
        # Tags may be named after steps, or after one of a step's models.
        are_numbered = all(parse_step(tag) is not None or is_unit_folder(tag) for tag in names)
        has_other_names = len(tags) > 1 and not are_numbered
        latest = read_tag(source, posixpath.join(run, file)) if has_other_names else None
        others = [tag for tag in tags if posixpath.basename(tag.folder) != latest]
        if len(others) == len(tags) - 1:
            dropped += others
            folders = ", ".join(repr(tag.folder) for tag in others)
            notes.append(f"'{file}' names {latest!r}; left alone: {folders}")
    return [candidate for candidate in candidates if candidate not in dropped], tuple(notes)


def read_tag(source: Source, path: str) -> str | None:
    """Returns the tag in a file that names the latest one, or None if there is none."""
    try:
        size = min(source.stat(path).size_bytes, _MAX_TAG_BYTES)
        return source.read(path, 0, size).decode("utf-8", "replace").strip()
    except InputError:
        return None
