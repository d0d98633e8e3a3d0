"""The loop around the updates: what it draws, what it leaves out, whom it tells that it lives."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tests.rank_functions import QUICK, run_ranks
from tests.training import parts as small
from tests.training.poisoned import SETTINGS
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.loading import load
from trainkit.data import build_data
from trainkit.distributed.process_group import distributed
from trainkit.monitor.loggers import NullLogger
from trainkit.ranks.env import RankEnv
from trainkit.run.events import Attempt, Writer
from trainkit.run.folder import RunDir
from trainkit.tasks.meter import Meter
from trainkit.training.build import TrainState, build
from trainkit.training.loop import train
from trainkit.training.precision import Stepped
from trainkit.training.recorder import Progress, Recorder
from trainkit.training.update import DivergedError, NonFinite, Update

TRAINKIT = Path(trainkit.__file__).parent


@contextmanager
def parts_of(env: RankEnv, preset: str, *settings: str) -> Iterator[TrainState]:
    config = load(preset, (*QUICK, *SETTINGS, *settings)).config
    with distributed(env, use_gpu=False) as dist:
        yield build(config, dist, build_data(config.data))


def keeper_of(parts: TrainState, folder: Path, position: int = 0, beat: Callable[[], None] = lambda: None) -> Recorder:
    run = RunDir(folder)
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(run.checkpoints, keep=1, dist=parts.dist)
    progress = Progress(step=position, position=position, validated_step=position)
    return Recorder(parts, Writer(Attempt(run, 0), lambda: None), checkpoints, NullLogger(), progress, beat)


def test_no_loop_has_an_update_of_its_own() -> None:
    updating = {
        str(file.relative_to(TRAINKIT))
        for file in TRAINKIT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"backward", "zero_grad", "clip_grad_norm_"}
    }
    assert updating == {"training/update.py", "training/precision.py"}


def _draws(env: RankEnv, folder: Path, position: int) -> list[float]:
    """What dropout would draw in each update."""
    drawn = []
    with parts_of(env, "ddp", "train.max_steps=5") as parts:
        parts.model.register_forward_hook(
            lambda module, *_: drawn.append(torch.rand(()).item()) if module.training else None
        )
        train(parts, keeper_of(parts, folder, position), lambda: False)
    return drawn


def test_dropout_draws_anew_in_each_update_and_on_each_rank_and_alike_after_a_restart(tmp_path: Path) -> None:
    first, second = run_ranks(2, _draws, tmp_path / "whole", 0)
    assert len({*first, *second}) == 10
    assert run_ranks(2, _draws, tmp_path / "rest", 3) == [first[3:], second[3:]]


def test_every_step_batch_update_and_save_is_a_sign_of_life(tmp_path: Path) -> None:
    beats: list[None] = []
    with parts_of(RankEnv.single(), "single", "train.max_steps=4", "train.micro_batch_size=4") as parts:
        train(parts, keeper_of(parts, tmp_path, beat=lambda: beats.append(None)), lambda: False)
    micro_batches, evaluated, around_the_save = 2, 6, 2  # 22 images, 4 at a time
    assert len(beats) == 4 * (1 + micro_batches + 1) + evaluated + around_the_save


def test_an_update_that_is_logged_validated_and_saved_is_summed_up_over_the_ranks_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed: list[Meter] = []
    sums = Meter.sums

    def noted(meter: Meter, **more: Any) -> list[float]:
        summed.append(meter)
        return sums(meter, **more)

    monkeypatch.setattr(Meter, "sums", noted)
    parts = small.parts_of("train.max_steps=3", "monitor.log_every=100")
    keeper = small.keeper_of(parts, tmp_path / "run", Progress())
    assert train(parts, keeper, lambda: False)
    training = summed[0]
    assert summed.count(training) == 2  # for the record, and for validation and checkpoint together


def test_on_a_gpu_the_answers_are_fetched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("item", "tolist"):
        real: Any = getattr(torch.Tensor, name)

        def ask(tensor: torch.Tensor, real: Any = real) -> Any:
            asked.append(tensor)
            return real(tensor)

        monkeypatch.setattr(torch.Tensor, name, ask)
    remarks = []
    with parts_of(RankEnv.single(), "single") as parts:
        far = replace(parts, dist=replace(parts.dist, device=torch.device("cuda")))
        watch = NonFinite(far, lambda kind, **facts: remarks.append((kind, facts["step"])), seed=0)
        asked.clear()
        for step in range(60):
            watch.add(step, step + 1, update_that_is(finite=step != 10))
        assert asked == []
        watch.look()
        assert len(asked) == 3, "all flags at once, the loss of the one that is bad, and its samples, which are here"
        assert remarks == [("nonfinite", 11)]
        for step in range(60, 63):
            watch.add(step, step + 1, update_that_is(finite=False))
        with pytest.raises(DivergedError):
            watch.look()


def update_that_is(*, finite: bool) -> Update:
    flag = torch.tensor(0.0 if finite else 1.0)
    return Update(torch.tensor(1.0), Stepped(None, flag, None))


def _statistics_after_validation(env: RankEnv, folder: Path) -> float:
    with parts_of(env, "fsdp", "model.name=fashion_cnn", "model.norm=batch") as parts:
        statistics = next(value for name, value in parts.model.named_buffers() if name.endswith("running_mean"))
        statistics.fill_(env.rank)
        keeper_of(parts, folder).validate({})
        return float(statistics[0])


def test_all_ranks_validate_with_the_running_statistics_of_rank_0(tmp_path: Path) -> None:
    assert run_ranks(2, _statistics_after_validation, tmp_path / "run") == [0.0, 0.0]
