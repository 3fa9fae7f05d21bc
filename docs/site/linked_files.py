"""Files outside of `docs/` that pages link to, such as examples: each gets a page of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "files"
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md")
"""Files that the navigation has."""
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json", ".yml": "yaml"}


def linked_files(pages: Iterable[Path]) -> dict[str, str]:
    """Returns Markdown for all files that pages, and these files, link to, by repository path."""
    found = {path: _as_page(ROOT / path) for path in ALWAYS}
    waiting = [(page, page.read_text(encoding="utf-8")) for page in pages]
    waiting += [(ROOT / path, text) for path, text in found.items()]
    while waiting:
        page, text = waiting.pop()
        for path in _targets(page, text):
            if path not in found:
                found[path] = _as_page(ROOT / path)
                if path.endswith(".md"):
                    waiting.append((ROOT / path, found[path]))
    return found


def page_of(path: str) -> str:
    """Returns the path in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    plain = path.removesuffix(".md").replace("/", "-").replace(".", "-")
    return f"{FOLDER}/{plain}.md".lower()


def relink(text: str, *, origin: str, page: str) -> str:
    """Returns the Markdown of a page with links that fit the site.

    Args:
        text: Of the page.
        origin: The path in the repository that links are relative to.
        page: The path of the page in the site.
    """

    def link(target: str, anchor: str) -> str:
        path = _inside(origin, target)
        if path is None:
            return f"{target}{anchor}"
        return posixpath.relpath(page_of(path), posixpath.dirname(page) or ".") + anchor

    return _replace_links(text, link)


def _targets(page: Path, text: str) -> list[str]:
    origin = page.relative_to(ROOT).as_posix()
    found: list[str] = []

    def note(target: str, anchor: str) -> str:
        path = _inside(origin, target)
        if path is not None and not path.startswith("docs/"):
            found.append(path)
        return f"{target}{anchor}"

    _replace_links(text, note)
    return found


def _inside(origin: str, target: str) -> str | None:
    """Returns the path of what a link names, if it is a file of the repository."""
    if re.match(r"[a-z]+:", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return path if (ROOT / path).is_file() else None


def _replace_links(text: str, replace: Callable[[str, str], str]) -> str:
    """Replaces the targets of links outside of code."""
    end, parts = 0, []
    for code in _CODE.finditer(text):
        parts += [_links(text[end : code.start()], replace), code.group()]
        end = code.end()
    return "".join([*parts, _links(text[end:], replace)])


def _links(text: str, replace: Callable[[str, str], str]) -> str:
    return _LINK.sub(lambda m: replace(m.group(1), m.group(2) or ""), text)


def _as_page(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    language = _LANGUAGES.get(path.suffix, "text")
    name = path.relative_to(ROOT).as_posix()
    return f"# {name}\n\n````{language}\n{text}````\n"
