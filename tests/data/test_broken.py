from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainkit.data.base import Splits
from trainkit.data.datasets import image_folder
from trainkit.data.folders import Broken, BrokenImageError
from trainkit.data.loader import eval_batches, train_batches
from trainkit.errors import UserError


@pytest.fixture
def data(tmp_path: Path, write_images: Callable[..., None]) -> Splits:
    """Three splits of 2 x 8 images; of train number 3 and 4 are broken, and the last."""
    for split in ("train", "val"):
        write_images(tmp_path / split, {"cat": 8, "dog": 8}, size=(8, 8))
    for name in ("cat/003", "cat/004", "dog/007"):
        (tmp_path / "train" / f"{name}.jpg").write_bytes(b"\xff\xd8\xff no image")
    return image_folder.build(tmp_path, image_size=8, augment=False)


def trained_on(data: Splits, *, most: int, rank: int = 0, world: int = 1, workers: int = 0) -> tuple[Tensor, Broken]:
    broken = Broken(most)
    found = train_batches(
        data, seed=0, start_step=0, stop_step=2, global_batch_size=8, micro_batch_size=8 // world,
        rank=rank, world_size=world, workers=workers, broken=broken,
    )  # fmt: skip
    with found:
        return torch.cat([batch.images for batch in found]), broken


def test_in_training_the_next_whole_image_stands_in_whichever_rank_or_worker_meets_the_broken(
    data: Splits, tmp_path: Path
) -> None:
    alone, broken = trained_on(data, most=3)
    assert sorted(Path(file).name for file in broken.met) == ["003.jpg", "004.jpg", "007.jpg"]
    parts = [trained_on(data, most=3, rank=rank, world=2, workers=rank) for rank in (0, 1)]
    in_order = [images.view(2, 4, 3, 8, 8) for images, _ in parts]
    assert torch.equal(torch.cat(in_order, dim=1).flatten(0, 1), alone)
    assert {**parts[0][1].met, **parts[1][1].met} == broken.met
    train = tmp_path / "train"
    for name, next_whole in (("cat/003", "cat/005"), ("cat/004", "cat/005")):
        (train / f"{name}.jpg").write_bytes((train / f"{next_whole}.jpg").read_bytes())
    (train / "dog/007.jpg").write_bytes((train / "cat/000.jpg").read_bytes())
    assert torch.equal(trained_on(image_folder.build(tmp_path, image_size=8, augment=False), most=0)[0], alone)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_ends_the_run_by_its_name_where_none_may_be(data: Splits, workers: int) -> None:
    with pytest.raises(BrokenImageError, match=r"Cannot decode the image .*\.jpg"):
        trained_on(data, most=0, workers=workers)


def test_more_broken_images_in_a_row_than_may_be_end_the_run(data: Splits) -> None:
    with pytest.raises(BrokenImageError, match=r"cat/004\.jpg"):
        trained_on(data, most=1)


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_leaves_broken_images_out_of_its_counts(data: Splits, world: int) -> None:
    broken = Broken(3)
    found = [
        eval_batches(
            data.train, data.eval_transform, batch_size=3, rank=rank, world_size=world, workers=0, broken=broken
        )
        for rank in range(world)
    ]
    batches = [batch for of_rank in found for batch in of_rank]
    assert sum(int(batch.mask.sum()) for batch in batches) == 13
    assert len(broken.met) == 3
    assert all(batch.images.shape == (3, 3, 8, 8) for batch in batches)


def test_an_image_that_cannot_be_read_ends_the_run_for_that_may_pass(data: Splits, tmp_path: Path) -> None:
    (tmp_path / "train/cat/000.jpg").unlink()
    with pytest.raises(UserError, match=r"Cannot read .*000\.jpg"):
        trained_on(data, most=9)
