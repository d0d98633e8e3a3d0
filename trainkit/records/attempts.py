"""A run's life, as it is written down: jobs are submitted for it, each makes attempts, and each attempt has an ending.

Nothing else writes events. Kinds, in the order of a life:

    submitting    a job is about to be queued                    by the command that does so
    unanswered    whether it was, sbatch has not said            by the command that asked for it
    submitted     a job was queued or started for the run       by the command that did so, or who has found the job
    refused       it was not queued                              by the command that asked for it
    started       all ranks have met and begin to train         by rank 0
    saved         a checkpoint is on disk                        by rank 0
    handed_back   told to stop, saved, wants to be continued     by the first rank of each node
    requeued      the job was put back into the queue            by whoever looks after the ranks
    excluded      the attempts to come do without a node         by whoever looks after the ranks
    failed        a rank raised, was killed, or hangs            by that rank, or by whoever looks after it
    cancelled     somebody asked for its end                     by `cancel`
    ended         an attempt is over, in SLURM's words           by rank 0 (COMPLETED: nothing is left to train), or
                                                                 by whoever looks after the ranks

Beside them stand remarks on the training itself: skipped and nonfinite updates, ranks for which all others
wait, peers that come and go.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainkit.errors import UserError
from trainkit.records import files, index
from trainkit.records.events import append_event, read_events
from trainkit.records.lease import writing_attempt
from trainkit.records.process_id import ProcessId
from trainkit.records.rundir import RunDir, make_private

Remark = Literal[
    "probed", "skipped", "nonfinite", "rolled_back", "stopped_early", "broken_image", "straggler", "peer_joined",
    "peer_left", "link", "collapsed",
    "swarm_lost", "swarm_back", "save_failed", "save_recovered",
    "peer_dropped", "peer_left_out", "peer_clipped", "peer_banned",
    "uploaded", "upload_failed", "upload_recovered", "not_uploaded",
]  # fmt: skip

RUN_DIR, NUMBER = "TRAINKIT_RUN_DIR", "TRAINKIT_ATTEMPT"
"""Environment variables by which whoever starts ranks tells them which attempt they are."""


def submitting(run: RunDir, token: str) -> None:
    """This process is about to queue a job for the run: should nobody say which, it can be looked for.

    ``token``: of this submission and no other; in the path of the script that sbatch is given.
    """
    me = ProcessId.of(os.getpid())
    before = len(run.attempts())
    append_event(run, "submitting", executor="slurm", attempts_before=before, token=token, **me.fields())


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
    index.note_job(run.path, executor, job_id, process.word() if process is not None else "")


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
            claim = run.attempt_logs(number) / f"node-{node_rank}"
            try:
                make_private(run.path, exist_ok=True)  # a template has no Python before this
                files.make_folder(claim.parent, run.path)
                files.create(claim, run.path).close()
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
