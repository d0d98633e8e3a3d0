"""Each way of starting a run, where torch takes longer to load than a start may take without a word.

So it is on the file systems of clusters, and a record of that must not be in the way of the run. The ranks are
processes of the real commands; they load a training without torch (`tests.light_experiment`), and that slowly. Those of
SLURM are in tests/slurm/test_slow_starts.py.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import light_experiment
from tests.debian import program
from tests.runs import wait_until
from tests.shell import PROJECT, python
from trainkit.common.hosts import free_port
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.training.startup import QUIET_SECONDS

SECONDS = QUIET_SECONDS + 1.5
LIGHT = ("monitor.loggers=[jsonl]", "train.max_steps=4")
ON_CPU = ("--gpus-per-node", "0")
REAL = """
import importlib.abc, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            time.sleep({seconds})

sys.meta_path.insert(0, Slow())
"""

Env = dict[str, str]


def said(run: RunDir, attempt: int = 0) -> str:
    """Return the output of its ranks."""
    return "".join(file.read_text() for file in sorted(run.attempt_logs(attempt).glob("rank-*.out")))


def require_trained(run: RunDir) -> None:
    assert history_of(run).finished, [read_events(run), said(run)]
    assert json.loads(run.summary.read_text())["outcome"] == "finished"
    assert {path.name for path in run.path.iterdir()} >= {"config.yaml", "manifest.json", "metrics.jsonl", "logs"}


@pytest.mark.nightly
def test_with_torch_itself_the_ranks_of_an_older_template_make_their_run(tmp_path: Path) -> None:
    """A copy of it that a user has kept starts them on a folder with nothing but their logs."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(REAL.format(seconds=QUIET_SECONDS + 0.7))
    attempt = Attempt.begin(RunDir(tmp_path / "runs" / "ddp-job1"))
    variables = {**attempt.environment(), "PYTHONPATH": f"{tmp_path / 'slow'}:{PROJECT}", "OMP_NUM_THREADS": "1"}
    words = ("-m", "trainkit", "train", "single", "train.max_steps=2", "monitor.loggers=[jsonl]")
    done = python(*words, "--run-dir", str(attempt.run.path), cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s so far to load torch." in done.stdout
    assert json.loads(attempt.run.summary.read_text())["steps"] == 2


# Each way


@pytest.fixture
def env(tmp_path: Path) -> Env:
    """An environment for commands whose ranks load slowly what they train with."""
    light = light_experiment.hook(tmp_path / "light", SECONDS)
    own = {"TRAINKIT_RUNS": str(tmp_path / "runs"), "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    return {**own, "PYTHONPATH": f"{light}:{PROJECT}", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}


def run_in(folder: Path, env: Env, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False
    )


HERE = ("--run-dir", "runs/here")
TWO = (*ON_CPU, "--ntasks-per-node", "2")
NOTEBOOK = f"""
import trainkit
run = trainkit.submit("single", {list(LIGHT)}, executor="local", gpus_per_node=0, run_dir="runs/here")
print(run.follow())
"""
WAYS = {
    "submit": ("-m", "trainkit", "submit", "ddp", *LIGHT, *TWO, *HERE, "--executor", "local"),
    "debug": ("-m", "trainkit", "submit", "single", *LIGHT, *ON_CPU, *HERE, "--executor", "debug"),
    "launch": ("-m", "trainkit", "launch", "ddp", *LIGHT, *TWO, *HERE, "--master-port", "PORT"),
    "train": ("-m", "trainkit", "train", "single", *LIGHT, *HERE),
    "torchrun": (*("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "PORT"),
                 *("-m", "jobs.train", "ddp", *LIGHT, *HERE)),
    "mpirun": ("-m", "jobs.train", "ddp", *LIGHT, *HERE),
    "notebook": ("-c", NOTEBOOK),
}  # fmt: skip


def command(way: str, env: Env) -> list[str]:
    words = [sys.executable, *(str(free_port()) if word == "PORT" else word for word in WAYS[way])]
    if way != "mpirun":
        return words
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TRAINKIT_SECRET": "a secret of this run"}
    start = (program("mpirun", package="openmpi-bin"), "--allow-run-as-root", "--oversubscribe", "-n", "2")
    return [*start, *words]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_start_that_takes_long_trains(tmp_path: Path, env: Env, way: str) -> None:
    done = run_in(tmp_path, env, *command(way, env))
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "runs" / "here")
    require_trained(run)
    assert "s so far to load torch." in done.stdout + said(run)
    assert "Traceback" not in done.stderr
    recorded = [event["what"] for event in read_events(run, "starting")]
    assert bool(recorded) == (way not in ("train", "torchrun", "mpirun")), "which make the run after that"


@pytest.mark.long
@pytest.mark.parametrize("way", ["train", "submit"])
def test_a_run_is_resumed_that_has_loaded_slowly_and_was_stopped(tmp_path: Path, env: Env, way: str) -> None:
    """It is told to save while it trains, and goes on with `resume`, whoever has started it."""
    run, slowly = RunDir(tmp_path / "runs" / "here"), {**env, light_experiment.PAUSE: "1.0"}
    words = ["--no-follow"] if way == "submit" else []
    first = subprocess.Popen([*command(way, env), *words], cwd=tmp_path, env={**os.environ, **slowly})
    wait_until(lambda: read_events(run, "started"), 120)
    if way == "train":
        first.send_signal(signal.SIGTERM)
    assert first.wait(120) == 0
    if way == "submit":
        assert run_in(tmp_path, env, sys.executable, "-m", "trainkit", "cancel", "here").returncode == 0
    assert not history_of(run).finished
    resume = ("-m", "trainkit", "resume", "here", "--executor", "local", *ON_CPU)
    done = run_in(tmp_path, env, sys.executable, *resume)
    assert done.returncode == 0, done.stdout + done.stderr
    require_trained(run)
    assert json.loads((run.path / light_experiment.STATE).read_text()) == [4, light_experiment.trained(4)]


@pytest.mark.long
def test_while_it_starts_it_is_shown_as_running_and_its_words_are_its_logs(tmp_path: Path, env: Env) -> None:
    env["PYTHONPATH"] = f"{light_experiment.hook(tmp_path / 'slower', 60)}:{PROJECT}"
    assert run_in(tmp_path, env, *command("submit", env), "--no-follow").returncode == 0
    run = RunDir(tmp_path / "runs" / "here")
    wait_until(lambda: "so far to load torch" in said(run), 60)
    for verb, words in (("status", "RUNNING"), ("logs", "so far to load torch"), ("why", "RUNNING")):
        done = run_in(tmp_path, env, sys.executable, "-m", "trainkit", verb, "here")
        assert (done.returncode, words in done.stdout) == (0, True), (verb, done.stdout, done.stderr)
    refused = run_in(tmp_path, env, sys.executable, "-m", "trainkit", "resume", "here")
    assert (refused.returncode, "here is RUNNING" in refused.stderr) == (2, True), refused.stderr
    assert not read_events(run, "started"), "the test was too slow to see it start"
    assert run_in(tmp_path, env, sys.executable, "-m", "trainkit", "cancel", "here").returncode == 0
