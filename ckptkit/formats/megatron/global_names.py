"""The names of tensors in the whole model; each rank numbers its own layers and experts.

Layers are numbered from 0 on each stage. Of virtual stages, each rank has the parts `model0`,
`model1` and so on; the layers of all stages' `model0` precede those of `model1`. So offsets are the
counts of the layers before, however stages divide them. Of experts, every group has equally many.

Source: megatron/core/transformer/transformer_layer.py (`get_transformer_layer_offset`),
megatron/core/transformer/moe/{moe_layer,experts}.py, Megatron-Core 0.7 to 0.19.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.text import quote
from ckptkit.formats.megatron.model_files import ModelFile, ModelFiles
from ckptkit.formats.parsing import TWO_SAVES, list_first
from ckptkit.formats.pickle.machine import InertObject, class_of
from ckptkit.formats.pickle.objects import find_unread
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import EXTRA_STATE

_WRAPPER = re.compile(r"(?:module\.)+")
_LAYER = re.compile(r"((?:.*\.)?(?:encoder|decoder)\.layers\.)(\d{1,7})(\..+)")
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d{1,7})(\..+)")
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d{1,7})")
_FUSED = re.compile(r".*\.experts\.weight[12]")  # Megatron-Core's own grouped experts
_HEAD = re.compile(r"((?:.*\.)?)output_layer\.weight")
_DECODER, _ENCODER = "decoder.layers.", "encoder.layers."
_LISTED = 3
_Counts = Mapping[tuple[str, int, int], int]  # of layers, by prefix, virtual stage and stage


class LocalTensor(Struct, frozen=True):
    """A tensor as one rank has it."""

    file: ModelFile
    name: str
    tensor: TensorRef
    part: int  # of tensor parallelism, if the tensor is cut
    parts: int
    neighbours: Mapping[str, TensorRef]  # of the same part of the model, by their names in the file


def collect_tensors(files: ModelFiles, where: str) -> tuple[dict[str, list[LocalTensor]], int]:
    """Returns what all ranks have of each tensor, by its name in the whole model."""
    held: dict[tuple[int, int], dict[str, TensorRef]] = {}  # by file and virtual stage
    ignored = 0
    for number, file in enumerate(files.files):
        for virtual, model in enumerate(file.models):
            tensors = _find_tensors(model, file)
            ignored += sum(1 for name in model if isinstance(name, str) and EXTRA_STATE in name)
            held[number, virtual] = tensors
    _check_stages(files, held)
    counts = _count_layers(files, held, where)
    collected: dict[str, list[LocalTensor]] = defaultdict(list)
    sizes = files.parallelism
    for (number, virtual), tensors in held.items():
        file = files.files[number]
        namer = _Namer(files, file, virtual, counts, _count_experts(tensors, file))
        for name, tensor in tensors.items():
            is_expert = _EXPERT.fullmatch(name) is not None
            parts = sizes.expert_tensor if is_expert else sizes.tensor
            part = file.position.tensor % parts
            local = LocalTensor(file, name, tensor, part, parts, tensors)
            collected[namer.rename(name)].append(local)
    return dict(collected), ignored


def _find_tensors(model: Mapping[Any, Any], file: ModelFile) -> dict[str, TensorRef]:
    """Returns the tensors of a state dict, experts named as if each were stored apart."""
    found: dict[str, TensorRef] = {}
    for key, value in model.items():
        if not isinstance(key, str) or EXTRA_STATE in key:
            continue
        unread = find_unread(value)
        if unread is not None:
            raise unread.error(f"{file.archive.where}: {quote(key)}")
        if isinstance(value, InertObject) or _FUSED.fullmatch(key):
            is_object = isinstance(value, InertObject)
            kind = quote(str(class_of(value))) if is_object else "one matrix of experts"
            raise UnsupportedError(
                f"{quote(key)} is held as {kind}, which is not modelled",
                where=file.archive.where,
                hint="save the run in the format 'torch_dist', with plain tensors",
            )
        if not isinstance(value, TensorRef):
            continue
        name = _WRAPPER.sub("", key, count=1) if key.startswith("module.") else key
        grouped = _GROUPED.fullmatch(name)
        if grouped is not None:
            name = f"{grouped[1]}local_experts.{grouped[3]}.{grouped[2]}"
        if name in found:
            raise FormatError(f"two tensors are {quote(name)}", where=file.archive.where)
        found[name] = value
    return found


def _check_stages(files: ModelFiles, held: Mapping[tuple[int, int], Collection[str]]) -> None:
    """Refuses ranks of one stage that have tensors of different names."""
    first: dict[tuple[int, int], tuple[ModelFile, set[str]]] = {}
    for (number, virtual), names in held.items():
        file = files.files[number]
        key = file.position.stage, virtual
        other, expected = first.setdefault(key, (file, set(names)))
        differing = expected ^ set(names)
        if differing:
            shown = list_first(map(quote, sorted(differing)), len(differing), _LISTED)
            raise FormatError(
                f"has other tensors than {other.archive.path!r} of the same stage: {shown}",
                where=file.archive.where,
                hint=TWO_SAVES,
            )


def _count_layers(
    files: ModelFiles, held: Mapping[tuple[int, int], Collection[str]], where: str
) -> _Counts:
    numbers: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for (number, virtual), names in held.items():
        stage = files.files[number].position.stage
        for match in filter(None, map(_LAYER.fullmatch, names)):
            numbers[match[1], virtual, stage].add(int(match[2]))
    for (prefix, _, stage), own in numbers.items():
        _check_numbers(own, f"layers {prefix!r} of stage {stage}", where)
    counts = {key: len(own) for key, own in numbers.items()}
    totals: dict[str, int] = defaultdict(int)
    for (prefix, _, _), count in counts.items():
        totals[prefix] += count
    expected = files.parallelism.layers
    if expected is not None and totals.get(_DECODER, expected) != expected:
        is_alone = _ENCODER not in totals  # else the argument is of the encoder
        if is_alone:
            raise FormatError(
                f"the stages have {totals[_DECODER]} layers, the arguments of the training say"
                f" {expected}",
                where=where,
                hint=TWO_SAVES,
            )
    return counts


def _count_experts(names: Collection[str], file: ModelFile) -> Mapping[str, int]:
    """Returns how many experts each layer has on a rank."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        numbers[match[1]].add(int(match[2]))
    for prefix, own in numbers.items():
        _check_numbers(own, f"experts {prefix!r}", file.archive.where)
    return {prefix: len(own) for prefix, own in numbers.items()}


