"""Names of steps: those of every framework are ordered by the step, and no other name is one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.formats.discovery import (
    find_step,
    find_step_files,
    is_called_last,
    name_step,
    parse_step,
)
from ckptkit.formats.registry import recognise
from ckptkit.runs.steps import series_of
from tests.property.examples import examples
from tests.searching import Chooser, dcp

Point = tuple[int, int]  # an epoch and a step, which is counted over all epochs
FOLDERS: dict[str, Callable[[int, int], str]] = {
    "Trainer": lambda _, step: f"checkpoint-{step}",
    "accelerate": lambda _, step: f"checkpoint_{step}",
    "DeepSpeed": lambda _, step: f"global_step{step}",
    "verl": lambda _, step: f"global_step_{step}",
    "Megatron": lambda _, step: f"iter_{step:07}",
    "torchtitan": lambda _, step: f"step-{step}",
    "OLMo": lambda _, step: f"step{step}",
    "NeMo-RL": lambda _, step: f"step_{step}",
    "NeMo Automodel": lambda epoch, step: f"epoch_{epoch}_step_{step}",
    "Composer": lambda epoch, step: f"ep{epoch}-ba{step}",
    "llm-foundry": lambda _, step: f"ba{step}",
    "LeRobot": lambda _, step: f"{step:06}",
    "torchtune": lambda _, step: f"dist_epoch_{step}",
    "nanotron": lambda _, step: str(step),
    "Lightning": lambda epoch, step: f"epoch={epoch}-step={step}.ckpt",
    "NeMo": lambda epoch, step: f"epoch={epoch}-step={step}-val_loss=0.25-last",
    "a loop": lambda epoch, step: f"checkpoint-epoch{epoch}-step{step}",
}
FILES: dict[str, Callable[[int, int], str]] = {  # with a place for the rank, where there is one
    "Composer": lambda epoch, step: f"ep{epoch}-ba{step}-rank{{}}.pt",
    "Composer without ranks": lambda epoch, step: f"ep{epoch}-ba{step}.pt",
    "Lightning": lambda epoch, step: f"epoch={epoch}-step={step}.ckpt",
    "Lightning's own": lambda epoch, step: f"model-epoch{epoch:02}_step{step:04}.ckpt",
    "MMEngine": lambda _, step: f"iter_{step}.pth",
    "a loop": lambda _, step: f"model_step_{step}.pt",
    "metaseq": lambda _, step: f"checkpoint_{step}-shard{{}}.pt",
    "a loop on all ranks": lambda _, step: f"step_{step}.rank{{}}.of2.pt",
    "with an underscore": lambda _, step: f"step_{step}_rank_{{:05}}_of_00002.pth",
    "with a dash": lambda _, step: f"ckpt-{step}-rank-{{}}-of-2.ckpt",
    "by shards": lambda _, step: f"step_{step}_shard_{{}}_of_2.bin",
    "with two endings": lambda _, step: f"checkpoint-{step}.rank{{}}.pth.tar",
}
# Nothing has more steps; and a number of eight digits may be a date.
STEPS = st.integers(0, 10_000_000)
PLACES = (
    "{}",
    "runs/a/{}",
    "20240501/{}",
    "ckpt/{}/model",
    "x/{}/policy/weights/model",
    "{}/actor",
)


@st.composite
def points(draw: st.DrawFn) -> list[Point]:
    """Draws the epochs and steps of a run, in its order."""
    steps = sorted(draw(st.sets(STEPS, min_size=2, max_size=6)))
    epochs = sorted(draw(st.lists(st.integers(0, 99), min_size=len(steps), max_size=len(steps))))
    return list(zip(epochs, steps, strict=True))


@settings(max_examples=examples(60))
@given(points(), st.sampled_from(sorted(FOLDERS)), st.randoms(use_true_random=False))
def test_the_newest_folder_of_a_series_is_taken(
    run: list[Point], family: str, random: object
) -> None:
    names = [FOLDERS[family](*point) for point in run]
    assert [parse_step(name) for name in names] == [step for _, step in run]
    assert len({series_of(name) for name in names}) == 1
    for place in PLACES:
        paths = [place.format(name) for name in names]
        assert [parse_step(path) for path in paths] == [step for _, step in run]
        assert [find_step(path) for path in paths] == [
            place.partition("{}")[0] + name for name in names
        ]
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = Chooser().resolve([dcp(f"{name}/model") for name in shuffled], None)
    assert found.folder == names[-1]


@settings(max_examples=examples(60))
@given(points(), st.data())
def test_folders_of_all_frameworks_are_ordered_by_their_steps(
    run: list[Point], data: st.DataObject
) -> None:
    families = data.draw(st.lists(st.sampled_from(sorted(FOLDERS)), min_size=6, max_size=6))
    names = [FOLDERS[family](*point) for family, point in zip(families, run, strict=False)]
    assert sorted(names, key=lambda name: parse_step(name) or 0) == names


@settings(max_examples=examples(60))
@given(points(), st.sampled_from(sorted(FILES)), st.integers(1, 3))
def test_the_newest_file_of_a_series_is_taken(run: list[Point], family: str, ranks: int) -> None:
    forms = [FILES[family](*point) for point in run]
    names = [form.format(0) for form in forms]
    paths = sorted({form.format(rank) for form in forms for rank in range(ranks)})
    candidates = recognise(paths)
    steps = {path: number for path, (number, _) in find_step_files(candidates).items()}
    assert steps == {name: step for name, (_, step) in zip(names, run, strict=True)}
    assert {name_step(path) for path in paths} == set(names)
    assert [parse_step(name) for name in names] == [step for _, step in run]
    found = Chooser().resolve(candidates, None)
    assert found.units[0].candidate.files[0] == names[-1]


MODELS = (
    "Qwen3-30B-A3B",
    "Llama-3.1-8B-Instruct",
    "gpt-oss-20b",
    "t5-v1_1-xxl",
    "phi-4",
    "GLM-4.5",
)
WORDS = (
    "layer",
    "layers",
    "rank",
    "seed",
    "fold",
    "exp",
    "run",
    "batch",
    "lr",
    "v",
    "model",
    "expert",
)


@st.composite
def other_names(draw: st.DrawFn) -> str:
    """Draws a name of something else with a number in it."""
    day = draw(st.dates(date(1990, 1, 1), date(2099, 12, 31)))
    dates = ("%Y-%m-%d", "%Y%m%d", "%Y%m%d_123000", "%Y-%m-%d_12-30-00", "%Y%m%d123000", "%d.%m.%Y")
    number = draw(st.integers(0, 9999))
    return draw(
        st.one_of(
            st.sampled_from(MODELS),
            st.sampled_from([day.strftime(form) for form in dates]),
            st.builds(
                lambda word, mark: f"{word}{mark}{number}",
                st.sampled_from(WORDS),
                st.sampled_from("-_="),
            ),
            st.builds(
                lambda part: f"{part}{number}-{number}",
                st.sampled_from(("a", "step", "checkpoint-best")),
            ),
            st.just(f"checkpoint-{number}-of-{number}"),
        )
    )


@settings(max_examples=examples(100))
@given(other_names(), st.sampled_from(("{}", "runs/{}", "runs/{}/model", "{}/policy/weights")))
def test_no_other_name_is_a_step(name: str, place: str) -> None:
    assert parse_step(place.format(name)) is None
    assert find_step(place.format(name)) is None


def test_what_is_named_the_last_has_no_step() -> None:
    names = ("last", "latest", "LATEST", "last.ckpt", "latest-rank0.pt", "checkpoint_last.pt")
    for name in names:
        assert is_called_last(name)
        assert parse_step(name) is None
