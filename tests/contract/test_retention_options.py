"""A rule of retention is an option wherever a run is pruned, also by the process that pushes."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import ckptkit
from ckptkit.integrations.transformers.checkpoints import check_user_options
from ckptkit.options import RetentionOptions
from ckptkit.runs.retention import RETENTION_OPTIONS, SPARED, Retention
from ckptkit.training.pushing import Pushing, program_end
from ckptkit.training.settings import check_options
from ckptkit_cli import watch
from ckptkit_cli._program import make_application, parse_values
from tests.made_up_runs import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "runs.md"
ALL = Retention(**RULES)


def read_by(command: str, words: list[str]) -> dict[str, Any]:
    """Returns the values that a command line has."""
    return make_application().commands[command].make_context(command, words).params


@pytest.mark.parametrize("rule", [name for name in RETENTION_OPTIONS if name != "best_mode"])
def test_each_rule_alone_is_one_by_which_steps_go(rule: str) -> None:
    assert Retention().keeps_all
    assert not Retention(**{rule: RULES[rule]}).keeps_all


def test_each_rule_has_a_value_here_that_is_not_the_usual_one() -> None:
    usual = Retention()
    assert [name for name in RETENTION_OPTIONS if getattr(ALL, name) != getattr(usual, name)] == [
        *RULES
    ]


@pytest.mark.parametrize("name", RETENTION_OPTIONS)
def test_a_rule_is_an_option_of_each_command_and_function_that_prunes(name: str) -> None:
    words = Retention(**{name: RULES[name]}).as_arguments()
    assert read_by("prune", ["RUN", *words])[name] == words[1]
    assert read_by("watch", ["RUN", "--push", "org/name", *words])[name] == words[1]
    assert name in RetentionOptions.__annotations__
    assert name in inspect.signature(ckptkit.prune).parameters
    assert name in inspect.signature(ckptkit.training.Checkpointer).parameters
    assert f"`{words[0]}" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RETENTION_OPTIONS)
def test_a_trainer_refuses_a_rule_and_says_where_it_is_set(name: str) -> None:
    with pytest.raises(ckptkit.UsageError) as caught:
        check_user_options(None, cast("Any", {name: RULES[name]}))
    assert "in the arguments of the Trainer" in caught.value.hint


@pytest.mark.parametrize("name", sorted(SPARED.intersection(RETENTION_OPTIONS)))
def test_the_texts_of_max_total_size_name_each_rule_whose_steps_it_spares(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    options = make_application().commands["prune"].params
    (size,) = [option for option in options if option.name == "max_total_size"]
    (row,) = [line for line in PAGE.read_text().splitlines() if "`--max-total-size SIZE`" in line]
    entry = inspect.cleandoc(ckptkit.prune.__doc__ or "").partition("max_total_size:")[2]
    assert flag in getattr(size, "help", "")
    assert f"`{flag}`" in row
    assert f"`{name}`" in entry.partition("dry_run:")[0]


def test_the_process_that_pushes_prunes_by_the_rules_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pushing, "_start", lambda _: None)
    monkeypatch.setattr(type(program_end()), "add", lambda *_: None)
    settings = check_options({"push_to_hub": "org/name", **RULES})  # type: ignore[typeddict-item]
    run: Any = SimpleNamespace(place=tmp_path, path=tmp_path)
    store: Any = None
    assert settings.hub is not None
    words = Pushing(run, settings.hub, settings.retention, store)._command()
    typed = read_by("watch", words[words.index("watch") + 1 :])
    assert watch._make_request(parse_values(watch._OPTIONS, typed)).retention == ALL
