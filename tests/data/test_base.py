import mmap
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.common import image_input, terminal
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
    assert (splits.in_memory, splits.expected) == (False, None)
    info = replace(INFO, mean=expected.mean, std=expected.std)
    assert splits.prepared_for(expected) == base.Splits(info, *samples, *mine, expected=expected)
    able = replace(splits, transforms_for={expected: theirs}.__getitem__).prepared_for(expected)
    assert (able.train_transform, able.eval_transform) == theirs


@pytest.mark.parametrize(("count", "size"), [(2, 4), (5, 200), (1, 400)])
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
    base.require_options({"image_size": None, "val_fraction": 0.9})
    base.require_options({"test_fraction": 0.9})
    base.require_options({})


@pytest.mark.parametrize(
    ("options", "key", "must_be"),
    [
        ({"image_size": 3}, "image_size", "4 or more"),
        ({"val_fraction": 0.0}, "val_fraction", "between 0 and 1"),
        ({"test_fraction": 1.0}, "test_fraction", "between 0 and 1"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "val_fraction", "less than 1 together with data.test_fraction"),
    ],
)
def test_an_impossible_option_is_refused_with_what_it_must_be(options: dict[str, Any], key: str, must_be: str) -> None:
    with pytest.raises(UserError) as refused:
        base.require_options(options)
    error = refused.value
    assert error.what == f"data.{key}={options[key]} is not possible."
    assert (error.why, error.key) == (f"data.{key} must be {must_be}.", f"data.{key}")


def test_errors_of_a_data_set_say_what_is_not_there_and_how_to_get_it() -> None:
    root = Path("/data")
    plain = base.missing("digits", root, root / "x")
    assert (plain.what, plain.key) == ("The data set 'digits' is not in /data.", "data.name")
    assert plain.why == "/data/x does not exist. To rehearse without it: data.fake=true."
    command = terminal.command("prepare", "digits", "--root", root)
    assert plain.fix == command
    assert base.missing("digits", root, root / "x", fix="Unpack it").fix == f"Unpack it: {command}"
    given = {"dataset": "me/set", "config": None}
    named = base.missing("hub", root, root / "x", what="It is gone.", key="dataset", given=given)
    assert (named.what, named.key) == ("It is gone.", "data.dataset")
    assert named.fix == terminal.command("prepare", "hub", "data.dataset=me/set", "--root", root)
    broken = base.damaged("digits", "It is cut.", "It ends early.")
    assert (broken.what, broken.why) == ("It is cut.", "It ends early.")
    assert broken.fix == f"Delete its folder, and fetch it again: {terminal.command('prepare', 'digits')}"


def test_the_first_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two", "three")]
    files[0].touch()
    with pytest.raises(UserError, match=f"^The data set 'mine' is not in {tmp_path}") as refused:
        base.require_files("mine", tmp_path, files)
    assert refused.value.why.startswith(f"{files[1]} does not exist")
    for file in files:
        file.touch()
    base.require_files("mine", tmp_path, files)


def test_a_class_is_one_of_several_labels() -> None:
    samples = base.OneOfSeveral([("image", 1), ("other", 0)], 3)
    assert len(samples) == 2
    image, label = samples[0]
    assert (image, label.tolist(), label.dtype) == ("image", [0, 1, 0], torch.uint8)


def test_normalizing_in_inference_leaves_constants_that_training_can_use() -> None:
    images = torch.full((1, 1, 2, 2), 51, dtype=torch.uint8)
    info = replace(INFO, mean=(0.123,), std=(0.25,))
    with torch.inference_mode():
        base.normalize(images, info)
    scale, shift = base._constants((0.123,), (0.25,), images.device)
    assert not scale.is_inference()
    assert not shift.is_inference()
