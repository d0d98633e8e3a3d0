"""Where the time of a run goes: clock, stragglers, FLOPs, advice."""

from __future__ import annotations

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
from torch import nn

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import Linear, Notes, keeper_of, parts_of
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.loading import load
from trainkit.distributed.process_group import distributed
from trainkit.ranks.env import RankEnv
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.training import loop, recorder, timing
from trainkit.training.loop import train
from trainkit.training.recorder import Progress, Recorder
from trainkit.training.timing import WINDOW_SECONDS, WINDOWS, Place, Stragglers, advice, flops_per_image, peak_flops

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


def keeper_for(folder: Path, *overrides: str, **given: Any) -> Recorder:
    return keeper_of(parts_of(*overrides, **given), folder, Progress())


def trained(keeper: Recorder) -> dict[str, float]:
    train(keeper.state, keeper, lambda: False)
    keeper.clock.settle(keeper.progress)
    return keeper.progress.seconds


def test_the_parts_add_up_to_the_wall_time(tmp_path: Path) -> None:
    keeper = keeper_for(tmp_path / "run", *RARELY)
    keeper.clock.settle(Progress())  # what was before is not what is measured
    began = time.perf_counter()
    assert sum(trained(keeper).values()) == pytest.approx(time.perf_counter() - began, rel=0.02)
    assert keeper.progress.seconds.keys() == set(timing.PARTS)


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
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

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
    parts = keeper.state
    parts.optimizer.register_step_pre_hook(time.second)
    monkeypatch.setattr(Checkpoints, "save", time.before(Checkpoints.save))
    monkeypatch.setattr(recorder, "measure", time.before(recorder.measure))  # type: ignore[attr-defined]
    monkeypatch.setattr(Notes, "log", time.before(Notes.log))
    spent = trained(keeper)
    records = 6 + 2
    assert {name: seconds for name, seconds in spent.items() if seconds} == {
        "forward": 12, "backward": 12, "optimizer": 6, "checkpoint": 2, "evaluation": 2, "other": records,
    }  # fmt: skip
    assert keeper.progress.train_seconds == 12 + 12 + 6 + records


def test_the_first_batch_is_waited_for_at_the_start_and_all_others_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    time, progress = HandMoved(monkeypatch), Progress()
    watch = timing.Clock()
    for _ in range(3):
        watch.wait()
        time.second()
        watch.to(timing.COPY)
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
    watch = timing.Clock()
    watch.to(timing.DATA)
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


HOSTS = ("n1", "n1", "n2", "n2")
QUICK = [8.0, 8.0, 8.0, 8.0]
SLOW = [8.0, 8.0, 14.0, 8.0]
"""Of 15 s that all have taken for it."""


def named(*windows: list[float], wall: float = WINDOW_SECONDS, hosts: tuple[str, ...] = HOSTS) -> list[list[int]]:
    """Which ranks are named after each look."""
    watch = Stragglers(hosts)
    return [[found.rank for found in watch.look(own, wall)] for own in windows]


def test_a_rank_that_is_slow_for_a_minute_is_named_once() -> None:
    assert named(*[SLOW] * 9) == [[], [], [], [2], [], [], [], [], []]


def test_it_is_named_with_its_host_and_how_slow_it_is() -> None:
    watch = Stragglers(HOSTS)
    (found,) = [item for _ in range(WINDOWS) for item in watch.look(SLOW, WINDOW_SECONDS)]
    assert found.facts() == {"rank": 2, "host": "n2", "times": 1.75}
    assert "Rank 2 on n2 is a straggler" in str(found)


def test_one_quick_moment_and_all_begins_anew() -> None:
    assert named(SLOW, SLOW, SLOW, QUICK, SLOW, SLOW, SLOW) == [[]] * 7
    assert named(*[SLOW] * 4, QUICK, *[SLOW] * 4) == [[], [], [], [2], [], [], [], [], [2]]


def test_records_in_quick_succession_are_looked_at_together() -> None:
    tenth = [seconds / 10 for seconds in SLOW]
    assert named(*[tenth] * 10 * WINDOWS, wall=WINDOW_SECONDS / 10 + 1e-6)[-1] == [2]
    assert named(*[tenth] * (10 * WINDOWS - 1), wall=WINDOW_SECONDS / 10 + 1e-6)[-1] == []


@pytest.mark.parametrize(
    "own",
    [
        QUICK,
        [8.0, 8.0, 11.9, 8.0],  # no more than that may well be chance
        [0.5, 0.5, 1.9, 0.5],  # 4 times as slow, and nobody waits for it for long
        [14.0, 14.0, 8.0, 14.0],  # the quick one is not the trouble
    ],
)
def test_who_is_no_straggler(own: list[float]) -> None:
    assert named(*[own] * 9) == [[]] * 9


def test_two_of_four_are_named_both() -> None:
    assert named(*[[14.0, 14.0, 8.0, 8.0]] * WINDOWS)[-1] == [0, 1]


def test_of_two_ranks_one_can_be_a_straggler_and_one_alone_cannot() -> None:
    assert named(*[[5.0, 14.0]] * WINDOWS, hosts=("n1", "n2"))[-1] == [1]
    assert named(*[[14.0]] * WINDOWS, hosts=("n1",))[-1] == []


def test_ranks_whose_hosts_nobody_has_told_are_not_watched() -> None:
    assert named(*[SLOW] * WINDOWS, hosts=())[-1] == []


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Dropout(), nn.Flatten(), nn.Linear(320, 7)
    )


