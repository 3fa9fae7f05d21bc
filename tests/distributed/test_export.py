"""Exports of real training over several processes."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("export_run.py")
KINDS = ("fsdp2", "fsdp1_flat", "fsdp1_orig", "ddp", "llama", "tp")
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(scope="module")
def exported(run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("exported")
    cases = [f"equal:{kind}" for kind in KINDS]
    cases += ["adapter", "there", "different", "stages", "network", "stopped:0", "stopped:1"]
    cases += ["full"] if IS_ROOT else []
    run_ranks(SCRIPT, 2, folder, *cases, "dies:1")
    return folder


def same_as_consolidated(run: Path, out: Path, expected: Path, **options: Any) -> None:
    ckptkit.consolidate(run, expected, **options)
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    for name in names - {"ckptkit.json"}:
        assert (out / name).read_bytes() == (expected / name).read_bytes(), name
    assert ckptkit.verify(out).ok


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_ranks_write_at_once_is_what_a_consolidation_writes(
    kind: str, exported: Path, tmp_path: Path
) -> None:
    case = exported / f"equal_{kind}"
    same_as_consolidated(case / "run", case / "keep", tmp_path / "keep")
    options = {"dtype": "bfloat16", "max_shard_size": "600B"}
    same_as_consolidated(case / "run", case / "bfloat16", tmp_path / "bfloat16", **options)


def test_damage_to_an_exported_file_is_found_by_verify(exported: Path, tmp_path: Path) -> None:
    out = shutil.copytree(exported / "equal_fsdp2/keep", tmp_path / "out")
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    (problem,) = ckptkit.verify(out).problems
    assert problem.code == "digest-mismatch"


def test_stages_of_a_pipeline_are_exported_as_one_model(exported: Path, tmp_path: Path) -> None:
    case = exported / "stages"
    same_as_consolidated(case / "run", case / "keep", tmp_path / "out")
    assert len(load_file(case / "keep/model.safetensors")) == 6


def test_transformers_loads_an_exported_model(exported: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = exported / "equal_llama" / "bfloat16"
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about its own use of transformers
def test_peft_loads_an_exported_adapter(exported: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case = exported / "adapter"
    assert ckptkit.verify(case / "out").ok
    wanted = load_file(case / "expected/adapter_model.safetensors")
    found = load_file(case / "out/adapter_model.safetensors")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    for name in ("adapter_model.safetensors", "adapter_config.json"):  # put together by rank 0
        assert (case / "by_one" / name).read_bytes() == (case / "out" / name).read_bytes()
    assert ckptkit.verify(case / "by_one").ok
    base = AutoModelForCausalLM.from_pretrained(exported / "equal_llama/keep")
    model = PeftModel.from_pretrained(base, case / "out")
    held = model.state_dict()
    name = next(name for name in held if name.endswith("q_proj.lora_A.default.weight"))
    assert torch.equal(held[name], wanted[name.replace(".default", "")])


def test_the_command_that_storage_without_ranges_leaves_makes_the_same_folder(
    exported: Path, tmp_path: Path
) -> None:
    case = exported / "network"
    _, verb, source, out, *options = shlex.split((case / "command").read_text())
    assert (verb, options) == ("consolidate", ["--dtype", "bfloat16"])
    assert not Path(out).exists()
    same_as_consolidated(Path(source), case / "keep", tmp_path / "out")


def test_an_export_that_waited_for_a_stopped_rank_is_what_a_consolidation_writes(
    exported: Path, tmp_path: Path
) -> None:
    for rank in "01":
        case = exported / f"stopped_{rank}"
        same_as_consolidated(case / "run", case / "out", tmp_path / rank)


@pytest.mark.parametrize("kind", ["save", "export", "model"])
def test_a_rank_finds_what_rank_0_has_committed_and_did_not_live_to_tell(
    kind: str, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, f"dies_after_commit:{kind}")
    case = tmp_path / f"dies_after_commit_{kind}"
    assert ckptkit.verify(case / "run/checkpoint-1" if kind == "save" else case / "out").ok


def test_a_rank_that_died_leaves_no_folder(exported: Path) -> None:
    left = [path.name for path in (exported / "dies_1").iterdir()]
    assert left == ["run"]
