import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.report.conftest import MakeRun, rows_of
from trainkit.common import jsonl
from trainkit.report import chart_sections, document, text_sections, values
from trainkit.report.facts import Facts
from trainkit.run.folder import RunDir


def settings(run_dir: RunDir) -> dict[str, str]:
    return {row[0]: row[1] for row in rows_of(text_sections.settings(Facts(run_dir, run_dir.name)))}


SHOWN: dict[Callable[[Any], str], dict[Any, str]] = {
    values.duration: {0.0: "0.0 s", 0.04: "40 ms", 12.34: "12.3 s"}
    | {59.97: "1 min 00 s", 245: "4 min 05 s", 5440: "1 h 30 min"},
    values.memory: {812.4: "812 MB", 15565.0: "15.2 GB", None: "–"},  # noqa: RUF001
    values.rate: {2010.2: "2,010", 10.5: "10.5", 0.42: "0.42"},
}


@pytest.mark.parametrize("write", SHOWN, ids=lambda write: write.__name__)
def test_numbers_have_the_digits_that_a_reader_needs(write: Callable[[Any], str]) -> None:
    assert {value: write(value) for value in SHOWN[write]} == SHOWN[write]


def test_the_settings_that_a_reader_asks_for(make_run: MakeRun) -> None:
    run_dir = make_run("ddp-0001", "optim.name=sgd", "model.name=resnet18", "seed=3")
    run_dir.manifest.write_text(json.dumps({"git": {"commit": "0123456789abcdef", "diff": "+x"}}))
    assert settings(run_dir) == {
        "model": "resnet18, 65,834 parameters",
        "data": "digits",
        "strategy": "ddp",
        "ranks": "2",
        "precision": "fp32",
        "batch size": "64 = 2 ranks × 32",  # noqa: RUF001
        "optimizer": "sgd (lr: 0.002, weight_decay: 0.05, layer_decay: 1.0, momentum: 0.9, nesterov: False)",
        "schedule": "onecycle",
        "warm-up, epochs": "1",
        "length": "400 steps = 20 epochs of 20",
        "seed": "3",
        "code": "commit 0123456789ab, with uncommitted changes",
    }


def test_what_fine_tuning_started_from_and_left_alone_is_told(make_run: MakeRun) -> None:
    given = ("optim.name=muon", "optim.layer_decay=0.7", "model.checkpoint=a.pth", 'model.freeze=["blocks.*"]')
    told = settings(make_run("ddp-0001", "model.name=resnet18", *given))
    assert told["model"] == "resnet18 (checkpoint: a.pth, freeze: ['blocks.*']), 65,834 parameters"
    muon = "lr: 0.002, weight_decay: 0.05, layer_decay: 0.7, betas: [0.9, 0.999], momentum: 0.95, nesterov: True"
    muon += ", muon_as: author"
    assert told["optimizer"] == f"muon ({muon})"


def test_an_interrupted_run_on_simulated_nodes_says_both(make_run: MakeRun) -> None:
    run = make_run("ddp-0001", "launch.nodes=2", ranks=4, steps=200, finished=False)
    assert settings(run)["length"] == "200 of 400 steps = 10 epochs of 20"
    assert ("nodes", "2 simulated on one machine: node1") in rows_of(text_sections.where(Facts(run, "r")))


def test_results_are_those_of_best_last_and_test_and_of_averaged_weights(make_run: MakeRun) -> None:
    run_dir = make_run()
    both = {"loss": 0.04, "acc1": 99.9, "acc5": 100, "ema_loss": 0.03, "ema_acc1": 99.5, "ema_acc5": 100}
    jsonl.append_jsonl(run_dir.metrics, {"step": 380, "epoch": 19.0, "split": "val", **both})
    run_dir.summary.write_text(json.dumps({"best_step": 380}))
    best, averaged, last, test = rows_of(text_sections.results(Facts(run_dir, "r")))
    assert best == ("val, best checkpoint", "380", "19.0", "0.0400", "99.90 %", "100.00 %")
    assert averaged == ("val, best checkpoint, averaged weights", "380", "19.0", "0.0300", "99.50 %", "100.00 %")
    assert last[:2] == ("val, last", "400")
    assert test == ("test, best checkpoint", "380", "19.0", "0.0600", "98.90 %", "100.00 %")


