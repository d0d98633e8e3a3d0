"""What can happen to a job, when, and what the scheduler says to it."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.soak.cluster import Cluster, Process

KINDS = (
    *("usr2", "term", "full", "requeue", "preempt", "limit"),
    *("kill", "keeper", "srun", "batch", "slurmd", "slurmctld", "crash", "unplug"),
)
MOMENTS = ("training", "saving", "start-up")
SCHEDULERS = ("answers", "fails", "loses answers")
OUTAGE_SECONDS = (1.0, 25.0)
"""How long something is gone: shorter and longer than SLURM's patience."""
LIMIT_MINUTES = 60

COMMAND = """#!/bin/bash
# A scheduler that fails in a job as often as the file says, or does what it is asked and loses the answer.
read -r left how 2>/dev/null <"$SOAK_FAILURES"
if [ -n "${SLURM_JOB_ID:-}" ] && [ "${left:-0}" -gt 0 ]; then
    echo "$((left - 1)) $how" >"$SOAK_FAILURES"
    [ "$how" = fails ] || (PATH=${PATH#*:} exec "${0##*/}" "$@") >/dev/null
    echo "Unable to contact slurm controller (connect failure)" >&2; exit 1
fi
PATH=${PATH#*:} exec "${0##*/}" "$@"
"""


@dataclass(frozen=True)
class Strike:
    """One interruption."""

    kind: str
    moment: str
    scheduler: str

    def __str__(self) -> str:
        return f"{self.kind} while {self.moment}" + f", the scheduler {self.scheduler}" * (self.scheduler != "answers")


def bag(rng: random.Random, kinds: Sequence[str]) -> Iterator[Strike]:
    """Without end: each kind comes before any comes again, and in three rounds at each moment, with each scheduler."""
    while True:
        orders = {kind: (rng.sample(MOMENTS, 3), rng.sample(SCHEDULERS, 3)) for kind in kinds}
        for number in range(3):
            for kind in rng.sample(kinds, len(kinds)):
                moments, schedulers = orders[kind]
                yield Strike(kind, moments[number], schedulers[number])


class Striker:
    """Does it to a job."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._rng = rng
        commands, self._failures = cluster.home / "soak-commands", cluster.home / "soak-failures"
        commands.mkdir()
        for name in ("squeue", "scontrol", "sacct", "sinfo", "sbatch"):
            (commands / name).write_text(COMMAND)
            (commands / name).chmod(0o755)
        env = {**cluster.env, "PATH": f"{commands}:{cluster.env['PATH']}", "SOAK_FAILURES": str(self._failures)}
        self.cluster = Cluster(cluster.home, env, cluster.up, cluster.nodes)

    def aim(self, strike: Strike, job: str) -> Callable[[], None]:
        """All that can be done before the moment; what is left is done at once by calling what this gives."""
        hit = self._aim(strike, job)
        failures = f"{self._rng.randint(1, 6)} {strike.scheduler.partition(' ')[0]}"

        def fire() -> None:
            self._failures.write_text("0 fails" if strike.scheduler == "answers" else failures)
            hit()

        return fire

    def _aim(self, strike: Strike, job: str) -> Callable[[], object]:
        call, cluster, kind = self.cluster.call, self.cluster, strike.kind
        chosen = (lambda found: found[0]) if strike.moment == "saving" else self._rng.choice  # the first rank saves
        if kind in ("usr2", "term"):
            return lambda: call("scancel", f"--signal={kind.upper()}", job)
        if kind == "full":  # the batch script and all that it has started as well
            return lambda: call("scancel", f"--signal={self._rng.choice(('USR2', 'TERM'))}", "--full", job)
        if kind == "requeue":
            return lambda: call("scontrol", "requeue", job)
        if kind == "preempt":
            return lambda: self._preempt(job)
        if kind == "limit":  # SLURM itself sends what --signal asks for
            return lambda: call("scontrol", "update", f"job={job}", f"TimeLimit={_minutes(call, job) + 1}")
        if kind in ("kill", "keeper", "srun", "batch"):
            is_victim = {
                "kill": Process.is_rank,
                "keeper": Process.is_keeper,
                "srun": Process.is_srun,
                "batch": Process.is_script,
            }[kind]
            before = self._victims(is_victim, job)
            return lambda: self._kill(chosen(before or self._wait_for_victims(is_victim, job) or [0]))
        if kind == "slurmctld":
            return lambda: self._out("slurmctld.own", lambda: call(*cluster.up))
        node = chosen(self._nodes(job) or cluster.nodes)
        if kind == "slurmd":
            return lambda: self._gone(lambda: cluster.devcluster("kill-slurmd", node), node)
        if kind == "crash":
            return lambda: self._out(f"node-{node}", lambda: cluster.devcluster("boot", node))
        assert kind == "unplug", kind
        return lambda: self._gone(lambda: cluster.devcluster("unplug", node), node, back="plug")

    def restore(self, job: str) -> None:
        """The limit that the job had."""
        self.cluster.call("scontrol", "update", f"job={job}", f"TimeLimit={LIMIT_MINUTES}")

    def _victims(self, is_victim: Callable[[Process, str], bool], job: str) -> list[int]:
        found = [process for process in self.cluster.processes() if is_victim(process, job)]
        return [process.pid for process in sorted(found, key=lambda item: int(item.env.get("SLURM_PROCID", 0)))]

    def _wait_for_victims(self, is_victim: Callable[[Process, str], bool], job: str) -> list[int]:
        deadline = time.monotonic() + 15
        while not (found := self._victims(is_victim, job)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGKILL)

    def _preempt(self, job: str) -> None:
        node = (self._nodes(job) or list(self.cluster.nodes))[0]
        words = ("-p", "high", "-w", node, "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 1")
        other = self.cluster.call("sbatch", "--parsable", *words).strip()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.cluster.call("squeue", "-h", "-j", other, "-t", "PD,R,CG"):
            time.sleep(0.5)
        self.cluster.call("scancel", other)

    def _out(self, name: str, back: Callable[[], object]) -> None:
        """Kill a daemon, or a whole node; it comes back."""
        self._kill(self.cluster.pid(name))
        self._gone(lambda: None, "", back=back)

    def _gone(self, begin: Callable[[], object], node: str, back: str | Callable[[], object] = "boot") -> None:
        begin()
        time.sleep(self._rng.uniform(*OUTAGE_SECONDS))
        back() if callable(back) else self.cluster.devcluster(back, node)

    def _nodes(self, job: str) -> list[str]:
        nodes = self.cluster.call("squeue", "-h", "-j", job, "-t", "R", "-o", "%N").strip()
        return self.cluster.call("scontrol", "show", "hostnames", nodes).split() if nodes else []


def _minutes(call: Callable[..., str], job: str) -> int:
    """For how many a job has run: SLURM writes 3:07 or 1:03:07."""
    *hours, minutes, _ = (call("squeue", "-h", "-j", job, "-o", "%M").strip() or "0:00").split(":")
    return int(minutes) + 60 * int(hours[0] if hours else 0)


def half_written(checkpoints: Path) -> set[tuple[str, int]]:
    """Checkpoints that are half there: being written at this moment, or left so by one that was killed."""
    with suppress(OSError), os.scandir(checkpoints) as entries:
        names = [entry for entry in entries if entry.name.startswith(".step-") and entry.name.endswith(".partial")]
        return {(entry.name, entry.inode()) for entry in names}
    return set()
