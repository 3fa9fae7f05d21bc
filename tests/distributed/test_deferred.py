"""Models of `defer_weights`: filled by each rank under the Trainer and accelerate, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("deferred_run.py")
CHECKS = (
    "models",
    "heads",
    "accelerate",
    "adapters",
    "methods",
    "evaluating",
    "page",
    "resuming",
    "refusing",
    "leaving",
)
KINDS = ("fsdp1", "fsdp2")
Found = dict[str, list[str]]


@pytest.fixture(scope="module")
def found(run_ranks: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What all checks found, by the kind of FSDP; the log is at `log`."""
    by_kind: Found = {"log": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        for kind in KINDS:
            folder = tmp_path_factory.mktemp(kind)
            # The ranks of the other kind are forks, which share what they import.
            words, by_torchrun = (folder, kind, *CHECKS), kind == "fsdp2"
            done = run_ranks(SCRIPT, 2, *words, status=None, torchrun=by_torchrun)
            output = f"{done.stdout}{done.stderr}"  # type: ignore[attr-defined]
            by_kind[kind] = re.findall(rf"^FOUND {kind} (.*?) *$", output, re.MULTILINE)
            by_kind["log"].append(output)
            missing = [check for check in CHECKS if f"{check} done" not in by_kind[kind]]
            assert not missing, f"{kind} {missing}: {output[-8_000:]}"
    return by_kind


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *product(KINDS, ("plain", "tied", "mixed", "experts")),
        ("fsdp1", "fused"),
        ("fsdp2", "half"),
    ],
)
def test_training_begins_and_ends_as_without_deferring(kind: str, case: str, found: Found) -> None:
    assert f"{case} [] True" in found[kind]


def test_it_equals_loading_on_one_rank_and_sending_it(found: Found) -> None:
    assert "efficient [] True" in found["fsdp2"]


@pytest.mark.parametrize("kind", KINDS)
def test_new_heads_are_those_of_the_stock_way_and_of_rank_0(kind: str, found: Found) -> None:
    assert "head [] True" in found[kind]
    assert "unlike heads []" in found[kind]
    assert "other sizes []" in found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_prepares_a_deferred_model_with_its_optimizer(kind: str, found: Found) -> None:
    assert "accelerate [] True" in found[kind]
    assert kind == "fsdp2" or "flat []" in found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_are_added_in_the_block_keep_their_values(kind: str, found: Found) -> None:
    assert "adapters [] True" in found[kind]
    assert "adapters resumed []" in found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_are_no_modules_keep_their_values(kind: str, found: Found) -> None:
    assert "lora of parameters [] True" in found[kind]
    assert "loha of parameters [] True" in found[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["pissa", "olora", "dora", "modules_to_save", "trained tokens"])
def test_adapters_that_need_the_weights_are_refused_at_once(
    kind: str, name: str, found: Found
) -> None:
    pattern = rf"refused {name} UnsupportedError .*from weights that are deferred"
    assert any(re.match(pattern, line) for line in found[kind]), found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluating_before_training_is_as_without_deferring(kind: str, found: Found) -> None:
    assert f"evaluated {2 if kind == 'fsdp1' else 1} True" in found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_nothing_would_fill_gets_no_memory(kind: str, found: Found) -> None:
    assert "by hand []" in found[kind]
    assert any(re.match("not prepared UnsupportedError memory on cpu", x) for x in found[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_the_documentation_runs(kind: str, found: Found) -> None:
    assert "page 1 2" in found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_resumed_without_reading_the_base(kind: str, found: Found) -> None:
    assert "resumed [] 0" in found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_changed_is_refused(kind: str, found: Found) -> None:
    lines = "\n".join(found[kind])
    assert re.search(r"resized LoadError .*were changed.*embed_tokens.weight", lines)
    assert re.search(r"adapter LoadError .*lora_A", lines)
    assert re.search(r"changed SourceChangedError .*changed after from_pretrained", lines)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", ["rows", "merged", "drawn", "scaled", "cast", "replaced"])
def test_an_edit_of_weights_that_are_not_there_is_refused(
    kind: str, edit: str, found: Found
) -> None:
    pattern = rf"edited {edit} LoadError .*parameters were changed while their weights"
    assert any(re.match(pattern, line) for line in found[kind]), found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_deferred_is_loaded_as_usual(kind: str, found: Found) -> None:
    for case in ("bin", "variant", "renamed", "placed"):
        assert f"{case} True" in found[kind]
    log = "\n".join(found["log"])
    assert "loaded as without ckptkit: its files are not safetensors" in log
    assert "loaded as without ckptkit: key_mapping is given" in log
    assert "it is not known where its weights are" in log


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_deferred_on_one_rank_only_are_refused(kind: str, found: Found) -> None:
    lines = "\n".join(found[kind])
    assert re.search(r"one LoadError .*a rank has no model on the meta device", lines)
