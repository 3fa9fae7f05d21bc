"""`--html` of `ckptkit inspect` and `ckptkit diff`, and the pages in a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckptkit
from tests.browser import Browser, open_browser
from tests.command_line import run_command as run
from tests.made_up_inspections import inspection_of, mixture_tensors, statistics_of
from tests.made_up_runs import save_step

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.split('id="data">')[1].split("</script>")[0])
    return found


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two models whose second layer differs, the second model with a NaN and another tensor."""
    random = np.random.default_rng(1)
    first = {
        f"model.layers.{n}.{kind}_proj.weight": random.normal(size=(8, 4)).astype(np.float32)
        for n in range(3)
        for kind in "qk"
    }
    second = {name: value.copy() for name, value in first.items()}
    second["model.layers.1.q_proj.weight"] *= 1.5
    second["model.layers.2.k_proj.weight"][0, 0] = np.nan
    second["extra"] = np.ones(3, np.float32)
    for name, tensors in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    return tmp_path / "a", tmp_path / "b"


def test_a_page_is_written_beside_the_text_and_the_json(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    shown = run("inspect", LLAMA, "--html", page)
    assert shown.returncode == 0, shown.stderr
    assert f"page        {page}, " in shown.stdout
    document = run("inspect", LLAMA, "--html", page, "--overwrite", "--stats", "--json")
    expected = ckptkit.inspect(LLAMA).to_json()
    assert json.loads(document.stdout) == json.loads(json.dumps(expected))
    content = data_of(page)
    assert content["on_ranks"][0][2] > 0
    assert all(norm > 0 for norm in content["stats"]["norm"])


def test_options_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    page.write_text("mine")
    for words, status, text in (
        (("inspect", LLAMA, "--html", page), 5, "the file exists"),
        (("diff", LLAMA, LLAMA, "--html", page, "--overwrite"), 5, "not a page of ckptkit"),
        (("inspect", LLAMA, "--stats"), 2, "pass --html report.html too"),
        (("diff", LLAMA, LLAMA, "--overwrite"), 2, "--html"),
        (("inspect", tmp_path / "none", "--html", tmp_path), 4, "is a directory"),
    ):
        failed = run(*words)
        assert (failed.returncode, text in failed.stderr) == (status, True), failed.stderr
    assert page.read_text() == "mine"


def test_a_damaged_checkpoint_gets_a_page_that_shows_the_damage(tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "run")
    lost = min((tmp_path / "run").rglob("pytorch_model*/*.distcp"))
    lost.unlink()
    page = tmp_path / "r.html"
    shown = run("inspect", tmp_path / "run", "--html", page, "--stats")
    assert shown.returncode == 0, shown.stderr
    assert "the page has no statistics" in shown.stderr
    content = data_of(page)
    assert content["problems"][0][0] == "missing-file"
    assert content["unreadable"]
    assert [size for path, size, _ in content["files"] if path.endswith(lost.name)] == [-1]


def test_a_difference_says_how_far_each_tensor_has_moved(models: tuple[Path, Path]) -> None:
    page = models[0].parent / "d.html"
    shown = run("diff", *models, "--html", page)
    assert shown.returncode == 6, shown.stderr
    content = data_of(page)
    assert content["measured"]
    moved = [change for change in content["stats"]["change"] if change]
    scaled = load_file(models[0] / "model.safetensors")["model.layers.1.q_proj.weight"]
    assert moved == [pytest.approx(0.5 * float(np.linalg.norm(scaled)), rel=1e-5)]
    assert sum(content["stats"]["lone"][:6]) == 1


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def made_up_page(folder: Path, layers: int, experts: int) -> Path:
    hostile = ("</script><img src=x onerror=alert(1)>", "float32", (2, 2))
    inspection = inspection_of([*mixture_tensors(layers, experts), hostile], ranks=64)
    statistics = statistics_of(inspection)
    return ckptkit.write_report(inspection, folder / "page.html", statistics=statistics)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_page(tmp_path_factory.mktemp("page"), 8, 4)


def test_pages_open_without_an_error_and_load_nothing(
    browser: Browser, page: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path / "run", step, metrics={"loss": 1 / step}, save_number=step)
    pages = [page, tmp_path / "run.html", tmp_path / "d.html", tmp_path / "plain.html"]
    assert run("inspect", tmp_path / "run", "--html", pages[1]).returncode == 0
    assert run("diff", *models, "--html", pages[2]).returncode == 6
    ckptkit.write_report(ckptkit.diff(*models), pages[3])
    for opened in pages:
        browser.requests()
        browser.open(opened)
        browser.settle()
        assert browser.log("browser") == []
        assert browser.requests() == [opened.as_uri()]
        assert browser.run("return document.querySelectorAll('section').length") > 2
    assert browser.run("return document.images.length") == 0


ROWS = (
    "return [...document.querySelectorAll('.body .row .name')].slice(0, 3)"
    ".map((name) => name.textContent)"
)
FOUND = "return document.querySelector('#tensors .tools .hint').textContent"


@pytest.mark.slow
def test_10_000_tensors_are_searched_and_sorted(browser: Browser, tmp_path: Path) -> None:
    browser.open(made_up_page(tmp_path, 61, 54))
    browser.press("/")
    browser.press("LAYERS.3. q_a")
    assert browser.run(ROWS) == ["model.layers.3.self_attn.q_a_proj.weight"]
    browser.press("Escape")
    browser.press("experts.53.*down")
    assert browser.run(FOUND).startswith("61 of 10,")
    browser.press("Escape")
    browser.click("#tensors [aria-colindex='2'] button")
    assert browser.run(ROWS)[0] == "model.embed_tokens.weight"
    browser.click("#tensors [aria-colindex='2'] button")
    assert browser.run(ROWS)[0] == "</script><img src=x onerror=alert(1)>"
    few = browser.run("return document.querySelectorAll('.body .row').length")
    assert few < 100


def test_everything_is_reached_by_keys(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.tree [tabindex=\"0\"]').focus()")
    label = "return document.activeElement.getAttribute('aria-label')"
    assert "model, " in browser.run(label)
    browser.press("ArrowDown")
    first = browser.run(label)
    browser.press("ArrowRight")
    assert browser.run(label) != first
    browser.press("ArrowLeft")
    assert browser.run(label) == first
    browser.press("Enter")
    crumbs = "return document.querySelector('.crumbs').textContent"
    assert "layers" in browser.run(crumbs)
    browser.press("Backspace", "Backspace", "Backspace")
    assert browser.run(crumbs).startswith("all")
    browser.run("document.querySelector('.heat td[tabindex=\"0\"]').focus()")
    browser.press("ArrowDown")
    assert "layers.1." in browser.run(label)
    browser.press("Enter")
    assert "#tensor=model.layers.1" in browser.run("return location.hash")
    browser.run("document.querySelector('.body .row[tabindex=\"0\"]').focus()")
    browser.press("End")
    assert browser.run("return document.activeElement.textContent").startswith("</script>")
    browser.press("Enter")
    assert browser.run("return document.querySelector('.detail h3').textContent").startswith(
        "</scr"
    )


def test_a_link_leads_to_a_tensor_or_a_module(browser: Browser, page: Path) -> None:
    name = "model.layers.7.self_attn.o_proj.weight"
    browser.open(page, f"#tensor={name}")
    detail = browser.run("return document.querySelector('.detail').textContent")
    assert name in detail
    assert "rank 0 to rank 63: " in detail
    browser.open(page, "#module=model.layers.7")
    crumbs = browser.run("return document.querySelector('.crumbs').textContent")
    assert crumbs.startswith("all\u203amodel\u203alayers\u203a7")


@pytest.mark.slow
def test_the_theme_follows_the_system_and_the_switch(browser: Browser, page: Path) -> None:
    browser.open(page)
    theme = "return document.documentElement.dataset.theme"
    for scheme in ("dark", "light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.emulate("Emulation.setEmulatedMedia", media="", features=features)
        assert browser.run(theme) == scheme
    browser.run(
        "const select = document.querySelector('.theme select');"
        "select.value = 'dark'; select.dispatchEvent(new Event('change'))"
    )
    assert browser.run(theme) == "dark"
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(theme) == "light"
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(theme) == "dark"
    browser.run("localStorage.clear()")
