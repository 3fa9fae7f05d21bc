"""The files in which training keeps the state of an optimizer beside a whole model.

accelerate and the Trainer write `optimizer.bin` and `optimizer.pt`, a further one for each further
model. Nobody but `--optimizer` needs them, so what is wrong with one of them is told, and does
not keep the model from being read.

Source: accelerate/utils/fsdp_utils.py (`save_fsdp_optimizer`), accelerate/checkpointing.py
(`save_accelerator_state`), transformers/trainer.py (`_save_optimizer_and_scheduler`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from ckptkit.core.errors import InputError, UnsafePickleError, UnsupportedError
from ckptkit.core.index import Problem, RecordTable, RunFacts, TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.formats.torch_files.reader import TorchContents, TorchFileReader
from ckptkit.storage.base import Source

_OPTIMIZER_FILE = re.compile(r"optimizer(_\d{1,7})?\.(bin|pt)")
_NUMBER = re.compile(r".*_(\d{1,7})")


def is_optimizer_file(path: str) -> bool:
    """Tells whether frameworks keep the state of an optimizer in a file of that name.

    >>> is_optimizer_file("checkpoint-5/optimizer_1.bin"), is_optimizer_file("optimizer_0/x.bin")
    (True, False)
    """
    return _OPTIMIZER_FILE.fullmatch(posixpath.basename(path)) is not None


def tree_of(path: str) -> str:
    """Returns what the state dict in an optimizer's file is called.

    >>> tree_of("checkpoint-5/optimizer_1.bin")
    'optimizer_1'
    """
    return posixpath.basename(path).partition(".")[0]


def number_of(name: str) -> int:
    """Returns the number of a model, or of an optimizer, among those of one save; the first is 0.

    >>> number_of("pytorch_model_fsdp_1.bin"), number_of("model.safetensors")
    (1, 0)
    """
    match = _NUMBER.fullmatch(posixpath.basename(name).partition(".")[0])
    return int(match[1]) if match else 0


class TorchOptimizerReader:
    """Reads optimizer states that `torch.save` wrote into files of their own."""

    name = "torch optimizer"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises such files by their names, one by one."""
        return [
            Candidate(self.name, posixpath.dirname(path), (path,), repr(posixpath.basename(path)))
            for path in sorted(paths)
            if is_optimizer_file(path)
        ]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the file; an empty one, with the reason, if it cannot be read."""
        try:
            return read_optimizer_file(source, candidate)
        except InputError as error:
            return _without_tensors(source, candidate.files[0], error)


def is_optimizer_candidate(candidate: Candidate) -> bool:
    return candidate.format == TorchOptimizerReader.name


def with_their_models(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops the files of optimizers that lie in a folder without a model."""
    folders = {one.folder for one in candidates if not is_optimizer_candidate(one)}
    return [one for one in candidates if not is_optimizer_candidate(one) or one.folder in folders]


def read_optimizer_file(source: Source, candidate: Candidate) -> TensorIndex:
    """Returns the index of an optimizer's file."""
    (path,) = candidate.files
    contents = TorchContents()
    contents.add_file(source, path, (tree_of(path),))
    return contents.index(posixpath.join(source.location, path))


def _without_tensors(source: Source, path: str, error: InputError) -> TensorIndex:
    name = posixpath.basename(path)
    is_sound = isinstance(error, (UnsafePickleError, UnsupportedError))
    note, problem = (
        f"{name} was left unread: {error.message}",
        Problem(error.code, path, error.message),
    )
    return TensorIndex(
        format=TorchFileReader.name,
        files=(source.stat(path),),
        records=RecordTable.of([]),
        tensors={},
        run=RunFacts(notes=(note,) if is_sound else ()),
        problems=() if is_sound else (problem,),
    )
