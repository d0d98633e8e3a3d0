from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit import fileio
from trainkit.config.task import LOSS
from trainkit.run.folder import RunDir
from trainkit.run.metrics import (
    Described,
    Metric,
    best_evaluation,
    best_of,
    describe,
    described,
    read_metrics,
    read_thinned,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


def test_records_are_in_order_of_step(run: RunDir) -> None:
    for step in (20, 10):
        fileio.append_jsonl(run.metrics, {"split": "train", "step": step})
    assert [record["step"] for record in read_metrics(run)] == [10, 20]


def test_one_split_can_be_read_alone(run: RunDir) -> None:
    for split in ("train", "val", "test"):
        fileio.append_jsonl(run.metrics, {"split": split, "step": 1})
    assert read_metrics(run, "val") == [{"split": "val", "step": 1}]


def test_after_a_restart_the_newer_record_of_a_step_counts(run: RunDir) -> None:
    for loss in (3.0, 2.0):
        fileio.append_jsonl(run.metrics, {"split": "train", "step": 1, "loss": loss})
    fileio.append_jsonl(run.metrics, {"split": "val", "step": 1, "loss": 1.0})
    assert [record["loss"] for record in read_metrics(run)] == [2.0, 1.0]


def test_unknown_keys_are_kept(run: RunDir) -> None:
    fileio.append_jsonl(run.metrics, {"split": "train", "step": 1, "new": "x"})
    assert read_metrics(run)[0]["new"] == "x"


@pytest.mark.parametrize("record", [{}, {"split": "train"}, {"step": 1}, {"split": "train", "step": "x"}])
def test_what_is_no_metrics_record_is_passed_over(run: RunDir, record: dict[str, object]) -> None:
    fileio.append_jsonl(run.metrics, record)
    assert read_metrics(run) == []


def test_a_run_without_metrics_has_none(run: RunDir) -> None:
    assert read_metrics(run) == []


def huge(run: RunDir, records: int, validate_every: int = 1000) -> None:
    with run.metrics.open("a") as file:
        for step in range(1, records + 1):
            file.write(json.dumps({"step": step, "split": "train", "loss": 1.0 / step}) + "\n")
            if step % validate_every == 0:
                file.write(json.dumps({"step": step, "split": "val", "acc1": 50.0}) + "\n")


def test_of_an_enormous_file_few_train_records_are_read_and_all_others(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    huge(run, 10_050)
    records, every, _ = read_thinned(run, most=200)
    steps = [record["step"] for record in records if record["split"] == "train"]
    assert 45 <= every <= 55
    assert 170 <= len(steps) <= 230
    assert steps[-1] == 10_050, "the last is among them"
    assert [record["step"] for record in records if record["split"] == "val"] == [*range(1000, 10_001, 1000)]


def test_a_file_of_usual_size_is_read_whole(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    huge(run, 300, 100)
    with run.metrics.open("a") as file:
        file.write('{"step": 301, "spl')
    assert read_thinned(run) == (read_metrics(run), 1, [])


def test_what_a_restart_has_done_again_is_not_drawn_twice(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    huge(run, 5000)
    huge(run, 3000)  # a second attempt, from the beginning
    records, _, outliers = read_thinned(run, most=100)
    assert max(record["step"] for record in outliers) <= 3000
    assert max(record["step"] for record in records) == 3000
    assert [record["step"] for record in records if record["split"] == "val"] == [1000, 2000, 3000]


@pytest.mark.parametrize("without", ["", '{"step": 5, "split": "val", "acc1": 50.0}\n', '{"step": 5, "split": "tr\n'])
def test_a_single_line_that_stands_out_of_an_enormous_file_is_among_the_outliers(tmp_path: Path, without: str) -> None:
    """Also where not every line has a loss."""
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    odd = {1234: "1000000000.0", 1235: "1e-09", 4321: "null", 4322: "null", 7777: "NaN", 8888: "1e999"}
    lines = [f'{{"step": {step}, "split": "train", "loss": {odd.get(step, 0.5)}}}\n' for step in range(10_000)]
    run.metrics.write_text("".join([*lines[:5000], without, *lines[5000:]]))
    found = read_thinned(run, most=100)
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
    assert best_of([lost, *good], 2) is good[0]
    assert best_of([lost, *good], None) is good[1]
    assert best_of([lost], 1) is None


def test_the_newest_evaluation_of_the_best_weights_with_the_runs_own_settings_counts(run: RunDir) -> None:
    assert best_evaluation(run) is None
    own = {"split": "test", "step": 3, "checkpoint": "best", "settings": []}
    for acc1, other in (
        (1.0, {}), (2.0, {}), (3.0, {"split": "val"}), (4.0, {"checkpoint": "latest"}), (5.0, {"settings": ["a.b=1"]})
    ):  # fmt: skip
        fileio.append_jsonl(run.evaluations, {**own, "acc1": acc1, **other})
    assert (best_evaluation(run) or {})["acc1"] == 2.0


REGRESSION = Described("mae", {"loss": LOSS, "mae": Metric("years", False, "Mean absolute error")})


def test_a_run_describes_its_metrics(run: RunDir) -> None:
    describe(run, REGRESSION)
    assert described(run) == REGRESSION


def test_a_run_made_before_has_the_metrics_of_classification(run: RunDir) -> None:
    found = described(run)
    assert (found.headline, list(found.metrics)) == ("acc1", ["loss", "acc1", "acc5"])
    assert found.metrics["acc5"] == Metric("%", True, "Top-5 accuracy")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"headline": ["acc1"], "metrics": {}}', '{"headline": "x", "metrics": {"x": 1}}']
)
def test_a_damaged_description_is_passed_over(run: RunDir, content: str) -> None:
    run.task.write_text(content)
    assert described(run).headline == "acc1"


def test_what_a_stranger_describes_is_one_line_each_and_bounded(run: RunDir) -> None:
    about = {"unit": "\x1b[2J" * 50, "label": "two\nlines", "higher_is_better": "yes"}
    named = {f"m{number}": about for number in range(1000)} | {"<script>": about}
    run.task.write_text(json.dumps({"headline": "m0", "metrics": named}))
    found = described(run)
    assert len(found.metrics) <= 51
    assert found.metrics["m0"].label == "two lines"
    assert "\x1b" not in found.metrics["m0"].unit
    assert len(found.metrics["m0"].unit) < 50


def test_without_a_best_step_the_lowest_error_is_the_best(run: RunDir) -> None:
    val = [{"split": "val", "step": step, "mae": mae} for step, mae in ((1, 3.0), (2, 1.0), (3, 2.0))]
    found = best_of(val, None, REGRESSION)
    assert found is not None
    assert found["step"] == 2


def test_an_error_may_be_over_100_and_a_percentage_may_not(run: RunDir) -> None:
    describe(run, REGRESSION)
    fileio.append_jsonl(run.metrics, {"split": "val", "step": 1, "mae": 250.0, "loss": "low"})
    assert read_metrics(run) == [{"split": "val", "step": 1, "mae": 250.0}]
