"""The end of a round: find the others, average with them over hivemind, judge the average, and make the outer step.

The average may arrive while the next round is being trained, and a round that fails costs nothing: see `sync`.
"""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.compression import NoCompression
from torch import Tensor

from trainkit.config.schema import CollaborativeConfig
from trainkit.errors import RunFailedError
from trainkit.swarm import processes
from trainkit.swarm.admission import Guard
from trainkit.swarm.dht import SwarmDHT
from trainkit.swarm.digest import has_drifted, reference_among
from trainkit.swarm.exchange import _Averager
from trainkit.swarm.link import CODECS, GRACE, PART, Link, Outcome, cuts, exchange_seconds, patience
from trainkit.swarm.robust import Action, Round, Verdict
from trainkit.swarm.sync import Average, CommonState, Given


@contextmanager
def open_averager(dht: SwarmDHT, common: CommonState, config: CollaborativeConfig, run_id: str) -> Iterator[Any]:
    """Start the averager; on leaving, end its process.

    Open it before the first use of CUDA: the process is forked.
    """
    interrupt = signal.getsignal(signal.SIGINT)
    averager = _Averager(
        common,
        Guard(dht.node, dht.admission),
        dht.own,
        run_id,
        config.compression,
        start=False,
        prefix=f"{run_id}_common",
        min_matchmaking_time=config.matchmaking_seconds,
        request_timeout=min(1.0, config.matchmaking_seconds / 2),
        # Parts are cut alike by all peers, and written by `trainkit.swarm.exchange`.
        compression=NoCompression(),
        part_size_bytes=4 * PART,
        state_compression=NoCompression(),
        client_mode=dht.client_mode,
        allow_state_sharing=False,
        allreduce_timeout=exchange_seconds(config),
        sender_timeout=patience(config),
        reducer_timeout=exchange_seconds(config),
        next_chunk_timeout=min(10.0, max(1.0, config.round_seconds / 4)),
        shutdown_timeout=2.0,
        daemon=True,
    )
    try:
        with processes.private_sockets():
            averager.run_in_background(await_ready=True, timeout=30.0)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # hivemind has switched Ctrl-C off in this process
        yield averager
    finally:
        mine = processes.family(averager.pid)
        with suppress(OSError, ValueError):
            averager.shutdown()
        processes.end(mine)


# Whether an average may be used. A round is judged by what this peer has trained itself.

# An average is refused that is longer than this peer's own pseudo-gradient by more than this factor.
_LARGEST_RATIO = 10.0
# A peer has collapsed if its round is longer, and its loss higher, than those of the last round by this factor.
_COLLAPSE = 10.0
_MOST_PASSED_OVER = 3
# Of a round; what was done in less says little about a whole one.
_LEAST_TRAINED = 0.05
# Below this a loss may rise as it likes: nothing is predicted wrong yet.
_LOW_LOSS = 1e-3


def objection(average: Tensor, num_parameters: int, usual: float) -> str:
    """Why ``average`` must not be used; empty if it may. ``usual``: length of a pseudo-gradient here; 0: not known."""
    if not bool(torch.isfinite(average).all()):
        return "the average is not finite"
    norm = float(average[:num_parameters].norm())
    if usual > 0.0 and norm > _LARGEST_RATIO * usual:
        return f"the average is {norm / usual:.0f} times longer than usual"
    return ""


