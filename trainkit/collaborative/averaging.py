"""The end of a round: find the others, average with them over hivemind, judge the average, and make the outer step.

A round that fails costs nothing but the others' part: the peer goes on with its own pseudo-gradient.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.matchmaking import MatchmakingException
from torch import Tensor

from trainkit.collaborative.averager import GRACE
from trainkit.collaborative.dht import SwarmDHT
from trainkit.collaborative.outer import PROBE_SIZE, OuterState
from trainkit.collaborative.sentry import Screening
from trainkit.config.schema import CollaborativeConfig
from trainkit.errors import RunFailedError

# An average more than so many times longer than this peer's own pseudo-gradient is refused.
_LARGEST_RATIO = 10.0
# How long the averager's process may take to answer; it does so in milliseconds.
_ANSWER_SECONDS = 30.0
# Relative distance of those beyond which a peer takes over the senior peer's state. Rounding to fp16 gives about 1e-5.
_DRIFT = 1e-3


@dataclass(frozen=True)
class Round:
    """How a round ended for this peer."""

    group: int
    """Peers that averaged, itself included; 0 when it went on alone."""
    used: str
    """"average", "own" or "nothing" (it had trained nothing, or not-a-number)."""
    why: str
    """Why the average was not used; empty if it was."""
    samples_per_sec: float
    """Of the whole group."""
    drifted: bool
    """This peer's weights are no longer those of the group."""


