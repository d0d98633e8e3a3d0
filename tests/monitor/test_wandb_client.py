"""W&B's client in a process of its own, with a package in W&B's place that writes down how it is called."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainkit.config.schema import Config
from trainkit.monitor.loggers import open_loggers, prepare_loggers
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
from trainkit.run.metrics import read_metrics

CONFIG = Config.model_validate({"monitor": {"loggers": ["jsonl", "wandb"]}})
STAND_IN = """
import json, os, types
errors = types.SimpleNamespace(Error=KeyError)

def note(kind, **facts):
    with open(os.environ["NOTED"], "a") as file:
        print(json.dumps({"kind": kind, **facts}), file=file)

class Run:
    def define_metric(self, *names, **options): ...
    def log(self, values): note("log", **values)
    def finish(self, exit_code): note("finish", exit_code=exit_code)

def Settings(**settings): ...
def teardown(): note("teardown")
def init(**arguments):
    note("init", id=arguments["id"])
    return Run()
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    return RunDir.create(tmp_path / "runs" / "ddp-0001", "seed: 0\n")


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 1.0, "split": "train", "loss": 1 / step, **more}


def noted(*kinds: str) -> list[dict[str, Any]]:
    file = Path(os.environ["NOTED"])
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [item for item in found if item["kind"] in kinds]


def client() -> psutil.Process:
    children = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    (process,) = [one for one in children if "run_client" in " ".join(one.cmdline())]
    return process


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while ProcessId.of(pid).started:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_it_has_begun() -> None:
    deadline = time.monotonic() + 60
    while not noted("init"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_that_was_logged_has_arrived_in_order_when_the_loggers_are_closed(run_dir: RunDir) -> None:
    with open_loggers(CONFIG, run_dir, total_steps=40) as logger:
        for step in range(1, 6):
            logger.log(record(step))
    assert [item["step"] for item in noted("log")] == [1, 2, 3, 4, 5]
    assert [item["kind"] for item in noted("finish", "teardown")] == ["finish", "teardown"]


def test_whoever_trains_never_imports_it(run_dir: RunDir) -> None:
    code = (
        "import sys; from pathlib import Path; from trainkit.config.schema import Config; "
        "from trainkit.monitor.loggers import open_loggers, prepare_loggers; "
        "from trainkit.run.folder import RunDir\n"
        "config = Config.model_validate({'monitor': {'loggers': ['wandb']}})\n"
        f"with open_loggers(config, RunDir(Path({str(run_dir.path)!r})), total_steps=1, "
        "prepared=prepare_loggers(config)): ...\n"
        "print('wandb' in sys.modules)"
    )
    project = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": f"{project}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert len(noted("init")) == 1


def test_one_that_was_started_ahead_is_the_one_that_is_fed(run_dir: RunDir) -> None:
    prepared = prepare_loggers(CONFIG)
    ahead = client().pid
    with open_loggers(CONFIG, run_dir, total_steps=40, prepared=prepared) as logger:
        assert client().pid == ahead
        logger.log(record(1))
    assert len(noted("log")) == 1


def test_one_that_is_told_nothing_leaves_nothing(run_dir: RunDir) -> None:
    """A training that fails before its first update."""
    code = (
        "import sys; from trainkit.config.schema import Config; from trainkit.monitor.loggers import prepare_loggers\n"
        "prepared = prepare_loggers(Config.model_validate({'monitor': {'loggers': ['wandb']}}))\n"
        "print(prepared['wandb']._process.pid)"
    )
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    until_gone(int(done.stdout))
    assert noted("init", "finish") == []
    assert done.stderr == ""


def test_signals_that_are_meant_for_the_training_do_not_end_it(run_dir: RunDir) -> None:
    prepared = prepare_loggers(CONFIG)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        client().send_signal(number)  # before it is there, and again
    with open_loggers(CONFIG, run_dir, total_steps=40, prepared=prepared) as logger:
        until_it_has_begun()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            client().send_signal(number)
        logger.log(record(1))
    assert [item["exit_code"] for item in noted("finish")] == [0]


def test_a_training_that_is_killed_is_a_crashed_run(run_dir: RunDir) -> None:
    with open_loggers(CONFIG, run_dir, total_steps=40) as logger:
        logger.log(record(1))
        pipe = logger._loggers["wandb"]._client._process.stdin  # type: ignore[attr-defined]
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())  # as when the kernel closes it
    assert [item["exit_code"] for item in noted("finish")] == [1]


def test_training_never_waits_for_a_client_that_is_slow(run_dir: RunDir) -> None:
    with open_loggers(CONFIG, run_dir, total_steps=40) as logger:
        until_it_has_begun()
        process = client()
        process.suspend()
        began = time.monotonic()
        for step in range(1, 101):  # 64 KiB fit into a pipe
            logger.log(record(step, note="x" * 5000))
        assert time.monotonic() - began < 30
        process.resume()
    assert [item["step"] for item in noted("log")] == list(range(1, 101))


def test_one_that_is_killed_is_said_once_and_training_goes_on(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_loggers(CONFIG, run_dir, total_steps=40) as logger:
        process = client()
        process.kill()
        until_gone(process.pid)
        for step in (1, 2, 3):
            logger.log(record(step))
    assert capsys.readouterr().err == "Logger 'wandb' is off from here on: its process has ended with exit code -9\n"
    assert len(read_metrics(run_dir)) == 3


def test_why_it_cannot_be_used_is_said_once_and_training_goes_on(
    run_dir: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text("raise ImportError('No module named wandb')")
    with open_loggers(CONFIG, run_dir, total_steps=40) as logger:
        until_gone(client().pid)
        for step in (1, 2, 3):
            logger.log(record(step))
    assert capfd.readouterr().err == "Logger 'wandb' is off from here on: No module named wandb\n"
    assert len(read_metrics(run_dir)) == 3
