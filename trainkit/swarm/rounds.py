"""A peer's training loop: train, agree with the others, go on.

Updates and parts are those of `trainkit.training`. `train_by_time` averages weights: the clock ends a round, and so
decides how many updates it has. `train_by_samples` averages gradients: a round ends when all peers together have
gathered enough samples, see `tally`. Peers that only call out look for a group from the beginning of such a round on;
those who lead one look for the others when its end is near.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from trainkit.data.base import Batch
from trainkit.data.order import derive_seed
from trainkit.errors import RunFailedError
from trainkit.swarm.average import Averaging
from trainkit.swarm.averager import finite, number
from trainkit.swarm.bans import Sentry
from trainkit.swarm.dht import SwarmDHT, Watch
from trainkit.swarm.messages import PeerProgress, RoundClock
from trainkit.swarm.robust import FRESH_SECONDS, Round, Tally, newest_round, tally
from trainkit.swarm.sync_diloco import CommonState
from trainkit.swarm.sync_gradients import GradientState
from trainkit.swarm.team import Team, together
from trainkit.training.build import TrainState
from trainkit.training.recorder import MOST_ROLLBACKS, Progress
from trainkit.training.schedule import lr_at
from trainkit.training.update import DivergedError, NonFinite, Remark, Updater

Ending = Literal["finished", "stopped", "ended", "moved", "lost"]
"""All rounds done; told to leave by a signal; the creator has ended the run; it goes on by another clock; nobody of the
swarm answers any more."""

# The swarm is lost after so many rounds without an average and without news of anybody.
LOST_AFTER = 3
# How often a peer asks for news of the others.
NEWS_SECONDS = 1.0

# By time: the share of a round that it may wait for its average; a later one arrives during the next round.
_WAITING_SHARE = 0.02
_ASK_AGAIN_SECONDS = 0.5

# By samples: how often peers publish how far they are, and ask; and how often the creator publishes its manifest.
_NEWS_SECONDS = 0.5
_MANIFEST_SECONDS = 10.0
# An idle peer looks again after this.
_IDLE_SECONDS = 0.02
# Tries of a round with the same gradients; then the creator makes the update alone.
_TRIES = 3
# News older than this are true: a peer that is still said to be behind is.
_NEWS_DELAY = 3.0
_ADOPT_SECONDS = 10.0
_LONGEST_PAUSE = 8.0


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
    parts: TrainState
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
        val_headline=finite(p.progress.val.get(p.parts.metrics.headline)),
        addresses=list(p.addresses),  # the records know no tuples
    )
    p.dht.publish_progress(progress, LOST_AFTER * p.clock.seconds + 5.0)


@dataclass(frozen=True)
class _Inner:
    """What updates are made of between two rounds."""

    batches: Iterator[Batch]
    update: Updater
    nonfinite: NonFinite


def train_by_time(p: Peer) -> Ending:
    """Take part until the last round is over, or until told to leave.

    Raises:
        RunFailedError: this peer is too slow for its rounds, or its training has diverged.
        RefusedError: its invitation has ended, or it was banned.
    """
    publish(p, p.common.round)
    with p.batches() as batches:
        inner = _Inner(batches, Updater(p.team.parts, beat=p.beat), NonFinite(p.parts, p.remark, seed=p.data_seed))
        ending: Ending | None = None
        # Who goes on with a run trains in its next round for a little longer, until the clock is there.
        while (index := max(p.clock.index(time.time()), p.common.round)) < p.clock.count:
            hear(p)
            p.before_round()
            if ending := ending_of(p):
                break
            if index > p.common.round + p.averaging.pending:
                _settle(p, math.inf)
                # It has slept through a round, or was slow to judge the last one. The owner's weights are the run's.
                if index > p.common.round and p.dht.own.grant.role != "owner":
                    p.averaging.adopt(p.clock.seconds / 2)
            if ending := _round(p, inner, index):
                break
        _settle(p, math.inf)
    return ending or "finished"


def _round(p: Peer, inner: _Inner, index: int) -> Ending | None:
    """One round; why, if it is time to leave and the search for the others has not begun."""
    boundary = p.clock.boundary(index)
    search_at = boundary - p.parts.config.collaborative.matchmaking_seconds
    began, samples, seconds, lr = time.time(), 0, 0.0, 0.0
    news_at, pace = began, p.pace
    p.parts.model.train()
    while True:
        now = time.time()
        if not p.averaging.begun and (ending := ending_of(p)):
            return ending  # afterwards the others count on this peer; the rest of the round is short
        if now > news_at:
            hear(p)
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
        lr = _timed_update(p, inner, now)
        samples += p.parts.config.train.global_batch_size
        taken = time.time() - now
        seconds += taken
        if p.progress.step > 1:  # the very first one also warms up kernels and caches
            pace.took(taken)
        require_quick(p, "update", fix="Use a faster machine, or a run with a smaller batch or longer rounds.")
    time.sleep(max(0.0, boundary - time.time()))
    others = p.watch.others(time.time() - LOST_AFTER * p.clock.seconds)
    metrics = p.team.read(inner.update.meter)
    p.averaging.exchange(
        samples=samples,
        trained=min(1.0, (boundary - began) / p.clock.seconds),
        next_round=index + 1,
        alone=not others,
        loss=metrics["loss"] if samples else None,
    )
    pace.done = Done(index, samples, seconds, metrics, lr, len(others) + 1, p.progress.position)
    worth_waiting = _WAITING_SHARE * p.clock.seconds
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
    p.sentry.after_round(done.index, p.watch.peers, result)
    box = Box(**vars(done), result=result)
    publish(p, box.index, box)
    p.after_round(box)
    p.parts.model.train()
    if result.drifted:
        _catch_up(p)
    pace.rounds_alone = pace.rounds_alone + 1 if result.used != "average" and box.peers == 1 else 0


def _catch_up(p: Peer) -> None:
    """Take over the right weights; if that fails, the next round says so again.

    Whoever gives them may not have made the step of this round yet: without it this peer would be behind once more.
    """
    deadline = time.monotonic() + p.clock.seconds / 2
    while (left := deadline - time.monotonic()) > 0.0:
        if p.averaging.adopt(left, newer_than=p.common.round - 1):
            return
        time.sleep(min(_ASK_AGAIN_SECONDS, left))


def _timed_update(p: Peer, inner: _Inner, now: float) -> float:
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
        _settle(p, math.inf)
        forget_or_end(p, inner.nonfinite, error)
    return lr


@dataclass
class _Work:
    """What updates are made of, and how a peer gets on with the present one."""

    batches: Iterator[Batch]
    update: Updater
    nonfinite: NonFinite
    common: GradientState
    last: Box
    """The last round."""
    began: float = field(default_factory=time.time)
    """When this peer came to the present round."""
    seconds: float = 0.0
    """Spent on what is gathered."""
    rate: float = 0.0
    """Samples per second."""
    tries: int = 0
    """Rounds in a row without an average."""
    pause: float = 0.5
    """Before a state is asked for again."""
    heard_at: float = field(default_factory=time.time)
    """When anybody else was heard last."""
    news_at: float = 0.0
    manifest_at: float = 0.0

    def anew(self) -> None:
        """Another round."""
        self.began, self.seconds, self.tries, self.pause = time.time(), 0.0, 0, 0.5


def train_by_samples(p: Peer) -> Ending:
    """Take part until the last update is made, or until told to leave.

    Raises:
        RunFailedError: this peer is too slow for its rounds, or its training has diverged.
    """
    common = p.common
    assert isinstance(common, GradientState)
    nothing = Round(group=0, used="nothing", why="", samples_per_sec=0.0, drifted=False)
    with p.batches() as batches:
        work = _Work(
            batches,
            Updater(p.team.parts, beat=p.beat),
            NonFinite(p.team.parts, p.remark, seed=p.data_seed),
            common,
            Box(common.round, 0, 0.0, {}, 0.0, 1, p.progress.position, nothing),
        )
        p.parts.model.train()
        try:
            while common.round < p.clock.count:
                _news(p, work)
                counted_on = p.averaging.found and _others(p)
                if not counted_on and (ending := _ending(p, work)):
                    return ending
                if _has_strayed(p, work):
                    _come_back(p, work)
                elif _is_over(p, work):
                    _agree(p, work)
                else:
                    _gather(p, work)
        finally:
            p.averaging.withdraw()
        _news(p, work, at_once=True)
        _see_off(p, work)
    return "finished"


def _see_off(p: Peer, work: _Work) -> None:
    """Stay for another round's time at most, while somebody is behind: the last state is the owner's side's to give."""
    until = time.time() + p.clock.seconds
    if p.dht.own.grant.role == "volunteer":
        return
    while any(told.round < p.clock.count for told in _others(p).values()):
        if time.time() > until or p.stop_requested():
            return
        _news(p, work)
        time.sleep(_IDLE_SECONDS)


