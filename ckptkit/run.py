"""`python -m ckptkit.run`: runs an unmodified script with its sharded saves going through ckptkit.

The script runs as if it were started directly: with its arguments, its folder on the path, its name
`__main__`, its traceback and its exit status. At its end the program waits for saves.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from concurrent import futures
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from msgspec import Struct

from ckptkit.core.arguments import STOCK
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.text import a_kind
from ckptkit.integrations.patches import (
    ImportPatcher,
    Library,
    replace_methods,
    saves_whole_models,
)

logger = logging.getLogger("ckptkit.run")  # __name__ is "__main__" here

_USAGE = """\
usage: python -m ckptkit.run SCRIPT [ARGUMENT...]
       python -m ckptkit.run -m MODULE [ARGUMENT...]
       accelerate launch -m ckptkit.run SCRIPT [ARGUMENT...]
       torchrun -m ckptkit.run SCRIPT [ARGUMENT...]

Runs an unmodified training script. What accelerate's save_state saves, and what the Trainer saves
in shards (FSDP with SHARDED_STATE_DICT), is saved by ckptkit, in the background and in the same
files, and loaded by it; save_model of both writes without a gather, and get_state_dict of
accelerate collects the state without one. save, async_save and load of torch.distributed.checkpoint
go through ckptkit too, whichever framework calls them. All else stays as it is.

CKPTKIT_RUN=on     the default
CKPTKIT_RUN=wait   training waits for each save, for scripts that use the folder right after it
CKPTKIT_RUN=off    the script runs as if it were started directly
"""
_VARIABLE = "CKPTKIT_RUN"
_CHOICES = ("on", "wait", "off")
_OTHER_WORDS = {"": "on", **dict.fromkeys(("1", "yes", "true"), "on")}
_OTHER_WORDS |= dict.fromkeys(("0", "no", "false"), "off")
_OWN_FRAMES = frozenset({__file__, runpy.__file__, "<frozen runpy>"})
_OPEN_RUNS = "ckptkit.integrations.checkpointers"
_OPEN_SAVES = "ckptkit.training.dcp"


class Script(Struct, frozen=True):
    """The script or module to run."""

    name: str  # the path of a script, or the name of a module
    is_module: bool
    arguments: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script, and returns the exit status if that has not raised `SystemExit`.

    `arguments` are those after the program's name, of the process if left out.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    try:
        script, choice = parse(words), _choice()
    except UsageError as error:
        sys.stderr.write(f"ckptkit.run: {error}\n{_USAGE}")
        return error.exit_status
    if choice != "off":
        handler = _UnlessConfigured()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        ours = logging.getLogger("ckptkit")
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        # torchrun numbers the ranks; one of them writes to the log.
        logs = os.environ.get("RANK", "0") == "0"
        ImportPatcher(_LIBRARIES, waits=choice == "wait", logs=logs).install()
    return _status_of(script)


def parse(arguments: Sequence[str]) -> Script:
    """Parses the arguments.

    Raises:
        UsageError: If they name no script or module.

    >>> parse(["-m", "trl.scripts.sft", "--bf16"])
    Script(name='trl.scripts.sft', is_module=True, arguments=('--bf16',))
    """
    words = list(arguments)
    is_module = words[:1] == ["-m"]
    if is_module:
        del words[0]
    if not words:
        raise UsageError(f"no {'module' if is_module else 'script'} to run was given")
    name, *rest = words
    if name.startswith("-"):
        raise UsageError("no such option; options of the script come after it", where=name)
    if not is_module and not Path(name).exists():
        raise UsageError("no such script", where=name)
    return Script(name, is_module, tuple(rest))


def _choice() -> str:
    value = os.environ.get(_VARIABLE, "")
    choice = _OTHER_WORDS.get(value.lower(), value.lower())
    if choice not in _CHOICES:
        raise UsageError(
            f"is {value!r}, where one of {', '.join(_CHOICES)} was expected", where=_VARIABLE
        )
    return choice


class _UnlessConfigured(logging.StreamHandler[TextIO]):
    """Shows the log of ckptkit unless the script configures logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _patch_accelerate(module: ModuleType, patcher: ImportPatcher) -> None:
    """Makes all Accelerators save and load through ckptkit.

    Source: `accelerate.Accelerator`, versions 1.7 to 1.15.
    """

    def ours(name: str, **given: Any) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            accelerate = importlib.import_module("ckptkit.integrations.accelerate")
            return getattr(accelerate, name)(self, *arguments, **given, **options)

        return method

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        getattr(init, STOCK)(self, *arguments, **options)
        patcher.log_use()

    replace_methods(
        module.Accelerator,
        save_state=ours("save_like_stock", waits=patcher.waits),
        load_state=ours("load_like_stock"),
        save_model=ours("save_model_like_stock"),
        get_state_dict=ours("get_state_like_stock"),
        __init__=init,
    )


