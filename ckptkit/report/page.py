"""Renders a page as one file that needs no network, and writes it.

The page has one script and one style, which its Content-Security-Policy names by their digests:
nothing else runs, and nothing is loaded. Its content is JSON in a block that no browser executes.

Source: https://www.w3.org/TR/CSP3/ (hashes); https://html.spec.whatwg.org/multipage/scripting.html
(data blocks, and what ends a script element).
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode
from contextlib import suppress
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from ckptkit.core.errors import OutputError, OutputExistsError
from ckptkit.report.documents import ReportDocument
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import new_hidden_path, put_file
from ckptkit.storage.local.target import translate_errors
from ckptkit.storage.places import PathLike, is_url, local_path

# In the order in which the page runs them.
_SCRIPTS = (
    *("data.js", "widgets.js", "treemap.js", "layers.js", "placement.js", "timeline.js"),
    *("table.js", "main.js"),
)
_DRAFT = "page"
_BEGINNING = b"<!doctype html>\n<!-- ckptkit report -->"
_HINT = "name another file, or have this one replaced: --overwrite, overwrite=True"


def render_page(document: ReportDocument) -> bytes:
    """Returns the page, in UTF-8."""
    template, style, script = _assets()
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)};"
        " base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": policy,
        "title": escape(document.title),
        "style": style,
        "data": _data_block(document),
        "script": script,
    }
    done, rest = "", template
    for name, value in values.items():  # in the order of the template; values stay as they are
        before, mark, rest = rest.partition(f"{{{{{name}}}}}")
        assert mark, name  # noqa: S101  of the package's own template
        done += before + value
    return (done + rest).encode()


def write_page(document: ReportDocument, out: PathLike, *, overwrite: bool) -> Path:
    """Writes the page of a document: all of it, or nothing."""
    path = check_page_path(out, overwrite=overwrite)
    data = render_page(document)
    draft = new_hidden_path(path, _DRAFT)
    with translate_errors(path, len(data)):
        try:
            put_file(draft, data)
            if overwrite:
                draft.replace(path)
            else:
                _give_new_name(draft, path)
            LOCAL_DISK.sync_directory(path.parent)
        finally:
            draft.unlink(missing_ok=True)
    return path


def check_page_path(out: PathLike, *, overwrite: bool) -> Path:
    """Refuses a path at which no page can be written, or where something else is."""
    named = os.fspath(out)
    if is_url(out) or named in {"", "-"}:
        raise OutputError(
            "a page is written to a file of this machine",
            where=f"--html {named}",
            hint="pass a path such as report.html",
        )
    path = local_path(out)
    if path.is_dir():
        raise OutputError(
            "is a directory", where=named, hint=f"pass a file in it, such as {path}/report.html"
        )
    if not path.parent.is_dir():
        raise OutputError(
            "its directory does not exist", where=named, hint=f"create {path.parent} first"
        )
    if os.path.lexists(path):
        if not overwrite:
            raise OutputExistsError("the file exists", where=named, hint=_HINT)
        if not _is_page(path):
            raise OutputExistsError(
                "the file is not a page of ckptkit, and is not replaced",
                where=named,
                hint="name another file",
            )
    return path


def _is_page(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
    return False


def _give_new_name(draft: Path, path: Path) -> None:
    """Renames a file unless the new name is taken, by then too."""
    try:
        os.link(draft, path)  # which, unlike a rename, never replaces a file
    except FileExistsError:
        raise OutputExistsError("the file exists", where=str(path), hint=_HINT) from None
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise OutputExistsError("the file exists", where=str(path), hint=_HINT) from None
        draft.rename(path)


@cache
def _assets() -> tuple[str, str, str]:
    """Returns the template, the style and the script of all pages."""
    folder = files("ckptkit.report") / "assets"
    template, style, *scripts = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *_SCRIPTS)
    )
    return template, style, '"use strict";\n{\n' + "".join(scripts) + "}\n"


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data_block(document: ReportDocument) -> str:
    """Returns JSON in ASCII in which nothing can end the element that it is in."""
    text = json.dumps(document.to_json(), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
