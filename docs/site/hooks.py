"""What mkdocs calls while it builds the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.site.commands import FOLDER, command_pages
from docs.site.linked_files import linked_files, page_of, relink

_TABLE_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
_PICTURE = re.compile(r"^!\[[^\]]*\]\((?:\.\./)*(images/[\w-]+\.svg)\)$", re.MULTILINE)
_ORIGINS: dict[str, str] = {}
"""Paths in the repository of pages that are not in `docs/`, by their paths in the site."""


def on_config(config: Any) -> Any:
    """Adds the pages of the commands to the navigation."""
    pages = [{title: f"{FOLDER}/{name}.md"} for name, (title, _) in command_pages().items()]
    for section in config.nav:
        if "Reference" in section:
            section["Reference"].append({"Commands in full": pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds pages that are made of the code, and those of files outside of `docs/`."""
    folder = Path(config.docs_dir)
    made = {f"{FOLDER}/{name}.md": text for name, (_, text) in command_pages().items()}
    linked = linked_files(sorted(folder.rglob("*.md")))
    _ORIGINS.clear()
    _ORIGINS.update({page_of(path): path for path in linked})
    made |= {page_of(path): text for path, text in linked.items()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Makes links fit the site, and writes code in tables as Python-Markdown takes it.

    Pictures become a part of the page, so that they have its colours, light or dark.
    """
    path = page.file.src_uri
    origin = _ORIGINS.get(path, f"docs/{path}")
    text = relink(markdown, origin=origin, page=path)
    text = _PICTURE.sub(lambda found: _picture(Path(config.docs_dir, found.group(1))), text)
    return _TABLE_CODE.sub(lambda code: code.group().replace("\\|", "|"), text)


def _picture(path: Path) -> str:
    return f"<div>\n{path.read_text(encoding='utf-8').strip()}\n</div>"
