"""Arms that stay: processes that have their model on the device, and take turns there.

In processes of their own, because what makes an arm fast is a switch of the whole process (cuDNN's autotuner, TF32, the
allocator, the compiler): together in one they would all have those of whoever was last. All there at once, because a
GPU's clock falls when it gets warm: turns of some seconds fall on all arms alike, minutes one after the other do not.
While one has its turn, the others wait in a read, and the device has nothing of theirs to do.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.benchmarks.arms.turns import Job
from tests.benchmarks.measuring import take_turns
from tests.benchmarks.processes import PROJECT, environment

PATIENCE_SECONDS = 900.0
"""For whatever an arm says next: models are compiled before the first turn."""

Told = dict[str, Any]


class Resident:
    """An arm, ready for its turns."""

    def __init__(self, name: str, job: Job) -> None:
        self.name, self._job, self._log = name, job, Path(f"{job.out}.log")
        go, self._go = os.pipe()
        self._done, done = os.pipe()
        command = [sys.executable, "-m", f"tests.benchmarks.arms.{name}"]
        command += [json.dumps(asdict(replace(job, parent=os.getpid()))), str(go), str(done)]
        env = environment(self._log.parent, job.device) | ({"OMP_NUM_THREADS": "1"} if job.device == "cpu" else {})
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=env, cwd=PROJECT, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                pass_fds=(go, done),
            )  # fmt: skip
        os.close(go)
        os.close(done)
        self._end = os.pidfd_open(self._process.pid)

    def ready(self) -> None:
        """Wait until it is warm."""
        said = self._said()
        assert said == "ready", said

    def turn(self) -> float:
        """Seconds of one."""
        os.write(self._go, b".")
        return float(self._said())

    def report(self) -> Told:
        """What it says of its work in the end. Raises AssertionError if it has failed."""
        assert self._process.wait(timeout=PATIENCE_SECONDS) == 0, self._failed()
        return json.loads(Path(self._job.out).read_text())  # type: ignore[no-any-return]

    def close(self) -> None:
        """End it, if it is still there."""
        self._process.kill()
        self._process.wait()
        for descriptor in (self._go, self._done, self._end):
            os.close(descriptor)

    def _said(self) -> str:
        """A line. Whether it has ended, its process tells: those it has started hold the pipe open."""
        line, deadline = b"", time.monotonic() + PATIENCE_SECONDS
        while not line.endswith(b"\n"):
            ready = select.select([self._done, self._end], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert self._done in ready, self._failed()
            said = os.read(self._done, 100)
            if not said:  # it has closed its end: it is about to end
                self._process.wait(timeout=PATIENCE_SECONDS)
            assert said, self._failed()
            line += said
        return line.decode().strip()

    def _failed(self) -> str:
        state = "is silent" if self._process.poll() is None else "has failed"
        return f"{self.name} {state}:\n{self._log.read_text(errors='replace')[-3000:]}"


@contextmanager
def resident(jobs: Mapping[str, Job]) -> Iterator[dict[str, Resident]]:
    """Arms by the names of their files; they are gone afterwards."""
    with ExitStack() as held:
        arms = {}
        for name, job in jobs.items():
            arms[name] = Resident(name, job)
            held.callback(arms[name].close)
        yield arms


def raced(jobs: Mapping[str, Job], rounds: int, check: Callable[[dict[str, Told]], object]) -> dict[str, list[float]]:
    """Seconds of the turns of all arms, as `take_turns` has them.

    Args:
        jobs: of each arm, the first of which is the one to compare with and gets twice as many turns; how many that are
            is put into them.
        check: gets what the arms say of their work, before anybody gets to know a time; raises AssertionError.
    """
    first = next(iter(jobs))
    jobs = {name: replace(job, turns=rounds * (2 if name == first else 1)) for name, job in jobs.items()}
    with resident(jobs) as arms:
        for arm in arms.values():
            arm.ready()
        measured = take_turns({name: arm.turn for name, arm in arms.items()}, rounds)
        check({name: arm.report() for name, arm in arms.items()})
    return measured


def assert_same_losses(told: Mapping[str, Told], tolerance: float) -> None:
    """The first updates of all arms have the same losses, relatively; of some arms only the means are known."""
    (_, theirs), *others = told.items()
    for name, ours in others:
        steps = [0, *ours["steps"]]
        means = [sum(theirs["losses"][a:b]) / (b - a) for a, b in pairwise(steps)]
        pairs = [pair for pair in zip(ours["losses"], means, ours["steps"], strict=True) if pair[2] <= FIRST]
        assert len({round(loss, 4) for loss, _, _ in pairs}) > 1, f"of {name} too few losses are known: {pairs}"
        worst = max(abs(own - mean) / mean for own, mean, _ in pairs)
        assert worst <= tolerance, f"the losses of {name} differ by {worst:.1e}: {pairs}"


FIRST = 40
"""So many updates are looked at; later ones differ as roundings do."""


def assert_same_pixels(told: Mapping[str, Told], tolerance: float) -> None:
    """What the models of all arms saw had the same mean and deviation, up to the chance in which parts were cut out."""
    (_, theirs), *others = told.items()
    for name, ours in others:
        worst = max(abs(one - other) for one, other in zip(ours["pixels"], theirs["pixels"], strict=True))
        assert worst <= tolerance, f"{name} gives other pixels: {ours['pixels']}, not {theirs['pixels']}"
