"""A peer's loop: train until the round's time is over, agree with the others, go on.

The update and the parts are those of `trainkit.training`; the loop is its own, because here time decides how many
updates a round has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from trainkit.collaborative.averaging import Averaging, Round
from trainkit.collaborative.clock import RoundClock
from trainkit.collaborative.dht import SwarmDHT
from trainkit.collaborative.judging import finite, number
from trainkit.collaborative.messages import Progress as PeerProgress
from trainkit.collaborative.outer import OuterState
from trainkit.collaborative.sentry import Sentry
from trainkit.collaborative.team import Team, together
from trainkit.collaborative.watch import Watch
from trainkit.data.batch import Batch
from trainkit.data.order import derive_seed
from trainkit.errors import RunFailedError
from trainkit.training.nonfinite import DivergedError, NonFinite, Remark
from trainkit.training.outcome import MOST_ROLLBACKS
from trainkit.training.parts import Parts
from trainkit.training.progress import Progress
from trainkit.training.schedule import lr_at
from trainkit.training.update import Updater

Ending = Literal["finished", "stopped", "ended", "moved", "lost"]
"""All rounds done; told to leave by a signal; the creator has ended the run; it goes on by another clock; nobody of the
swarm answers any more."""

# The swarm is lost after so many rounds without an average and without news of anybody.
LOST_AFTER = 3
# So much of a round is spent waiting for its average at most; one that takes longer arrives during the next round.
_IDLE = 0.02
# How often a peer asks for news of the others.
NEWS_SECONDS = 1.0


@dataclass(frozen=True)
class Box:
    """What a peer did in one round."""

    index: int
    samples: int
    seconds: float
    """Spent in updates."""
    metrics: dict[str, float]
    lr: float
    result: Round
    peers: int
    """Peers heard of lately, this one included."""


@dataclass(frozen=True)
class _Done:
    """What a peer has done in a round whose average may still be under way."""

    index: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    lr: float
    peers: int
    position: int
    """Where the data order stood."""


@dataclass
class Pace:
    """How a peer gets on."""

    step_seconds: float = 0.0
    """How long an update takes."""
    exchange_seconds: float = 0.0
    """How long the last exchange took."""
    rounds_alone: int = 0
    done: _Done | None = None
    """The last round, until it is known what came of its exchange."""


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
    outer: OuterState
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


@dataclass(frozen=True)
class _Inner:
    """What updates are made of between two rounds."""

    batches: Iterator[Batch]
    update: Updater
    nonfinite: NonFinite


def train(p: Peer) -> Ending:
    """Take part until the last round is over, or until told to leave.

    Raises:
        RunFailedError: this peer is too slow for its rounds, or its training has diverged.
        RefusedError: its invitation has ended, or it was banned.
    """
    _publish(p, p.outer.round)
    with p.team.batches(p.data_seed, p.progress.position) as batches:
        inner = _Inner(batches, Updater(p.team.parts, beat=p.beat), NonFinite(p.parts, p.remark, seed=p.data_seed))
        ending: Ending | None = None
        while (index := p.clock.index(time.time())) < p.clock.count:
            _hear(p)
            p.before_round()
            if ending := _ending(p):
                break
            if index > p.outer.round + p.averaging.pending:
                _settle(p, math.inf)
                if index > p.outer.round:  # this peer has slept through a round, or was slow to judge the last one
                    p.averaging.adopt(p.clock.seconds / 2)
            if ending := _round(p, inner, index):
                break
        _settle(p, math.inf)
    return ending or "finished"


def _hear(p: Peer) -> None:
    """News of the others, and of who is out. Raises RefusedError if it is this peer."""
    p.watch.poll()
    p.sentry.look()
    p.dht.excluded.require_welcome()


def _ending(p: Peer) -> Ending | None:
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


def _round(p: Peer, inner: _Inner, index: int) -> Ending | None:
    """One round; why, if it is time to leave and the search for the others has not begun."""
    boundary = p.clock.boundary(index)
    search_at = boundary - p.parts.config.collaborative.matchmaking_seconds
    began, samples, seconds, lr = time.time(), 0, 0.0, 0.0
    news_at, pace = began, p.pace
    p.parts.model.train()
    while True:
        now = time.time()
        if not p.averaging.begun and (ending := _ending(p)):
            return ending  # afterwards the others count on this peer; the rest of the round is short
        if now > news_at:
            _hear(p)
            news_at = now + NEWS_SECONDS
        _settle(p, 0.0)
        if not p.averaging.begun and now + pace.step_seconds >= search_at:
            _settle(p, math.inf)
            p.sentry.before_round(p.watch.peers, p.clock.seconds)
            p.averaging.begin(boundary, samples / seconds if seconds else 0.0)
        if now + pace.step_seconds >= boundary:
            break
        if not p.trains:
            time.sleep(min(NEWS_SECONDS, boundary - now) / 4)
            continue
        lr = _update(p, inner, now)
        samples += p.parts.config.train.global_batch_size
        taken = time.time() - now
        seconds += taken
        if p.progress.step > 1:  # the very first one also warms up kernels and caches
            pace.step_seconds = 0.8 * pace.step_seconds + 0.2 * taken if pace.step_seconds else taken
        if pace.step_seconds > p.clock.seconds:
            raise RunFailedError(
                f"One update takes {pace.step_seconds:.0f} s here, longer than a round of {p.clock.seconds:.0f} s.",
                why="This peer would never have anything to contribute.",
                fix="Use a faster machine, or a run with a smaller batch or longer rounds.",
            )
    time.sleep(max(0.0, boundary - time.time()))
    others = p.watch.others(time.time() - LOST_AFTER * p.clock.seconds)
    p.averaging.exchange(
        samples=samples,
        trained=min(1.0, (boundary - began) / p.clock.seconds),
        next_round=index + 1,
        alone=not others,
    )
    metrics = p.team.read(inner.update.meter)
    pace.done = _Done(index, samples, seconds, metrics, lr, len(others) + 1, p.progress.position)
    worth_waiting = _IDLE * p.clock.seconds
    if pace.exchange_seconds <= worth_waiting:
        _settle(p, worth_waiting)
    return None


def _settle(p: Peer, seconds: float) -> None:
    """Wait so long for what came of the last round, if that is not known yet; then take note of it."""
    done, pace = p.pace.done, p.pace
    if done is None:
        return
    result = p.averaging.settle(seconds, trained_on=p.progress.position > done.position, leads=p.may_be_alone)
    if result is None:
        return
    pace.done, pace.exchange_seconds = None, result.seconds
    p.sentry.after_round(done.index, p.watch.peers)
    box = Box(done.index, done.samples, done.seconds, done.metrics, done.lr, result, done.peers)
    _publish(p, box.index, box)
    p.after_round(box)
    p.parts.model.train()
    if result.drifted:
        p.averaging.adopt(p.clock.seconds / 2)  # if it fails, the next round says so again
    pace.rounds_alone = pace.rounds_alone + 1 if result.used != "average" and box.peers == 1 else 0


def _update(p: Peer, inner: _Inner, now: float) -> float:
    """One inner update; its learning rate."""
    config, device = p.parts.config, p.parts.dist.device
    step, per_epoch, total = p.clock.grid(now, config.train.epochs)
    lr = lr_at(step, optim=config.optim, schedule=config.schedule, steps_per_epoch=per_epoch, total_steps=total)
    seed = derive_seed(p.data_seed, p.progress.position)
    with together(p.team.size):
        p.team.before_update(lr, seed)
        made = inner.update(inner.batches, lr=lr, seed=seed)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the round ends by the clock: an update counts when it is done
    p.progress.position += 1
    p.progress.step += made.stepped.skip is None
    try:
        inner.nonfinite.add(p.progress.position - 1, p.progress.step, made)
    except DivergedError as error:
        if config.train.on_nonfinite != "rollback" or p.progress.rollbacks == MOST_ROLLBACKS:
            raise error.for_user() from None
        p.progress.rollbacks += 1
        inner.nonfinite.in_a_row = 0
        _settle(p, math.inf)
        p.outer.forget()  # the checkpoint of a peer is what the peers have in common
    return lr


def _publish(p: Peer, index: int, box: Box | None = None) -> None:
    """Tell the others about this round; they forget it when the next ones bring no news."""
    progress = PeerProgress(
        name=p.name,
        round=index,
        samples=box.samples if box else 0,
        samples_per_sec=box.samples / box.seconds if box and box.seconds else 0.0,
        loss=number(box.metrics.get("loss")) if box else 0.0,
        group=box.result.group if box else 0,
        time=time.time(),
        client=bool(p.dht.node.client_mode),
        parts=box.result.parts if box else 0,
        expected=box.result.expected if box else 0,
        sent=box.result.bytes_up if box else 0,
        received=box.result.bytes_down if box else 0,
        val_loss=finite(p.progress.val.get("loss")),
        val_acc1=finite(p.progress.val.get("acc1")),
        addresses=list(p.addresses),  # the records know no tuples
    )
    p.dht.publish_progress(progress, LOST_AFTER * p.clock.seconds + 5.0)
