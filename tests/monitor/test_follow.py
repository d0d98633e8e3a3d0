import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.test_console import Terminal
from trainkit.common import jsonl
from trainkit.monitor import log_tail as module
from trainkit.monitor.log_tail import OutputTail, follow
from trainkit.run.events import Attempt, append_event
from trainkit.run.folder import RunDir
from trainkit.run.metrics import describe_names

STARTED = {
    "attempt": 0, "world_size": 4, "hosts": ["n1", "n1", "n2"], "device": "cpu", "precision": "fp32", "total_steps": 40
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    run_dir = RunDir.create(tmp_path / "ddp-0001", "seed: 0\n")
    append_event(run_dir, "submitted", executor="local", job_id="1")
    return run_dir


def record(run_dir: RunDir, step: int, split: str = "train", **values: Any) -> None:
    jsonl.append_jsonl(run_dir.metrics, {"time": 1.0, "step": step, "epoch": step / 20, "split": split, **values})


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_run_is_shown_until_it_has_finished(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        append_event(run_dir, "started", **STARTED)
        record(run_dir, 10, loss=1.5, images_per_sec=2100.0)
        record(run_dir, 40, "val", loss=0.25, acc1=98.5)
        append_event(run_dir, "ended", state="COMPLETED")

    thread = in_background(work)
    follow(run_dir, lambda: True)
    thread.join()
    assert capsys.readouterr().out.splitlines() == [
        "Attempt 0: 4 ranks on n1, n2, device cpu, precision fp32, 40 steps",
        "train  epoch   0.50  step 10/40  loss 1.5000  2,100 images/s",
        "val    epoch   2.00  step 40/40  loss 0.2500  acc1 98.50 %",
    ]


def test_what_a_run_wrote_before_it_died_is_still_shown(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def dies() -> bool:
        record(run_dir, 30, loss=0.5)
        return False

    following = in_background(lambda: follow(run_dir, dies))
    following.join(20)
    assert not following.is_alive(), "the job is gone without a word"
    assert "step 30" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("start", "shown"), [({}, ["by itself", "train  step 10  loss 1.5000"]), (STARTED, ["by itself"])]
)
def test_records_are_shown_beside_output_unless_loggers_print_them_there(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], start: dict[str, Any], shown: list[str]
) -> None:
    """Without facts of a start the script calls `trainkit.log`, with them `trainkit.rank`."""
    describe_names(run_dir, ("loss",), "loss")
    log = Attempt.begin(run_dir).logs / "rank-0.out"
    append_event(run_dir, "started", attempt=0, script=True, world_size=1)
    if start:
        append_event(run_dir, "started", **start)
    log.write_text("by itself\n")
    jsonl.append_jsonl(run_dir.metrics, {"time": 1.0, "step": 10, "split": "train", "loss": 1.5})
    follow(run_dir, lambda: False, OutputTail(run_dir, 0))
    assert capsys.readouterr().out.splitlines() == ["Attempt 0: 1 rank", *shown]


def attempt(number: int) -> tuple[str, dict[str, Any]]:
    return "started", {**STARTED, "attempt": number}


def told(number: int) -> str:
    return f"Attempt {number}: 4 ranks on n1, n2, device cpu, precision fp32, 40 steps"


def failed(number: int, error: str) -> tuple[str, dict[str, Any]]:
    return "failed", {"attempt": number, "rank": 3, "error": error}


def ended(number: int, state: str = "COMPLETED") -> tuple[str, dict[str, Any]]:
    return "ended", {"attempt": number, "state": state}


SKIPPED = {"step": 7, "scale_before": 65536.0, "scale_after": 32768.0, "parameter": "fc.weight"}


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ([attempt(0), failed(0, "bad label"), ended(0, "FAILED")], [told(0), "Failed on rank 3: bad label"]),
        ([attempt(0), ("handed_back", {"attempt": 0}), ("requeued", {}), attempt(1), ended(1)],
         [told(0), "Told to stop: saved.", "Requeued; continues from its last checkpoint.", told(1)]),
        ([attempt(0), failed(0, "killed"), ("requeued", {"attempt": 0, "in_place": True}), attempt(1), ended(1)],
         [told(0), "Failed on rank 3: killed", "Starts again in place; continues from its last checkpoint.", told(1)]),
        ([attempt(0), failed(0, "hangs"), ended(0, "FAILED"), attempt(1), ended(1)],
         [told(0), "Failed on rank 3: hangs", told(1)]),
        # An end that is none any more ends nothing, and one by a sweep is said.
        ([attempt(0), ended(0), ("prolonged", {"step": 40, "total_steps": 80}), attempt(1),
          ("pruned", {"attempt": 1, "step": 60, "total_steps": 80, "why": "it is behind"}), ended(1)],
         [told(0), "Prolonged: continues from step 40 to 80.", told(1), "Pruned after 60 of 80 steps: it is behind."]),
        # A script that calls trainkit.rank() begins twice, and may not know how many steps it will make.
        ([("started", {"attempt": 0, "script": True, "world_size": 4}), attempt(0),
          ("pruned", {"attempt": 0, "step": 60, "why": "it is behind"}), ended(0)],
         ["Attempt 0: 4 ranks", "Pruned after 60 steps: it is behind."]),
        # What ranks say that SLURM took for dead is not shown.
        ([attempt(1), failed(0, "Connection reset"), ended(0), failed(1, "bad label"), ended(1)],
         [told(1), "Failed on rank 3: bad label"]),
        # The failure of an earlier submission ends nothing.
        ([failed(0, "old"), ("submitted", {"executor": "local", "job_id": "2"}), attempt(1), ended(1)], [told(1)]),
        ([("skipped", SKIPPED), ("nonfinite", {"step": 8, "loss": "nan", "grad_norm": None, "samples": [1, 2]}),
          ("rolled_back", {"step": 5, "from_step": 8, "position": 9}), ended(0)],
         ["Overflow after step 7, skipping step: a gradient of fc.weight was not finite; loss scale 65536 -> 32768",
          "Step 8 was skipped: a gradient was not finite; loss nan",
          "Rolled back from step 8 to step 5; continues with other data."]),
    ],
    ids=["failed", "requeued", "in place", "started again", "prolonged", "a script", "dead", "earlier", "loss"],
)  # fmt: skip
def test_the_events_of_a_run_are_told_across_its_attempts(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], events: list[tuple[str, dict[str, Any]]], shown: list[str]
) -> None:
    for kind, facts in events:
        append_event(run_dir, kind, **facts)
    follow(run_dir, lambda: False)
    assert capsys.readouterr().out.splitlines() == shown


def test_a_line_that_is_still_being_written_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = module.RecordTail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\nnot json\n[3]\n')
    assert tail.read() == [{"step": 2}]


def test_on_a_terminal_a_bar_shows_loss_and_speed(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    append_event(run_dir, "started", **STARTED)
    record(run_dir, 20, loss=1.5, images_per_sec=2100.0)
    record(run_dir, 20, "val", loss=0.25, acc1=98.5)
    append_event(run_dir, "ended", state="COMPLETED")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    follow(run_dir, lambda: True)
    shown = terminal.getvalue()
    assert "step 20/40" in shown
    assert "loss 1.5000  2,100 images/s" in shown
    assert "val    epoch   1.00  step 20/40  loss 0.2500  acc1 98.50 %" in shown
