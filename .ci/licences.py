"""Lists what an installation of ckptkit brings along, with licences: `make licences`.

The packages are those that the core and the named extras need, at the pinned versions, as the
environment has them. With `--cyclonedx`, the list is a software bill of materials.

Source: CycloneDX 1.6, https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

NAME = "ckptkit-toolkit"
EXTRAS = frozenset({"blake3", "s3", "serve"})
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?([^;]*)(?:;(.*))?$")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
_NOT_HERE = re.compile(r"""(?:sys_platform|platform_system)\s*==\s*["'](?:win32|Windows)["']""")


def needed(name: str, extras: frozenset[str], seen: dict[tuple[str, frozenset[str]], Any]) -> None:
    """Adds the packages that a package needs, and what these need."""
    key = re.sub(r"[-_.]+", "-", name).lower(), extras
    if key in seen:
        return
    try:
        package = seen[key] = distribution(name)
    except PackageNotFoundError:  # of another platform, or of an older Python
        return
    for text in package.requires or ():
        match = _REQUIREMENT.match(text.replace(" ", ""))
        marker = (match[4] or "") if match is not None else ""
        wanted = set(_EXTRA.findall(marker))
        if match is not None and not _NOT_HERE.search(marker) and (not wanted or wanted & extras):
            needed(match[1], frozenset(filter(None, (match[2] or "").split(","))), seen)


def licence(package: Distribution) -> str:
    """Returns the licence that a package names: the expression, else its classifiers."""
    metadata = package.metadata
    classifiers = [c for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    named = " or ".join(c.rpartition(" :: ")[2] for c in classifiers if c.count("::") > 1)
    first = (metadata.get("License") or "").strip().splitlines()[:1]
    return metadata.get("License-Expression") or named or (first[0][:60] if first else "unknown")


def cyclonedx(packages: dict[str, Distribution]) -> dict[str, Any]:
    own = packages.pop(NAME)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(own)},
        "components": [component(package) for _, package in sorted(packages.items())],
    }


def component(package: Distribution) -> dict[str, Any]:
    name = package.metadata["Name"]
    url = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{package.version}"
    return {
        "type": "library",
        "bom-ref": url,
        "name": name,
        "version": package.version,
        "purl": url,
        "licenses": [{"license": {"name": licence(package)}}],
    }


def main(words: list[str]) -> None:
    seen: dict[tuple[str, frozenset[str]], Distribution] = {}
    needed(NAME, EXTRAS, seen)
    packages = {name: package for (name, _), package in seen.items()}
    if "--cyclonedx" in words:
        out = Path(words[words.index("--cyclonedx") + 1])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(cyclonedx(packages), indent=1) + "\n", encoding="utf-8")
        print(f"{len(packages)} packages: {out}")
        return
    for _, package in sorted(packages.items()):
        print(f"{package.metadata['Name']:<28} {package.version:<14} {licence(package)}")
    unknown = [name for name, package in packages.items() if licence(package) == "unknown"]
    if unknown:
        sys.exit(f"without a licence: {', '.join(unknown)}")


if __name__ == "__main__":
    main(sys.argv[1:])