class OwnRounds:
    """Judges each round of this peer by the one before.

    AdamW at a high rate can collapse once the loss is nearly zero: its second moments decay faster than they follow the
    gradients, until one update throws the weights anywhere (Bai et al., arXiv 2506.04805; tests/benchmarks/README.md).
    Reducers leave out a peer that is many times longer than the others; but of two peers the owner's is what the other
    is measured by, and its collapse was everybody's.

    Length alone says nothing: a peer that has waited for a compiler makes one update in a round, and hundreds in the
    next. After a collapse AdamW's first moment can lead away from the common weights once more; but only a few rounds
    in a row are passed over, so that nobody is stuck.
    """

    def __init__(self) -> None:
        self._length = self._loss = 0.0
        self._passed_over = 0
        """In a row."""

    def give(self, common: CommonState, samples: int, trained: float, loss: float | None) -> Given:
        """This peer's contribution to a round, as `CommonState.give`; nothing, where it has collapsed.

        Args:
            trained: the share of the round in which it did.
            loss: of the round; None: not to be judged by.
        """
        given = common.give(samples)
        if not given.usable or loss is None:
            return given
        length, before = whole(float(given.vector[: common.num_parameters].norm()), trained), self._loss
        if (
            0.0 < _COLLAPSE * self._length < length
            and loss > _COLLAPSE * max(before, _LOW_LOSS)
            and self._passed_over < _MOST_PASSED_OVER
        ):
            self._passed_over += 1
            return common.nothing(f"its loss rose from {before:.2g} to {loss:.2g}")
        self._length, self._loss, self._passed_over = length, loss, 0
        return given


def whole(length: float, trained: float) -> float:
    """How far a peer would have moved in a whole round that has moved so far in a share of one."""
    return length / max(trained, _LEAST_TRAINED)


# Reducers are trusted; one that lies must not be believed for it. Nobody but the reducer has seen all contributions.
# But a peer knows its own, which is in the average or beside others that began at the same weights: an average is not
# against it, and not many times longer. So each peer, the owner first of all, judges by its own contribution the slice
# of every other reducer but the owner, and does without a slice that cannot be true: the common weights stay there as
# they are, and what was learned waits for a later round. A peer that was sent something else than the owner finds its
# weights differ from the owner's in the next round, and takes over those.
#
# A slice that is wrong but neither long nor against anybody passes: a peer that averages for others decides, within one
# round's usual step, what they learn in it.

# An average is no longer than the median of what is in it; layers and peers differ by less than this.
_LONG = 3.0
# So many times longer than that is no accident.
_GROSS = 5.0
_AGAINST = 0.05
# BatchNorm's statistics are of the same data on all peers.
_LARGEST_BUFFERS = 10.0


def untrue(
    average: Tensor,
    own: Tensor,
    num_parameters: int,
    reducers: Sequence[str],
    *,
    own_id: str,
    slower: float,
) -> tuple[Verdict, ...]:
    """Reducers whose slices of ``average`` must not be used, and why.

    Args:
        average: of the whole vector, [values].
        own: this peer's contribution, alike.
        num_parameters: values before this position are pseudo-gradients, the others buffers.
        reducers: id of the peer that has averaged each part; empty where no average has arrived.
        slower: how many times more updates the others make in the time in which ``own`` was made, at least 1.
    """
    places: dict[str, list[slice]] = {}
    for part, reducer in zip(cuts(own.numel()), reducers, strict=True):
        if reducer:
            places.setdefault(reducer, []).append(part)
    slices = {one: _picked(average, own, parts, 0, num_parameters) for one, parts in places.items()}
    ratios = {one: _length_ratio(*sliced) for one, sliced in slices.items()}
    # What this peer has averaged itself is true: by so much the others' contributions may be longer than its own.
    allowed = _LONG * max(1.0, slower, ratios.get(own_id, 0.0))
    found = []
    for reducer, ratio in ratios.items():
        if reducer != own_id:
            buffers = _picked(average, own, places[reducer], num_parameters, own.numel())
            if verdict := _verdict(reducer, slices[reducer], buffers, ratio, allowed):
                found.append(verdict)
    return tuple(found)


def slower_than(others: Mapping[str, float], own: float) -> float:
    """How many times faster the others are, by the median of what they say, the lower one: so many peers must lie.

    Args:
        others: samples per second that each of them trains on.
        own: the same of this peer; 0: not known.
    """
    known = [rate for rate in others.values() if rate > 0.0]
    return max(1.0, statistics.median_low(known) / own) if known and own > 0.0 else 1.0


