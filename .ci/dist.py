"""Builds the wheel and the source distribution, and compares what is in them with what should be.

    python .ci/dist.py OUT [--release]

The wheel holds the files of both packages that git has, and nothing else; so nothing of the tests,
the fixtures or a local change is published. Needs build, twine and hatchling, see
`.ci/dist-requirements.txt`; nothing is fetched. With `--release`, the changelog has to have a
section with the date of this version.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.parser import BytesParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("ckptkit/", "cli/ckptkit_cli/")
BESIDE = ("CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml")
OF_SDIST = {"PKG-INFO", ".gitignore"}
OF_WHEEL = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
MOST_BYTES = 2_000_000
NEVER = ("tests", "fixtures", "benchmarks", "__pycache__", ".ci")


def main(out: Path, *, is_release: bool) -> None:
    """Builds into an empty folder, and ends with a message where something is wrong."""
    shutil.rmtree(out, ignore_errors=True)
    run("-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    files = tracked(SOURCES)
    in_wheel = {name.removeprefix("cli/") for name in files}
    compare(wheel, names_in_wheel(wheel), in_wheel)
    compare(sdist, names_in_sdist(sdist), files | tracked(BESIDE) | OF_SDIST)
    check_metadata(wheel, is_release=is_release)
    for path in (wheel, sdist):
        if path.stat().st_size > MOST_BYTES:
            fail(f"{path.name} has {path.stat().st_size:,} bytes, {MOST_BYTES:,} at most expected")
    run("-m", "twine", "check", "--strict", str(wheel), str(sdist))
    for path in (wheel, sdist):
        print(f"{path.stat().st_size:>9,} bytes  {path}")


def run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False)
    if done.returncode:
        fail(f"python {' '.join(arguments)} ended with {done.returncode}")


def tracked(paths: Iterable[str]) -> set[str]:
    """Returns the files below paths that git has, or where there is no git those on the disk."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        return set(listed.stdout.decode().strip("\0").split("\0"))
    found = (path for start in paths for path in [ROOT / start, *(ROOT / start).rglob("*")])
    names = {path.relative_to(ROOT).as_posix() for path in found if path.is_file()}
    return {name for name in names if "__pycache__" not in name}


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    extra = {name for name in names if ".dist-info/" in name}
    described = {name.partition(".dist-info/")[2] for name in extra}
    if described != OF_WHEEL:
        fail(f"{wheel.name}: {sorted(described ^ OF_WHEEL)} in .dist-info was not expected")
    return names - extra


def names_in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def compare(path: Path, found: set[str], expected: set[str]) -> None:
    missing, more = sorted(expected - found), sorted(found - expected)
    if missing or more:
        fail(f"{path.name} lacks {missing[:5]} and has {more[:5]} beside what was expected")
    wrong = [name for name in found if set(name.split("/")) & set(NEVER)]
    if wrong or not any(name.endswith("py.typed") for name in found):
        fail(f"{path.name} holds {wrong[:5]}, or no py.typed")


def check_metadata(wheel: Path, *, is_release: bool) -> None:
    """Compares the version, the licence and the classifiers with what the sources say."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = BytesParser().parsebytes(archive.read(name))
    text = (ROOT / "ckptkit" / "version.py").read_text(encoding="utf-8")
    version = text.partition('__version__ = "')[2].partition('"')[0]
    if metadata["Version"] != version or metadata["License-Expression"] != "Apache-2.0":
        fail(f"{wheel.name} is of {metadata['Version']}, {metadata['License-Expression']}")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if is_release and not re.search(heading, changes, re.MULTILINE):
        fail(f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'")
    if not is_release and "## [Unreleased]" not in changes:
        fail("CHANGELOG.md has no heading '## [Unreleased]'")


def fail(message: str) -> None:
    sys.exit(f"dist: {message}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_release="--release" in sys.argv[2:])
