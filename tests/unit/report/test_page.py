"""The page as a file: nothing of a checkpoint becomes markup, and no file is lost."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from ckptkit.core.errors import OutputError, OutputExistsError
from ckptkit.report.page import ReportDocument, plan_inspection_report, render_page, write_page
from tests.made_up_inspections import inspection_of

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "{{script}}",
    "]]>\u2028&amp;\"'",
    "\ud800",
    "__proto__",
]
DOCUMENT = plan_inspection_report(
    inspection_of([(name, "float32", (2,)) for name in HOSTILE], ranks=1, path="<b>&run")
)


def parts_of(page: str) -> tuple[str, str, str, str]:
    """Returns the policy, the style, the data and the script, as a browser would split the page."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    data, script = re.findall(r"<script(?: [^>]*)?>(.*?)</script", page, re.DOTALL)
    assert policy is not None
    assert style is not None
    return policy[1], style[1], data, script


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone() -> None:
    page = render_page(DOCUMENT).decode()
    policy, style, _, script = parts_of(page)
    for kind, text in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert set(re.findall(r"\w+://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r" (?:src|href|style|on\w+)=\"(?!#top)", page)


def test_no_name_of_a_checkpoint_ends_the_data() -> None:
    page = render_page(DOCUMENT).decode()
    data = parts_of(page)[2]
    assert json.loads(data) == json.loads(json.dumps(DOCUMENT.to_json()))
    assert "<" not in data
    assert data.isascii()
    assert "<title>&lt;b&gt;&amp;run</title>" in page


def write(out: Path, *, overwrite: bool = False) -> Path:
    return write_page(DOCUMENT, out, overwrite=overwrite)


def test_a_file_is_replaced_only_if_it_is_a_page_and_only_if_asked(tmp_path: Path) -> None:
    page = write(tmp_path / "r.html")
    before = page.read_bytes()
    with pytest.raises(OutputExistsError, match="exists"):
        write(page)
    write_page(ReportDocument("inspection", "other", DOCUMENT.content), page, overwrite=True)
    assert page.read_bytes() != before
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"precious")
    with pytest.raises(OutputExistsError, match="not a page of ckptkit"):
        write(weights, overwrite=True)
    assert weights.read_bytes() == b"precious"
    assert sorted(tmp_path.iterdir()) == [weights, page]


@pytest.mark.parametrize("name", ["", "-", "s3://bucket/r.html", "no/such/r.html", "."])
def test_a_page_needs_a_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError):
        write_page(DOCUMENT, name, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "r.html"
    link = os.link

    def late(source: Path, target: Path) -> None:
        Path(target).write_text("of another process")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(OutputExistsError):
        write(page)
    assert page.read_text() == "of another process"
    assert list(tmp_path.iterdir()) == [page]
