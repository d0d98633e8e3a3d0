"""A peer's training loop: train, agree with the others, go on.

Updates are those of `trainkit.training`. The clock ends a round, and so decides how many updates it has.
"""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from trainkit.common import jsonl
from trainkit.common.errors import RunFailedError
from trainkit.config.schema import CollaborativeConfig
from trainkit.data.base import Batch
from trainkit.data.order import derive_seed
from trainkit.distributed.device import synchronize
from trainkit.swarm.peer.peer_ranks import data_seed, together
from trainkit.swarm.peer.records import PeerRound
from trainkit.swarm.peer.session import LOST_AFTER, Session
from trainkit.swarm.protocol.messages import PeerProgress
from trainkit.swarm.trust.accounts import Journal, is_too_slow, num_stretches
from trainkit.swarm.trust.auditor import Auditor
from trainkit.training.recorder import MOST_ROLLBACKS
from trainkit.training.schedule import lr_at
from trainkit.training.update import DivergedError, NonFinite, Update, Updater

RoundsEnding = Literal["finished", "stopped", "ended", "moved", "lost"]
"""All rounds done; told to leave by a signal; the creator has ended the run; it goes on by another clock, or without
this creator; nobody of the swarm answers any more."""

# How often a peer asks for news of the others.
NEWS_SECONDS = 1.0

# Of a round: how long a peer may wait for its average; a later one arrives during the next round.
_WAITING_SHARE = 0.02

# Of a round, until the search for the others begins, that updates may take which an audit makes again. It may have to
# make them twice.
_AUDIT_SHARE = 0.3

# After the last one, for which its audits are waited for.
_CLOSING_ROUNDS = 2

# Of one peer's core, to answer another that looks for a group.
_ANSWER_SECONDS = 0.003


def search_seconds(config: CollaborativeConfig, peers: int, *, calls_out: bool) -> float:
    """Return how long before the end of a round one of so many peers begins to look for the others.

    Those who only call out come one after the other: all at once, a thousand would be more than one peer can answer.
    """
    seconds = config.matchmaking_seconds
    if calls_out:
        seconds -= random.uniform(0.0, min(_ANSWER_SECONDS * peers, seconds / 2))
    return seconds


def take_part(peer: Session) -> RoundsEnding:
    """Train with the others in the way of the run, until the last round is over, or until told to leave.

    Raises:
        RunFailedError: this peer is too slow for its rounds, or its training has diverged.
        RefusedError: its invitation has ended, or it was banned.
    """
    if not peer.spec.trains:  # it need not have the data
        return RoundLoop(peer, iter(())).run()
    with peer.team.batches(peer.data_seed, peer.progress.position) as batches:
        return RoundLoop(peer, batches).run()


