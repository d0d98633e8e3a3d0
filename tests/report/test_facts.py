import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import MakeRun
from trainkit.common import jsonl
from trainkit.config.loading import load, to_yaml
from trainkit.report.collection import collect
from trainkit.report.end_lines import summary_lines
from trainkit.report.facts import Facts
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir


def facts_of(run_dir: RunDir) -> Facts:
    return Facts(run_dir, run_dir.name)


def test_speed_is_the_median_of_the_train_records(make_run: MakeRun) -> None:
    run_dir = make_run(speed=2000.0)
    jsonl.append_jsonl(run_dir.metrics, {"step": 5, "split": "train", "images_per_sec": 3.0})  # the slow first step
    assert facts_of(run_dir).images_per_sec == pytest.approx(2010.0)


def test_time_steps_and_attempts_of_an_interrupted_run_are_in_its_records(make_run: MakeRun) -> None:
    run_dir = make_run(speed=2000.0, steps=200, finished=False, restarts=(50, 150))
    jsonl.append_jsonl(run_dir.events, {"time": 1.7e9, "event": "saved", "step": 207})
    facts = facts_of(run_dir)
    assert facts.train_seconds == pytest.approx(64 * 200 / 2000, rel=0.02)
    assert facts.steps == 207, "those between the last record and the last checkpoint count"
    assert (facts.finished, facts.attempts, facts.requeues) == (False, 3, 2)
    assert (facts.restarts("epoch"), facts.restarts("step")) == ([2.5, 7.5], [50.0, 150.0])


def test_dataparallel_counts_the_gpus_that_it_drives(make_run: MakeRun) -> None:
    facts = facts_of(make_run(preset="dp", ranks=1, gpus=4))
    assert facts.processors == 4
    assert facts.processor_hours == pytest.approx(4 * facts.spans[0].seconds / 3600)
    assert facts_of(make_run("ddp-0002", ranks=2, gpus=4)).processors == 2


def test_runs_of_one_name_are_told_apart_by_their_folder(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / "a" / "ddp-0001"), RunDir(tmp_path / "b" / "ddp-0001"), RunDir(tmp_path / "dp-0002")]
    assert [facts.label for facts in collect(runs)] == ["a/ddp-0001", "b/ddp-0001", "dp-0002"]


def test_processor_hours_are_told_by_use_with_what_a_failure_has_lost(tmp_path: Path) -> None:
    """Two ranks: 100 s in the queue, 400 s of training of which a failure has lost 60, 40 s in the queue again."""
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    for event in (
        {"time": 1000.0, "event": "submitted", "executor": "slurm", "job_id": "7"},
        {"time": 1110.0, "event": "started", "attempt": 0, "step": 0, "world_size": 2},
        {"time": 1250.0, "event": "saved", "attempt": 0, "step": 10},
        {"time": 1310.0, "event": "failed", "attempt": 0, "rank": 1, "error": "OSError: gone"},
        {"time": 1310.0, "event": "requeued", "attempt": 0, "job_id": "7"},
        {"time": 1360.0, "event": "started", "attempt": 1, "step": 10, "world_size": 2},
        {"time": 1560.0, "event": "ended", "attempt": 1, "state": "COMPLETED"},
    ):
        jsonl.append_jsonl(run.events, event)
    seconds = {"start": 20.0, "data": 30.0, "forward": 150.0, "backward": 100.0, "checkpoint": 10.0, "evaluation": 20.0}
    run.summary.write_text(json.dumps({"seconds": {**seconds, "end": 5.0}, "outcome": "finished"}))
    facts = Facts(run, "r")
    in_rank_seconds = {use: round(hours * 3600 / 2, 6) for use, hours in facts.hours_by_use.items()}
    assert in_rank_seconds == {
        "training": 250.0, "waiting for data": 30.0, "start": 20.0, "saving": 10.0, "evaluation": 20.0,
        "lost to failures": 60.0, "rest": 30.0,
    }  # fmt: skip
    assert sum(in_rank_seconds.values()) == pytest.approx((facts.processor_hours or 0) * 3600 / 2)
    assert facts.queue_hours * 3600 == pytest.approx(160.0 - 20.0)  # until the ranks have met, less their start


