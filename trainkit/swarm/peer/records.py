"""Records of a peer in its run folder: the same records as any other run, so that every verb works on it."""

from __future__ import annotations

import errno
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from trainkit.checkpoint.save import Restored
from trainkit.cluster.ranks import RankEnv
from trainkit.common import terminal
from trainkit.common.errors import DiskError, RunFailedError
from trainkit.distributed.device import device_name
from trainkit.monitor.base import Logger
from trainkit.run.contributions import Contributions
from trainkit.run.events import Attempt, Remark
from trainkit.swarm.network.watch import PeerWatch
from trainkit.swarm.protocol.messages import RoundClock
from trainkit.swarm.protocol.outer_step import OuterState
from trainkit.swarm.trust.reducers import Round
from trainkit.training.progress import Progress
from trainkit.training.recorder import Recorder

# Lines that wait for room; of more than these the oldest are given up, and that is said.
_MOST_WAITING = 100_000
# They may take this share of the time; what takes long is done in fewer rounds. A state that was not saved is lost with
# its peer, so saving does not wait for validation.
_SHARES = {"validation": 0.2, "saving": 0.1}
RoundRole = Literal["judge", "anchor", "guest"]
_NO_EXCHANGE = Round(group=0, used="nothing", why="", samples_per_sec=0.0, drifted=False)


