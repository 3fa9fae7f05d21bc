"""A chapter of a soak: a run from its first save to its end, with what is beside it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.campaigns.soak import leftovers
from tests.campaigns.soak.forks import MARK
from tests.campaigns.soak.ledger import Ledger
from tests.campaigns.soak.lives import LifeRun, Stage
from tests.campaigns.soak.models import Shadow
from tests.campaigns.soak.plan import Chapter, Life
from tests.campaigns.soak.services import Services, mount, unmount
from tests.campaigns.soak.steps import compare_step, complete_steps, fetch_run, number_of
from tests.campaigns.soak.tools import Desk

END_SECONDS = 60.0


class ChapterRun:
    def __init__(self, services: Services, chapter: Chapter) -> None:
        self.services, self.chapter = services, chapter
        self.folder = services.folder / f"chapter-{chapter.number}"
        self.folder.mkdir()
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._ledger = Ledger(chapter.keep_last, chapter.keep_every, in_place=chapter.place == "s3")
        self._shadow = Shadow(chapter.model, chapter.seed)
        self._small = self._mount()
        self._stage = self._set_stage()
        further = services.store.arguments() if chapter.place == "s3" else []
        self._desk = Desk(
            services, chapter, self._stage.run, further, self.folder / "beside", self._ledger,
            self._lock, self._shadow,
        )  # fmt: skip
        self._stage.start_tool = self._desk.start
        self._compared: set[tuple[str, int]] = set()

    def _mount(self) -> Path | None:
        if not self.chapter.disk:
            return None
        place = self.services.folder / "mounts" / str(self.chapter.number)
        if not mount(place):
            return None
        self._stack.callback(unmount, place)
        return place

    def _set_stage(self) -> Stage:
        chapter, small = self.chapter, self._small
        options: dict[str, object] = {
            "keep_last": chapter.keep_last,
            "keep_every": chapter.keep_every,
        }
        run, nodes = self.folder / "run", self.folder / "nodes"
        if small is not None:
            run, nodes = (small / "run", nodes) if chapter.disk == "run" else (run, small / "nodes")
        place = str(run)
        if chapter.place == "s3":
            place = f"{self.services.bucket.url}/{self._prefix}"
            options["storage_options"] = self.services.store.options
        return Stage(
            self.services,
            chapter,
            self.folder,
            place,
            None if chapter.place == "dir" else nodes,
            small,
            options,
            self._shadow,
            self._ledger,
            lambda _: None,
        )

    @property
    def _prefix(self) -> str:
        return f"run-{self.chapter.number}"

    def run(self, is_over: Callable[[], bool]) -> None:
        """Lives all lives, the calm last one soon where the time is over."""
        before = leftovers.shared_memory(), leftovers.sockets()
        with self._stack:
            *lives, last = enumerate(self.chapter.lives)
            for number, life in lives:
                if is_over():
                    break
                self._live(number, life)
                self._desk.wait()
                if not life.next_at_once:
                    self._look()
            self._live(*last)
            self._desk.wait()
            self._judge_rest(*before)
            self._desk.judge_hub()
        shutil.rmtree(self.folder)

    def _live(self, number: int, life: Life) -> None:
        if life.lost_node is not None and self._stage.nodes is not None:
            lost = self._stage.nodes / f"node{life.lost_node}"
            if lost.is_dir():
                shutil.rmtree(lost)
                self._ledger.lose_node(life.lost_node)
                self.services.count.faults["loss of a node's disk"] += 1
        LifeRun(self._stage, number, life, self._goal(life)).run()

    def _goal(self, life: Life) -> int | None:
        """Returns the step that a life goes back to, None for the newest."""
        steps = sorted(
            saved.step
            for saved in self._ledger.saves.values()
            if saved.is_durable and not saved.name
        )
        there = {number_of(self._local_run() / name) for name in complete_steps(self._local_run())}
        steps = [step for step in steps if step in there]
        if life.rollback is None or not steps:
            return None
        self.services.count.actions["steps back"] += 1
        return steps[int(life.rollback * len(steps))]

    def _local_run(self) -> Path:
        """Returns the run, or a copy of what is in the bucket."""
        if self.chapter.place != "s3":
            return Path(self._stage.run)
        copy = self.folder / "copy"
        fetch_run(self.services.bucket, self._prefix, copy)
        return copy

    def _look(self) -> None:
        """Compares all complete steps of the run, which is at rest."""
        run = self._local_run()
        serials = {}
        for name in complete_steps(run):
            compared = compare_step(run / name, self._shadow)
            if compared.wrong:
                self._wrong(f"{compared.wrong}")
                continue
            serials[name] = compared.serials[0]
            self.services.count.size_bytes += compared.size_bytes
            self.services.count.actions["steps compared"] += 1
            if (name, serials[name]) not in self._compared:
                self._compared.add((name, serials[name]))
                self.services.count.steps += 1
        for wrong in self._ledger.judge_contents(serials):
            self._wrong(wrong)

    def _judge_rest(self, memory: set[str], sockets: set[str]) -> None:
        """Judges what is left once all is closed."""
        self._look()
        run = self._local_run()
        stray = leftovers.stray_files(run, complete_steps(run))
        if self._desk.has_killed and self.chapter.place == "s3":
            stray = [path for path in stray if not path.startswith(".ckptkit/in-use")]
        nodes = self._stage.nodes
        for node in sorted(nodes.iterdir()) if nodes is not None and nodes.is_dir() else ():
            stray += [f"{node.name}/{path}" for path in self._stray_of_node(node)]
        stray += [f"TMPDIR: {path.name}" for path in self.services.temporary.iterdir()]
        if self.chapter.place == "s3":
            prefix = f"{self._prefix}/"
            uploads = self.services.bucket.unfinished_uploads()
            stray += [f"upload {key}" for key in uploads if key.startswith(prefix)]
        stray += [f"memory {name}" for name in leftovers.shared_memory() - memory if _ours(name)]
        stray += [f"socket {name}" for name in leftovers.sockets() - sockets]
        stray += leftovers.outliving(
            MARK, self.services.mark, END_SECONDS, spared=self.services.spared
        )
        if stray:
            self._wrong(f"left over: {stray}")

    def _stray_of_node(self, node: Path) -> list[str]:
        """Returns what is on a node's disk beside its parts of steps; only the present sweep it."""
        if int(node.name.removeprefix("node")) not in self._ledger.present:
            return []
        return leftovers.stray_files(node, complete_steps(node))

    def _wrong(self, text: str) -> None:
        self.services.count.problems.append(f"chapter {self.chapter.number}: {text}")


def _ours(name: str) -> bool:
    return name.startswith(".ckptkit")  # other tests on the machine have folders there
