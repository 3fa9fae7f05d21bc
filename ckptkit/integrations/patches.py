"""Replaces methods of a library right after a script has imported it.

Importing this module imports none of the libraries. `ckptkit.run` says what is replaced. A library
is changed only where its version is one that the change is known to fit.
"""

from __future__ import annotations

import functools
import importlib.abc
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from msgspec import Struct

from ckptkit.core.arguments import STOCK
from ckptkit.version import __version__

logger = logging.getLogger(__name__)

_NUMBERS = re.compile(r"(\d+)\.(\d+)")
_Version = tuple[int, int]


class Library(Struct, frozen=True):
    """A library that can be patched."""

    module: str  # the module after whose import it is patched
    title: str  # its name in the log
    first: _Version  # the oldest version that `patch` is known to fit
    last: _Version  # the newest one
    patch: Callable[[ModuleType, ImportPatcher], None]  # patches the module, all of it or nothing
    # The module of a library that it saves with, which has to be patched as well
    requires: str = ""


class ImportPatcher(importlib.abc.MetaPathFinder):
    """Patches libraries as they are imported.

    Attributes:
        waits: Whether every save is waited for.
    """

    def __init__(self, libraries: Sequence[Library], *, waits: bool, logs: bool) -> None:
        """Takes the libraries; call `install` to begin."""
        self.waits = waits
        self._libraries = {library.module: library for library in libraries}
        self._logs = logs
        self._patched: list[str] = []
        self._unpatched: set[str] = set()  # modules that stay as they are
        self._has_logged = False

    def install(self) -> None:
        """Patches libraries from now on, and those that are imported already."""
        sys.meta_path.insert(0, self)
        for name in self._libraries:
            if name in sys.modules:
                self._patch(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a library's module as the other finders do, and patches it once it has run."""
        if fullname not in self._libraries:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._patch_after(spec.loader)
                return spec
        return None

    def log_use(self) -> None:
        """Logs once, when a patched library is first used, which saves go through ckptkit."""
        if self._logs and not self._has_logged:
            self._has_logged = True
            ending = " and are waited for" if self.waits else ""
            logger.info(
                "ckptkit %s: sharded saves of %s go through ckptkit%s; CKPTKIT_RUN=off switches"
                " it off",
                __version__,
                " and ".join(dict.fromkeys(self._patched)),
                ending,
            )

    def warn(self, text: str) -> None:
        if self._logs:
            logger.warning("%s", text)

    def _patch_after(self, loader: Any) -> None:
        run = loader.exec_module

        @functools.wraps(run)
        def run_and_patch(module: ModuleType) -> None:
            run(module)
            self._patch(module)

        loader.exec_module = run_and_patch

    def _patch(self, module: ModuleType) -> None:
        library = self._libraries[module.__name__]
        package = library.module.partition(".")[0]
        version = str(getattr(sys.modules.get(package), "__version__", "of no number"))
        reason = self._obstacle(library, version)
        if not reason:
            try:
                library.patch(module, self)
            except AttributeError as error:
                reason = f"which is not as expected: {error}"
        if reason:
            self._unpatched.add(library.module)
            self.warn(f"{package} {version} was found, {reason}; its saves stay as they are")
        else:
            self._patched.append(f"{library.title} {version}")

    def _obstacle(self, library: Library, version: str) -> str:
        """Returns why a library is not patched; empty where it can be."""
        match = _NUMBERS.match(version)
        if not match or not library.first <= (int(match[1]), int(match[2])) <= library.last:
            first, last = (".".join(map(str, known)) for known in (library.first, library.last))
            return f"and ckptkit is known to fit {first} to {last}"
        if library.requires in self._unpatched:
            return f"and saves with {library.requires.partition('.')[0]}, which is left as it is"
        return ""


def replace_methods(owner: type | ModuleType, **methods: Callable[..., Any]) -> None:
    """Replaces methods of a class, or functions of a module; each has the replaced as `STOCK`."""
    stock = {name: getattr(owner, name) for name in methods}
    for name, method in methods.items():
        replacement = functools.update_wrapper(method, stock[name])
        setattr(replacement, STOCK, stock[name])
        setattr(owner, name, replacement)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes until the block ends; what was inherited is inherited again."""
    before = {name: value for name, value in vars(owner).items() if name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def saves_whole_models(trainer: Any) -> bool:
    """Whether a Trainer gathers the whole model for each of its steps."""
    state = getattr(getattr(trainer, "accelerator", None), "state", None)
    plugin = getattr(state, "fsdp_plugin", None)
    return "FULL_STATE_DICT" in str(getattr(plugin, "state_dict_type", ""))
