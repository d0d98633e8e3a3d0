"""A peer's loop: train until the round's time is over, agree with the others, go on.

The update and the parts are those of `trainkit.training`; the loop is its own, because here time decides how many
updates a round has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainkit.collaborative.loop import (
    LOST_AFTER,
    NEWS_SECONDS,
    Box,
    Done,
    Ending,
    Peer,
    ending_of,
    forget_or_end,
    hear,
    publish,
    require_quick,
)
from trainkit.collaborative.team import together
from trainkit.data.batch import Batch
from trainkit.data.order import derive_seed
from trainkit.training.nonfinite import DivergedError, NonFinite
from trainkit.training.schedule import lr_at
from trainkit.training.update import Updater

# So much of a round is spent waiting for its average at most; one that takes longer arrives during the next round.
_IDLE = 0.02
_ASK_AGAIN_SECONDS = 0.5


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
        lr = _update(p, inner, now)
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
    p.sentry.after_round(done.index, p.watch.peers, result)
    box = Box.of(done, result)
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
        _settle(p, math.inf)
        forget_or_end(p, inner.nonfinite, error)
    return lr
