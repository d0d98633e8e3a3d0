"""Stop requests: a signal sets a flag, the ranks agree, and the loop leaves at the same step everywhere.

The handlers must be in place before torch is imported: until then the signal of a time limit kills the process. So
this module imports nothing heavy. Nothing is done in the handler itself: a collective there would deadlock, because the
ranks are at different lines when the signal arrives.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from trainkit.ranks.env import RankEnv
from trainkit.records.attempts import Attempt

# USR2: the time limit is near (`--signal=USR2@90`). TERM: preemption, `scontrol requeue`, a machine that shuts down.
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


@dataclass
class StopFlag:
    """Set once, by a signal; read by the loop."""

    requested: bool = False
    signals: list[str] = field(default_factory=list)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.signals.append(signal.Signals(number).name)


@contextmanager
def stop_on_signal(*, leaves_process: bool = True) -> Iterator[StopFlag]:
    """Turn USR2 and TERM into a flag while the body runs.

    Args:
        leaves_process: the process ends after the body. The signals are then ignored instead of restored: a task that
            has saved and is on its way out must not be killed by the second signal of a preemption.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may install handlers
        yield flag
        return
    before: dict[signal.Signals, Any] = {number: signal.signal(number, flag._handle) for number in SIGNALS}
    # A launcher may have blocked them until now; what is pending is delivered here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield flag
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if leaves_process else before[number])


def hand_back(attempt: Attempt | None, env: RankEnv, signals: Sequence[str], *, step: int | None) -> None:
    """Say that this attempt ended on request and is saved: the first rank of each node, to whoever looks after it.

    ``attempt``: as this node knows it; None where nobody has begun one here.
    """
    if env.local_rank == 0 and attempt is not None:
        attempt.handed_back(node_rank=env.node_rank, step=step, signals=sorted(set(signals)))
