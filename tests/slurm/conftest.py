"""A real SLURM for the tests here: `slurm/devcluster`, one for each worker, in a directory and network of its own."""

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from jobs import cli
from tests import light_experiment
from tests.debian import cannot_run
from tests.runs import wait_until
from trainkit.common.hosts import is_free

PROJECT = Path(__file__).parents[2]
DEVCLUSTER = PROJECT / "slurm" / "devcluster"
NODES = 4
CLUSTER_STATE = (("squeue",), ("sinfo", "-N", "-o", "%N %P %T %E"))
CLOSED = ("REQUEUED", "PREEMPTED", "RESIZING")
"""States of a job's earlier rows in the accounts; one that has lost a spare node begins a new row."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Submitted(NamedTuple):
    """A run that `jobs.submit` has queued."""

    job_id: str
    run: Path
    said: str


def job_in(said: str) -> str:
    """The job that a command says that it has submitted."""
    match = re.search(r"Submitted job (\d+)", said)
    assert match, said
    return match[1]


@dataclass(frozen=True)
class Cluster:
    """The cluster, as a user sees it from a login node; ``home`` is a folder with the project in it, like a clone."""

    home: Path
    env: Mapping[str, str]

    def run(
        self, *command: str, check: bool = True, timeout: float = 200, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in ``home``; with ``check``, its failure is the test's, with what it said.

        Args:
            timeout: a guard against one that hangs; `resume` alone waits a minute for a job that is being ended.
        """
        done = subprocess.run(
            command, cwd=self.home, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if check and done.returncode:
            pytest.fail(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def job(
        self, verb: str, *arguments: str, check: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One of the project's own commands, in this process: to start Python takes longer than most of them."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.home)
            patch.setattr(sys, "path", [str(self.home), *sys.path])
            patch.setattr(sys, "argv", [f"jobs/{verb}.py", *arguments])
            with mock.patch.dict(os.environ, {**self.env, **(env or {})}, clear=True):
                code = cli.call(importlib.import_module(f"jobs.{verb}").main)
        said = [text.buffer.getvalue().decode() for text in (out, err)]
        if check and code:
            pytest.fail(f"jobs.{verb} {' '.join(arguments)}: exit {code}\n{''.join(said)}")
        return subprocess.CompletedProcess([verb, *arguments], code, *said)

    def submit(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Submitted:
        """`jobs.submit ddp` into the run folder ``name``."""
        said = self.job("submit", "ddp", *arguments, "--run-dir", f"runs/{name}", env=env).stdout
        return Submitted(job_in(said), self.home / "runs" / name, said)

    def wait_for_start(self, run: Path, attempts: int = 1, timeout: float = 200) -> None:
        """Wait until so many attempts train; while the ranks start, they cannot yet be told to save."""
        started = f"the start of {run.name}"
        self.wait_for(started, lambda: len(self.events(run, "started")) >= attempts, timeout)

    def sbatch(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Submit with plain sbatch; the job id."""
        return self.run("sbatch", "--parsable", *arguments, env=env).stdout.strip()

    def states(self, job_id: str) -> list[str]:
        """State of each of the job's attempts in accounting, oldest first: ``["REQUEUED", "RUNNING"]``."""
        out = self.run("sacct", "-X", "-D", "-n", "-P", "-j", job_id, "-o", "State").stdout
        return [line.split()[0] for line in out.splitlines() if line]

    def wait_for(self, what: str | Callable[[], str], condition: Callable[[], bool], timeout: float = 200) -> None:
        """Poll until it holds; else the test fails with what the cluster is doing."""

        def seen() -> str:
            state = "".join(self.run(*command, check=False).stdout for command in CLUSTER_STATE)
            return f"{what() if callable(what) else what}\n{state}{self.logs()}"

        wait_until(condition, timeout, seen)

    def wait_for_node(self, name: str, state: str) -> None:
        """Wait for a node's state.

        All nodes are asked for: about a single one (`sinfo -n`) the controller answers with a stale count of its CPUs,
        which says "mixed" after the last job has ended (findings/sinfo_stale_state_of_one_node.sh).
        """
        seen: list[str] = []

        def has_it() -> bool:
            states = dict(line.split() for line in self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines())
            if seen[-1:] != [states[name]]:
                seen.append(states[name])
            return states[name] == state

        self.wait_for(lambda: f"{name} {state}, but {', '.join(seen)}", has_it)

    def wait(self, job_id: str, *, timeout: float = 240) -> str:
        """Wait until the job has ended for good; its state. All tasks of an array must have ended in the same state."""
        self.wait_for(f"the end of job {job_id}", lambda: self._ended(job_id), timeout)
        return self.states(job_id)[-1]

    def _ended(self, job_id: str) -> bool:
        # squeue knows at once that a job is there, accounting only a little later; it knows longest how the job ended.
        if self.run("squeue", "-h", "-j", job_id, "-t", "PD,R,CG,S,CF,RQ", "-o", "%i", check=False).stdout.strip():
            return False
        states = self.states(job_id)
        return bool(states) and all(state in (*ENDED, *CLOSED) for state in states) and states[-1] in ENDED

    @staticmethod
    def events(run: Path, kind: str) -> list[dict[str, Any]]:
        """The run's events of one kind, oldest first; none while the run folder is not there."""
        file = run / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [record for record in map(json.loads, lines) if record["event"] == kind]

    @staticmethod
    def final_weights(run: Path) -> bytes:
        """The weights of a run's last checkpoint, byte for byte."""
        return (run / "checkpoints" / "latest" / "model.safetensors").read_bytes()

    def logs(self) -> str:
        """The ends of all logs of this test, to print when it fails."""
        files = sorted(
            [*self.home.glob("runs/**/logs/**/*.err"), *self.home.glob("runs/**/batch.out"), *self.home.glob("*.out")]
        )
        return "".join(
            f"\n== {file.relative_to(self.home)}\n{file.read_text()[-1500:]}" for file in files if file.stat().st_size
        )


def missing() -> str | None:
    """Why a cluster cannot run on this machine, as far as can be seen without trying."""
    if sys.platform != "linux" or not Path("/etc/debian_version").exists():
        return "it needs Debian or Ubuntu"
    if os.geteuid() != 0:
        return "it needs root"
    for tool in ("unshare", "nsenter", "flock", "apt-get"):
        if shutil.which(tool) is None:
            return f"it needs the command '{tool}'"
    if subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    ).returncode:
        return "this machine does not let root make namespaces"
    return None


@contextlib.contextmanager
def cluster_up(*options: str) -> Iterator[dict[str, str]]:
    """A cluster with these options of `devcluster up`, and the environment of its login node. Gone afterwards."""
    reason = missing()
    if reason:
        cannot_run(f"no development cluster: {reason}")
    for turn in range(3):  # of two that look for a free place at once, one may find it taken
        variables = _place(os.getpid(), turn)
        up = [str(DEVCLUSTER), "up", "--until-exit", str(os.getpid()), *options]
        started = subprocess.run(up, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
        if started.returncode == 0:
            break
        if Path(variables["DEVCLUSTER_DIR"], "run", "shape").exists():  # else it has made nothing, and all is others'
            _down(variables)
    else:
        cannot_run(f"no development cluster: devcluster up failed: {started.stderr.strip()}")
    yield {**_clean_environment(), **variables, "SLURM_CONF": f"{variables['DEVCLUSTER_DIR']}/etc/slurm.conf"}
    _down(variables)


def _down(variables: Mapping[str, str]) -> None:
    down = [str(DEVCLUSTER), "down", "--purge"]
    subprocess.run(down, env={**os.environ, **variables}, capture_output=True, check=True)


def login(env: Mapping[str, str], home: Path) -> Cluster:
    """A user's view of a cluster, with the project in the folder ``home``."""
    for name in ("jobs", "trainkit", "configs"):
        (home / name).symlink_to(PROJECT / name)
    for model in ("own_models.py", "light_model.py"):
        shutil.copy(Path(__file__).with_name(model), home)
    return Cluster(home, {**env, "XDG_STATE_HOME": str(home / "state")})


@pytest.fixture(scope="session")
def slurm_env() -> Iterator[dict[str, str]]:
    """Environment of a login node of a running cluster. Each worker has one of its own: tests take nodes away."""
    with cluster_up("--nodes", str(NODES), "--shards-per-gpu", "4") as env:
        yield env


@pytest.fixture(scope="module")
def devcluster(slurm_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, with a home folder for the tests of one module."""
    home = tmp_path_factory.mktemp("home")
    cluster = login(slurm_env, home)
    yield cluster
    ids = cluster.run("squeue", "-h", "-o", "%A %Z", check=False).stdout.splitlines()
    mine = [line.split()[0] for line in ids if line.endswith(str(home))]
    if mine:
        cluster.run("scancel", *mine, check=False)


@pytest.fixture(scope="module")
def light(devcluster: Cluster) -> dict[str, str]:
    """An environment to submit in where training is not the point: the ranks are real, and import no torch."""
    return {"PYTHONPATH": light_experiment.hook(devcluster.home / "light")}


def _place(owner: int, turn: int) -> dict[str, str]:
    """Directory and network of this process's cluster."""
    # Sockets in it must have short names, so it is not in pytest's folder.
    third = next(n % 256 for n in range(owner + 85 * turn, owner + 85 * turn + 256) if _ports_are_free(n % 256))
    return {
        "DEVCLUSTER_DIR": f"{tempfile.gettempdir()}/devcluster-test-{owner}-{third}",
        "DEVCLUSTER_NET": f"10.{128 + owner // 256 % 100}.{third}",
    }


def _ports_are_free(third: int) -> bool:
    """The two ports that a cluster with this third number in its network has on the machine."""
    return is_free(24000 + 2 * third) and is_free(24001 + 2 * third)


def _clean_environment() -> dict[str, str]:
    """A user's environment: no outer job's variables, no keys, this interpreter's virtual environment active."""
    gone = ("SLURM", "SBATCH_", "SRUN_", "PMI", "TRAINKIT_", "WANDB_", "AWS_", "PYTEST_", "PYTHONPATH", "COV_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
    prefix = Path(sys.prefix)
    own_slurm = [f"{Path(own).resolve()}/bin"] if (own := os.environ.get("DEVCLUSTER_SLURM")) else []
    path = ":".join([f"{prefix / 'bin'}", *own_slurm, env["PATH"]])
    # Four nodes share this machine's cores: more than one thread per rank would only make them wait for each other.
    return {**env, "VIRTUAL_ENV": str(prefix), "PATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
