"""The records of a run: read with types, thinned, and what they say of its progress, its end and its divergence."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainkit.common import jsonl
from trainkit.config.task_metrics import LOSS, Metric, TaskMetrics, metrics_of
from trainkit.run import contributions, metrics, run_progress
from trainkit.run.folder import RunDir
from trainkit.run.run_progress import Forecast

IMAGES = metrics_of("classification")


def record(run: RunDir, *records: dict[str, Any]) -> None:
    for each in records:
        jsonl.append_jsonl(run.metrics, {"split": "train", "step": 1, **each})


def test_records_are_in_order_of_step_and_the_newer_one_of_a_step_counts(run: RunDir) -> None:
    assert metrics.read_metrics(run) == []
    record(run, {"step": 20}, {"loss": 3.0}, {"loss": 2.0, "new": "x"}, {"split": "val"}, {"split": "test"})
    assert metrics.read_metrics(run, "train") == [
        {"split": "train", "step": 1, "loss": 2.0, "new": "x"}, {"split": "train", "step": 20}
    ]  # fmt: skip
    assert metrics.read_metrics(run, "val") == [{"split": "val", "step": 1}]
    assert len(metrics.read_metrics(run)) == 4


def test_a_line_without_a_split_and_a_step_is_passed_over(run: RunDir) -> None:
    for odd in ({}, {"split": "train"}, {"step": 1}, {"split": "train", "step": "x"}):
        jsonl.append_jsonl(run.metrics, odd)
    assert metrics.read_metrics(run) == []


def huge(run: RunDir, records: int, validate_every: int = 1000) -> None:
    with run.metrics.open("a") as file:
        for step in range(1, records + 1):
            file.write(json.dumps({"step": step, "split": "train", "loss": 1.0 / step}) + "\n")
            if step % validate_every == 0:
                file.write(json.dumps({"step": step, "split": "val", "acc1": 50.0}) + "\n")


def test_of_an_enormous_file_few_train_records_are_read_and_all_others(run: RunDir) -> None:
    huge(run, 10_050)
    records, every, _ = metrics.read_thinned(run, most=200)
    steps = [record["step"] for record in records if record["split"] == "train"]
    assert 45 <= every <= 55
    assert 170 <= len(steps) <= 230
    assert steps[-1] == 10_050, "the last is among them"
    assert [record["step"] for record in records if record["split"] == "val"] == [*range(1000, 10_001, 1000)]
    with run.metrics.open("a") as file:
        file.write('{"step": 10051, "spl')
    assert metrics.read_thinned(run, most=200).records[-1]["step"] == 10_050, "also while the next one is written"


def test_a_file_of_usual_size_is_read_whole(run: RunDir) -> None:
    huge(run, 300, 100)
    with run.metrics.open("a") as file:
        file.write('{"step": 301, "spl')
    assert metrics.read_thinned(run) == (metrics.read_metrics(run), 1, [])


def test_what_a_restart_has_done_again_is_not_drawn_twice(run: RunDir) -> None:
    huge(run, 5000)
    huge(run, 3000)  # a second attempt, from the beginning
    records, _, outliers = metrics.read_thinned(run, most=100)
    assert max(record["step"] for record in outliers) <= 3000
    assert max(record["step"] for record in records) == 3000
    assert [record["step"] for record in records if record["split"] == "val"] == [1000, 2000, 3000]


@pytest.mark.parametrize("without", ["", '{"step": 5, "split": "val", "acc1": 50.0}\n', '{"step": 5, "split": "tr\n'])
def test_a_line_that_stands_out_of_an_enormous_file_is_an_outlier(run: RunDir, without: str) -> None:
    """Also where not every line has a loss."""
    odd = {1234: "1000000000.0", 1235: "1e-09", 4321: "null", 4322: "null", 7777: "NaN", 8888: "1e999"}
    lines = [f'{{"step": {step}, "split": "train", "loss": {odd.get(step, 0.5)}}}\n' for step in range(10_000)]
    run.metrics.write_text("".join([*lines[:5000], without, *lines[5000:]]))
    found = metrics.read_thinned(run, most=100)
    told = {record["step"]: record.get("loss") for record in [*found.records, *found.outliers]}
    assert {step: told[step] for step in (1234, 1235, 4321, 7777)} == {1234: 1e9, 1235: 1e-9, 4321: None, 7777: None}
    assert told[8888] is None, "of any size that JSON has"
    few = {record["step"] for record in found.outliers}
    assert len(few) < 50
    assert not few & {record["step"] for record in found.records if record["split"] == "train"}
    assert len(found.records) < 120, "each of which stands for as many as before"


def test_a_validation_whose_loss_was_not_finite_is_never_the_best_one() -> None:
    lost = {"split": "val", "step": 1, "acc1": 90.0, "loss": None}
    good = [{"split": "val", "step": step, "acc1": 10.0 * step, "loss": 2.0} for step in (2, 3)]
    assert metrics.best_of([lost, *good], 2, IMAGES) is good[0]
    assert metrics.best_of([lost, *good], None, IMAGES) is good[1]
    assert metrics.best_of([lost], 1, IMAGES) is None


def test_the_newest_evaluation_of_the_best_weights_counts(run: RunDir) -> None:
    assert metrics.best_evaluation(run) is None
    own = {"split": "test", "step": 3, "checkpoint": "best", "settings": []}
    for acc1, other in (
        (1.0, {}), (2.0, {}), (3.0, {"split": "val"}), (4.0, {"checkpoint": "latest"}), (5.0, {"settings": ["a.b=1"]})
    ):  # fmt: skip
        jsonl.append_jsonl(run.evaluations, {**own, "acc1": acc1, **other})
    assert (metrics.best_evaluation(run) or {})["acc1"] == 2.0


REGRESSION = TaskMetrics("mae", {"loss": LOSS, "mae": Metric("years", False, "Mean absolute error")})


def test_a_run_describes_its_metrics_and_an_older_one_classifies(run: RunDir) -> None:
    found = metrics.task_metrics(run)
    assert (found.headline, list(found.metrics)) == ("acc1", ["loss", "acc1", "acc5"])
    assert found.metrics["acc5"] == Metric("%", True, "Top-5 accuracy")
    metrics.describe(run, REGRESSION)
    assert metrics.task_metrics(run) == REGRESSION


@pytest.mark.parametrize(
    "content", ["", "[]", '{"headline": ["acc1"], "metrics": {}}', '{"headline": "x", "metrics": {"x": 1}}']
)
def test_a_damaged_description_is_passed_over(run: RunDir, content: str) -> None:
    run.task.write_text(content)
    assert metrics.task_metrics(run).headline == "acc1"


def test_what_a_stranger_describes_is_one_line_each_and_bounded(run: RunDir) -> None:
    about = {"unit": "\x1b[2J" * 50, "label": "two\nlines", "higher_is_better": "yes"}
    named = {f"m{number}": about for number in range(1000)} | {"<script>": about}
    run.task.write_text(json.dumps({"headline": "m0", "metrics": named}))
    found = metrics.task_metrics(run)
    assert len(found.metrics) <= 51
    assert found.metrics["m0"].label == "two lines"
    assert "\x1b" not in found.metrics["m0"].unit
    assert len(found.metrics["m0"].unit) < 50


def test_of_errors_the_lowest_is_the_best_and_one_over_100_is_no_mistake(run: RunDir) -> None:
    val = [{"split": "val", "step": step, "mae": mae} for step, mae in ((1, 3.0), (2, 1.0), (3, 2.0))]
    assert metrics.best_of(val, None, REGRESSION) == val[1]
    metrics.describe(run, REGRESSION)
    record(run, {"split": "val", "mae": 250.0, "loss": "low"})
    assert metrics.read_metrics(run) == [{"split": "val", "step": 1, "mae": 250.0}]


def test_the_newest_records_count_and_a_torn_line_does_not(run: RunDir) -> None:
    assert run_progress.progress_of(run) == run_progress.RunProgress()
    run.metrics.touch()
    assert run_progress.progress_of(run, pace_since=0.0) == run_progress.RunProgress()
    # After a restart, and after `evaluate` has measured the best weights.
    record(run, {"split": "val", "step": 20}, {"step": 90}, {"step": 30, "epoch": 3.0}, {"split": "test", "step": 50})
    with run.metrics.open("a") as file:
        file.write('{"split": "val", "step": 40')
    found = run_progress.progress_of(run)
    assert (found.step, found.val["step"], found.last["epoch"]) == (30, 20, 3.0)


def test_a_validation_long_ago_is_found(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_progress, "TAIL_BYTES", 100)
    record(run, {"split": "val", "step": 0, "acc1": 10.0}, *({"step": step, "loss": 1.0} for step in range(100)))
    assert run_progress.progress_of(run).val["acc1"] == 10.0


def test_the_pace_is_that_of_the_newest_attempt(run: RunDir) -> None:
    times = ((0.0, 10), (1000.0, 20), (2000.0, 20), (2010.0, 25), (2030.0, 30))
    record(run, *({"time": time, "step": step} for time, step in times))
    found = run_progress.progress_of(run, pace_since=1999.0)
    assert [found.seconds_per_step, found.seconds_to(130), found.seconds_to(20)] == [3.0, 300.0, 0.0]
    assert found.seconds_to(None) is None
    assert [run_progress.progress_of(run, pace_since=at).seconds_per_step for at in (2030.0, 9999.0, None)] == [
        None
    ] * 3


def attempts(*times: tuple[float, float | None, str]) -> list[dict[str, Any]]:
    """(started, told to stop, by which signal)."""
    events = []
    for begun, ended, signal in times:
        events.append({"time": begun, "event": "started"})
        if ended is not None:
            events.append({"time": ended, "event": "handed_back", "signals": [signal]})
    return events


USR2 = "SIGUSR2"


@pytest.mark.parametrize(
    ("events", "training", "now", "limit", "runs", "expected"),
    [
        (attempts((0, None, "")), 90, 10, 100, True, Forecast(90, 0, None)),
        (attempts((0, None, "")), 91, 10, 100, True, Forecast(91, 1, None)),
        (attempts((0, None, "")), 500, 10, math.inf, True, Forecast(500, 0, None)),
        # Its restart has cost 20 s.
        (attempts((0, 80, USR2), (100, None, "")), 160, 110, 100, True, Forecast(180, 1, 20)),
        # Of a template nobody knows the limit but by what has been.
        (attempts((0, 80, USR2), (100, 180, USR2), (200, None, "")), 160, 210, math.inf, True, Forecast(200, 2, 20)),
        (attempts((0, 80, USR2), (100, None, "")), 160, 110, math.inf, True, Forecast(160, 0, 20)),
        # A preemption says nothing of the time limit.
        (attempts((0, 5, USR2), (15, None, "")), 150, 15, 100, True, Forecast(160, 1, 10)),
        # In the queue: 15 s of the usual 20 are still to wait.
        (attempts((0, 80, USR2), (100, 180, USR2)), 70, 185, 100, False, Forecast(85, 1, 20)),
    ],
)  # fmt: skip
def test_each_further_attempt_is_taken_to_cost_what_those_before_have_cost(
    events: list[dict[str, Any]], training: float, now: float, limit: float, runs: bool, expected: Forecast
) -> None:
    assert run_progress.forecast(events, training, now=now, attempt_seconds=limit, runs=runs) == expected


def event(kind: str, step: int, **more: Any) -> dict[str, Any]:
    return {"event": kind, "step": step, **more}


@pytest.mark.parametrize(
    ("events", "losses", "steps", "words", "diverged"),
    [
        ([event("started", 0), event("saved", 20)], (2.3, 1.1), 20, "", False),
        (
            [event("started", 0), *(event("nonfinite", step) for step in range(3, 41))], (2.3, None, None, None), 40,
            "loss nan from step 20, 38 of 40 updates skipped", True,
        ),
        ([event("nonfinite", 12)], (2.3, None, 1.2), 30, "1 of 30 updates skipped", False),
        ([{"event": "skipped"}, {"event": "nonfinite", "step": "3"}, event("else", 1)], (), 5, "", False),
        # An update that fp16 skips is no step, and was tried all the same.
        ([event("skipped", 0), event("skipped", 0), event("skipped", 7)], (2.3,), 10, "3 of 13 updates skipped", False),
        # The last of too many skips is told twice.
        ([*[event("skipped", 1)] * 50, event("nonfinite", 1)], (), 1, "50 of 51 updates skipped", True),
        # Done again after a restart.
        (
            [event("nonfinite", 4), event("nonfinite", 9), event("started", 5), event("nonfinite", 9)], (2.3,), 10,
            "2 of 10 updates skipped", False,
        ),
        (
            [*(event("nonfinite", step) for step in (8, 9, 10)), event("rolled_back", 5, from_step=10)], (2.3, 1.0), 20,
            "3 of 25 updates skipped, rolled back 1 time", False,
        ),
    ],
    ids=["none", "nan", "the loss is back", "odd events", "fp16", "told twice", "restart", "rollback"],
)  # fmt: skip
def test_setbacks_are_counted_once_and_most_updates_lost_is_a_divergence(
    events: list[dict[str, Any]], losses: tuple[float | None, ...], steps: int, words: str, diverged: bool
) -> None:
    train = [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses, 1)]
    setbacks = run_progress.setbacks_of(events, train, steps)
    assert (setbacks.in_words(), setbacks.diverged) == (words, diverged)


def test_updates_that_were_saved_and_not_recorded_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record(run, *({"step": step, "loss": loss} for step, loss in enumerate((2.3, None, None), start=1)))
    for step in (2, 3, 4):
        jsonl.append_jsonl(run.events, {"event": "nonfinite", "step": step})
    jsonl.append_jsonl(run.events, {"event": "saved", "step": 4})
    jsonl.append_jsonl(run.events, {"event": "saved", "step": None})  # as a stranger may have written it
    assert run_progress.divergence_of(run) == "loss nan from step 2, 3 of 4 updates skipped"


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (
            [
                [contributions.Counted("anna", 100, 5), contributions.Counted("bo", 300, 7)],
                [contributions.Counted("anna", 500, 5)],
            ],
            [contributions.Contribution("anna", 2, 600, 120.0, 10), contributions.Contribution("bo", 1, 300, 60.0, 7)],
        ),
        # Two peers of one name have one round and twice the hours.
        (
            [[contributions.Counted("anna", 100), contributions.Counted("anna", 50)]],
            [contributions.Contribution("anna", 1, 150, 120.0)],
        ),
        *(([[contributions.Counted("anna", weight)]], []) for weight in (0, -5, float("nan"), float("inf"), 1e300)),
        (
            [[contributions.Counted(str(number), 1) for number in range(contributions.MOST_NAMES + 50)], []],
            [
                contributions.Contribution(contributions.OTHERS, 1, 50, 3000.0),
                contributions.Contribution("0", 1, 1, 60.0),
            ],
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_contributions_add_up_by_name_best_first_over_restarts(
    run: RunDir, rounds: list[list[contributions.Counted]], expected: list[contributions.Contribution]
) -> None:
    for counted in rounds:
        ledger = contributions.Contributions.of(run)
        ledger.add(60.0, counted)
        ledger.write(run)
    assert contributions.Contributions.of(run).best_first()[:2] == expected


@pytest.mark.parametrize("text", ["", "{", "[]", '{"contributions": 3}', '{"contributions": [3, {"name": "x"}]}'])
def test_a_broken_file_of_contributions_is_none(run: RunDir, text: str) -> None:
    run.contributions.write_text(text)
    assert contributions.Contributions.of(run).best_first() == []


def test_names_of_contributors_are_plain_text_and_of_bounded_length() -> None:
    ledger = contributions.Contributions()
    ledger.add(60.0, [contributions.Counted("\x1b]0;evil\x07an\nna", 1), contributions.Counted("x" * 1000, 1)])
    assert [len(item.name) < 70 and item.name.isprintable() for item in ledger.best_first()] == [True, True]
    row = {"name": "a\nb", "rounds": 1, "samples": 1, "seconds": 1, "bytes": 1}
    assert [item.name for item in contributions.typed_contributions([row])] == ["a b"]
