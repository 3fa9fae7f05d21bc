"""Adapters out of checkpoints that real runs of PEFT, TRL and ckptkit left, against PEFT's own.

Beside each checkpoint lies what PEFT itself made of the live model when it was saved: its adapter,
that adapter's configuration, and the merged model.
"""

from __future__ import annotations

import gc
import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckptkit
import ckptkit_cli._program
import ckptkit_cli.main
from ckptkit.adapters.extract import run_extraction
from ckptkit.adapters.sources import AdapterRequest
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import IncompleteCheckpointError, RefusedError
from ckptkit.integrations.checkpointers import export_into
from ckptkit.storage.local.target import SharedTarget
from ckptkit.training import Checkpointer
from ckptkit_cli.inspect import InspectArguments, next_step
from tests.live_truth import refuse
from tests.sampled import sampled
from tests.small_adapters import assert_same

pytestmark = [
    pytest.mark.xdist_group("adapter_real_runs"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Case:
    """One adapter of a checkpoint.

    Attributes:
        folder: The fixture.
        adapter: Which of its adapters; empty where it has but one.
        is_ours: Whether ckptkit's training hooks saved it, so that it needs no option.
    """

    folder: str
    adapter: str = ""
    is_ours: bool = False

    @property
    def home(self) -> Path:
        return FIXTURES / self.folder

    @property
    def source(self) -> Path:
        return self.home / "checkpoint"

    @property
    def truth(self) -> dict[str, torch.Tensor]:
        return load_file(self.home / f"adapter{self._end}_truth.safetensors")

    @property
    def config(self) -> Path:
        return self.home / f"adapter{self._end}_config.json"

    @property
    def request(self) -> AdapterRequest:
        return AdapterRequest(
            adapter=self.adapter or None, config=None if self.is_ours else self.config
        )

    @property
    def _end(self) -> str:
        return f"_{self.adapter}" if self.adapter not in {"", DEFAULT} else ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.folder, self.adapter)))


CASES = (
    Case("peft_fsdp2"),
    Case("peft_fsdp2_dora_bf16"),
    Case("peft_fsdp2_modules_and_tokens"),
    Case("peft_fsdp2_two_adapters", DEFAULT),
    Case("peft_fsdp2_two_adapters", "second"),
    Case("peft_fsdp2_adapter_bin"),
    Case("peft_fsdp1_orig"),
    Case("peft_fsdp1_flat"),
    Case("peft_trl_fsdp2"),
    Case("peft_trl_fsdp2_ckptkit", is_ours=True),
    Case("peft_checkpointer", DEFAULT, is_ours=True),
    Case("peft_checkpointer", "second", is_ours=True),
    Case("peft_qlora_fsdp2"),
    Case("peft_qdora_fsdp2_ckptkit", is_ours=True),
)
QUICK = (  # one of each kind, the others are in `make test-slow`
    *("peft_fsdp2_dora_bf16", "peft_fsdp2_modules_and_tokens", "peft_fsdp2_two_adapters-second"),
    *("peft_fsdp2_adapter_bin", "peft_fsdp1_flat", "peft_checkpointer-default"),
    *("peft_trl_fsdp2", "peft_qlora_fsdp2"),
)


