from __future__ import annotations

from pathlib import Path

import torch

from trainkit.data.base import DataInfo, missing, normalize


def info(mean: tuple[float, ...], std: tuple[float, ...]) -> DataInfo:
    return DataInfo("x", 2, len(mean), 4, ("a", "b"), mean, std)


def test_bytes_become_floats_of_zero_mean_and_unit_variance() -> None:
    images = torch.randint(0, 256, (64, 3, 4, 4), dtype=torch.uint8)
    scaled = images.double() / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3))
    normal = normalize(images, info(tuple(mean.tolist()), tuple(std.tolist())))
    assert normal.dtype == torch.float32
    assert torch.allclose(normal.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(normal.std((0, 2, 3)), torch.ones(3), atol=1e-5)


def test_normalising_leaves_the_batch_as_it_was() -> None:
    images = torch.full((1, 1, 4, 4), 200, dtype=torch.uint8)
    normalize(images, info((0.5,), (0.5,)))
    assert bool((images == 200).all())


def test_missing_data_comes_with_the_command_that_fetches_it() -> None:
    error = missing("cifar10", Path("data"), Path("data/x"))
    assert error.fix == "python -m jobs.prepare cifar10 --root data"
