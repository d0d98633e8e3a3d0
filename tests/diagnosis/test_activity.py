"""Records of a running job, and what looks wrong in them."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.runs import CONFIG
from trainkit.common import jsonl
from trainkit.diagnosis.activity import activity_of
from trainkit.run.folder import RunDir

NOW = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def training(tmp_path: Path) -> RunDir:
    """Its second attempt began ten minutes ago on two nodes, and has made a step every two seconds until now."""
    run = RunDir.create(tmp_path / "ddp-0001", CONFIG)
    for attempt in (0, 1):
        run.attempt_logs(attempt).mkdir()
    began(run, 600, hosts=["n1", "n2"])
    for step in range(1, 31):
        record(run, 60 - 2 * step, step)
    return run


def began(run: RunDir, ago: float, attempt: int = 1, **facts: Any) -> None:
    event = {"time": NOW - ago, "event": "started", "attempt": attempt, "total_steps": 330, **facts}
    jsonl.append_jsonl(run.events, event)


def record(run: RunDir, ago: float, step: int) -> None:
    written = {"time": NOW - ago, "split": "train", "step": step, "epoch": step / 10, "loss": 1.0}
    jsonl.append_jsonl(run.metrics, written)


def sample(run: RunDir, host: str, ago: float, *used: float) -> None:
    gpus = {"gpus": [{"index": index, "util_percent": value} for index, value in enumerate(used)]} if used else {}
    jsonl.append_jsonl(run.hardware(host), {"time": NOW - ago, "cpu_percent": 50.0, **gpus})


def test_it_says_what_it_does_and_at_what_pace(training: RunDir) -> None:
    words = "It trains: step 30 of 330 (epoch 3.0), attempt 1, 2 s a step, the last record 3 s ago."
    assert str(activity_of(training, NOW + 3)) == words
    assert str(activity_of(training, NOW + 3, ends="It ends soon.")) == f"{words} It ends soon."


def test_what_an_earlier_attempt_did_is_not_taken_for_this_ones_work(training: RunDir) -> None:
    began(training, -1)
    assert str(activity_of(training, NOW + 41)) == "Attempt 1 began 40 s ago; no step of it is recorded yet."
    training.attempt_logs(2).mkdir()
    assert str(activity_of(training, NOW)) == "Its ranks start, and have not met yet."


def test_records_that_do_not_come_any_more_smell(training: RunDir) -> None:
    assert "why" not in str(activity_of(training, NOW + 59))
    lines = str(activity_of(training, NOW + 300)).splitlines()
    assert lines[1] == "  why: metrics.jsonl  nothing for 5 min; of late 2 s passed between two records at most"
    assert lines[2] == f"  fix: See what its ranks do: `python -m jobs.logs {training.path} --rank all`"


def test_a_long_validation_is_no_silence(training: RunDir) -> None:
    record(training, -200, 31)
    assert activity_of(training, NOW + 1000).smells == ()


def test_an_attempt_without_a_first_step_smells_after_ten_minutes(training: RunDir) -> None:
    began(training, -1)
    assert activity_of(training, NOW + 600).smells == ()
    assert "no step in the 11 min since the attempt began" in str(activity_of(training, NOW + 661))
    record(training, -1, 1)
    assert activity_of(training, NOW + 600).smells == (), "how long a step takes nobody knows yet"
    assert "nothing for 11 min" in str(activity_of(training, NOW + 661))


def test_gpus_that_do_nothing_are_named(training: RunDir) -> None:
    for ago in range(30, -1, -5):
        sample(training, "n1", ago, 97.0, 0.0, 0.0)
        sample(training, "n2", ago, 97.0, 97.0 if ago == 10 else 0.0, 40.0)
    (smell,) = activity_of(training, NOW).smells
    assert smell.where == "system-n1.jsonl"
    assert smell.text == "GPUs 1, 2 of n1 idle for 25 s: the ranks wait, for data or for others"


def test_a_node_that_says_nothing_any_more_is_named(training: RunDir) -> None:
    sample(training, "n1", 2)
    sample(training, "n2", 240)
    (smell,) = activity_of(training, NOW).smells
    assert smell.text == "nothing from n2 for 4 min: the node or its file system hangs"


def test_records_that_nobody_could_have_written_are_passed_over(training: RunDir) -> None:
    with training.hardware("n1").open("a") as file:
        file.write(
            '[]\n{"time": "x"}\n{"time": NaN}\n' + 6 * f'{{"time": {NOW}, "gpus": [3, {{"index": "a"}}, {{}}]}}\n'
        )
    with training.metrics.open("a") as file:
        file.write('{"time": 1e300, "step": -1}\nnot JSON\n{"step"')
    assert activity_of(training, NOW).smells == ()


def test_a_rank_of_this_attempt_for_which_all_others_wait_is_named(training: RunDir) -> None:
    for attempt, rank, times in ((0, 1, 9.0), (1, 3, 2.0), (1, 3, 2.5)):
        event = {"event": "straggler", "attempt": attempt, "rank": rank, "host": f"n{rank}", "times": times, "step": 9}
        jsonl.append_jsonl(training.events, {"time": NOW - 300, **event})
    (smell,) = activity_of(training, NOW).smells
    assert smell.text == "rank 3 on n3 needs 2.5 times as long as the others, who wait for it"