def _check_numbers(own: Collection[int], what: str, where: str) -> None:
    """Refuses numbers that are not those from 0 on."""
    missing = next((number for number in range(len(own)) if number not in own), None)
    if missing is not None:
        raise FormatError(
            f"of the {what}, number {missing} is missing, {max(own)} is there",
            where=where,
            hint="give the file as Megatron-LM wrote it",
        )


class _Namer(Struct, frozen=True):
    """Makes names in the whole model of those on one rank."""

    files: ModelFiles
    file: ModelFile
    virtual: int
    layers: _Counts
    experts: Mapping[str, int]

    def rename(self, name: str) -> str:
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            number = int(expert[2]) + self.file.position.expert * self.experts[expert[1]]
            name = f"{expert[1]}experts.{number}{expert[3]}"
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            return f"{layer[1]}{int(layer[2]) + self._offset(layer[1])}{layer[3]}"
        head = _HEAD.fullmatch(name)
        if head is not None and self.files.parallelism.is_tied:
            return f"{head[1]}embedding.word_embeddings.weight"
        return name

    def _offset(self, prefix: str) -> int:
        own = self.virtual, self.file.position.stage
        return sum(
            count
            for (other, virtual, stage), count in self.layers.items()
            if other == prefix and (virtual, stage) < own
        )
