import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from trainkit.common import fileio
from trainkit.common.errors import RunFailedError, UserError
from trainkit.config import plugins
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.config.task_metrics import metrics_of
from trainkit.launch.preparation import check
from trainkit.monitor import log_tail
from trainkit.monitor.base import Sender, open_loggers, run_id
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

TRAIN = {"step": 10, "epoch": 0.5, "split": "train", "loss": 1.5, "acc1": 40.0, "lr": 1e-3, "images_per_sec": 2000.0}

METRICS = metrics_of("classification")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "ddp-0001", "seed: 0\n")


def config(*loggers: str) -> Config:
    return Config.model_validate({"monitor": {"loggers": loggers}})


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put loggers of the test's own in the place of named ones."""
    real = plugins.load

    def put(**loggers: Any) -> None:
        def load(package: str, name: str) -> Any:
            if name not in loggers:
                return real(package, name)
            if isinstance(loggers[name], Exception):
                raise loggers[name]
            return lambda run_dir, config, start: loggers[name]

        monkeypatch.setattr(plugins, "load", load)

    return put


def test_the_main_rank_alone_writes_and_a_record_gets_the_time(run_dir: RunDir) -> None:
    with open_loggers(config("jsonl", "console"), run_dir, total_steps=20, is_main=False) as logger:
        logger.log(TRAIN)
    assert not run_dir.metrics.exists()
    with open_loggers(config("jsonl"), run_dir, total_steps=20) as logger:
        logger.log(TRAIN)
        logger.log({**TRAIN, "step": 20, "time": 5.0})
    first, second = read_metrics(run_dir)
    assert (first["time"] > 1e9, second["time"]) == (True, 5.0)


def test_a_logger_that_fails_is_reported_once_and_the_others_go_on(
    run_dir: RunDir, use: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Mock(log=Mock(side_effect=[None, OSError(28, "No space left on device")]))
    use(wandb=broken, tensorboard=ImportError("No module named 'tensorboard'"))
    with open_loggers(config("tensorboard", "wandb", "jsonl"), run_dir, total_steps=40) as logger:
        for step in (10, 20, 30, 40):
            logger.log({**TRAIN, "step": step})
    assert [record["step"] for record in read_metrics(run_dir)] == [10, 20, 30, 40]
    assert capsys.readouterr().err.splitlines() == [
        "Logger 'tensorboard' is off from now on: No module named 'tensorboard'",
        "Logger 'wandb' is off from now on: [Errno 28] No space left on device",
    ]
    broken.close.assert_not_called()


class _Slow:
    """A client whose library takes long to load."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.took: list[int] = []
        self.failed: bool | None = None

    def begin(self) -> set[tuple[str, int]]:
        self.is_open.wait(60)
        return set()

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.took += [record["step"] for record in records]

    def end(self, *, failed: bool) -> None:
        self.failed = failed


def test_a_slow_client_holds_no_update_up_and_misses_no_record(run_dir: RunDir, use: Any) -> None:
    client = _Slow()
    use(wandb=Sender(client, run_dir, until=None))
    with suppress(ZeroDivisionError), open_loggers(config("wandb", "jsonl"), run_dir, total_steps=40) as logger:
        for step in (10, 20, 20, 30):  # 20 twice: a training that was rolled back
            logger.log({**TRAIN, "step": step})
        assert client.took == []
        client.is_open.set()
        raise ZeroDivisionError
    assert (client.took, client.failed) == ([10, 20, 20, 30], True)


def test_no_process_is_forked_while_a_client_imports_its_library(run_dir: RunDir) -> None:
    client = _Slow()
    sender = Sender(client, run_dir, until=None)
    sender.log(TRAIN)
    threading.Timer(0.5, client.is_open.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if client.is_open.is_set() else 1)  # else it would have half of a library, and its locks
    assert os.waitpid(child, 0)[1] == 0
    sender.close()
    assert client.took == [10]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_record_that_cannot_be_written_ends_the_run_and_closes_the_others(
    run_dir: RunDir, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Mock()
    use(console=other)
    monkeypatch.setattr(fileio, "append", lambda file, within: FileIO("/dev/full", "r+"))
    with (
        pytest.raises(RunFailedError, match=r"Cannot write .*metrics\.jsonl") as caught,
        open_loggers(config("jsonl", "console"), run_dir, total_steps=20) as logger,
    ):
        logger.log(TRAIN)
    assert "No space left on device" in caught.value.why
    assert "jobs.resume" in caught.value.fix
    other.close.assert_called_once_with()


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_logger_without_its_package_says_which_extra_brings_it(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    wanted = config("jsonl", name)
    with pytest.raises(UserError, match=f"The logger {name} needs {name}") as error:
        check(load("ddp", [f"monitor.loggers=[jsonl,{name}]"]))
    assert error.value.fix == f'pip install "trainkit-vision[{name}]"'
    with pytest.raises(UserError, match=f"needs {name}"), open_loggers(wanted, run_dir, total_steps=20):
        pass
    check(load("ddp", [f"monitor.loggers=[jsonl,{name}]", "launch.setup=[module load mine]"]))  # it may be there


def test_a_run_of_a_sweep_is_known_by_the_name_of_its_sweep(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "hunt" / "0")
    run.path.parent.mkdir()
    (run.path.parent / "sweep.json").write_text("[]")
    assert run_id(run)[:-8] == "hunt-0-"
    assert run_id(RunDir(tmp_path / "ddp-0001"))[:-8] == "ddp-0001-"


def test_the_id_of_a_run_is_one_for_every_service(tmp_path: Path) -> None:
    odd = RunDir(tmp_path / "a#b,c:'d'?")
    assert run_id(odd)[:-8] == "a_b_c__d__-"
    assert len(run_id(RunDir(tmp_path / ("x" * 200)))) == 128
    assert run_id(RunDir(tmp_path / "a_b,c:'d'?")) != run_id(odd)


def test_every_logger_gets_every_record_once_it_is_written(run_dir: RunDir, use: Any) -> None:
    seen: list[tuple[int, int]] = []

    def log(record: Mapping[str, Any]) -> None:
        seen.append((record["step"], len(read_metrics(run_dir))))

    use(console=Mock(log=log), wandb=Mock(log=log))
    with open_loggers(config("console", "wandb", "jsonl"), run_dir, total_steps=20) as logger:
        logger.log(TRAIN)
    assert seen == [(10, 1)] * 2


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {"step": 260, "epoch": 3.25, "split": "train", "loss": 0.43125, "acc1": 87.5, "acc5": 99.0, "lr": 1.9e-3,
             "images_per_sec": 2104.2},
            "train  epoch   3.25  step  260/1600  loss 0.4313  acc1 87.50 %  lr 1.90e-03  2,104 images/s  ETA 12 s",
        ),
        ({"step": 1, "split": "train", "loss": None}, "train  step    1/1600  loss nan  ETA 12 s"),
        ({"step": 1, "split": "val", "psnr": 30.5, "seconds_x": 1.0}, "val    step    1/1600  psnr 30.5000  ETA 12 s"),
    ],
)  # fmt: skip
def test_a_record_is_one_line_with_units(record: dict[str, Any], line: str) -> None:
    assert log_tail.record_line(record, METRICS, 1600, 12) == line
