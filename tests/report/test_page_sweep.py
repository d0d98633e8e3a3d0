"""What the page of a sweep says: the best first, means over seeds, a chart of what was swept, no speed-ups of rates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.test_page import page_of
from trainkit import fileio
from trainkit.config.loading import load, to_yaml
from trainkit.report.facts import collect
from trainkit.report.page_sweep import swept
from trainkit.run.folder import RunDir

MakeRun = Callable[..., RunDir]


def sweep(make_run: MakeRun, points: dict[tuple[str, ...], float | None]) -> list[RunDir]:
    """Runs 0, 1, ... of a sweep with these overrides and validation accuracies; None: it has not begun."""
    runs: list[RunDir] = []
    for index, (overrides, accuracy) in enumerate(points.items()):
        if accuracy is None:
            folder = runs[0].path.parent / str(index)
            runs.append(RunDir.create(folder, to_yaml(load("ddp", overrides).config)))
            continue
        runs.append(make_run(f"ddp-0001/{index}", *overrides, steps=20, finished=False))
        fileio.append_jsonl(runs[-1].metrics, {"step": 40, "epoch": 2.0, "split": "val", "loss": 0.1, "acc1": accuracy})
    told = [{"run": str(index), "overrides": list(overrides)} for index, overrides in enumerate(points)]
    (runs[0].path.parent / "sweep.json").write_text(json.dumps(told))
    return runs


RATES_AND_SEEDS: dict[tuple[str, ...], float | None] = {
    ("optim.lr=1e-3", "seed=0"): 90.0,
    ("optim.lr=1e-3", "seed=1"): 92.0,
    ("optim.lr=1e-2", "seed=0"): 97.0,
    ("optim.lr=1e-2", "seed=1"): 96.0,
}


def test_the_best_run_of_a_sweep_is_named_and_comes_first(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, RATES_AND_SEEDS))
    assert "Sweep ddp-0001: 4 runs" in page.text
    assert "Best by validation: lr=1e-2, seed=0, val acc1 97.00 %." in page.text
    places = [page.text.index(accuracy) for accuracy in (" 97.00 2.0", " 96.00 2.0", " 92.00 2.0", " 90.00 2.0")]
    assert places == sorted(places)


def test_seeds_are_averaged_and_the_best_mean_comes_first(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, RATES_AND_SEEDS))
    assert page.text.index("96.50 ± 0.71") < page.text.index("91.00 ± 1.41")


def test_accuracy_is_drawn_against_the_swept_setting(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, RATES_AND_SEEDS))
    assert page.series()["Validation accuracy, val acc1"] == {0.001: 91.0, 0.01: 96.5}
    (chart,) = (svg for svg in page.named("svg") if svg.get("data-x") == "optim.lr")
    assert chart["data-log"] == "x", "rates that lie a factor of ten apart are on a logarithmic axis"


def test_every_choice_of_a_second_setting_has_its_line(make_run: MakeRun) -> None:
    two: dict[tuple[str, ...], float | None] = {
        ("optim.lr=1e-3", "optim.weight_decay=0.1"): 90.0,
        ("optim.lr=2e-3", "optim.weight_decay=0.1"): 91.0,
        ("optim.lr=1e-3", "optim.weight_decay=0.5"): 80.0,
        ("optim.lr=2e-3", "optim.weight_decay=0.5"): 81.0,
    }
    series = page_of(*sweep(make_run, two)).series()
    assert series["Validation accuracy, weight_decay=0.5"] == {0.001: 80.0, 0.002: 81.0}
    assert series["Validation accuracy, lr=1e-3"] == {0.1: 90.0, 0.5: 80.0}


def test_words_have_no_chart(make_run: MakeRun) -> None:
    runs = sweep(make_run, {("schedule.name=cosine",): 90.0, ("schedule.name=constant",): 91.0})
    assert "<svg" not in swept(collect(runs))


def test_learning_rates_have_no_speed_up(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, RATES_AND_SEEDS))
    assert {"comparison", "scaling"} & set(page.sections()) == set()
    assert "speed-up" not in page.text.lower()


def test_strategies_are_compared_in_speed(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, {("strategy.name=ddp",): 90.0, ("strategy.name=zero",): 91.0}))
    assert "comparison" in page.sections()


@pytest.mark.parametrize("setting", ["optim.lr", "train.micro_batch_size"])
def test_of_a_run_that_has_not_begun_nothing_is_told_but_that(make_run: MakeRun, setting: str) -> None:
    page = page_of(*sweep(make_run, {(f"{setting}=8",): 90.0, (f"{setting}=16",): None}))
    assert "not begun" in page.text
    assert re.findall(r"None|\u2013 images|\b0 steps|\b0 images|ran on", page.text) == []


def test_of_a_large_sweep_the_best_runs_are_shown_in_detail(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, {(f"seed={n}",): 80.0 + n for n in range(10)}))
    assert "Below the results are the best 8 of them." in page.text
    assert "In percent, over the seeds: val acc1 84.50 ± 3.03, test acc1" not in page.text, "none was tested"
    assert "In percent, over the seeds: val acc1 84.50 ± 3.03." in page.text
    assert page.text.count("1 attempt,") == 8


def test_the_results_of_very_many_runs_stand_folded_below_what_they_come_to(make_run: MakeRun) -> None:
    points: dict[tuple[str, ...], float | None] = {
        (f"optim.lr={rate}", f"seed={seed}"): 50.0 + seed for rate in (1e-3, 1e-2, 1e-1) for seed in range(7)
    }
    page = page_of(*sweep(make_run, points))
    assert page.text.index("mean ± sd") < page.text.index("All 21 runs") < page.text.index("folder")


def test_runs_that_are_equally_good_share_the_first_place(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, {(f"schedule.name={name}",): 90.0 for name in ("wsd", "cosine", "step")}))
    assert "Best by validation: schedule=wsd and 2 others, val acc1 90.00 %. It has not finished." in page.text


def test_a_sweep_without_validation_claims_no_order(make_run: MakeRun) -> None:
    runs = sweep(make_run, {("optim.lr=1e-3",): 90.0, ("optim.lr=1e-2",): 91.0})
    for run in runs:
        run.metrics.write_text(re.sub('(?m)^.*"val".*\n', "", run.metrics.read_text()))
    page = page_of(*runs)
    assert "No validation was reached." in page.text
    assert "The best" not in page.text
    assert "Thick" not in page.text
    assert page.text.count("peak") == 2
    assert [a for a in page.named("path") if a.get("class") == "line faint"] == [], "training is all that there is"


def test_a_sweep_that_has_not_begun_has_trained_for_no_time_at_all(make_run: MakeRun) -> None:
    runs = sweep(make_run, {("optim.lr=1e-3",): 90.0, ("optim.lr=1e-2",): None})
    for run, seconds in ((runs[1], (0,)), (runs[1], (0, 30))):
        run.events.write_text("")
        for second in seconds:
            fileio.append_jsonl(run.events, {"time": 1.7e9 + second, "event": "submitted", "executor": "slurm"})
        page = page_of(runs[1])
        assert "It has not begun" in page.text
        assert not re.search(r"0 attempts|0\.0 s of training", page.text)
    assert "It has not begun, 30.0 s after it was queued." in page.text


def test_a_run_that_finished_and_diverged_says_so_in_its_row(make_run: MakeRun) -> None:
    runs = sweep(make_run, {("optim.lr=1e-3",): 90.0, ("optim.lr=1e-2",): 91.0})
    fileio.append_jsonl(runs[0].metrics, {"step": 50, "epoch": 2.5, "split": "train", "loss": None})
    runs[0].summary.write_text('{"outcome": "finished", "steps": 50}')
    assert re.search(r"0\s+1e-3\s+90\.00\s[^A-Z]*diverged", page_of(*runs).text)


def test_the_page_of_a_sweep_keeps_to_its_folder_name(make_run: MakeRun, tmp_path: Path) -> None:
    runs = sweep(make_run, RATES_AND_SEEDS)
    moved = runs[0].path.parent.rename(tmp_path / "runs" / "<b>odd\x1b[31m")
    page = page_of(*(RunDir(moved / run.path.name) for run in runs))
    assert page.named("b") == []
    assert "Sweep <b>odd: 4 runs" in page.text
