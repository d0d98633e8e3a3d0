"""A training on a real cluster, interrupted again and again: ``python -m tests.soak --interruptions 20 --seed 1``.

At random moments, start-up and saving included, one of: USR2 or TERM to the ranks, ``scontrol requeue``, a rank killed,
a scheduler that fails, slurmd or slurmctld killed, a node's power cut, its link unplugged. In the end the weights must
be those of a run that nobody has interrupted, no step's record missing or twice for a reader, and at most one
checkpoint interval done twice after each. What ends the run altogether (its budget of failures) is resumed, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainkit.records.events import read_events
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir

PROJECT = Path(__file__).parents[1]
EVERY_STEPS = 10
"""Updates between two checkpoints."""
STEPS_EACH = 30
"""Updates that a training has for each interruption; it waits in them as long as there are more to come."""
PACE = "0.4"
ALL = ("usr2", "term", "requeue", "kill", "silent", "slurmd", "slurmctld", "crash", "unplug")
NODES = ("n1", "n2", "n3", "n4")

SILENT = """#!/bin/bash
# A scheduler that fails in a job as often as the file says.
left=$(cat "$SOAK_FAILURES" 2>/dev/null || echo 0)
if [ -n "${SLURM_JOB_ID:-}" ] && [ "$left" -gt 0 ]; then
    echo $((left - 1)) > "$SOAK_FAILURES"
    echo "Unable to contact slurm controller (connect failure)" >&2; exit 1
