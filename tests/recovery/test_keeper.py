"""Ranks that start again in place, seen on scripts: their environment and their output tell all."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Command
from tests.runs import wait_until
from tests.shell import PROJECT
from trainkit.cluster.job_states import job_state
from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import StopFlag
from trainkit.recovery.keeper import Keeper
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

pytestmark = pytest.mark.usefixtures("no_slurm")
Submitted = Callable[..., RunDir]
PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
rank, attempt = int(os.environ["RANK"]), int(os.environ["TRAINKIT_ATTEMPT"])
told = {"argv": sys.argv[1:], "pid": os.getpid(), "parents": os.getppid(), **os.environ}
Path(f"said-{attempt}-{rank}.out").write_text(json.dumps(told))
print(f"rank {rank} of attempt {attempt}", flush=True)
"""
DIES_ONCE = """
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if attempt else 60)
"""


@pytest.fixture
def submitted(command: Command, tmp_path: Path) -> Submitted:
    """Submits a script that has been told who it is, on two local nodes, and waits for its end."""

    def submit(body: str, *words: str, waits: bool = True) -> RunDir:
        (tmp_path / "train.py").write_text(PRELUDE + body)
        command("submit", "train.py", "--nodes", "2", "--executor", "local", "--no-follow", *words).ok()
        run = RunDir.open(tmp_path / "runs" / "train-0001")
        if waits:
            wait_until(lambda: job_state(run).alive == "no", 100)
        return run

    return submit


def said(folder: Path, attempt: int, rank: int) -> dict[str, Any]:
    """What a rank of an attempt has left behind."""
    found: dict[str, Any] = json.loads((folder / f"said-{attempt}-{rank}.out").read_text())
    return found


def kinds(run: RunDir) -> list[str]:
    return [event["event"] for event in read_events(run) if event["event"] != "starting"]


