"""Which PEFT wrote an adapter, where that decides what its numbers mean.

How the names of a base's tensors on disk correspond to those that an adapter means.

Source: transformers 5.23, `_load_pretrained_model`: the weights of a headless model load into one
with a head, whose names have a prefix, and the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptkit.core.index import Fqn
from ckptkit.hub_names.names import HubNames, HubTensor, whole_of
from ckptkit.lora.config import PEFT_PREFIX, Adapter, LoraSettings
from ckptkit.lora.dialects import plain_name
from ckptkit.lora.layers import table_of

EXPERTS_BY_CLASS = (0, 19)
"""Since this version PEFT asks a model's class whether experts are stored as [in, out]."""
NORM_OF_UNMERGED = (0, 21)
"""Since this version PEFT takes DoRA's norms of weights without the adapters merged before."""
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})")


def version_of(text: str | None) -> tuple[int, int]:
    """Returns the major and minor number; the lowest where nothing says, as before PEFT 0.18.

    >>> version_of("0.21.2")
    (0, 21)
    """
    match = _VERSION.match(text or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def alpha_of_one_key(settings: LoraSettings, module: str, rank: int) -> float | None:
    """Returns the alpha of a module by the rule of PEFT before 0.14; None if it is not that old.

    The first pattern of either option that fits was then the key for both of them.

    Args:
        settings: The configuration.
        module: The path of the module in the base.
        rank: That of its factors, which proves the rule wrong where that has another.

    Source: peft 0.13, `LoraModel._create_and_replace`.
    """
    path = module.removeprefix(PEFT_PREFIX)
    patterns = (*settings.rank_pattern, *settings.alpha_pattern)
    key = next((one for one in patterns if re.match(rf".*\.{one}$", path)), path)
    if settings.rank_pattern.get(key, settings.r) != rank:
        return None
    return settings.alpha_pattern.get(key, settings.lora_alpha)


_COMPANION = ".weight."  # bitsandbytes puts a weight's scales under the weight's own name


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor to be written, and what it is made of.

    Attributes:
        name: Its name in the output.
        live: The tensors of the live model that it holds, or parts of.
        stored: The base's tensors that it is read from.
        part: How it is made of the live tensors; None where it is one of them as it is.
        is_stored_so: Whether the base stores it as it is written, not as training holds it.
    """

    name: Fqn
    live: tuple[Fqn, ...]
    stored: tuple[Fqn, ...]
    part: HubTensor | None = None
    is_stored_so: bool = True


def modules_of(adapter: Adapter) -> list[str]:
    """Returns the modules of the base that an adapter changes, those aside that it brings."""
    table = table_of(adapter.tensors)
    saved = adapter.settings.modules_to_save
    whole = (plain_name(name).rpartition(".")[0] for name in table.whole)
    kept = (module for module in whole if not any(name in module for name in saved))
    return list(dict.fromkeys([*(layer.module for layer in table.layers), *table.tokens, *kept]))


def lacking(modules: Iterable[str], names: Collection[Fqn]) -> list[str]:
    """Returns the modules of which no tensor is there."""
    owners = {name.rpartition(".")[0] for name in names}
    return [module for module in modules if module not in owners]


def prefix_between(modules: Collection[str], names: Collection[Fqn]) -> tuple[str, str]:
    """Finds the prefix that makes an adapter's modules and a base's names agree.

    Returns:
        What to put before the base's names, and before the adapter's; both empty where they
        agree, or where no prefix helps.
    """
    owners = {name.rpartition(".")[0] for name in names}
    missing = [module for module in modules if module not in owners]
    if not missing:
        return "", ""
    best = ("", "")
    fewest = len(missing)
    for module in missing:  # of a head, which a headless base lacks, no prefix is known
        for before in dict.fromkeys(_prefixes(module, owners)):
            renamed = {before[0] + owner for owner in owners}
            lost = sum(before[1] + each not in renamed for each in modules)
            if lost < fewest:
                best, fewest = before, lost
        if any(best):
            break
    return best


def _prefixes(module: str, owners: Collection[str]) -> Iterator[tuple[str, str]]:
    for owner in owners:
        if module.endswith(f".{owner}"):
            yield module[: -len(owner)], ""
        if owner.endswith(f".{module}"):
            yield "", owner[: -len(module)]


def with_prefix(adapter: Adapter, prefix: str) -> Adapter:
    """Returns an adapter whose modules have a prefix."""
    if not prefix:
        return adapter
    tensors = {
        Fqn(f"{PEFT_PREFIX}{prefix}{name.removeprefix(PEFT_PREFIX)}"): entry
        for name, entry in adapter.tensors.items()
    }
    return Adapter(adapter.name, adapter.settings, adapter.origin, tensors)


def placed_as_stored(names: Iterable[Fqn], prefix: str = "") -> list[Placed]:
    return [Placed(Fqn(prefix + n), (Fqn(prefix + n),), (n,)) for n in names]


def placed_on_disk(names: Collection[Fqn], hub: HubNames) -> list[Placed]:
    """Finds the live tensors that the tensors of a model folder are, or are parts of."""
    placed: dict[Fqn, Placed] = {}
    for name in names:
        tensor = hub.tensors.get(name)
        if tensor is not None:
            whole = _as_it_is(tensor, hub)
            live = tensor.sources if whole is None else (whole,)
            placed[name] = Placed(name, live, (name,), tensor if whole is None else None)
    for name in names:
        if name not in placed:
            placed[name] = Placed(name, (_beside(name, placed),), (name,))
    return list(placed.values())


def names_on_disk(hub: HubNames) -> dict[Fqn, Fqn]:
    found = ((_as_it_is(tensor, hub), name) for name, tensor in hub.tensors.items())
    return {live: name for live, name in found if live is not None}


def placed_as_live(names: Collection[Fqn], hub: HubNames) -> list[Placed]:
    """Makes the tensors of a model folder of those that training holds."""
    placed: list[Placed] = []
    used: set[Fqn] = set()
    for tensor in hub.tensors.values():
        if not all(source in names for source in tensor.sources):
            continue
        whole = _as_it_is(tensor, hub)
        used.update(tensor.sources)
        part = tensor if whole is None else None
        live = tensor.sources
        placed.append(Placed(tensor.name, live, live, part, is_stored_so=False))
    return [*placed, *placed_as_stored(name for name in names if name not in used)]


def _as_it_is(tensor: HubTensor, hub: HubNames) -> Fqn | None:
    whole = whole_of(tensor, hub.live)
    return whole if whole is not None and hub.live[whole] == tensor.shape else None


def _beside(name: Fqn, placed: Mapping[Fqn, Placed]) -> Fqn:
    """Returns the live name of what stands beside a weight, such as its scales."""
    module, _, rest = name.partition(_COMPANION)
    weight = placed.get(Fqn(f"{module}.weight"))
    if rest and weight is not None:
        return Fqn(f"{weight.live[0]}.{rest}")
    module, _, last = name.rpartition(".")
    weight = placed.get(Fqn(f"{module}.weight"))
    return name if weight is None else Fqn(f"{weight.live[0].rpartition('.')[0]}.{last}")
