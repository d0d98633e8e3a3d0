"""Where the time goes: nothing is lost, nothing is counted twice, and each part has its own."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import Linear, Notes, keeper_of, parts_of
from trainkit.checkpoint.save import Checkpoints
from trainkit.distributed.process_group import distributed
from trainkit.monitor.stragglers import Stragglers
from trainkit.ranks.env import RankEnv
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.training import clock, loop, outcome
from trainkit.training.loop import train
from trainkit.training.outcome import Keeper
from trainkit.training.progress import Progress

RARELY = ("checkpoint.every_epochs=1000", "train.eval_every_epochs=1000")


class Slow(Linear):
    """A model that takes a while in its passes when it trains."""

    def __init__(self, *, forward: Callable[[], object] = lambda: None, backward: Callable[[], object]) -> None:
        super().__init__()
        self.in_forward, self.in_backward = forward, backward

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = super().forward(images)
        if self.training:
            self.in_forward()
            scores.register_hook(lambda gradient: self.in_backward() and None)
        return scores


def keeper_for(folder: Path, *overrides: str, **given: Any) -> Keeper:
    return keeper_of(parts_of(*overrides, **given), folder, Progress())


def trained(keeper: Keeper) -> dict[str, float]:
    train(keeper.parts, keeper, lambda: False)
    keeper.clock.settle(keeper.progress)
    return keeper.progress.seconds


def test_the_parts_add_up_to_the_wall_time(tmp_path: Path) -> None:
    keeper = keeper_for(tmp_path / "run", *RARELY)
    keeper.clock.settle(Progress())  # what was before is not what is measured
    began = time.perf_counter()
    assert sum(trained(keeper).values()) == pytest.approx(time.perf_counter() - began, rel=0.02)
    assert keeper.progress.seconds.keys() == set(clock.PARTS)


def test_between_two_records_as_well(tmp_path: Path) -> None:
    keeper = keeper_for(tmp_path / "run", "train.epochs=4", "monitor.log_every=3")
    trained(keeper)
    assert isinstance(keeper.metrics, Notes)
    first, *between = [record for record in keeper.metrics.records if record["split"] == "train"]
    counted = sum(value for record in between for key, value in record.items() if key.startswith("seconds_") and value)
    assert counted == pytest.approx(between[-1]["time"] - first["time"], rel=0.02, abs=0.005)
    assert {record["seconds_exposed"] for record in between} == {None}  # there is nobody to communicate with


class HandMoved:
    """Time that passes only where somebody says so: a second each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def second(self, *_: object) -> None:
        self.now += 1.0

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which now takes a second."""

        def slow(*args: Any, **named: Any) -> Any:
            self.second()
            return function(*args, **named)

        return slow


def test_each_part_has_what_is_done_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 updates of 2 micro batches, 2 validations, 2 checkpoints and that of the best, 6 records."""
    time = HandMoved(monkeypatch)
    keeper = keeper_for(tmp_path / "run", "train.epochs=2", model=Slow(forward=time.second, backward=time.second))
    parts = keeper.parts
    parts.optimizer.register_step_pre_hook(time.second)
    monkeypatch.setattr(Checkpoints, "save", time.before(Checkpoints.save))
    monkeypatch.setattr(outcome, "measure", time.before(outcome.measure))  # type: ignore[attr-defined]
    monkeypatch.setattr(Notes, "log", time.before(Notes.log))
    spent = trained(keeper)
    records = 6 + 2
    assert {name: seconds for name, seconds in spent.items() if seconds} == {
        "forward": 12, "backward": 12, "optimizer": 6, "checkpoint": 2, "evaluation": 2, "other": records,
    }  # fmt: skip
    assert keeper.progress.train_seconds == 12 + 12 + 6 + records


