"""Names and shapes of an output are compared with the model that its configuration describes."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live_truth import refuse

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

import ckptkit  # noqa: E402
from ckptkit.conversion import compare_names as comparing  # noqa: E402
from ckptkit.conversion import naming_program  # noqa: E402
from ckptkit.conversion.naming_program import NamingProgram  # noqa: E402
from ckptkit.core.errors import CkptkitError, RefusedError, UsageError  # noqa: E402
from ckptkit.engine.outcome import BytesWritten, OutputCommitted, Waiting  # noqa: E402
from tests.compared_models import SIZES, State, model_of, trained  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*process group.*", "ignore:.*single process.*")


def refused(src: Path, tmp_path: Path, **options: Any) -> RefusedError:
    before = sorted(path.name for path in tmp_path.iterdir())
    caught = refuse(None, src, tmp_path / "refused", kind=RefusedError, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # nothing is left behind
    assert caught.value.exit_status == 4
    error: RefusedError = caught.value
    assert "--names live" in error.hint
    return error


def notes_of(src: Path, out: Path, **options: Any) -> list[str]:
    notes: list[str] = []
    ckptkit.consolidate(
        src, out, listener=lambda event: notes.extend(getattr(event, "notes", ())), **options
    )
    return notes


def loaded(folder: Path, model: Any) -> None:
    """Loads with nothing missing, unexpected or mismatched, and with the trained values."""
    found, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    own = model.state_dict()
    for name, value in found.state_dict().items():
        assert torch.equal(value, own[name]), name


def test_what_a_wrapper_put_before_all_names_is_left_out(tmp_path: Path) -> None:
    model = model_of()
    src = trained(
        tmp_path / "src", {f"net.{n}": v for n, v in model.state_dict().items()}, model.config
    )
    (note,) = notes_of(src, tmp_path / "found")
    assert note.startswith("all names begin with 'net.'")
    loaded(tmp_path / "found", model)
    assert load_file(tmp_path / "found/model.safetensors").keys() == model.state_dict().keys()
    manifest = ckptkit.consolidate(src, tmp_path / "out", strip_prefix="net.")
    assert manifest.options["strip_prefix"] == ["net."]
    assert ckptkit.verify(tmp_path / "out").ok
    loaded(tmp_path / "out", model)
    live = notes_of(src, tmp_path / "live", names="live")
    assert [note for note in live if "not compared" in note]
    assert all(name.startswith("net.") for name in load_file(tmp_path / "live/model.safetensors"))


def test_prefixes_of_several_modules_are_stripped(tmp_path: Path) -> None:
    model = model_of()
    state = {
        (f"outer.net.{name}" if "layers" in name else f"outer.{name}"): value
        for name, value in model.state_dict().items()
    }
    src = trained(tmp_path / "src", state, model.config)
    ckptkit.consolidate(src, tmp_path / "out", strip_prefix=["outer", "outer.net"])
    loaded(tmp_path / "out", model)
    with pytest.raises(CkptkitError, match=r"no name of 21 tensors begins with 'other\.'"):
        ckptkit.consolidate(src, tmp_path / "o", strip_prefix="other")
    both = {**state, "outer.a.bias": torch.ones(2), "a.bias": torch.ones(2)}
    twice = trained(tmp_path / "twice", both, model.config)
    refuse(r"has the name of", twice, tmp_path / "o", strip_prefix="outer")
    for nothing in ("", ".", ["net", ""]):
        refuse("at least one character", src, tmp_path / "o", kind=UsageError, strip_prefix=nothing)
    with pytest.raises(UsageError, match="--optimizer"):
        ckptkit.consolidate(src, tmp_path / "o", strip_prefix="outer", optimizer=True)
    assert not (tmp_path / "o").exists()


def test_a_missing_layer_is_refused(tmp_path: Path) -> None:
    model = model_of()
    state = {name: v for name, v in model.state_dict().items() if ".layers.1." not in name}
    error = refused(trained(tmp_path / "src", state, model.config), tmp_path)
    assert "9 parameters would be missing and made at random" in error.message
    assert "'model.layers.1.input_layernorm.weight'" in error.message
    assert " and 6 more" in error.message


@pytest.mark.slow
def test_a_missing_head_is_refused_unless_it_is_tied(tmp_path: Path) -> None:
    model = model_of()
    state = {name: v for name, v in model.state_dict().items() if name != "lm_head.weight"}
    error = refused(trained(tmp_path / "src", state, model.config), tmp_path)
    assert "1 parameter would be missing and made at random, 'lm_head.weight'" in error.message
    assert "all names fit LlamaModel" in error.hint
    tied = model_of(tie_word_embeddings=True)
    state = {name: v for name, v in tied.state_dict().items() if name != "lm_head.weight"}
    ckptkit.consolidate(trained(tmp_path / "tied", state, tied.config), tmp_path / "out")
    loaded(tmp_path / "out", tied)
    # A tie has two ends: the other one is in none of the library's own files either way.
    embedding = "model.embed_tokens.weight"
    state = {name: v for name, v in tied.state_dict().items() if name != embedding}
    ckptkit.consolidate(trained(tmp_path / "head", state, tied.config), tmp_path / "by_head")
    loaded(tmp_path / "by_head", tied)
    del state["lm_head.weight"]
    error = refused(trained(tmp_path / "neither", state, tied.config), tmp_path)
    assert "2 parameters would be missing and made at random, 'lm_head" in error.message


def test_a_bare_model_passes_as_what_it_is(tmp_path: Path) -> None:
    bare = model_of(kind="Model")
    ckptkit.consolidate(trained(tmp_path / "a", bare.state_dict(), bare.config), tmp_path / "bare")
    loaded(tmp_path / "bare", bare)
    whole = model_of()
    state = {name.removeprefix("model."): value for name, value in whole.state_dict().items()}
    ckptkit.consolidate(trained(tmp_path / "b", state, whole.config), tmp_path / "whole")
    loaded(tmp_path / "whole", whole)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight'"),
        ({"num_hidden_layers": 1}, "9 tensors would not be used"),
        ({"hidden_size": 16}, "other shapes than the model"),
        ({"vocab_size": 60}, "[64, 32] against [60, 32]"),
        ({"intermediate_size": 40}, "[32, 48] against [32, 40]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.quick("hidden_size-", "num_hidden_layers-0")
def test_a_base_of_other_sizes_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    model, base = model_of(), model_of(**changed)
    base.save_pretrained(tmp_path / "base")
    src = trained(tmp_path / "src", model.state_dict())
    error = refused(src, tmp_path, base=tmp_path / "base")
    assert said in error.message
    if "vocab_size" in changed:
        assert "--vocab-size 60" in error.hint
        notes_of(src, tmp_path / "cut", base=tmp_path / "base", vocab_size=60)


def test_weights_with_biases_that_the_base_lacks_are_refused(tmp_path: Path) -> None:
    model, base = model_of(attention_bias=True), model_of()
    base.save_pretrained(tmp_path / "base")
    src = trained(tmp_path / "src", model.state_dict())
    error = refused(src, tmp_path, base=tmp_path / "base")
    assert "8 tensors would not be used" in error.message
    assert "--exclude" not in error.hint  # they were trained


def test_many_parts_that_the_model_has_not_are_left_out_by_one_pattern(tmp_path: Path) -> None:
    model = model_of()
    probes = {f"probe_{letter}.scale": torch.ones(2) for letter in "abcdefghijkl"}
    src = trained(tmp_path / "src", model.state_dict() | probes, model.config)
    error = refused(src, tmp_path)
    assert "--exclude 'probe_*'" in error.hint
    notes_of(src, tmp_path / "out", exclude=["probe_*"])
    loaded(tmp_path / "out", model)


def test_a_head_of_another_kind_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    model = model_of()
    head = {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": torch.ones(1)}
    src = trained(tmp_path / "src", model.state_dict() | head, model.config)
    error = refused(src, tmp_path)
    assert "--exclude 'v_head.*'" in error.hint
    notes = notes_of(src, tmp_path / "out", exclude=["v_head.*"])
    assert [note for note in notes if "2 of 23 tensors" in note]
    loaded(tmp_path / "out", model)


@pytest.mark.slow
def test_what_the_user_leaves_out_is_not_missing(tmp_path: Path) -> None:
    model = model_of()
    src = trained(tmp_path / "src", model.state_dict(), model.config)
    notes = notes_of(src, tmp_path / "out", include=["model.layers.0.*"])
    assert [note for note in notes if "12 of 21 tensors" in note]
    wrong = {f"net.{name}": value for name, value in model.state_dict().items()}
    src = trained(tmp_path / "wrong", wrong, model.config)
    notes = notes_of(src, tmp_path / "part", include=["net.model.layers.0.*"])
    assert [note for note in notes if "'net.'" in note]
    part = load_file(tmp_path / "part/model.safetensors")
    assert part.keys() == load_file(tmp_path / "out/model.safetensors").keys()


@pytest.mark.slow
def test_experts_are_counted_under_their_names_on_disk(tmp_path: Path) -> None:
    values: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 2}
    model = model_of("Mixtral", **values)
    src = trained(tmp_path / "src", model.state_dict(), model.config)
    ckptkit.consolidate(src, tmp_path / "out")
    loaded(tmp_path / "out", model)
    tensors = load_file(tmp_path / "out/model.safetensors")
    fewer = {name: value for name, value in tensors.items() if ".experts.1." not in name}
    assert len(fewer) == len(tensors) - 6
    save_file(fewer, tmp_path / "out/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out/ckptkit.json").unlink()
    (tmp_path / "out").rename(tmp_path / "fewer")
    refused(tmp_path / "fewer", tmp_path)
    for to in ("torch", "dcp"):
        ckptkit.convert(src, tmp_path / to, to=to)


def test_a_prefix_that_a_family_has_may_be_there_or_not(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.config.architectures = ["GPT2LMHeadModel"]
    for number, prefix in enumerate(("transformer.", "")):
        state = {n.replace("transformer.", prefix): v for n, v in model.state_dict().items()}
        src = trained(tmp_path / f"src{number}", state, model.config)
        ckptkit.consolidate(src, tmp_path / f"out{number}")
        loaded(tmp_path / f"out{number}", model)


def test_a_model_inside_another_is_compared(tmp_path: Path) -> None:
    text = {**SIZES, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    vision = {**SIZES, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.config.architectures = [type(model).__name__]
    ckptkit.consolidate(trained(tmp_path / "a", model.state_dict(), model.config), tmp_path / "out")
    loaded(tmp_path / "out", model)
    state = {n: v for n, v in model.state_dict().items() if ".language_model.layers.1." not in n}
    assert "layers.1." in refused(trained(tmp_path / "b", state, model.config), tmp_path).message


def test_a_part_of_a_model_whose_type_is_not_registered_is_compared(tmp_path: Path) -> None:
    sizes = {"block_size": 8, "input_vocab_size": 32, "output_vocab_size": 32, "num_layers": 2}
    config = transformers.BarkCoarseConfig(**sizes, num_heads=4, hidden_size=16)
    model = transformers.BarkCoarseModel(config)
    model.config.architectures = [type(model).__name__]
    src = trained(tmp_path / "whole", model.state_dict(), model.config)
    assert not [n for n in notes_of(src, tmp_path / "out") if "compared" in n]
    loaded(tmp_path / "out", model)
    state = {n: v for n, v in model.state_dict().items() if "layers.1." not in n}
    assert "layers.1." in refused(trained(tmp_path / "part", state, config), tmp_path).message


def test_every_layout_is_compared(tmp_path: Path) -> None:
    model = model_of()
    wrong = {f"net.{name}": value for name, value in model.state_dict().items()}
    src = trained(tmp_path / "src", wrong, model.config)
    for to in ("hf", "torch", "dcp"):
        if to == "hf":
            ckptkit.convert(src, tmp_path / "out", to=to)
            loaded(tmp_path / "out", model)
            continue
        with pytest.raises(RefusedError, match=r"begin with 'net\.'"):
            ckptkit.convert(src, tmp_path / "none", to=to)
        ckptkit.convert(src, tmp_path / to, to=to, strip_prefix="net")
        assert ckptkit.verify(tmp_path / to).ok
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("how", ["usual", "resumed", "url", "slices"])
@pytest.mark.quick("usual", "slices")
def test_what_is_found_while_tensors_are_copied_leaves_nothing_behind(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cheap check sees a bias; transformers answers beside the copying."""
    from ckptkit.conversion.job import run_job
    from ckptkit.conversion.prepare import ConversionJob
    from ckptkit.options import ConsolidateRequest
    from ckptkit.plan.plan import parse_slice

    monkeypatch.setattr(comparing, "_looks_wrong", lambda _subject: False)
    model = model_of()
    bias = {f"model.layers.0.self_attn.{how}.bias": torch.ones(32)}
    src = trained(tmp_path / "src", model.state_dict() | bias, model.config)
    out: Any = tmp_path / "out"
    if how == "url":
        out = f"memory://{tmp_path}/out"

    def run() -> None:
        if how == "slices":
            job = ConversionJob(src, out, ConsolidateRequest(), share=parse_slice("0/2"))
            run_job(job)
        else:
            ckptkit.consolidate(src, out, resume=how == "resumed")

    with pytest.raises(RefusedError, match="1 tensor would not be used"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    if how == "url":
        import fsspec

        assert not fsspec.filesystem("memory").find(str(tmp_path))


def test_code_of_its_own_is_compared_with_the_base_alone(tmp_path: Path) -> None:
    model = model_of()
    state = {f"own.{name}": value for name, value in model.state_dict().items()}
    src = trained(tmp_path / "src", state, model.config)
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "own.Own"}}))
    notes = notes_of(src, tmp_path / "out")
    assert [note for note in notes if "code of its own" in note]
    (tmp_path / "out").rename(tmp_path / "base")
    (tmp_path / "base/config.json").write_text((src / "config.json").read_text())
    (tmp_path / "base/ckptkit.json").unlink()  # it has the digest of the other configuration
    (src / "config.json").unlink()
    again = notes_of(src, tmp_path / "out", base=tmp_path / "base")
    assert not [note for note in again if "not compared" in note]
    del state["own.model.norm.weight"]
    less = trained(tmp_path / "less", state)
    assert "'own.model.norm.weight'" in refused(less, tmp_path, base=tmp_path / "base").message