def test_the_flops_of_an_image_are_those_of_its_products_forward_and_backward() -> None:
    conv, linear = 2 * 64 * 5 * 3 * 9, 2 * 320 * 7
    # Backward: gradients by weights and by inputs, of which the first layer's inputs, the images, need none.
    assert flops_per_image(model(), 3, 8) == conv * 2 + linear * 3


def test_what_is_frozen_needs_no_gradient() -> None:
    part_frozen = model()
    for parameter in part_frozen[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    assert flops_per_image(part_frozen, 3, 8) == 2 * 64 * 5 * 3 * 9 + 2 * 320 * 7 * 3


def test_counting_changes_nothing() -> None:
    counted = model().eval()
    before = {name: value.clone() for name, value in counted.state_dict().items()}
    random = torch.get_rng_state()
    flops_per_image(counted, 3, 8)
    assert all(torch.equal(value, before[name]) for name, value in counted.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not counted.training
    assert all(parameter.grad is None and not parameter.is_meta for parameter in counted.parameters())


def test_a_model_that_looks_at_values_has_none() -> None:
    class Looks(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images if images.sum().item() > 0 else -images

    assert flops_per_image(Looks(), 3, 8) is None


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A10", "fp16", 125),
        ("NVIDIA A10G", "fp16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "tf32", 495),
        ("NVIDIA H100 NVL", "fp32", 60),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "o2", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("NVIDIA RTX A4000", "fp16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_the_peak_of_a_gpu_goes_by_its_name_and_the_precision(
    device: str, precision: str, tflops: float | None
) -> None:
    assert peak_flops(device, precision) == (None if tflops is None else tflops * 1e12)


def test_utilisation_is_what_all_gpus_do_of_what_they_could(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = replace(parts_of(), flops_per_image=24.3e9)
    assert timing.mfu(parts, 2500.0) is None  # a CPU's peak is not known
    monkeypatch.setattr(timing, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert timing.mfu(parts, 2500.0) == pytest.approx(100 * 24.3e9 * 2500 / 19.5e12, abs=0.01)  # in fp32
    assert timing.mfu(replace(parts, flops_per_image=None), 2500.0) is None
    assert timing.mfu(parts, None) is None


HERE = Place(world_size=2, workers=2, cpus=8)


def said_of(shares: dict[str, float]) -> str | None:
    return said(**shares)  # type: ignore[arg-type]


def said(
    *overrides: str, place: Place = HERE, preset: str = "ddp", total: float = 100.0, **shares: float
) -> str | None:
    """Of a run that spent so many percent on some things, and all else on the passes."""
    rest = (100.0 - sum(shares.values())) / 2
    percent = {"forward": rest, "backward": rest, **shares}
    seconds = {name: total * value / 100 for name, value in percent.items()}
    return advice({"start": 500.0, **seconds, "end": 500.0}, load(preset, overrides).config, place)


def test_waiting_for_data_wants_more_workers() -> None:
    assert said(data=62.0) == "62% data wait: data.workers=4"
    assert said(data=62.0, place=Place(world_size=1, workers=0, cpus=3)) == "62% data wait: data.workers=2"


def test_where_all_cpus_have_a_worker_it_wants_more_cpus() -> None:
    assert said(data=62.0, place=Place(world_size=1, workers=3, cpus=4)) == (
        "62% data wait: more CPUs for each rank, --cpus-per-task 8"
    )


def test_waiting_for_gradients_wants_less_to_send_or_to_send_it_more_rarely() -> None:
    assert (said(exposed=40.0) or "").endswith(": strategy.comm_hook=bf16")
    assert (said(exposed=40.0, preset="zero") or "").endswith(": strategy.comm_hook=bf16")
    again = said("strategy.comm_hook=bf16", "train.global_batch_size=64", exposed=40.0)
    assert (again or "").endswith(": train.global_batch_size=128")
    assert "train.global_batch_size" in (said(exposed=40.0, preset="fsdp") or ""), "it has no hooks"


def test_a_straggler_is_to_blame_for_waiting_and_no_setting() -> None:
    assert said(exposed=40.0, place=Place(world_size=2, workers=2, cpus=8, waits_for_one=True)) is None


def test_saving_and_validating_and_writing_too_often() -> None:
    assert said("checkpoint.every_epochs=1", checkpoint=12.0) == "12% saving: checkpoint.every_epochs=4"
    assert said("checkpoint.every_steps=10", checkpoint=12.0) == "12% saving: checkpoint.every_steps=40"
    assert said("train.eval_every_epochs=2", evaluation=35.0) == "35% validation: train.eval_every_epochs=8"
    assert (said("monitor.log_every=1", other=30.0) or "").endswith(": monitor.log_every=50")


def test_of_several_things_the_one_that_stands_out_most() -> None:
    assert (said(data=25.0, checkpoint=40.0) or "").startswith("40% saving")


@pytest.mark.parametrize(
    "shares",
    [
        {},
        {"data": 19.0},
        {"checkpoint": 9.0},
        {"evaluation": 29.0},
        {"exposed": 19.0},
        {"optimizer": 60.0},
        {"copy": 50.0},
    ],
)
def test_nothing_is_said_where_nothing_is_clear_or_no_setting_helps(shares: dict[str, float]) -> None:
    assert said_of(shares) is None


def test_nothing_is_said_of_a_short_run() -> None:
    assert said(data=62.0, total=29.0) is None
