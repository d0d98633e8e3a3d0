"""``events.jsonl``: what happened to a run, one line each: history, and never what a job does now.

This module alone writes them, and reads them back with types.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.run import folder
from trainkit.run.folder import CLAIM, RunDir, make_private
from trainkit.run.lease import Holder, ProcessId, StaleAttemptError, lease_on, writing_attempt

_LONGEST = 20_000
"""Characters of one text: whatever went wrong, the record of a run stays one that can be read."""


def append_event(run_dir: RunDir, kind: str, **fields: Any) -> None:
    """Write one event with the present time (seconds since 1970)."""
    short = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in fields.items()}
    fileio.append_jsonl(run_dir.events, {"time": round(time.time(), 3), "event": kind, **short})


LIFE = (
    *("submitting", "unanswered", "refused", "submitted", "started", "handed_back", "requeued", "failed", "cancelled"),
    *("ended",),
)
"""The kinds that say what became of jobs and attempts; a long run has few of them among many others."""


def read_events(run_dir: RunDir, kind: str | tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    """Events in the order they happened, of one kind, of some or of all."""
    kinds = (kind,) if isinstance(kind, str) else kind
    wanted = [f'"{name}"'.encode() for name in kinds or ()]
    records = fileio.read_jsonl(run_dir.events, wanted)
    return [event for raw in records if (kinds is None or raw.get("event") in kinds) and (event := typed(raw))]


def typed(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """An event as others may rely on it; None without its kind. Fields of another type than theirs are left out, and
    text is one line: it is shown on terminals."""
    if not isinstance(raw.get("event"), str):
        return None
    event: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "time":
            fits = fileio.is_time(value)
        elif key == "job_id":  # becomes an argument of scancel: `--me` is none
            value = str(value) if fileio.is_whole(value) else value
            fits = isinstance(value, str) and re.fullmatch(r"\w[\w.+-]{0,63}", value) is not None
        elif key in _COUNTS:
            fits = fileio.is_whole(value) or value is None
        elif key in _TEXTS:
            fits = isinstance(value, str)
            value = str(value).strip().partition("\n")[0]  # an error's first line says what it is
        elif key in _LISTS:
            fits = isinstance(value, list) and all(isinstance(item, _LISTS[key]) for item in value)
        else:
            fits = value is None or fileio.plain(value) is not None
        if fits:
            event[terminal.one_line(key)] = fileio.plain(value)
    return event


_COUNTS = frozenset(
    ("attempt", "attempts_before", "rank", "node_rank", "step", "total_steps", "steps_per_epoch", "world_size")
) | {"params", "pid"}
_TEXTS = frozenset(("event", "executor", "host", "state", "error", "device", "precision", "process_started", "token"))
_LISTS = {"hosts": str, "signals": str, "exit_codes": int}


# A run's life, as it is written down: jobs are submitted for it, each makes attempts, and each attempt has an ending.
#
# Nothing else writes events. Kinds, in the order of a life:
#
#     submitting    a job is about to be queued                    by the command that does so
#     unanswered    whether it was, sbatch has not said            by the command that asked for it
#     submitted     a job was queued or started for the run       by the command that did so, or who has found the job
#     refused       it was not queued                              by the command that asked for it
#     started       all ranks have met and begin to train         by rank 0
#     saved         a checkpoint is on disk                        by rank 0
#     handed_back   told to stop, saved, wants to be continued     by the first rank of each node
#     requeued      the job was put back into the queue            by whoever looks after the ranks
#     excluded      the attempts to come do without a node         by whoever looks after the ranks
#     failed        a rank raised, was killed, or hangs            by that rank, or by whoever looks after it
#     cancelled     somebody asked for its end                     by `cancel`
#     ended         an attempt is over, in SLURM's words           by rank 0 (COMPLETED: nothing is left to train), or
#                                                                  by whoever looks after the ranks
#
# Beside them stand remarks on the training itself: skipped and nonfinite updates, ranks for which all others
# wait, peers that come and go.

Remark = Literal[
    "probed", "skipped", "nonfinite", "rolled_back", "stopped_early", "broken_image", "straggler", "peer_joined",
    "peer_left", "link", "collapsed",
    "swarm_lost", "swarm_back", "save_failed", "save_recovered",
    "peer_dropped", "peer_left_out", "peer_clipped", "peer_banned",
    "uploaded", "upload_failed", "upload_recovered", "not_uploaded",
]  # fmt: skip

RUN_DIR, NUMBER = "TRAINKIT_RUN_DIR", "TRAINKIT_ATTEMPT"
"""Environment variables by which whoever starts ranks tells them which attempt they are."""


def submitting(run: RunDir, executor: str, token: str) -> None:
    """This process is about to queue a job for the run: should nobody say which, it can be looked for.

    ``token``: of this submission and no other; in the path of the script that sbatch is given.
    """
    me = ProcessId.of(os.getpid())
    before = len(run.attempts())
    append_event(run, "submitting", executor=executor, attempts_before=before, token=token, **me.fields())


def unanswered(run: RunDir, why: str) -> None:
    """Whether the job was queued nobody can tell: sbatch has failed, and it may all the same, or will be."""
    append_event(run, "unanswered", error=why)


def refused(run: RunDir, why: str) -> None:
    """The job that was to be queued has been refused, so there is none to look for."""
    append_event(run, "refused", error=why)


def submitted(
    run: RunDir,
    executor: str,
    job_id: str,
    process: ProcessId | None = None,
    *,
    attempts_before: int | None = None,
    continues: str = "",
    adopted: bool = False,
) -> None:
    """A job was queued, or started here.

    Args:
        process: looks after the ranks, where no scheduler does.
        attempts_before: how many attempts there were; None: as many as there are now.
        continues: job id of the link before it, in a chain of jobs that nobody but the first has asked for.
        adopted: whoever queued it did not come to write this, and the job was found later.
    """
    who = process.fields() if process is not None else {}
    who |= {"continues": continues} if continues else {}
    how = {"adopted": True} if adopted else {}
    before = len(run.attempts()) if attempts_before is None else attempts_before
    append_event(run, "submitted", executor=executor, job_id=job_id, attempts_before=before, **who, **how)
    folder.note_job(run.path, executor, job_id, process.word() if process is not None else "")


def job_of(env: Mapping[str, str]) -> str:
    """The SLURM job that a process with this environment belongs to, as `submitted` names it; empty if to none."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")


