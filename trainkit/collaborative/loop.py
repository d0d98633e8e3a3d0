"""What a peer's loop works on, in whichever way its run agrees, and what every such loop does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from trainkit.collaborative.averaging import Averaging
from trainkit.collaborative.clock import RoundClock
from trainkit.collaborative.common import CommonState
from trainkit.collaborative.dht import SwarmDHT
from trainkit.collaborative.judging import finite, number
from trainkit.collaborative.messages import Progress as PeerProgress
from trainkit.collaborative.result import Round
from trainkit.collaborative.sentry import Sentry
from trainkit.collaborative.team import Team
from trainkit.collaborative.watch import Watch
from trainkit.data.batch import Batch
from trainkit.errors import RunFailedError
from trainkit.training.nonfinite import DivergedError, NonFinite, Remark
from trainkit.training.outcome import MOST_ROLLBACKS
from trainkit.training.parts import Parts
from trainkit.training.progress import Progress

Ending = Literal["finished", "stopped", "ended", "moved", "lost"]
"""All rounds done; told to leave by a signal; the creator has ended the run; it goes on by another clock; nobody of the
swarm answers any more."""

# The swarm is lost after so many rounds without an average and without news of anybody.
LOST_AFTER = 3
# How often a peer asks for news of the others.
NEWS_SECONDS = 1.0


@dataclass(frozen=True)
class Done:
    """What a peer has done in a round whose average may still be under way."""

    index: int
    samples: int
    seconds: float
    """Spent in updates."""
    metrics: dict[str, float]
    lr: float
    peers: int
    """Peers heard of lately, this one included."""
    position: int
    """Where the data order stood."""


@dataclass(frozen=True)
class Box(Done):
    """What a peer did in one round, and what came of it."""

    result: Round

    @classmethod
    def of(cls, done: Done, result: Round) -> Box:
        """Once that is known."""
        return cls(**vars(done), result=result)


@dataclass
class Pace:
    """How a peer gets on."""

    step_seconds: float = 0.0
    """How long an update takes, as `took` has it; 0: not known yet."""
    exchange_seconds: float = 0.0
    """How long the last exchange took."""
    rounds_alone: int = 0
    round_seconds: float = 0.0
    """How long the last round was, where it is not the clock that says so."""
    done: Done | None = None
    """The last round, until it is known what came of its exchange."""

    def took(self, seconds: float) -> None:
        """Take in how long one more update took; a single slow one says little."""
        self.step_seconds = 0.8 * self.step_seconds + 0.2 * seconds if self.step_seconds else seconds


@dataclass(frozen=True)
class Peer:
    """Everything the loop works on."""

    name: str
    parts: Parts
    """For this process alone: what validates and saves."""
    team: Team
    """What trains, on all ranks of this peer."""
    clock: RoundClock
    dht: SwarmDHT
    watch: Watch
    common: CommonState
    averaging: Averaging
    sentry: Sentry
    data_seed: int
    """Every peer has a data order of its own, so that together they see more than each alone."""
    stop_requested: Callable[[], bool]
    progress: Progress
    after_round: Callable[[Box], None] = lambda box: None
    """Takes note of every round."""
    remark: Remark = lambda kind, **facts: None
    """Writes an event."""
    trains: bool = True
    """Else it only reduces, keeps the common weights and gives them away."""
    may_be_alone: bool = False
    """A peer that others can reach waits for them where it is; to anybody else silence means that the swarm is gone."""
    addresses: tuple[str, ...] = ()
    """Where others reach this peer; empty if they cannot."""
    look_around: Callable[[], None] = lambda: None
    """What such a peer does about having been alone for some rounds; it does not wait."""
    before_round: Callable[[], None] = lambda: None
    """The creator publishes the manifest anew, so that it neither expires nor misses on new nodes."""
    beat: Callable[[], None] = lambda: None
    pace: Pace = field(default_factory=Pace)

    def batches(self) -> AbstractContextManager[Iterator[Batch]]:
        """What it trains on; nothing, where it does not: it need not have the data."""
        if not self.trains:
            return nullcontext(iter(()))
        return self.team.batches(self.data_seed, self.progress.position)


def hear(p: Peer) -> None:
    """News of the others, and of who is out. Raises RefusedError if it is this peer."""
    p.watch.poll()
    p.sentry.look()
    p.dht.excluded.require_welcome()


def ending_of(p: Peer) -> Ending | None:
    """Why it is time to leave, if it is."""
    if p.stop_requested():
        return "stopped"
    if p.watch.stopped:
        return "ended"
    if p.watch.first_round > p.clock.first:  # clocks move on only, so that an old manifest moves nobody back
        return "moved"
    if p.pace.rounds_alone >= LOST_AFTER:
        p.pace.rounds_alone = 0  # also for whoever comes back
        if not p.may_be_alone:
            return "lost"
        p.look_around()
    return None


def require_quick(p: Peer, what: str, *, fix: str) -> None:
    """Raise RunFailedError where ``what`` is timed, an update or a part of one, takes longer than a round."""
    seconds = p.pace.step_seconds
    if seconds > p.clock.seconds:
        raise RunFailedError(
            f"One {what} takes {seconds:.0f} s here, longer than a round of {p.clock.seconds:.0f} s.",
            why="This peer would never have anything to contribute.",
            fix=fix,
        )


def forget_or_end(p: Peer, nonfinite: NonFinite, error: DivergedError) -> None:
    """Go on from the common weights (the checkpoint of a peer is what the peers have in common), or end."""
    if p.parts.config.train.on_nonfinite != "rollback" or p.progress.rollbacks == MOST_ROLLBACKS:
        raise error.for_user() from None
    p.progress.rollbacks += 1
    nonfinite.in_a_row = 0
    p.common.forget()


def publish(p: Peer, index: int, box: Box | None = None) -> None:
    """Tell the others about this round; they forget it when the next ones bring no news."""
    progress = PeerProgress(
        name=p.name,
        round=index,
        samples=box.samples if box else 0,
        samples_per_sec=box.samples / box.seconds if box and box.seconds else 0.0,
        loss=number(box.metrics.get("loss")) if box else 0.0,
        group=box.result.group if box else 0,
        time=time.time(),
        client=p.dht.client_mode,
        parts=box.result.parts if box else 0,
        expected=box.result.expected if box else 0,
        sent=box.result.bytes_up if box else 0,
        received=box.result.bytes_down if box else 0,
        val_loss=finite(p.progress.val.get("loss")),
        val_acc1=finite(p.progress.val.get("acc1")),
        addresses=list(p.addresses),  # the records know no tuples
    )
    p.dht.publish_progress(progress, LOST_AFTER * p.clock.seconds + 5.0)
