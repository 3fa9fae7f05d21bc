"""A sample of all classes of Transformers, and the page on which all of them stand."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("torch")
from tests.all_model_types import PAGE, exceptions, try_class  # noqa: E402
from tests.sampled import sampled  # noqa: E402
from tests.small_models import class_named  # noqa: E402

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
    modules = transformers._class_to_module
    names = sorted(name for name, module in modules.items() if ".modeling_" in f".{module}")
    random.Random(transformers.__version__).shuffle(names)  # noqa: S311
    drawn = (name for name in names if name not in exceptions() and class_named(name))
    return [*FIXED, *itertools.islice(drawn, RANDOM)]


@pytest.mark.parametrize("name", sampled(sample(), QUICK))
@pytest.mark.quick("BarkFineModel", "BlipTextLMHeadModel")
def test_a_class_is_written_as_save_pretrained_writes_it(name: str, tmp_path: Path) -> None:
    result = try_class(name, tmp_path)
    assert (result.outcome, result.reason) == ("ok", "")


def test_no_exception_on_the_page_is_a_fault_of_ours() -> None:
    totals = PAGE.read_text(encoding="utf-8").partition("\n## Exceptions\n")[0]
    counts = dict(re.findall(r"^\| (.+) \| ([\d,]+) \| [\d,]+ \|$", totals, re.MULTILINE))
    assert int(counts.pop("equal").replace(",", "")) > 1600
    assert counts == {outcome: str(n) for outcome, n in Counter(exceptions().values()).items()}
    assert not {"refused", "differs", "fails"} & counts.keys()
