"""A sample of all classes of Transformers, and the page on which all of them stand."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("torch")
from tests.all_model_types import PAGE, equal_classes, try_class  # noqa: E402
from tests.sampled import sampled  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of models, about their own defaults

# Ties by patterns, by modules, by layers, in parts of a model; names and elements that change.
FIXED = (
    *("BarkFineModel", "BlipTextLMHeadModel", "DeformableDetrForObjectDetection"),
    *("DiffusionGemmaForBlockDiffusion", "NemotronHForCausalLM", "OpenAIGPTDoubleHeadsModel"),
    *("SamModel", "UnlimitedOcrTextModel", "Zamba2ForCausalLM"),
)
QUICK = ("BarkFineModel", "BlipTextLMHeadModel", "OpenAIGPTDoubleHeadsModel", "SamModel")
RANDOM = 1  # `make differential` draws more, with random configurations


def sample() -> list[str]:
    drawn = random.Random(transformers.__version__).sample(equal_classes(), RANDOM)  # noqa: S311
    return [*FIXED, *drawn]


@pytest.mark.parametrize("name", sampled(sample(), QUICK))
def test_a_class_is_written_as_save_pretrained_writes_it(name: str, tmp_path: Path) -> None:
    result = try_class(name, tmp_path)
    assert (result.outcome, result.reason) == ("ok", "")


def test_no_exception_on_the_page_is_a_fault_of_ours() -> None:
    text = PAGE.read_text(encoding="utf-8")
    totals, _, exceptions = text.partition("\n## Exceptions\n")
    equal = re.findall(r"\| equal \| ([\d,]+) \|", totals)
    assert equal == [f"{len(equal_classes()):,}"]
    rows = [row.split(" | ") for row in exceptions.partition("\n## ")[0].splitlines()[3:]]
    assert not [row for row in rows if row[1] in ("refused", "differs", "fails")]
    assert all(row[2].strip(" |") for row in rows)
