"""Compares the pinned packages with the known advisories: `make audit`.

pip-audit asks PyPI for each package. Some mirrors of PyPI serve the page of a package and not that
of a release, so what it cannot find is looked up there, which is an answer if the pinned version is
the newest. Ends with status 1 if an advisory has no decision in `.ci/advisories.txt`, and with 0
where nothing can be asked; the last line says how many packages were looked up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PINS = HERE.parent / "constraints.txt"
DECISIONS = HERE / "advisories.txt"
PAGE = "https://pypi.org/pypi/{}/json"
SECONDS = 60.0
PAGE_SECONDS = 60.0
REQUEST_SECONDS = 5
AT_ONCE = 16
Found = Mapping[str, list[str]]  # identifiers of a package's advisories, the first with its aliases


def read_pairs(path: Path, separator: str) -> dict[str, str]:
    """Reads lines of two parts, apart from comments."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.partition(separator) for line in lines if line and not line.startswith("#"))
    return {name.strip(): rest.strip() for name, _, rest in pairs}


def identifiers(advisory: Mapping[str, Any]) -> str:
    """Returns the identifier of an advisory and its aliases, in one text."""
    return " ".join(dict.fromkeys([advisory["id"], *(advisory.get("aliases") or ())]))


def ask_by_pip_audit(python: str) -> Found:
    """Returns the advisories of the packages that pip-audit finds on PyPI."""
    words = ["-r", str(PINS), "--no-deps", "--disable-pip", "-s", "pypi", "-f", "json"]
    words += ["--progress-spinner", "off", "--timeout", str(REQUEST_SECONDS)]
    with tempfile.TemporaryDirectory() as cache:
        command = [python, "-m", "pip_audit", *words, "--cache-dir", cache]
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
            packages = json.loads(done.stdout)["dependencies"]
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            print(f"pip-audit gave no answer: {type(error).__name__}")
            return {}
    return {
        package["name"]: [identifiers(advisory) for advisory in package["vulns"]]
        for package in packages
        if "vulns" in package
    }


def ask_page(name: str, version: str, until: float) -> list[str] | None:
    """Returns the advisories of a package whose newest version is this one; None if unknown."""
    if time.monotonic() > until:
        return None
    try:
        with urllib.request.urlopen(PAGE.format(name), timeout=REQUEST_SECONDS) as answer:
            page = json.load(answer)
        if page["info"]["version"] != version or "vulnerabilities" not in page:
            return None
        return [identifiers(one) for one in page["vulnerabilities"] if not one.get("withdrawn")]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def ask_pages(pins: Mapping[str, str]) -> Found:
    """Returns the advisories of packages whose pinned version is the newest one."""
    until = time.monotonic() + PAGE_SECONDS
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = threads.map(lambda pin: ask_page(*pin, until), pins.items())
        return {name: ids for name, ids in zip(pins, answers, strict=True) if ids is not None}


def undecided(found: Found, decisions: Mapping[str, str]) -> Iterator[str]:
    """Prints each advisory that has a decision, and yields the others."""
    for name, advisories in sorted(found.items()):
        for advisory in advisories:
            reason = next((decisions[one] for one in advisory.split() if one in decisions), "")
            if reason:
                print(f"{name}: {advisory}: {reason}")
            else:
                yield f"{name}: {advisory}"


def main(python: str) -> int:
    """Asks for all pins, and returns the exit status."""
    pins = read_pairs(PINS, "==")
    names = {name.lower().replace("_", "-"): name for name in pins}
    by_tool = {names.get(name, name): ids for name, ids in ask_by_pip_audit(python).items()}
    found = {**by_tool, **ask_pages({n: v for n, v in pins.items() if n not in by_tool})}
    problems = list(undecided(found, read_pairs(DECISIONS, " ")))
    for problem in problems:
        print(f"undecided: {problem}; upgrade it, or write the reason into .ci/advisories.txt")
    unknown = sorted(pins.keys() - found.keys())
    if unknown:
        print(f"could not be looked up: {', '.join(f'{n} {pins[n]}' for n in unknown)}")
    print(f"{len(found)} of {len(pins)} packages were looked up, {len(problems)} undecided")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