def cancelled(run: RunDir, job_id: str) -> None:
    """Somebody asked for the end of a job; without an id, of the one that a submission may still come to."""
    append_event(run, "cancelled", job_id=job_id)


def never_began(run: RunDir, job_id: str, state: str) -> None:
    """A job has ended without an attempt: cancelled while it waited for its turn, or broken before its start."""
    append_event(run, "ended", state=state, job_id=job_id)


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run, for writing down what becomes of it."""

    run: RunDir
    number: int
    may_write: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    """Raises StaleAttemptError when another process writes the run by now. For rank 0; what others say is passed over
    by readers once a newer attempt has started."""

    @classmethod
    def begin(cls, run: RunDir, *, node_rank: int = 0) -> Attempt:
        """The next attempt, which this node is the first and only one to begin; its log folder is there.

        Nodes that share a folder begin the same attempt: the first that this node has no part in, and that is not over.

        Raises:
            UserError: the log folder cannot be written.
        """
        over = [event["attempt"] for event in read_events(run, "ended") if type(event.get("attempt")) is int]
        number = max(over, default=-1) + 1
        while True:
            claim = CLAIM.at(run.attempt_logs(number), node_rank)
            try:
                make_private(run.path, exist_ok=True)  # a template has no Python before this
                fileio.make_folder(claim.parent, run.path)
                fileio.create(claim, run.path).close()
                return cls(run, number)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise UserError(
                    f"Cannot begin an attempt of {run.path}.",
                    why=f"{error.strerror}: {error.filename}",
                    fix="Free some space, or check who may write there.",
                ) from None

    @classmethod
    def named_in(cls, env: Mapping[str, str]) -> Attempt | None:
        """The attempt that ``env`` says this process is part of; None for a process that nobody looks after.

        Raises UserError where it says half of it.
        """
        path, number = env.get(RUN_DIR, ""), env.get(NUMBER, "")
        if not path and not number:
            return None
        if not path or not number.isdecimal():
            raise UserError(
                f"{RUN_DIR}={path!r} and {NUMBER}={number!r} do not name an attempt.",
                why="They tell a rank which start of which run it belongs to, and go together.",
                fix="Unset both; the commands of trainkit and its batch scripts set them for their ranks.",
            )
        return cls(RunDir(Path(path).absolute()), int(number))

    def environment(self) -> dict[str, str]:
        """What `named_in` reads."""
        return {RUN_DIR: str(self.run.path), NUMBER: str(self.number)}

    def successor(self) -> int | None:
        """A newer attempt that writes the run, or has: SLURM took the node for dead, and ranks or script of this one
        live on. None while this is the newest."""
        started = [event["attempt"] for event in read_events(self.run, "started") if type(event.get("attempt")) is int]
        newest = max([*started, writing_attempt(self.run) or 0])
        return newest if newest > self.number else None

    @property
    def logs(self) -> Path:
        """``rank-<n>.out`` and ``rank-<n>.err``."""
        return self.run.attempt_logs(self.number)

    def started(self, **facts: Any) -> None:
        """The ranks have met. ``facts``: step, total_steps, steps_per_epoch, world_size, hosts, device, precision,
        params, micro_batch_size, grad_accum_steps, versions."""
        self._write("started", **facts)

    def saved(self, step: int, **facts: Any) -> None:
        """A checkpoint of ``step`` is on disk."""
        self._write("saved", step=step, **facts)

    def handed_back(self, *, node_rank: int, step: int | None, signals: Sequence[str]) -> None:
        """Every rank of this node was told to stop, and all that they have done is saved."""
        self._write("handed_back", node_rank=node_rank, step=step, signals=list(signals), host=socket.gethostname())

    def requeued(self, job_id: str) -> None:
        """Its job was put back into the queue and goes on with the next attempt."""
        self._write("requeued", job_id=job_id)

    def excluded(self, node: str, why: str) -> None:
        """The attempts to come do without a node."""
        self._write("excluded", node=node, why=why)

    def failed(self, error: str, *, rank: int | None, host: str = "") -> None:
        """A rank raised, was killed, or hangs; None where it is not known which. In order of time the first counts.

        What cannot be written down is said on stderr: the disk may be full, and that may be the very reason.
        """
        try:
            self._write("failed", rank=rank, host=host or socket.gethostname(), error=error)
        except OSError as problem:
            print(f"{error}\n(not written down: {problem.strerror})", file=sys.stderr, flush=True)

    def ended(self, state: str, **facts: Any) -> None:
        """It is over, in SLURM's words. ``facts``: job_id, exit_codes, step, why."""
        self._write("ended", state=state, **facts)

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Something worth knowing about the training."""
        self._write(kind, **facts)

    def _write(self, kind: str, **fields: Any) -> None:
        self.may_write()
        append_event(self.run, kind, attempt=self.number, **fields)


# A run's life, read back with types. Whatever in the file is odd is left out: a reader never fails over it.


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
class PendingSubmission:
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
    executor: str = ""


@dataclass(frozen=True)
class RankFailure:
    """A rank that raised, was killed, or hangs."""

    attempt: int | None
    rank: int | None
    host: str
    error: str
    time: float


@dataclass(frozen=True)
class RunHistory:
    """Everything that has happened to a run, in the order of time."""

    submissions: tuple[Submission, ...] = ()
    failures: tuple[RankFailure, ...] = ()
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
    cut_short: PendingSubmission | None = None
    """The newest submission, if nobody has said what came of it."""

    @property
    def submission(self) -> Submission | None:
        """The newest one."""
        return self.submissions[-1] if self.submissions else None


def history_of(run: RunDir) -> RunHistory:
    """What the run's events say."""
    jobs: list[list[dict[str, Any]]] = [[]]  # each begins with its `submitted`; the first: what came before any
    failures: list[RankFailure] = []
    attempts: dict[str, set[int]] = {"handed_back": set(), "requeued": set()}
    started: dict[str, Any] = {}
    finished, outcome, newest, refused_with = False, None, -1, 0
    submitting: dict[str, Any] | None = None
    for event in read_events(run, LIFE):
        kind, attempt = event["event"], event.get("attempt")
        if kind in ("submitting", "refused"):
            submitting = event if kind == "submitting" else None
        elif submitting is not None and kind == "unanswered":
            submitting |= {"time": event.get("time", 0.0), "unanswered": event.get("error", "")}
        elif submitting is not None and kind == "cancelled" and not event.get("job_id"):
            submitting["cancelled"] = True
        elif kind == "submitted":
            submitting = None
            same = all(event.get(key) == jobs[-1][0].get(key) for key in ("executor", "job_id")) if jobs[-1] else False
            if same and event.get("job_id") and ProcessId.from_fields(event) is None:
                continue  # the job itself, or who has adopted it, was faster than the command that queued it
            jobs.append([event])
            outcome = None
        elif attempt is not None and attempt < newest and kind in ("failed", "ended"):
            continue  # ranks that SLURM took for dead, after others have gone on
        else:
            jobs[-1].append(event)
            if kind == "started":
                started, outcome, newest = event, None, max(newest, attempt or 0)
            elif kind in attempts and attempt is not None:
                attempts[kind].add(attempt)
            elif kind == "failed":
                told = {key: event.get(key, "") for key in ("host", "error")}
                failures.append(RankFailure(attempt, event.get("rank"), time=event.get("time", 0.0), **told))
                outcome = "FAILED"
            elif kind == "ended":
                outcome = event.get("state") or "UNKNOWN"
                finished = finished or outcome == "COMPLETED"
                refused_with = next((code for code in event.get("exit_codes", ()) if code in (2, 3)), 0)
    return RunHistory(
        submissions=tuple(_submission(*job) for job in jobs if job and job[0]["event"] == "submitted"),
        failures=tuple(failures),
        refused_with=refused_with,
        started=started,
        finished=finished,
        handed_back=frozenset(attempts["handed_back"]),
        requeued=frozenset(attempts["requeued"]),
        outcome=outcome,
        cut_short=_cut_short(submitting) if submitting is not None else None,
    )


def _told_at_submission(event: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "executor": event.get("executor", ""),
        "time": float(event.get("time", 0.0)),
        "attempts_before": event.get("attempts_before") or 0,
        "process": ProcessId.from_fields(event),
    }


def _cut_short(event: Mapping[str, Any]) -> PendingSubmission:
    more = {"token": event.get("token", ""), "unanswered": event.get("unanswered", "")}
    return PendingSubmission(**_told_at_submission(event), **more, cancelled=event.get("cancelled") is True)


def _submission(event: Mapping[str, Any], *since: dict[str, Any]) -> Submission:
    last = [item for item in since if item["event"] in ("started", "ended")][-1:]  # started again: not ended yet
    ended = next((item.get("state", "") for item in last if item["event"] == "ended"), None)
    return Submission(
        **_told_at_submission(event),
        job_id=event.get("job_id", ""),
        cancelled=any(item["event"] == "cancelled" for item in since),
        ended=ended,
        finished=ended == "COMPLETED",
    )


def micro_batch_found(run: RunDir, world_size: int, device: str) -> int | None:
    """What `train.micro_batch_size=auto` has last found on as many ranks with such a device, if it has."""
    for event in reversed(read_events(run, "probed")):
        size = event.get("micro_batch_size")
        if (event.get("world_size"), event.get("device")) == (world_size, device) and isinstance(size, int):
            return size
    return None


# The one process that writes a run: its attempt, and the lease that says so.


@dataclass(frozen=True)
class Writer:
    """What rank 0 needs to keep a run's record."""

    attempt: Attempt
    check: Callable[[], None]
    """Raises StaleAttemptError when another process has taken over; to be called before every write. What the attempt
    writes down has asked it."""

    @property
    def run(self) -> RunDir:
        return self.attempt.run


@contextmanager
def writing(attempt: Attempt, *, job_id: str = "") -> Iterator[Writer]:
    """Be the run's writer while the body runs.

    Args:
        job_id: of SLURM: a later attempt of the same job takes over from an earlier one at once.

    Raises:
        UserError: somebody else writes it.
        StaleAttemptError: a newer attempt has begun to train already.
    """
    with lease_on(attempt.run, Holder.me(job_id=job_id, attempt=attempt.number)) as lease:
        newer = attempt.successor()
        if newer is not None:
            raise StaleAttemptError(
                f"Attempt {attempt.number} of {attempt.run.name} is not the newest: attempt {newer} has trained.",
                why="SLURM has started the job again, and these ranks come late.",
                fix="Nothing is to be done.",
            )
        yield Writer(replace(attempt, may_write=lease.check), lease.check)