def _news(p: Peer, work: _Work, *, at_once: bool = False) -> None:
    """Tell and hear how far everybody is, now and then."""
    now = time.time()
    if now < work.news_at and not at_once:
        return
    work.news_at = now + _NEWS_SECONDS
    p.beat()
    hear(p)
    if now > work.manifest_at:
        work.manifest_at = now + _MANIFEST_SECONDS
        p.before_round()
    # Loss and link are the last round's.
    publish(p, work.common.round, replace(work.last, samples=work.common.samples, seconds=work.seconds))


def _ending(p: Peer, work: _Work) -> Ending | None:
    """Why it is time to leave, if it is."""
    now = time.time()
    if _others(p):
        work.heard_at = now
    elif now - work.heard_at > LOST_AFTER * p.clock.seconds:
        work.heard_at, p.pace.rounds_alone = now, LOST_AFTER
    return ending_of(p)


def _others(p: Peer) -> dict[str, PeerProgress]:
    return p.watch.others(time.time() - FRESH_SECONDS)


def _trusted(p: Peer, others: Mapping[str, PeerProgress]) -> set[str]:
    """Those of the owner's side; who is of it and calls out only is no help to anybody."""
    return {
        peer for peer, told in others.items() if not told.client and (found := p.dht.member(peer)) and found.trusted
    }


