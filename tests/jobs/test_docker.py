"""Two nodes without a scheduler whose ranks are in containers of a real docker, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import containers
from tests.runs import last_event
from trainkit.ranks import free_port
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="no dockerd"),
    pytest.mark.skipif(os.geteuid() != 0, reason="dockerd needs root"),
]
IMAGE = "trainkit-test:1"
SLOW = ("model.name=own_models:slow", "model.seconds=1", "monitor.loggers=[jsonl]", "data.workers=1")
EIGHT_STEPS = ("train.epochs=2", "data.name=synthetic", "data.train_size=256", "data.val_size=16")
SECONDS = 300


@pytest.fixture(scope="module")
def docker() -> Iterator[dict[str, str]]:
    with containers.docker_daemon(IMAGE) as env:
        yield env


def alive(docker: dict[str, str]) -> list[str]:
    """Containers that are there, running or not."""
    words = ["docker", "ps", "--all", "--quiet"]
    return subprocess.run(words, env=docker, capture_output=True, text=True, check=True).stdout.split()


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {SECONDS} s"
        time.sleep(0.1)


def test_two_nodes_in_containers_save_when_told_and_leave_nothing(
    docker: dict[str, str], no_slurm: dict[str, str], tmp_path: Path
) -> None:
    port, runs = str(free_port()), [RunDir(tmp_path / f"node{rank}" / "run") for rank in (0, 1)]
    nodes = ["--nodes", "2", "--gpus-per-node", "0", "--master-addr", "127.0.0.1", "--master-port", port]
    image = ["--container-image", IMAGE, f"launch.container_python={sys.executable}", containers.mounts()]

    def start(*of_run: str) -> list[subprocess.Popen[str]]:
        started = []
        for rank, run in enumerate(runs):
            run.path.parent.mkdir(exist_ok=True)
            shutil.copy(Path(__file__).parents[1] / "slurm" / "own_models.py", run.path.parent)
            words = [sys.executable, "-m", "jobs.launch", *(of_run or [str(run.path)])]
            words += ["--node-rank", str(rank), *nodes]
            words += ["--run-dir", str(run.path)] if of_run else []
            started.append(
                subprocess.Popen(
                    words, env={**no_slurm, **docker, "TRAINKIT_SECRET": "known to this test only"},
                    cwd=run.path.parent, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        return started

    def begun(times: int) -> bool:
        return len(read_events(runs[0], "started")) == times if runs[0].events.exists() else False

    first = start("ddp", *image, *SLOW, *EIGHT_STEPS)
    wait_for("start", lambda: begun(1))
    for process in first:
        process.send_signal(signal.SIGUSR2)
    shown = [process.communicate(timeout=SECONDS)[0] for process in first]
    assert [process.returncode for process in first] == [0, 0], shown
    assert all("Stopped and saved." in words for words in shown)
    assert alive(docker) == []

    second = start()
    wait_for("second start", lambda: begun(2))
    second[1].kill()
    shown = [process.communicate(timeout=SECONDS)[0] for process in second]
    wait_for("end of the containers", lambda: not alive(docker))
    assert "Stopped and saved." in shown[0], "all ranks agree"
    states = [[event["state"] for event in read_events(run, "ended")] for run in runs]
    assert states == [["PREEMPTED"] * 2] * 2

    saved_at = [event["step"] for event in read_events(runs[0], "handed_back")]
    third = start()
    shown = [process.communicate(timeout=SECONDS)[0] for process in third]
    assert [process.returncode for process in third] == [0, 0], shown
    assert [event["step"] for event in read_events(runs[0], "started")] == [0, *saved_at]
    assert [(last_event(run, "ended") or {})["state"] for run in runs] == ["COMPLETED"] * 2
    assert alive(docker) == []
