"""What the page about reports says of small changes, in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptkit
from tests.browser import open_browser
from tests.pages import DOCS


@pytest.mark.slow
def test_a_change_below_a_thousandth_is_a_number_with_two_digits(tmp_path: Path) -> None:
    first = np.full((8, 4), 1.0)
    for name, factor in (("a", 1.0), ("b", 1 + 3.4e-6)):
        (tmp_path / name).mkdir()
        save_file({"layers.0.weight": first * factor}, tmp_path / name / "model.safetensors")
    page = tmp_path / "diff.html"
    ckptkit.write_report(ckptkit.diff(tmp_path / "a", tmp_path / "b", numeric=True), page)
    with open_browser(tmp_path / "profile") as browser:
        browser.open(page)
        browser.settle()
        text = browser.run("return document.querySelector('#changed').textContent")
    assert "3.4e-6" in text
    assert "< 0.1" not in text
    assert "such as 3.4e-6" in (DOCS / "how-to/reports.md").read_text(encoding="utf-8")
