"""`make audit`: which packages were looked up, and which advisories have no decision."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CI = Path(__file__).resolve().parents[2] / ".ci"


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_audit", CI / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pins").write_text("# pins\nFine==1.0\nbad_one==2.0\nold==1.0\n")
    (tmp_path / "decisions").write_text("# none\n")
    monkeypatch.setattr(module, "PINS", tmp_path / "pins")
    monkeypatch.setattr(module, "DECISIONS", tmp_path / "decisions")

    def open_page(url: str, **_: Any) -> io.BytesIO:
        name = url.split("/")[-2]
        bad = [{"id": "PYSEC-1", "aliases": ["CVE-1"]}] if name == "bad_one" else []
        version = {"Fine": "1.0", "bad_one": "2.0", "old": "9.0"}[name]
        page = {"info": {"version": version}, "vulnerabilities": bad}
        return io.BytesIO(json.dumps(page).encode())

    monkeypatch.setattr(module.urllib.request, "urlopen", open_page)
    return module


def test_an_advisory_without_a_decision_fails(
    audit: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main("/no/such/python") == 1
    shown = capsys.readouterr().out
    assert "undecided: bad_one: PYSEC-1 CVE-1; upgrade it" in shown
    assert "could not be looked up: old 1.0" in shown
    assert "2 of 3 packages were looked up, 1 undecided" in shown


def test_an_advisory_with_a_reason_is_shown_and_passes(
    audit: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    audit.DECISIONS.write_text("CVE-1 only its server is affected, which nothing starts\n")
    assert audit.main("/no/such/python") == 0
    assert "PYSEC-1 CVE-1: only its server is affected" in capsys.readouterr().out


def test_without_a_network_nothing_fails(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(audit.urllib.request, "urlopen", refuse)
    assert audit.main("/no/such/python") == 0
    assert "0 of 3 packages were looked up, 0 undecided" in capsys.readouterr().out
