import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import containers, light_experiment
from tests.jobs.conftest import Command
from tests.runs import last_event, wait_until
from trainkit.common.hosts import free_port
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

SECRET = "known-to-this-test-only"
FAST = ("train.epochs=1", "schedule.name=constant", "monitor.loggers=[console,jsonl]")


def begin(words: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    """What it says goes into one pipe."""
    return subprocess.Popen(words, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def node(no_slurm: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``jobs.launch`` as one of two nodes, in a folder of its own, for there is no shared one."""
    started: list[subprocess.Popen[str]] = []
    port = str(free_port())

    def start(rank: int, *arguments: str, preset: str = "ddp") -> subprocess.Popen[str]:
        folder = tmp_path / f"node{rank}"
        folder.mkdir(exist_ok=True)
        for file in tmp_path.glob("*.py"):
            (folder / file.name).write_text(file.read_text())
        command = [sys.executable, "-u", "-m", "jobs.launch", preset, "--nodes", "2", "--node-rank", str(rank)]
        command += ["--gpus-per-node", "0", "--master-addr", "127.0.0.1", "--master-port", port, *arguments]
        env = {**no_slurm, "TRAINKIT_RUNS": str(folder / "runs"), "TRAINKIT_SECRET": SECRET}
        started.append(begin(command, folder, env))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run_of(tmp_path: Path, rank: int) -> RunDir:
    return RunDir(tmp_path / f"node{rank}" / "runs" / "ddp-0001")


@pytest.mark.nightly
def test_a_dying_rank_ends_the_others_and_the_command_fails(
    node: Callable[..., subprocess.Popen[str]], no_slurm: dict[str, str], tmp_path: Path
) -> None:
    no_slurm["PYTHONPATH"] = f"{light_experiment.hook(tmp_path / 'light')}:{no_slurm['PYTHONPATH']}"
    (tmp_path / "my_model.py").write_text(
        "import os, time\ndef build(info):\n"
        "    if os.environ['RANK'] == '1': os._exit(7)\n    return lambda: time.sleep(60)\n"
    )
    model = ("model.name=my_model:build", "--ntasks-per-node", "2")
    second, first = node(1, *FAST, *model), node(0, *FAST, *model)
    shown, other = first.communicate(timeout=120)[0], second.communicate(timeout=120)[0]
    assert (first.returncode, second.returncode) == (1, 1), shown + other
    assert "Rank 1 failed: exit code 7." in shown


@pytest.mark.nightly
def test_a_rank_that_refuses_its_settings_is_quoted_with_its_exit_code(command: Command, tmp_path: Path) -> None:
    done = command("launch", "single", "model.freeze=[nothing]", "monitor.loggers=[jsonl]", "--run-dir", "run")
    done.refused(
        2, "Rank 0 failed: model.freeze: no parameter matches 'nothing'.", "  why: Its parameters have names like 0.w"
    )
    assert done.err.endswith(f"`python -m jobs.submit {tmp_path / 'run'} model.freeze=...`\n")


@pytest.mark.long
def test_two_nodes_without_a_shared_folder_save_on_sigterm_and_go_on(
    node: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """That they train to the end is seen with the README's words, in tests/test_readme.py."""
    long = ("train.epochs=300", "monitor.loggers=[jsonl]", "train.global_batch_size=32")
    both = [node(0, *long), node(1, *long)]
    wait_until(lambda: run_of(tmp_path, 0).events.exists() and last_event(run_of(tmp_path, 0), "saved"), 90)
    assert (last_event(run_of(tmp_path, 0), "started") or {})["world_size"] == 2
    assert (run_of(tmp_path, 1).attempt_logs(0) / "rank-1.out").is_file()
    seen = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [words for words in seen if SECRET in words] == [], "everybody can see those"
    both[1].send_signal(signal.SIGTERM)
    both[0].send_signal(signal.SIGTERM)
    shown, other = (process.communicate(timeout=60)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0], shown + other
    assert "Note: 127.0.0.1 is this machine itself" in shown
    assert "Node 0: ranks 0 to 0 of 2" in shown
    assert "Node 1: ranks 1 to 1 of 2" in other
    assert all("Stopped and saved." in words for words in (shown, other))
    for rank in (0, 1):
        assert (last_event(run_of(tmp_path, rank), "ended") or {})["state"] == "PREEMPTED", f"node {rank}"
    stopped_at = (last_event(run_of(tmp_path, 0), "handed_back") or {})["step"]
    again = [node(rank, preset=str(run_of(tmp_path, rank).path)) for rank in (0, 1)]
    wait_until(lambda: len(read_events(run_of(tmp_path, 0), "started")) == 2, 150)
    assert (last_event(run_of(tmp_path, 0), "started") or {})["step"] == stopped_at
    for process in again:
        process.terminate()
    assert [process.wait(60) for process in again] == [0, 0]
    written = [file for file in tmp_path.glob("node*/**/*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    assert written == []


@pytest.mark.nightly
@pytest.mark.skipif(not containers.can_run(), reason="this machine does not let us mount")
def test_a_node_trains_in_a_container_that_sees_nothing_but_its_run(no_slurm: dict[str, str], tmp_path: Path) -> None:
    for folder in (tools := tmp_path / "tools", home := tmp_path / "home"):
        folder.mkdir()
    image = containers.install(tools)
    (home / "my_model.py").write_text(
        "import os, sys\nfrom trainkit.models.fashion_cnn import build as ours\n"
        f"def build(info):\n    print('sees', os.path.exists({str(tools)!r}), os.environ.get('MY_OWN'), __file__)\n"
        "    return ours(info)\n"
    )
    env = {**no_slurm, "PATH": f"{tools}:/usr/bin:/bin", "TRAINKIT_RUNS": str(home / "runs"), "MY_OWN": "outside"}
    command = [sys.executable, "-m", "jobs.launch", "ddp", "--container-image", str(image)]
    command += [f"launch.container_python={sys.executable}", "launch.container_runtime=docker", *FAST]
    command += ["model.name=my_model:build", "data.name=synthetic", "data.train_size=64"]
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, check=False)
    run = home / "runs" / "ddp-0001"
    assert done.returncode == 0, done.stdout + done.stderr
    assert "docker run --rm --net=host --ipc=host --pid=host" in done.stdout
    assert f"sees False None {home}" in (run / "logs" / "0" / "rank-0.out").read_text()
    assert (last_event(RunDir(run), "ended") or {})["state"] == "COMPLETED"
    submitted = last_event(RunDir(run), "submitted") or {}
    assert submitted["host"] == socket.gethostname(), "who looks after it can be asked for from outside"


# Two nodes whose ranks are in containers of a real docker, on this machine

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


@pytest.mark.long
@pytest.mark.skipif(shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="no dockerd")
@pytest.mark.skipif(os.geteuid() != 0, reason="dockerd needs root")
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
            words += ["--node-rank", str(rank), *nodes, *(["--run-dir", str(run.path)] if of_run else [])]
            started.append(begin(words, run.path.parent, {**no_slurm, **docker, "TRAINKIT_SECRET": SECRET}))
        return started

    def begun(times: int) -> bool:
        return len(read_events(runs[0], "started")) == times if runs[0].events.exists() else False

    first = start("ddp", *image, *SLOW, *EIGHT_STEPS)
    wait_until(lambda: begun(1), SECONDS)
    for process in first:
        process.send_signal(signal.SIGUSR2)
    shown = [process.communicate(timeout=SECONDS)[0] for process in first]
    assert [process.returncode for process in first] == [0, 0], shown
    assert all("Stopped and saved." in words for words in shown)
    assert alive(docker) == []

    second = start()
    wait_until(lambda: begun(2), SECONDS)
    second[1].kill()
    shown = [process.communicate(timeout=SECONDS)[0] for process in second]
    wait_until(lambda: not alive(docker), SECONDS)
    assert "Stopped and saved." in shown[0], "all ranks agree"
    assert [[event["state"] for event in read_events(run, "ended")] for run in runs] == [["PREEMPTED"] * 2] * 2
    assert read_events(runs[0], "started")[1]["step"] == read_events(runs[0], "handed_back")[0]["step"]
