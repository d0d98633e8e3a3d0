import mmap
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.common import image_input
from trainkit.common.errors import UserError
from trainkit.data import base

INFO = image_input.DataInfo("mine", 10, 1, 28, (), mean=(0.1,), std=(0.2,))
KNOWN: dict[str, Any] = {"mean": (0.3, 0.5, 0.7), "std": (0.1, 0.2, 0.6), "interpolation": "bicubic", "crop": 0.9}


def test_of_gray_images_weights_expect_the_average_of_their_channels() -> None:
    assert replace(INFO, in_chans=3).as_input("weights", **KNOWN) == image_input.ModelInput("weights", **KNOWN)
    gray = INFO.as_input("weights", **KNOWN)
    assert (*gray.mean, *gray.std) == pytest.approx((0.5, 0.3))


def test_images_are_prepared_as_weights_expect_them_where_the_data_set_can() -> None:
    mine, theirs = (torch.zeros, torch.ones), (torch.empty, torch.tensor)
    samples = [(0, 0)], [(0, 1)], [(0, 2)]
    splits, expected = base.Splits(INFO, *samples, *mine), INFO.as_input("weights", **KNOWN)
    assert splits.prepared_for(None) == splits
    info = replace(INFO, mean=expected.mean, std=expected.std)
    assert splits.prepared_for(expected) == base.Splits(info, *samples, *mine, expected=expected)
    able = replace(splits, transforms_for={expected: theirs}.__getitem__).prepared_for(expected)
    assert (able.train_transform, able.eval_transform) == theirs


@pytest.mark.parametrize(("count", "size"), [(2, 4), (5, 200), (2, 400)])
def test_images_keep_the_layout_of_bytes_or_get_that_of_tensor_cores(count: int, size: int) -> None:
    info = replace(INFO, in_chans=3, mean=(0.1, 0.2, 0.3), std=(0.2, 0.2, 0.1))
    images = torch.full((count, 3, size, size), 51, dtype=torch.uint8)
    for layout, how in ((torch.contiguous_format, {}), (torch.channels_last, {"channels_last": True})):
        normal = base.normalize(images, info, **how)
        assert normal.is_contiguous(memory_format=layout)
        assert normal[-1, :, 2, 3].tolist() == pytest.approx([0.5, 0.0, -1.0], abs=1e-6)
        assert torch.equal(normal, normal[-1:, :, 2:3, 3:4].expand_as(normal)), "one like the other"


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux")
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_large_batch_takes_few_page_faults_and_has_the_values_of_its_parts(channels_last: bool) -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel has huge pages switched off")
    info = replace(INFO, in_chans=3, mean=(0.1, 0.2, 0.3), std=(0.2, 0.2, 0.1))
    images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)
    base.normalize(images[:1], info, channels_last=channels_last)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    normal = base.normalize(images, info, channels_last=channels_last)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 3000, "its memory has 9,408 pages"
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert normal.is_contiguous(memory_format=layout)
    for number in (0, 63):
        assert torch.equal(normal[number], base.normalize(images[number : number + 1], info)[0])


def test_fractions_leave_something_to_train_on() -> None:
    base.require_options({"image_size": 4, "val_fraction": 0.5, "test_fraction": 0.4})
    with pytest.raises(UserError, match=r"data\.val_fraction=0\.5"):
        base.require_options({"val_fraction": 0.5, "test_fraction": 0.5})
