"""A peer that a person has started in a terminal: `status`, `logs` and `cancel` know its run like any submitted one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from trainkit.records.events import append_event
from trainkit.records.process_id import ProcessId
from trainkit.records.rundir import RunDir


class ByHand:
    """What is said goes to the terminal, and into the run's log once there is a run."""

    def __init__(self) -> None:
        self.run_dir: RunDir | None = None

    def say(self, line: str) -> None:
        """Print at once, also into a pipe."""
        print(line, flush=True)
        if self.run_dir is not None:
            with (self.run_dir.attempt_logs(0) / "rank-0.out").open("a", encoding="utf-8") as log:
                log.write(f"{line}\n")

    def begin(self, run_dir: RunDir) -> RunDir:
        """This process is the job of ``run_dir`` from now on."""
        me = ProcessId.of(os.getpid())
        who = {"host": me.host, "pid": me.pid, "process_started": me.started}
        append_event(run_dir, "submitted", executor="swarm", job_id=str(me.pid), attempts_before=0, **who)
        run_dir.attempt_logs(0).mkdir(parents=True)
        self.run_dir = run_dir
        return run_dir


@contextmanager
def by_hand() -> Iterator[ByHand]:
    """Notes how the run ended, in SLURM's words."""
    peer, state = ByHand(), "FAILED"
    try:
        yield peer
        state = "COMPLETED"
    except KeyboardInterrupt:
        state = "CANCELLED"
        raise
    finally:
        if peer.run_dir is not None:
            append_event(peer.run_dir, "ended", state=state, job_id=str(os.getpid()), attempt=0)
