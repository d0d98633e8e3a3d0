"""A peer's loop where peers average gradients: gather until all of them together have enough, agree, update, go on.

How long a round lasts is for the peers' speed to say, see `tally`. Peers that only call out look for a group from the
beginning of a round on and are found by those who lead one, who look for the others when the end is near.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from trainkit.collaborative.gradients import GradientState
from trainkit.collaborative.loop import (
    LOST_AFTER,
    Box,
    Ending,
    Peer,
    ending_of,
    forget_or_end,
    hear,
    publish,
    require_quick,
)
from trainkit.collaborative.messages import Progress
from trainkit.collaborative.result import Round
from trainkit.collaborative.tally import FRESH_SECONDS, Tally, newest_round, tally
from trainkit.data.batch import Batch
from trainkit.data.order import derive_seed
from trainkit.training.nonfinite import DivergedError, NonFinite
from trainkit.training.update import Updater

# How often peers tell how far they are, and ask.
_NEWS_SECONDS = 0.5
# How often the creator publishes its manifest anew.
_MANIFEST_SECONDS = 10.0
# Whoever has nothing to do looks again after so long.
_IDLE_SECONDS = 0.02
# A round without an average is tried again, with the same gradients; the creator then makes the update alone.
_TRIES = 3
# News take so long at most: who is still said to be behind by then is.
_NEWS_DELAY = 3.0
_ADOPT_SECONDS = 10.0
_LONGEST_PAUSE = 8.0


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


def train(p: Peer) -> Ending:
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


def _others(p: Peer) -> dict[str, Progress]:
    return p.watch.others(time.time() - FRESH_SECONDS)


def _trusted(p: Peer, others: Mapping[str, Progress]) -> set[str]:
    """Those of the owner's side; who is of it and calls out only is no help to anybody."""
    return {
        peer for peer, told in others.items() if not told.client and (found := p.dht.member(peer)) and found.trusted
    }


def _tally(p: Peer, work: _Work, others: Mapping[str, Progress]) -> Tally:
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
        _update(p, work)
    else:
        time.sleep(_IDLE_SECONDS)


def _matchmaking(p: Peer) -> float:
    return p.parts.config.collaborative.matchmaking_seconds


def _search(p: Peer, work: _Work, boundary: float) -> None:
    p.sentry.before_round(p.watch.peers, max(1.0, boundary - work.began))
    p.averaging.begin(boundary, work.rate, grace=2 * _matchmaking(p))


def _update(p: Peer, work: _Work) -> None:
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
