"""What all chapters of a soak share: the processes that fork, the store, the Hub, and the count."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.soak import forks
from tests.campaigns.soak.forks import MARK
from tests.fork_host import Child, ForkHost
from tests.hub_server import TOKEN, HubServer
from tests.object_store import Bucket, ObjectStore, running_object_store

RANK_PACKAGES = (
    *("numpy", "safetensors.torch", "torch", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.optim.adamw"),
    *("torch._dynamo", "ckptkit.training", "tests.campaigns.soak.ranks"),
)
HUGGING_FACE = ("transformers.models.llama.modeling_llama", "peft")
TOOL_PACKAGES = (
    *("numpy", "s3fs", "ckptkit.api", "huggingface_hub.hf_api"),
    *("ckptkit_cli.main", "ckptkit_cli.watch", "ckptkit_cli.push", "ckptkit_cli.consolidate"),
)


@dataclass
class Count:
    """What was done, and what was wrong."""

    actions: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # injected, by kind
    # By the ranks and strategies of the save and of the resume.
    resumes: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Saves that failed where something had gone wrong, by kind of error.
    failed: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)  # whatever should not be
    steps: int = 0  # steps whose tensors were compared with the shadow's
    size_bytes: int = 0  # of these tensors, and of those of outputs
    resumed: int = 0  # resumes of which every rank was compared
    lives: int = 0  # starts of the job


class Services:
    """Started when first used, and ended with the soak."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex[:12]
        self.count = Count()
        self._stack = stack
        self._ranks: dict[bool, ForkHost] = {}
        self._tools: ForkHost | None = None
        self._store: ObjectStore | None = None
        self._hub: HubServer | None = None
        for name in ("tmp", "cache", "hf", "mounts"):
            (folder / name).mkdir()

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def rank_host(self, model: str) -> ForkHost:
        """Returns what forks ranks, and the stores that they meet in."""
        large = model in {"llama", "lora"}
        if large not in self._ranks:
            packages = RANK_PACKAGES + (HUGGING_FACE if large else ())
            self._ranks[large] = self._host(*packages)
        return self._ranks[large]

    def start_tool(self, words: list[str], log: Path) -> Child:
        if self._tools is None:
            self._tools = self._host(*TOOL_PACKAGES, **self._hub_environment())
        return self._tools.start(forks.tool, words, log=log)

    @property
    def spared(self) -> set[int]:
        found = {host.pid for host in self._ranks.values()}
        return found | ({self._tools.pid} if self._tools else set())

    @property
    def hub(self) -> HubServer:
        if self._hub is None:
            self._hub = self._stack.enter_context(HubServer(xet=False))
        return self._hub

    @property
    def store(self) -> ObjectStore:
        if self._store is None:
            self._store = self._stack.enter_context(running_object_store())
        return self._store

    @property
    def bucket(self) -> Bucket:
        return self.store.bucket("soak")

    def _host(self, *packages: str, **environment: str) -> ForkHost:
        settings = self._environment() | environment
        return self._stack.enter_context(ForkHost(*packages, prepare=None, **settings))

    def _environment(self) -> dict[str, str]:
        return {
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "HF_HOME": str(self.folder / "hf"),
        }

    def _hub_environment(self) -> Mapping[str, str]:
        return {
            "HF_ENDPOINT": self.hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


@contextmanager
def services() -> Iterator[Services]:
    """Starts what is needed in a folder of its own, and removes that."""
    folder = Path(tempfile.mkdtemp(prefix="ckptkit-soak-"))
    try:
        with ExitStack() as stack:
            yield Services(folder, stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


MOUNT_SIZE = "400m"


def mount(place: Path) -> bool:
    """Mounts a small file system; returns whether it may."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_SIZE}", "tmpfs", str(place)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=True)  # noqa: S607


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tried"
        if mount(place):
            unmount(place)
            return True
        return False