@dataclass(frozen=True)
class PeerRound:
    """Work of a peer in one round, and what came of its exchange."""

    index: int
    samples: int = 0
    seconds: float = 0.0
    """Spent in updates."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    lr: float = 0.0
    peers: int = 1
    """Peers heard of lately, this one included."""
    position: int = 0
    """Position in the order of the data."""
    result: Round = _NO_EXCHANGE

    @property
    def samples_per_sec(self) -> float:
        """0 of a round without updates."""
        return self.samples / (self.seconds or math.inf)

    @property
    def outcome(self) -> str:
        """The peers of the average, or why there was none."""
        result = self.result
        if result.used == "average":
            exchange = result.outcome
            return f"{result.group} peers averaged, {sum(exchange.received)} of {sum(exchange.expected)} parts"
        if self.peers == 1:
            return "alone"
        if result.used == "own":
            return f"continued alone ({result.why})"
        return f"no average ({result.why}), what was learned is sent in the next round"


class PatientRecord:
    """Events and metrics, in the order in which they came; the `Logger` of a swarm's run.

    What comes while the disk is full is kept in memory, and written when there is room again. Training on one machine
    may as well end there; a creator that ends takes the others' work with it.
    """

    def __init__(self, attempt: Attempt, metrics: Logger, say: Callable[[str], None]) -> None:
        self._attempt = attempt
        self._metrics = metrics
        self._say = say
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
        """The opener of the metrics closes them."""

    def attempt(self, action: Callable[[], None], *, proves: bool = False) -> bool:
        """Do something that writes; False if the disk is full. What else waits for room comes first.

        ``proves``: once it is done, there is room for everything.
        """
        if not (self._flush() and self._try(action)):
            return False
        if proves and self.is_full:
            self.is_full = False
            self._say("  there is room on the disk again: everything has been written")
            self.remark("save_recovered")
        return True

    def _add(self, action: Callable[[], None]) -> None:
        self._waiting.append(action)
        self._flush()

    def _flush(self) -> bool:
        while self._waiting and self._try(self._waiting[0]):
            self._waiting.popleft()
        return not self._waiting

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
            return True
        except (DiskError, OSError) as error:
            why = error.why.partition(". ")[0].rstrip(".") if isinstance(error, DiskError) else str(error)
        if not self.is_full:
            self.is_full = True
            goes_on = "Training continues; writing is retried after each round"
            self._say(f"  cannot write into the run folder: {why}. {goes_on}")
            self.remark("save_failed", error=why)
        return False


class RoundsView(Protocol):
    """Peer as its records show it, beyond its training."""

    clock: RoundClock
    watch: PeerWatch

    def say(self, line: str) -> None: ...

    def name_of(self, peer_id: str) -> str: ...


class RoundRecorder:
    """Metrics of every round, and checkpoints of the common weights; the peer that answers for the run also judges.

    Args:
        role: ``judge`` validates and saves as it goes; ``anchor`` saves; ``guest`` does both at the end alone.
    """

    def __init__(self, peer: RoundsView, recorder: Recorder, common: OuterState, role: RoundRole) -> None:
        self._peer = peer
        self._role = role
        self._say = peer.say
        self._record = PatientRecord(recorder.writer, recorder.metrics, peer.say)
        self.remark = self._record.remark
        """Write an event, now or when there is room for it."""
        self._recorder = replace(recorder, metrics=self._record)
        self._progress = recorder.progress
        self._run = recorder.writer.run
        self._common = common
        self._most_peers = 1
        self._known: dict[str, str] = {}
        self._due: dict[str, float] = {}
        """When what takes much of the time may be done again."""
        self._unsaved = False

    def after_round(self, done: PeerRound) -> None:
        """Record a round, and judge the model that came out of it if that is due."""
        checkpoints = self._recorder.checkpoints
        result = done.result
        number = done.index + 1
        if not self._record.attempt(lambda: checkpoints.go_on(checkpoints.over())):
            self._unsaved = True
            self._due = {}  # what was on its way is lost: save again
        self._progress.images += done.samples
        self._progress.train_seconds += done.seconds
        self._most_peers = max(self._most_peers, result.group)
        if not done.samples and self._role != "guest":
            self._progress.step += 1  # a checkpoint is known by its step, and takes the place of one with the same
        where = self._where(number)
        words = [f"round {number}/{self._peer.clock.count}", done.outcome]
        if done.samples:
            self._log(done, where)
            words += [f"loss {done.metrics['loss']:.4f}", f"{done.samples_per_sec:,.0f} images/s here"]
        if result.refused:
            self.remark("average_refused", round=number, why=result.why)
        if result.outcome.late:
            words.append(f"too late: {', '.join(map(self._peer.name_of, result.outcome.late))}")
        if result.drifted:
            words.append("behind the others: taking over their state")
        if self._role != "guest":
            with self._common.in_model():
                words += self._judge(number, where)
            self._note_arrivals()
        self._say("  ".join(words))
        if result.advice:
            self._say(f"  {result.advice}")
            self.remark("link", round=number, advice=result.advice)

    def _log(self, done: PeerRound, where: Mapping[str, Any]) -> None:
        result = done.result
        exchange = done.result.outcome
        speed = round(done.samples_per_sec, 2) if done.seconds else None
        metrics: dict[str, Any] = {**where, "split": "train", **done.metrics, "lr": done.lr, "images_per_sec": speed}
        metrics.pop("samples", None)
        metrics |= {"peers": max(1, result.group), "swarm_images_per_sec": round(result.samples_per_sec, 2)}
        metrics |= {"parts": sum(exchange.received), "parts_expected": sum(exchange.expected)}
        metrics |= {"bytes_up": exchange.bytes_up, "bytes_down": exchange.bytes_down}
        self._record.log({**metrics, "exchange_seconds": round(result.seconds, 3)})

    def lost(self) -> None:
        """No peer of the swarm answers any more: what is here may be all that is left of it."""
        index = self._common.round
        self.remark("swarm_lost", round=index)
        with self._common.in_model():
            self._save(max(index, 1))
        if not self._unsaved and self._record.attempt(self._recorder.settle):
            told = f"`{terminal.command('evaluate', self._run.path)}` evaluates them"
            self._say(f"The weights of round {index} are kept in {self._run.checkpoints}; {told}.")

    def note_undone(self) -> None:
        """The weights are others than those that were saved."""
        self._unsaved = True

    def finish(self, outcome: str, *, test: bool = True) -> None:
        """Test metrics of the best model, if wanted, and ``summary.json``. Raises DiskError if there is no room."""
        recorder = self._recorder
        rounds = min(self._common.round, self._peer.clock.count)
        where = self._where(rounds)
        try:
            with self._common.in_model():
                # A guest validates once: the model that all of them end with.
                if self._role == "guest" or (self._role == "judge" and self._progress.best is None):
                    recorder.validate(where)
                if self._role != "judge" or self._unsaved:
                    self._save(max(rounds, 1))
            tested = recorder.test(where) if test and self._role != "anchor" else {}
            swarm: dict[str, Any] = {"rounds": rounds, "most_peers": self._most_peers}
            contributed = Contributions.of(self._run).rows()
            if contributed:
                swarm["contributions"] = contributed
            recorder.summarize(outcome, epochs=where["epoch"], test=tested, **swarm)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            why = f"{error.strerror}. What this peer has contributed is not lost."
            fix = f"Free some space; what is saved is tested by {terminal.command('evaluate', self._run.path)}"
            raise DiskError(f"There is no room for the results of {self._run.name}.", why=why, fix=fix) from None

    @contextmanager
    def recorded(self, env: RankEnv) -> Iterator[None]:
        """The events of a peer's start, and what is left of one that fails."""
        attempt = self._recorder.writer
        state = self._recorder.state
        attempt.started(
            step=self._progress.step, world_size=env.world_size, hosts=[socket.gethostname()],
            device=device_name(state.dist.device), precision=state.precision.name, params=state.num_parameters,
        )  # fmt: skip
        try:
            yield
        except Exception as error:
            what = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
            attempt.failed(what, rank=env.rank)
            if isinstance(error, RunFailedError):
                self._recorder.summarize("failed", epochs=self._where(0)["epoch"], test=None, why=what)
            raise

    def _judge(self, number: int, where: Mapping[str, Any]) -> list[str]:
        """Validate and save, each unless that took much of the time lately; what to say of it."""
        judged = self._role == "judge" and self._if_due(number, "validation", lambda: self._recorder.validate(where))
        if judged:
            self._due.pop("saving", None)  # it may be the best so far, and then must be there
        self._if_due(number, "saving", lambda: self._save(number))
        if self._unsaved:
            self._due = {}
        metrics = self._recorder.state.metrics
        val = self._progress.val if judged else {}
        shown = dict.fromkeys(("loss", metrics.headline))
        return [f"val {metrics.words(key, val[key])}" for key in shown if key in val]

    def _if_due(self, number: int, what: str, action: Callable[[], object]) -> bool:
        """Do it, unless it took much of the time lately and there are further rounds. Whether it was done."""
        began = time.monotonic()
        if began < self._due.get(what, 0.0) and number < self._peer.clock.count:
            return False
        action()
        self._due[what] = began + (time.monotonic() - began) / _SHARES[what]
        return True

    def _save(self, rounds: int) -> None:
        """A checkpoint of the weights that the peers have in common; the model holds them right after a round."""
        stored = {"theta": self._common.theta, "momentum": self._common.momentum}
        waits = self._record.is_full  # for the end of it: that it has begun says nothing about room

        def save() -> None:
            self._recorder.save(optimizer=False, extra={"common": stored}, round=rounds)
            if waits:
                self._recorder.settle()

        self._unsaved = not self._record.attempt(save, proves=waits)

    def _note_arrivals(self) -> None:
        since = time.time() - 3 * self._peer.clock.seconds
        now = {key: record.name for key, record in self._peer.watch.others(since).items()}
        for key in now.keys() - self._known.keys():
            self.remark("peer_joined", peer=key, name=now[key])
            self._say(f"  {now[key]} has joined")
        for key in self._known.keys() - now.keys():
            self.remark("peer_left", peer=key, name=self._known[key])
            self._say(f"  {self._known[key]} has left")
        self._known = now

    def _where(self, number: int) -> dict[str, Any]:
        epoch = self._progress.images / max(1, len(self._recorder.state.splits.train))
        return {"step": self._progress.step, "epoch": round(epoch, 4), "round": number}


def take_over(restored: Restored, common: OuterState) -> None:
    """Go on from a checkpoint of `RoundRecorder`.

    Raises KeyError, TypeError or ValueError when it is none of this run's.
    """
    Progress.of(restored.state)
    state = restored.state
    stored = restored.extra["common"]
    common.load(stored["theta"], stored["momentum"], int(state["round"]))
