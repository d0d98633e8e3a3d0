"""History of a run: its events, read back with types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.run.events import LIFE, read_events
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import ProcessId


@dataclass(unsafe_hash=True)
class Submission:
    """One job that was queued or started for a run, or was about to be. Only `history_of` changes it.

    In the second case the command still does so, was killed, or has had no answer.
    """

    executor: str
    time: float
    """When it was made; if pending when it began, or was left without an answer."""
    attempts_before: int
    process: ProcessId | None
    """Looks after the ranks, where no scheduler does; if pending the command itself."""
    job_id: str = ""
    cancelled: bool = False
    """If pending: should there be a job, it is to be ended."""
    ended: str | None = None
    """The state in which whoever looked after it left it; None if nobody has said."""
    token: str = ""
    """In the path of the script that sbatch was given; empty: it was that of the run itself."""
    unanswered: str = ""
    """Output of sbatch instead of an answer."""
    waits: str = ""
    """Why the queue did not take a job of the run: the job with this id, the feeder, is to queue one later."""


@dataclass(frozen=True)
class RankFailure:
    """A rank that raised, was killed, or hangs."""

    attempt: int | None
    rank: int | None
    host: str
    error: str
    time: float


@dataclass
class RunHistory:
    """Everything that has happened to a run, in the order of time."""

    submissions: list[Submission] = field(default_factory=list)
    failures: list[RankFailure] = field(default_factory=list)
    refused_with: int = 0
    """The exit code of a rank that refused what it was to train, 2 or 3; of the last attempt that has ended, else 0."""
    started: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the newest start."""
    is_script: bool = False
    """Its ranks are a script of the user's own, whose end whoever looks after them judges."""
    finished: bool = False
    """Nothing is left to train, for it has not been prolonged since."""
    pruned: bool = False
    """Its sweep has stopped it before its end: it has finished as long as nobody lets it go on."""
    handed_back: set[int] = field(default_factory=set)
    """Attempts that saved and asked to be continued."""
    requeued: set[int] = field(default_factory=set)
    """Attempts whose job was put back into the queue."""
    outcome: str | None = None
    """The last word: COMPLETED, FAILED and so on, of the newest attempt; None if it has none."""
    cut_short: Submission | None = None
    """The newest submission, if nobody has said what came of it."""

    @property
    def submission(self) -> Submission | None:
        """The newest one."""
        return self.submissions[-1] if self.submissions else None


def history_of(run: RunDir) -> RunHistory:
    """Read the run's events into its history."""
    life = RunHistory()
    newest = -1
    before_prolonged: tuple[bool, bool, str | None] | None = None
    for event in read_events(run, LIFE):
        kind = event["event"]
        attempt = event.get("attempt")
        cut = life.cut_short
        last = life.submission
        if kind == "submitting":
            life.cut_short = _submission(event)
            if last is not None and last.waits and last.job_id == life.cut_short.job_id:
                life.cut_short.cancelled = last.cancelled  # while its feeder was about to queue it
        elif kind == "refused":
            life.cut_short = None
            if before_prolonged is not None and event.get("full") is not True:  # it does not train longer after all
                life.finished, life.pruned, life.outcome = before_prolonged
                before_prolonged = None
        elif kind == "unpacked":
            life.submissions = []
            life.cut_short = None
        elif cut is not None and kind == "unanswered":
            cut.time = event.get("time", 0.0)
            cut.unanswered = event.get("error", "")
        elif cut is not None and kind == "cancelled" and event.get("job_id", "") in ("", cut.job_id):
            cut.cancelled = True
            if last is not None and last.waits:
                last.cancelled = True  # should the queue be full still
        elif kind == "waits":
            job = _submission(event)
            job.waits = event.get("error") or "the queue is full"
            life.submissions = [item for item in life.submissions if not item.waits] + [job]
        elif kind == "submitted":
            life.cut_short = None
            job = _submission(event)
            same = last is not None and (last.executor, last.job_id) == (job.executor, job.job_id)
            if same and job.job_id and job.process is None:
                continue  # the job itself, or who has adopted it, was faster than the command that queued it
            life.submissions = [item for item in life.submissions if not item.waits] + [job]
            life.outcome = None
            before_prolonged = None
        elif attempt is not None and attempt < newest and kind in ("failed", "ended"):
            continue  # ranks that SLURM took for dead, after others have gone on
        elif kind == "cancelled" and last is not None:
            job_id = event.get("job_id") or last.job_id
            for item in life.submissions:
                if item.job_id == job_id:
                    item.cancelled = True
        elif kind == "prolonged":
            before_prolonged = (life.finished, life.pruned, life.outcome)
            life.finished = False
            life.pruned = False
            life.outcome = None
        elif kind == "pruned":
            life.pruned = True
        elif kind == "started":
            life.started = event
            life.is_script |= event.get("script") is True
            life.outcome = None
            newest = max(newest, attempt or 0)
            if last is not None:
                last.ended = None
        elif kind == "handed_back" and attempt is not None:
            life.handed_back.add(attempt)
        elif kind == "requeued" and attempt is not None:
            life.requeued.add(attempt)
        elif kind == "failed":
            host = event.get("host", "")
            error = event.get("error", "")
            life.failures.append(RankFailure(attempt, event.get("rank"), host, error, event.get("time", 0.0)))
            life.outcome = "FAILED"
        elif kind == "ended":
            life.outcome = event.get("state") or "UNKNOWN"
            life.finished |= life.outcome == "COMPLETED"
            life.refused_with = next(filter((2, 3).__contains__, event.get("exit_codes", ())), 0)
            if last is not None:
                last.ended = event.get("state", "")
    return life


def _submission(event: Mapping[str, Any]) -> Submission:
    return Submission(
        executor=event.get("executor", ""),
        time=float(event.get("time", 0.0)),
        attempts_before=event.get("attempts_before") or 0,
        process=ProcessId.from_fields(event),
        job_id=event.get("job_id", ""),
        token=event.get("token", ""),
    )


def micro_batch_found(run: RunDir, world_size: int, device: str) -> int | None:
    """Return the newest result of `train.micro_batch_size=auto` on as many ranks with such a device, if any."""
    for event in reversed(read_events(run, "probed")):
        size = event.get("micro_batch_size")
        if (event.get("world_size"), event.get("device")) == (world_size, device) and isinstance(size, int):
            return size
    return None