def test_a_killed_rank_starts_again_with_the_others_in_the_same_job(submitted: Submitted, tmp_path: Path) -> None:
    run = submitted(DIES_ONCE, "launch.on_restart=--resume", "--", "--epochs", "3")
    assert job_state(run).state == "COMPLETED", (run.logs / "batch.out").read_text()
    life = [kind for kind in kinds(run) if kind != "started"]  # rank 0 may not have come to say so
    assert life == ["submitted", "failed", "requeued", "ended"]
    requeued = read_events(run, "requeued")[0]
    assert (requeued["attempt"], requeued["in_place"]) == (0, True)
    first, second = said(tmp_path, 0, 0), said(tmp_path, 1, 0)
    assert second["argv"] == ["--epochs", "3", "--resume"]
    assert second["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
    assert said(tmp_path, 1, 1)["MASTER_PORT"] == second["MASTER_PORT"]
    assert "TRAINKIT_KEEPERS" not in first
    for attempt in (0, 1):
        logs = [(run.attempt_logs(attempt) / f"rank-{rank}.out").read_text() for rank in (0, 1)]
        for rank in (0, 1):
            assert f"rank {rank} of attempt {attempt}\n" in logs[rank]
            assert f"of attempt {1 - attempt}" not in logs[rank]
    assert history_of(run).outcome == "COMPLETED"


@pytest.mark.nightly
def test_a_mistake_of_the_program_is_not_tried_again(submitted: Submitted) -> None:
    run = submitted("if rank == 1:\n    raise ValueError('mistake')\ntime.sleep(60)\n")
    assert job_state(run).state == "FAILED"
    assert run.attempts() == [0]
    assert history_of(run).failures[0].error == "ValueError: mistake"


@pytest.mark.nightly
def test_the_third_failure_ends_the_run(submitted: Submitted) -> None:
    run = submitted("if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n")
    assert job_state(run).state == "FAILED"
    assert run.attempts() == [0, 1, 2]
    assert read_events(run, "ended")[-1]["why"] == "3 attempts have failed"


@pytest.mark.nightly
@pytest.mark.parametrize("setting", ["launch.restart_in_place=false", "launch.requeue=false"])
def test_it_can_be_left_to_the_launcher(submitted: Submitted, setting: str) -> None:
    run = submitted(DIES_ONCE, setting)
    assert not any(event.get("in_place") for event in read_events(run, "requeued"))
    assert run.attempts() == ([0] if "requeue" in setting else [0, 1])


@pytest.mark.nightly
def test_a_preemption_reaches_a_rank_that_has_started_again(submitted: Submitted, tmp_path: Path) -> None:
    """And what the ranks have left running is gone by then."""
    body = f"""
import subprocess
if attempt == 0:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", "left by {os.getpid()}"])
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
time.sleep(60 if attempt < 2 else 0)
"""
    run = submitted(body, waits=False)
    wait_until(lambda: all((tmp_path / f"said-1-{rank}.out").exists() for rank in (0, 1)))
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if f"left by {os.getpid()}" in _text(path)]
    assert left == []
    time.sleep(0.5)  # until the script has its handler
    submission = history_of(run).submission
    assert submission is not None
    assert submission.process is not None
    submission.process.signal(signal.SIGUSR2)
    wait_until(lambda: job_state(run).alive == "no", 100)
    assert job_state(run).state == "COMPLETED", (run.logs / "batch.out").read_text()
    assert [event.get("in_place", False) for event in read_events(run, "requeued")] == [True, False]
    assert run.attempts() == [0, 1, 2]


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    """Keeper of job 7, whose node has a memory of its own."""
    monkeypatch.setattr("trainkit.recovery.keeper.MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    return keeper_of(run, "7")


def keeper_of(run: RunDir, job_id: str) -> Keeper:
    env = {"TRAINKIT_KEEPERS": "127.0.0.1:1", "TRAINKIT_SECRET": "s" * 32, "SLURM_JOB_ID": job_id}
    return Keeper(env, Attempt(run, 0), RankEnv.from_mapping(env), StopFlag())


def test_a_rank_that_has_ended_is_signalled_no_more(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process id may be that of another process by then."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *signal: sent.append(signal))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        keeper._rank = process.pid
        assert keeper._wait() == 0
        keeper._end_rank()
    assert sent == []


def test_what_a_killed_job_has_left_in_the_nodes_memory_is_removed(keeper: Keeper, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    own = keeper._link.folder
    earlier = keeper_of(run, "6")._link.folder
    others = keeper_of(RunDir.create(tmp_path / "other", "seed: 0\n"), "5")._link.folder
    left = keeper_of(RunDir.create(tmp_path / "left", "seed: 0\n"), "4")._link.folder
    for folder in (own, earlier, others, left):
        (folder / "checkpoints").mkdir(parents=True)
    two_hours_ago = time.time() - 7200
    os.utime(left, (two_hours_ago, two_hours_ago))
    os.utime(own, (two_hours_ago, two_hours_ago))
    keeper.tidy_memory()
    assert sorted(own.parent.iterdir()) == sorted([own, others])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


DEATH = """
import os, signal

def die(place):
    if DEATHS.get(os.environ["TRAINKIT_ATTEMPT"]) == [rank.rank, state.steps, place]:
        os.kill(os.getpid(), signal.SIGKILL)
"""
PLACES = ("fake = generator(noise)", "rank.backward(generator_loss)", "rank.log(loss=")
"""Lines of the GAN before which a rank dies: before its update, between its optimizers, and after both."""


@pytest.mark.long
def test_a_gan_whose_ranks_are_killed_ten_times_loses_no_update(command: Command, tmp_path: Path) -> None:
    """Without a checkpoint on the disk, and to the same weights, bit for bit."""
    body = (PROJECT / "docs/examples/gan.py").read_text()
    for number, line in enumerate(PLACES):
        body = body.replace(f"            {line}", f"            die({number})\n            {line}")

    def train(deaths: dict[str, list[int]]) -> tuple[list[int], dict[str, bytes]]:
        (tmp_path / "gan.py").write_text(f"DEATHS = {deaths}{DEATH}{body}")
        words = ("--nodes", "2", "--executor", "local", "--no-follow", "launch.gpus_per_node=0")
        command("submit", "gan.py", *words, "checkpoint.every_epochs=null").ok()
        run = RunDir.open(max((tmp_path / "runs").glob("gan-*")))
        wait_until(lambda: job_state(run).alive == "no", 600)
        weights = {file.name: file.read_bytes() for file in (run.checkpoints / "latest").glob("*.safetensors")}
        return [event["step"] for event in read_events(run, "started")], weights

    begun, expected = train({})
    assert begun == [0]
    assert {"generator.safetensors", "critic_optimizer.safetensors"} < expected.keys()
    for place in range(5):
        deaths = {"0": [place % 2, 11, place % 3], "1": [(place + 1) % 2, 40, (place + 1) % 3]}
        assert train(deaths) == ([0, 11, 40], expected), deaths
