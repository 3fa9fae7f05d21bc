"""Folders of sentence-transformers give the vectors of the model that was trained."""

from __future__ import annotations

import filecmp
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.core.errors import RefusedError
from ckptkit_cli.main import main
from tests.reports.folders import REPORTS, notes_of, save, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore")
CASE, LORA = REPORTS / "21-sentence-transformers", REPORTS / "21-sentence-transformers-lora"
SENTENCES = ["a cat sat on the mat", "dog runs in the park"]


def vectors(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)


@pytest.mark.parametrize("options", [{}, {"strip_prefix": "0.model."}])
@pytest.mark.quick("options1")
def test_a_report_of_other_vectors(options: dict[str, str], tmp_path: Path) -> None:
    ckptkit.consolidate(CASE / "ckpt", tmp_path / "out", base=CASE / "base", **options)  # type: ignore[arg-type]
    assert np.array_equal(vectors(tmp_path / "out"), np.load(CASE / "expected.npy"))
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()


def test_a_merged_adapter_gives_the_vectors_of_training(tmp_path: Path) -> None:
    ckptkit.merge_adapter(LORA / "adapter", tmp_path / "out", base=LORA / "base")
    expected = np.load(LORA / "expected.npy")
    assert np.allclose(vectors(tmp_path / "out"), expected, atol=1e-6)


def test_a_conversion_of_the_folder_itself_keeps_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(CASE / "base"), str(tmp_path / "out"), "--to", "hf"]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    assert "sentence_transformers.SentenceTransformer(" in capfd.readouterr().out
    found = vectors(tmp_path / "out")
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-2


