"""What is published: the files of the packages, their licences, and the forms for issues."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_published_is_what_git_has_of_both_packages() -> None:
    dist = program("dist")
    files = dist.tracked(dist.SOURCES)
    assert {"ckptkit/py.typed", "ckptkit/__init__.py", "cli/ckptkit_cli/main.py"} <= files
    assert not [name for name in files if not name.startswith(("ckptkit/", "cli/ckptkit_cli/"))]
    names = {name.removeprefix("cli/") for name in files}
    dist.compare(Path("x.whl"), names, names)
    with pytest.raises(SystemExit, match=r"has \['ckptkit/notes.txt'\] beside what was expected"):
        dist.compare(Path("x.whl"), names | {"ckptkit/notes.txt"}, names)
    with pytest.raises(SystemExit, match=r"lacks \['ckptkit/py.typed'\]"):
        dist.compare(Path("x.whl"), names - {"ckptkit/py.typed"}, names)
    with pytest.raises(SystemExit, match="holds"):
        dist.compare(Path("x.whl"), names | {"tests/x.py"}, names | {"tests/x.py"})


def test_every_package_that_comes_along_has_a_licence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    licences = program("licences")
    licences.main([])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"numpy", "safetensors", "huggingface_hub", "fsspec", "s3fs", "aiohttp"} <= listed
    licences.main(["--cyclonedx", str(tmp_path / "out" / "sbom.json")])
    document = json.loads((tmp_path / "out" / "sbom.json").read_text())
    assert {component["name"] for component in document["components"]} == listed - {
        "ckptkit-toolkit"
    }


def test_every_direct_dependency_has_a_lower_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounded = re.compile(r"[\w.-]+(\[[\w,.-]+\])?(>=|==)\d")
    every = [
        *project["dependencies"],
        *(e for x in project["optional-dependencies"].values() for e in x),
    ]
    assert [entry for entry in every if not bounded.match(entry) and "ckptkit" not in entry] == []


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[0-9]*.yml")), ids=str
)
def test_forms_for_issues_ask_for_something(form: Path) -> None:
    document = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= document.keys()
    ids = [part["id"] for part in document["body"]]
    assert ids
    assert len(ids) == len(set(ids))
