"""``python -m tests.benchmarks.watch_cost``: what it costs to know where the time goes.

The marks of an update as `Updater` and the loop make them, many times over, and every ten updates what a record says of
them: CPU time. (What a training with them takes is in `loop_cost`, whose arm of the kit has them.)
"""

from __future__ import annotations

from tests.benchmarks.measuring import Figure, alone, cpu_seconds
from trainkit.training.recorder import Progress
from trainkit.training.timing import BACKWARD, COPY, FORWARD, OPTIMIZER, OTHER, Clock

ROUNDS, UPDATES = 15, 20_000
GOAL_US = 100
"""At most 1 % of a step of 10 ms."""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The line of the table."""
    marks()
    times = [cpu_seconds(marks) / UPDATES * 1e6 for _ in range(rounds)]
    what = "knowing where the time goes: CPU time of an update's marks and a tenth of a record"
    return [alone(times, what=what, shown="{:.1f} us".format, at_most=GOAL_US, note="1 % of a step of 10 ms")]


def marks() -> None:
    """Those of many updates."""
    clock, progress = Clock(), Progress()
    for update in range(UPDATES):
        clock.wait()
        for part in (COPY, FORWARD, BACKWARD, OTHER, OPTIMIZER, OTHER):
            clock.to(part)
        clock.step()
        if update % 10 == 9:
            clock.lap(progress).fields(ranks=1)


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "watch_cost"]))