def test_a_restart_in_place_is_no_requeue_and_waits_in_no_queue(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    for event in (
        {"time": 1000.0, "event": "submitted", "executor": "slurm", "job_id": "7"},
        {"time": 1110.0, "event": "started", "attempt": 0, "step": 0, "world_size": 2},
        {"time": 1310.0, "event": "failed", "attempt": 0, "rank": 1, "error": "killed by SIGKILL"},
        {"time": 1310.0, "event": "requeued", "attempt": 0, "job_id": "7", "in_place": True},
        {"time": 1360.0, "event": "started", "attempt": 1, "step": 0, "world_size": 2},
    ):
        jsonl.append_jsonl(run.events, event)
    facts = Facts(run, "r")
    assert (facts.attempts, facts.requeues) == (2, 0)
    assert facts.queue_hours * 3600 == pytest.approx(110.0)
    assert facts.spans[0].how == "failed on rank 1: killed by SIGKILL, started again in place"


def test_a_spare_node_costs_its_hours_until_it_is_used(tmp_path: Path) -> None:
    config = load("ddp", flags={"launch.nodes": (2, "--nodes"), "launch.spare_nodes": (1, "--spare-nodes")}).config
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(config))
    for event in (
        {"time": 1000.0, "event": "started", "attempt": 0, "step": 0, "world_size": 2},
        {"time": 1100.0, "event": "failed", "attempt": 0, "rank": 1, "error": "the node does not answer"},
        {"time": 1100.0, "event": "requeued", "attempt": 0, "job_id": "7", "in_place": True, "spare_nodes": 0},
        {"time": 1200.0, "event": "started", "attempt": 1, "step": 0, "world_size": 2},
        {"time": 1300.0, "event": "failed", "attempt": 1, "rank": 1, "error": "killed by SIGKILL"},
        {"time": 1300.0, "event": "requeued", "attempt": 1, "job_id": "7"},
        {"time": 1400.0, "event": "started", "attempt": 2, "step": 0, "world_size": 2},
        {"time": 1450.0, "event": "ended", "attempt": 2, "state": "COMPLETED"},
    ):
        jsonl.append_jsonl(run.events, event)
    facts = Facts(run, "r")
    assert facts.spare_hours * 3600 == pytest.approx(100 + 50), "the first, and that of the new allocation"
    assert (facts.processor_hours or 0) * 3600 == pytest.approx(2 * 250 + 150)


def test_an_attempt_that_saved_nothing_is_lost_from_its_start(make_run: MakeRun) -> None:
    run = make_run("ddp-0001", steps=100, finished=False)
    facts = facts_of(run)
    assert (facts.lost_hours, facts.queue_hours) == (0.0, 0.0), "it goes on"
    jsonl.append_jsonl(run.events, {"time": 1.7e9 + 100, "event": "failed", "attempt": 0, "rank": 0, "error": "x"})
    assert facts_of(run).lost_hours * 3600 == pytest.approx(2 * 100)


def test_of_an_old_or_empty_record_no_use_is_told(make_run: MakeRun, tmp_path: Path) -> None:
    assert facts_of(make_run("ddp-0001")).hours_by_use == {}, "its summary has no seconds"
    empty = Facts(RunDir.create(tmp_path / "ddp-0002", "seed: 0\n"), "r")
    assert (empty.hours_by_use, empty.queue_hours, empty.energy) == ({}, 0.0, {})


def test_energy_of_a_run_that_has_not_ended_is_that_of_its_last_samples(make_run: MakeRun) -> None:
    run = make_run("ddp-0001", finished=False)
    for host, kwh in (("node1", 0.25), ("node2", 0.5)):
        jsonl.append_jsonl(run.hardware(host), {"time": 1.8e9, "gpu_kwh": kwh / 2})
        jsonl.append_jsonl(run.hardware(host), {"time": 1.8e9 + 2, "gpu_kwh": kwh})
    assert facts_of(run).energy == {"gpu_kwh": 0.75}


