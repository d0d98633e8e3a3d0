"""The end of a round: find the others, average with them over hivemind, judge the average, and make the outer step.

The average may arrive while the next round is being trained, and a round that fails costs nothing: see `sync_diloco`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.matchmaking import MatchmakingException
from torch import Tensor

from trainkit.config.schema import CollaborativeConfig
from trainkit.errors import RunFailedError
from trainkit.swarm import averager as swarm_averager
from trainkit.swarm import processes
from trainkit.swarm.admission import Member
from trainkit.swarm.averager import GRACE, exchange_seconds
from trainkit.swarm.bans import Screening
from trainkit.swarm.dht import SwarmDHT
from trainkit.swarm.exchange import Outcome
from trainkit.swarm.link import CODECS, Link, cuts
from trainkit.swarm.robust import Action, Round, Verdict
from trainkit.swarm.sync_diloco import Average, CommonState, Given

# What a peer makes of averages that others have made. Reducers are trusted; one that lies must not be believed for
# it.
#
# Nobody but the reducer has seen all contributions. But a peer knows its own, which is in the average or beside
# others that began at the same weights: an average is not against it, and not many times longer. So each peer, the
# owner first of all, judges by its own one the slice of every other reducer but the owner, and does without a slice
# that cannot be true: the common weights stay there as they are, and what was learned waits for a later round. Who
# was sent something else than the owner finds its weights differ from the owner's in the next round, and takes over
# those.
#
# A slice that is wrong but neither long nor against anybody passes: who averages for others decides, within one
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
    ratios = {one: _length_ratio(*_picked(average, own, places[one], 0, num_parameters)) for one in places}
    # What this peer has averaged itself is true: by so much the others' contributions may be longer than its own.
    allowed = _LONG * max(1.0, slower, ratios.get(own_id, 0.0))
    found = []
    for reducer, ratio in ratios.items():
        if reducer != own_id:
            sliced = _picked(average, own, places[reducer], 0, num_parameters)
            buffers = _picked(average, own, places[reducer], num_parameters, own.numel())
            if verdict := _verdict(reducer, sliced, buffers, ratio, allowed):
                found.append(verdict)
    return tuple(found)


def slower_than(others: Mapping[str, float], own: float) -> float:
    """How many times faster the others are, by the median of what they say, the lower one: so many peers must lie.

    Args:
        others: samples per second that each of them trains on.
        own: the same of this peer; 0: not known.
    """
    known = sorted(rate for rate in others.values() if rate > 0.0)
    return max(1.0, known[(len(known) - 1) // 2] / own) if known and own > 0.0 else 1.0


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
    where = [slice(max(part.start, first), min(part.stop, last)) for part in parts]
    where = [one for one in where if one.start < one.stop]
    if not where:
        return average.new_empty(0).double(), own.new_empty(0).double()
    return torch.cat([average[one] for one in where]).double(), torch.cat([own[one] for one in where]).double()


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
        self._averager, self._dht, self._common, self._config, self._link = averager, dht, common, config, link
        self.screening: Screening = averager
        self._can_share = not averager.client_mode
        self._control: Any = None
        self._exchange: _Exchange | None = None
        self._usual_norm = 0.0  # of the last average that was used
        self._own = swarm_averager.OwnRounds()

    def share(self) -> None:
        """From now on others may take over this peer's state, if it is of the owner's side."""
        if self._can_share:
            self._averager.allow_state_sharing = True

    def adopt(self, seconds: float, *, newer_than: int = -1) -> bool:
        """Take over the state that the owner's side has signed. False if nobody gives one that can be used.

        ``newer_than``: a state is of no use that is not of a later round.
        """
        future = self._averager.load_state_from_peers(wait=False, timeout=seconds)
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
        if not (self._dht.alive and self._averager.is_alive()):
            raise processes.helper_has_died()
        about = {
            "shares": self._can_share,
            "rate": float(samples_per_sec),
            "probe": self._common.probe().numpy().tobytes(),
        }

        def search() -> None:
            self._control = self._averager.step(
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
        given = self._own.give(self._common, samples, trained, loss)
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
        members, outcome, why = found
        took = time.monotonic() - now.began
        common, given, size = self._common, now.given, self._common.num_parameters
        said, average = outcome, None
        reducers: tuple[str, ...] = ()
        false: tuple[Verdict, ...] = ()
        if outcome is not None:
            average, why = self._result()
        if outcome is not None and average is not None:
            reducers, false = self._appraised(average, outcome, members, now)
            outcome = outcome.refusing({verdict.peer for verdict in false}, average, given.vector)
            own = swarm_averager.whole(float(given.vector[:size].norm()), now.trained) if given.usable else 0.0
            why = swarm_averager.objection(average, size, max(own, self._usual_norm))
        role, me = self._dht.own.grant.role, str(self._averager.peer_id)
        reference = swarm_averager.reference_among(self._trusted(members), role, me)
        drifted = reference is not None and swarm_averager.has_drifted(members[reference].get("probe"), common.probe())
        if drifted and common.same_weights:
            why = "the others are at another update"
        everything = (True,) * len(given.weights)
        used = "nothing"
        if outcome is not None and average is not None and not why:
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
        advice = self._link.learn(now.sent, said) if said is not None else ""
        self._averager.bandwidth = self._link.upload  # who reduces gets a part of the vector in proportion
        return Round(
            group=len(members) if used == "average" else 0,
            used=used,
            why=why,
            samples_per_sec=sum(swarm_averager.number(member.get("rate")) for member in members.values()),
            drifted=drifted,
            seconds=took,
            reducers=reducers,
            untrue=false,
            collapsed=given.collapsed,
            advice=advice,
            **({} if outcome is None else outcome.in_short()),
        )

    def _appraised(
        self, average: Tensor, outcome: Outcome, members: Mapping[str, Mapping[str, Any]], now: _Exchange
    ) -> tuple[tuple[str, ...], tuple[Verdict, ...]]:
        """The others who have averaged for this peer, and those of them who must not be believed."""
        own_id, came_from = str(self._averager.peer_id), outcome.arrived_from()
        others = tuple(sorted(set(came_from) - {"", own_id}))
        if not others or not now.given.usable:
            return others, ()
        rates = {peer: swarm_averager.number(member.get("rate")) for peer, member in members.items()}
        slower = slower_than(rates, rates.pop(own_id, 0.0)) / max(now.trained, 0.05)
        size, member = self._common.num_parameters, self._dht.member
        judged = tuple("" if (one := member(peer)) and one.role == "owner" else peer for peer in came_from)
        return others, untrue(average, now.given.vector, size, judged, own_id=own_id, slower=slower)

    def _trusted(self, members: Mapping[str, Mapping[str, Any]]) -> list[Member]:
        """Those who say that they give their state away, as far as the owner lets them."""
        sharing = [peer for peer, member in members.items() if member.get("shares") is True]
        return [found for peer in sharing if (found := self._dht.member(peer)) and found.trusted]

    def _hand_over(self, control: Any, vector: Tensor, sent: Sequence[float]) -> str:
        """Begin the exchange; why that is not possible, or nothing."""
        if control is None:
            return "the round was too short to look for others"
        averager, lock = self._averager, self._averager.lock_averaged_tensors
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

    def _await(self, now: _Exchange, seconds: float) -> tuple[dict[str, dict[str, Any]], Outcome | None, str] | None:
        """Members of the group, what the exchange came to, and why there was none; None when it is too early."""
        if now.failed:
            return {}, None, now.failed
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
            error = "no others" if "could not find a group" in str(failure) else swarm_averager.first_line(failure)
        except Exception as failure:  # of libp2p, by way of the averager's process: what it is does not matter here
            error = swarm_averager.first_line(failure)
        else:
            told = {str(peer): value if isinstance(value, dict) else {} for peer, value in members.items()}
            return told, outcome, ""
        with suppress(Exception):
            control.cancel()
        return {}, None, error

    def _result(self) -> tuple[Tensor | None, str]:
        lock = self._averager.lock_averaged_tensors
        if not lock.acquire(timeout=GRACE):
            return None, "the averager holds on to its result"
        average = self._averager._averaged_tensors[0].clone()
        lock.release()
        return average, ""
