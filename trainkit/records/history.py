"""A run's life, read back with types. Whatever in the file is odd is left out: a reader never fails over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.records.events import LIFE, read_events
from trainkit.records.process_id import ProcessId
from trainkit.records.rundir import RunDir


@dataclass(frozen=True)
class Submission:
    """One job that was queued or started for a run."""

    executor: str
    job_id: str
    time: float
    attempts_before: int
    process: ProcessId | None
    """Of what looks after the ranks, where no scheduler does."""
    cancelled: bool
    ended: str | None
    """The state in which whoever looked after it left it; None if nobody has said."""
    finished: bool
    """An attempt of this or an earlier job came to the end of the training."""


@dataclass(frozen=True)
class CutShort:
    """A command that was about to queue a job, and has not come to say which: it still does so, was killed, or has had
    no answer."""

    time: float
    """When it began, or was left without an answer."""
    attempts_before: int
    process: ProcessId | None
    token: str = ""
    """In the path of the script that sbatch was given; empty: it was that of the run itself."""
    unanswered: str = ""
    """What sbatch said instead of an answer."""
    cancelled: bool = False
    """Should there be a job, it is to be ended."""


@dataclass(frozen=True)
class Failed:
    """A rank that raised, was killed, or hangs."""

    attempt: int | None
    rank: int | None
    host: str
    error: str
    time: float


@dataclass(frozen=True)
class Life:
    """Everything that has happened to a run, in the order of time."""

    submissions: tuple[Submission, ...] = ()
    failures: tuple[Failed, ...] = ()
    refused_with: int = 0
    """The exit code of a rank that refused what it was to train, 2 or 3; of the last attempt that has ended, else 0."""
    started: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the newest start."""
    finished: bool = False
    """Nothing is left to train."""
    handed_back: frozenset[int] = frozenset()
    """Attempts that saved and asked to be continued."""
    requeued: frozenset[int] = frozenset()
    """Attempts whose job was put back into the queue."""
    outcome: str | None = None
    """The last word: COMPLETED, FAILED and so on, of the newest attempt; None if it has none."""
    cut_short: CutShort | None = None
    """The newest submission, if nobody has said what came of it."""

    @property
    def submission(self) -> Submission | None:
        """The newest one."""
        return self.submissions[-1] if self.submissions else None


def life_of(run: RunDir) -> Life:
    """What the run's events say."""
    return _life(read_events(run, LIFE))


def _life(events: list[dict[str, Any]]) -> Life:
    submissions: list[Submission] = []
    failures: list[Failed] = []
    handed_back, requeued = set(), set()
    started: dict[str, Any] = {}
    finished, outcome, newest, refused_with = False, None, -1, 0
    since: list[dict[str, Any]] = []  # events of the job whose `submitted` is `opened`
    opened: dict[str, Any] | None = None
    submitting: dict[str, Any] | None = None
    for event in events:
        kind, attempt = event.get("event"), _whole(event.get("attempt"))
        if kind in ("submitting", "refused"):
            submitting = event if kind == "submitting" else None
            continue
        if submitting is not None and kind == "unanswered":
            submitting = {**submitting, "time": event.get("time"), "unanswered": event.get("error")}
            continue
        if submitting is not None and kind == "cancelled" and not event.get("job_id"):
            submitting = {**submitting, "cancelled": True}
            continue
        if kind == "submitted":
            submitting = None
            same = opened is not None and all(event.get(key) == opened.get(key) for key in ("executor", "job_id"))
            if same and event.get("executor") == "slurm":
                continue  # the job itself, or who has adopted it, was faster than the command that queued it
            if opened is not None:
                submissions.append(_submission(opened, since))
            opened, since, outcome = event, [], None
            continue
        if attempt is not None and attempt < newest and kind in ("failed", "ended"):
            continue  # ranks that SLURM took for dead, after others have gone on
        since.append(event)
        if kind == "started":
            started, outcome, newest = event, None, max(newest, attempt or 0)
        elif kind == "handed_back" and attempt is not None:
            handed_back.add(attempt)
        elif kind == "requeued" and attempt is not None:
            requeued.add(attempt)
        elif kind == "failed":
            failures.append(_failed(event, attempt))
            outcome = "FAILED"
        elif kind == "ended":
            outcome = _text(event.get("state")) or "UNKNOWN"
            finished = finished or outcome == "COMPLETED"
            refused_with = next((code for code in event.get("exit_codes") or () if code in (2, 3)), 0)
    if opened is not None:
        submissions.append(_submission(opened, since))
    return Life(
        submissions=tuple(submissions),
        failures=tuple(failures),
        refused_with=refused_with,
        started=started,
        finished=finished,
        handed_back=frozenset(handed_back),
        requeued=frozenset(requeued),
        outcome=outcome,
        cut_short=_cut_short(submitting) if submitting is not None else None,
    )


def _cut_short(event: Mapping[str, Any]) -> CutShort:
    return CutShort(
        time=_seconds(event.get("time")),
        attempts_before=_whole(event.get("attempts_before")) or 0,
        process=ProcessId.from_fields(event),
        token=_text(event.get("token")),
        unanswered=_text(event.get("unanswered")),
        cancelled=event.get("cancelled") is True,
    )


def _submission(event: Mapping[str, Any], since: list[dict[str, Any]]) -> Submission:
    kinds = [item.get("event") for item in since]
    last = [item for item in since if item.get("event") in ("started", "ended")][-1:]  # started again: not ended yet
    states = [_text(item.get("state")) for item in last if item.get("event") == "ended"]
    return Submission(
        executor=_text(event.get("executor")),
        job_id=_text(event.get("job_id")),
        time=_seconds(event.get("time")),
        attempts_before=_whole(event.get("attempts_before")) or 0,
        process=ProcessId.from_fields(event),
        cancelled="cancelled" in kinds,
        ended=states[-1] if states else None,
        finished="COMPLETED" in states,
    )


def _failed(event: Mapping[str, Any], attempt: int | None) -> Failed:
    return Failed(
        attempt=attempt,
        rank=_whole(event.get("rank")),
        host=_text(event.get("host")),
        error=_text(event.get("error")),
        time=_seconds(event.get("time")),
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else 0.0


def _text(value: Any) -> str:
    return str(value)[:2000] if isinstance(value, str | int) and not isinstance(value, bool) else ""


def micro_batch_found(run: RunDir, world_size: int, device: str) -> int | None:
    """What `train.micro_batch_size=auto` has last found on as many ranks with such a device, if it has."""
    for event in reversed(read_events(run, "probed")):
        size = event.get("micro_batch_size")
        if (event.get("world_size"), event.get("device")) == (world_size, device) and isinstance(size, int):
            return size
    return None
