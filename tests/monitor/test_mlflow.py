"""MLflow's own client over its store of files, and over sockets that refuse or never answer."""

import importlib.util
import math
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import readme
from tests.monitor.conftest import recorded
from tests.runs import wait_until
from tests.shell import python
from trainkit.common.errors import RunFailedError, UserError
from trainkit.config.schema import Config
from trainkit.monitor import base as sender_module
from trainkit.monitor.base import open_loggers, sync
from trainkit.run.folder import RunDir
from trainkit.run.labels import say
from trainkit.run.metrics import read_metrics

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")

BOTH = Config.model_validate({"monitor": {"loggers": ["jsonl", "mlflow"]}, "seed": 7})
SECRET = "0123456789abcdef" * 2 + "deadbeef"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run folder, and a server for it: MLflow's own store in files, which it keeps for those who ask for it."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    names = "EXPERIMENT_NAME HTTP_REQUEST_TIMEOUT HTTP_REQUEST_MAX_RETRIES DISABLE_TELEMETRY"
    for name in (*names.split(), "SUPPRESS_PRINTING_URL_TO_STDOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "")  # so that it is as before afterwards
        monkeypatch.delenv(f"MLFLOW_{name}")
    return RunDir.create(tmp_path / "runs" / "ddp-0001", "seed: 0\n")


def record(step: int, split: str = "train", **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 1.0, "split": split, "loss": 1 / step, "acc1": 2.0 * step, **more}


def stored() -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient()
    return list(client.search_runs([item.experiment_id for item in client.search_experiments()]))


def history(run: Any, key: str) -> list[tuple[int, float]]:
    import mlflow

    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, key)
    return sorted((point.step, point.value) for point in points)


def test_a_requeued_run_is_one_run_with_each_recorded_point_once(run_dir: RunDir, tmp_path: Path) -> None:
    start = {"params": 1234, "world_size": 2, "precision": "bf16"}
    with open_loggers(BOTH, run_dir, total_steps=40, **start) as logger:  # type: ignore[arg-type]
        for step in (10, 20, 30):
            logger.log(record(step))
        logger.log(record(20, "val"))
    say(run_dir, tags=["paper", "seed+1"], notes=["warm-up too short"])
    with open_loggers(BOTH, run_dir, total_steps=40, resumed_step=20) as logger:  # it was killed after its checkpoint
        for step in (30, 40):
            logger.log(record(step))
        logger.log(record(40, "test"))
    (run,) = stored()
    for key, split in (("loss", "train"), ("acc1", "train"), ("loss", "val"), ("loss", "test")):
        assert history(run, f"{key}/{split}") == recorded(run_dir, key, split)
    assert (run.info.run_name, run.info.status) == ("ddp-0001", "FINISHED")
    assert (run.data.tags["tags"], run.data.tags["mlflow.note.content"]) == ("paper, seed+1", "warm-up too short")
    params = run.data.params
    assert (params["seed"], params["world_size"], params["params"]) == ("7", "2", "1234")
    assert params["train.precision"] == "bf16"
    assert "launch" not in " ".join(params)
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        assert SECRET.encode() not in file.read_bytes()


def test_runs_of_one_name_in_two_folders_are_two_runs(run_dir: RunDir, tmp_path: Path) -> None:
    for folder in (run_dir, RunDir.create(tmp_path / "elsewhere" / "ddp-0001", "seed: 0\n")):
        with open_loggers(BOTH, folder, total_steps=40) as logger:
            logger.log(record(10))
    assert len(stored()) == 2


def test_a_diverged_loss_is_not_a_number_and_a_failed_run_has_failed(run_dir: RunDir) -> None:
    with suppress(ZeroDivisionError), open_loggers(BOTH, run_dir, total_steps=40) as logger:
        logger.log(record(10) | {"loss": None})
        raise ZeroDivisionError
    (run,) = stored()
    ((step, value),) = history(run, "loss/train")
    assert (step, math.isnan(value), run.info.status) == (10, True, "FAILED")


def test_settings_of_a_prolonged_run_are_told_as_tags(run_dir: RunDir) -> None:
    longer = BOTH.model_copy(update={"train": BOTH.train.model_copy(update={"epochs": 99})})
    for config in (BOTH, longer):
        with open_loggers(config, run_dir, total_steps=40):
            pass
    (run,) = stored()
    assert (run.data.params["train.epochs"], run.data.tags["train.epochs"]) == (str(BOTH.train.epochs), "99")


