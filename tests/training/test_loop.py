"""The loop around the updates: what it draws, what it leaves out, whom it tells that it lives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.rank_functions import QUICK, run_ranks
from tests.training import parts as small
from tests.training.poisoned import SETTINGS
from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load
from trainkit.data.registry import build_data
from trainkit.data.tensors import TensorSamples
from trainkit.distributed.process_group import distributed
from trainkit.training import precision, update
from trainkit.training.loop import train
from trainkit.training.progress import Progress
from trainkit.training.recorder import Recorder
from trainkit.training.train_state import TrainState, build


@contextmanager
def parts_of(env: RankEnv, preset: str, *settings: str) -> Iterator[TrainState]:
    config = load(preset, (*QUICK, *SETTINGS, *settings)).config
    with distributed(env, use_gpu=False) as dist:
        yield build(config, dist, build_data(config.data))


def keeper_of(parts: TrainState, folder: Path, position: int = 0, beat: Callable[[], None] = lambda: None) -> Recorder:
    progress = Progress(step=position, position=position, validated_step=position)
    return small.keeper_of(parts, folder / str(parts.dist.rank), progress, beat)


def _draws(env: RankEnv, folder: Path, position: int) -> list[float]:
    """What dropout would draw in each update."""
    drawn = []
    with parts_of(env, "ddp", "train.max_steps=5") as parts:
        parts.model.register_forward_hook(
            lambda module, *_: drawn.append(torch.rand(()).item()) if module.training else None
        )
        train(parts, keeper_of(parts, folder, position), lambda: False)
    return drawn


def test_dropout_draws_anew_on_each_rank_and_alike_after_a_restart(tmp_path: Path) -> None:
    first, second = run_ranks(2, _draws, tmp_path / "whole", 0)
    assert len({*first, *second}) == 10
    assert run_ranks(2, _draws, tmp_path / "rest", 3) == [first[3:], second[3:]]


def test_every_step_batch_update_and_save_is_a_sign_of_life(tmp_path: Path) -> None:
    beats: list[None] = []
    with parts_of(RankEnv.single(), "single", "train.max_steps=4", "train.micro_batch_size=4") as parts:
        train(parts, keeper_of(parts, tmp_path, beat=lambda: beats.append(None)), lambda: False)
    micro_batches, evaluated, around_the_save = 2, 6, 2  # 22 images, 4 at a time
    assert len(beats) == 4 * (1 + micro_batches + 1) + evaluated + around_the_save


def _statistics_after_validation(env: RankEnv, folder: Path) -> float:
    with parts_of(env, "fsdp", "model.name=fashion_cnn", "model.norm=batch") as parts:
        statistics = next(value for name, value in parts.model.named_buffers() if name.endswith("running_mean"))
        statistics.fill_(env.rank)
        keeper_of(parts, folder).validate({})
        return float(statistics[0])


def test_all_ranks_validate_with_the_running_statistics_of_rank_0(tmp_path: Path) -> None:
    assert run_ranks(2, _statistics_after_validation, tmp_path / "run") == [0.0, 0.0]


def test_images_grow_with_the_epoch_and_validation_is_at_full_size(tmp_path: Path) -> None:
    seen: list[tuple[bool, int]] = []
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), small.Linear())
    grow = ("augment.min_size=4", "augment.size_increment=2", "augment.ramp_epochs=[0,2]")
    parts = small.parts_of("data.image_size=8", *grow, "train.epochs=3", "monitor.log_every=1", model=model)
    parts.model.register_forward_hook(lambda module, args, _: seen.append((module.training, args[0].shape[-1])))
    keeper = keeper_of(parts, tmp_path)
    train(parts, keeper, lambda: False)
    sizes = [size for size in (4, 6, 8) for _ in range(parts.steps_per_epoch)]
    assert [size for training, size in seen if training] == [size for size in sizes for _ in range(2)]
    assert {size for training, size in seen if not training} == {8}
    records = keeper.metrics.records  # type: ignore[attr-defined]
    assert [record["image_size"] for record in records if record["split"] == "train"] == sizes


# Between two log steps nobody waits for the device: what it computes is not asked for.
#
# A GPU is made believe: on the CPU, whatever is computed from the model or the images counts as being on the device,
# and each operation that would have to fetch a value from there is noted.

# What gives the host a number, or a shape that depends on numbers.
FETCHING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive", "bincount"}
EVERYTHING = (
    "augment.mixup_alpha=0.8", "augment.cutmix_alpha=1", "augment.rand_augment_ops=2",
    "augment.random_erasing_prob=0.5", "augment.random_erasing_mode=pixel",
    "train.grad_clip_norm=1", "train.label_smoothing=0.1", "train.ema_decay=0.99",
    "data.augment=true", "data.image_size=4", "train.channels_last=true",
)  # fmt: skip


class Fetches(TorchDispatchMode):
    """Notes after how many updates which operation asked for a value that is on the device."""

    def __init__(self, keeper: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[int, str]] = []
        self._progress = keeper.progress
        images, model = keeper.state.splits.train, keeper.state.model
        assert isinstance(images, TensorSamples)
        for tensor in (images.images, images.labels, *model.parameters(), *model.buffers()):
            tensor.is_on_device = True  # type: ignore[attr-defined]

    def noting(self, name: str) -> Any:
        """The method ``name`` of tensors, noted where it is one on the device that is asked."""
        method = getattr(torch.Tensor, name)

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if hasattr(tensor, "is_on_device"):
                self.found.append((self._progress.position, name))
            return method(tensor, *args, **kwargs)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        if any(hasattr(item, "is_on_device") for item in given):
            name = func._schema.name.removeprefix("aten::")
            by_mask = name == "index" and any(item.dtype == torch.bool for item in given[1:])
            if name in FETCHING or by_mask:
                self.found.append((self._progress.position, name))
            for item in (*tree_leaves(result), *(given if name.endswith("_") else ())):
                if isinstance(item, torch.Tensor):
                    item.is_on_device = True  # type: ignore[attr-defined]
        return result


@contextmanager
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, keeper: Recorder) -> Iterator[Fetches]:
    for module in (update, precision):
        monkeypatch.setattr(module, "is_free_to_ask", lambda device: False)
    with Fetches(keeper) as fetches:
        for name in ("tolist", "numpy", "cpu"):  # which need no operation on a CPU
            monkeypatch.setattr(torch.Tensor, name, fetches.noting(name))
        yield fetches


def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *settings: str) -> list[tuple[int, str]]:
    """By 14 updates of which every fifth is logged, none is validated or saved."""
    often = ("monitor.log_every=5", "train.max_steps=14", "train.eval_every_epochs=99", "checkpoint.every_epochs=null")
    parts = small.parts_of(*often, *settings)
    keeper = small.keeper_of(parts, tmp_path / "run", Progress())
    with as_on_a_gpu(monkeypatch, keeper) as fetches:
        train(parts, keeper, lambda: False)
    return fetches.found


@pytest.mark.parametrize("settings", [(), EVERYTHING, ("optim.name=sgd", "optim.nesterov=true")], ids=str)
def test_the_device_is_asked_at_log_steps_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    found = fetched(monkeypatch, tmp_path, *settings)
    assert {position for position, _ in found} == {5, 10, 14}


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_optimizers_that_cannot_leave_out_an_update_ask_once_an_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    found = fetched(monkeypatch, tmp_path, f"optim.name={name}")
    between = [position for position, _ in found if position % 5 and position < 14]
    assert between == sorted(set(range(14)) - {0, 5, 10})