def trained_model(
    folder: Path, *further: Any, attribute: str = "model"
) -> tuple[Any, dict[str, Any]]:
    """Writes the folder of a model with further modules; returns it as trained, and its state."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(CASE / "base"), device="cpu")
    modules = [*model, *further]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))
    trained = SentenceTransformer(str(folder), device="cpu")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    state = {
        name.replace("0.model.", f"0.{attribute}.", 1): tensor
        for name, tensor in trained.state_dict().items()
    }
    return trained, state


@pytest.mark.parametrize("attribute", ["model", "auto_model"])
@pytest.mark.quick("model")
def test_dense_layers_are_written_into_their_folders(attribute: str, tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense

    layers = (Dense(32, 16), Dense(16, 8))
    trained, state = trained_model(tmp_path / "base", *layers, attribute=attribute)
    step = save(state, tmp_path / "step")
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "out", base=tmp_path / "base")
    assert np.array_equal(vectors(tmp_path / "out"), trained.encode(SENTENCES))
    assert sum(f"'0.{attribute}.'" in note for note in notes) == 1
    assert ckptkit.verify(tmp_path / "out").ok


def test_an_encoder_alone_gets_the_modules_of_its_base(tmp_path: Path) -> None:
    trained, state = trained_model(tmp_path / "base")
    inner = {n.removeprefix("0.model."): t for n, t in state.items() if n.startswith("0.model.")}
    step = save(inner, tmp_path / "step")
    ckptkit.consolidate(step, tmp_path / "out", base=tmp_path / "base")
    assert np.array_equal(vectors(tmp_path / "out"), trained.encode(SENTENCES))


def test_an_encoder_in_a_folder_of_its_own_is_written_at_the_root(tmp_path: Path) -> None:
    trained, state = trained_model(tmp_path / "base")
    inner = tmp_path / "base" / "0_Transformer"
    inner.mkdir()
    for path in [*(tmp_path / "base").glob("*.json"), *(tmp_path / "base").glob("*.safetensors")]:
        if path.name not in {"modules.json", "config_sentence_transformers.json"}:
            path.rename(inner / path.name)
    modules = tmp_path / "base" / "modules.json"
    listed = json.loads(modules.read_text())
    listed[0]["path"] = "0_Transformer"
    modules.write_text(json.dumps(listed))
    step = save(state, tmp_path / "step")
    ckptkit.consolidate(step, tmp_path / "out", base=tmp_path / "base")
    assert np.array_equal(vectors(tmp_path / "out"), trained.encode(SENTENCES))
    assert not (tmp_path / "out" / "0_Transformer").exists()


@pytest.mark.parametrize("how", ["base", "step"])
@pytest.mark.quick("step")
def test_encoders_behind_a_router_are_refused_with_a_command_that_works(
    how: str, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router

    first, second = (SentenceTransformer(str(CASE / "base"), device="cpu")[0] for _ in range(2))
    router = Router.for_query_document(query_modules=[first], document_modules=[second])
    model = SentenceTransformer(modules=[router], device="cpu")
    model.save_pretrained(str(tmp_path / "base"))
    step = save(model.state_dict(), tmp_path / "step")
    options = ["--base", str(tmp_path / "base")]
    if how == "step":
        options = []
        (step / "config.json").write_text((CASE / "base" / "config.json").read_text())
        shutil.copy(tmp_path / "base" / "modules.json", step)
    with pytest.raises(RefusedError, match="behind a router") as caught:
        ckptkit.consolidate(step, tmp_path / "out", base=options[-1] if options else None)
    words = shlex.split(caught.value.hint.partition("such as ")[2])
    assert ("--base" in words) == (how == "base")
    assert main(["consolidate", str(step), str(tmp_path / "out"), *words]) == 0
    assert (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out" / "modules.json").exists()
    inner = {n.partition(".model.")[2]: t for n, t in model.state_dict().items() if ".query." in n}
    found = tensors_of(tmp_path / "out")
    assert found
    assert all(torch.equal(found[name], inner[name]) for name in found)


@pytest.mark.parametrize("folder", ["", "0_StaticEmbedding"])
def test_a_static_embedding_needs_no_configuration(
    folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Older versions write the first module into a folder of its own."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CASE / "base")
    static = StaticEmbedding(tokenizer, embedding_dim=8)
    model, base = SentenceTransformer(modules=[static], device="cpu"), tmp_path / "base"
    model.save_pretrained(str(base))
    if folder:
        (base / folder).mkdir()
        for name in ("tokenizer.json", "model.safetensors"):
            (base / name).rename(base / folder / name)
        listed = json.loads((base / "modules.json").read_text())
        (base / "modules.json").write_text(json.dumps([{**listed[0], "path": folder}]))
    with torch.no_grad():
        static.embedding.weight.add_(1)
    step = save(model.state_dict(), tmp_path / "step")
    words = ["consolidate", str(step), str(tmp_path / "out"), "--base", str(base)]
    assert main(words) == 0
    said = "".join(capfd.readouterr())
    assert "sentence_transformers.SentenceTransformer(" in said
    assert "no config.json" not in said
    assert np.array_equal(vectors(tmp_path / "out"), model.encode(SENTENCES))
    ckptkit.consolidate(tmp_path / "out", tmp_path / "again")
    assert np.array_equal(vectors(tmp_path / "again"), model.encode(SENTENCES))
    other = save({"0.other": torch.zeros(3)}, tmp_path / "other")
    with pytest.raises(RefusedError, match="'other'"):
        ckptkit.consolidate(other, tmp_path / "refused", base=base)


@pytest.mark.parametrize("name", ["CrossEncoder", "SparseEncoder"])
@pytest.mark.quick("CrossEncoder")
def test_the_line_that_loads_a_folder_names_its_class(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import sentence_transformers
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
    from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM
    from transformers import BertForSequenceClassification as Classifier

    config = AutoConfig.from_pretrained(CASE / "base", num_labels=1)
    kind = Classifier if name == "CrossEncoder" else BertForMaskedLM
    kind(config).save_pretrained(tmp_path / "inner")
    AutoTokenizer.from_pretrained(CASE / "base").save_pretrained(tmp_path / "inner")
    inner = str(tmp_path / "inner")
    if name == "CrossEncoder":
        model = sentence_transformers.CrossEncoder(inner, device="cpu")
    else:
        modules = [MLMTransformer(inner), SpladePooling("max")]
        model = sentence_transformers.SparseEncoder(modules=modules, device="cpu")
    model.save_pretrained(str(tmp_path / "base"))
    step = save(model.state_dict(), tmp_path / "step")
    out = tmp_path / "out"
    assert main(["consolidate", str(step), str(out), "--base", str(tmp_path / "base")]) == 0
    assert f"sentence_transformers.{name}('{out}')" in capfd.readouterr().out
    loaded = getattr(sentence_transformers, name)(str(out), device="cpu")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[n]) for n, tensor in loaded.state_dict().items())


def test_an_average_with_modules_beside_the_encoder_is_refused_with_a_way(tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense

    _, state = trained_model(tmp_path / "base", Dense(32, 16))
    steps = [save(state, tmp_path / name) for name in ("a", "b")]
    with pytest.raises(RefusedError, match="not averaged"):
        ckptkit.average(steps, tmp_path / "out", base=tmp_path / "base")
    ckptkit.average(
        *(steps, tmp_path / "out"),
        base=tmp_path / "base",
        strip_prefix="0.model.",
        exclude=["[1-9]*"],
    )
    assert len(tensors_of(tmp_path / "out")) == 23


def test_a_folder_that_sentence_transformers_wrote_is_one_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense

    model, _ = trained_model(tmp_path / "base", Dense(32, 16))
    model.save_pretrained(str(tmp_path / "src"))
    assert main(["inspect", str(tmp_path / "src")]) == 0
    assert "these weights load as they are" in capfd.readouterr().out
    ckptkit.consolidate(tmp_path / "src", tmp_path / "out", max_shard_size=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    ours = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert (ours.encode(["t1 t2 t3"]) == model.encode(["t1 t2 t3"])).all()


def test_an_average_takes_modules_that_are_the_same_in_all(tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense

    sources = [tmp_path / "a", tmp_path / "b"]
    model, _ = trained_model(tmp_path / "base", Dense(32, 16))
    model.save_pretrained(str(sources[0]))
    with torch.no_grad():
        next(model[0].parameters()).add_(1)
    model.save_pretrained(str(sources[1]))
    ckptkit.average(sources, tmp_path / "same")
    file = "3_Dense/model.safetensors"
    assert filecmp.cmp(tmp_path / "same" / file, sources[0] / file, shallow=False)
    with torch.no_grad():
        model[-1].linear.weight.add_(1)
    model.save_pretrained(str(sources[1]))
    with pytest.raises(RefusedError, match="differs between the models") as caught:
        ckptkit.average(sources, tmp_path / "out")
    assert "without '3_Dense', and these folders apart" in caught.value.hint
    ckptkit.average([one / "3_Dense" for one in sources], tmp_path / "out" / "3_Dense")
    for source in sources:
        shutil.rmtree(source / "3_Dense")
    ckptkit.average(sources, tmp_path / "out" / "encoder")


@pytest.mark.parametrize(
    ("wrapper", "further", "options"),
    [
        ("model.", "", []),
        ("", "", ["--include", "0.*"]),
        ("model.", "", ["--strip-prefix", "model."]),
        ("model.", "", ["--strip-prefix", "model.0.model.", "--include", "model.0.model.*"]),
        ("", "", ["--strip-prefix", "0.model.", "--include", "0.model.*"]),
        ("net.model.", "loss.weight", ["--exclude", "loss.*"]),
        ("model.", "model.loss.weight", ["--exclude", "model.loss.*"]),
    ],
)
@pytest.mark.quick("--options1", "model.-model.loss.weight-options6")
def test_modules_behind_a_wrapper_are_all_written(
    wrapper: str, further: str, options: list[str], tmp_path: Path
) -> None:
    from sentence_transformers.base.modules import Dense

    trained, state = trained_model(tmp_path / "base", Dense(32, 16))
    state = {wrapper + name: tensor for name, tensor in state.items()}
    state |= {further: torch.zeros(3, 4)} if further else {}
    step, out = save(state, tmp_path / "step"), tmp_path / "out"
    words = ["consolidate", str(step), str(out), "--base", str(tmp_path / "base"), *options]
    assert main(words) == 0
    assert np.array_equal(vectors(out), trained.encode(SENTENCES))


@pytest.mark.slow
def test_a_loss_beside_wrapped_modules_is_refused_with_a_command_that_works(tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense

    trained, state = trained_model(tmp_path / "base", Dense(32, 16))
    state = {f"model.{name}": tensor for name, tensor in state.items()}
    step = save({**state, "loss.weight": torch.zeros(3, 4)}, tmp_path / "step")
    with pytest.raises(RefusedError, match=r"'loss\.weight'") as caught:
        ckptkit.consolidate(step, tmp_path / "out", base=tmp_path / "base")
    assert "--exclude 'loss.*'" in caught.value.hint
    ckptkit.consolidate(step, tmp_path / "out", base=tmp_path / "base", exclude=["loss.*"])
    assert np.array_equal(vectors(tmp_path / "out"), trained.encode(SENTENCES))


@pytest.mark.parametrize("is_encoder_alone", [False, True])
@pytest.mark.quick("True")
def test_a_module_that_the_base_alone_has_is_named(is_encoder_alone: bool, tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense

    _, state = trained_model(tmp_path / "base", Dense(32, 16))
    state = {n: t for n, t in state.items() if n.startswith("0.model.")}
    if is_encoder_alone:
        state = {name.removeprefix("0.model."): tensor for name, tensor in state.items()}
    step = save(state, tmp_path / "step")
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "out", base=tmp_path / "base")
    assert sum("Dense' are those of" in note for note in notes) == 1


@pytest.mark.slow
def test_a_copy_is_written_with_its_own_modules(tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense

    trained, state = trained_model(tmp_path / "base", Dense(32, 16))
    copies = {f"student.{name}": tensor for name, tensor in state.items()}
    copies |= {f"teacher.{name}": tensor + 1 for name, tensor in state.items()}
    step, out = save(copies, tmp_path / "step"), tmp_path / "out"
    with pytest.raises(RefusedError, match="2 copies") as caught:
        ckptkit.consolidate(step, out, base=tmp_path / "base")
    (options,) = re.findall(r"--strip-prefix student[^`]*", caught.value.hint)
    words = ["consolidate", str(step), str(out), "--base", str(tmp_path / "base")]
    assert main([*words, *shlex.split(options)]) == 0
    assert np.array_equal(vectors(out), trained.encode(SENTENCES))