def _patch_trainer(module: ModuleType, patcher: ImportPatcher) -> None:
    """Makes all Trainers save and resume through ckptkit from the moment that they are built.

    Source: `transformers.Trainer`, versions 5.6 to 5.23.
    """

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        getattr(init, STOCK)(self, *arguments, **options)
        if saves_whole_models(self):
            return
        from ckptkit.integrations.transformers import install

        try:
            install(self, wait=True if patcher.waits else None)
        except UnsupportedError as error:
            patcher.warn(f"{a_kind(self)} saves as it always does: {error}")

    replace_methods(module.Trainer, __init__=init)


def _patch_dcp(module: ModuleType, patcher: ImportPatcher) -> None:
    """Makes the functions of torch.distributed.checkpoint save and load through ckptkit.

    Source: `state_dict_saver` and `state_dict_loader` of it, torch 2.6 to 2.15.
    """

    def ours(name: str) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            patcher.log_use()
            answer = getattr(importlib.import_module(_OPEN_SAVES), name)(*arguments, **options)
            if patcher.waits and name == "async_save":
                futures.wait([getattr(answer, "upload_completion", answer)])
            return answer

        return function

    names = [name for name in ("save", "async_save", "load") if hasattr(module, name)]
    stock = {name: getattr(module, name) for name in names}
    replace_methods(module, **{name: ours(name) for name in names})
    package = sys.modules.get(_DCP)
    for name in names:  # where the package was imported before
        if getattr(package, name, None) is stock[name]:
            setattr(package, name, getattr(module, name))


_DCP = "torch.distributed.checkpoint"
_ACCELERATE = "accelerate.accelerator"
_LIBRARIES = (
    *(
        Library(f"{_DCP}.state_dict_{part}", _DCP, (2, 6), (2, 15), _patch_dcp)
        for part in ("saver", "loader")
    ),
    Library(_ACCELERATE, "accelerate", (1, 7), (1, 15), _patch_accelerate),
    Library(
        "transformers.trainer", "Trainer", (5, 6), (5, 23), _patch_trainer, requires=_ACCELERATE
    ),
)


def _status_of(script: Script) -> int:
    """Runs the script, then waits for its saves; its own exit status has priority."""
    try:
        _execute(script)
    except SystemExit as ending:
        status = _wait_for_saves()
        if status and not ending.code:
            return status
        raise
    except Exception as error:  # noqa: BLE001  shown as Python would show it, and before waiting
        trace = error.__traceback__  # from the first line of the script on
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FRAMES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _wait_for_saves()
        return 1
    return _wait_for_saves()


def _execute(script: Script) -> None:
    sys.argv = [script.name, *script.arguments]
    if script.is_module:
        runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        return
    path = Path(script.name)
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    if path.suffix != ".py" or not path.is_file():  # a directory, an archive or a compiled file
        runpy.run_path(script.name, run_name="__main__")
        return
    # As Python does it: in a module that stays `__main__` until the process ends.
    name = str(path.absolute())
    module = ModuleType("__main__")
    module.__file__ = name
    module.__loader__ = SourceFileLoader("__main__", name)
    sys.modules["__main__"] = module
    with io.open_code(name) as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102  what it was asked to run


def _wait_for_saves() -> int:
    """Waits for all saves, and returns the exit status for their errors."""
    failures = []
    for name in (_OPEN_SAVES, _OPEN_RUNS):
        if name in sys.modules:  # otherwise nothing was saved
            failures += sys.modules[name].close_all()
    for failure in failures:
        logger.error("%s", failure)
    return failures[0].exit_status if failures else 0


if __name__ == "__main__":
    sys.exit(main())