def test_a_name_that_is_longer_than_mlflow_takes_is_cut(run_dir: RunDir) -> None:
    run = RunDir.create(run_dir.path.parent / ("x" * 255), "seed: 0\n")
    with open_loggers(BOTH, run, total_steps=40) as logger:
        logger.log(record(1))
    (kept,) = stored()
    assert kept.info.run_name == "x" * 250


@pytest.mark.parametrize("address", ["nonsense://me:word@host/x", "http://[bad", "/proc/nowhere"])
def test_a_store_that_cannot_be_opened_costs_the_logger_and_tells_sync(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with open_loggers(BOTH, run_dir, total_steps=40) as logger:
        logger.log(record(1))
    said = capsys.readouterr().err
    assert ("Logger 'mlflow' is off from now on" in said, "word" in said) == (True, False)
    with pytest.raises(UserError, match="MLflow cannot open its store") as caught:
        sync(run_dir, BOTH, {"total_steps": 40})
    assert "word" not in str(caught.value)


def test_what_was_not_sent_is_sent_by_the_next_attempt_and_by_sync(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl = Config.model_validate({"monitor": {"loggers": ["jsonl"]}})
    with open_loggers(jsonl, run_dir, total_steps=40) as logger:
        for step in (10, 20, 30):
            logger.log(record(step))
    with open_loggers(BOTH, run_dir, total_steps=40, resumed_step=20):
        pass
    (run,) = stored()
    assert [step for step, _ in history(run, "loss/train")] == [10, 20], "30 is made again"
    assert sync(run_dir, BOTH, {"total_steps": 40}) == ["mlflow: all records as ddp-0001 in trainkit"]
    (run,) = stored()
    assert history(run, "loss/train") == recorded(run_dir, "loss", "train")
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{refusing.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(RunFailedError, match="is not in MLflow yet"):
            sync(run_dir, BOTH, {"total_steps": 40})


def test_a_server_that_never_answers_holds_nothing_up(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sender_module.Sender.__init__, "__kwdefaults__", {"patience": 0.5})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begun = time.monotonic()
        with open_loggers(BOTH, run_dir, total_steps=40) as logger:
            for step in range(1, 1001):
                logger.log(record(step))
        assert time.monotonic() - begun < 8, "MLflow's own library takes some of it to load"
    assert "Logger 'mlflow' is off from now on: not everything was sent within" in capfd.readouterr().err
    assert len(read_metrics(run_dir)) == 1000


def test_a_server_that_refuses_is_said_once_and_training_goes_on(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://eve:s3cr-et@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    said = ""

    def is_off() -> bool:
        nonlocal said
        logger.log(record(2))
        said += capfd.readouterr().err
        return "Logger 'mlflow' is off" in said

    with open_loggers(BOTH, run_dir, total_steps=40) as logger:
        wait_until(is_off)
        logger.log(record(3))
    said += capfd.readouterr().err
    assert said.count("Logger 'mlflow' is off from now on:") == 1
    assert "s3cr-et" not in said
    assert [item["step"] for item in read_metrics(run_dir)] == [2, 3]
    with pytest.raises(RunFailedError) as error:
        sync(run_dir, BOTH, {"total_steps": 40})
    assert "s3cr-et" not in error.value.why


def test_without_a_server_it_is_refused_before_training(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    logger = open_loggers(BOTH, run_dir, total_steps=40)
    with pytest.raises(UserError, match="The logger mlflow has no server") as error, logger:
        pass
    assert "MLFLOW_TRACKING_URI" in error.value.fix


@pytest.mark.nightly
def test_the_command_of_the_page_puts_a_whole_training_into_mlflow(run_dir: RunDir) -> None:
    ((line,),) = readme.blocks("mlflow", readme.DOCS / "report.md", typed=True)
    folder = run_dir.path.parent / "whole"
    words = [*line.removeprefix("MLFLOW_TRACKING_URI=http://HOST:5000 trainkit ").split(), "--run-dir", str(folder)]
    ended = python("-m", "jobs", *words, PYTHONPATH=os.pathsep.join(sys.path))
    assert ended.returncode == 0, ended.stderr
    (run,) = stored()
    one = RunDir(folder)
    assert history(run, "loss/train") == recorded(one, "loss", "train") != []
    assert history(run, "acc1/test") == recorded(one, "acc1", "test") != []
    assert run.info.run_name == "whole"