def test_the_first_batch_is_waited_for_at_the_start_and_all_others_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    time, progress = HandMoved(monkeypatch), Progress()
    watch = clock.Clock()
    for _ in range(3):
        watch.wait()
        time.second()
        watch.to(clock.COPY)
        watch.step()
    time.second()
    lap = watch.lap(progress)
    assert {name: seconds for name, seconds in progress.seconds.items() if seconds} == {
        "start": 1,
        "data": 2,
        "copy": 1,
    }
    assert (lap.steps, lap.training, lap.own, watch.lap(progress).steps) == (3, 3.0, 3.0, 0)


def test_time_is_kept_over_a_save_and_a_lap_begins_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    time, progress = HandMoved(monkeypatch), Progress(seconds={"data": 5.0})
    watch = clock.Clock()
    watch.to(clock.DATA)
    time.second()
    watch.settle(progress)
    time.second()
    assert (watch.lap(progress).training, watch.lap(progress).training) == (2.0, 0.0)
    assert (progress.seconds["data"], progress.train_seconds) == (7.0, 2.0)


def _run(env: RankEnv, folder: Path) -> tuple[float, float]:
    """A whole run: seconds from the start of this process to its summary, and what that counts."""
    process_began = psutil.Process().create_time()
    train_run(env, folder, "ddp", ("train.max_steps=19", "data.name=synthetic"))
    file = RunDir(folder).summary
    counted = json.loads(file.read_text())["seconds"]
    return file.stat().st_mtime - process_began, sum(counted.values())


@pytest.mark.long
def test_a_whole_run_accounts_for_its_time_from_the_start_of_the_process_to_its_summary(tmp_path: Path) -> None:
    (wall, counted), _ = run_ranks(2, _run, tmp_path / "run")
    assert counted == pytest.approx(wall, rel=0.02, abs=0.05)


def _slow_rank(env: RankEnv, folder: Path) -> dict[str, float]:
    def backward() -> None:
        time.sleep(0.05 * env.rank)

    with distributed(env, use_gpu=False) as dist:
        parts = parts_of("train.epochs=3", *RARELY, dist=dist, model=Slow(backward=backward))
        return trained(keeper_of(parts, folder / str(env.rank), Progress()))


def test_waiting_for_the_gradients_of_a_slower_rank_is_exposed_communication(tmp_path: Path) -> None:
    quick, slow = run_ranks(2, _slow_rank, tmp_path)
    assert slow["backward"] > 9 * 0.05 > slow["exposed"]
    assert quick["exposed"] > 0.8 * 9 * 0.05 > quick["backward"]


def _named(env: RankEnv, folder: Path) -> list[dict[str, Any]]:
    """With windows that are over with each record."""
    loop.Stragglers = partial(Stragglers, seconds=0.0, windows=3)  # type: ignore[assignment,attr-defined]  # a process of its own
    with distributed(env, use_gpu=False) as dist:
        model = Slow(backward=lambda: time.sleep(0.05 * env.rank))
        parts = parts_of("train.epochs=2", *RARELY, dist=dist, model=model)
        keeper = replace(keeper_of(parts, folder / str(env.rank), Progress()), hosts=("n1", "n2"))
        trained(keeper)
        return read_events(keeper.writer.run, "straggler")


def test_a_straggler_is_an_event_of_the_run(tmp_path: Path) -> None:
    (event,), others = run_ranks(2, _named, tmp_path)
    assert (event["rank"], event["host"]) == (1, "n2")
    assert event["step"] >= 3
    assert event["times"] > 1.5
    assert others == []


def test_the_loop_collects_garbage_at_records_and_not_in_between(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(("enabled" if gc.isenabled() else "by hand", progress.step))

    keeper = keeper_for(tmp_path / "run", "train.epochs=10", "monitor.log_every=10", *RARELY)
    progress = keeper.progress
    gc.callbacks.append(noted)
    try:
        train(keeper.parts, keeper, lambda: False)
    finally:
        gc.callbacks.remove(noted)
    assert {step for _, step in seen if step} >= {10, 20, 30}
    assert {step % 10 for how, step in seen if how == "by hand" and step > 1} == {0}
    assert gc.isenabled()
