"""What a conversion computes on the way to disk is computed by transformers, and the same."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.conversion import names_on_disk as naming
from ckptkit.conversion import naming_program
from ckptkit.conversion.names_on_disk import find_disk_names
from ckptkit.conversion.naming_program import NamingProgram
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import NoSpaceError, RefusedError
from ckptkit.core.index import Fqn
from ckptkit.hub_names.disk_tensors import (
    Computation,
    NamingRequest,
    names_from_json,
    names_to_json,
)
from ckptkit.options import ConsolidateRequest, Resources
from tests.live_truth import refuse

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import conversion_mapping  # noqa: E402

from ckptkit.hub_names.transformers.answers import answer_names  # noqa: E402
from ckptkit.training import Checkpointer  # noqa: E402
from tests.command_line import ENTRIES, answer_question  # noqa: E402
from tests.made_up_conversions import register  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*process group.*", "ignore:.*single process.*")
WITH_MADE_UP = (
    f"import sys; sys.path[:] = [*{{!r}}, {str(ROOT)!r}]; import tests.made_up_conversions as m;"
    " m.register(); from ckptkit.hub_names.transformers.program import {}; {}()"
)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
}
HEAD_BYTES = 2 * 2 * 40 * 16


@pytest.fixture(params=["here"])
def asked(request: pytest.FixtureRequest) -> str:
    """Which process is asked for names: this one saves the imports of another."""
    return str(request.param)


@pytest.fixture(autouse=True)
def made_up(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the conversions here, and in the programs that are started."""
    start = NamingProgram.ask

    def ask_here(program: NamingProgram, question: bytes) -> Future[bytes]:
        if naming_program._PROGRAM != WITH_MADE_UP or program._entry not in ENTRIES:
            return start(program, question)
        future: Future[bytes] = Future()
        future.set_result(answer_question(program._entry, question))
        return future

    if asked == "here":
        monkeypatch.setattr(NamingProgram, "ask", ask_here)
    monkeypatch.setattr(naming_program, "_PROGRAM", WITH_MADE_UP)
    monkeypatch.setattr(naming, "ask_transformers", lambda request, *_: answer_names(request))
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")  # fills the cache
    cached = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setattr(
        conversion_mapping, "_checkpoint_conversion_mapping_cache", dict(cached or {})
    )
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
    register()


@pytest.fixture
def model() -> Any:
    torch.manual_seed(3)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES)).bfloat16()


