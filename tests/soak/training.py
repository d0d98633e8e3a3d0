"""The training that is interrupted, beside one that is not."""

import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tests.soak import checks
from tests.soak.cluster import PROJECT, Cluster
from tests.soak.strikes import LIMIT_MINUTES, Strike, Striker, bag, half_written
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

STEPS_EACH = 30
"""Updates that a training has for each interruption: more than it makes between two, or it would be over too early."""
PACE = "0.4"
"""Seconds that an update waits while there are interruptions to come."""
PATIENCE_SECONDS = 300


class Soak:
    """One training and what happens to it. ``nodes``: of its ranks, one each; ``spare``: of its job, beside them."""

    def __init__(self, cluster: Cluster, rng: random.Random, kinds: Sequence[str], nodes: int, spare: int = 0) -> None:
        self._rng, self._nodes, self._spare = rng, nodes, spare
        self._striker = Striker(cluster, rng)
        self.cluster = self._striker.cluster
        self._bag, self._next = bag(rng, kinds), list[Strike]()
        shutil.copy(PROJECT / "tests/slurm/own_models.py", cluster.home)
        self.run, self.whole = (RunDir(cluster.home / "runs" / name) for name in ("soak", "whole"))
        self.done: list[Strike] = []
        self.resumed: list[str] = []
        """Why the run was over, each time that it had to be resumed."""
        self.released = 0
        """How often SLURM has held the job, because a controller that was killed had started it twice."""
        self.saves_hit = 0
        """Interruptions that have left half a checkpoint."""
        self.faults: list[str] = []

    def soak(self, interruptions: int, say: Callable[[str], None]) -> list[str]:
        """All of it; what is wrong in the end."""
        steps = checks.EVERY_STEPS + STEPS_EACH * interruptions
        self._submit("whole", steps)
        wait_until(self.whole.summary.exists, PATIENCE_SECONDS + steps)
        self._submit("soak", steps)
        self.run.path.joinpath("pace").write_text(PACE)
        while len(self.done) < interruptions:
            self._go_on()
            if self._is_finished():
                self.faults.append(f"the training was over after {len(self.done)} interruptions")
                break
            strike = self._draw()
            began = time.monotonic()
            words = self._interrupt(strike)
            self.done.append(strike)
            say(f"{len(self.done)}: {strike} ({words}, {time.monotonic() - began:.0f} s)")
            found = [f"after {strike}: {fault}" for fault in self._faults_now()]
            self.faults += found
            for fault in found:
                say(fault)
        self.run.path.joinpath("pace").unlink()
        while not self._is_finished():
            self._go_on()
            time.sleep(1)
        wait_until(lambda: not self._state(), PATIENCE_SECONDS)
        self.faults += checks.faults(self.run, self.whole, steps)
        self.faults += checks.left_behind(self.run, self.cluster)
        if (state := self._state_in_accounting()) != "COMPLETED":
            self.faults.append(f"SLURM says that the last job is {state}")
        return self.faults

    def summary(self) -> str:
        """What it was, in some lines."""
        lines = [f"{self.saves_hit} have left half a checkpoint; {len(self.run.attempts())} attempts"]
        lines += [f"released by hand {self.released} times"] if self.released else []
        lines += [f"resumed by hand {len(self.resumed)} times:"] if self.resumed else []
        return "\n".join(lines + [f"  {number} x {why}" for why, number in Counter(self.resumed).most_common()])

    def _submit(self, name: str, steps: int) -> None:
        self.cluster.call(
            sys.executable, "-m", "jobs.submit", "ddp", "--again", "--run-dir", f"runs/{name}",
            "--nodes", str(self._nodes), "--spare-nodes", str(self._spare), "--gpus-per-node", "0",
            "--time", str(LIMIT_MINUTES),
            "model.name=own_models:paced", f"train.max_steps={steps}",
            "train.precision=fp32", f"checkpoint.every_steps={checks.EVERY_STEPS}", "monitor.loggers=[jsonl]",
            "monitor.log_every=1", "launch.hang_seconds=20", check=True,
        )  # fmt: skip

    def _draw(self) -> Strike:
        """The next one that is possible now: an attempt that trains does not start up any more."""
        possible = [strike for strike in self._next if strike.moment != "start-up" or not self._has_started()]
        while not possible:
            self._next.append(next(self._bag))
            possible = [strike for strike in self._next[-1:] if strike.moment != "start-up" or not self._has_started()]
        self._next.remove(possible[0])
        return possible[0]

    def _interrupt(self, strike: Strike) -> str:
        """Wait for its moment, do it, and wait for what becomes of it."""
        job = self._job()
        if strike.moment == "start-up":
            fire = self._striker.aim(strike, job)
            pause = time.monotonic() + self._rng.uniform(0, 8)
            wait_until(lambda: self._has_started() or time.monotonic() > pause, 10)
        else:
            wait_until(lambda: self._has_started() or self._state() != "RUNNING", 120)
            fire = self._striker.aim(strike, job)
            if strike.moment == "saving":
                self._wait_for_a_save()
                time.sleep(self._rng.uniform(0, 0.2))
            else:
                time.sleep(self._rng.uniform(0, 6))
        left = half_written(self.run.checkpoints)
        saved, newest = self._furthest(), len(self.run.attempts()) - 1
        fire()
        begun = len(self.run.attempts())
        may_outlive = strike.kind != "limit"  # which SLURM looks at every 30 s
        wait_until(
            lambda: len(self.run.attempts()) > begun or not self._state() or (may_outlive and self._goes_on(saved)), 75
        )
        self.saves_hit += strike.moment == "saving" and bool(left & half_written(self.run.checkpoints))
        if strike.kind == "limit":
            self._striker.restore(job)
        return f"attempt {newest}, saved {saved}"

    def _wait_for_a_save(self) -> None:
        before, deadline = half_written(self.run.checkpoints), time.monotonic() + 30
        while not half_written(self.run.checkpoints) - before and time.monotonic() < deadline:
            time.sleep(0.001)

    def _go_on(self) -> None:
        """Wait until the job runs; resume a run that has ended altogether."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_finished():
            state = self._state()
            if state == "RUNNING":
                return
            if state == "PENDING" and "held" in self._reason():
                self._release()
            if not state:
                time.sleep(2)
                if not self._is_finished() and not self._state():
                    self._resume()
            if time.monotonic() > deadline:
                queue = self.cluster.call("squeue") + self.cluster.call("sinfo")
                raise SystemExit(f"The job is {state} for {PATIENCE_SECONDS} s:\n{queue}")
            time.sleep(0.5)

    def _release(self) -> None:
        """What `jobs.why` tells the user to do, once an administrator has looked at the node."""
        said = self.cluster.call(sys.executable, "-m", "jobs.why", str(self.run.path))
        if f"scontrol release {self._job()}" not in said:
            self.faults.append(f"the job is held, and `jobs.why` does not know how to go on: {said}")
        self.cluster.call("scontrol", "update", f"nodename={','.join(self.cluster.nodes)}", "state=resume")
        self.cluster.call("scontrol", "release", self._job())
        self.released += 1

    def _resume(self) -> None:
        ended = [event for event in read_events(self.run, "ended") if event.get("job_id") == self._job()]
        why = str(ended[-1].get("why") or ended[-1].get("state")) if ended else "no ending"
        last = self.done[-1].kind if self.done else "nothing"
        self.resumed.append(why if why.endswith(checks.BUDGETS) else f"{why}, {self._state_in_accounting()}, {last}")
        if last != "batch" and not why.endswith(checks.BUDGETS):
            self.faults.append(f"the run was over without a reason: {self.resumed[-1]}")
        self.cluster.call(sys.executable, "-m", "jobs.resume", str(self.run.path), check=True)

    def _faults_now(self) -> Iterator[str]:
        yield from checks.broken_checkpoints(self.run)
        yield from checks.gaps(self.run)
        newest = max((event["attempt"] for event in read_events(self.run, "started")), default=0)
        for process in self.cluster.processes():
            attempt = process.env.get("TRAINKIT_ATTEMPT", "")
            is_ours = process.env.get("TRAINKIT_RUN_DIR") == str(self.run.path) and attempt.isdecimal()
            if is_ours and int(attempt) < newest - 1:
                yield f"attempt {attempt} lives on beside {newest}: {process.command[:80]}"

    def _job(self) -> str:
        return str([*read_events(self.run, "submitted")][-1]["job_id"])

    def _state(self) -> str:
        """Of a job that has not ended; empty if it has."""
        return self.cluster.ask("squeue", "-h", "-j", self._job(), "-t", "PD,R,CG,S,CF,RQ,RH,SE", "-o", "%T")

    def _reason(self) -> str:
        return self.cluster.ask("squeue", "-h", "-j", self._job(), "-o", "%r")

    def _state_in_accounting(self) -> str:
        rows = self.cluster.ask("sacct", "-X", "-n", "-P", "-j", self._job(), "-o", "State").splitlines()
        return rows[-1].split()[0] if rows else "unknown to it"  # one that has lost a node has a row for each size

    def _furthest(self) -> int:
        return max((int(event["step"]) for event in read_events(self.run, "saved")), default=0)

    def _goes_on(self, saved: int) -> bool:
        """The attempt has outlived it."""
        over = {event.get("attempt") for event in read_events(self.run, ("handed_back", "failed"))}
        return self._furthest() > saved and len(self.run.attempts()) - 1 not in over

    def _is_finished(self) -> bool:
        return any(event.get("state") == "COMPLETED" for event in read_events(self.run, "ended"))

    def _has_started(self) -> bool:
        """Whether ranks of the present job have met: those of a job before it may outlive its script."""
        newest, before = len(self.run.attempts()) - 1, read_events(self.run, "submitted")[-1]["attempts_before"]
        return newest >= before and any(event["attempt"] == newest for event in read_events(self.run, "started"))


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    """Until it holds or the time is over, in seconds."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.3)
