"""``events.jsonl``: what happened to a run, one line each.

Events are history, and never what a job does now. This module alone writes them; `trainkit.run.history` says what they
come to. A job is submitted for a run, makes attempts, and each attempt ends. The kinds, in the order of a life:

    submitting    a job is about to be queued                    by the command that does so
    unanswered    whether it was, sbatch has not said            by the command that asked for it
    waits         the queue takes no more jobs: another job is   by the command that was to queue one
                  to queue it later
    submitted     a job was queued or started for the run        by the command that did so, or who has found the job
    refused       it was not queued                              by the command that asked for it
    started       all ranks have met and begin to train          by rank 0
    saved         a checkpoint is on disk                        by rank 0
    handed_back   told to stop, saved, wants to be continued     by the first rank of each node
    requeued      the job was put back into the queue, or its    by whoever looks after the ranks
                  ranks start again in place
    excluded      the attempts to come do without a node         by whoever looks after the ranks
    failed        a rank raised, was killed, or hangs            by that rank, or by whoever looks after it
    cancelled     somebody asked for its end                     by `cancel`
    prolonged     it is to train longer than it was to           by `resume`
    ended         an attempt is over, in SLURM's words           by rank 0 (COMPLETED: nothing is left to train), or
                                                                 by whoever looks after the ranks

    unpacked      the run was brought here in an archive: its    by `unpack`
                  jobs were another machine's

A `Remark` is about the training itself.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainkit.common import fileio, jsonl, terminal
from trainkit.run import user_lists
from trainkit.run.folder import CLAIM, RunDir, make_private
from trainkit.run.run_lease import Holder, ProcessId, StaleAttemptError, lease_on, read_lease, written_into

_LONGEST = 20_000
"""Characters of one text: whatever went wrong, the record of a run stays one that can be read."""


# Lines of the file


def append_event(run_dir: RunDir, kind: str, **fields: Any) -> None:
    """Write one event with the present time (seconds since 1970)."""
    short = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in fields.items()}
    jsonl.append_jsonl(run_dir.events, {"time": round(time.time(), 3), "event": kind, **short})


LIFE = (
    "submitting", "unanswered", "refused", "waits", "submitted", "started", "handed_back", "requeued", "failed",
    "cancelled", "prolonged", "pruned", "ended", "unpacked",
)  # fmt: skip
"""The kinds that say what became of jobs and attempts; a long run has few of them among many others."""


def read_events(run_dir: RunDir, kind: str | tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    """Events in the order they happened, of one kind, of some or of all.

    An attempt has started once, though a script and its call of `trainkit.rank` have both written so, and its loop may
    have said how long it is.
    """
    kinds = (kind,) if isinstance(kind, str) else kind or ()
    found: list[dict[str, Any]] = []
    starts: dict[int, int] = {}
    for raw in jsonl.read_jsonl(run_dir.events, [f'"{name}"'.encode() for name in kinds]):
        event = typed_event(raw)
        if event is None or (kinds and event["event"] not in kinds):
            continue
        if event["event"] == "started":
            attempt = event.get("attempt")
            if attempt in starts:
                place = starts[attempt]
                found[place] = {**found[place], **event}
                continue
            if attempt is not None:
                starts[attempt] = len(found)
        found.append(event)
    return found


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
        if key == "job_id" and jsonl.is_whole(value):
            value = str(value)
        elif key in _TEXTS and isinstance(value, str):
            value = value.strip().partition("\n")[0]  # an error's first line says what it is
        if _FITS.get(key, lambda value: value is None or jsonl.plain(value) is not None)(value):
            event[terminal.one_line(key)] = jsonl.plain(value)
    return event


_TEXTS = ("event", "executor", "host", "state", "error", "device", "precision", "process_started", "token")
_COUNTS = (
    "attempt", "attempts_before", "rank", "node_rank", "step", "total_steps", "steps_per_epoch", "world_size", "params",
    "pid",
)  # fmt: skip
_FITS: dict[str, Callable[[Any], bool]] = {
    "time": jsonl.is_time,
    # It becomes an argument of scancel: `--me` is none.
    "job_id": lambda value: isinstance(value, str) and re.fullmatch(r"\w[\w.+-]{0,63}", value) is not None,
    **dict.fromkeys(_COUNTS, lambda value: value is None or jsonl.is_whole(value)),
    **dict.fromkeys(_TEXTS, lambda value: isinstance(value, str)),
    **dict.fromkeys(("hosts", "signals", "overrides"), lambda value: _is_list_of(str, value)),
    "exit_codes": lambda value: _is_list_of(int, value),
}


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and {kind}.issuperset(map(type, value))


# What becomes of a run, as it is written down


Remark = Literal[
    "starting", "probed", "skipped", "nonfinite", "rolled_back", "stopped_early", "pruned", "broken_image",
    "data_waits", "data_waited", "gpu_idle",
    "straggler",
    "peer_joined", "peer_left", "link", "average_refused", "given_back",
    "swarm_lost", "swarm_back", "save_failed", "save_recovered",
    "peer_dropped", "peer_left_out", "peer_clipped", "peer_banned", "peer_audited",
    "uploaded", "upload_failed", "upload_recovered", "not_uploaded",
]  # fmt: skip

RUN_DIR = "TRAINKIT_RUN_DIR"
NUMBER = "TRAINKIT_ATTEMPT"
"""Environment variables by which whoever starts ranks tells them which attempt they are."""


def submitting(run: RunDir, executor: str, token: str, *, feeder: str = "") -> None:
    """This process is about to queue a job for the run: should nobody say which, it can be looked for.

    Args:
        token: of this submission and no other; in the path of the script that sbatch is given.
        feeder: the job that the run has waited for, see `waits`.
    """
    facts: dict[str, Any] = {"executor": executor, "attempts_before": len(run.attempts()), "token": token}
    if feeder:
        facts["job_id"] = feeder
    append_event(run, "submitting", **facts, **ProcessId.of(os.getpid()).fields())


def waits(run: RunDir, executor: str, feeder: str, why: str) -> None:
    """The queue takes no more jobs now: another job, the feeder, queues one for the run when there is room."""
    append_event(run, "waits", executor=executor, job_id=feeder, attempts_before=len(run.attempts()), error=why)
    user_lists.note_job(run.path, executor, feeder, "")


def unanswered(run: RunDir, why: str) -> None:
    """Record that nobody can tell if the job was queued: sbatch has failed, and it may be all the same."""
    append_event(run, "unanswered", error=why)


def refused(run: RunDir, why: str, *, full: bool = False) -> None:
    """The job that was to be queued has been refused, so there is none to look for; ``full``: for now, it may wait."""
    append_event(run, "refused", error=why, **({"full": True} if full else {}))


def submitted(
    run: RunDir, executor: str, job_id: str, process: ProcessId | None = None, *,
    attempts_before: int | None = None, continues: str = "", adopted: bool = False,
) -> None:  # fmt: skip
    """A job was queued, or started here.

    Args:
        process: looks after the ranks, where no scheduler does.
        attempts_before: how many attempts there were; None: as many as there are now.
        continues: job id of the link before it, in a chain of jobs that nobody but the first has asked for.
        adopted: whoever queued it did not come to write this, and the job was found later.
    """
    if attempts_before is None:
        attempts_before = len(run.attempts())
    facts: dict[str, Any] = {"executor": executor, "job_id": job_id, "attempts_before": attempts_before}
    if continues:
        facts["continues"] = continues
    if adopted:
        facts["adopted"] = True
    if process is not None:
        facts |= process.fields()
    append_event(run, "submitted", **facts)
    user_lists.note_job(run.path, executor, job_id, process.word() if process else "")


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
    may_write: Callable[[], None] = field(default=lambda: None, compare=False)
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
            with written_into(run), suppress(FileExistsError):
                make_private(run.path, exist_ok=True)  # a template has no Python before this
                fileio.make_folder(claim.parent, run.path)
                fileio.create(claim, run.path).close()
                return cls(run, number)
            number += 1

    def start_again(self, job_id: str, *, node_rank: int = 0, **facts: Any) -> Attempt:
        """Begin the next attempt in the same job: its ranks start again in place.

        ``facts``: spare_nodes, that are left.

        Raises:
            FileExistsError: this node has begun it already, or somebody else has.
            OSError: its log folder cannot be written.
        """
        after = replace(self, number=self.number + 1)
        claim = CLAIM.at(after.logs, node_rank)
        fileio.make_folder(after.logs, self.run.path)
        fileio.create(claim, self.run.path).close()
        if self.newest_in_place().number == self.number:
            self._write("requeued", job_id=job_id, in_place=True, **facts)
        return after

    def newest_in_place(self) -> Attempt:
        """The attempt that this one's ranks are by now, by starting again in place; itself if they have not."""
        number = self.number
        for event in read_events(self.run, "requeued"):
            if event.get("in_place") is True and event.get("attempt") == number:
                number += 1
        return replace(self, number=number)

    @classmethod
    def named_in(cls, env: Mapping[str, str]) -> Attempt | None:
        """The attempt that ``env`` says this process is part of; None for a process that nobody looks after."""
        path = env.get(RUN_DIR)
        number = env.get(NUMBER, "")
        if path and number.isdecimal():
            return cls(RunDir(Path(path).absolute()), int(number))
        return None

    def environment(self) -> dict[str, str]:
        """Return the variables that `named_in` reads."""
        return {RUN_DIR: str(self.run.path), NUMBER: str(self.number)}

    def successor(self) -> int | None:
        """A newer attempt that writes the run, or has: SLURM took the node for dead, and ranks or script of this one
        live on. None while this is the newest."""
        there = read_lease(self.run.lease)
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

    def handed_back(self, *, node_rank: int, step: int | None, signals: Sequence[str], **facts: Any) -> None:
        """Every rank of this node was told to stop, and all that they have done is saved. ``facts``: was_ended."""
        host = socket.gethostname()
        self._write("handed_back", node_rank=node_rank, step=step, signals=list(signals), host=host, **facts)

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
            terminal.warn(f"{error}\n(not written down: {problem.strerror})")

    def ended(self, state: str, **facts: Any) -> None:
        """It is over, in SLURM's words. ``facts``: job_id, exit_codes, step, why."""
        self._write("ended", state=state, **facts)

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Something worth knowing about the training."""
        self._write(kind, **facts)

    def _write(self, kind: str, **fields: Any) -> None:
        self.may_write()
        append_event(self.run, kind, attempt=self.number, **fields)


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
        newer = attempt.successor()
        if newer is not None:
            raise StaleAttemptError(
                f"Attempt {attempt.number} of {attempt.run.name} is not the newest: attempt {newer} has trained.",
                why="SLURM has started the job again, and these ranks are late.",
                fix="You need not do anything.",
            )
        yield replace(attempt, may_write=lease.check)