@pytest.fixture
def source(model: Any, tmp_path: Path) -> Path:
    dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "source", no_dist=True)
    model.config.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize(
    "asked", ["here", pytest.param("a program", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.slow
def test_what_is_computed_is_what_save_pretrained_computes(
    asked: str,
    model: Any,
    source: Path,
    tmp_path: Path,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # nothing was answered before
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    model.save_pretrained(tmp_path / "reference")
    expected = load_file(tmp_path / "reference" / "model.safetensors")
    assert expected["model.layers.1.self_attn.kv_total"].dtype == torch.float32
    assert torch.equal(expected["lm_head.weight"], model.lm_head.weight / 2)

    job = ConversionJob(source, tmp_path / "out", ConsolidateRequest())
    with job.plan_output() as planned_output:
        planned = list(planned_output.plan.notes)
    notes: list[str] = []
    manifest = ckptkit.consolidate(
        source,
        tmp_path / "out",
        max_shard_size="3KB",
        listener=lambda event: notes.extend(getattr(event, "notes", ())),
    )

    ours = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    assert ours.keys() == expected.keys() == manifest.tensors.keys()
    for name, tensor in expected.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert ckptkit.verify(tmp_path / "out").problems == ()
    said = (
        f"3 groups of tensors are converted as a whole by transformers {transformers.__version__}"
    )
    assert [note for note in notes if note.startswith(said)]
    assert notes[0].endswith(f"the largest takes {HEAD_BYTES:,} bytes of memory")
    assert notes == planned
    # One converts, and one compares names with the model.
    assert len(started) == (1 if asked == "here" else 2)
    assert all(process.returncode is not None for process in started)
    assert list(temporary.iterdir()) == []


def test_memory_that_holds_no_group_is_refused_beforehand(source: Path, tmp_path: Path) -> None:
    from ckptkit.conversion.names_on_disk import reserve_for_conversions
    from ckptkit.core.threads import memory_in_use_bytes
    from ckptkit.engine.executor import WORKER_BYTES

    allowed = memory_in_use_bytes() + WORKER_BYTES + (64 << 20)
    assert reserve_for_conversions(Resources(), 1 << 40) == Resources()
    left = reserve_for_conversions(Resources(memory_limit_bytes=allowed), 1 << 20)
    assert left.memory_limit_bytes == allowed - (1 << 20)
    with pytest.raises(NoSpaceError, match="converts as a whole takes 1,099,511,627,776") as caught:
        reserve_for_conversions(Resources(memory_limit_bytes=allowed), 1 << 40)
    assert caught.value.where == "--memory-limit"
    assert "--names live" in caught.value.hint
    refuse(None, source, tmp_path / "out", kind=NoSpaceError, memory_limit="20MB")


def test_a_conversion_that_fails_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming_program, "_PROGRAM", "roots = {!r}; import os; os._exit(7)")
    caught = refuse("status 7", source, tmp_path / "out", kind=RefusedError)
    assert caught.value.where.startswith("tensor ")
    assert not (tmp_path / "out").exists()


def test_a_program_that_ends_before_it_is_asked_is_refused_as_well(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = naming_program._exchange

    def exchange_late(process: subprocess.Popen[bytes], *others: Any) -> None:
        process.wait(60)
        exchange(process, *others)

    monkeypatch.setattr(naming_program, "_PROGRAM", "roots = {!r}; import os; os._exit(7)")
    monkeypatch.setattr(naming_program, "_exchange", exchange_late)
    refuse("status 7", source, tmp_path / "out", kind=RefusedError)


def test_half_of_a_group_is_refused(source: Path, tmp_path: Path) -> None:
    refuse("left out", source, tmp_path / "out", kind=RefusedError, exclude=["*.k_proj.*"])


def test_names_survive_the_way_and_adapters_are_refused_there(source: Path) -> None:
    config = json.loads((source / "config.json").read_bytes())
    names = answer_names(NamingRequest(config, None))
    assert names_from_json(json.loads(json.dumps(names_to_json(names)))) == names
    attention = Fqn("model.layers.0.self_attn.")
    total = names.tensors[Fqn(f"{attention}kv_total")]
    projections = (Fqn(f"{attention}k_proj.weight"), Fqn(f"{attention}v_proj.weight"))
    assert total.computed == Computation(BY_NAME["float32"], projections)
    with pytest.raises(RefusedError, match="on disk is computed from") as caught:
        find_disk_names(config, None)
    assert "--names live" in caught.value.hint


def test_an_export_names_what_makes_the_rest(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.export(tmp_path / "live", state={"model": model}).result(60)
    assert "computes tensor" in caplog.text
    assert "`ckptkit consolidate` makes" in caplog.text
    assert load_file(tmp_path / "live" / "model.safetensors").keys() == model.state_dict().keys()


@pytest.mark.slow
def test_what_is_computed_is_computed_of_each_source_of_an_average(
    model: Any, source: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    with torch.no_grad():
        model.lm_head.weight += 1
    dcp.save(dict(model.state_dict()), checkpoint_id=other, no_dist=True)
    model.config.save_pretrained(other)
    for name in ("source", "other"):
        ckptkit.consolidate(tmp_path / name, tmp_path / f"{name} alone")
    ckptkit.average([source, other], tmp_path / "out")
    alone = [load_file(tmp_path / f"{n} alone" / "model.safetensors") for n in ("source", "other")]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == alone[0].keys()
    assert found["model.layers.1.self_attn.kv_total"].dtype == torch.float32
    assert not torch.equal(found["lm_head.weight"], alone[0]["lm_head.weight"])
    for name, tensor in found.items():
        mean = (alone[0][name].float() + alone[1][name].float()) / 2
        assert torch.equal(tensor, mean.to(tensor.dtype))
