"""Expressions of adapters and name maps that take exponential time: refused within seconds."""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CkptkitError, LimitError, UsageError
from ckptkit.core.index import Fqn
from ckptkit.lora import config
from ckptkit.lora.config import LoraSettings, match_expression
from ckptkit.lora.inference import is_target
from ckptkit.name_maps.apply import apply_map
from ckptkit.name_maps.language import parse_map

GENERATIONS = Path(__file__).resolve().parents[2] / "fixtures" / "peft_generations"
ADAPTER = GENERATIONS / "peft_0_21" / "lora" / "adapter_0"
BASE = GENERATIONS / "bases" / "llama"
MODULE = "model.layers.0.self_attn." + "a" * 60 + ".q_proj"
SLOW = ("(a+)+$", "(.*a){20}x", "([a-z]+)*X", r"(\w+\.?)+!", "(a*)*b", ".*.*.*.*.*.*.*.*.*X")
BOUND = {"seconds": 10, "most_bytes": 64 << 20}


@pytest.fixture(scope="module", autouse=True)
def collected() -> None:
    """Collects the clients that earlier tests left.

    These tests fill the stack. If a client is collected then, closing it fails, and a warning says
    that it was left open.
    """
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["(a|a)+b", "(.*a){20}x", "([a-z]+)*X", "(a+)+b"])
def test_the_attack_works_against_re(expression: str) -> None:
    form = rf"(.*\.)?({expression})$"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))"
    code = f"{limit}; import re; print(flush=True); re.match({form!r}, {MODULE!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGXCPU, b"\n"), done.stderr


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives expressions up after a tenth of a second."""
    assert config._MOST_SECONDS == 1
    monkeypatch.setattr(config, "_MOST_SECONDS", 0.1)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("expression", SLOW)
def test_an_expression_is_given_up_in_time(expression: str, bounded: Callable[..., Any]) -> None:
    with bounded(**BOUND), suppress(LimitError):
        assert match_expression(expression, MODULE, r"(.*\.)?({})$") is None


@pytest.mark.usefixtures("soon")
def test_one_that_is_given_up_is_named(bounded: Callable[..., Any]) -> None:
    message = r"\(a\|a\)\+b' takes longer than 0\.1 s"
    with bounded(**BOUND), pytest.raises(LimitError, match=message):
        match_expression("(a|a)+b", MODULE, r"(.*\.)?({})$")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result without an attack. Merging here also does the imports outside of the limits."""
    merged = tmp_path_factory.mktemp("plain") / "merged"
    ckptkit.merge_adapter(ADAPTER, merged, base=BASE)
    return merged


@pytest.mark.parametrize(
    "key", ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"]
)
def test_an_adapter_with_one_is_refused_or_merged_in_seconds(
    key: str, tmp_path: Path, out: Path, plain: Path, bounded: Callable[..., Any]
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(ADAPTER, adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    slow = r"(\w|\w|\.|\.)+!"
    settings[key] = {slow: 4} if key.endswith("pattern") else slow
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with bounded(seconds=60, most_bytes=512 << 20):
        try:
            ckptkit.merge_adapter(adapter, out, base=BASE)
        except CkptkitError:
            assert list(out.parent.iterdir()) == []
            return
    # It matches no module, so that the result is that without it.
    difference = ckptkit.diff(out, plain)
    assert difference.changed == ()
    assert not difference.only_in_a


def test_expressions_of_real_runs_match_as_with_re() -> None:
    names = ["model.layers.3.self_attn.q_proj", "lm_head", "model.vision.blocks.1.mlp.fc1", "a.b"]
    for expression in (
        *(r".*\.(q_proj|v_proj)", r"^(?!.*vision).*(?:q_proj|up_proj).*", "q_proj", ".*_proj"),
        r"model\.layers\.[\d]+\.(mlp|self_attn)\.(up|down|q)_proj",
        r"(?:.*?(?:vision|language).*?(?:mlp|attn).*?(?:fc1|q_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.)",
    ):
        for name in names:
            for form in ("{}", r"(.*\.)?({})$", r"(?:{})\Z"):
                expected = re.match(form.replace("{}", expression), name)
                found = match_expression(expression, name, form)
                assert (found is None) == (expected is None)
                assert found is None or found.groups() == expected.groups()  # type: ignore[union-attr]
        settings = LoraSettings.parse({"target_modules": expression})
        assert is_target(settings, names[0]) is (re.fullmatch(expression, names[0]) is not None)


HEAD = 'name = "x"\nsource = "A"\ntarget = "B"\nmodel_types = ["llama"]\n'
TENSORS = {Fqn("a"): (dtype_named("float32"), (4,))}


def applied(text: str) -> None:
    apply_map(parse_map(text, where="x"), {"n": 4}, TENSORS, where="x")


def test_sizes_that_double_with_each_other_are_computed_once(bounded: Callable[..., Any]) -> None:
    sizes = "".join(f's{i} = "s{i + 1} + s{i + 1} - s{i + 1}"\n' for i in range(60))
    rule = '[[rule]]\nfrom = "a"\nto = "b"\nsteps = [{ split = ["s0"] }]\n'
    with bounded(**BOUND):
        applied(f'{HEAD}[sizes]\n{sizes}s60 = "n"\n{rule}')


def test_sizes_in_a_long_chain_are_refused(bounded: Callable[..., Any]) -> None:
    sizes = "".join(f's{i} = "s{i + 1}"\n' for i in range(3000))
    rule = '[[rule]]\nfrom = "a"\nto = "b"\nsteps = [{ split = ["s0"] }]\n'
    with bounded(**BOUND), pytest.raises(UsageError, match="too many"):
        applied(f'{HEAD}[sizes]\n{sizes}s3000 = "n"\n{rule}')


@pytest.mark.parametrize(
    "rule",
    [
        f'from = "{"(a|b)" * 40}"\nto = "c"\ninverse = "all"',
        f'from = "a"\nto = "{"(a|b)" * 40}"\ninverse = "all"',
        'from = "a"\nto = "b"\nsteps = [{ split = ["' + "(" * 150 + '"] }]',
        'from = "a"\nto = "b"\nsteps = [{ split = ["9 * 9' + " * 9" * 60 + '"] }]',
        'from = "a"\nto = "b"\nsteps = [{ split = ["__import__(1)"] }]',
        'from = "a"\nto = "b"\nsteps = [{ split = ["().__class__"] }]',
        'from = "a"\nto = "b"\nsteps = [{ split = ["2 ** 99999999"] }]',
        f'from = "a"\nto = "b"\nx = {"[" * 5000}{"]" * 5000}',
        pytest.param(f'from = {json.dumps("a" * 500_000 + "*")}\nto = "c"', marks=pytest.mark.slow),
    ],
)
def test_a_rule_that_would_take_forever_is_refused(rule: str, bounded: Callable[..., Any]) -> None:
    with bounded(**BOUND), pytest.raises(CkptkitError):
        applied(f"{HEAD}[[rule]]\n{rule}\n")


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("d{el0h", "d{el0h"),
        ("ab{e}", "abX"),
        ("ab{e}", "ab{e}"),
        (r"a\{e<=1}+", "a{e<=1}"),
        ("a{,2}b", "aab"),
        ("x{e<=1}*", "xq"),
    ],
)
def test_braces_mean_what_they_mean_to_peft(expression: str, name: str) -> None:
    found = match_expression(expression, name, "(?:{})$")
    assert bool(found) == bool(re.match(f"(?:{expression})$", name))
