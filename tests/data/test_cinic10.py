from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainkit.config.schema import DataConfig
from trainkit.data import build_data, pack_data
from trainkit.data.base import Batch, Splits
from trainkit.data.datasets import cinic10
from trainkit.data.loader import TensorSamples, eval_batches, resolve_workers, train_batches
from trainkit.errors import UserError


@pytest.fixture
def tiny(tmp_path: Path, write_images: Callable[..., None]) -> Path:
    for split, count in (("train", 3), ("valid", 2), ("test", 1)):
        folder = tmp_path / "cinic10" / split
        write_images(folder, {"airplane": count, "cat": count}, suffix="png", size=(32, 32))
    return tmp_path


def test_its_three_splits_are_train_val_and_test(tiny: Path) -> None:
    data = cinic10.build(tiny)
    assert [len(split) for split in (data.train, data.val, data.test)] == [6, 4, 2]
    assert data.info.class_names == ("airplane", "cat")


def test_images_are_augmented_and_resized_as_bytes(tiny: Path) -> None:
    data = cinic10.build(tiny, image_size=48)
    image = data.train_transform(data.train[0][0])
    assert (tuple(image.shape), image.dtype) == ((3, 48, 48), torch.uint8)


def test_the_root_may_be_the_data_sets_own_folder(tiny: Path) -> None:
    assert len(cinic10.build(tiny / "cinic10").train) == 6


def test_missing_data_comes_with_what_to_fetch_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"CINIC-10\.tar\.gz from https://[\s\S]*jobs\.prepare cinic10 --root "):
        cinic10.build(tmp_path)


# Packed


def packed(root: Path) -> Splits:
    pack_data("cinic10", root, 32, "raw", workers=1, say=lambda line: None)
    return build_data(DataConfig.model_validate({"name": "cinic10", "root": str(root), "pack": 32}))


def trained_on(data: Splits) -> list[Batch]:
    with train_batches(
        data, seed=3, start_step=1, stop_step=5, global_batch_size=4, micro_batch_size=2,
        rank=1, world_size=2, workers=0,
    ) as batches:  # fmt: skip
        return [*batches]


def test_its_pack_is_a_tensor_in_memory_and_gives_the_very_batches_of_the_files(tiny: Path) -> None:
    files, pack = cinic10.build(tiny), packed(tiny)
    assert isinstance(pack.train, TensorSamples)
    assert resolve_workers("auto", pack, cpus=8) == 0
    pairs = [*zip(trained_on(files), trained_on(pack), strict=True)]
    assert len(pairs) == 4
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
    seen = [
        [*eval_batches(data.val, data.eval_transform, batch_size=3, rank=0, world_size=1, workers=0)]
        for data in (files, pack)
    ]
    assert all(torch.equal(a, b) for one, other in zip(*seen, strict=True) for a, b in zip(one, other, strict=True))


def test_a_write_to_its_packed_images_does_not_reach_the_file(tiny: Path) -> None:
    before = packed(tiny).train[0][0].clone()
    image = packed(tiny).train[0][0]
    image.add_(1)
    assert not torch.equal(image, before)
    assert torch.equal(packed(tiny).train[0][0], before)


def test_a_pack_of_images_of_several_sizes_is_read_image_by_image(
    tiny: Path, write_images: Callable[..., None]
) -> None:
    write_images(tiny / "cinic10" / "test", {"cat": 1}, suffix="png", size=(30, 32))
    assert not isinstance(packed(tiny).train, TensorSamples)