# --- without transformers ---


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "list_missing_libraries", lambda *_: ["transformers"])


@pytest.mark.usefixtures("no_transformers")
def test_a_base_is_compared_where_transformers_is_not(tmp_path: Path) -> None:
    model = model_of()
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    src = trained(tmp_path / "src", model.state_dict())
    assert not notes_of(src, tmp_path / "good", base=tmp_path / "base")
    changes: list[dict[str, Any]] = [{"attention_bias": True}, {"intermediate_size": 40}]
    for number, change in enumerate(changes):
        other = trained(tmp_path / f"other{number}", model_of(**change).state_dict())
        refused(other, tmp_path, base=tmp_path / "base")
    for path in (tmp_path / "base").glob("*.safetensors"):
        path.unlink()
    assert not notes_of(src, tmp_path / "index", base=tmp_path / "base")  # the index is enough
    refused(tmp_path / "other0", tmp_path, base=tmp_path / "base")


@pytest.mark.usefixtures("no_transformers")
@pytest.mark.parametrize("tied", [False, True])
def test_a_base_whose_names_differ_by_ties_buffers_or_a_prefix_passes(
    tmp_path: Path, tied: bool
) -> None:
    model = model_of(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base/model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)}
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    for number, held in enumerate((model.state_dict(), state)):
        src = trained(tmp_path / f"src{number}", held)
        notes = notes_of(src, tmp_path / f"out{number}", base=tmp_path / "base")
        assert not [note for note in notes if "buffers that models make" not in note]


