"""Readers of checkpoints of several files: one file of a fixture is changed, the others are whole.

An input begins with two bytes, which choose the fixture and the file; the rest is the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random

from ckptkit.formats.base import Candidate
from ckptkit.formats.registry import READERS, _find_defect, describe_missing_files, recognise
from ckptkit.storage.overlay import MemorySource
from tests.campaigns.fuzz.judge import Target
from tests.campaigns.fuzz.mutation import by_name
from tests.campaigns.fuzz.seeds import files_of

_HEAD = 2
_LARGEST = 40 << 10


@dataclass(frozen=True)
class _Case:
    """A checkpoint of which one file is changed; `names` are those that are worth it."""

    fixture: str

    @property
    def files(self) -> dict[str, bytes]:
        return files_of(self.fixture)

    @cached_property
    def names(self) -> list[str]:
        """The files that are changed: of those with equal names but for numbers, two."""
        kinds: dict[str, list[str]] = {}
        inside = {path for one in self._candidates for path in one.files}
        for path, data in self.files.items():
            is_beside = path.endswith((".json", ".yaml", ".txt")) or "/" not in path
            if (path in inside or is_beside) and len(data) <= _LARGEST:
                kind = "".join(c for c in path.rpartition("/")[2] if not c.isdigit())
                kinds.setdefault(kind, []).append(path)
        return sorted(path for paths in kinds.values() for path in paths[:2])[:250]

    @cached_property
    def _candidates(self) -> list[Candidate]:
        return recognise(list(self.files))

    def read(self, name: str, data: bytes) -> None:
        source = MemorySource({**self.files, name: data})
        for candidate in self._candidates:
            near = name in candidate.files or len(self._candidates) == 1
            if not near and not name.startswith(candidate.folder):
                continue
            reader = next(one for one in READERS if one.name == candidate.format)
            index = reader.read_index(source, candidate)
            describe_missing_files(index)
            defect = _find_defect(index)
            if defect:
                raise AssertionError(f"the index has {defect}")


@cache
def _cases(names: tuple[str, ...]) -> list[_Case]:
    return [_Case(name) for name in names]


def _target(name: str, fixtures: Sequence[str], share: int = 2) -> Target:
    names = tuple(fixtures)

    def choose(data: bytes) -> tuple[_Case, str]:
        head = data[:_HEAD].ljust(_HEAD, b"\0")
        case = _cases(names)[head[0] % len(names)]
        return case, case.names[head[1] % len(case.names)]

    def run(data: bytes) -> None:
        case, path = choose(data)
        case.read(path, data[_HEAD:])

    def seeds() -> list[bytes]:
        return [
            bytes([number, place]) + case.files[path]
            for number, case in enumerate(_cases(names))
            for place, path in enumerate(case.names)
        ]

    def mutate(rng: Random, data: bytes) -> bytes:
        head = data[:_HEAD].ljust(_HEAD, b"\0")
        _, path = choose(data)
        return head + by_name(path)(rng, data[_HEAD:])

    # The other files of the fixture are parsed too, so that memory is not that of the input alone.
    return Target(name, run, seeds, mutate, share=share, free_bytes=8 << 20, most_bytes=_LARGEST)


TARGETS = (
    _target(
        "zero",
        ("zero1_bf16", "zero0_bf16", "zero3_bf16", "zero1_adam_one_rank", "zero3_adam_one_rank"),
    ),
    _target("universal", ("universal_small_zero1", "universal_small_zero3")),
    _target(
        "rank-files",
        (
            *("rank_files_torch_2_9", "rank_files_local_orig", "rank_files_local_flat"),
            *("rank_files_tensor_parallel", "verl_one_rank", "fairscale_pair", "fairscale_apart"),
            *("fairscale_fairseq", "rank_files_placements"),
        ),
    ),
    _target(
        "torch-files",
        (
            *("torch_nested", "torch_legacy", "torch_legacy_training", "torch_bin_tied"),
            *("lightning_hyperparameters", "torch_dtypes_and_layouts", "torch_bin_sharded"),
        ),
    ),
    _target(
        "dcp",
        (
            *("dcp_images_grid", "dcp_zstd_grid", "fsdp1_no_shard_flat", "fsdp2_extra_state"),
            *("fsdp2_without_checksums", "accelerate_fsdp2_tied_with_config"),
        ),
    ),
    _target("safetensors", ("hf_tied", "hf_sharded", "dcp_hf_grid", "dcp_hf_two_files")),
    _target(
        "torchsnapshot",
        (
            *("torchsnapshot_rank_models", "torchsnapshot_odd_bfloat16", "torchsnapshot_dtensor"),
            "torchsnapshot_chunked",
        ),
    ),
    _target("meta", ("meta_llama_3_one_file", "meta_llama_1", "meta_llama_2", "meta_llama_3")),
    _target("nanotron", ("nanotron_0_2_tp2", "nanotron_qwen2_tp2", "nanotron_qwen2_moe")),
    _target("megatron", ("megatron_model_gemma3", "megatron_ranks_llama_tp2_pp2")),
    _target(
        "torch-checkpointing",
        ("torch_checkpointing", "torch_checkpointing_safetensors", "torch_experimental"),
    ),
)
