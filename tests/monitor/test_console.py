import io
import sys
from pathlib import Path

import pytest

from trainkit.config.schema import Config
from trainkit.monitor import console
from trainkit.monitor.base import Start
from trainkit.run.folder import RunDir

TRAIN = {"epoch": 0.5, "split": "train", "loss": 1.5, "acc1": 40.0, "lr": 1e-3, "images_per_sec": 2000.0}
VAL_LINE = "val    epoch   1.00  step 20/40  loss 1.4000  acc1 45.00 %  acc5 80.00 %"
VAL = {"step": 20, "epoch": 1.0, "split": "val", "loss": 1.4, "acc1": 45.0, "acc5": 80.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_the_time_to_go_follows_the_pace_of_this_attempt(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    logger = console.build(run_dir, Config(), Start(total_steps=1000, resumed_step=500))
    logger.log({**TRAIN, "step": 510, "time": 160.0})  # it was warming up
    logger.log({**TRAIN, "step": 610, "time": 170.0})
    first, second = capsys.readouterr().out.splitlines()
    assert "ETA" not in first
    assert second.endswith("ETA 39 s")


def test_on_a_terminal_there_is_a_bar_and_validation_stands_above_it(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    logger = console.build(run_dir, Config(), Start(total_steps=40))
    assert sys.stdout is terminal, "a debugger must find it as it was"
    logger.log({**TRAIN, "step": 10})
    logger.log(VAL)
    logger.close()
    assert "step 10/40" in terminal.getvalue()
    assert f"{VAL_LINE}\n" in terminal.getvalue()
    lines = Terminal()
    monkeypatch.setattr(sys, "stdout", lines)
    # A bar would be drawn over the prompt of a debugger.
    console.build(run_dir, Config.model_validate({"launch": {"executor": "debug"}}), Start(total_steps=40)).log(VAL)
    assert lines.getvalue() == f"{VAL_LINE}\n"
