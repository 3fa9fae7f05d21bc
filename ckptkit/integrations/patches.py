"""Where libraries are changed so that an unmodified script saves through ckptkit.

Nothing is imported for it: a library is changed right after the script has imported it, and only
where its version is one that it is known to fit.
"""

from __future__ import annotations

import functools
import importlib.abc
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ckptkit.core.errors import UnsupportedError
from ckptkit.core.text import a_kind
from ckptkit.version import __version__

logger = logging.getLogger(__name__)

STOCK = "ckptkit_stock"
"""The attribute of a method in the place of another one under which the latter is kept."""

_NUMBERS = re.compile(r"(\d+)\.(\d+)")
_Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Library:
    """A library that can be changed.

    Attributes:
        module: The module after whose import it is changed.
        title: What it is called in the log.
        first: The oldest version that it is known to fit.
        last: The newest one.
        change: Changes the module, all of it or nothing.
        upon: The module of a library that it saves with, which has to be known as well.
    """

    module: str
    title: str
    first: _Version
    last: _Version
    change: Callable[[ModuleType, Seams], None]
    upon: str = ""

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


class Seams(importlib.abc.MetaPathFinder):
    """Changes libraries as they are imported.

    Attributes:
        waits: Whether every save is waited for.
    """

    def __init__(self, libraries: Sequence[Library], *, waits: bool, speaks: bool) -> None:
        """Takes the libraries; call `install` to begin.

        Args:
            libraries: What to change.
            waits: Whether every save is waited for.
            speaks: Whether this process writes to the log; one of all ranks does.
        """
        self.waits = waits
        self._libraries = {library.module: library for library in libraries}
        self._speaks = speaks
        self._changed: list[str] = []
        self._left: set[str] = set()  # modules that stay as they are
        self._has_told = False

    def install(self) -> None:
        """Has libraries changed from now on; also those that are imported already."""
        sys.meta_path.insert(0, self)
        for name in self._libraries:
            if name in sys.modules:
                self._change(sys.modules[name])

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Finds a library's module as the other finders do, and has it changed once it is run."""
        if fullname not in self._libraries:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        for finder in others:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._change_after(spec.loader)
                return spec
        return None

    def tell(self) -> None:
        """Says once, when a changed library is first used, what goes through ckptkit."""
        if self._speaks and not self._has_told:
            self._has_told = True
            ending = " and are waited for" if self.waits else ""
            logger.info(
                "ckptkit %s: sharded saves of %s go through ckptkit%s; CKPTKIT_RUN=off switches"
                " it off",
                __version__,
                " and ".join(self._changed),
                ending,
            )

    def warn(self, text: str) -> None:
        if self._speaks:
            logger.warning("%s", text)

    def _change_after(self, loader: Any) -> None:
        run = loader.exec_module

        @functools.wraps(run)
        def run_and_change(module: ModuleType) -> None:
            run(module)
            self._change(module)

        loader.exec_module = run_and_change

    def _change(self, module: ModuleType) -> None:
        library = self._libraries[module.__name__]
        version = str(getattr(sys.modules.get(library.package), "__version__", "of no number"))
        reason = self._why_left(library, version)
        if not reason:
            try:
                library.change(module, self)
            except AttributeError as error:
                reason = f"which is not as expected: {error}"
        if reason:
            self._left.add(library.module)
            self.warn(
                f"{library.package} {version} was found, {reason}; its saves stay as they are"
            )
        else:
            self._changed.append(f"{library.title} {version}")

    def _why_left(self, library: Library, version: str) -> str:
        """Tells why a library is left as it is; empty where it is not."""
        match = _NUMBERS.match(version)
        if not match or not library.first <= (int(match[1]), int(match[2])) <= library.last:
            tested = f"{_text(library.first)} to {_text(library.last)}"
            return f"and ckptkit is known to fit {tested}"
        if library.upon in self._left:
            return f"and saves with {library.upon.partition('.')[0]}, which is left as it is"
        return ""


def _text(version: _Version) -> str:
    return ".".join(map(str, version))


def _change_accelerate(module: ModuleType, seams: Seams) -> None:
    """Has all Accelerators save and load through ckptkit.

    Source: `accelerate.Accelerator`, versions 1.7 to 1.15.
    """

    def save_state(self: Any, *arguments: Any, **options: Any) -> Any:
        from ckptkit.integrations.accelerate import saved_like_stock

        return saved_like_stock(self, *arguments, waits=seams.waits, **options)

    def load_state(self: Any, *arguments: Any, **options: Any) -> None:
        from ckptkit.integrations.accelerate import loaded_like_stock

        loaded_like_stock(self, *arguments, **options)

    def save_model(self: Any, *arguments: Any, **options: Any) -> None:
        from ckptkit.integrations.accelerate import model_saved_like_stock

        model_saved_like_stock(self, *arguments, **options)

    def get_state_dict(self: Any, *arguments: Any, **options: Any) -> Any:
        from ckptkit.integrations.accelerate import state_like_stock

        return state_like_stock(self, *arguments, **options)

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        getattr(init, STOCK)(self, *arguments, **options)
        seams.tell()

    _replace(
        module.Accelerator,
        save_state=save_state,
        load_state=load_state,
        save_model=save_model,
        get_state_dict=get_state_dict,
        __init__=init,
    )


def _change_trainer(module: ModuleType, seams: Seams) -> None:
    """Has all Trainers save and resume through ckptkit from the moment that they are built.

    Source: `transformers.Trainer`, versions 5.6 to 5.23.
    """

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        getattr(init, STOCK)(self, *arguments, **options)
        if saves_whole_models(self):
            return
        from ckptkit.integrations.transformers import install

        try:
            install(self, wait=True if seams.waits else None)
        except UnsupportedError as error:
            seams.warn(f"{a_kind(self)} saves as it always does: {error}")

    _replace(module.Trainer, __init__=init)


def saves_whole_models(trainer: Any) -> bool:
    """Tells whether a Trainer gathers the whole model for each of its steps."""
    state = getattr(getattr(trainer, "accelerator", None), "state", None)
    plugin = getattr(state, "fsdp_plugin", None)
    return "FULL_STATE_DICT" in str(getattr(plugin, "state_dict_type", ""))


def _replace(owner: type, **methods: Callable[..., Any]) -> None:
    """Replaces methods of a class."""
    stock = {name: getattr(owner, name) for name in methods}
    for name, method in methods.items():
        replacement = functools.update_wrapper(method, stock[name])
        setattr(replacement, STOCK, stock[name])
        setattr(owner, name, replacement)


_ACCELERATE = "accelerate.accelerator"
LIBRARIES = (
    Library(_ACCELERATE, "accelerate", (1, 7), (1, 15), _change_accelerate),
    Library("transformers.trainer", "Trainer", (5, 6), (5, 23), _change_trainer, upon=_ACCELERATE),
)
"""All libraries that can be changed."""
