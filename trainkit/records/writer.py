"""The one process that writes a run: its attempt, and the lease that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trainkit.records.attempts import Attempt
from trainkit.records.lease import Holder, StaleAttemptError, lease_on
from trainkit.records.rundir import RunDir


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
