"""Runs against each other, where they compare; and a sweep: the best first, means over seeds, what was swept."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import MakeRun, write_sweep_of
from tests.report.test_writers import page_of
from trainkit.common import jsonl
from trainkit.config.loading import load, to_yaml
from trainkit.report import comparison
from trainkit.report.collection import collect
from trainkit.report.facts import Facts
from trainkit.run.events import sampled
from trainkit.run.folder import SAMPLER, RunDir

Points = dict[tuple[str, ...], float | None]


def sweep(make_run: MakeRun, points: Points) -> list[RunDir]:
    """Runs 0, 1, ... of a sweep with these overrides and validation accuracies; None: it has not begun."""
    runs: list[RunDir] = []
    for index, (overrides, accuracy) in enumerate(points.items()):
        if accuracy is None:
            runs.append(RunDir.create(runs[0].path.parent / str(index), to_yaml(load("ddp", overrides).config)))
            continue
        runs.append(make_run(f"ddp-0001/{index}", *overrides, steps=20, finished=False))
        jsonl.append_jsonl(runs[-1].metrics, {"step": 40, "epoch": 2.0, "split": "val", "loss": 0.1, "acc1": accuracy})
    write_sweep_of(runs[0].path.parent, *points)
    return runs


TWO_RATES: Points = {("optim.lr=1e-3",): 90.0, ("optim.lr=1e-2",): 91.0}
RATES_AND_SEEDS: Points = {
    ("optim.lr=1e-3", "seed=0"): 90.0, ("optim.lr=1e-3", "seed=1"): 92.0,
    ("optim.lr=1e-2", "seed=0"): 97.0, ("optim.lr=1e-2", "seed=1"): 96.0,
}  # fmt: skip


def test_the_best_run_and_the_best_mean_over_seeds_come_first_and_are_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    runs = sweep(make_run, RATES_AND_SEEDS)
    moved = runs[0].path.parent.rename(tmp_path / "runs" / "<b>odd\x1b[31m")
    page = page_of(*(RunDir(moved / run.path.name) for run in runs))
    assert page.named("b") == []
    assert "Sweep <b>odd: 4 runs" in page.text
    assert "Best by validation: lr=1e-2, seed=0, val acc1 97.00 %." in page.text
    places = [page.text.index(accuracy) for accuracy in (" 97.00 2.0", " 96.00 2.0", " 92.00 2.0", " 90.00 2.0")]
    assert places == sorted(places)
    assert page.text.index("96.50 ± 0.71") < page.text.index("91.00 ± 1.41")
    assert page.series()["Top-1 accuracy, validation, val acc1"] == {0.001: 91.0, 0.01: 96.5}
    (chart,) = (svg for svg in page.named("svg") if svg.get("data-x") == "optim.lr")
    assert chart["data-log"] == "x", "rates that lie a factor of ten apart are on a logarithmic axis"
    assert "speed-up" not in page.text.lower(), "learning rates have none"


def test_each_choice_of_a_second_setting_has_a_line_and_words_have_no_axis(make_run: MakeRun) -> None:
    two: Points = {
        ("optim.lr=1e-3", "schedule.name=cosine"): 90.0, ("optim.lr=2e-3", "schedule.name=cosine"): 91.0,
        ("optim.lr=1e-3", "schedule.name=constant"): 80.0, ("optim.lr=2e-3", "schedule.name=constant"): 81.0,
    }  # fmt: skip
    page = page_of(*sweep(make_run, two))
    assert page.series()["Top-1 accuracy, validation, schedule=constant"] == {0.001: 80.0, 0.002: 81.0}
    assert "schedule.name" not in {svg.get("data-x") for svg in page.named("svg")}


def test_strategies_are_compared_in_speed(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, {("strategy.name=ddp",): 90.0, ("strategy.name=zero",): 91.0}))
    assert "comparison" in page.sections()


@pytest.mark.parametrize("setting", ["optim.lr", "train.micro_batch_size"])
def test_of_a_run_that_has_not_begun_nothing_is_told_but_that(make_run: MakeRun, setting: str) -> None:
    runs = sweep(make_run, {(f"{setting}=8",): 90.0, (f"{setting}=16",): None})
    page = page_of(*runs)
    assert "not begun" in page.text
    assert re.findall(r"None|\u2013 images|\b0 steps|\b0 images|ran on", page.text) == []
    for second in (0, 30):
        jsonl.append_jsonl(runs[1].events, {"time": 1.7e9 + second, "event": "submitted", "executor": "slurm"})
    page = page_of(runs[1])
    assert "It has not begun, 30.0 s after it was queued." in page.text
    assert not re.search(r"0 attempts|0\.0 s of training", page.text)


def test_results_of_many_seeds_are_folded_below_means_and_the_best_are_shown(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, {(f"seed={n}",): 80.0 + n for n in range(21)}))
    assert "In percent, over the seeds: val acc1 90.00 ± 6.20." in page.text, "and none was tested"
    assert page.text.index("mean ± sd") < page.text.index("All 21 runs") < page.text.index("folder")
    assert "Below the results are the best 8 of them." in page.text
    assert page.text.count("1 attempt,") == 8


def test_runs_that_are_equally_good_share_the_first_place(make_run: MakeRun) -> None:
    page = page_of(*sweep(make_run, {(f"schedule.name={name}",): 90.0 for name in ("wsd", "cosine", "step")}))
    assert "Best by validation: schedule=wsd and 2 others, val acc1 90.00 %. It has not finished." in page.text


def test_a_sweep_without_validation_claims_no_order_and_draws_its_training(make_run: MakeRun) -> None:
    runs = sweep(make_run, TWO_RATES)
    for run in runs:
        run.metrics.write_text(re.sub('(?m)^.*"val".*\n', "", run.metrics.read_text()))
    page = page_of(*runs)
    assert "No validation was reached." in page.text
    assert not re.search("The best|Thick", page.text)
    assert [a for a in page.named("path") if a.get("class") == "line faint"] == []


def test_a_run_that_finished_and_diverged_says_so_in_its_row(make_run: MakeRun) -> None:
    runs = sweep(make_run, TWO_RATES)
    jsonl.append_jsonl(runs[0].metrics, {"step": 50, "epoch": 2.5, "split": "train", "loss": None})
    runs[0].summary.write_text('{"outcome": "finished", "steps": 50}')
    assert re.search(r"0\s+1e-3\s+90\.00\s[^A-Z]*diverged", page_of(*runs).text)


def test_of_drawn_points_each_is_a_dot_and_who_chose_it_is_told(make_run: MakeRun) -> None:
    drawn: Points = {}
    for at in range(1, 13):
        drawn[f"optim.lr={10**-at:.4g}", f"optim.weight_decay=0.{at:02}"] = 80.0 + at
    runs = sweep(make_run, drawn)
    (runs[0].path.parent / SAMPLER).write_text('{"sampler": "tpe"}')
    sampled(runs[0], "random", next(iter(drawn)))
    sampled(runs[1], "tpe, 10 results", ["optim.lr=0.5", "optim.weight_decay=0.3"])
    page = page_of(*runs)
    assert re.search(r"1\s+0\.5\s+0\.3\s+82\.00\s[^A-Z]*tpe, 10 results", page.text)
    assert re.search(r"0\s+0\.1\s+0\.01\s+81\.00\s[^A-Z]*random", page.text)
    dots = {at: y for name, points in page.series().items() if "weight_decay" in name for at, y in points.items()}
    (rates,) = (svg for svg in page.named("svg") if svg.get("data-x") == "optim.lr")
    assert rates["data-log"] == "x"
    assert {(0.5, 82.0), *((10.0**-at, 80.0 + at) for at in (1, *range(3, 13)))} <= {*dots.items()}


def test_a_pruned_run_says_so(make_run: MakeRun) -> None:
    runs = sweep(make_run, TWO_RATES)
    why = "at epoch 2 it is not among the best of 2 runs, 1 in 2"
    runs[0].summary.write_text(json.dumps({"outcome": "pruned", "steps": 40, "stopped_early": why}))
    page = page_of(*runs)
    assert "0 of 2 runs have finished, 1 was pruned." in page.text
    assert "pruned after 40 steps" in page.text
    assert f"Stopped after 40 steps. Pruned: {why}." in page_of(runs[0]).text


def compared(*runs: RunDir) -> list[dict[str, str]]:
    table = comparison.comparison_table(collect(runs))
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


HELD_UP = [
    ({"taken": 93.0}, {}, "of a-1 the CPUs were taken: others had 93 % of the time that it wanted"),
    ({}, {"taken": 11.0}, "of b-2 the CPUs were taken: others had 11 % of the time that it wanted"),
    ({}, {"steps": 20}, "b-2 has 2 train records, and the first updates are slow"),
    ({}, {"told": {"threads": 2, "cpus": 3}}, "of b-2 the ranks of a node wanted 4 CPUs and had 3"),
    (
        {"speed": 95.0, "told": {"threads": None}}, {"speed": 1990.0},
        "it came to 19.05× the speed with 2× the processors, so something held a-1 up",  # noqa: RUF001
    ),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two", "why"), HELD_UP)
def test_speeds_of_runs_that_were_held_up_are_not_compared(
    make_run: MakeRun, one: dict[str, Any], two: dict[str, Any], why: str
) -> None:
    runs = [make_run("a-1", preset="single", ranks=1, **one), make_run("b-2", **two)]
    _, second = compared(*runs)
    assert {second[key] for key in ("speed-up", "efficiency", "time ratio")} == {"–"}  # noqa: RUF001
    assert f"b-2 has no speed-up: {why}." in comparison.not_comparable(collect(runs))


def test_a_run_whose_own_processes_fill_the_cpus_has_its_speed_up(make_run: MakeRun) -> None:
    first = make_run("a-1", preset="single", ranks=1, speed=1000.0)
    _, second = compared(first, make_run("b-2", speed=1900.0, taken=9.0))
    assert second["speed-up"] == "1.89×"  # noqa: RUF001
    assert second["memory saved"] == "–", "a rank took other images in one pass"  # noqa: RUF001


@pytest.mark.parametrize(("step", "restarts", "compares"), [(200, (), False), (200, (195,), True), (10, (), True)])
def test_a_run_that_was_suspended_keeps_its_speed_up_but_no_time_ratio(
    make_run: MakeRun, step: int, restarts: tuple[int, ...], *, compares: bool
) -> None:
    first, second = make_run("a-1", preset="single", ranks=1, speed=1100.0), make_run("b-2", restarts=restarts)
    records = [json.loads(line) for line in second.metrics.read_text().splitlines()]
    for record in records:
        if (record["split"], record["step"]) == ("train", step):  # the first of an attempt is slow by itself
            record["images_per_sec"] = 40.0  # 16 s instead of 0.3
    second.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    _, row = compared(first, second)
    assert row["speed-up"] != "–"  # noqa: RUF001
    assert (row["time ratio"] != "–") == compares  # noqa: RUF001
    told = "b-2 has no time ratio: b-2 stood still for 15.7 s of its training."
    assert (told in comparison.not_comparable(collect([first, second]))) != compares


def test_on_gpus_the_load_of_the_cpus_withholds_nothing(make_run: MakeRun) -> None:
    gpu = {"told": {"device": "NVIDIA A100", "threads": 64, "cpus": 8}, "taken": 99.0}
    _, second = compared(make_run("a-1", ranks=1, speed=1000.0, **gpu), make_run("b-2", speed=1900.0, **gpu))
    assert second["efficiency"] == "95 %"


def test_other_settings_that_make_a_speed_up_are_named(make_run: MakeRun) -> None:
    first = make_run("a-1", "train.precision=fp32", ranks=1, speed=1000.0)
    other = ["train.precision=bf16", "train.global_batch_size=128"]
    second = make_run("b-2", *other, speed=1900.0, told={"device": "NVIDIA A100"})
    (said,) = [line for line in comparison.not_comparable(collect([first, second])) if "speed-up" in line]
    assert said == (
        "The speed-up of b-2 is also that of other settings: train.global_batch_size 128 and not 64, train.precision"
        " bf16 and not fp32, device NVIDIA A100 and not cpu."
    )


def test_settings_that_differ_are_listed_and_equal_ones_are_not(make_run: MakeRun) -> None:
    others = ("optim.lr=0.01", "launch.nodes=2", "launch.time=10", "data.root=/x")
    runs = [make_run("ddp-0001"), make_run("ddp-0002", *others)]
    assert comparison.differences(collect(runs))[1] == [("optim.lr", "0.002", "0.01"), ("launch.nodes", "1", "2")]


def test_of_many_runs_each_has_a_row_of_what_differs_and_sentences_end(make_run: MakeRun) -> None:
    run, other = make_run(), make_run("b", "model.name=resnet18")
    runs = [*collect([run]), *(Facts(other, f"r{number}") for number in range(50))]
    header, rows, *_ = comparison.differences(runs)
    assert header == ("run", "model.name")
    assert rows[:2] == [("ddp-0001", "fashion_cnn"), ("r0", "resnet18")]
    assert comparison.not_comparable(runs)[-1] == "And 10 more like these."


def test_values_of_a_script_have_the_names_that_its_arguments_have(make_run: MakeRun) -> None:
    runs = sweep(make_run, TWO_RATES)
    write_sweep_of(runs[0].path.parent, ("script.values.lr=0.1",), ("script.values.lr=0.2",))
    assert list(collect(runs)[0].point) == ["lr"]
    assert "script.values" not in str(page_of(*runs))