def _verdict(
    reducer: str, sliced: tuple[Tensor, Tensor], buffers: tuple[Tensor, Tensor], ratio: float, allowed: float
) -> Verdict | None:
    average, own = sliced
    if not bool(torch.isfinite(average).all()) or not bool(torch.isfinite(buffers[0]).all()):
        return Verdict(reducer, "dropped", "as a reducer gave back values that are not finite")
    if _length_ratio(*buffers) > _LARGEST_BUFFERS:
        return Verdict(reducer, "dropped", "as a reducer gave back running statistics that nobody has measured")
    chance = 3.0 / math.sqrt(max(own.numel(), 1))
    if ratio and (cosine := float(average @ own) / (float(average.norm()) * float(own.norm()))) < -(_AGAINST + chance):
        return Verdict(reducer, "dropped", f"as a reducer gave back the opposite of what it got (cosine {cosine:.2f})")
    if ratio > allowed:
        action: Action = "dropped" if ratio > _GROSS * allowed else "left out"
        return Verdict(reducer, action, f"as a reducer gave back an average {ratio:.3g} times longer than usual")
    return None


def _picked(average: Tensor, own: Tensor, parts: Sequence[slice], first: int, last: int) -> tuple[Tensor, Tensor]:
    """Both vectors, in these parts and between these positions; float64, whose squares are finite."""
    where = [slice(max(part.start, first), max(first, min(part.stop, last))) for part in parts if part.start < last]
    empty = average.new_empty(0)
    return (
        torch.cat([empty, *(average[one] for one in where)]).double(),
        torch.cat([empty, *(own[one] for one in where)]).double(),
    )


def _length_ratio(average: Tensor, own: Tensor) -> float:
    """How many times longer the average is; 0 where there is nothing to compare."""
    mine = float(own.norm())
    return float(average.norm()) / mine if mine > 0.0 else 0.0


# How long the averager's process may take to answer; it does so in milliseconds.
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class _Exchange:
    """A round that has ended, and whose average may still be under way."""

    control: Any
    given: Given
    sent: tuple[float, ...]
    """Weight of each part that this peer sends."""
    trained: float
    next_round: int
    alone: bool
    began: float
    failed: str
    """Why there is no exchange; empty if there is one."""


