"""The readers, and the one place where a format is recognised."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from ckptkit.core.errors import NotACheckpointError
from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate, CheckpointReader
from ckptkit.formats.dcp import METADATA, DcpReader
from ckptkit.formats.foreign import ForeignReader
from ckptkit.formats.hf_shards import HfShardsReader
from ckptkit.formats.numbered_files import METADATA_PICKLE
from ckptkit.formats.plug_ins import PlugIns, installed
from ckptkit.formats.precedence import is_certain
from ckptkit.formats.rank_files import RankFilesReader
from ckptkit.formats.safetensors import SafetensorsReader
from ckptkit.formats.surroundings import grouped
from ckptkit.formats.torch_checkpointing import TorchCheckpointingReader
from ckptkit.formats.torch_file import TorchFileReader
from ckptkit.formats.torch_optimizer import TorchOptimizerReader
from ckptkit.formats.torchsnapshot import SNAPSHOT_METADATA, TorchsnapshotReader
from ckptkit.formats.zero import ZeroReader
from ckptkit.formats.zero_universal import UniversalReader
from ckptkit.storage.base import Source

READERS: tuple[CheckpointReader, ...] = (
    TorchsnapshotReader(),  # first: its files may have any name
    TorchCheckpointingReader(),
    RankFilesReader(),  # before those that would take a rank's file for a model
    ForeignReader(),  # what it takes is kept from the others, who would misread it
    UniversalReader(),  # before ZeRO, whose files of weights lie in it
    ZeroReader(),
    DcpReader(),
    HfShardsReader(),  # before safetensors, of which each is one
    SafetensorsReader(),
    TorchOptimizerReader(),
    TorchFileReader(),
)
EXPECTED: Mapping[str, str] = {
    "dcp": "'.metadata' beside '__0_0.distcp'",
    "zero": "'mp_rank_00_model_states.pt' beside '..._optim_states.pt'",
    "universal": "'zero/<parameter>/fp32.pt'",
    "torchsnapshot": "'.snapshot_metadata'",
    "torch-checkpointing": "'model_0.pt' beside 'model_1.pt', or beside 'metadata.pkl'",
    "dcp-hf": "'shard-00001-model-00001-of-00001.safetensors'",
    "rank-files": "'model_world_size_2_rank_0.pt', 'pytorch_model_fsdp_0_rank0.bin' or 'rank_0.pt'",
    "safetensors": "'*.safetensors'",
    "torch": "'*.pt', '*.pth', '*.bin' or '*.ckpt'",
}
"""What the files of each format are called, where a checkpoint can be made of them alone."""
# Measured: 900 MB for 350 MB of `.metadata`, the file itself included.
_PARSING_FACTORS = {METADATA: 3, SNAPSHOT_METADATA: 12, METADATA_PICKLE: 12}
SEARCH_DEPTH = 4  # runs/a/checkpoint-500/pytorch_model_fsdp_0 is found from `runs`


def find_candidates(source: Source) -> list[Candidate]:
    """Recognises every checkpoint at or under the root of a source, by file names alone."""
    return recognise(list(source.walk(SEARCH_DEPTH)))


def recognise(paths: Sequence[str]) -> list[Candidate]:
    """Recognises every checkpoint among the paths of files; a file belongs to one of them.

    Where none of our readers is certain of what it found, those of others are asked first.
    """
    found = _recognised(READERS, paths)
    if not paths or any(is_certain(candidate) for candidate in found):
        return found
    others = _plug_ins().readers
    return _recognised((*others, *READERS), paths) if others else found


def complaints() -> tuple[str, ...]:
    """Says which readers of others could not be used, and why; nothing where none was asked."""
    return _plug_ins().complaints() if installed.cache_info().currsize else ()


def nothing_found(paths: Sequence[str], location: str, base: str) -> NotACheckpointError:
    """Makes the error for a place where no checkpoint was recognised.

    Args:
        paths: All files that were looked at.
        location: The path as the user typed it.
        base: The folder below it that was looked into; empty for itself.
    """
    inside = [path for path in paths if not base or path.startswith(f"{base}/")]
    there = ", ".join(map(str, grouped(inside, base=base)))
    found = (
        f"no checkpoint of a known format lies here, but {there}" if there else "no file is here"
    )
    expected = "; ".join(f"{name}: {what}" for name, what in EXPECTED.items())
    return NotACheckpointError(
        "; ".join([found, *complaints()]),
        where=posixpath.join(location, base) if base else location,
        hint=f"give a directory with one of these, or one up to {SEARCH_DEPTH - 1} above it:"
        f" {expected}",
    )


def _plug_ins() -> PlugIns:
    return installed(frozenset(reader.name for reader in READERS))


def _recognised(readers: Sequence[CheckpointReader], paths: Sequence[str]) -> list[Candidate]:
    found: list[Candidate] = []
    left = list(paths)
    for reader in readers:
        found += reader.find(left)
        taken = {path for candidate in found for path in candidate.files}
        left = [path for path in left if path not in taken]
    return found


def parsing_bytes(source: Source, candidate: Candidate) -> int:
    """Estimates the memory that parsing a candidate takes at its peak, in bytes."""
    indexes = [(path, _PARSING_FACTORS.get(posixpath.basename(path))) for path in candidate.files]
    return sum(factor * source.stat(path).size_bytes for path, factor in indexes if factor)


def read_index(source: Source, candidate: Candidate) -> TensorIndex:
    """Parses a candidate with the reader that recognised it.

    Returns:
        The index, its file paths relative to the root of the source.

    Raises:
        InputError: If its headers are damaged, hostile or not modelled.
    """
    known = (reader for reader in READERS if reader.name == candidate.format)
    reader = next(known, None) or _plug_in(candidate.format)
    return reader.read_index(source, candidate)


def _plug_in(name: str) -> CheckpointReader:
    return next(reader for reader in _plug_ins().readers if reader.name == name)
