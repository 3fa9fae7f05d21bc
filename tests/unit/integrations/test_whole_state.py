"""The whole state of a model on the first rank: what keeps it from there, and who is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.errors import NoSpaceError, PeerError, SaveError
from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.agree.peers import Peers
from ckptkit.training.save.staging import SharedBuffer

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ckptkit.integrations.accelerate import whole_state as module  # noqa: E402
from ckptkit.integrations.accelerate.whole_state import whole_state  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="not Linux")
PATIENCE = 20.0


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(width, 2)
        self.tied = self.head
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(0, 4))


def on_both(call: Callable[[Peers], Any]) -> list[Any]:
    """Calls for two ranks that share a board, and returns what each gave or raised."""
    board = LocalKeyValueStore()
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = call(Peers(rank, 2, board, "session"))
        except BaseException as error:  # noqa: BLE001  handed to the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_the_first_rank_gets_all_names_as_ordinary_tensors() -> None:
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    first, second = on_both(
        lambda peers: whole_state(models[peers.rank], peers, timeout_seconds=PATIENCE)
    )
    assert second == {}
    assert list(first) == list(models[0].state_dict())
    for name, value in models[0].state_dict().items():
        assert torch.equal(first[name], value)
        assert first[name].dtype == value.dtype
        assert not first[name].requires_grad
    first["head.weight"].zero_()
    assert bool(models[0].head.weight.any())


@pytest.mark.parametrize("kind", ["tensors", "machines", "memory", "unseen"])
def test_all_ranks_hear_why_only_stock_can_gather(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_second() -> bool:
        return threading.current_thread().name == "second"

    def whole(peers: Peers) -> Any:
        if peers.rank:
            threading.current_thread().name = "second"
        width = 4 if kind == "tensors" and peers.rank else 3
        return whole_state(Net(width), peers, timeout_seconds=PATIENCE)

    if kind == "machines":
        monkeypatch.setattr(module, "identify_machine", lambda: "b" if is_second() else "a")
    if kind == "memory":

        def refuse(_buffer: SharedBuffer, _size: int) -> bool:
            raise NoSpaceError("no memory is left")

        monkeypatch.setattr(SharedBuffer, "reserve", refuse)
    if kind == "unseen":
        monkeypatch.setattr("os.getpid", lambda: 1 << 30)
    told = {
        "tensors": "the ranks hold different tensors",
        "machines": "the ranks are on several machines, or in separate containers",
        "memory": "no memory is left",
        "unseen": "rank 1 cannot map the memory of rank 0",
    }
    first, second = on_both(whole)
    assert first == second
    assert first.startswith(told[kind])


def test_a_rank_that_fails_half_way_fails_the_others_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(_box: Any) -> Any:
        raise MemoryError("no more")

    def whole(peers: Peers) -> Any:
        return whole_state(Net(), peers, timeout_seconds=PATIENCE)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:ckptkit")

    monkeypatch.setattr(module, "slices_of", failing)  # rank 0 writes what all hold
    before = mapped()
    first, second = on_both(whole)
    assert isinstance(first, MemoryError)
    assert mapped() == before  # while the errors are kept
    assert isinstance(second, SaveError)
    assert "no more" in str(second)


def test_a_rank_that_never_comes_is_an_error_and_no_hang() -> None:
    peers = Peers(0, 2, LocalKeyValueStore(), "session")
    with pytest.raises(PeerError, match=r"rank 1 did not answer within 0\.2 s"):
        whole_state(Net(), peers, timeout_seconds=0.2)


def test_what_a_state_dict_may_have_otherwise_is_left_to_stock() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"own": 1}

    peers = Peers(0, 1, LocalKeyValueStore(), "session")
    found = whole_state(Extra(2, 2), peers, timeout_seconds=PATIENCE)
    assert found == "modules keep state besides their tensors"
    compiled = nn.Sequential()
    compiled._orig_mod = nn.Linear(2, 2)
    assert whole_state(compiled, peers, timeout_seconds=PATIENCE) == "the model was compiled"