@pytest.mark.usefixtures("no_transformers")
def test_counts_are_compared_where_nothing_else_is(tmp_path: Path) -> None:
    model = model_of()
    good = model.state_dict()
    bad: list[State] = [
        {name: value for name, value in good.items() if ".layers.0." not in name},
        good | {"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)},
        good | {"model.embed_tokens.weight": torch.ones(70, 32)},
        good | {"model.embed_tokens.weight": torch.ones(64, 16)},
    ]
    for number, state in enumerate(bad):
        refused(trained(tmp_path / f"bad{number}", state, model.config), tmp_path)
    assert not notes_of(trained(tmp_path / "good", good, model.config), tmp_path / "out")
    wrapped = {f"net.{name}": value for name, value in good.items()}
    src = trained(tmp_path / "wrapped", wrapped, model.config)
    assert [note for note in notes_of(src, tmp_path / "without") if "begin with 'net.'" in note]
    assert load_file(tmp_path / "without/model.safetensors").keys() == good.keys()


@pytest.mark.usefixtures("no_transformers")
def test_what_nothing_knows_is_written_with_a_note(tmp_path: Path) -> None:
    src = trained(tmp_path / "src", {"a.weight": torch.ones(2, 2)})
    (src / "config.json").write_text('{"model_type": "my_own"}')
    notes = notes_of(src, tmp_path / "out")
    assert [note for note in notes if "transformers cannot be imported" in note]


# --- the program, and the cache ---


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces the program that is started, and begins with nothing known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def replace(code: str) -> None:
        monkeypatch.setattr(naming_program, "_PROGRAM", "roots = {!r}; " + code)

    return replace


def test_a_listener_is_told_of_an_answer_that_takes_longer_than_the_copying(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("import time; time.sleep(0.6)")
    src = trained(tmp_path / "src", {"a.weight": torch.ones(2, 2)})
    (src / "config.json").write_text('{"model_type": "my_own"}')
    for silent_seconds, waits in ((0.2, True), (60, False)):
        monkeypatch.setattr(comparing, "_SILENT_SECONDS", silent_seconds)
        events: list[Any] = []
        ckptkit.consolidate(src, tmp_path / f"out{waits}", listener=events.append)
        kinds = [type(event) for event in events]
        assert (Waiting in kinds) == waits
        if waits:
            assert kinds.index(BytesWritten) < kinds.index(Waiting) < kinds.index(OutputCommitted)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os._exit(9)", "status 9"),
        ("import sys; sys.exit('ValueError: of its own')", "ValueError: of its own"),
        ("import time; time.sleep(60)", r"no answer within 0\.3 s"),
        ("print('[]')", "no answer"),
        ("print('nothing')", "no answer"),
    ],
)
def test_a_program_that_fails_or_hangs_is_a_note(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    import re

    program(code)
    monkeypatch.setattr(comparing, "_TIMEOUT_SECONDS", 0.3)
    src = trained(tmp_path / "src", {"a.weight": torch.ones(2, 2)})
    (src / "config.json").write_text('{"model_type": "my_own"}')
    notes = notes_of(src, tmp_path / "out")
    if code != "import time; time.sleep(60)":
        monkeypatch.setattr(comparing, "_TIMEOUT_SECONDS", 30)
        notes = notes_of(src, tmp_path / "again")
    assert [note for note in notes if "not compared" in note and re.search(said, note)]


@pytest.mark.slow
def test_an_answer_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    questions: list[bytes] = []
    ask = NamingProgram.ask

    def counted(program: NamingProgram, question: bytes) -> Any:
        questions.append(question)
        return ask(program, question)

    monkeypatch.setattr(NamingProgram, "ask", counted)
    model = model_of("Mixtral", num_local_experts=2, num_experts_per_tok=1)
    src = trained(tmp_path / "src", model.state_dict(), model.config)
    ckptkit.consolidate(src, tmp_path / "first")
    assert len(questions) == 2  # the names on disk, and what loading them would report
    ckptkit.consolidate(src, tmp_path / "second")
    ckptkit.consolidate(src, tmp_path / "third", max_shard_size="20KB")
    assert len(questions) == 2
    entries = list((tmp_path / "cache").rglob("*"))
    assert len([entry for entry in entries if entry.is_file()]) == 2
    for entry in entries:
        assert not stat.S_IMODE(entry.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    for number, damage in enumerate((_cut, _flipped, _emptied, _linked, _open_to_all, _huge)):
        for entry in [entry for entry in (tmp_path / "cache").rglob("*") if entry.is_file()]:
            damage(entry)
        ckptkit.consolidate(src, tmp_path / f"damaged{number}")
        assert len(questions) == 4 + 2 * number, damage
        loaded(tmp_path / f"damaged{number}", model)


def _cut(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-3])


def _flipped(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)


def _emptied(entry: Path) -> None:
    entry.write_bytes(b"")


def _linked(entry: Path) -> None:
    entry.rename(entry.parent.parent / entry.name)
    entry.symlink_to(entry.parent.parent / entry.name)


def _open_to_all(entry: Path) -> None:
    entry.chmod(0o666)


def _huge(entry: Path) -> None:
    os.truncate(entry, 1 << 30)


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = model_of()
    src = trained(tmp_path / "src", model.state_dict(), model.config)
    assert not notes_of(src, tmp_path / "out")
    loaded(tmp_path / "out", model)


@pytest.mark.slow
def test_commands_ask_the_program_and_keep_its_answer(tmp_path: Path) -> None:
    """As a user runs it: another process answers beside the copying, and once."""
    model = model_of(unknown_key=1)  # of a known configuration nothing is asked
    src = trained(tmp_path / "src", model.state_dict(), model.config)
    wrong = {f"net.{name}": value for name, value in model.state_dict().items()}
    bad = trained(tmp_path / "bad", wrong | {"critic.weight": torch.ones(2)}, model.config)
    cache = tmp_path / "cache"

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ckptkit_cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        )

    first = run("consolidate", src, tmp_path / "out")
    assert first.returncode == 0, first.stderr
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 1
    loaded(tmp_path / "out", model)
    for extra in ([], ["--dry-run"]):
        done = run("consolidate", bad, tmp_path / "no", *extra)
        assert done.returncode == 4, done.stderr
        assert "21 of 22 names begin with 'net.'" in done.stderr
    assert not (tmp_path / "no").exists()
    proposed = re.search(r"run `ckptkit ([^`]*)`", run("consolidate", bad, tmp_path / "no").stderr)
    assert proposed is not None
    done = run(*shlex.split(proposed[1].replace(str(tmp_path / "no"), str(tmp_path / "yes"))))
    assert done.returncode == 0, done.stderr
    loaded(tmp_path / "yes", model)


@pytest.mark.slow
def test_names_are_compared_where_no_file_may_be_written(tmp_path: Path) -> None:
    fixtures = Path(__file__).resolve().parents[2] / "fixtures"
    source = fixtures / "accelerate_fsdp2_tied_with_config" / "checkpoint"
    code = (
        "import resource, sys\n"
        "import ckptkit\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "print(len(ckptkit.consolidate(sys.argv[1], 'memory://bucket/model').files))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, source],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr
