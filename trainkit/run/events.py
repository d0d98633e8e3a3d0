"""``events.jsonl``: what happened to a run, one line each; and the lease, by which one process writes a run.

Events are history, and never what a job does now. This module alone writes them, and reads them back with types. A job
is submitted for a run, makes attempts, and each attempt ends. The kinds, in the order of a life:

    submitting    a job is about to be queued                    by the command that does so
    unanswered    whether it was, sbatch has not said            by the command that asked for it
    submitted     a job was queued or started for the run        by the command that did so, or who has found the job
    refused       it was not queued                              by the command that asked for it
    started       all ranks have met and begin to train          by rank 0
    saved         a checkpoint is on disk                        by rank 0
    handed_back   told to stop, saved, wants to be continued     by the first rank of each node
    requeued      the job was put back into the queue            by whoever looks after the ranks
    excluded      the attempts to come do without a node         by whoever looks after the ranks
    failed        a rank raised, was killed, or hangs            by that rank, or by whoever looks after it
    cancelled     somebody asked for its end                     by `cancel`
    prolonged     it is to train longer than it was to           by `resume`
    ended         an attempt is over, in SLURM's words           by rank 0 (COMPLETED: nothing is left to train), or
                                                                 by whoever looks after the ranks

    unpacked      the run was brought here in an archive: its    by `unpack`
                  jobs were another machine's

A `Remark` is about the training itself.

``lease.json`` names the process that writes, and is renewed as long as it lives. The file is made anew, which succeeds
for one of several at once, and replaced by a rename; both are atomic on NFS too, where locks may not be. Ages are
differences of the file server's own time stamps, so the clocks of the machines do not matter. A holder on this machine
is dead when its process is gone; one elsewhere when it has not renewed for `EXPIRY_SECONDS`. A job that SLURM starts
again takes over from its own earlier attempt at once. A process that has lost the lease (stopped for a while, cut off,
thought dead) notices before its next write: `Lease.check`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainkit import fileio, terminal
from trainkit.errors import RunFailedError, UserError
from trainkit.run import folder
from trainkit.run.folder import CLAIM, RunDir, make_private

EXPIRY_SECONDS = 60.0
"""Time without renewal after which a holder on another machine is taken for dead."""
RENEW_SECONDS = 10.0
_MOMENT = 0.1
_LONGEST = 20_000
"""Characters of one text: whatever went wrong, the record of a run stays one that can be read."""


# Lines of the file


def append_event(run_dir: RunDir, kind: str, **fields: Any) -> None:
    """Write one event with the present time (seconds since 1970)."""
    short = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in fields.items()}
    fileio.append_jsonl(run_dir.events, {"time": round(time.time(), 3), "event": kind, **short})


LIFE = (
    "submitting", "unanswered", "refused", "submitted", "started", "handed_back", "requeued", "failed", "cancelled",
    "prolonged", "pruned", "ended", "unpacked",
)  # fmt: skip
"""The kinds that say what became of jobs and attempts; a long run has few of them among many others."""


def read_events(run_dir: RunDir, kind: str | tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    """Events in the order they happened, of one kind, of some or of all."""
    kinds = (kind,) if isinstance(kind, str) else kind
    records = fileio.read_jsonl(run_dir.events, [f'"{name}"'.encode() for name in kinds or ()])
    return [event for raw in records if (kinds is None or raw.get("event") in kinds) and (event := typed_event(raw))]


def attempts_that(run_dir: RunDir, kind: str) -> list[int]:
    """Numbers of the attempts that have an event of a kind."""
    return [event["attempt"] for event in read_events(run_dir, kind) if event.get("attempt") is not None]


def typed_event(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """An event as others may rely on it; None without its kind. Fields of another type than theirs are left out, and
    text is one line: it is shown on terminals."""
    if not isinstance(raw.get("event"), str):
        return None
    event: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "job_id" and fileio.is_whole(value):
            value = str(value)
        elif key in _TEXTS and isinstance(value, str):
            value = value.strip().partition("\n")[0]  # an error's first line says what it is
        if _FITS.get(key, lambda value: value is None or fileio.plain(value) is not None)(value):
            event[terminal.one_line(key)] = fileio.plain(value)
    return event


_TEXTS = ("event", "executor", "host", "state", "error", "device", "precision", "process_started", "token")
_COUNTS = (
    "attempt", "attempts_before", "rank", "node_rank", "step", "total_steps", "steps_per_epoch", "world_size", "params",
    "pid",
)  # fmt: skip
_FITS: dict[str, Callable[[Any], bool]] = {
    "time": fileio.is_time,
    # It becomes an argument of scancel: `--me` is none.
    "job_id": lambda value: isinstance(value, str) and re.fullmatch(r"\w[\w.+-]{0,63}", value) is not None,
    **dict.fromkeys(_COUNTS, lambda value: value is None or fileio.is_whole(value)),
    **dict.fromkeys(_TEXTS, lambda value: isinstance(value, str)),
    **dict.fromkeys(("hosts", "signals", "overrides"), lambda value: _is_list_of(str, value)),
    "exit_codes": lambda value: _is_list_of(int, value),
}


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


# What becomes of a run, as it is written down


Remark = Literal[
    "starting", "probed", "skipped", "nonfinite", "rolled_back", "stopped_early", "pruned", "broken_image",
    "data_waits", "data_waited",
    "straggler",
    "peer_joined", "peer_left", "link", "average_refused", "given_back",
    "swarm_lost", "swarm_back", "save_failed", "save_recovered",
    "peer_dropped", "peer_left_out", "peer_clipped", "peer_banned", "peer_audited",
    "uploaded", "upload_failed", "upload_recovered", "not_uploaded",
]  # fmt: skip

RUN_DIR, NUMBER = "TRAINKIT_RUN_DIR", "TRAINKIT_ATTEMPT"
"""Environment variables by which whoever starts ranks tells them which attempt they are."""


def _written_into(run: RunDir) -> AbstractContextManager[None]:
    """Raises UserError where the system refuses what the block writes."""
    fix = "Free some space, or check who may write there."
    return fileio.disk_errors_as(f"Cannot write into {run.path}.", fix=fix)


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
    more = process.fields() if process else {}
    more |= {key: value for key, value in (("continues", continues), ("adopted", adopted)) if value}
    before = len(run.attempts()) if attempts_before is None else attempts_before
    append_event(run, "submitted", executor=executor, job_id=job_id, attempts_before=before, **more)
    folder.note_job(run.path, executor, job_id, process.word() if process else "")


def job_of(env: Mapping[str, str]) -> str:
    """The SLURM job that a process with this environment belongs to, as `submitted` names it; empty if to none."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")


def cancelled(run: RunDir, job_id: str) -> None:
    """Somebody asked for the end of a job; without an id, of the one that a submission may still come to."""
    append_event(run, "cancelled", job_id=job_id)


def prolonged(run: RunDir, step: int, *, before: int, total_steps: int, how: str) -> None:
    """From update ``step`` on it is to train up to ``total_steps``, and not up to those ``before``: nothing that has
    ended it counts any more. ``how``: what becomes of its schedule."""
    append_event(run, "prolonged", step=step, total_steps_before=before, total_steps=total_steps, schedule=how)


def sampled(run: RunDir, by: str, overrides: Sequence[str]) -> None:
    """A run of a sweep has begun with these settings, and who has chosen them."""
    append_event(run, "sampled", by=by, overrides=list(overrides))


def chosen_point(run: RunDir) -> list[str]:
    """The settings that it has begun with, of a sweep with a sampler; empty before that."""
    return next((event["overrides"] for event in read_events(run, "sampled") if "overrides" in event), [])


def never_began(run: RunDir, job_id: str, state: str) -> None:
    """A job has ended without an attempt: cancelled while it waited for its turn, or broken before its start."""
    append_event(run, "ended", state=state, job_id=job_id)


def unpacked(run: RunDir) -> None:
    """The run has come from another machine, whose jobs no scheduler of this one can be asked about."""
    append_event(run, "unpacked")


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
        number = max(attempts_that(run, "ended"), default=-1) + 1
        while True:
            claim = CLAIM.at(run.attempt_logs(number), node_rank)
            with _written_into(run), suppress(FileExistsError):
                make_private(run.path, exist_ok=True)  # a template has no Python before this
                fileio.make_folder(claim.parent, run.path)
                fileio.create(claim, run.path).close()
                return cls(run, number)
            number += 1

    @classmethod
    def named_in(cls, env: Mapping[str, str]) -> Attempt | None:
        """The attempt that ``env`` says this process is part of; None for a process that nobody looks after."""
        path, number = env.get(RUN_DIR, ""), env.get(NUMBER, "")
        return cls(RunDir(Path(path).absolute()), int(number)) if path and number.isdecimal() else None

    def environment(self) -> dict[str, str]:
        """What `named_in` reads."""
        return {RUN_DIR: str(self.run.path), NUMBER: str(self.number)}

    def successor(self) -> int | None:
        """A newer attempt that writes the run, or has: SLURM took the node for dead, and ranks or script of this one
        live on. None while this is the newest."""
        there = _read(self.run.lease)
        newest = max([*attempts_that(self.run, "started"), (there and there.holder.attempt) or 0])
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


# What has become of a run, read back with types


@dataclass(frozen=True)
class Submission:
    """One job that was queued or started for a run, or was about to be.

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
    """What sbatch said instead of an answer."""


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
    """What the run's events say."""
    life, newest = RunHistory(), -1

    def amend(**changes: Any) -> None:
        if life.submissions:
            life.submissions[-1] = replace(life.submissions[-1], **changes)

    for event in read_events(run, LIFE):
        kind, attempt, cut = event["event"], event.get("attempt"), life.cut_short
        if kind in ("submitting", "refused"):
            life.cut_short = _submission(event) if kind == "submitting" else None
        elif kind == "unpacked":
            life.submissions, life.cut_short = [], None
        elif cut is not None and kind == "unanswered":
            life.cut_short = replace(cut, time=event.get("time", 0.0), unanswered=event.get("error", ""))
        elif cut is not None and kind == "cancelled" and not event.get("job_id"):
            life.cut_short = replace(cut, cancelled=True)
        elif kind == "submitted":
            life.cut_short, job, last = None, _submission(event), life.submission
            same = last is not None and (last.executor, last.job_id) == (job.executor, job.job_id)
            if same and job.job_id and job.process is None:
                continue  # the job itself, or who has adopted it, was faster than the command that queued it
            life.submissions.append(job)
            life.outcome = None
        elif attempt is not None and attempt < newest and kind in ("failed", "ended"):
            continue  # ranks that SLURM took for dead, after others have gone on
        elif kind == "cancelled":
            amend(cancelled=True)
        elif kind == "prolonged":
            life.finished, life.pruned, life.outcome = False, False, None
        elif kind == "pruned":
            life.pruned = True
        elif kind == "started":
            life.started, life.outcome, newest = event, None, max(newest, attempt or 0)
            amend(ended=None)
        elif kind in ("handed_back", "requeued") and attempt is not None:
            (life.handed_back if kind == "handed_back" else life.requeued).add(attempt)
        elif kind == "failed":
            host, error = event.get("host", ""), event.get("error", "")
            life.failures.append(RankFailure(attempt, event.get("rank"), host, error, event.get("time", 0.0)))
            life.outcome = "FAILED"
        elif kind == "ended":
            life.outcome = event.get("state") or "UNKNOWN"
            life.finished = life.finished or life.outcome == "COMPLETED"
            life.refused_with = next((code for code in event.get("exit_codes", ()) if code in (2, 3)), 0)
            amend(ended=event.get("state", ""))
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
    """What `train.micro_batch_size=auto` has last found on as many ranks with such a device, if it has."""
    for event in reversed(read_events(run, "probed")):
        size = event.get("micro_batch_size")
        if (event.get("world_size"), event.get("device")) == (world_size, device) and isinstance(size, int):
            return size
    return None


# Processes


@dataclass(frozen=True)
class ProcessId:
    """One process, on whatever machine, that cannot be mistaken for another one."""

    host: str
    pid: int
    started: str
    """When, as text that no other process of that number has."""
    space: str = ""
    """Where the number counts: a container, or a machine before and after a restart, may have the same host name."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """That of a process which runs here now."""
        return cls(socket.gethostname(), pid, _start_time(pid) or "", _space())

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ProcessId | None:
        """Read what `fields` has put into a record; None if it is not there or was written by somebody else."""
        host, pid = fields.get("host"), fields.get("pid")
        started, space = fields.get("process_started"), fields.get("process_space", "")
        if isinstance(host, str) and isinstance(started, str) and isinstance(space, str) and type(pid) is int:
            return cls(host, pid, started, space)
        return None

    def fields(self) -> dict[str, Any]:
        """Plain values for a record."""
        started = {"process_started": self.started, "process_space": self.space}
        return {"host": self.host, "pid": self.pid, **started}

    @classmethod
    def seen_from_here(cls, word: str) -> ProcessId | None:
        """That of a `word`; None if no such process is seen here, as from within a container or on another machine."""
        number, _, started = word.partition(":")
        seen = cls(socket.gethostname(), int(number) if number.isdigit() else 0, started, _space())
        return seen if seen.is_alive() else None

    def word(self) -> str:
        """The process for others on this machine, in one word."""
        return f"{self.pid}:{self.started}"

    def is_here(self) -> bool:
        """Whether it counts among the processes that this one can see."""
        return self.host == socket.gethostname() and self.space in ("", _space())

    def is_alive(self) -> bool:
        """Whether it runs still. Only meaningful where `is_here`."""
        return bool(self.started) and _start_time(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.is_here() and self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is held by SIGSTOP or a debugger."""
    return (_stat(pid) or [""])[0] in ("T", "t")


def _space() -> str:
    try:
        boot = fileio.read_text(Path("/proc/sys/kernel/random/boot_id"))[:8]
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """When a process started, as text that only it has; None if it does not run (a zombie does not)."""
    if (fields := _stat(pid)) is not None:
        return None if fields[0] in ("Z", "X") else fields[19]
    if Path("/proc/self/stat").exists():
        return None
    import psutil  # for machines without /proc

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def _stat(pid: int) -> list[str] | None:
    try:
        stat = fileio.read_text(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # the name before it may hold anything


# The lease


@dataclass(frozen=True)
class Holder:
    """The process that writes a run, and for which job and attempt."""

    process: ProcessId
    job_id: str = ""
    """Of SLURM; empty where there is none."""
    attempt: int | None = None
    """None for a command that only prepares the run."""

    @classmethod
    def me(cls, *, job_id: str = "", attempt: int | None = None) -> Holder:
        """This process."""
        return cls(ProcessId.of(os.getpid()), job_id, attempt)

    def __str__(self) -> str:
        job = f"job {self.job_id}, " if self.job_id else ""
        attempt = f", attempt {self.attempt}" if self.attempt is not None else ""
        return f"{job}process {self.process.pid} on {self.process.host}{attempt}"

    def precedes(self, other: Holder) -> bool:
        """Whether SLURM has started this one's job again as the other, whatever is left of it."""
        same_job = bool(self.job_id) and self.job_id == other.job_id
        return same_job and self.attempt is not None and other.attempt is not None and self.attempt < other.attempt


class StaleAttemptError(RunFailedError):
    """Another process writes the run by now: this one ends, and leaves the record to it."""


class Lease:
    """The right to write into a run folder, as long as `check` does not raise. Made by `lease_on`."""

    def __init__(self, run: RunDir, token: str) -> None:
        self._run, self._token = run, token

    def check(self) -> None:
        """Raise StaleAttemptError unless this is still the writer. Reads a small file: call it before every write."""
        if (there := _read(self._run.lease)) is None:
            time.sleep(_MOMENT)  # being replaced on a file system that is not quite atomic, or removed by hand
            there = _read(self._run.lease)
        if there is None or there.token != self._token:
            raise _stale(self._run, there.holder if there is not None else "somebody who has removed its lease.json")

    def _renew(self) -> None:
        if self._is_mine():
            os.utime(self._run.lease)

    def _is_mine(self) -> bool:
        there = _read(self._run.lease)
        return there is not None and there.token == self._token


@contextmanager
def lease_on(
    run: RunDir,
    holder: Holder,
    *,
    is_dead: Callable[[Holder], bool] = lambda other: False,
    patience: float = EXPIRY_SECONDS + RENEW_SECONDS,
    in_turn: bool = False,
) -> Iterator[Lease]:
    """Hold the lease on ``run`` while the body runs, renewed by a thread.

    Args:
        is_dead: what else is known of a holder, from its scheduler.
        patience: how long to wait for a holder elsewhere that may be dead: its lease must expire first. One that is
            seen to renew is alive, and refuses at once.
        in_turn: it is waited for as well, for each holds the lease for a moment.

    Raises:
        UserError: somebody else writes, and lives; or the folder cannot be written.
    """
    with _written_into(run):
        lease = _acquire(run, holder, is_dead, patience, in_turn)
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(RENEW_SECONDS):
            with suppress(OSError):  # a file server that does not answer now is asked again
                lease._renew()

    threading.Thread(target=renew, name="lease", daemon=True).start()
    try:
        yield lease
    finally:
        stop.set()
        with suppress(OSError):
            if lease._is_mine():
                run.lease.unlink(missing_ok=True)


def is_written(run: RunDir) -> bool:
    """Whether somebody holds the lease, or may: whoever wants to write finds out by `lease_on`."""
    if (there := _read(run.lease)) is None:
        return False
    process = there.holder.process
    return process.is_alive() if process.is_here() else time.time() - there.renewed < EXPIRY_SECONDS


def _acquire(run: RunDir, holder: Holder, is_dead: Callable[[Holder], bool], patience: float, in_turn: bool) -> Lease:
    token, deadline, first = uuid.uuid4().hex, time.monotonic() + patience, None
    content = {"token": token, "job_id": holder.job_id, "attempt": holder.attempt, **holder.process.fields()}
    mine = run.path / f".lease-{token}"
    try:
        while True:
            fileio.write(mine, json.dumps(content), run.path)
            there = _read(run.lease)
            if there is None:
                with suppress(FileExistsError), fileio.create(run.lease, run.path) as out:
                    out.write(fileio.read_bytes(mine))
                    return Lease(run, token)
                continue
            first, other = first or there, there.holder
            if holder.precedes(other):
                raise _stale(run, other)
            is_here = other.process.is_here()
            expired = mine.stat().st_mtime - there.renewed > EXPIRY_SECONDS
            is_over = other.precedes(holder) or (not other.process.is_alive() if is_here else expired)
            if is_over or is_dead(other):
                if _replace(mine, run, there.token):
                    return Lease(run, token)
                continue
            lives = is_here or there.renewed > first.renewed or there.token != first.token
            is_short = other.attempt is None and holder.attempt is not None  # the command that has started me
            if (lives and not (is_short or in_turn)) or time.monotonic() > deadline:
                raise UserError(
                    f"{run.name} is being written by {other}.",
                    why="Two writers on one run would write over each other.",
                    fix=f"Wait for it, or end it with `{terminal.command('cancel', run.path)}`.",
                )
            time.sleep(min(1.0, max(patience / 20, _MOMENT)))
    finally:
        mine.unlink(missing_ok=True)


def _stale(run: RunDir, who: object) -> StaleAttemptError:
    return StaleAttemptError(
        f"{run.name} has another writer now: {who}.",
        why="This process was taken for dead; what it has not saved is done again by the other.",
        fix=f"Nothing is to be done, unless both are yours: `{terminal.command('status', run.path)}`.",
    )


def _replace(mine: Path, run: RunDir, token: str) -> bool:
    """Put ``mine`` in the place of a dead holder's lease; False if somebody else does so."""
    right = run.path / f".lease-{token}.over"  # which only one can make: the right to replace that very lease
    try:
        fileio.create(right, run.path).close()
    except FileExistsError:
        with suppress(FileNotFoundError):  # left by one that died in the middle
            if mine.stat().st_mtime - right.stat().st_mtime > EXPIRY_SECONDS:
                right.unlink()
        time.sleep(_MOMENT)
        return False
    try:
        there = _read(run.lease)
        if there is None or there.token != token:
            return False
        os.replace(mine, run.lease)
        return True
    finally:
        right.unlink(missing_ok=True)


class _Content(NamedTuple):
    """A lease as it was read."""

    token: str
    holder: Holder
    renewed: float
    """Time stamp of the file server."""


def _read(file: Path) -> _Content | None:
    """What the lease says; None if there is none. One that cannot be read is nobody's, and expires like any other."""
    try:
        with fileio.open_regular(file) as content:  # opened, so that NFS asks its server anew
            renewed = os.fstat(content.fileno()).st_mtime
            fields = fileio.parse_object(content.read(10_000)) or {}
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno is not None:
            raise
        renewed, fields = file.stat().st_mtime, {}  # a FIFO in its place
    process = ProcessId.from_fields(fields) or ProcessId("an unknown machine", 0, "")
    attempt = fields.get("attempt")
    holder = Holder(process, str(fields.get("job_id") or ""), attempt if type(attempt) is int else None)
    return _Content(str(fields.get("token") or ""), holder, renewed)


# Rank 0: events under the lease


@contextmanager
def writing(attempt: Attempt, *, job_id: str = "") -> Iterator[Attempt]:
    """Be the run's writer while the body runs: what it writes asks `Attempt.may_write` first, as events do themselves.

    Args:
        job_id: of SLURM: a later attempt of the same job takes over from an earlier one at once.

    Raises:
        UserError: somebody else writes it.
        StaleAttemptError: a newer attempt has begun to train already.
    """
    with lease_on(attempt.run, Holder.me(job_id=job_id, attempt=attempt.number)) as lease:
        if (newer := attempt.successor()) is not None:
            raise StaleAttemptError(
                f"Attempt {attempt.number} of {attempt.run.name} is not the newest: attempt {newer} has trained.",
                why="SLURM has started the job again, and these ranks come late.",
                fix="Nothing is to be done.",
            )
        yield replace(attempt, may_write=lease.check)
