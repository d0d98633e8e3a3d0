"""Where the time of a run goes: clock, stragglers, FLOPs, advice."""

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
from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load
from trainkit.distributed.process_group import distributed
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.training import clock, costs, loop, recorder
from trainkit.training.clock import WINDOW_SECONDS, WINDOWS, Stragglers, flops_per_image, peak_flops
from trainkit.training.costs import advice
from trainkit.training.evaluation import measure
from trainkit.training.loop import train
from trainkit.training.progress import Progress
from trainkit.training.recorder import Instruments, Recorder

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
    keeper.instruments.clock.settle(keeper.progress)
    return keeper.progress.seconds


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
    parts = keeper.state
    parts.optimizer.register_step_pre_hook(time.second)
    monkeypatch.setattr(Checkpoints, "save", time.before(Checkpoints.save))
    monkeypatch.setattr(recorder, "measure", time.before(measure))
    monkeypatch.setattr(Notes, "log", time.before(Notes.log))
    spent = trained(keeper)
    records = 6 + 2
    assert {name: seconds for name, seconds in spent.items() if seconds} == {
        "forward": 12, "backward": 12, "optimizer": 6, "checkpoint": 2, "evaluation": 2, "other": records,
    }  # fmt: skip
    assert keeper.progress.train_seconds == 12 + 12 + 6 + records
    assert isinstance(keeper.metrics, Notes)
    record = keeper.metrics.records[1]
    told = {name: record[f"seconds_{name}"] for name in ("forward", "backward", "optimizer", "exposed")}
    assert told == {"forward": 2, "backward": 2, "optimizer": 1, "exposed": None}  # nobody to communicate with


def _run(env: RankEnv, folder: Path) -> tuple[float, float]:
    """A whole run: seconds from the start of this process to its summary, and what that counts."""
    process_began = psutil.Process().create_time()
    train_run(env, folder, "ddp", ("train.max_steps=19", "data.name=synthetic"))
    file = RunDir(folder).summary
    counted = json.loads(file.read_text())["seconds"]
    return file.stat().st_mtime - process_began, sum(counted.values())


@pytest.mark.long
def test_a_whole_run_accounts_for_all_time_of_its_process(tmp_path: Path) -> None:
    (wall, counted), _ = run_ranks(2, _run, tmp_path / "run")
    assert counted == pytest.approx(wall, rel=0.02, abs=0.05)


def _slow_rank(env: RankEnv, folder: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """With windows that are over with each record."""
    loop.Stragglers = partial(Stragglers, seconds=0.0, windows=3)  # type: ignore[assignment,attr-defined]  # a process of its own
    with distributed(env, use_gpu=False) as dist:
        model = Slow(backward=lambda: time.sleep(0.05 * env.rank))
        parts = parts_of("train.epochs=3", *RARELY, dist=dist, model=model)
        keeper = replace(
            keeper_of(parts, folder / str(env.rank), Progress()), instruments=Instruments(hosts=("n1", "n2"))
        )
        return trained(keeper), read_events(keeper.writer.run, "straggler")


def test_waiting_for_a_slower_rank_is_exposed_communication_and_an_event(tmp_path: Path) -> None:
    (quick, events), (slow, others) = run_ranks(2, _slow_rank, tmp_path)
    assert slow["backward"] > 9 * 0.05 > slow["exposed"]
    assert quick["exposed"] > 0.8 * 9 * 0.05 > quick["backward"]
    assert [(event["rank"], event["host"]) for event in events] == [(1, "n2")]
    assert events[0]["step"] >= 3
    assert events[0]["times"] > 1.5
    assert others == []


HOSTS = ("n1", "n1", "n2", "n2")
QUICK = [8.0, 8.0, 8.0, 8.0]
SLOW = [8.0, 8.0, 14.0, 8.0]
"""Of 15 s that all have taken for it."""


PAIR = ("n1", "n2")


@pytest.mark.parametrize(
    ("windows", "hosts", "found"),
    [
        ([SLOW] * 9, HOSTS, {3: [2]}),  # named once
        ([SLOW, SLOW, SLOW, QUICK, SLOW, SLOW, SLOW], HOSTS, {}),  # one quick moment, and all begins anew
        ([*[SLOW] * 4, QUICK, *[SLOW] * 4], HOSTS, {3: [2], 8: [2]}),
        ([[8.0, 8.0, 11.9, 8.0]] * 9, HOSTS, {}),  # no more than that may well be chance
        ([[0.5, 0.5, 1.9, 0.5]] * 9, HOSTS, {}),  # 4 times as slow, and nobody waits for it for long
        ([[14.0, 14.0, 8.0, 14.0]] * 9, HOSTS, {}),  # the quick one is not the trouble
        ([[5.0, 14.0]] * WINDOWS, PAIR, {3: [1]}),
        ([[14.0]] * WINDOWS, ("n1",), {}),
        ([SLOW] * WINDOWS, (), {}),  # nobody has told their hosts
    ],
)
def test_a_straggler_is_who_is_slow_for_a_minute_and_makes_others_wait(
    windows: list[list[float]], hosts: tuple[str, ...], found: dict[int, list[int]]
) -> None:
    watch = Stragglers(hosts)
    named = [[straggler.rank for straggler in watch.look(own, WINDOW_SECONDS)] for own in windows]
    assert {at: ranks for at, ranks in enumerate(named) if ranks} == found


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Dropout(), nn.Flatten(), nn.Linear(320, 7)
    )


