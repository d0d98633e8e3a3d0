"""The same numbers everywhere: what a real run with two interruptions has recorded, as four readers tell it."""

import json
import os
import statistics
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import rank_functions
from tests.monitor.test_wandb import history as rows_of
from tests.monitor.test_wandb import run_of, stored
from tests.rank_functions import StopAfter, run_ranks, train_run
from tests.training.poisoned import SETTINGS
from trainkit.cluster.ranks import RankEnv
from trainkit.report.collection import collect
from trainkit.report.facts import Facts
from trainkit.report.writers import write_logbook
from trainkit.run.folder import RunDir

LOGGED = (
    *SETTINGS, "monitor.loggers=[jsonl,tensorboard,wandb]", "train.epochs=3", "checkpoint.every_steps=10",
    "monitor.log_every=2", "optim.lr=0.02",
)  # fmt: skip
CURVES = ("loss", "acc1", "acc5", "lr", "images_per_sec")


def attempt(env: RankEnv, folder: Path, stop_after: int | None = None) -> str:
    os.environ["WANDB_MODE"] = "offline"
    return train_run(env, folder, "single", LOGGED, stop_after)


class Breaks(StopAfter):
    """No request to stop, but an error: what was recorded since the last checkpoint is done again."""

    @property
    def requested(self) -> bool:  # type: ignore[override]
        if super().requested:
            raise OSError("broken by the test")
        return False


def attempt_that_breaks(env: RankEnv, folder: Path, reads: int) -> str:
    rank_functions.StopAfter = Breaks  # type: ignore[misc]  # in this process, which makes one attempt
    try:
        return attempt(env, folder, reads)
    except OSError:
        return "broken"


class Told(NamedTuple):
    run: RunDir
    records: dict[tuple[str, int], dict[str, Any]]
    """Those of ``metrics.jsonl``: the newest of each split and step, read by json alone."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("agree") / "single-0001"
    assert run_ranks(1, attempt, folder, 25) == ["preempted"]
    assert run_ranks(1, attempt_that_breaks, folder, 12) == ["broken"]
    assert run_ranks(1, attempt, folder) == ["finished"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["split"] == "train"]
    assert any(after <= before for before, after in pairwise(steps)), "something was done again"
    return Told(RunDir(folder), {(line["split"], line["step"]): line for line in lines})


def expected(told: Told, split: str, key: str) -> list[tuple[int, float]]:
    return sorted((step, record[key]) for (of, step), record in told.records.items() if of == split and key in record)


SHOWN = [*(("train", key) for key in CURVES), *(("val", key) for key in CURVES[:4])]


@pytest.mark.nightly
def test_tensorboard_shows_the_recorded_curves(told: Told) -> None:
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(told.run.tensorboard / told.run.name), size_guidance={"scalars": 0})
    events.Reload()
    for split, key in SHOWN:
        steps, values = zip(*((point.step, point.value) for point in events.Scalars(f"{key}/{split}")), strict=True)
        recorded_steps, recorded = zip(*expected(told, split, key), strict=True)
        assert steps == recorded_steps
        assert values == pytest.approx(recorded, rel=1e-6)


@pytest.mark.nightly
def test_wandb_shows_the_recorded_curves_as_one_run_over_all_attempts(told: Told) -> None:
    history, ids = dict[int, dict[str, float]](), set[str]()
    for records in stored(told.run):
        ids.add(run_of(records).run_id)
        for row in rows_of(records):  # a later attempt is drawn over an earlier one
            history.setdefault(row["step"], {}).update(row)
    assert len(ids) == 1
    for split, key in SHOWN:
        shown = sorted((step, row[f"{key}/{split}"]) for step, row in history.items() if f"{key}/{split}" in row)
        assert shown == expected(told, split, key)


@pytest.mark.nightly
def test_the_log_book_has_the_recorded_numbers(told: Told, tmp_path: Path) -> None:
    text = write_logbook(collect([told.run]), tmp_path)[0].read_text()
    val = [record for (split, _), record in sorted(told.records.items()) if split == "val"]
    best = max(val, key=lambda record: (record["acc1"], -record["step"]))
    (test,) = (record for (split, _), record in told.records.items() if split == "test")
    summary = json.loads((told.run.path / "summary.json").read_text())
    for name, record in (("val, best checkpoint", best), ("val, last", val[-1])):
        where = f"| {name} | {record['step']} | {record['epoch']:.1f} "
        assert f"{where}| {record['loss']:.4f} | {record['acc1']:.2f} % | {record['acc5']:.2f} % |" in text
    assert f"| {test['loss']:.4f} | {test['acc1']:.2f} % | {test['acc5']:.2f} % |" in text
    speed = statistics.median(value for _, value in expected(told, "train", "images_per_sec"))
    assert f"| throughput, median | {speed:,.0f} images/s |" in text
    assert f"| training time | {summary['train_seconds']:.1f} s |" in text
    assert "| attempts | 3 " in text
    events = [json.loads(line) for line in (told.run.path / "events.jsonl").read_text().splitlines()]
    began = [event["step"] for event in events if event["event"] == "started"]
    assert [f"| {step} to " in text for step in began] == [True] * 3
    assert Facts(told.run, "r").steps == 60 == max(step for _, step in told.records)