def config_in(path: Path) -> dict[str, Any]:
    """Returns an adapter's configuration; PEFT writes the targets in any order."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found | {"target_modules": sorted(found["target_modules"])}


@pytest.mark.parametrize("case", sampled(CASES, QUICK, str), ids=str)
@pytest.mark.quick("peft_fsdp1_flat", "peft_trl_fsdp2")
def test_what_is_extracted_is_what_peft_would_have_saved_and_loads_in_it(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(case.home)  # PEFT looks for the base where the configuration says
    run_extraction(case.source, tmp_path / "out", case.request)
    truth = case.truth
    assert_same(load_file(tmp_path / "out/adapter_model.safetensors"), truth)
    assert config_in(tmp_path / "out/adapter_config.json") == config_in(case.config)

    base = AutoModelForCausalLM.from_pretrained(case.home / "base")
    model = PeftModel.from_pretrained(base, tmp_path / "out", autocast_adapter_dtype=False)
    assert_same(get_peft_model_state_dict(model), truth)
    del base, model
    gc.collect()


def places(source: Path) -> dict[str, Any]:
    """Returns the index of a checkpoint, which tells where each tensor lies."""
    with open_checkpoint(source) as checkpoint:
        index = checkpoint.index
        found: dict[str, Any] = {}
        for entry in index.of_part("model"):
            records = [chunk.record for chunk in entry.chunks]
            found[entry.name] = [
                (
                    index.files[int(index.records.file[at])].path,
                    int(index.records.start[at]),
                    int(index.records.stop[at]),
                )
                for at in records
            ]
    return found


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.folder != "peft_fsdp2_adapter_bin"], ids=str
)
@pytest.mark.quick("peft_checkpointer-default", "peft_fsdp1_flat", "peft_qlora_fsdp2")
def test_the_bytes_of_the_base_are_not_read(case: Case, tmp_path: Path) -> None:
    source = tmp_path / "run"
    shutil.copytree(case.source, source)
    wrecked = 0
    for name, records in places(source).items():
        if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
            continue
        if name in case.truth:  # in the dialect of files whole modules have plain names
            continue
        for path, start, stop in records:
            with (source / path).open("r+b") as file:
                file.seek(start)
                file.write(b"\xff" * (stop - start))
            wrecked += 1
    run_extraction(source, tmp_path / "out", case.request)
    assert_same(load_file(tmp_path / "out/adapter_model.safetensors"), case.truth)
    assert wrecked or case.folder == "peft_trl_fsdp2"


ADVISED = [case for case in CASES if case.adapter in {"", DEFAULT}]  # the first one is named
ADVISED_QUICKLY = ("peft_fsdp1_flat", "peft_checkpointer-default", "peft_qlora_fsdp2")


def typed(command: str, case: Case, out: Path) -> list[str]:
    """Returns a command as a user would type it, with paths in the place of words."""
    put = {"OUT": str(out), "FILE": str(case.config), "ORG/NAME": str(case.home / "base")}
    words = shlex.split(command)
    assert words.pop(0) == "ckptkit"
    return [put.get(word, word) for word in words]


def advice_of_inspect(case: Case) -> set[str]:
    step = next_step(ckptkit.inspect(case.source), InspectArguments(str(case.source)))
    return {step.command, *re.findall("`(.*?)`", step.remark)}


def advice_of_consolidate(case: Case) -> set[str]:
    caught = refuse("belongs to an adapter of PEFT", case.source, "OUT", kind=RefusedError)
    assert "--names live" in caught.value.hint
    return set(re.findall("`(.*?)`", caught.value.hint))


@pytest.mark.parametrize("case", sampled(ADVISED, ADVISED_QUICKLY, str), ids=str)
@pytest.mark.quick("peft_fsdp1_flat")
def test_inspect_and_consolidate_name_commands_that_work_as_typed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckptkit_cli.main, "end_on_signals", lambda: None)
    monkeypatch.setattr(ckptkit_cli._program, "raise_on_signals", lambda: None)
    advice = sorted(advice_of_inspect(case))
    assert sorted(advice_of_consolidate(case)) == advice
    assert [command.split()[2] for command in advice] == ["extract", "merge"]
    if case.is_ours:
        allowed = {"--adapter"} if case.adapter else set()
        assert set(re.findall(r"--[a-z-]+", " ".join(advice))) == allowed

    extract, merge = (typed(command, case, tmp_path / command.split()[2]) for command in advice)
    assert ckptkit_cli.main.main([*extract, "--quiet"]) == 0
    assert_same(load_file(tmp_path / "extract/adapter_model.safetensors"), case.truth)
    matching = [] if case.folder.startswith("peft_q") else ["--match-peft"]
    assert ckptkit_cli.main.main([*merge, "--quiet", *matching]) == 0
    truth = load_file(case.home / "merged_truth.safetensors")
    assert_same(load_file(tmp_path / "merge/model.safetensors"), truth)

    of_peft = ckptkit.inspect(tmp_path / "extract")
    assert of_peft.adapter is not None
    assert of_peft.adapter.is_ready
    again = next_step(of_peft, InspectArguments(str(tmp_path / "extract")))
    assert "this folder has the names of PEFT's files" in again.remark
    words = typed(again.command, case, tmp_path / "again")
    assert ckptkit_cli.main.main([*words, "--quiet", *matching]) == 0
    if json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"]:
        assert torch.equal(truth.pop("lm_head.weight"), truth["model.embed_tokens.weight"])
    assert_same(load_file(tmp_path / "again/model.safetensors"), truth)


@pytest.mark.parametrize(
    ("layout", "active"),
    [("accelerate", DEFAULT), ("trainer", DEFAULT), ("trainer", "second")],
)
@pytest.mark.quick("trainer-second")
def test_where_storage_takes_no_ranges_the_command_makes_the_folder_of_the_adapter(
    layout: Literal["accelerate", "trainer"],
    active: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ckptkit_cli.main, "end_on_signals", lambda: None)
    monkeypatch.setattr(ckptkit_cli._program, "raise_on_signals", lambda: None)
    monkeypatch.setattr(SharedTarget, "why_no_ranges", lambda _: "it takes no ranges")
    base = AutoModelForCausalLM.from_pretrained(FIXTURES / "peft_trl_fsdp2/base")
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.set_adapter(active)
    out = tmp_path / "out"
    out.mkdir()
    with Checkpointer(tmp_path / "run", layout=layout) as checkpointer:
        export_into(checkpointer, out, model, is_first=True)
        with pytest.raises(RefusedError, match="with the numbers that it has"):
            export_into(checkpointer, tmp_path / "cast", model, is_first=True, dtype="bfloat16")
    (told,) = re.findall(r"the model was written in shards; run (ckptkit .*)", caplog.text)
    words = shlex.split(told)
    assert words[:3] == ["ckptkit", "adapter", "extract"]
    assert words[4:] == [str(out), "--adapter", active]
    facts = ckptkit.inspect(words[3]).adapter
    assert facts is not None
    assert facts.names == (DEFAULT, "second")
    assert ckptkit_cli.main.main(words[1:]) == 0
    model.save_pretrained(tmp_path / "peft", selected_adapters=[active])
    theirs = tmp_path / "peft" / ("" if active == DEFAULT else active)
    assert_same(
        load_file(out / "adapter_model.safetensors"),
        load_file(theirs / "adapter_model.safetensors"),
    )
    assert config_in(out / "adapter_config.json") == config_in(theirs / "adapter_config.json")


def test_an_adapter_that_peft_saved_empty_is_refused_with_what_happened(tmp_path: Path) -> None:
    case = Case("peft_fsdp1_empty")
    with pytest.raises(IncompleteCheckpointError, match="only the optimizer's moments") as caught:
        run_extraction(case.source, tmp_path / "out", case.request)
    assert "FSDP1" in caught.value.hint
    assert "--allow-untrained" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_an_empty_adapter_is_taken_for_one_that_changes_nothing_where_that_is_allowed(
    tmp_path: Path,
) -> None:
    case = Case("peft_fsdp1_empty")
    out, base = tmp_path / "out", FIXTURES / "peft_fsdp1_empty" / "base"
    with pytest.raises(RefusedError, match="does not show how it was configured"):
        ckptkit.extract_adapter(case.source, out, allow_untrained=True)
    config = FIXTURES / "peft_fsdp1_empty" / "adapter_config.json"
    ckptkit.extract_adapter(case.source, out, allow_untrained=True, adapter_config=config)
    assert load_file(out / "adapter_model.safetensors") == {}
    assert ckptkit.verify(out).problems == ()
    with pytest.warns(UserWarning, match="missing adapter keys"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    plain = AutoModelForCausalLM.from_pretrained(base)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)

    with pytest.raises(IncompleteCheckpointError, match="no model tensor at all") as caught:
        ckptkit.merge_adapter(out, tmp_path / "no", base=base)
    assert "--allow-untrained" in caught.value.hint
    notes: list[str] = []
    ckptkit.merge_adapter(
        out,
        tmp_path / "merged",
        base=base,
        allow_untrained=True,
        listener=lambda event: notes.extend(getattr(event, "notes", ())),
    )
    assert any("has no tensor" in note for note in notes)
    assert_same(
        load_file(tmp_path / "merged" / "model.safetensors"), load_file(base / "model.safetensors")
    )
