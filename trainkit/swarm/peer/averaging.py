"""The end of a round: find the others, average with them over hivemind, judge the average, and make the outer step.

The average may arrive while the next round is being trained, and a round that fails costs nothing: see
`trainkit.swarm.protocol.outer_step`.

The owner tries an average on a part of the validation data before it uses it. All other checks ask how a contribution
looks; this one asks what comes of it. The samples are the same each time, so losses are compared sample by sample:
noise is what differs between samples, not what they have in common. An average is refused if the model would be worse
by it than it is, and worse than by what the owner has trained itself: a high learning rate, or one that begins anew,
makes both worse, and is nobody's lie.

What happens then needs no message. The owner goes on by its own contribution, as where no average has come. The others
have used the average, so that they have other weights than the owner; they find that out when they next meet, and take
over the owner's (`trainkit.swarm.trust.reducers.has_drifted`).
"""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.config.schema import CollaborativeConfig, Config
from trainkit.swarm.identity.admission import Guard
from trainkit.swarm.network import processes
from trainkit.swarm.network.averager import Averager
from trainkit.swarm.network.dht import SwarmDHT
from trainkit.swarm.network.exchange import Averaged
from trainkit.swarm.network.states import digest_of
from trainkit.swarm.peer.link import GRACE, Link, codec_back, exchange_seconds, patience
from trainkit.swarm.peer.trial import AverageTrial
from trainkit.swarm.protocol.codecs import CODECS
from trainkit.swarm.protocol.outer_step import Average, ExchangeOutcome, OuterState, OwnPart, is_finite
from trainkit.swarm.trust.reducers import Round, slower_than, untrue
from trainkit.swarm.trust.screening import Verdict


@contextmanager
def open_averager(dht: SwarmDHT, common: OuterState, config: Config, run_id: str) -> Iterator[Any]:
    """Start the averager; on leaving, end its process.

    Open it before a GPU is used for the first time: the process is forked.
    """
    agreed = config.collaborative
    interrupt = signal.getsignal(signal.SIGINT)
    guard = Guard(dht.node, dht.admission)
    averager = Averager(
        common, guard, dht.own, run_id, codec_back(agreed), config.train.global_batch_size,
        start=False, daemon=True, prefix=f"{run_id}_common", client_mode=dht.client_mode, allow_state_sharing=False,
        min_matchmaking_time=agreed.matchmaking_seconds, request_timeout=min(1.0, agreed.matchmaking_seconds / 2),
        allreduce_timeout=exchange_seconds(agreed), reducer_timeout=exchange_seconds(agreed),
        sender_timeout=patience(agreed), next_chunk_timeout=min(10.0, max(1.0, agreed.round_seconds / 4)),
        shutdown_timeout=2.0,
    )  # fmt: skip
    try:
        with processes.private_sockets():
            averager.run_in_background(await_ready=True, timeout=processes.at_load(30.0))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # hivemind has switched Ctrl-C off in this process
        yield averager
    finally:
        mine = processes.family(averager.pid)
        with suppress(OSError, ValueError):
            if dht.alive:  # else it would end by an error of hivemind's, at length
                averager.shutdown()
        processes.end(mine, patience=1.0 if dht.alive else 0.0)


# Between two looks whether a state arrives.
_LOOK_SECONDS = 0.5
# Of a round: time to find out who has done harm.
_SEARCH_SHARE = 0.2


@dataclass(frozen=True)
class EndedRound:
    """A round that has ended, and whose average may still be under way."""

    control: Any
    given: OwnPart
    sent: tuple[float, ...]
    """Weight of each part that this peer sends."""
    trained: float
    next_round: int
    began: float
    failed: str
    """Why there is no exchange; empty if there is one."""

    def own(self, is_used: bool) -> Average:
        """This peer's contribution in the place of the average, or nothing."""
        used = (is_used,) * len(self.given.weights)
        return Average(self.given.vector, self.next_round, used, used)


_Tried = tuple[str, tuple[Verdict, ...] | None]
_NOBODY = Averaged({}, drifted=False, outcome=ExchangeOutcome())