class RoundLoop:
    """Rounds that the clock ends."""

    def __init__(self, peer: Session, batches: Iterator[Batch]) -> None:
        self.peer = peer
        self.batches = batches
        self.config = peer.team.judge.config
        self.model = peer.team.judge.model
        self.update = Updater(peer.team.state, beat=peer.hooks.beat)
        self.nonfinite = NonFinite(peer.team.judge, peer.remark, seed=peer.data_seed)
        self.clock = peer.clock
        self.averaging = peer.averaging
        self.addresses = peer.dht.addresses() if peer.spec.host is not None else []
        self.done: PeerRound | None = None
        """The last round, until it is known what came of its exchange."""
        self.auditor: Auditor | None = None
        common = peer.common
        seconds = self.clock.seconds
        if not peer.spec.trains:
            return
        if peer.role == "owner":
            seed_of = partial(data_seed, self.config)
            most = _AUDIT_SHARE * (seconds - self.config.collaborative.matchmaking_seconds)
            self.auditor = Auditor(peer.team.judge, common, seed_of, self.rates_of, most, seconds)
        elif peer.journal is None:
            peer.journal = Journal(peer.team.state, common, seconds / num_stretches(common.theta.numel()))

    def run(self) -> RoundsEnding:
        """Round after round."""
        peer = self.peer
        ending = None
        self.publish(PeerRound(peer.common.round))
        while not ending:
            # After a resume the first round lasts a little longer, until the clock has reached it.
            index = max(self.clock.index(time.time()), peer.common.round)
            if index >= self.clock.count:
                break
            self.hear()
            peer.before_round()
            ending = self.ending()
            if ending:
                break
            if index > peer.common.round + (self.averaging.under_way is not None):
                self.settle(math.inf)
                # It has slept through a round, or was slow to judge the last one. The owner's weights are the run's.
                if index > peer.common.round and peer.role != "owner":
                    self.averaging.adopt(self.clock.seconds / 2)
            ending = self.round(index)
        self.settle(math.inf)
        if not ending:
            self.close()
        return ending or "finished"

    def close(self) -> None:
        """The rounds are over. Show what the owner wants to see of the last ones; at the owner's wait for that, and
        look at it: what somebody false has put into the weights is taken out again.
        """
        until = time.monotonic() + _CLOSING_ROUNDS * self.clock.seconds
        is_over = self.auditor is None and self.peer.journal is None
        while not is_over and time.monotonic() < until and not self.peer.hooks.stop_requested():
            time.sleep(NEWS_SECONDS / 10)
            if self.auditor is None:
                is_over = not self.averaging.averager.is_showing
            else:
                is_over = not self.averaging.averager.awaited()  # asked first: what is on its way is seen then
                is_over = not self.audit(self.auditor, self.clock.count - 1) and is_over

    def hear(self) -> None:
        """Take in news and bans.

        Raises RefusedError if this peer is banned, and HelperDiedError if nobody can be reached any more.
        """
        self.peer.hear()
        self.peer.sentry.look()
        self.peer.dht.excluded.require_welcome()

    def ending(self) -> RoundsEnding | None:
        """Why it is time to leave, if it is."""
        peer = self.peer
        if peer.hooks.stop_requested():
            return "stopped"
        if peer.watch.stopped:
            return "ended"
        if peer.has_moved:
            return "moved"
        if peer.rounds_alone >= LOST_AFTER and not peer.may_be_alone:
            peer.rounds_alone = 0  # counted anew after the swarm has come back
            return "lost"
        return None

    def publish(self, done: PeerRound) -> None:
        """Tell the others about this round; they forget it when the next ones bring no news."""
        peer = self.peer
        exchange = done.result.outcome
        val = peer.progress.val
        progress = PeerProgress(
            name=peer.spec.name, round=done.index, samples=done.samples, samples_per_sec=done.samples_per_sec,
            loss=jsonl.finite(done.metrics.get("loss")) or 0.0, group=done.result.group, time=time.time(),
            tried=self.averaging.tried, client=peer.dht.client_mode,
            parts=sum(exchange.received), expected=sum(exchange.expected),
            sent=exchange.bytes_up, received=exchange.bytes_down,
            val_loss=jsonl.finite(val.get("loss")),
            val_headline=jsonl.finite(val.get(peer.team.judge.metrics.headline)),
            addresses=self.addresses, signed=self.averaging.signed(),
        )  # fmt: skip
        peer.dht.publish_progress(progress, LOST_AFTER * peer.clock.seconds + 5.0)

    def note_update(self, made: Update, step: int, seconds: float) -> None:
        """Take note of an update, or of a part of one: how long it took, and whether it was finite.

        Raises RunFailedError for a peer that is too slow for its rounds, or whose training has diverged.
        """
        peer = self.peer
        peer.progress.position += 1
        if peer.progress.position > 1:  # the very first one also warms up kernels and caches; later ones vary
            peer.step_seconds = 0.8 * (peer.step_seconds or seconds) + 0.2 * seconds
        if peer.step_seconds > self.clock.seconds:
            longest = f"a round of {self.clock.seconds:.0f} s"
            what = f"One update takes {peer.step_seconds:.0f} s here, longer than {longest}."
            why = "This peer could never contribute anything."
            fix = "Use a faster machine or a smaller train.micro_batch_size, or a run with longer rounds."
            raise RunFailedError(what, why=why, fix=fix)
        try:
            self.nonfinite.add(peer.progress.position - 1, step, made)
        except DivergedError:
            self.settle(math.inf)  # what it has given is no part of the divergence
            if self.config.train.on_nonfinite != "rollback" or peer.progress.rollbacks == MOST_ROLLBACKS:
                raise
            # The checkpoint of a peer is what the peers have in common.
            peer.progress.rollbacks += 1
            self.nonfinite.in_a_row = 0
            peer.common.forget()

    def round(self, index: int) -> RoundsEnding | None:
        """One round; why, if it is time to leave and the search for the others has not begun."""
        peer = self.peer
        averaging = self.averaging
        boundary = self.clock.boundary(index)
        known = len(peer.watch.peers)
        search_at = boundary - search_seconds(self.config.collaborative, known, calls_out=peer.dht.client_mode)
        began = time.time()
        news_at = time.monotonic()  # which goes on where the clock is set back
        samples = 0
        seconds = 0.0
        lr = 0.0
        self.model.train()
        while True:
            now = time.time()
            if averaging.search is None:  # afterwards the others count on this peer; the rest of the round is short
                ending = self.ending()
                if ending:
                    return ending
            if time.monotonic() >= news_at:
                self.hear()
                news_at = time.monotonic() + NEWS_SECONDS
            self.settle(0.0)
            if self.auditor is not None and now + 2 * self.auditor.seconds < search_at:
                self.audit(self.auditor, index)
            if averaging.search is None and now + peer.step_seconds >= search_at:
                self.settle(math.inf)
                self.before_exchange(index)
                averaging.begin(boundary, samples / max(seconds, 1e-9))
            if now + peer.step_seconds >= boundary:
                break
            if peer.spec.trains:
                lr, taken = self.step(now)
                samples += self.config.train.global_batch_size
                seconds += taken
            else:
                time.sleep(min(NEWS_SECONDS, boundary - now) / 4)
        round_seconds = self.clock.seconds
        time.sleep(min(max(0.0, boundary - time.time()), round_seconds))  # no longer, should the clock be set back
        others = peer.watch.others(time.time() - LOST_AFTER * round_seconds)
        metrics = peer.team.read(self.update.meter)
        trained = min(1.0, (boundary - began) / round_seconds)
        averaging.exchange(samples=samples, trained=trained, next_round=index + 1)
        if peer.journal is not None:
            upload = averaging.link.upload
            # Nobody counts with other libraries before whole snapshots were seen, and until then the link is free.
            is_slow = not averaging.tried and is_too_slow(upload, peer.common.theta.numel(), round_seconds)
            told = peer.journal.close(index, is_slow=is_slow)
            if told is not None:
                averaging.averager.account(peer.watch.creator, told, upload)
        self.done = PeerRound(index, samples, seconds, metrics, lr, len(others) + 1, peer.progress.position)
        if peer.exchange_seconds <= _WAITING_SHARE * round_seconds:
            self.settle(_WAITING_SHARE * round_seconds)
        return None

    def before_exchange(self, index: int) -> None:
        """At the owner's: say what is known of the others, and who is to show its work of this round."""
        peer = self.peer
        auditor = self.auditor
        if auditor is None:
            return
        averager = self.averaging.averager
        others = peer.watch.others(time.time() - LOST_AFTER * self.clock.seconds)
        members = {one: peer.dht.member(one) for one in others}
        known = {one: member for one, member in members.items() if member is not None and member.role != "owner"}
        # A reducer need not train; one that says so counts for nothing.
        idle = {one for one, member in known.items() if member.role == "reducer" and not others[one].samples_per_sec}
        auditor.hear({one: said.tried for one, said in peer.watch.peers.items()})
        heard = averager.heard()
        for verdict in auditor.owe(heard):
            peer.sentry.note_audit(index, verdict)
        averager.draw(auditor.draw(known.keys() - idle, heard, is_last=index == self.clock.count - 1), index)
        verified = auditor.verified | dict.fromkeys(auditor.unproven | idle, 0.0)
        averager.known.write(verified=verified, differ=[*auditor.differ], passed=[*auditor.in_good_standing])

    def audit(self, auditor: Auditor, index: int) -> bool:
        """Look at what has been shown; False if nothing has."""
        shown = self.averaging.averager.shown()
        verdict = auditor.audit(shown) if shown is not None else None
        if verdict is not None:
            self.peer.sentry.note_audit(index, verdict)
        return shown is not None

    def rate_at(self, now: float) -> float:
        """The learning rate at that time."""
        config = self.config
        step, per_epoch, total = self.clock.grid(now, config.train.epochs)
        return lr_at(step, optim=config.optim, schedule=config.schedule, steps_per_epoch=per_epoch, total_steps=total)

    def rates_of(self, index: int) -> tuple[float, float]:
        """The lowest and the highest learning rate of a round and the one before, for clocks differ."""
        end = self.clock.boundary(index)
        rates = [self.rate_at(end - self.clock.seconds * step / 16) for step in range(-1, 33)]
        return min(rates), max(rates)

    def step(self, now: float) -> tuple[float, float]:
        """One update; its learning rate, and how long it took."""
        peer = self.peer
        began = time.monotonic()
        lr = self.rate_at(now)
        seed = derive_seed(peer.data_seed, peer.progress.position)
        if peer.journal is not None:
            peer.journal.before_update(peer.progress.position, lr, now)
        with together(peer.team.state.dist.world_size):
            peer.team.before_update(lr, seed)
            made = self.update(self.batches, lr=lr, seed=seed)
        synchronize(peer.team.judge.dist.device)  # the round ends by the clock: an update counts when it is done
        peer.progress.step += made.stepped.skip is None
        taken = time.monotonic() - began
        self.note_update(made, peer.progress.step, taken)
        return lr, taken

    def settle(self, seconds: float) -> None:
        """Wait for the result of the last round, if it is not known yet, and take note of it."""
        peer = self.peer
        done = self.done
        if done is None:
            return
        trained_on = peer.progress.position > done.position
        result = self.averaging.settle(seconds, trained_on=trained_on, leads=peer.may_be_alone)
        if result is None:
            return
        self.done = None
        peer.exchange_seconds = result.seconds
        peer.sentry.after_round(done.index, result)
        done = replace(done, result=result)
        self.publish(done)
        peer.after_round(done)
        self.model.train()
        if result.drifted:
            # If it fails, the next round says so again. The giver may not have made the step of this round yet: without
            # it this peer would be behind once more.
            peer.adopt(self.clock.seconds / 2, newer_than=peer.common.round - 1)
        is_alone = result.used != "average" and done.peers == 1
        peer.rounds_alone = peer.rounds_alone + 1 if is_alone else 0
