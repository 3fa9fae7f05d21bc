"""What a run was reported to hold, and what must therefore be there.

Every call of `save` of a chapter has a serial number, which grows; each save carries it in its
optimizer. So what is resumed from, or is on a disk, tells which call of `save` it is from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Saved:
    """A call of `save`."""

    serial: int
    step: int  # what was saved
    name: str  # of the folder, where it is not that of the step
    world: int  # number of ranks
    nodes: frozenset[int]  # whose disks have it first
    strategy: str = ""  # how it was sharded
    is_local: bool = False  # whether it was reported durable there
    is_durable: bool = False  # whether it was reported durable in the run


@dataclass
class Ledger:
    """The saves of a run and the rules by which steps are removed."""

    # Of the rule that keeps the fewest, None where no rule was ever applied.
    keep_last: int | None = None
    keep_every: int | None = None  # a number whose multiples stay under all rules
    in_place: bool = False  # whether a step that is saved again is overwritten, as in a bucket
    present: frozenset[int] = frozenset()  # the nodes of the life that goes on
    saves: dict[int, Saved] = field(default_factory=dict)  # by serial number

    def begin(self, saved: Saved) -> None:
        self.saves.setdefault(saved.serial, saved)
        if self.in_place:
            for other in self.saves.values():
                if other.serial < saved.serial and folder_of(other) == folder_of(saved):
                    other.is_durable = False  # the node's disk has it meanwhile

    def lose_node(self, node: int) -> None:
        for saved in self.saves.values():
            if node in saved.nodes:
                saved.is_local = False

    def pruned(self, keep_last: int) -> None:
        """Notes that steps may be removed by a further rule, which has no multiples."""
        known = self.keep_last
        self.keep_last = keep_last if known is None else min(known, keep_last)
        self.keep_every = None

    @property
    def newest(self) -> Saved | None:
        """The last save that must be resumed from, or a later one."""
        found = [saved for saved in self._numbered() if self._must_be_found(saved)]
        return max(found, key=lambda saved: saved.serial, default=None)

    def judge_resume(self, step: int | None, serials: Sequence[float], asked: int | None) -> str:
        """Returns what is wrong with a resume, empty if nothing is."""
        newest = self.newest
        if step is None:
            return "" if newest is None else f"nothing was resumed from, though {newest} is durable"
        if len(serials) != 1:
            return f"step {step} is mixed of the saves {list(serials)}"
        saved = self.saves.get(int(serials[0]))
        if saved is None or saved.step != step or saved.name:
            return f"step {step} was resumed from the save {serials}, which is {saved}"
        if asked is not None:
            return "" if step == asked else f"step {step} was resumed from instead of {asked}"
        if newest is not None and saved.serial < newest.serial:
            return f"{saved} was resumed from, though {newest} is durable"
        return ""

    def judge_contents(self, there: Mapping[str, int]) -> list[str]:
        """Returns what is wrong with the complete steps of a run at rest."""
        wrong = []
        for folder, serial in there.items():
            saved = self.saves.get(serial)
            if saved is None or folder_of(saved) != folder:
                wrong.append(f"{folder} holds the save {serial}, which is {saved}")
        for saved in self.saves.values():
            if saved.is_durable and there.get(folder_of(saved), -1) < saved.serial:
                reason = self._why_gone(saved, there)
                if not reason:
                    wrong.append(f"{saved} was durable, and there is only {dict(there)}")
        return wrong

    def _why_gone(self, saved: Saved, there: Mapping[str, int]) -> str:
        if saved.name or folder_of(saved) in there or self.keep_last is None:
            return ""
        if self.keep_every and saved.step % self.keep_every == 0:
            return ""
        later = [self.saves[serial] for serial in there.values() if serial > saved.serial]
        if any(other.step < saved.step for other in later):
            return "training went back from it"
        numbered = [other for other in later if not other.name]
        return "newer steps are there" if len(numbered) >= self.keep_last else ""

    def _numbered(self) -> Collection[Saved]:
        return [saved for saved in self.saves.values() if not saved.name]

    def _must_be_found(self, saved: Saved) -> bool:
        return saved.is_durable or (saved.is_local and saved.nodes <= self.present)


def folder_of(saved: Saved) -> str:
    return saved.name or f"checkpoint-{saved.step}"
