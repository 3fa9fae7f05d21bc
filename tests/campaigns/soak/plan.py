"""What happens in a soak, drawn from its seed: chapters of several lives, lives of several steps.

A chapter is a run of its own, drawn from the seed and its number, so that one can be repeated
alone. A life is what one start of the job does. What is drawn is the sequence of actions and the
moments at which harm comes; how far a process has come by then is up to the machine.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import asdict, dataclass, field
from typing import Any

STRATEGIES = {
    2: ("fsdp2", "fsdp1_flat", "fsdp1_orig", "fsdp1_grad_op", "fsdp1_no_shard", "ddp"),
    3: ("fsdp2", "fsdp1_flat", "fsdp1_orig", "fsdp1_grad_op", "fsdp1_no_shard", "ddp"),
    4: ("fsdp2", "hsdp", "fsdp1_flat", "fsdp1_orig", "fsdp1_hybrid", "ddp"),
}
FLAT = ("fsdp1_flat", "fsdp1_grad_op", "fsdp1_no_shard", "fsdp1_hybrid")
SAVES = ("async", "async", "async", "wait", "local")
ENDS = ("close", "close", "exit", "raise", "kill_all", "kill_all")
TOOLS = ("consolidate", "consolidate", "prune", "watch", "push", "verify")
# Where a writer meets its end: at which call that changes something, of which save.
MOST_CALLS = 44
MOST_REQUESTS = 3


@dataclass(frozen=True)
class Harm:
    """Something that goes wrong after a step."""

    kind: str  # `kill`, `term`, `stop`, `full`, `store` or `slow`
    who: str = ""  # whose process: `rank`, `ranks`, `all`, `writer`, `committer`, `keeper`, `drain`
    rank: int = 0
    after: float = 0.0  # seconds after the step's save began
    seconds: float = 0.0  # how long a process is stopped, a disk full, a store out of order
    answer: str = ""  # of a store: a status, `lost` (answers) or `cut` (bodies)

    @property
    def name(self) -> str:
        """Its kind, as the report counts it."""
        if self.kind == "full":
            return "full disk"
        if self.kind in {"store", "slow"}:
            return "slow store" if self.kind == "slow" else f"store answers {self.answer}"
        signal = {"kill": "SIGKILL", "term": "SIGTERM", "stop": "SIGSTOP"}[self.kind]
        return f"{signal} of {'the ' if self.who == 'ranks' else ''}{_NAMES[self.who]}"


_NAMES = {
    "rank": "a rank",
    "ranks": "ranks",
    "all": "every process",
    "writer": "a writer",
    "committer": "a committer",
    "keeper": "a node's committer",
    "drain": "a drain",
}


@dataclass(frozen=True)
class Tool:
    """A command beside the training."""

    kind: str  # one of `TOOLS`
    keep_last: int = 2  # of a prune
    dies_after: float = 0.0  # seconds after which it is killed and run again; 0 for never
    hub_fault: str = ""  # what the Hub answers first: a status, `drop` or `lost`; empty for nothing


@dataclass(frozen=True)
class Step:
    """A step of training."""

    save: str = ""  # one of `SAVES`, or empty
    name: str = ""  # of the saved folder, where it is not that of the step
    harm: Harm | None = None  # what goes wrong
    tool: Tool | None = None  # what is started beside


@dataclass(frozen=True)
class Life:
    """What one start of the job does."""

    world: int  # number of ranks
    strategy: str  # how the model is sharded
    steps: tuple[Step, ...]  # one after the other
    end: str  # `close`, `exit` (without closing), `raise` (from the loop), `kill_all`
    end_after: float = 0.0  # seconds until the kill of that
    # Which of the steps there is resumed from, as a share of them; None: the newest.
    rollback: float | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further options of the Checkpointer
    # Where a process kills itself or its rank, as fields of `training_life.Doom`.
    doom: dict[str, Any] | None = None
    limit_bytes: int = 0  # size of files above which nothing may be written; 0 for none
    heeds: bool = False  # whether SIGTERM is handled
    lost_node: int | None = None  # a node whose disk is empty at the start; None for none
    # Whether the next life begins before the processes of this one have left; those that are
    # stopped go on in the middle of it.
    next_at_once: bool = False
    wakes_after: float = 0.0  # seconds from the start after which those of the life before go on
    exports: bool = False  # whether the model is exported before the end

    @property
    def is_calm(self) -> bool:
        """Whether nothing happens that may fail a save: what is stopped goes on in time."""
        if self.doom is not None or self.limit_bytes:
            return False
        kinds = {step.harm.kind for step in self.steps if step.harm is not None}
        return kinds <= {"stop", "slow", "store"} and "stall_seconds" not in self.options


@dataclass(frozen=True)
class Chapter:
    """A run, from its first save to its end."""

    seed: int
    number: int
    place: str  # `dir`, `tiers` or `s3`
    disk: str  # what is a small file system: `run`, `nodes`, or empty for none
    model: str  # `plain`, `wide`, `llama` or `lora`
    layout: str  # of the Checkpointer
    keep_last: int | None  # of the Checkpointer; None for no rule
    keep_every: int | None  # as well; only beside `keep_last`
    ranks_per_node: int  # how many ranks share a node's disk
    lives: tuple[Life, ...]  # one after the other; the last one is calm

    def lines(self) -> list[str]:
        """Returns the plan, for a person."""
        head = asdict(self)
        del head["lives"]
        found = [f"chapter {self.number}: {_text(head)}"]
        for number, life in enumerate(self.lives):
            shown = asdict(life)
            del shown["steps"]
            found.append(f"  life {number}: {_text(shown)}")
            found += [f"    {_text(asdict(step)) or 'train'}" for step in life.steps]
        return found


def _text(values: dict[str, Any]) -> str:
    shown = {k: _text(v) if isinstance(v, dict) else v for k, v in values.items()}
    return " ".join(f"{k}={v}" for k, v in shown.items() if v not in ("", None, {}, 0, 0.0, False))


@dataclass(frozen=True)
class Scope:
    """What may be drawn."""

    models: tuple[str, ...] = ("plain", "wide", "llama", "lora")  # kinds of models
    places: tuple[str, ...] = ("dir", "tiers", "s3")  # kinds of places
    most_lives: int = 7
    most_steps: int = 7
    mounts: bool = True  # whether small file systems can be mounted


def draw_chapter(seed: int, number: int, scope: Scope) -> Chapter:
    """Draws a chapter; the same one for the same arguments."""
    draw = random.Random(f"soak-{seed}-{number}")
    # In turn, so that a short soak has all of them.
    turn = number + random.Random(seed).randrange(12)
    place = scope.places[turn % len(scope.places)]
    disk = draw.choice(
        {"dir": ("run", ""), "tiers": ("run", "nodes", "")}.get(place, ("nodes", ""))
    )
    model = scope.models[(turn + turn // 12) % len(scope.models)]
    keep_last = draw.choice((None, 1, 2, 3))
    chapter = Chapter(
        seed=seed,
        number=number,
        place=place,
        disk=disk if scope.mounts else "",
        model=model,
        layout=draw.choice(("accelerate", "dcp") if model == "lora" else _LAYOUTS),
        keep_last=keep_last,
        keep_every=draw.choice((None, None, 3)) if keep_last else None,
        ranks_per_node=draw.choice((1, 2)),
        lives=(),
    )
    lives = [
        _Drawing(draw, chapter, scope).life() for _ in range(draw.randint(3, scope.most_lives))
    ]
    calm = Life(draw.choice((2, 3)), "fsdp2", (Step(save="wait"),), "close")
    return dataclasses.replace(chapter, lives=(*lives, calm))


_LAYOUTS = ("accelerate", "dcp", "trainer")


class _Drawing:
    def __init__(self, draw: random.Random, chapter: Chapter, scope: Scope) -> None:
        self.draw = draw
        self.chapter = chapter
        self.scope = scope

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def life(self) -> Life:
        draw = self.draw
        world = draw.choice((2, 2, 3, 4))
        kinds = [k for k in STRATEGIES[world] if self.chapter.model != "lora" or k not in FLAT]
        life = Life(
            world=world,
            strategy=draw.choice(kinds),
            steps=(),
            end=draw.choice(ENDS),
            end_after=round(draw.uniform(0, 0.4), 3),
            rollback=round(draw.random(), 3) if self.chance(0.15) else None,
            options=self.options(),
            heeds=self.chance(0.3),
            next_at_once=self.chance(0.3),
            wakes_after=round(draw.uniform(0, 4.0), 1),
            exports=self.chance(0.2),
        )
        trouble = draw.choice(("none", "signals", "signals", "signals", "doom", "place", "place"))
        steps = [self.step(world, trouble) for _ in range(draw.randint(1, self.scope.most_steps))]
        life = dataclasses.replace(life, steps=tuple(steps))
        if trouble == "doom":
            life = dataclasses.replace(life, doom=self.doom(world))
        if trouble == "place" and self.chance(0.3):
            life = dataclasses.replace(life, limit_bytes=draw.choice((1, 6_000, 20_000)))
        if self.chapter.place != "dir" and self.chance(0.12):
            nodes = 1 + (world - 1) // self.chapter.ranks_per_node
            life = dataclasses.replace(life, lost_node=draw.randrange(nodes))
        return life

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.chance(0.2):
            options["in_flight"] = "skip"
        if self.chance(0.3):
            options["max_in_flight"] = 2
        if self.chapter.model == "wide" and self.chance(0.4):
            options["staging_limit"] = "1MiB"
        if self.chance(0.15):
            options["stall_seconds"] = 4.0
        return options

    def step(self, world: int, trouble: str) -> Step:
        draw = self.draw
        save = draw.choice(SAVES) if self.chance(0.75) else ""
        step = Step(save=save, name=self.name() if save and self.chance(0.06) else "")
        if trouble in {"signals", "place"} and self.chance(0.45):
            step = dataclasses.replace(
                step, harm=self.signal(world) if trouble == "signals" else self.place()
            )
        if self.chance(0.18):
            step = dataclasses.replace(step, tool=self.tool())
        return step

    def name(self) -> str:
        return f"kept_{self.draw.randrange(1_000)}"

    def signal(self, world: int) -> Harm:
        draw = self.draw
        tiers = self.chapter.place != "dir"
        who = draw.choice(
            ("rank", "rank", "writer", "writer", "committer", "all", "ranks")
            + (("keeper", "drain", "drain") if tiers else ())
        )
        if who in {"rank", "ranks"}:
            kind = draw.choice(("kill", "term", "stop", "stop"))
        else:
            kind = "kill" if who == "all" else draw.choice(("kill", "stop"))
        return Harm(
            kind,
            who,
            rank=draw.randrange(world),
            after=round(draw.choice((0.0, draw.uniform(0, 0.05), draw.uniform(0, 0.5))), 3),
            seconds=round(draw.choice((0.3, 1.0, 2.0)), 1) if kind == "stop" else 0.0,
        )

    def place(self) -> Harm:
        draw = self.draw
        after, seconds = round(draw.uniform(0, 0.1), 3), draw.choice((0.5, 1.0, 3.0))
        if self.chapter.disk and (self.chapter.place != "s3" or self.chance(0.4)):
            return Harm("full", after=after, seconds=seconds)
        if self.chapter.place != "s3":
            return self.signal(2)
        if self.chance(0.25):
            return Harm("slow", after=after, seconds=seconds)
        answer = draw.choice(("500", "503", "lost", "cut"))
        return Harm("store", after=after, seconds=seconds, answer=answer)

    def doom(self, world: int) -> dict[str, Any]:
        draw = self.draw
        places = {"dir": ("writer", "committer"), "s3": ("writer", "keeper")}
        where = draw.choice(
            places.get(self.chapter.place, ("writer", "keeper", "drain", "committer"))
        )
        return {
            "where": where,
            "rank": draw.randrange(world) if where in {"writer", "drain"} else 0,
            "act": draw.choice(("itself", "itself", "rank")),
            "call": draw.randint(1, MOST_CALLS),
            "request": draw.randint(1, MOST_REQUESTS),
        }

    def tool(self) -> Tool:
        draw = self.draw
        kind = draw.choice(TOOLS + (("merge", "merge") if self.chapter.model == "lora" else ()))
        return Tool(
            kind,
            keep_last=draw.choice((1, 2, 4)),
            dies_after=round(draw.uniform(0.05, 1.0), 3) if self.chance(0.3) else 0.0,
            hub_fault=draw.choice(("", "", "500", "429", "drop", "lost")),
        )
