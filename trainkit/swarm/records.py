"""What a peer writes into its run folder: the same records as any other run, so that every verb works on it."""

from __future__ import annotations

import errno
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from trainkit import terminal
from trainkit.checkpoint.save import Restored
from trainkit.distributed.device import device_name
from trainkit.errors import DiskError, RunFailedError
from trainkit.monitor.loggers import Logger
from trainkit.ranks.env import RankEnv
from trainkit.run.contributions import Contribution, Contributions, Counted
from trainkit.run.events import Attempt, Remark, Writer
from trainkit.swarm.dht import Watch
from trainkit.swarm.messages import RoundClock
from trainkit.swarm.rounds import Box
from trainkit.swarm.sync_diloco import CommonState
from trainkit.training.recorder import Progress, Recorder

# What a swarm's run folder is told although its disk is full: kept in memory, and written when there is room again.
#
# Training on one machine may as well end there; a creator that ends takes the others' work with it.

# Lines that wait for room; of more than these the oldest are given up, and that is said.
_MOST_WAITING = 100_000


class PatientRecord:
    """Events and metrics, in the order in which they came. Takes the place of a run's `Logger`."""

    def __init__(self, attempt: Attempt, metrics: Logger, say: Callable[[str], None]) -> None:
        self._attempt, self._metrics, self._say = attempt, metrics, say
        self._waiting: deque[Callable[[], None]] = deque(maxlen=_MOST_WAITING)
        self.is_full = False
        """Something could not be written, and no checkpoint has been since."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one metrics record."""
        self._add(partial(self._metrics.log, {"time": round(time.time(), 3), **record}))

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Take one event."""
        self._add(partial(self._attempt.remark, kind, time=round(time.time(), 3), **facts))

    def close(self) -> None:
        """Whoever opened the metrics closes them."""

    def attempt(self, action: Callable[[], None], *, proves: bool = False) -> bool:
        """Do something that writes; False if the disk is full. What else waits for room comes first.

        ``proves``: once it is done, there is room for everything.
        """
        if not self._flush():
            return False
        try:
            action()
        except (DiskError, OSError) as error:
            self._full(error)
            return False
        if proves and self.is_full:
            self.is_full = False
            self._say("  there is room on the disk again: everything is written")
            self.remark("save_recovered")
        return True

    def _add(self, action: Callable[[], None]) -> None:
        self._waiting.append(action)
        self._flush()

    def _flush(self) -> bool:
        while self._waiting:
            try:
                self._waiting[0]()
            except (DiskError, OSError) as error:
                self._full(error)
                return False
            self._waiting.popleft()
        return True

    def _full(self, error: Exception) -> None:
        if self.is_full:
            return
        self.is_full = True
        why = error.why.partition(". ")[0].rstrip(".") if isinstance(error, DiskError) else str(error)
        self._say(f"  cannot write into the run folder: {why}. Training goes on; it is tried again after each round")
        self.remark("save_failed", error=why)


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
        self, keeper: Recorder, common: CommonState, clock: RoundClock, watch: Watch, *, role: Role, say: _SAY
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
            numbers = {key: value for key, value in box.metrics.items() if key != "samples"}
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
        metrics, val = self._keeper.parts.metrics, self._keeper.progress.val
        shown = [key for key in dict.fromkeys(("loss", metrics.headline)) if key in val]
        return ["  ".join(f"val {metrics.words(key, val[key])}" for key in shown)]

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


# Who has contributed how much: counted by whoever answers for the run, of what its own reducer has averaged.


class Credits:
    """The account of one run, in its folder; it goes on over restarts."""

    def __init__(
        self, writer: Writer, seconds: Callable[[], float], publish: Callable[[Sequence[Contribution]], None]
    ) -> None:
        """
        Args:
            seconds: length of the round that is counted.
            publish: tells the swarm.
        """
        self._writer, self._seconds, self._publish = writer, seconds, publish
        self._known = Contributions.of(writer.run)

    def count(self, counted: Iterable[Counted]) -> None:
        """Count one round."""
        self._known.add(self._seconds(), counted)
        self._writer.check()
        with suppress(OSError):  # a full disk; the next round writes all of it again
            self._known.write(self._writer.run)
        self._publish(self._known.best_first())
