"""Folders that no training of ours has written: there is a page all the same, with places that exist."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_page import Document
from trainkit.report.page import write_page
from trainkit.run.folder import RunDir

ODD: list[Any] = [
    *(0, 1, -1, 1e18, -1e18, 5e-324, 1e-300, 0.5, 100, 2**53 - 1, float("nan"), float("inf"), 10**30, 1e-17, -5),
    *(None, "x", [1], {"a": 1}, True, "<b>", 1.8e9),
]
CONFIGS = (
    *("not: [valid", "[]", ""),
    "optim: 3\nschedule: {name: 1, warmup_epochs: q}\nlaunch: {nodes: x}\nstrategy: {name: [dp]}\n",
    "train: {global_batch_size: 64}\nstrategy: {name: dp}\nschedule: {name: a, warmup_epochs: 2}\n",
)
METRICS = "time epoch loss acc1 acc5 lr images_per_sec seconds_data seconds_forward round peers parts parts_expected"
EVENT = "time attempt step total_steps steps_per_epoch world_size hosts signals rank host node state why error job_id"
KINDS = "submitted started handed_back requeued failed ended saved nonfinite skipped excluded cancelled rolled_back"
SAMPLE = "time cpu_percent memory_used_mb memory_total_mb process_memory_mb"
SUMMARY = "outcome steps best_step train_seconds max_memory_mb micro_batch_size grad_accum_steps seconds params energy"
COUNTS: list[Any] = [[[0, 1, 3], [1, 1, 2]], [[0, 9, 1]], [[0, 0]], 3, [[0, 0, 0]], [["a", 1, 1]], [[0, 0, 2**52]]]
NAMES: list[Any] = [["a", "b", "c"], 3, None, [None, {}, "<"], []]


def write_odd_run(path: Path, rng: random.Random) -> RunDir:
    """Every file of a run, with anything in it."""

    def odd() -> Any:
        return rng.choice(ODD) if rng.random() < 0.6 else rng.random() * 10 ** rng.randint(-12, 12)

    def record(keys: str) -> dict[str, Any]:
        return {key: odd() for key in keys.split() if rng.random() < 0.8}

    def lines(file: Path, records: list[dict[str, Any]]) -> None:
        file.write_text("".join(json.dumps(item) + rng.choice(["\n", "\n", '\n{"torn']) for item in records))

    path.mkdir(parents=True)
    run = RunDir(path)
    run.config.write_text(rng.choice(CONFIGS))
    numbers = [record(METRICS) | {"split": rng.choice(["train", "val", "test", 3])} for _ in range(rng.randint(0, 40))]
    lines(run.metrics, [item | {"step": rng.choice([at * 10, odd(), at])} for at, item in enumerate(numbers)])
    events = [record(EVENT) | {"event": rng.choice(KINDS.split())} for _ in range(rng.randint(0, 30))]
    times = [1.7e9 + rng.random() * rng.choice([1, 1e3, 1e7]) for _ in events]
    lines(run.events, [item | {"time": time} | {"hosts": ["a<"]} for item, time in zip(events, times, strict=True)])
    gpus: list[Any] = [None, 3, [{"index": 0, "util_percent": odd(), "power_w": odd()}], [{"index": odd()}], [3]]
    samples = [record(SAMPLE) | {"gpus": rng.choice(gpus)} for _ in range(rng.randint(0, 20))]
    lines(run.hardware("h"), [item | rng.choice([{}, {"time": 1.7e9 + at}]) for at, item in enumerate(samples)])
    counts = {"split": odd(), "step": odd(), "classes": rng.choice(NAMES), "raw": rng.choice(COUNTS)}
    run.confusion.write_text(json.dumps(counts))
    image = {"label": odd(), "told": odd(), "confidence": odd(), "png": rng.choice(["aa", 3, "iVBORw0KGgo=", ""])}
    run.mistakes("val").write_text(json.dumps({"step": odd(), "images": rng.choice([3, [], [image]])}))
    run.summary.write_text(
        json.dumps(rng.choice([record(SUMMARY), {"seconds": {"data": odd()}, "outcome": "finished"}]))
    )
    return run


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_stranger_has_recorded_there_is_a_page_with_places_that_exist(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for case in range(20):
        runs = [write_odd_run(tmp_path / str(case) / f"run-{at}", rng) for at in range(rng.randint(1, 3))]
        text = write_page(runs, tmp_path / str(case)).read_text()
        assert Document(text).sections() != []
        assert re.findall(r' (?:d|x|y|x1|x2|cx|cy|width|data-[a-z]+)="[^"]*\b(?:nan|inf)\b[^"]*"', text) == []