def _tally(p: Peer, work: _Work, others: Mapping[str, PeerProgress]) -> Tally:
    return tally(
        Tally(work.common.samples, work.rate if p.trains else 0.0),
        others,
        round_index=work.common.round,
        trusted=_trusted(p, others),
        is_trusted=p.dht.own.grant.role != "volunteer",
        now=time.time(),
    )


def _has_strayed(p: Peer, work: _Work) -> bool:
    """Whether the owner's side is at a later update; or, for a volunteer, still at an earlier one, having come back
    from a checkpoint."""
    others, now = _others(p), time.time()
    trusted = _trusted(p, others)
    newest = newest_round(others, trusted, now)
    if newest > work.common.round:
        return True
    late = {peer: told for peer, told in others.items() if told.time > work.began + _NEWS_DELAY}
    return p.dht.own.grant.role == "volunteer" and 0 <= newest_round(late, trusted, now) < work.common.round


def _come_back(p: Peer, work: _Work) -> None:
    """Take over the state of the owner's side; if nobody gives it, later and later again."""
    p.averaging.withdraw()
    if _adopt(p, work):
        return
    time.sleep(work.pause)
    work.pause = min(2 * work.pause, _LONGEST_PAUSE)


def _adopt(p: Peer, work: _Work) -> bool:
    """Only a volunteer goes back to an earlier update: what the owner's side has made is not lost."""
    older = p.dht.own.grant.role == "volunteer"
    if not p.averaging.adopt(_ADOPT_SECONDS, newer_than=-1 if older else work.common.round - 1):
        return False
    p.parts.model.train()
    work.update.meter.read()
    work.anew()
    return True


