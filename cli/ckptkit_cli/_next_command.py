"""What to do after an inspection, as a command to copy."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from ckptkit.pipeline.adapters.facts import AdapterFacts, choices
from ckptkit.pipeline.inspecting import Inspection
from ckptkit.planning.selection import lost_adapter
from ckptkit_cli._text import escaped


@dataclass(frozen=True, slots=True)
class NextStep:
    """A command, or none, and a remark on it; both are safe to print."""

    command: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """What a user typed to find a checkpoint.

    Attributes:
        source: The path.
        select: What was selected there.
        also: Further directories.
    """

    source: str
    select: str | None = None
    also: tuple[str, ...] = ()


def next_step(inspection: Inspection, given: Given) -> NextStep:
    """Chooses what a user would want to run next.

    Args:
        inspection: What was found.
        given: What the user typed to find it.
    """
    # What lies in several directories has the paths that it has below those that were named.
    path = given.source if given.select is not None or given.also else inspection.path
    models = list(dict.fromkeys(tree.name for tree in inspection.trees if tree.part == "model"))
    if inspection.problems:
        return NextStep(
            _command("verify", path, given=given),
            "reads all data and lists what is damaged; consolidate refuses what is not whole",
        )
    if not models:
        lost = lost_adapter(line.name for line in inspection.tensors)
        return NextStep("", lost or "nothing to consolidate: there is no model here")
    return _of_a_model(inspection, models, path, given)


def _of_a_model(inspection: Inspection, models: list[str], path: str, given: Given) -> NextStep:
    if inspection.adapter is not None:
        return _of_adapter(inspection.adapter, path, given)
    if len(models) > 1:
        return _choice(inspection, models, path, given)
    if inspection.peft is not None:
        peft = inspection.peft
        return NextStep("", escaped(f"this is {peft.title}, and no model; {peft.advice}"))
    if inspection.format == "safetensors" and inspection.model_type:
        return NextStep(
            _command("verify", path, given=given),
            "reads it all; these weights load as they are",
        )
    return _consolidation(inspection, path, given)


def _of_adapter(adapter: AdapterFacts, path: str, given: Given) -> NextStep:
    chosen = choices(given.select, given.also)
    merge = escaped(adapter.merge(path, chosen=chosen))
    extract = escaped(adapter.extract(path, chosen=chosen))
    remark = f"; {escaped(adapter.remark)}" if adapter.remark else ""
    if adapter.is_ready:
        return NextStep(merge, f"PEFT loads this folder as it is{remark}")
    if adapter.holds_base:
        return NextStep(merge, f"or, for the adapter alone, `{extract}`{remark}")
    return NextStep(extract, f"or, for the merged model, `{merge}`{remark}")


def _choice(inspection: Inspection, models: list[str], path: str, given: Given) -> NextStep:
    taken = [name for name in models if name not in inspection.refusals]
    if not taken:
        return NextStep("", f"nothing to consolidate: {escaped(inspection.refusals[models[0]])}")
    command = _command("consolidate", path, "OUT", given=replace(given, select=taken[0]))
    if len(taken) == 1:
        return NextStep(command, f"the only model of {len(models)} that is written as one")
    others = ", ".join(map(escaped, taken[1:]))
    return NextStep(command, f"or another of the {len(taken)} models: {others}")


def _consolidation(inspection: Inspection, path: str, given: Given) -> NextStep:
    told = next(iter(inspection.refusals.values()), "")
    if not told:
        return NextStep(_command("consolidate", path, "OUT", given=given))
    return NextStep(
        _command("consolidate", path, "OUT", "--names", "live", given=given),
        f"writes the raw state dict, since {escaped(told)}",
    )


def _command(name: str, *arguments: str, given: Given) -> str:
    chosen = choices(given.select, given.also)
    return escaped(shlex.join(["ckptkit", name, *arguments, *chosen]))
