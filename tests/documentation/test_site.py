"""The built site opens from a folder: it needs no server and no network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.browser import open_browser

ROOT = Path(__file__).resolve().parents[2]
FETCHED = re.compile(r"""<(?:script|link|img)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*""")

RESULTS = "return [...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs comes with the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        check=False,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_search_index_is_loaded_without_a_server(site: Path) -> None:
    script = (site / "search/search_index.js").read_text(encoding="utf-8")
    start = "var __index = "
    assert script.startswith(start)
    index = json.loads(script.removeprefix(start))
    assert {"index.html", "reference/formats.html"} <= {
        entry["location"] for entry in index["docs"]
    }
    page = (site / "reference/formats.html").read_text(encoding="utf-8")
    assert (
        '<script src="../images/search-in-iframe-worker.js"></script>' in page
    )  # no Worker over file://
    (bundle,) = re.findall(r'src="\.\./(assets/javascripts/bundle\.\w+\.min\.js)"', page)
    assert '"search/search_index.js"' in (site / bundle).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_word_is_found_on_a_page_that_was_opened_from_a_folder(
    site: Path, tmp_path: Path
) -> None:
    with open_browser(tmp_path / "profile") as browser:
        browser.open(site / "how-to/s3.html")
        browser.run("document.querySelector('.md-search__input').focus()")
        browser.press("consolidate")
        deadline = time.monotonic() + 30
        found: list[str] = []
        while not found and time.monotonic() < deadline:
            time.sleep(0.1)
            found = browser.run(RESULTS)
        assert any(link.startswith(site.as_uri()) for link in found)
        assert [entry for entry in browser.log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_no_page_fetches_anything_from_a_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    fetched = {found for page in pages for found in FETCHED.findall(page.read_text("utf-8"))}
    assert fetched == set()
