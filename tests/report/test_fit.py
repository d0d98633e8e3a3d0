"""What a job was given, what it used, and what to ask for next time."""

import json
from typing import Any

import pytest

from tests.report.conftest import MakeRun
from trainkit.common import jsonl
from trainkit.report.end_lines import summary_lines
from trainkit.report.facts import Facts
from trainkit.report.fit import Fit, fit_of, lines, section
from trainkit.run.folder import RunDir


def planned(run: RunDir, **asked: Any) -> RunDir:
    """The same run, as a batch job that was given an hour, 64 GB and 8 CPUs a rank."""
    plan = {"time_limit_seconds": 3600, "ntasks_per_node": 2, "gpus_per_node": 0, "cpus_per_task": 8, "nodes": 1}
    directives = [{"name": "time", "value": "1:00:00"}, {"name": "mem", "value": "64G"}]
    run.plan.write_text(json.dumps(plan | {"directives": directives} | asked))
    return run


def sampled(run: RunDir, *cpu_percents: float, memory_mb: float = 2000.0) -> RunDir:
    for index, percent in enumerate(cpu_percents):
        sample = {"time": 1.7e9 + index, "process_cpu_percent": percent, "process_memory_mb": memory_mb + index % 2}
        jsonl.append_jsonl(run.hardware("node2"), sample)
    return run


def fit(run: RunDir) -> Fit:
    found = fit_of([Facts(run, "it")])
    assert found is not None
    return found


def test_each_resource_is_compared_where_it_was_used_most(make_run: MakeRun) -> None:
    run = sampled(planned(make_run(speed=20.0)), *[150.0] * 100)
    time, memory, cpus = fit(run).resources
    assert (time.asked, round(time.used)) == (3600, 1281)  # 400 steps of 64 images at 20/s, and its end
    assert time.next == 60 * 32  # 10 %, 7 % for 40 paces, 29 % for how they vary
    assert (memory.asked, memory.used, memory.next) == (64 * 1024, 4002.0, 5 * 1024)
    assert memory.where == "2 x the first rank of node2"
    assert (cpus.asked, cpus.used, cpus.next) == (8, 1.5, 2)
    assert fit(run).flags == ["--time 32:00", "--mem 5G", "--cpus-per-task 2"]


def test_few_samples_ask_for_more_room(make_run: MakeRun) -> None:
    few = fit(sampled(planned(make_run("few")), *[100.0] * 3)).resources[1]
    many = fit(sampled(planned(make_run("many")), *[100.0] * 300)).resources[1]
    assert few.used == many.used
    assert few.margin == pytest.approx(1.1, abs=0.01)
    assert many.margin == pytest.approx(0.11, abs=0.01)
    assert few.next > many.next


def test_what_fits_is_left_as_it_is_and_what_was_short_is_raised(make_run: MakeRun) -> None:
    run = sampled(planned(make_run(speed=20.0), time_limit_seconds=1800, cpus_per_task=2), *[150.0] * 100)
    assert fit(run).flags == ["--mem 5G"]
    short = planned(run, time_limit_seconds=1300, directives=[{"name": "mem", "value": "4G"}], cpus_per_task=2)
    assert fit(short).flags == ["--time 32:00", "--mem 5G"]


def test_accounts_that_saw_more_than_the_samples_count(make_run: MakeRun) -> None:
    run = sampled(planned(make_run()), *[100.0] * 100)
    found = fit_of([Facts(run, "it")], {run.path: 9000.0})
    assert found is not None
    assert (found.resources[1].used, found.resources[1].where) == (18000.0, "2 x the largest rank, by the accounts")


def test_of_a_sweep_the_run_that_used_most_counts(make_run: MakeRun) -> None:
    runs = [
        sampled(planned(make_run(name)), *[100.0] * 100, memory_mb=mb)
        for name, mb in (("a", 2000.0), ("b", 9000.0), ("c", 3000.0))
    ]
    found = fit_of([Facts(run, run.name) for run in runs])
    assert found is not None
    assert {item.name: item.used for item in found.resources}["mem"] == 18002.0


def test_idle_gpus_are_hours_and_money(make_run: MakeRun) -> None:
    run = planned(make_run("a", "launch.gpu_hour_price=0.5 EUR", gpus=2, speed=20.0, told={"device": "H200"}))
    (run.hardware("node1")).write_text("")
    for index in range(20):
        gpus = [{"index": 0, "util_percent": 75}, {"index": 1, "util_percent": 0}]
        jsonl.append_jsonl(run.hardware("node1"), {"time": 1.7e9 + index, "gpus": gpus})
    found = fit(planned(run, gpus_per_node=2))
    assert "--gpus-per-node 1" in found.flags
    hours = 1281 / 3600
    assert found.gpu_hours == pytest.approx(2 * hours, rel=0.01)
    assert found.idle_gpu_hours == pytest.approx(1.25 * hours, rel=0.01)
    assert found.waste == "0.445 of 0.712 GPU-hours idle, 0.22 of 0.36 EUR"


def test_nothing_is_said_of_what_nobody_asked_for_or_has_not_finished(make_run: MakeRun) -> None:
    assert fit_of([Facts(planned(make_run("here"), directives=[]), "it")]) is None
    assert fit_of([Facts(sampled(planned(make_run("going", finished=False)), 100.0), "it")]) is None
    crowded = sampled(planned(make_run("crowded", taken=80.0)), *[100.0] * 100)
    assert "cpus" not in {item.name for item in fit(crowded).resources}


def test_the_end_and_the_log_book_say_it_and_80_columns_are_enough(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sampled(planned(make_run(speed=20.0)), *[150.0] * 100)
    assert "next time        --time 32:00 --mem 5G --cpus-per-task 2" in summary_lines(run)
    assert "--time 32:00 --mem 5G --cpus-per-task 2" in str(section(Facts(run, "it")))
    monkeypatch.setattr("trainkit.common.terminal._columns", lambda: 80)
    assert max(map(len, lines(fit(run)))) <= 80
    accounted = fit_of([Facts(run, "it")], {run.path: 9000.0})
    assert accounted is not None
    assert max(map(len, lines(accounted))) <= 80
