"""Which way the saves of a job end: at the shared place, or on the nodes' own disks first."""

from __future__ import annotations

from contextlib import ExitStack

from ckptkit.training.agree.peers import Meeting, Peers
from ckptkit.training.save.commit import Committer
from ckptkit.training.save.saver import Ending
from ckptkit.training.save.settling import Settler
from ckptkit.training.save.writer_process import Patience
from ckptkit.training.session import Session
from ckptkit.training.settings import Settings
from ckptkit.training.tiers.recover import Recovery
from ckptkit.training.tiers.save import TierEnding
from ckptkit.training.tiers.tier import open_tier


def open_ending(session: Session, peers: Peers, settings: Settings) -> Ending:
    """Makes what ends the saves of a job; all ranks have to call this.

    Where the nodes' own disks come first, what an earlier job left there is drained before
    anything else.
    """
    timeout = settings.timeout_seconds
    committer = Committer(session.committer, session.retired_by, timeout_seconds=timeout)

    def settler(about: str) -> Settler:
        return Settler(
            Meeting(peers, about),
            committer if peers.rank == 0 else None,
            timeout_seconds=timeout,
            listener=session.listen,
        )

    if settings.local is None:
        return settler("save")
    with ExitStack() as undo:
        tier = open_tier(settings.local, session.run, peers, timeout_seconds=timeout)
        undo.callback(tier.close)
        recovery = Recovery(tier, session.run, peers, session.committer, timeout)

        def recover() -> None:
            session.count_from(recovery.run_all())

        recover()
        if peers.rank == 0:
            session.run.sweep()
        patience = Patience(settings.stall_seconds, settings.timeout_seconds)
        meeting, drain = Meeting(peers), settler("drain")
        ending = TierEnding(tier, meeting, drain, patience, recover, timeout_seconds=timeout)
        undo.pop_all()
    return ending
