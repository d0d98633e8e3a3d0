from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from jobs.status import Shown, losses_of_late, sparkline, view
from trainkit import fileio
from trainkit.run.events import RunHistory
from trainkit.run.folder import RunDir
from trainkit.run.metrics import progress_of
from trainkit.schedulers.base import JobState


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "ddp-0001", "seed: 0\n")
    for step, loss in enumerate((2.0, 1.5, 1.0, None, 0.25), 1):
        record = {"step": 10 * step, "epoch": step / 2, "split": "train", "loss": loss, "images_per_sec": 1234.5}
        fileio.append_jsonl(run.metrics, record)
    return run


def drawn(run: RunDir, state: str, table: list[str], height: int = 24) -> list[str]:
    item = Shown(run, "[red]ddp", JobState(state), RunHistory(started={"total_steps": 100}), progress_of(run))
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(view(table, [item], height))
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


def test_a_run_that_trains_has_a_bar_its_loss_of_late_and_its_speed(run: RunDir) -> None:
    *table, _, bar = drawn(run, "RUNNING", ["run  state", "[red]ddp  RUNNING"])
    assert [line.strip() for line in table] == ["run  state", "[red]ddp  RUNNING"]
    assert bar.startswith("[red]ddp"), "a name is no markup"
    assert [word for word in bar.split() if not word.startswith("━")][1:] == [
        "50/100", "loss", "0.2500", "█▆▄x▁", "1,234", "images/s",
    ]  # fmt: skip


def test_a_run_that_does_not_train_has_none(run: RunDir) -> None:
    assert [line.strip() for line in drawn(run, "COMPLETED", ["run", "x"])] == ["run", "x"]


def test_of_a_list_that_is_too_long_the_head_and_the_newest_are_shown(run: RunDir) -> None:
    rows = ["run", *(f"ddp-{number:04}" for number in range(50))]
    shown = [line.strip() for line in drawn(run, "COMPLETED", rows, height=10)]
    assert (shown[0], shown[1], shown[-1], len(shown)) == ("run", "ddp-0044", "ddp-0049", 7)


def test_losses_of_late_are_those_of_training(run: RunDir) -> None:
    fileio.append_jsonl(run.metrics, {"step": 50, "split": "val", "loss": 9.0})
    assert losses_of_late(run) == [2.0, 1.5, 1.0, None, 0.25]
    assert losses_of_late(RunDir(run.path / "none")) == []


@pytest.mark.parametrize(("values", "text"), [([], ""), ([None, None], "xx"), ([3.0, 3.0], "▁▁"), ([0.0, 7.0], "▁█")])
def test_a_line_of_any_values(values: list[float | None], text: str) -> None:
    assert sparkline(values) == text
