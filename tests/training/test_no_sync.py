"""Between two log steps nobody waits for the device: what it computes is not asked for.

A GPU is made believe: on the CPU, whatever is computed from the model or the images counts as being on the device, and
each operation that would have to fetch a value from there is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.parts import keeper_of, parts_of
from trainkit.data.loader import TensorSamples
from trainkit.training import precision, update
from trainkit.training.loop import train
from trainkit.training.recorder import Progress, Recorder

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
        train, model = keeper.state.splits.train, keeper.state.model
        assert isinstance(train, TensorSamples)
        for tensor in (train.images, train.labels, *model.parameters(), *model.buffers()):
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
    parts = parts_of(*often, *settings)
    keeper = keeper_of(parts, tmp_path / "run", Progress())
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
def test_optimizers_that_cannot_leave_out_an_update_by_themselves_ask_once_an_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    found = fetched(monkeypatch, tmp_path, f"optim.name={name}")
    between = [position for position, _ in found if position % 5 and position < 14]
    assert between == sorted(set(range(14)) - {0, 5, 10})
