from __future__ import annotations

import pytest

from trainkit.config.checks import check_accumulation
from trainkit.config.loading import load
from trainkit.errors import UserError

STATIC = ("strategy.static_graph=true", "train.global_batch_size=64")


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(2, ("train.micro_batch_size=32",)), (4, ("train.micro_batch_size=16",)), (2, ()), (1, ())],
)
def test_a_static_graph_goes_with_one_micro_batch_an_update(world_size: int, settings: tuple[str, ...]) -> None:
    check_accumulation(load("ddp", (*STATIC, *settings)).config, world_size)


@pytest.mark.parametrize("preset", ["ddp", "zero"])
def test_a_static_graph_and_several_micro_batches_are_refused(preset: str) -> None:
    config = load(preset, (*STATIC, "train.micro_batch_size=16")).config
    with pytest.raises(UserError, match=r"micro batches of 16(.|\n)*train\.micro_batch_size=32"):
        check_accumulation(config, 2)
