import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import wait_until
from tests.shell import PROJECT
from trainkit.config.schema import Config
from trainkit.monitor import wandb as logger_module
from trainkit.monitor.base import open_loggers, run_id
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.labels import say
from trainkit.run.metrics import read_metrics

SECRET = "0123456789abcdef" * 2 + "deadbeef"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run folder, on a machine that is not logged in; the client's service is ended afterwards."""
    import wandb

    for variable in ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_API_KEY", "WANDB_PROJECT", "NETRC"):
        monkeypatch.delenv(variable, raising=False)
    for variable, folder in [("HOME", "home"), ("WANDB_CONFIG_DIR", "config"), ("WANDB_CACHE_DIR", "cache")]:
        monkeypatch.setenv(variable, str(tmp_path / folder))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    yield RunDir.create(tmp_path / "runs" / "ddp-0001", "seed: 0\n")
    wandb.teardown()


def stored(run_dir: RunDir) -> list[list[Any]]:
    """The protobuf records of every attempt, oldest attempt first."""
    import wandb

    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    wandb.teardown()  # its service writes the file, and has written all of it once it is gone
    files = sorted(run_dir.wandb.glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    return [[proto.Record.FromString(blob) for blob in leveldb_log(file.read_bytes())] for file in files]


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: 32 KiB blocks, a record in one piece (1) or as first (2), middle (3), last (4)."""
    header = 7
    block = 32768
    position = 7  # wandb's own file header is as long as a record's
    record = b""
    while position + header <= len(data):
        if block - position % block < header:
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):
            yield record
            record = b""


def of_kind(records: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def values_of(items: Any) -> dict[str, Any]:
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def history(records: list[Any]) -> list[dict[str, Any]]:
    return [values_of(row.item) for row in of_kind(records, "history")]


def run_of(records: list[Any]) -> Any:
    return of_kind(records, "run")[0]


def steps_of(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


BOTH = Config.model_validate({"monitor": {"loggers": ["jsonl", "wandb"]}})
WANDB = Config.model_validate({"monitor": {"loggers": ["wandb"], "hardware_every_seconds": 1}, "seed": 7})


@pytest.mark.nightly
def test_an_offline_run_keeps_values_over_a_restart_and_no_secret(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SAVE_CODE", "true")  # as an account may have it, too
    monkeypatch.setenv("WANDB_PROGRAM", __file__)
    start = {"params": 1234, "world_size": 2, "precision": "bf16", "micro_batch_size": 8}
    with open_loggers(WANDB, run_dir, total_steps=30, **start) as logger:  # type: ignore[arg-type]
        run_dir.confusion.write_text('{"classes": ["cat", "dog"], "raw": [[0, 0, 9], [0, 1, 1], [1, 1, 5]]}')
        logger.log(record(10))
        time.sleep(2.5)  # its service samples the host
        logger.log(record(20, acc1=50.0))
    say(run_dir, tags=["paper"], notes=["warm-up too short", "again"])
    with open_loggers(WANDB, run_dir, total_steps=30, resumed_step=20) as logger:
        logger.log({"step": 30, "epoch": 2.0, "split": "test", "loss": 0.5, "acc1": 90.0})
    first, second = stored(run_dir)
    one, other = history(first)
    assert (one["step"], one["loss/train"], "acc1/train" in one) == (10, 0.1, False)
    assert (other["step"], other["loss/train"], other["acc1/train"]) == (20, 0.05, 50.0)
    assert (history(second)[0]["step"], history(second)[0]["acc1/test"]) == (30, 90.0)
    assert run_of(first).run_id == run_of(second).run_id == run_id(run_dir)
    assert (list(run_of(second).tags), run_of(second).notes) == (["paper"], "warm-up too short\nagain")
    assert run_of(first).run_id != run_id(RunDir(run_dir.path.parent / "elsewhere" / run_dir.name))
    settings = values_of(run_of(first).config.update)
    assert (settings["seed"], settings["world_size"], settings["params"]) == (7, 2, 1234)
    assert (settings["train"]["precision"], settings["train"]["micro_batch_size"]) == ("bf16", 8)
    assert "launch" not in settings
    assert "step" in [metric.step_metric for metric in of_kind(first, "metric")], "the step is the x axis"
    stats = values_of(of_kind(first, "stats")[0].item)
    assert {"memory_percent", "proc.memory.rssMB"} <= stats.keys()
    for kind in ("files", "environment", "output", "output_raw"):  # code, packages, the machine
        assert of_kind(first, kind) == []
    (table,) = run_dir.wandb.rglob("*.table.json")
    told = json.loads(table.read_text())
    assert told["columns"] == ["Actual", "Predicted", "nPredictions"]
    assert told["data"] == [["cat", "cat", 9], ["cat", "dog", 1], ["dog", "cat", 0], ["dog", "dog", 5]]
    files = [file for file in run_dir.path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files if file.is_relative_to(run_dir.wandb)} == {".wandb", ".log", ".json"}
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


def test_a_server_that_cannot_be_reached_leaves_an_offline_run(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(logger_module, "PATIENCE_SECONDS", 1.0)
    with open_loggers(WANDB, run_dir, total_steps=40) as logger:
        logger.log(record(10))
    assert "wandb cannot be reached and continues offline" in capfd.readouterr().err
    assert "Otel" not in str(threading.enumerate()), "they wait for it"
    assert len(history(stored(run_dir)[0])) == 1


OWN_SERVER = {"WANDB_BASE_URL": "https://wandb.example.org"}


@pytest.mark.parametrize(
    ("env", "netrc_machine", "expected"),
    [
        ({}, "github.com", "offline"),
        ({"WANDB_API_KEY": "x" * 40}, "github.com", "online"),
        ({}, "api.wandb.ai", "online"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": "x" * 40}, "api.wandb.ai", "offline"),
        ({"WANDB_MODE": "online"}, "github.com", "online"),
        (OWN_SERVER, "api.wandb.ai", "offline"),
        (OWN_SERVER, "wandb.example.org", "online"),
    ],
)
def test_online_only_when_logged_in(tmp_path: Path, env: dict[str, str], netrc_machine: str, expected: str) -> None:
    assert logger_module.mode({}, tmp_path) == "offline", "without a file"
    (tmp_path / ".netrc").write_text(f"machine {netrc_machine} login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert logger_module.mode(env, tmp_path) == expected


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 1.0, "split": "train", "loss": 1 / step, **more}


@pytest.mark.parametrize("fails", [False, True])
def test_a_training_that_raised_is_a_failed_run(run_dir: RunDir, fails: bool) -> None:
    with suppress(ZeroDivisionError), open_loggers(WANDB, run_dir, total_steps=40):
        if fails:
            raise ZeroDivisionError
    (end,) = of_kind(stored(run_dir)[0], "exit")
    assert end.exit_code == int(fails)


def test_why_it_cannot_be_used_is_said_once_and_training_goes_on(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with open_loggers(BOTH, run_dir, total_steps=40) as logger:
        for step in (1, 2, 3):
            logger.log(record(step))
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("Logger 'wandb' is off from now on: import of wandb halted")
    assert len(read_metrics(run_dir)) == 3
    monkeypatch.undo()


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["in the middle", "while it finishes"])
def test_a_service_that_dies_is_started_again_and_told_all(run_dir: RunDir, when: str) -> None:
    code = f"""
import psutil, wandb
from pathlib import Path
from tests.monitor.test_wandb import BOTH, record
from tests.runs import wait_until
from trainkit.monitor.base import open_loggers
from trainkit.run.folder import RunDir

finish = wandb.Run.finish

def die(*arguments, **more):
    wandb.Run.finish = finish
    for process in psutil.Process().children():
        process.kill()
        process.wait()
    raise RuntimeError("abandoned")  # as wandb's own error, which is no ConnectionError

with open_loggers(BOTH, RunDir(Path({str(run_dir.path)!r})), total_steps=40) as logger:
    logger.log(record(1))
    wait_until(psutil.Process().children)
    wandb.Run.finish = die
    if {when!r} == "in the middle":
        try:
            die()
        except RuntimeError:
            pass
    logger.log(record(2))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert steps_of(history(stored(run_dir)[-1])) == [1, 2]


@pytest.mark.nightly
def test_signals_to_all_processes_of_a_training_cost_no_record(run_dir: RunDir) -> None:
    words = ["train.epochs=1000", "train.precision=fp32", "monitor.loggers=[jsonl,wandb]", "monitor.log_every=1"]
    command = [sys.executable, "-m", "jobs", "train", "single", *words, "--run-dir", str(run_dir.path.parent / "one")]
    run = RunDir(Path(command[-1]))
    with subprocess.Popen(command, cwd=PROJECT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}) as training:
        try:
            wait_until(lambda: run.metrics.exists() and len(read_metrics(run)) > 5)
            rank = psutil.Process(training.pid)
            wait_until(rank.children)  # its service, which is started beside the training
            everyone = [*rank.children(recursive=True), rank]
            for number in (signal.SIGUSR2, signal.SIGTERM):
                for process in everyone:
                    process.send_signal(number)
            assert training.wait(60) == 0
        finally:
            training.kill()
    assert read_events(run, "handed_back")
    assert steps_of(history(stored(run)[-1])) == steps_of(read_metrics(run))
