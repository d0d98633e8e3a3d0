from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from trainkit import fileio
from trainkit.report import comparing, tables
from trainkit.report.facts import Facts, collect
from trainkit.run.folder import RunDir

MakeRun = Callable[..., RunDir]


def settings(run_dir: RunDir) -> dict[str, str]:
    return {row[0]: row[1] for row in tables.settings_rows(Facts(run_dir, run_dir.name))}


def compared(*runs: RunDir) -> list[dict[str, str]]:
    rows = comparing.comparison_rows(collect(runs))
    return [dict(zip(comparing.COMPARISON, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.04, "40 ms"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (245, "4 min 05 s"),
        (5440, "1 h 30 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


@pytest.mark.parametrize(("mb", "text"), [(812.4, "812 MB"), (15565.0, "15.2 GB"), (None, "–")])  # noqa: RUF001
def test_memory(mb: float | None, text: str) -> None:
    assert tables.memory(mb) == text


def test_the_settings_that_a_reader_asks_for(make_run: MakeRun) -> None:
    run_dir = make_run("ddp-0001", "optim.name=sgd", "model.name=resnet18", "seed=3")
    run_dir.manifest.write_text(json.dumps({"git": {"commit": "0123456789abcdef", "diff": "+x"}}))
    assert settings(run_dir) == {
        "model": "resnet18, 65,834 parameters",
        "data": "digits",
        "strategy": "ddp",
        "ranks": "2 on node1",
        "device": "cpu",
        "precision": "fp32",
        "batch size": "64 = 2 ranks × 32",  # noqa: RUF001
        "optimizer": "sgd, lr 0.002, weight_decay 0.05, momentum 0.9, nesterov False",
        "schedule": "onecycle, warm-up 1 epoch",
        "length": "400 steps = 20 epochs of 20",
        "seed": "3",
        "code": "commit 0123456789ab, with uncommitted changes",
    }


def test_a_warm_up_that_the_run_is_too_short_for_is_that_of_the_run(make_run: MakeRun) -> None:
    def schedule(**told: Any) -> str:
        run = make_run(f"r{told}", "schedule.warmup_epochs=5", told=told)
        return next(value for name, value in tables.settings_rows(collect([run])[0]) if name == "schedule")

    assert schedule() == "onecycle, warm-up 5 epochs"
    assert schedule(total_steps=40) == "onecycle, warm-up 5 epochs, here 20 steps"
    assert schedule(total_steps=1) == "onecycle, warm-up 5 epochs, here 0 steps"


def test_a_difference_of_nothing_in_memory_has_no_sign_of_less(make_run: MakeRun) -> None:
    runs = [make_run("a"), make_run("b")]
    summary = json.loads(runs[1].summary.read_text())
    for run in runs:
        fileio.append_jsonl(run.events, {"event": "started", "world_size": 2, "device": "cpu", "micro_batch_size": 32})
    runs[1].summary.write_text(json.dumps(summary | {"max_memory_mb": 812.5}))
    assert compared(*runs)[1]["memory saved"] == "+0 %"


def test_what_fine_tuning_started_from_and_left_alone_is_told(make_run: MakeRun) -> None:
    given = ("optim.name=muon", "optim.layer_decay=0.7", "model.checkpoint=a.pth", 'model.freeze=["blocks.*"]')
    told = settings(make_run("ddp-0001", "model.name=resnet18", *given))
    assert told["model"] == "resnet18 (checkpoint: a.pth, freeze: ['blocks.*']), 65,834 parameters"
    assert told["optimizer"] == "muon, lr 0.002, weight_decay 0.05, momentum 0.9, nesterov False, layer_decay 0.7"


def test_nodes_that_are_simulated_are_called_so(make_run: MakeRun) -> None:
    run_dir = make_run("ddp-0001", "launch.nodes=2", ranks=4)
    assert settings(run_dir)["ranks"] == "4 (2 nodes × 2 simulated on one machine) on node1"  # noqa: RUF001


def test_an_interrupted_run_tells_how_far_it_came(make_run: MakeRun) -> None:
    assert settings(make_run(steps=200, finished=False))["length"] == "200 of 400 steps = 10 epochs of 20"


def test_results_are_those_of_best_last_and_test(make_run: MakeRun) -> None:
    run_dir = make_run()
    fileio.append_jsonl(
        run_dir.metrics, {"step": 380, "epoch": 19.0, "split": "val", "loss": 0.04, "acc1": 99.9, "acc5": 100}
    )
    run_dir.summary.write_text(json.dumps({"best_step": 380}))
    rows = tables.results_rows(Facts(run_dir, "r"))
    assert rows[0] == ("val, best checkpoint", "380", "19.0", "0.0400", "99.90 %", "100.00 %")
    assert rows[1][:2] == ("val, last", "400")
    assert rows[2] == ("test, best checkpoint", "380", "19.0", "0.0600", "98.90 %", "100.00 %")


def test_averaged_weights_have_rows_of_their_own(make_run: MakeRun) -> None:
    run_dir = make_run()
    both = {"loss": 0.04, "acc1": 99.0, "acc5": 100, "ema_loss": 0.03, "ema_acc1": 99.5, "ema_acc5": 100}
    fileio.append_jsonl(run_dir.metrics, {"step": 380, "epoch": 19.0, "split": "val", **both})
    run_dir.summary.write_text(json.dumps({"best_step": 380}))
    rows = tables.results_rows(Facts(run_dir, "r"))
    assert rows[1] == ("val, best checkpoint, averaged weights", "380", "19.0", "0.0300", "99.50 %", "100.00 %")
    assert [name for name, *_ in rows if "averaged" in name] == ["val, best checkpoint, averaged weights"]


def test_twice_the_ranks_at_nearly_twice_the_speed(make_run: MakeRun) -> None:
    one = make_run("single-0001", preset="single", ranks=1, speed=990.0)
    two = make_run("ddp-0002", ranks=2, speed=1850.0)
    first, second = compared(one, two)
    assert (first["speed-up"], first["efficiency"], first["time ratio"]) == ("1.00×", "100 %", "1.00×")  # noqa: RUF001
    assert (second["images/s"], second["speed-up"], second["efficiency"]) == ("1,860", "1.86×", "93 %")  # noqa: RUF001
    assert second["time ratio"] == "1.87×"  # noqa: RUF001


HELD_UP = [
    ({"taken": 93.0}, {}, "of a-1 the CPUs were taken: others had 93 % of the time that it wanted (load 9.3)"),
    ({}, {"taken": 11.0}, "of b-2 the CPUs were taken: others had 11 % of the time that it wanted (load 1.1)"),
    ({}, {"told": {"threads": 2, "cpus": 3}}, "of b-2 2 ranks of 2 threads shared 3 CPUs"),
    ({}, {"told": {"threads": 1, "cpus": 1}}, "of b-2 2 ranks of 1 thread shared 1 CPU"),
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
    assert f"b-2 has no speed-up: {why}." in comparing.not_comparable(collect(runs))


def test_a_run_whose_own_processes_fill_the_cpus_has_its_speed_up(make_run: MakeRun) -> None:
    first = make_run("a-1", preset="single", ranks=1, speed=1000.0)
    _, second = compared(first, make_run("b-2", speed=1900.0, taken=9.0))
    assert second["speed-up"] == "1.89×"  # noqa: RUF001


@pytest.mark.parametrize(("step", "restarts", "compares"), [(200, (), False), (200, (195,), True), (10, (), True)])
def test_a_run_that_was_suspended_has_no_time_ratio_and_keeps_its_speed_up(
    make_run: MakeRun, step: int, restarts: tuple[int, ...], *, compares: bool
) -> None:
    first, second = make_run("a-1", preset="single", ranks=1, speed=1100.0), make_run("b-2", restarts=restarts)
    records = [json.loads(line) for line in second.metrics.read_text().splitlines()]
    for record in records:
        if (
            record["split"] == "train" and record["step"] == step
        ):  # the first updates of an attempt are slow by themselves
            record["images_per_sec"] = 40.0  # 16 s instead of 0.3
    second.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    _, row = compared(first, second)
    assert row["speed-up"] != "–"  # noqa: RUF001
    assert (row["time ratio"] != "–") == compares  # noqa: RUF001
    told = "b-2 has no time ratio: b-2 stood still for 15.7 s of its training."
    assert (told in comparing.not_comparable(collect([first, second]))) != compares


def test_a_speed_of_two_train_records_is_not_compared(make_run: MakeRun) -> None:
    short = make_run("b-2", steps=20)
    lines = short.metrics.read_text().splitlines()
    train = [line for line in lines if '"split": "train"' in line or '"split":"train"' in line]
    short.metrics.write_text("\n".join(train[:2]) + "\n")
    runs = [make_run("a-1", preset="single", ranks=1), short]
    assert compared(*runs)[1]["speed-up"] == "–"  # noqa: RUF001
    why = "b-2 has no speed-up: b-2 has 2 train records, and the first updates are slow."
    assert why in comparing.not_comparable(collect(runs))


def test_on_gpus_the_load_of_the_cpus_withholds_nothing(make_run: MakeRun) -> None:
    gpu = {"told": {"device": "NVIDIA A100", "threads": 64, "cpus": 8}, "taken": 99.0}
    _, second = compared(make_run("a-1", ranks=1, speed=1000.0, **gpu), make_run("b-2", speed=1900.0, **gpu))
    assert second["efficiency"] == "95 %"


def test_other_settings_that_make_a_speed_up_are_named(make_run: MakeRun) -> None:
    first = make_run("a-1", "train.precision=fp32", ranks=1, speed=1000.0)
    other = ["train.precision=bf16", "train.global_batch_size=128"]
    second = make_run("b-2", *other, speed=1900.0, told={"device": "NVIDIA A100"})
    (said,) = [line for line in comparing.not_comparable(collect([first, second])) if "speed-up" in line]
    assert said == (
        "The speed-up of b-2 is also that of other settings: train.global_batch_size 128 and not 64, train.precision"
        " bf16 and not fp32, device NVIDIA A100 and not cpu."
    )


def test_times_of_runs_of_unequal_length_are_not_compared(make_run: MakeRun) -> None:
    _, second = compared(make_run("ddp-0001"), make_run("ddp-0002", steps=200))
    assert second["time ratio"] == "–"  # noqa: RUF001
    _, third = compared(make_run("ddp-0003"), make_run("ddp-0004", finished=False))
    assert third["time ratio"] == "–"  # noqa: RUF001


def test_settings_that_differ_are_listed_and_equal_ones_are_not(make_run: MakeRun) -> None:
    runs = [
        make_run("ddp-0001"),
        make_run("ddp-0002", "optim.lr=0.01", "launch.nodes=2", "launch.time=10", "data.root=/x"),
    ]
    assert comparing.differences(collect(runs))[1] == [("optim.lr", "0.002", "0.01"), ("launch.nodes", "1", "2")]


def test_of_many_runs_each_has_a_row_of_what_differs_and_sentences_end(make_run: MakeRun) -> None:
    run, other = make_run(), make_run("b", "model.name=resnet18")
    runs = [*collect([run]), *(Facts(other, f"r{number}") for number in range(50))]
    header, rows = comparing.differences(runs)
    assert header == ("run", "model.name")
    assert rows[:2] == [("ddp-0001", "fashion_cnn"), ("r0", "resnet18")]
    assert comparing.not_comparable(runs)[-1] == "And 10 more like these."


def test_each_gpu_has_a_row_of_its_own(make_run: MakeRun) -> None:
    rows = tables.hardware_rows(collect([make_run(gpus=2)])[0])
    assert rows[1] == ("GPU 1 of node1", "91 %", "91 %", "9.3 GB of 16.0 GB", "65 W", "–")  # noqa: RUF001
    assert rows[2][:2] == ("CPUs of node1", "85 %")


def summarized(run_dir: RunDir, **more: object) -> Facts:
    run_dir.summary.write_text(json.dumps({**json.loads(run_dir.summary.read_text()), **more}))
    return Facts(run_dir, run_dir.name)


def test_where_the_time_went_adds_up_to_all_of_it(make_run: MakeRun) -> None:
    facts = summarized(make_run("ddp-0001"), seconds={"start": 5.0, "data": 15.0, "exposed": 0.0, "forward": 80.0})
    assert tables.spent_rows(facts) == [
        ("start", "5.0", "5.0 %"), ("data", "15.0", "15.0 %"), ("forward", "80.0", "80.0 %"), ("all", "100.0", "100 %"),
    ]  # fmt: skip


def test_of_a_run_that_goes_on_it_is_as_far_as_its_records_tell(make_run: MakeRun) -> None:
    run_dir = make_run("ddp-0001", finished=False)
    assert tables.spent_rows(Facts(run_dir, "x")) == []
    for step in (401, 402):
        spent = {"seconds_data": 1.5, "seconds_forward": 0.5, "seconds_exposed": None}
        fileio.append_jsonl(run_dir.metrics, {"step": step, "split": "train", **spent})
    assert tables.spent_rows(Facts(run_dir, "x"))[0] == ("data", "3.0", "75.0 %")


def test_memory_of_all_ranks_energy_utilisation_and_advice_are_costs(make_run: MakeRun) -> None:
    told = {"max_memory_mb_of_ranks": [900.0, 2048.0], "mfu": 41.234, "advice": "62% data wait: data.workers=4"}
    rows = tables.cost_rows(summarized(make_run("ddp-0001"), energy={"gpu_kwh": 1.23456}, **told))
    costs = {row[0]: row[1] for row in rows}
    assert costs["peak memory of every rank"] == "900 MB, 2.0 GB"
    assert costs["energy"] == "GPUs 1.23 kWh"
    assert costs["model FLOPs utilisation"] == "41.2 %"
    assert costs["would be faster"] == "62% data wait: data.workers=4"


def test_a_run_that_tells_nothing_of_them_has_no_such_rows(make_run: MakeRun) -> None:
    silent = summarized(make_run("ddp-0001"), energy=None, mfu=None, advice=None, max_memory_mb_of_ranks=[812.4])
    assert not {"energy", "model FLOPs utilisation", "would be faster", "peak memory of all ranks"} & {
        row[0] for row in tables.cost_rows(silent)
    }
