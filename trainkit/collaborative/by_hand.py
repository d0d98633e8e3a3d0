"""A peer that a person has started in a terminal: `status`, `logs` and `cancel` know its run like any submitted one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from trainkit.records import files
from trainkit.records.attempts import Attempt, submitted
from trainkit.records.history import life_of
from trainkit.records.process_id import ProcessId
from trainkit.records.rundir import RunDir, as_open_as
from trainkit.records.writer import Writer, writing


class ByHand:
    """What is said goes to the terminal, and into the run's log once there is a run."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held
        self.attempt: Attempt | None = None

    def say(self, line: str) -> None:
        """Print at once, also into a pipe."""
        print(line, flush=True)
        if self.attempt is not None:
            # A full disk is told of on the terminal, and must not end what goes on in spite of it.
            with suppress(OSError), files.append(self.attempt.logs / "rank-0.out", self.attempt.run.path) as log:
                log.write(f"{line}\n".encode())

    def begin(self, run_dir: RunDir) -> Writer:
        """This process is the job of ``run_dir`` from now on, and writes it."""
        self._held.enter_context(as_open_as(run_dir.path))
        me = ProcessId.of(os.getpid())
        submitted(run_dir, "swarm", str(me.pid), me)
        self.attempt = Attempt.begin(run_dir)
        return self._held.enter_context(writing(self.attempt))


@contextmanager
def by_hand() -> Iterator[ByHand]:
    """Notes how the run ended, in SLURM's words."""
    with ExitStack() as held:
        peer, state = ByHand(held), "FAILED"
        try:
            yield peer
            came_to_its_end = peer.attempt is not None and life_of(peer.attempt.run).finished
            state = "COMPLETED" if came_to_its_end else "CANCELLED"
        except KeyboardInterrupt:
            state = "CANCELLED"
            raise
        finally:
            if peer.attempt is not None:
                peer.attempt.ended(state, job_id=str(os.getpid()))
