"""What a notebook shows: a bar of its own kind for `progress=True`, and options of functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("ipywidgets")

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
WIDGETS = "application/vnd.jupyter.widget-state+json"
LIMIT_SECONDS = 120


def run_cells(monkeypatch: pytest.MonkeyPatch, *cells: str) -> Any:
    """Runs cells in a kernel, and returns the notebook with what they show."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(made, timeout=LIMIT_SECONDS, kernel_name="python3").execute()
    return made


def widgets(made: Any) -> list[dict[str, Any]]:
    states = made.metadata["widgets"][WIDGETS]["state"].values()
    return [{"kind": one["model_name"], **one["state"]} for one in states]


@pytest.mark.slow
def test_a_call_shows_a_bar_of_the_notebook_that_stays_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_cells(
        monkeypatch,
        "import ckptkit, inspect",
        f"done = ckptkit.consolidate({str(LLAMA)!r}, {str(tmp_path / 'out')!r}, progress=True)",
        f"ckptkit.verify({str(tmp_path / 'out')!r}, progress=True).ok",
        f"quiet = ckptkit.verify({str(tmp_path / 'out')!r})",
        "print(inspect.signature(ckptkit.consolidate))",
    )
    shown = [[output["output_type"] for output in cell.outputs] for cell in made.cells]
    assert shown == [[], ["display_data"], ["display_data", "execute_result"], [], ["stream"]]
    bars = [one for one in widgets(made) if one["kind"] == "FloatProgressModel"]
    assert [bar["bar_style"] for bar in bars] == ["success", "success"]
    assert all(bar["value"] == bar["max"] > 9_000 for bar in bars)
    texts = [
        one["value"].replace("\u2007", " ")
        for one in widgets(made)
        if "value" in one and one["kind"] == "HTMLModel"
    ]
    assert {text for text in texts if "%" in text} == {"consolidate: 100%", "verify: 100%"}
    signature = made.cells[4].outputs[0]["text"]
    assert "dtype: OutputDType | DTypeLike = ...," in signature
    assert "**" not in signature


@pytest.mark.slow
def test_a_call_that_fails_shows_no_bar_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_cells(
        monkeypatch,
        "import ckptkit",
        f"try:\n    ckptkit.verify({str(tmp_path)!r}, progress=True)\n"
        "except ckptkit.CkptkitError as error:\n    print(error.code)",
    )
    assert made.cells[1].outputs[-1]["text"] == "not-a-checkpoint\n"
    boxes = [one for one in widgets(made) if one["kind"] == "FloatProgressModel"]
    assert not [box for box in boxes if box["bar_style"] == "success"]