fi
PATH=${PATH#*:} exec "${0##*/}" "$@"
"""


class Soak:
    """One training and what happens to it. ``env``: of a login node of a cluster that may be mistreated."""

    def __init__(
        self, home: Path, env: Mapping[str, str], rng: random.Random, kinds: Sequence[str], nodes: int
    ) -> None:
        self.home, self.rng, self.kinds, self.nodes = home, rng, kinds, nodes
        commands, self.silence = home / "soak-commands", home / "soak-failures"
        commands.mkdir()
        for name in ("squeue", "scontrol", "sacct"):
            (commands / name).write_text(SILENT)
            (commands / name).chmod(0o755)
        self.env = {**env, "PATH": f"{commands}:{env['PATH']}", "SOAK_FAILURES": str(self.silence)}
        shutil.copy(PROJECT / "tests/slurm/paced_model.py", home)
        self.run = RunDir(home / "runs" / "soak")
        self.resumed = 0
        self.done: list[str] = []

    def call(self, *command: str, check: bool = False) -> str:
        done = subprocess.run(
            command, cwd=self.home, env=self.env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, name: str, steps: int) -> None:
        self.call(
            sys.executable, "-m", "jobs.submit", "ddp", "--again", "--run-dir", f"runs/{name}",
            "--nodes", str(self.nodes), "--gpus-per-node", "0", "--time", "60",
            "model.name=paced_model:build", f"train.max_steps={steps}",
            "train.precision=fp32", f"checkpoint.every_steps={EVERY_STEPS}", "monitor.loggers=[jsonl]",
            "monitor.log_every=1", "launch.hang_seconds=20", check=True,
        )  # fmt: skip

    def job(self) -> str:
        return str([*read_events(self.run, "submitted")][-1]["job_id"])

    def state(self) -> str:
        return self.call("squeue", "-h", "-j", self.job(), "-o", "%T").strip()

    def finished(self) -> bool:
        return any(event.get("state") == "COMPLETED" for event in read_events(self.run, "ended"))

    def interrupt(self, kind: str) -> None:
        """One interruption of a job that runs."""
        job, node = self.job(), self.rng.choice(self._nodes() or ["n1"])
        devcluster = str(PROJECT / "slurm" / "devcluster")
        if kind == "silent":
            self.silence.write_text(str(self.rng.randint(1, 5)))
        if kind in ("usr2", "silent"):
            self.call("scancel", "--signal=USR2", job)
        elif kind == "term":
            self.call("scancel", "--signal=TERM", job)
        elif kind == "requeue":
            self.call("scontrol", "requeue", job)
        elif kind == "kill":
            listed = self.call(devcluster, "exec", node, "scontrol", "listpids", f"{job}.0").splitlines()
            ranks = [line.split()[0] for line in listed if line.split()[3:4] == ["0"]]
            for pid in ranks[:1]:
                self.call(devcluster, "exec", node, "kill", "-9", pid)
        elif kind == "slurmd":
            self.call(devcluster, "kill-slurmd", node)
            time.sleep(self.rng.uniform(1, 40))
            self.call(devcluster, "boot", node)
        elif kind == "slurmctld":
            pid_file = Path(self.env["DEVCLUSTER_DIR"], "run", "slurmctld.own.pid")
            self.call("kill", "-9", pid_file.read_text().strip())
            time.sleep(self.rng.uniform(1, 15))
            self.call(devcluster, "up", "--nodes", str(len(NODES)))
        elif kind == "crash":
            self.call(devcluster, "crash", node)
            time.sleep(self.rng.uniform(1, 45))
            self.call(devcluster, "boot", node)
        elif kind == "unplug":
            self.call(devcluster, "unplug", node)
            time.sleep(self.rng.uniform(1, 40))
            self.call(devcluster, "plug", node)
        self.done.append(kind)

    def _nodes(self) -> list[str]:
        nodes = self.call("squeue", "-h", "-j", self.job(), "-o", "%N").strip()
        return self.call("scontrol", "show", "hostnames", nodes).split() if nodes else []

    def go_on(self) -> None:
        """Wait until the job runs; resume a run that has ended altogether."""
        deadline = time.monotonic() + 300
        while not self.finished():
            state = self.state()
            if state == "RUNNING":
                return
            if not state or state in ("FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
                time.sleep(2)
                if not self.finished() and not self.state():
                    self.call(sys.executable, "-m", "jobs.resume", str(self.run.path))
                    self.resumed += 1
            if time.monotonic() > deadline:
                raise SystemExit(f"The job is {state} for 5 minutes:\n{self.call('squeue')}\n{self.call('sinfo')}")
            time.sleep(1)

    def soak(self, interruptions: int, say: Callable[[str], None]) -> list[str]:
        """All of it; what is wrong in the end."""
        steps = EVERY_STEPS + STEPS_EACH * interruptions
        self.submit("whole", steps)
        self.submit("soak", steps)
        (self.run.path / "pace").write_text(PACE)
        for number in range(interruptions):
            self.go_on()
            begun = len(self.run.attempts())
            if self.rng.random() < 0.7:  # else while it starts
                wait_until(lambda: self._has_started() or self.state() != "RUNNING", 90)
            time.sleep(self.rng.uniform(0, 5))
            if self.finished():
                break
            kind = self.rng.choice(self.kinds)
            at = max((int(event["step"]) for event in read_events(self.run, "saved")), default=0)
            say(f"{number + 1}: {kind} (attempt {begun - 1}, last save {at} of {steps})")
            self.interrupt(kind)
            self._wait_for_the_next_attempt(begun)
        (self.run.path / "pace").unlink()
        while not self.finished():
            self.go_on()
            time.sleep(1)
        return self.faults(steps)

    def _wait_for_the_next_attempt(self, begun: int) -> None:
        wait_until(lambda: len(self.run.attempts()) > begun or not self.state(), 20)

    def _has_started(self) -> bool:
        newest = len(self.run.attempts()) - 1
        return any(event.get("attempt") == newest for event in read_events(self.run, "started"))

    def faults(self, steps: int) -> list[str]:
        whole, found = RunDir(self.home / "runs" / "whole"), []
        if _weights(self.run) != _weights(whole):
            found.append("the weights are not those of an uninterrupted run")
        told = [(record["step"], record["loss"]) for record in read_metrics(self.run, "train")]
        if [step for step, _ in told] != list(range(1, steps + 1)):
            found.append(f"steps for a reader: {[step for step, _ in told]}")
        if told != [(record["step"], record["loss"]) for record in read_metrics(whole, "train")]:
            found.append("the losses are not those of an uninterrupted run")
        lines = (self.run.path / "metrics.jsonl").read_text().splitlines()
        raw, furthest = [json.loads(line) for line in lines if line[-1:] == "}"], 0
        for record in raw:
            if record.get("split") == "train":
                again = furthest - int(record["step"]) + 1
                if again > EVERY_STEPS:
                    found.append(f"{again} updates were done twice from step {record['step']} on")
                furthest = max(furthest, int(record["step"]))
        return found


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.3)


def _weights(run: RunDir) -> bytes:
    return (run.checkpoints / "latest" / "model.safetensors").read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interruptions", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=ALL, help=",".join(ALL))
    parser.add_argument("--net", default="10.199.199", help="of the cluster that is made for it")
    args = parser.parse_args()
    from tests.slurm.conftest import _clean_environment

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        home = Path(folder)
        for name in ("jobs", "trainkit", "configs"):
            (home / name).symlink_to(PROJECT / name)
        env = {**_clean_environment(), "DEVCLUSTER_DIR": f"{folder}-cluster", "DEVCLUSTER_NET": args.net}
        env |= {"SLURM_CONF": f"{folder}-cluster/etc/slurm.conf", "XDG_STATE_HOME": str(home / "state")}
        devcluster = str(PROJECT / "slurm" / "devcluster")
        up = [devcluster, "up", "--nodes", str(len(NODES)), "--until-exit", str(os.getpid())]
        subprocess.run(up, env=env, check=True)
        began = time.monotonic()
        try:
            soak = Soak(home, env, random.Random(args.seed), args.kinds, nodes=2)
            faults = soak.soak(args.interruptions, lambda words: print(words, flush=True))
        finally:
            subprocess.run([devcluster, "down", "--purge"], env=env, check=False)
        print(
            f"{len(soak.done)} interruptions in {time.monotonic() - began:.0f} s, {len(soak.run.attempts())} attempts, "
            f"resumed by hand {soak.resumed} times: " + ("; ".join(faults) or "all is as if nothing had happened")
        )
        if faults:
            shutil.copytree(soak.run.path, f"{folder}-failed", symlinks=True)
            print(f"The run is kept in {folder}-failed.")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