def test_the_flops_of_an_image_are_those_of_products_forward_and_backward() -> None:
    conv, linear = 2 * 64 * 5 * 3 * 9, 2 * 320 * 7
    counted, part_frozen, random = model().eval(), model(), torch.get_rng_state()
    part_frozen[0].requires_grad_(False)
    before = {name: value.clone() for name, value in counted.state_dict().items()}
    # Backward: gradients by weights and by inputs, of which the first layer's inputs, the images, need none.
    assert flops_per_image(counted, 3, 8) == conv * 2 + linear * 3
    assert flops_per_image(part_frozen, 3, 8) == conv + linear * 3
    assert all(torch.equal(value, before[name]) for name, value in counted.state_dict().items()), "nothing is changed"
    assert torch.equal(torch.get_rng_state(), random)
    assert not counted.training
    assert all(parameter.grad is None and not parameter.is_meta for parameter in counted.parameters())

    class Looks(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images if images.sum().item() > 0 else -images

    assert flops_per_image(Looks(), 3, 8) is None, "it cannot be traced without data"


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312), ("NVIDIA A10", "fp16", 125), ("NVIDIA A10G", "fp16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756), ("Tesla T4", "o2", 65),
        ("Tesla T4", "bf16", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None), ("cpu", "fp32", None),
        ("AMD Instinct MI250X", "bf16", 191.5), ("AMD Instinct MI250", "bf16", 181),
        ("AMD Radeon Graphics", "bf16", None), ("Intel(R) Data Center GPU Max 1550", "fp16", 419),
    ],
)  # fmt: skip
def test_the_peak_of_a_gpu_goes_by_its_name_and_precision(device: str, precision: str, tflops: float | None) -> None:
    assert peak_flops(device, precision) == (None if tflops is None else tflops * 1e12)


def test_utilisation_is_what_all_gpus_do_of_what_they_could(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = replace(parts_of(), flops_per_image=24.3e9)
    assert costs.mfu(parts, 2500.0) is None  # a CPU's peak is not known
    monkeypatch.setattr(costs, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert costs.mfu(parts, 2500.0) == pytest.approx(100 * 24.3e9 * 2500 / 19.5e12, abs=0.01)  # in fp32
    assert costs.mfu(replace(parts, flops_per_image=None), 2500.0) is None
    assert costs.mfu(parts, None) is None


HERE = (2, 2, 8)
"""Ranks, loader processes and CPUs of each; and whether there is a straggler."""
WAITING = "40% waiting for gradients of other ranks: "


@pytest.mark.parametrize(
    ("spent", "place", "settings", "told"),
    [
        ({"data": 62}, HERE, ("ddp",), "62% data wait: data.workers=4"),
        ({"data": 62}, (1, 0, 3), ("ddp",), "62% data wait: data.workers=2"),
        ({"data": 62}, (1, 3, 4), ("ddp",), "62% data wait: more CPUs for each rank, --cpus-per-task 8"),
        ({"exposed": 40}, HERE, ("ddp",), WAITING + "strategy.comm_hook=bf16"),
        # It has no hooks.
        ({"exposed": 40}, HERE, ("fsdp", "train.global_batch_size=64"), WAITING + "train.global_batch_size=128"),
        ({"exposed": 40}, (2, 2, 8, True), ("ddp",), None),  # that one is to blame, and no setting
        ({"checkpoint": 12}, HERE, ("ddp", "checkpoint.every_epochs=1"), "12% saving: checkpoint.every_epochs=4"),
        ({"checkpoint": 12}, HERE, ("ddp", "checkpoint.every_steps=10"), "12% saving: checkpoint.every_steps=40"),
        ({"evaluation": 35}, HERE, ("ddp", "train.eval_every_epochs=2"), "35% validation: train.eval_every_epochs=8"),
        ({"other": 30}, HERE, ("ddp", "monitor.log_every=1"), "30% records and the loop itself: monitor.log_every=50"),
        ({"data": 25, "checkpoint": 40}, HERE, ("ddp",), "40% saving: checkpoint.every_epochs=14"),
        *(
            (spent, HERE, ("ddp",), None)
            for spent in ({}, {"data": 19}, {"checkpoint": 9}, {"evaluation": 29}, {"exposed": 19}, {"copy": 50})
        ),
    ],
)  # fmt: skip
def test_the_advice_is_of_what_stands_out_most_if_a_setting_helps(
    spent: dict[str, float], place: tuple[int, ...], settings: tuple[str, ...], told: str | None
) -> None:
    rest = (100.0 - sum(spent.values())) / 2
    seconds = {"start": 500.0, "forward": rest, "backward": rest, **spent, "end": 500.0}
    config = load(settings[0], settings[1:]).config
    given: Any = dict(zip(("world_size", "workers", "cpus", "straggler"), place, strict=False))
    assert advice(seconds, config, **given) == told
    short = {name: 0.29 * value for name, value in seconds.items()}
    assert advice(short, config, **given) is None, "too short a run to say anything of"