def _is_over(p: Peer, work: _Work) -> bool:
    """Whether there is enough for the update, or the round has lasted too long; and somebody to make it with."""
    others = _others(p)
    if not (others or p.may_be_alone):
        return False
    gathered = _tally(p, work, others).samples
    target = p.parts.config.train.global_batch_size
    return gathered >= target or (gathered > 0 and time.time() > work.began + p.clock.seconds)


def _gather(p: Peer, work: _Work) -> None:
    """One micro batch, unless there is enough; and the search for a group, when it is time."""
    others, target = _others(p), p.parts.config.train.global_batch_size
    now, found = time.time(), _tally(p, work, others)
    left = found.seconds_left(target)
    if others and not p.averaging.begun:
        if p.dht.client_mode:
            _search(p, work, max(now + 1.0, work.began + p.clock.seconds))
        elif min(left, work.began + p.clock.seconds - now) <= _matchmaking(p) + p.pace.step_seconds:
            _search(p, work, now + min(left, p.clock.seconds))
    if p.trains and left > 0.0:
        _counted_update(p, work)
    else:
        time.sleep(_IDLE_SECONDS)


def _matchmaking(p: Peer) -> float:
    return p.parts.config.collaborative.matchmaking_seconds


def _search(p: Peer, work: _Work, boundary: float) -> None:
    p.sentry.before_round(p.watch.peers, max(1.0, boundary - work.began))
    p.averaging.begin(boundary, work.rate, grace=2 * _matchmaking(p))


def _counted_update(p: Peer, work: _Work) -> None:
    """Gather the gradients of one micro batch."""
    seed, began, pace = derive_seed(p.data_seed, p.progress.position), time.time(), p.pace
    made = work.update(work.batches, lr=0.0, seed=seed)
    taken = time.time() - began
    p.progress.position += 1
    work.seconds += taken
    if p.progress.position > 1:  # the very first one also warms up kernels and caches
        pace.took(taken)
        work.rate = p.team.parts.micro_batch_size / pace.step_seconds
    require_quick(p, "micro batch", fix="Join with a smaller train.micro_batch_size, or use a faster machine.")
    try:
        work.nonfinite.add(p.progress.position - 1, work.common.round, made)
    except DivergedError as error:
        forget_or_end(p, work.nonfinite, error)


def _agree(p: Peer, work: _Work) -> None:
    """Average with the others, and make the update. Without an average everything stays for another try."""
    common, others = work.common, _others(p)
    index, lr = common.round, common.lr
    if others and not p.averaging.begun:
        _search(p, work, time.time() + _matchmaking(p))
    leads = p.may_be_alone and (not others or work.tries >= _TRIES)
    samples, seconds = common.samples, work.seconds
    p.averaging.exchange(samples=samples, trained=1.0, next_round=common.round + 1, alone=not others and leads)
    while (result := p.averaging.settle(_NEWS_SECONDS, trained_on=False, leads=leads)) is None:
        _news(p, work)
    p.pace.round_seconds = time.time() - work.began
    p.sentry.after_round(index, p.watch.peers, result)
    if common.round == index:
        work.tries += 1
        why = result.why or "nothing has arrived"
        p.sentry.say(f"  round {index + 1}: no average ({why}); it is tried again with the same gradients")
        if result.drifted:  # then this peer has sent nothing, nor would it the next time
            _adopt(p, work)
        return
    metrics = p.team.read(work.update.meter)
    work.last = Box(index, samples, seconds, metrics, lr, len(others) + 1, p.progress.position, result)
    work.anew()
    p.progress.step = common.round
    if result.drifted:
        _adopt(p, work)  # if it fails, the next round says so again
    _news(p, work, at_once=bool(others))
    p.after_round(work.last)
    p.parts.model.train()
