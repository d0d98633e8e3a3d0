"""What a peer writes into its run folder: the same records as any other run, so that every verb works on it."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainkit.checkpoint.saving import Restored
from trainkit.collaborative.clock import RoundClock
from trainkit.collaborative.dht import Watch
from trainkit.collaborative.outer import OuterState
from trainkit.collaborative.rounds import Box
from trainkit.distributed.device import device_name
from trainkit.errors import RunFailedError
from trainkit.ranks.env import RankEnv
from trainkit.training.outcome import Keeper
from trainkit.training.progress import Progress

# Validation and saving may take this share of a round, on average; a long one is made in fewer rounds.
_SHARE_FOR_RECORDS = 0.25
_SAY = Callable[[str], None]


class RoundKeeper:
    """Metrics of every round; of the peer that answers for the run (``judges``) also validation and checkpoints."""

    def __init__(
        self, keeper: Keeper, outer: OuterState, clock: RoundClock, watch: Watch, *, judges: bool, say: _SAY
    ) -> None:
        self._keeper, self._outer, self._clock, self._watch = keeper, outer, clock, watch
        self._judges, self._say = judges, say
        self._most_peers = 1
        self._known: dict[str, str] = {}
        self._skip = 0

    def after_round(self, box: Box) -> None:
        """Record a round, and judge the model that came out of it if that is due."""
        checkpoints = self._keeper.checkpoints
        checkpoints.go_on(checkpoints.over())
        progress, metrics = self._keeper.progress, self._keeper.metrics
        progress.images += box.samples
        progress.train_seconds += box.seconds
        self._most_peers = max(self._most_peers, box.result.group)
        where = self._where(box.index)
        rate = box.samples / box.seconds if box.seconds else None
        if box.samples:
            numbers = {key: box.metrics[key] for key in ("loss", "acc1", "acc5")}
            swarm = {"peers": max(1, box.result.group), "swarm_images_per_sec": round(box.result.samples_per_sec, 2)}
            speed = {"lr": box.lr, "images_per_sec": None if rate is None else round(rate, 2)}
            metrics.log({**where, "split": "train", **numbers, **speed, **swarm})
        words = [f"round {box.index + 1}/{self._clock.count}", _who(box)]
        if box.samples:
            words.append(f"loss {box.metrics['loss']:.4f}")
            words.append(f"{rate or 0.0:,.0f} images/s here")
        if box.result.drifted:
            words.append("behind the others: taking over their state")
        if self._judges:
            words += self._judge(box.index, where)
            self._note_arrivals()
        self._say("  ".join(words))

    def finish(self, outcome: str, *, test: bool = True) -> None:
        """Test metrics of the best model, if wanted, and ``summary.json``."""
        keeper, rounds = self._keeper, min(self._outer.round, self._clock.count)
        where = self._where(rounds - 1)
        if not self._judges:  # a peer that joined validates once: the model that all of them end with
            keeper.validate(where)
            self._save(max(rounds, 1))
        tested = keeper.test(where) if test else {}
        keeper.summarize(outcome, epochs=self._epoch(), test=tested, rounds=rounds, most_peers=self._most_peers)

    @contextmanager
    def recorded(self, env: RankEnv) -> Iterator[None]:
        """The events of a peer's start, and what is left of one that fails."""
        attempt, parts, progress = self._keeper.writer.attempt, self._keeper.parts, self._keeper.progress
        attempt.started(
            step=progress.step,
            world_size=env.world_size,
            hosts=[socket.gethostname()],
            device=device_name(parts.dist.device),
            precision=parts.precision.name,
            params=parts.num_parameters,
        )
        try:
            yield
        except Exception as error:
            what = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
            attempt.failed(what, rank=env.rank)
            if isinstance(error, RunFailedError):
                self._keeper.summarize("failed", epochs=self._epoch(), test=None, why=what)
            raise

    def _judge(self, index: int, where: dict[str, Any]) -> list[str]:
        if self._skip > 0 and index + 1 < self._clock.count:
            self._skip -= 1
            return []
        began = time.monotonic()
        self._keeper.validate(where)
        self._save(index + 1)
        share = (time.monotonic() - began) / (self._clock.seconds * _SHARE_FOR_RECORDS)
        self._skip = max(0, math.ceil(share) - 1)
        val = self._keeper.progress.val
        return [f"val loss {val['loss']:.4f}  val acc1 {val['acc1']:.2f} %"]

    def _save(self, rounds: int) -> None:
        """A checkpoint of the weights that the peers have in common; the model holds them right after a round."""
        common = {"theta": self._outer.theta, "momentum": self._outer.momentum}
        self._keeper.save(optimizer=False, extra={"outer": common}, round=rounds, age=self._outer.age)

    def _note_arrivals(self) -> None:
        attempt, since = self._keeper.writer.attempt, time.time() - 3 * self._clock.seconds
        now = {key: record.name for key, record in self._watch.others(since).items()}
        for key in now.keys() - self._known.keys():
            attempt.remark("peer_joined", peer=key, name=now[key])
            self._say(f"  {now[key]} has joined")
        for key in self._known.keys() - now.keys():
            attempt.remark("peer_left", peer=key, name=self._known[key])
            self._say(f"  {self._known[key]} has left")
        self._known = now

    def _epoch(self) -> float:
        return self._keeper.progress.images / max(1, len(self._keeper.parts.splits.train))

    def _where(self, index: int) -> dict[str, Any]:
        return {"step": self._keeper.progress.step, "epoch": round(self._epoch(), 4), "round": index + 1}


def take_over(restored: Restored, outer: OuterState) -> None:
    """Go on from a checkpoint of `RoundKeeper`.

    Raises KeyError, TypeError or ValueError when it is none of this run's.
    """
    Progress.of(restored.state)
    state, common = restored.state, restored.extra["outer"]
    outer.load(common["theta"], common["momentum"], int(state["round"]), float(state["age"]))


def _who(box: Box) -> str:
    if box.result.used == "average":
        return f"{box.result.group} peers averaged"
    if box.peers == 1:
        return "alone"
    return f"went on alone ({box.result.why})"
