"""What a peer writes into its run folder: the same records as any other run, so that every verb works on it."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from trainkit import terminal
from trainkit.checkpoint.saving import Restored
from trainkit.collaborative.clock import RoundClock
from trainkit.collaborative.common import CommonState
from trainkit.collaborative.loop import Box
from trainkit.collaborative.patient import PatientRecord
from trainkit.collaborative.watch import Watch
from trainkit.distributed.device import device_name
from trainkit.errors import DiskError, RunFailedError
from trainkit.ranks.env import RankEnv
from trainkit.records.attempts import Remark
from trainkit.records.contributions import Contributions
from trainkit.training.outcome import Keeper
from trainkit.training.progress import Progress

# Validation and saving may take this share of the time; what takes long is done in fewer rounds.
_SHARE_FOR_RECORDS = 0.25
_SAY = Callable[[str], None]
Role = Literal["judge", "anchor", "guest"]


class RoundKeeper:
    """Metrics of every round, and checkpoints of the common weights; the peer that answers for the run also judges.

    Args:
        role: ``judge`` validates and saves as it goes; ``anchor`` saves; ``guest`` does both at the end alone.
    """

    def __init__(
        self, keeper: Keeper, common: CommonState, clock: RoundClock, watch: Watch, *, role: Role, say: _SAY
    ) -> None:
        self._record = PatientRecord(keeper.writer.attempt, keeper.metrics, say)
        self._keeper = replace(keeper, metrics=self._record)
        self._common, self._clock, self._watch = common, clock, watch
        self._role, self._say = role, say
        self._most_peers = 1
        self._known: dict[str, str] = {}
        self._judges_from, self._unsaved = 0.0, False

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Write an event, now or when there is room for it."""
        self._record.remark(kind, **facts)

    def after_round(self, box: Box) -> None:
        """Record a round, and judge the model that came out of it if that is due."""
        checkpoints = self._keeper.checkpoints
        if not self._record.attempt(lambda: checkpoints.go_on(checkpoints.over())):
            self._unsaved, self._judges_from = True, 0.0  # what was on its way is lost: save again
        progress, metrics = self._keeper.progress, self._keeper.metrics
        progress.images += box.samples
        progress.train_seconds += box.seconds
        self._most_peers = max(self._most_peers, box.result.group)
        where = self._where(box.index)
        rate = box.samples / box.seconds if box.seconds else None
        if box.samples:
            numbers = {key: box.metrics[key] for key in ("loss", "acc1", "acc5")}
            swarm = {"peers": max(1, box.result.group), "swarm_images_per_sec": round(box.result.samples_per_sec, 2)}
            result = box.result
            link = {
                "parts": result.parts,
                "parts_expected": result.expected,
                "bytes_up": result.bytes_up,
                "bytes_down": result.bytes_down,
                "exchange_seconds": round(result.seconds, 3),
            }
            speed = {"lr": box.lr, "images_per_sec": None if rate is None else round(rate, 2)}
            metrics.log({**where, "split": "train", **numbers, **speed, **swarm, **link})
        words = [f"round {box.index + 1}/{self._clock.count}", _who(box)]
        if box.samples:
            words.append(f"loss {box.metrics['loss']:.4f}")
            words.append(f"{rate or 0.0:,.0f} images/s here")
        if box.result.collapsed:
            words.append(f"what was learned here is given up: {box.result.collapsed}")
            self.remark("collapsed", round=box.index + 1, why=box.result.collapsed)
        if box.result.late:
            words.append(f"too late: {', '.join(map(self._name, box.result.late))}")
        if box.result.drifted:
            words.append("behind the others: taking over their state")
        if self._role != "guest":
            with self._common.in_model():
                words += self._judge(box.index, where)
            self._note_arrivals()
        self._say("  ".join(words))
        if box.result.advice:
            self._say(f"  {box.result.advice}")
            self.remark("link", round=box.index + 1, advice=box.result.advice)

    def lost(self) -> None:
        """Nobody of the swarm answers any more: what is here may be all that is left of it."""
        self.remark("swarm_lost", round=self._common.round)
        with self._common.in_model():
            saved = self._save(max(self._common.round, 1))
        if saved and self._record.attempt(self._keeper.settle):
            self._say(f"The weights of round {self._common.round} are kept in {self._keeper.writer.run.checkpoints}.")

    def back(self) -> None:
        """Somebody answers again."""
        self.remark("swarm_back", round=self._common.round)

    def finish(self, outcome: str, *, test: bool = True) -> None:
        """Test metrics of the best model, if wanted, and ``summary.json``. Raises DiskError if there is no room."""
        try:
            self._finish(outcome, test=test)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            run = self._keeper.writer.run
            raise DiskError(
                f"There is no room for the results of {run.name}.",
                why=f"{error.strerror}. What this peer has contributed is not lost.",
                fix=f"Free some space; what is saved is tested by {terminal.command('evaluate', run.path)}",
            ) from None

    def _finish(self, outcome: str, *, test: bool) -> None:
        keeper, rounds = self._keeper, min(self._common.round, self._clock.count)
        where = self._where(rounds - 1)
        with self._common.in_model():
            if self._role == "guest":  # validates once: the model that all of them end with
                keeper.validate(where)
            if self._role != "judge" or self._unsaved:
                self._save(max(rounds, 1))
        tested = keeper.test(where) if test and self._role != "anchor" else {}
        swarm: dict[str, Any] = {"rounds": rounds, "most_peers": self._most_peers}
        if contributed := Contributions.of(keeper.writer.run).rows():
            swarm["contributions"] = contributed
        keeper.summarize(outcome, epochs=self._epoch(), test=tested, **swarm)

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
        began = time.monotonic()
        if began < self._judges_from and index + 1 < self._clock.count:
            return []
        if self._role == "judge":
            self._keeper.validate(where)
        self._save(index + 1)
        took = time.monotonic() - began
        self._judges_from = 0.0 if self._unsaved else began + took / _SHARE_FOR_RECORDS
        if self._role == "anchor":
            return []
        val = self._keeper.progress.val
        return [f"val loss {val['loss']:.4f}  val acc1 {val['acc1']:.2f} %"]

    def _save(self, rounds: int) -> bool:
        """A checkpoint of the weights that the peers have in common; the model holds them right after a round."""
        keeper, stored = self._keeper, {"theta": self._common.theta, "momentum": self._common.momentum}
        if self._role == "anchor":
            keeper.progress.step = rounds  # it makes no updates to count
        waits = self._record.is_full  # for the end of it: that it has begun says nothing about room

        def save() -> None:
            keeper.save(optimizer=False, extra={"common": stored}, round=rounds)
            if waits:
                keeper.settle()

        saved = self._record.attempt(save, proves=waits)
        self._unsaved = not saved
        return saved

    def _name(self, peer: str) -> str:
        known = self._watch.peers.get(peer)
        return terminal.name(known.name) if known is not None else f"..{peer[-6:]}"

    def _note_arrivals(self) -> None:
        since = time.time() - 3 * self._clock.seconds
        now = {key: record.name for key, record in self._watch.others(since).items()}
        for key in now.keys() - self._known.keys():
            self.remark("peer_joined", peer=key, name=now[key])
            self._say(f"  {now[key]} has joined")
        for key in self._known.keys() - now.keys():
            self.remark("peer_left", peer=key, name=self._known[key])
            self._say(f"  {self._known[key]} has left")
        self._known = now

    def _epoch(self) -> float:
        return self._keeper.progress.images / max(1, len(self._keeper.parts.splits.train))

    def _where(self, index: int) -> dict[str, Any]:
        return {"step": self._keeper.progress.step, "epoch": round(self._epoch(), 4), "round": index + 1}


def take_over(restored: Restored, common: CommonState) -> None:
    """Go on from a checkpoint of `RoundKeeper`.

    Raises KeyError, TypeError or ValueError when it is none of this run's.
    """
    Progress.of(restored.state)
    state, stored = restored.state, restored.extra["common"]
    common.load(stored["theta"], stored["momentum"], int(state["round"]))


def _who(box: Box) -> str:
    result = box.result
    if result.used == "average":
        return f"{result.group} peers averaged, {result.parts} of {result.expected} parts"
    if box.peers == 1:
        return "alone"
    if result.used == "own":
        return f"went on alone ({result.why})"
    waits = "" if result.collapsed else ", what was learned waits for the next round"
    return f"no average ({result.why}){waits}"