def summarized(run_dir: RunDir, **more: object) -> Facts:
    run_dir.summary.write_text(json.dumps({**json.loads(run_dir.summary.read_text()), **more}))
    return Facts(run_dir, run_dir.name)


def test_of_a_run_that_goes_on_it_is_as_far_as_its_records_tell(make_run: MakeRun) -> None:
    run_dir = make_run("ddp-0001", finished=False)
    assert rows_of(chart_sections.spent([Facts(run_dir, "x")]).parts) == []
    for step in (401, 402):
        spent = {"seconds_data": 1.5, "seconds_forward": 0.5, "seconds_exposed": None}
        jsonl.append_jsonl(run_dir.metrics, {"step": step, "split": "train", **spent})
    assert rows_of(chart_sections.spent([Facts(run_dir, "x")]).parts)[0] == ("data: waiting for data", "3.0", "75.0 %")


def test_memory_of_all_ranks_energy_utilisation_and_advice_are_costs(make_run: MakeRun) -> None:
    told = {"max_memory_mb_of_ranks": [900.0, 2048.0], "mfu": 41.234, "advice": "62% data wait: data.workers=4"}
    rows = rows_of(text_sections.cost(summarized(make_run("ddp-0001"), energy={"gpu_kwh": 1.23456}, **told)))
    costs = {row[0]: row[1] for row in rows}
    assert costs["peak memory of every rank"] == "900 MB, 2.0 GB"
    assert costs["energy"] == "GPUs 1.23 kWh"
    assert costs["model FLOPs utilisation"] == "41.2 %"
    assert costs["would be faster"] == "62% data wait: data.workers=4"
    many = summarized(make_run("ddp-0003"), max_memory_mb_of_ranks=[*range(1, 66)])
    assert ("peak memory of every rank", "1 MB to 65 MB") in rows_of(text_sections.cost(many))
    silent = summarized(make_run("ddp-0002"), energy=None, mfu=None, advice=None, max_memory_mb_of_ranks=[812.4])
    names = {"energy", "model FLOPs utilisation", "would be faster", "peak memory of every rank"}
    assert not names & {row[0] for row in rows_of(text_sections.cost(silent))}, "what a run does not tell has no row"


@pytest.mark.parametrize(
    ("intensity", "energy", "says"),
    [
        ("DE", {"gpu_kwh": 2.0}, "762, of GPUs alone (381 g/kWh, mean of DE in 2023 by Our World in Data"),
        ("25.5", {"gpu_kwh": 1.0, "cpu_kwh": 1.0}, "51, of GPUs and processors alone (25.5 g/kWh, as launch.carbon"),
        ("DE", None, ""),
        ("null", {"gpu_kwh": 2.0}, ""),
    ],
)
def test_co2_is_the_measured_energy_times_a_factor_with_its_source(
    make_run: MakeRun, intensity: str, energy: dict[str, float] | None, says: str
) -> None:
    facts = summarized(make_run("ddp-0001", f"launch.carbon_intensity={intensity}"), energy=energy)
    told = {row[0]: row[1] for row in rows_of(text_sections.cost(facts))}.get("g CO2 equivalent", "")
    assert told.startswith(says) if says else told == "", "nothing is guessed"
    lines = ["".join(line) for part in text_sections.missing(facts) for line in getattr(part, "lines", ())]
    assert any(line.startswith("energy: ") for line in lines) == (energy is None)
    assert any(line.startswith("g CO2: launch.carbon_intensity") for line in lines) == (intensity == "null")


def test_gpu_hours_by_use_are_a_table_of_the_costs(make_run: MakeRun) -> None:
    facts = summarized(make_run("ddp-0001"), seconds={"forward": 6.0, "data": 2.0})
    (table,) = (part for part in text_sections.cost(facts) if isinstance(part, document.Table) and part.caption)
    assert table.caption == "Rank-hours by use"
    assert [row[0] for row in table.rows][:2] == ["training", "waiting for data"]
    assert table.rows[0][2] == f"{600 / facts.spans[0].seconds:.1f} %"
