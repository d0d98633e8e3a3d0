"""What the code of a user's own data set returns, and what training says of it before it begins."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.data import DataInfo, Splits
from trainkit.data.loader import Loading, train_batches
from trainkit.data.own_samples import check_first_samples
from trainkit.distributed.process_group import Distributed
from trainkit.training import experiment
from trainkit.training.startup import Reports

INFO = DataInfo("mine", 2, 1, 4, ("a", "b"), (0.5,), (0.25,))
PIXELS = torch.arange(16, dtype=torch.uint8).view(1, 4, 4) * 16
GOOD = [(PIXELS, 0), (PIXELS, 1)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(GOOD)


def mine(part: Any, split: str = "train", *, info: DataInfo = INFO) -> Splits:
    """A data set of which one split is ``part``."""
    parts: dict[str, Any] = {"train": GOOD, "val": GOOD, "test": GOOD, split: part}
    return Splits(info, **parts, train_transform=lambda image: image, eval_transform=lambda image: image)


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ((PIXELS / 255, 0), f"Images are scaled already.*first sample of SPLIT.*floats from 0.00 to {240 / 255:.2f}"),
        (((PIXELS / 255 - 0.485) / 0.229, 0), "Images are scaled already"),
        ((PIXELS.permute(1, 2, 0), 0), "in_chans=1, and an image has other channels.*first sample of SPLIT has 4"),
        ((PIXELS[0], 0), "no tensor of three dimensions.*a tensor of 2 dimensions"),
        ((Image.new("L", (4, 4)), 0), "no tensor of three dimensions.*returned Image"),
        ((np.zeros((1, 4, 4), np.uint8), 0), "no tensor of three dimensions.*returned ndarray"),
        ((PIXELS, "a"), "Labels are no numbers"),
        ((PIXELS, 0.0), r"A label is not one of 2 classes.*SPLIT is 0.0, of the type float32.*from 0 to 1"),
        ((PIXELS, torch.tensor([1, 0])), r"A label is not one of 2 classes.*SPLIT is \[1, 0\]"),
        ((PIXELS, 2), "A label is not one of 2 classes.*SPLIT is 2, of the type int64"),
        (PIXELS, "is no pair.*It is Tensor of length 1"),
        (None, "is no pair.*It is NoneType"),
        ({"image": PIXELS, "label": 0}, "is no pair.*It is dict of length 2"),
    ],
)
def test_a_sample_that_training_cannot_use_is_refused_before_training(sample: Any, said: str, split: str) -> None:
    with pytest.raises(UserError) as refused:
        check_first_samples(mine([sample] * 2, split), "one", 0)
    assert refused.value.key == "data.name"
    text = " ".join(str(refused.value).split())
    assert re.search(said.replace("SPLIT", split), text), text


def test_a_split_without_numbered_samples_and_an_empty_val_are_refused() -> None:
    with pytest.raises(UserError, match=r"The test split has no samples by number.*\n.*It is Stream"):
        check_first_samples(mine(Stream(), "test"), "one", 0)
    with pytest.raises(UserError, match="The val split has no images"):
        check_first_samples(mine([], "val"), "one", 0)


def test_what_a_task_of_ones_own_understands_is_let_through() -> None:
    counts = DataInfo("mine", 1, 1, 4, ("age",), (0.0,), (1 / 255,))
    check_first_samples(mine([(PIXELS / 255, 0.5)] * 2, info=counts), None, 0)  # floats that no one scales again
    check_first_samples(mine([(torch.zeros(1, 4, 4), 1)] * 2), "one", 0)  # a black picture
    check_first_samples(mine([], "test"), "one", 0)
    with pytest.raises(UserError, match="which of 2 classes an image has"):
        check_first_samples(mine(GOOD), "several", 0)


def test_it_is_read_in_a_loader_process_where_training_has_some(tmp_path: Path) -> None:
    class Opened:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            (tmp_path / str(os.getpid())).touch()
            return GOOD[index]

    check_first_samples(mine(Opened()), "one", 3)
    read_in = [int(path.name) for path in tmp_path.iterdir()]
    assert len(read_in) == 1
    assert os.getpid() not in read_in


@pytest.mark.parametrize(("odd", "said"), [(None, "is no pair"), ((PIXELS, "b"), "Labels are no numbers")])
def test_a_later_sample_is_refused_without_a_traceback_of_the_loader(odd: Any, said: str) -> None:
    splits = mine([GOOD[0], odd])
    batches = train_batches(splits, Loading(), seed=0, steps=range(2), global_batch_size=1, micro_batch_size=1)
    with batches, pytest.raises(UserError, match=said):
        list(batches)


def scaled(root: Path) -> Splits:
    """A user's data set whose images are scaled already."""
    return mine([(PIXELS / 255, 0)] * 2, "val")


def test_training_reads_them_before_it_begins() -> None:
    config = load("single", [f"data.name={__name__}:scaled", "data.workers=0", "train.global_batch_size=2"]).config
    alone = Distributed(RankEnv.single(), torch.device("cpu"))
    with pytest.raises(UserError, match="first sample of val"):
        experiment._read_data(config, alone, Reports().starting)