class Averaging:
    """One peer's rounds."""

    def __init__(
        self, averager: Any, dht: SwarmDHT, common: CommonState, config: CollaborativeConfig, link: Link
    ) -> None:
        self.averager, self._dht, self._common, self._config, self._link = averager, dht, common, config, link
        self._can_share = not averager.client_mode
        self._control: Any = None
        self._exchange: _Exchange | None = None
        self._usual_norm = 0.0  # of the last average that was used
        self._rounds = OwnRounds()

    def share(self) -> None:
        """From now on others may take over this peer's state, if it is of the owner's side."""
        if self._can_share:
            self.averager.allow_state_sharing = True

    def adopt(self, seconds: float, *, newer_than: int = -1) -> bool:
        """Take over the state that the owner's side has signed. False if nobody gives one that can be used.

        ``newer_than``: a state is of no use that is not of a later round.
        """
        future = self.averager.load_state_from_peers(wait=False, timeout=seconds)
        try:
            found = future.result(seconds)
        except FutureTimeoutError:
            return False
        if found is None:
            return False
        signed, (theta, momentum) = found
        if signed.round <= newer_than:
            return False
        try:
            self._common.load(theta, momentum, signed.round)
        except ValueError:
            return False
        return True

    def begin(self, boundary: float, samples_per_sec: float, *, grace: float = GRACE) -> None:
        """Look for the others, while training goes on.

        Args:
            boundary: when the round ends.
            grace: the search has failed so many seconds after it.
        """
        assert self._control is None
        assert self._exchange is None
        if not (self._dht.alive and self.averager.is_alive()):
            raise processes.helper_has_died()
        about = {
            "shares": self._can_share,
            "rate": float(samples_per_sec),
            "probe": self._common.probe().numpy().tobytes(),
        }

        def search() -> None:
            self._control = self.averager.step(
                gather=about,
                scheduled_time=max(boundary, time.time() + 0.3),
                timeout=max(boundary - time.time(), 0.0) + grace,
                require_trigger=True,
                wait=False,
            )

        # hivemind waits here without limit for a word of its process.
        thread = threading.Thread(target=search, daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        if self._control is None:
            raise RunFailedError(
                f"The averager of this peer has not answered for {_ANSWER_SECONDS:.0f} s.",
                why="Its process hangs, or this machine is overloaded.",
                fix="Start the peer again.",
            )

    @property
    def begun(self) -> bool:
        """Whether this round's search is under way."""
        return self._control is not None

    @property
    def found(self) -> bool:
        """Whether there is a group, which counts on this peer."""
        return self._control is not None and self._control.stage is not AveragingStage.LOOKING_FOR_GROUP

    def withdraw(self) -> None:
        """Give up the search."""
        control, self._control = self._control, None
        if control is not None:
            control.cancel()

    @property
    def pending(self) -> bool:
        """Whether the average of the last round is still under way."""
        return self._exchange is not None

    def exchange(
        self, *, samples: int, trained: float, next_round: int, alone: bool, loss: float | None = None
    ) -> None:
        """The round is over: give this peer's part to the group. `settle` says what came of it.

        Args:
            samples: how many this peer has trained on in the round; its weight in the average.
            trained: the share of the round in which it did.
            alone: nobody else has shown up lately, so there is little to wait for.
            loss: of the round; None: not to be judged by.
        """
        assert self._exchange is None
        control, self._control = self._control, None
        given = self._rounds.give(self._common, samples, trained, loss)
        sent = self._link.sent(given.weights)
        began, failed = time.monotonic(), self._hand_over(control, given.vector, sent)
        self._exchange = _Exchange(control, given, sent, trained, next_round, alone, began, failed)

    def settle(self, seconds: float, *, trained_on: bool, leads: bool) -> Round | None:
        """Wait so long for the average; judge it, and make the outer step. None when it is still under way.

        Args:
            trained_on: the model has been trained since the round ended.
            leads: without an average this peer goes on by itself; else it waits for the next.
        """
        assert self._exchange is not None
        now, found = self._exchange, self._await(self._exchange, seconds)
        if found is None:
            return None
        self._exchange = None
        members, said, average, why = found
        took = time.monotonic() - now.began
        common, given, size = self._common, now.given, self._common.num_parameters
        outcome = said
        reducers: tuple[str, ...] = ()
        false: tuple[Verdict, ...] = ()
        if average is not None:
            reducers, false = self._appraised(average, said, members, now)
            outcome = said.refusing({verdict.peer for verdict in false}, average, given.vector)
            own = whole(float(given.vector[:size].norm()), now.trained) if given.usable else 0.0
            why = objection(average, size, max(own, self._usual_norm))
        drifted = self._has_drifted(members)
        if drifted and common.same_weights:
            why = "the others are at another update"
        everything = (True,) * len(given.weights)
        used = "nothing"
        if average is not None and not why:
            used, self._usual_norm = "average", float(average[:size].norm())
            arrived, counted = tuple(map(bool, outcome.received)), outcome.counted
            if false and not any(arrived):
                used, why = "nothing", "all that has arrived was refused"
        elif given.usable and (leads or now.alone):
            used, average, arrived, counted = "own", given.vector, everything, everything
        else:
            average = given.vector
            arrived = counted = (False,) * len(given.weights)
        common.step(Average(average, now.next_round, arrived, counted), given, trained_on=trained_on)
        advice = self._link.learn(now.sent, said) if said.reducers else ""
        self.averager.bandwidth = self._link.upload  # who reduces gets a part of the vector in proportion
        return Round(
            group=len(members) if used == "average" else 0,
            used=used,
            why=why,
            samples_per_sec=sum(number(member.get("rate")) for member in members.values()),
            drifted=drifted,
            seconds=took,
            reducers=reducers,
            untrue=false,
            collapsed=given.collapsed,
            advice=advice,
            parts=sum(outcome.received),
            expected=sum(outcome.expected),
            bytes_up=outcome.bytes_up,
            bytes_down=outcome.bytes_down,
            late=outcome.late,
        )

    def _appraised(
        self, average: Tensor, outcome: Outcome, members: Mapping[str, Mapping[str, Any]], now: _Exchange
    ) -> tuple[tuple[str, ...], tuple[Verdict, ...]]:
        """The others who have averaged for this peer, and those of them who must not be believed."""
        own_id = str(self.averager.peer_id)
        came_from = [peer if count else "" for peer, count in zip(outcome.reducers, outcome.received, strict=True)]
        others = tuple(sorted(set(came_from) - {"", own_id}))
        if not others or not now.given.usable:
            return others, ()
        rates = {peer: number(member.get("rate")) for peer, member in members.items()}
        slower = slower_than(rates, rates.pop(own_id, 0.0)) / max(now.trained, 0.05)
        size, member = self._common.num_parameters, self._dht.member
        judged = tuple("" if (one := member(peer)) and one.role == "owner" else peer for peer in came_from)
        return others, untrue(average, now.given.vector, size, judged, own_id=own_id, slower=slower)

    def _has_drifted(self, members: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether this peer has other weights than the owner's side, of those who say that they give theirs away."""
        sharing = [peer for peer, member in members.items() if member.get("shares") is True]
        trusted = [found for peer in sharing if (found := self._dht.member(peer)) and found.trusted]
        reference = reference_among(trusted, self._dht.own.grant.role, str(self.averager.peer_id))
        return reference is not None and has_drifted(members[reference].get("probe"), self._common.probe())

    def _hand_over(self, control: Any, vector: Tensor, sent: Sequence[float]) -> str:
        """Begin the exchange; why that is not possible, or nothing."""
        if control is None:
            return "the round was too short to look for others"
        averager, lock = self.averager, self.averager.lock_averaged_tensors
        if not lock.acquire(timeout=GRACE):
            control.cancel()
            return "the round before is still being exchanged"
        try:
            averager._averaged_tensors[0].copy_(vector)
            averager.plan.copy_(torch.tensor([CODECS.index(self._link.load.codec), *sent], dtype=torch.float64))
        finally:
            lock.release()
        control.weight = float(max(sent))
        control.allow_allreduce()
        return ""

    def _await(
        self, now: _Exchange, seconds: float
    ) -> tuple[dict[str, dict[str, Any]], Outcome, Tensor | None, str] | None:
        """Members of the group, what the exchange came to, the average, and why there is none.

        None when it is too early to say.
        """
        if now.failed:
            return {}, Outcome(), None, now.failed
        control = now.control
        # Long enough for a newcomer who has just asked.
        lonely = now.alone and not control.began_allreduce
        left = now.began + (0.7 if lonely else exchange_seconds(self._config) + 0.5) - time.monotonic()
        try:
            members, outcome = control.result(max(0.0, min(seconds, left)))
        except FutureTimeoutError:
            if left > seconds or (lonely and control.began_allreduce):
                return None
            error = "no others" if lonely else "the exchange took too long"
        except (CancelledError, AllreduceException, MatchmakingException, OSError) as failure:
            error = "no others" if "could not find a group" in str(failure) else first_line(failure)
        except Exception as failure:  # of libp2p, by way of the averager's process: what it is does not matter here
            error = first_line(failure)
        else:
            told = {str(peer): value if isinstance(value, dict) else {} for peer, value in members.items()}
            if not self.averager.lock_averaged_tensors.acquire(timeout=GRACE):
                return told, outcome, None, "the averager holds on to its result"
            average = self.averager._averaged_tensors[0].clone()
            self.averager.lock_averaged_tensors.release()
            return told, outcome, average, ""
        with suppress(Exception):
            control.cancel()
        return {}, Outcome(), None, error


def finite(value: float | None) -> float | None:
    """``value``, or None if it is none that can be told."""
    return value if value is not None and math.isfinite(value) else None


def number(value: Any) -> float:
    """A finite number, or 0."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def first_line(error: BaseException) -> str:
    """Why something failed, in few words."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
