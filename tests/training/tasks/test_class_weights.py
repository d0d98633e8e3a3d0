"""Classes that count for more: the weighted mean over the global batch, however it is divided."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.training.parts import parts_of
from tests.training.test_update import PLAIN, micro_batches
from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import StopFlag
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.data.tensors import TensorSamples
from trainkit.training.experiment import run
from trainkit.training.tasks.classification import weights_of
from trainkit.training.update import Updater

ASKED = "train.class_weights=[5, 1, 0.25, 2, 1, 3, 0.5]"


def test_the_loss_that_is_recorded_is_that_of_all_samples_alike() -> None:
    found = []
    for settings in ((), (ASKED,)):
        update = Updater(parts_of(*PLAIN, *settings))
        made = update(micro_batches(), lr=0.5, seed=0)
        found.append((update.meter.read(), made.loss.item()))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] != pytest.approx(found[1][1])


def splits_of(labels: list[int]) -> Any:
    samples = TensorSamples(torch.zeros(len(labels), 3, 4, 4, dtype=torch.uint8), torch.tensor(labels))
    return replace(parts_of().splits, train=samples)


class Unlabelled:
    """Images that would all have to be read for their labels."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        raise AssertionError("read")


def test_balanced_is_samples_by_classes_and_samples_of_the_class() -> None:
    labels = [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 6]
    assert weights_of("balanced", splits_of(labels)) == [11 / (7 * labels.count(label)) for label in range(7)]
    with pytest.raises(UserError, match="has none of class 3, class 5"):
        weights_of("balanced", splits_of([0, 1, 2, 4, 6]))
    with pytest.raises(UserError, match="does not tell them"):
        weights_of("balanced", replace(parts_of().splits, train=Unlabelled(), in_memory=False))


def test_a_wrong_number_of_weights_is_refused_before_there_is_a_run() -> None:
    config = load("single", ["train.class_weights=[1, 2]"]).config
    with pytest.raises(UserError, match="has 2 weights, and digits has 10 classes"):
        run(config, RankEnv.single(), StopFlag(), open_run=lambda: pytest.fail("a run folder was made"))