class Averaging:
    """One peer's rounds."""

    def __init__(
        self, averager: Any, dht: SwarmDHT, common: OuterState, config: CollaborativeConfig, link: Link
    ) -> None:
        self.averager = averager
        self.link = link
        self._dht = dht
        self._common = common
        self._config = config
        self.tried = False
        """This peer has other libraries than the run: it gives nothing before an audit has agreed."""
        self.stop_requested: Callable[[], bool] = lambda: False
        self.trial: AverageTrial | None = None
        """Test that an average must pass at the owner's."""
        self._searched = -2  # the round in which it was last asked who does harm
        self.search: Any = None
        """This round's, for the others; None: not begun."""
        self.under_way: EndedRound | None = None
        """The last round, until its average has been judged."""

    def share(self) -> None:
        """From now on others may take over this peer's state, if it is of the owner's side."""
        self.averager.allow_state_sharing = not self.averager.client_mode

    def adopt(self, seconds: float, *, newer_than: int = -1) -> bool:
        """Take over the state that the owner's side has signed. False if nobody gives one that can be used.

        Args:
            seconds: for which nothing of a state need arrive. One that arrives is waited for, up to the length of a
                round: by then there is a later one.
            newer_than: a state is of no use that is not of a later round.
        """
        self.averager.fetched.zero_()
        fetching = self.averager.load_state_from_peers(wait=False)
        now = time.monotonic()
        latest = now + max(seconds, self._config.round_seconds)
        until = now + seconds
        share = 0.0
        while not (fetching.done() or self.stop_requested()) and time.monotonic() < min(until, latest):
            with suppress(FutureTimeoutError):
                fetching.result(min(_LOOK_SECONDS, seconds))
            if self.fetched > share:
                share = self.fetched
                until = time.monotonic() + seconds
        if not fetching.done():
            fetching.cancel()
            return False
        found = fetching.result()
        if found is None or found[0].round <= newer_than:
            return False
        signed, (theta, momentum) = found
        with suppress(ValueError):
            self._common.load(theta, momentum, signed.round)
            return True
        return False

    @property
    def fetched(self) -> float:
        """Share of the state that has arrived, of the one that was fetched last."""
        return float(self.averager.fetched)

    def signed(self) -> bytes:
        """Return what this peer says of its state, if it is of the owner's side: others may have to prove that it is
        the run's.
        """
        return self.averager.own_state.signed() if self._dht.own.grant.role != "volunteer" else b""

    def give_back(self, peer: str, signed: Mapping[str, bytes]) -> None:
        """Give the state to the creator, which may have come back with an earlier one.

        ``signed``: what its side has said of states, by their hash. A volunteer must have such a one, and it says of
        which round: rounds that came to nothing have passed since.
        """
        round_index, *tensors = self._common.copy()
        own = digest_of(self.averager.run_id, round_index, tensors).sha256
        if own in signed or self._dht.own.grant.role != "volunteer":
            self.averager.give_back(peer, signed.get(own, b""))

    def take_back(self, newer_than: float) -> int | None:
        """Take over a state that somebody gives back, and which round it was of; None if nobody does.

        In this peer's clock it is of the present round. ``newer_than``: infinity refuses all from now on.
        """
        if self.under_way is not None:
            return None
        found = self.averager.given_back(newer_than)
        if found is None:
            return None
        signed, (theta, momentum) = found
        self._common.load(theta, momentum, self._common.round)
        return int(signed.round)

    def begin(self, boundary: float, samples_per_sec: float) -> None:
        """Look for the others, while training goes on.

        Args:
            boundary: when the round ends. `GRACE` after it the search has failed.
        """
        assert self.search is None
        assert self.under_way is None
        probe = self._common.probe()
        self.averager.probe.copy_(probe)
        # Others compare their weights with those of a peer that gives its own away, and with nobody else's.
        shown = b"" if self.averager.client_mode else probe.numpy().tobytes()
        about = {"rate": float(samples_per_sec), "probe": shown}
        control: Future[Any] = Future()

        def look() -> None:
            try:
                at = max(boundary, time.time() + 0.3)
                limit = max(boundary - time.time(), 0.0) + GRACE
                options = {"scheduled_time": at, "timeout": limit, "require_trigger": True, "wait": False}
                control.set_result(self.averager.step(gather=about, **options))
            except Exception as error:
                control.set_exception(error)

        # hivemind waits here without limit for a word of its process.
        threading.Thread(target=look, daemon=True).start()
        self.search = processes.answer_of(control, "averager", self.averager.pid)

    def require_helpers(self) -> None:
        """Raises HelperDiedError when one is gone: without them this peer would go on as if it were the only one."""
        for helper, alive in (("node of the DHT", self._dht.alive), ("averager", self.averager.is_alive())):
            if not alive:
                raise processes.HelperDiedError(helper)

    def exchange(self, *, samples: int, trained: float, next_round: int) -> None:
        """The round is over: give this peer's part to the group. `settle` says what came of it.

        Args:
            samples: how many this peer has trained on in the round; its weight in the average.
            trained: the share of the round in which it did.
        """
        assert self.under_way is None
        control = self.search
        self.search = None
        given = self._common.give(samples, self.link.load.codec)
        sent = self.link.sent(given.weights)
        if self.tried and self.averager.standing != "counts":
            sent = (0.0,) * len(sent)
        began = time.monotonic()
        failed = self._hand_over(control, given.vector, sent)
        self.under_way = EndedRound(control, given, sent, trained, next_round, began, failed)

    def settle(self, seconds: float, *, trained_on: bool, leads: bool) -> Round | None:
        """Wait for the average, at most this long; judge it, and make the outer step. None when it is still under way.

        Args:
            trained_on: the model has been trained since the round ended.
            leads: without an average this peer goes on by itself; else it waits for the next, and keeps till then the
                state that all have in common: the owner's side may need it.
        """
        assert self.under_way is not None
        now = self.under_way
        ended = self._await(now, seconds)
        if ended is None:
            return None
        self.under_way = None
        (rates, drifted, received), average, why = ended
        members = max(len(rates), *received.expected, 0)  # in a large group a peer does not know all of them
        alone = now.given.usable and leads
        step = now.own(alone)
        result = Round(
            group=0, used="own" if alone else "nothing", why=why, drifted=drifted, outcome=received,
            samples_per_sec=sum(rates.values()) / max(1, len(rates)) * members, seconds=time.monotonic() - now.began,
        )  # fmt: skip
        if average is not None:
            result, used = self._judged(result, now, rates, average)
            step = used or step
        if result.used == "average":
            result = replace(result, group=members)
            if self.trial is not None:
                self.averager.note_used()
        self._common.step(step, now.given, trained_on=trained_on)
        if result.refused or result.used == "own":
            self._common.apart = now.next_round
        if received.reducers or received.unfinished:
            result = replace(result, advice=self.link.learn(now.sent, received))
        self.averager.bandwidth = self.link.upload  # who reduces gets a part of the vector in proportion
        return result

    def _judged(
        self, result: Round, now: EndedRound, rates: Mapping[str, float], average: Tensor
    ) -> tuple[Round, Average | None]:
        """Return what is to be said of an average that has arrived, and the step by it; None if it is not used."""
        false = self._audit(now, rates, result.outcome, average)
        outcome = result.outcome.refusing({verdict.peer for verdict in false}, average, now.given.vector)
        result = replace(result, outcome=outcome, untrue=false)
        if not is_finite(average):
            return replace(result, why="the average is not finite"), None
        step = Average(average, now.next_round, tuple(map(bool, outcome.received)), outcome.counted)
        harm, harmful = self._try(step, now, outcome, rates)
        if harm:
            return replace(result, why=harm, refused=True, harmful=harmful), None
        if false and not outcome.sources:
            return replace(result, used="nothing", why="everything that arrived was refused"), step
        return replace(result, used="average", why="", harmful=harmful), step

    def _try(self, average: Average, now: EndedRound, outcome: ExchangeOutcome, members: Iterable[str]) -> _Tried:
        """Why the average does harm, if it does, and which volunteers do; None: they were not tried.

        Each is tried with the owner's side alone, in what this peer has reduced; as many as there is time for.
        """
        trial = self.trial
        own = now.own(now.given.usable)
        harm = trial.harm(average, own) if trial is not None else ""
        if trial is None or not harm:
            return "", None
        if now.next_round < self._searched + 2:
            return harm, None  # all others have trained on from the average that was refused, the honest ones, too
        self._searched = now.next_round
        own_id = str(self.averager.peer_id)

        def harm_in(vector: Tensor, *reducers: str) -> str:
            """Return what is wrong with the parts that these have averaged."""
            parts = zip(outcome.reducers, average.arrived, strict=True)
            used = tuple(there and peer in reducers for peer, there in parts)
            return trial.harm(Average(vector, now.next_round, used, used), own)

        found = dict[str, str]()
        side = {peer for peer in members if (member := self._dht.member(peer)) is not None and member.trusted}
        suspects = [*{*members} - side - {own_id}]
        buffers = slice(self._common.num_parameters, None)
        until = time.monotonic() + _SEARCH_SHARE * self._config.round_seconds
        for peer in random.sample(suspects, len(suspects)):
            if time.monotonic() >= until:
                break
            alone = self.averager.alone(peer)
            if alone is not None:
                alone[buffers] = own.vector[buffers]  # nobody has a part of its own in a median
                found[peer] = harm_in(alone, own_id)
        if not any(found.values()) and not harm_in(average.vector, own_id):
            # Nobody has sent harm, and what is averaged here does none: so it is what others have averaged.
            for peer in outcome.sources - {own_id}:
                why = harm_in(average.vector, own_id, peer)
                found[peer] = why and f"as a reducer returned a harmful average: {why}"
        verdicts = tuple(Verdict(peer, "dropped", why) for peer, why in found.items() if why)
        if not now.given.usable and 2 * len(verdicts) > len(suspects) > 1:
            return "", None  # the owner has trained nothing, and most are no liars: it is the run, or its schedule
        return harm, verdicts

    def undo(self, peers: Iterable[str]) -> bool:
        """At the owner's: take out of the weights what these have put into them, as far as this peer has reduced it.
        Whether there was anything.

        The others find out that they have other weights, as after an average that was refused.
        """
        ways = [self.averager.taken_back(peer) for peer in peers if self.trial is not None]
        known = [way for way in ways if way is not None]
        for way in known:
            self._common.undo(way)
        return bool(known)

    def _audit(
        self, now: EndedRound, rates: Mapping[str, float], outcome: ExchangeOutcome, average: Tensor
    ) -> tuple[Verdict, ...]:
        """Return who has averaged for this peer and must not be believed; nobody judges the owner."""
        if not now.given.usable:
            return ()
        own_id = str(self.averager.peer_id)
        judged = dict.fromkeys(outcome.reducers, "")
        for peer in outcome.sources:
            member = self._dht.member(peer)
            if peer == own_id or member is None or member.role != "owner":
                judged[peer] = peer
        reducers = [judged[peer] for peer in outcome.reducers]
        slower = slower_than(rates, own_id) / max(now.trained, 0.05)
        size = self._common.num_parameters
        return untrue(average, now.given.vector, size, reducers, own_id=own_id, slower=slower)

    def _hand_over(self, control: Any, vector: Tensor, sent: Sequence[float]) -> str:
        """Begin the exchange; why that is not possible, or nothing."""
        if control is None:
            return "the round was too short to look for others"
        averager = self.averager
        if not averager.lock_averaged_tensors.acquire(timeout=GRACE):
            control.cancel()
            return "the round before is still being exchanged"
        try:
            averager._averaged_tensors[0].copy_(vector)
            averager.plan.copy_(torch.tensor([CODECS.index(self.link.load.codec), *sent], dtype=torch.float64))
        finally:
            averager.lock_averaged_tensors.release()
        control.weight = float(max(sent))
        control.allow_allreduce()
        return ""

    def _await(self, now: EndedRound, seconds: float) -> tuple[Averaged, Tensor | None, str] | None:
        """Return what the exchange came to: the group, the average, and why there is none. None: too early to say."""
        if now.failed:
            return _NOBODY, None, now.failed
        left = now.began + exchange_seconds(self._config) + 0.5 - time.monotonic()
        try:
            averaged: Averaged = now.control.result(max(0.0, min(seconds, left)))
        except (TimeoutError, FutureTimeoutError):
            if left > seconds:
                return None
            averaged = _NOBODY._replace(outcome=ExchangeOutcome(unfinished=True))
            why = "the exchange took too long"
        except Exception as failure:  # of libp2p, by way of the averager's process: whatever it is
            text = (str(failure).strip() or type(failure).__name__).splitlines()[0][:120]
            averaged = _NOBODY
            why = "no others" if "could not find a group" in str(failure) else text
        else:
            if not self.averager.lock_averaged_tensors.acquire(timeout=GRACE):
                return averaged, None, "the averager did not release its result"
            self.averager.lock_averaged_tensors.release()
            return averaged, self.averager._averaged_tensors[0], ""  # nobody else's before the next exchange
        with suppress(Exception):
            now.control.cancel()
        return averaged, None, why
