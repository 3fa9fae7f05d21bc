"""Files of ranks of Megatron-LM with any content: an index comes out, or one of our errors."""

from __future__ import annotations

import argparse
import math
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.others.megatron_ranks import MegatronReader, Parallelism
from tests.property.examples import examples

NAMES = st.sampled_from(
    [
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.bias",
        "decoder.layers.0.mlp.experts.linear_fc2.weight3",
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
        "decoder.layers.0.self_attention.linear_kv_up_proj.weight",
        "module.decoder.layers.0.input_layernorm.weight",
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.layers.0._extra_state",
        "a",
        "",
    ]
)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.lists(st.integers(0, 4), max_size=3).map(torch.zeros),
    st.sampled_from([None, 3, "x", {}, [torch.zeros(1)]]),
)
MODELS = st.dictionaries(NAMES, VALUES, max_size=6)
SIZES = st.sampled_from([None, 0, 1, 2, 3, -1, 10**9, "2", True])
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "num_layers",
            "untie_embeddings_and_output_weights",
        ),
        SIZES,
    ),
)
FOLDERS = st.sampled_from(
    ["mp_rank_00", "mp_rank_01", "mp_rank_00_000", "mp_rank_00_001", "mp_rank_00_000_001"]
)
STATES = st.fixed_dictionaries(
    {},
    optional={
        "model": MODELS,
        "model0": MODELS,
        "model1": MODELS,
        "iteration": st.sampled_from([7, 8, None, "7"]),
        "checkpoint_version": st.sampled_from([3.0, 1.0, None, "x"]),
        "args": ARGUMENTS.map(lambda values: argparse.Namespace(**values)),
    },
)


def read(files: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, "iter_0000007", name, "model_optim_rng.pt")
            path.parent.mkdir(parents=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                torch.save(content, path)
        with suppress(CkptkitError):
            assert ckptkit.inspect(folder).format == "megatron"


@settings(max_examples=examples(150), deadline=None)
@given(st.dictionaries(FOLDERS, STATES, min_size=1, max_size=4))
def test_any_states_give_an_index_or_our_errors(files: dict[str, Any]) -> None:
    read(files)


@settings(max_examples=examples(200), deadline=None)
@given(STATES, st.lists(FOLDERS, min_size=1, max_size=4, unique=True))
def test_equal_states_give_an_index_or_our_errors(state: Any, folders: list[str]) -> None:
    read(dict.fromkeys(folders, state))


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(FOLDERS, st.binary(max_size=300), min_size=1, max_size=2))
def test_any_bytes_give_our_errors(files: dict[str, bytes]) -> None:
    read(files)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_names_are_passed_over_or_recognised(step: str, folder: str) -> None:
    for path in (f"{step}/{folder}/model_optim_rng.pt", f"{step}/mp_rank_{folder}"):
        for found in MegatronReader().find([path]):
            assert found.files == (path,)
            assert path.startswith(found.folder)


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("iter_7/mp_rank_00/model_optim_rng.pt", "iter_7"),
        ("mp_rank_00_001_002/model_optim_rng.pt", ""),
        ("run/iter_7/mp_rank_100_1000/model_optim_rng.pt", "run/iter_7"),
        ("iter_7/mp_rank_000/model_optim_rng.pt", "iter_7/mp_rank_000"),
        ("model_optim_rng.pt", ""),
        ("iter_7/mp_rank_00/model.pt", None),
    ],
)
def test_files_are_grouped_by_the_folder_of_their_step(path: str, folder: str | None) -> None:
    found = MegatronReader().find([path])
    assert [candidate.folder for candidate in found] == ([] if folder is None else [folder])


@given(*[st.integers(1, 6)] * 4)
def test_every_part_has_a_file_and_no_two_have_the_same(
    expert_tensor: int, times: int, expert: int, stages: int
) -> None:
    sizes = Parallelism(expert_tensor * times, stages, expert, expert_tensor)
    positions = list(sizes.positions())
    assert len(positions) == len(set(positions)) == stages * sizes.period
    assert sizes.period == math.lcm(sizes.tensor, expert * expert_tensor)
    assert {p.tensor for p in positions} == set(range(sizes.tensor))
    of_experts = {(p.tensor % expert_tensor, p.expert, p.stage) for p in positions}
    assert len(of_experts) == expert_tensor * expert * stages