@pytest.fixture
def bare_run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "ddp-0001", "seed: 0\n")


def record(run_dir: RunDir, step: int, split: str = "train", **values: Any) -> None:
    jsonl.append_jsonl(run_dir.metrics, {"time": 1.0, "step": step, "epoch": step / 20, "split": split, **values})


def test_the_summary_names_the_results_and_where_everything_is(bare_run: RunDir) -> None:
    bare_run.summary.write_text('{"train_sec')
    assert summary_lines(bare_run) == [f"run folder       {bare_run.path}", "No results yet."]
    record(bare_run, 20, "val", acc1=97.5)
    record(bare_run, 40, "val", acc1=99.26)
    record(bare_run, 60, "val", acc1=99.1)
    record(bare_run, 60, "test", acc1=98.9)
    bare_run.summary.write_text(json.dumps({"train_seconds": 12.34, "images_per_sec": 2100.4, "best_step": 40}))
    (bare_run.checkpoints / "best").mkdir(parents=True)
    bare_run.tensorboard.mkdir()
    (bare_run.wandb / "offline-run-20261120_100000-ddp-0001").mkdir(parents=True)
    path = bare_run.path
    assert summary_lines(bare_run) == [
        f"run folder       {path}",
        f"metrics          {path}/metrics.jsonl",
        f"best checkpoint  {path}/checkpoints/best",
        f"tensorboard      tensorboard --logdir {path}/tensorboard",
        f"wandb            python -m jobs.sync {path}",
        f"log book         python -m jobs.report {path}",
        "val acc1 99.26 % (best, step 40) · test acc1 98.90 % · 12.3 s · 2,100 images/s",
    ]


@pytest.mark.parametrize(("loss", "acc1", "named"), [(None, 10.0, "loss"), (0.5, None, "acc1")])
def test_the_end_names_what_was_not_finite(bare_run: RunDir, loss: Any, acc1: Any, named: str) -> None:
    record(bare_run, 20, "val", loss=loss, acc1=acc1)
    assert summary_lines(bare_run)[-1] == f"val {named} is not finite (step 20): no model is the best"


@pytest.mark.parametrize("how", ["pruned", "stopped_early"])
def test_the_summary_says_how_a_run_has_ended_early(bare_run: RunDir, how: str) -> None:
    why = "at epoch 1 it is not among the best of 3 runs, 1 in 3"
    append_event(bare_run, how, attempt=0, why=why)
    bare_run.summary.write_text(json.dumps({"stopped_early": why, "outcome": how if how == "pruned" else "finished"}))
    assert f"{how.replace('_', ' '):16} {why}" in summary_lines(bare_run)


def test_the_end_says_what_is_not_in_the_copy_elsewhere(bare_run: RunDir) -> None:
    append_event(bare_run, "uploaded", url="s3://bucket/ddp-0001", step=3)
    assert not [line for line in summary_lines(bare_run) if line.startswith("not sent")]
    append_event(bare_run, "upload_failed", url="s3://bucket/ddp-0001", why="it is away")
    told = f"not sent yet     python -m jobs.resume {bare_run.path} sends it to s3://bucket/ddp-0001"
    assert summary_lines(bare_run)[-2] == told


def test_a_run_that_has_diverged_does_not_end_as_if_it_had_not(bare_run: RunDir) -> None:
    record(bare_run, 5, loss=2.3)
    for step in range(10, 41, 10):
        record(bare_run, step, loss=None)
    for step in range(3, 41):
        append_event(bare_run, "nonfinite", attempt=0, step=step, loss="nan")
    record(bare_run, 40, "val", loss=2.4, acc1=10.0)
    results = "DIVERGED: loss nan from step 10, 38 of 40 updates skipped · val acc1 10.00 % (best, step 40)"
    assert summary_lines(bare_run)[-1] == results