class Averaging:
    """One peer's rounds."""

    def __init__(self, averager: Any, dht: SwarmDHT, outer: OuterState, config: CollaborativeConfig) -> None:
        self._averager, self._dht, self._outer, self._config = averager, dht, outer, config
        self.screening: Screening = averager
        self._can_share = not averager.client_mode
        self._control: Any = None
        self._usual_norm = 0.0  # of the last average that was used

    def share(self) -> None:
        """From now on others may take over this peer's state; they prefer the oldest."""
        if self._can_share:
            self._averager.allow_state_sharing = True
            self._averager.state_sharing_priority = self._outer.age + 1.0

    def adopt(self, seconds: float, *, newer_than: int = -1) -> bool:
        """Take over the state of the oldest peer that gives it. False if there is none, or it cannot be used.

        ``newer_than``: a state is of no use that is not of a later round.
        """
        future = self._averager.load_state_from_peers(wait=False, timeout=seconds)
        try:
            found = future.result(seconds)
        except FutureTimeoutError:
            return False
        if found is None:
            return False
        metadata, tensors = found
        try:
            theta, momentum = tensors
            if int(metadata["round"]) <= newer_than:
                return False
            # Younger than the donor: it keeps the say, should the two drift apart.
            self._outer.load(theta.float(), momentum.float(), int(metadata["round"]), float(metadata["age"]) - 0.5)
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def begin(self, boundary: float, samples_per_sec: float) -> None:
        """Look for the others, while training goes on. ``boundary``: when the round ends."""
        assert self._control is None
        if not (self._dht.alive and self._averager.is_alive()):
            raise RunFailedError(
                "A helper process of this peer has died.",
                why="Without it nobody can be reached; most often memory ran out.",
                fix="Start the peer again.",
            )
        about = {
            "shares": self._can_share,
            "age": self._outer.age,
            "rate": float(samples_per_sec),
            "probe": self._outer.probe().numpy().tobytes(),
        }

        def search() -> None:
            self._control = self._averager.step(
                gather=about,
                scheduled_time=max(boundary, time.time() + 0.3),
                timeout=max(boundary - time.time(), 0.0) + GRACE,
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

    def finish(self, *, samples: int, trained: float, next_round: int, alone: bool) -> Round:
        """Exchange, judge, and make the outer step.

        Args:
            samples: how many this peer has trained on in the round; its weight in the average.
            trained: the share of the round in which it did.
            alone: nobody else has shown up lately, so there is little to wait for.
        """
        outer, control = self._outer, self._control
        self._control = None
        own = outer.local()
        own_norm = float(own[: outer.num_parameters].norm())
        usable = samples > 0 and math.isfinite(own_norm) and bool(torch.isfinite(own).all())
        if not usable:
            # Stay in the group without a say: zero weight, and the common buffers.
            own = torch.cat([torch.zeros(outer.num_parameters), outer.theta[outer.num_parameters :]])
        average, members, why = self._exchange(control, own, samples if usable else 0, alone=alone)
        if average is not None:
            why = self._objection(average, own_norm / max(trained, 0.05) if usable else 0.0)
        if average is not None and not why:
            self._usual_norm = float(average[: outer.num_parameters].norm())
            used = "average"
        else:
            used = "own" if usable else "nothing"
            average = own if usable else None
        drifted = self._has_drifted(members)
        # A peer that went its own way while there were others must not be the one that they listen to later.
        outer.step(average, next_round, counts=used == "average" or alone)
        if not drifted:
            self.share()
        return Round(
            group=len(members) if used == "average" else 0,
            used=used,
            why=why,
            samples_per_sec=sum(_number(member.get("rate")) for member in members.values()),
            drifted=drifted,
        )

    def _exchange(
        self, control: Any, own: Tensor, weight: int, *, alone: bool
    ) -> tuple[Tensor | None, dict[str, dict[str, Any]], str]:
        if control is None:
            return None, {}, "the round was too short to look for others"
        (shared,) = self._averager._averaged_tensors
        lock = self._averager.lock_averaged_tensors
        if not lock.acquire(timeout=GRACE):
            control.cancel()
            return None, {}, "the round before is still being exchanged"
        try:
            shared.copy_(own)
        finally:
            lock.release()
        control.weight = float(weight)
        control.allow_allreduce()
        # What is left before the search of the next round begins, so that a slow round is not followed by a missed one.
        config = self._config
        patience = max(GRACE, config.round_seconds - config.matchmaking_seconds) + 0.5
        try:
            members = self._wait(control, patience, alone=alone)
        except (FutureTimeoutError, CancelledError, AllreduceException, MatchmakingException, OSError) as error:
            with suppress(Exception):
                control.cancel()
            return None, {}, "no others" if "could not find a group" in str(error) else _first_line(error)
        except Exception as error:  # of libp2p, by way of the averager's process: what it is does not matter here
            return None, {}, _first_line(error)
        if not lock.acquire(timeout=GRACE):
            return None, {}, "the averager holds on to its result"
        average = shared.clone()
        lock.release()
        found = {str(peer): value if isinstance(value, dict) else {} for peer, value in (members or {}).items()}
        return average, found, ""

    def _wait(self, control: Any, patience: float, *, alone: bool) -> Mapping[Any, Any]:
        if alone and not control.began_allreduce:
            # Long enough for a newcomer who has just asked; a lonely creator does not idle for seconds each round.
            with suppress(FutureTimeoutError):
                return control.result(0.7)  # type: ignore[no-any-return]
            if not control.began_allreduce:
                raise FutureTimeoutError("could not find a group")
        return control.result(patience)  # type: ignore[no-any-return]

    def _objection(self, average: Tensor, own_norm: float) -> str:
        """Why ``average`` must not be used; empty if it may."""
        if not bool(torch.isfinite(average).all()):
            return "the average is not finite"
        norm = float(average[: self._outer.num_parameters].norm())
        usual = max(own_norm, self._usual_norm)
        if usual > 0.0 and norm > _LARGEST_RATIO * usual:
            return f"the average is {norm / usual:.0f} times longer than usual"
        return ""

    def _has_drifted(self, members: dict[str, dict[str, Any]]) -> bool:
        """Compare this peer's weights with those of the oldest member that shares its state."""
        sharing = [(_number(m.get("age")), peer, m) for peer, m in members.items() if m.get("shares") is True]
        if not sharing:
            return False
        _, oldest, member = max(sharing, key=lambda item: item[:2])
        if oldest == str(self._averager.peer_id):
            return False
        probe = member.get("probe")
        if not isinstance(probe, bytes) or len(probe) != 4 * PROBE_SIZE:
            return False
        theirs, own = torch.frombuffer(bytearray(probe), dtype=torch.float32), self._outer.probe()
        return not float((theirs - own).norm()) <= _DRIFT * float(own.norm())  # also for not-a-number


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
