"""What jobs.why says of a job that runs, from its records."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from trainkit import fileio
from trainkit.config.loading import load, to_yaml
from trainkit.diagnosis.live import course_of
from trainkit.run.folder import RunDir

NOW = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Its second attempt began ten minutes ago on two nodes, and has made a step every two seconds until now."""
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    for attempt in (0, 1):
        run.attempt_logs(attempt).mkdir()
    began(run, 600, hosts=["n1", "n2"])
    for step in range(1, 31):
        record(run, 60 - 2 * step, step)
    return run


def began(run: RunDir, ago: float, attempt: int = 1, **facts: Any) -> None:
    fileio.append_jsonl(
        run.events, {"time": NOW - ago, "event": "started", "attempt": attempt, "total_steps": 330, **facts}
    )


def record(run: RunDir, ago: float, step: int) -> None:
    fileio.append_jsonl(
        run.metrics, {"time": NOW - ago, "split": "train", "step": step, "epoch": step / 10, "loss": 1.0}
    )


def sample(run: RunDir, host: str, ago: float, *used: float) -> None:
    gpus = {"gpus": [{"index": index, "util_percent": value} for index, value in enumerate(used)]} if used else {}
    fileio.append_jsonl(run.hardware(host), {"time": NOW - ago, "cpu_percent": 50.0, **gpus})


def test_it_says_what_it_does_and_at_what_pace(run: RunDir) -> None:
    words = "It trains: step 30 of 330 (epoch 3.0), attempt 1, 2 s a step, the last record 3 s ago."
    assert str(course_of(run, NOW + 3)) == words
    assert str(course_of(run, NOW + 3, ends="It ends soon.")) == f"{words} It ends soon."


def test_what_an_earlier_attempt_did_is_not_taken_for_this_ones_work(run: RunDir) -> None:
    began(run, -1)
    assert str(course_of(run, NOW + 41)) == "Attempt 1 began 40 s ago; no step of it is recorded yet."
    run.attempt_logs(2).mkdir()
    assert str(course_of(run, NOW)) == "Its ranks start, and have not met yet."


def test_records_that_do_not_come_any_more_smell(run: RunDir) -> None:
    assert "why" not in str(course_of(run, NOW + 59))
    lines = str(course_of(run, NOW + 300)).splitlines()
    assert lines[1] == "  why: metrics.jsonl  nothing for 5 min; of late 2 s passed between two records at most"
    assert lines[2] == f"  fix: See what its ranks do: `python -m jobs.logs {run.path} --rank all`"


def test_a_long_validation_is_no_silence(run: RunDir) -> None:
    record(run, -200, 31)
    assert course_of(run, NOW + 1000).smells == ()


def test_an_attempt_without_a_first_step_smells_after_ten_minutes(run: RunDir) -> None:
    began(run, -1)
    assert course_of(run, NOW + 600).smells == ()
    assert "no step in the 11 min since the attempt began" in str(course_of(run, NOW + 661))
    record(run, -1, 1)
    assert course_of(run, NOW + 600).smells == (), "how long a step takes nobody knows yet"
    assert "nothing for 11 min" in str(course_of(run, NOW + 661))


def test_gpus_that_do_nothing_are_named(run: RunDir) -> None:
    for ago in range(30, -1, -5):
        sample(run, "n1", ago, 97.0, 0.0, 0.0)
        sample(run, "n2", ago, 97.0, 97.0 if ago == 10 else 0.0, 40.0)
    (smell,) = course_of(run, NOW).smells
    assert (smell.where, smell.text) == (
        "system-n1.jsonl", "GPUs 1, 2 of n1 idle for 25 s: the ranks wait, for data or for others",
    )  # fmt: skip


def test_a_node_that_says_nothing_any_more_is_named(run: RunDir) -> None:
    sample(run, "n1", 2)
    sample(run, "n2", 240)
    assert [smell.text for smell in course_of(run, NOW).smells] == [
        "nothing from n2 for 4 min: the node or its file system hangs"
    ]


def test_records_that_nobody_could_have_written_are_passed_over(run: RunDir) -> None:
    with run.hardware("n1").open("a") as file:
        file.write(
            '[]\n{"time": "x"}\n{"time": NaN}\n' + 6 * f'{{"time": {NOW}, "gpus": [3, {{"index": "a"}}, {{}}]}}\n'
        )
    with run.metrics.open("a") as file:
        file.write('{"time": 1e300, "step": -1}\nnot JSON\n{"step"')
    assert course_of(run, NOW).smells == ()


def test_a_rank_of_this_attempt_for_which_all_others_wait_is_named(run: RunDir) -> None:
    for attempt, rank, times in ((0, 1, 9.0), (1, 3, 2.0), (1, 3, 2.5)):
        event = {"event": "straggler", "attempt": attempt, "rank": rank, "host": f"n{rank}", "times": times, "step": 9}
        fileio.append_jsonl(run.events, {"time": NOW - 300, **event})
    (smell,) = course_of(run, NOW).smells
    assert smell.text == "rank 3 on n3 needs 2.5 times as long as the others, who wait for it"
