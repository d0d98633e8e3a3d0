"""A sharded model is whole on the host of rank 0 only, while it is made; its weights are those of the plain one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.rank_functions import QUICK, run_ranks
from tests.training.parts import SMALL
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.distributed.process_group import distributed
from trainkit.models import build_model
from trainkit.ranks.env import RankEnv
from trainkit.training.building import build
from trainkit.training.hollow import build_hollow

LARGE = 32 * 4  # MiB


def config_of(model: str, *more: str) -> Config:
    settings = (f"model.name=tests.training.hollow_models:{model}", "train.global_batch_size=12", *more)
    return load("fsdp", (*QUICK, *SMALL, "train.micro_batch_size=null", *settings)).config


def _differences(env: RankEnv, config: Config) -> list[str]:
    """Names of the tensors that are others than those of the plain model; and how a batch goes through it."""
    with distributed(env, use_gpu=False) as dist:
        splits = build_data(config.data)
        parts, plain = build(config, dist, splits), build_model(config.model, splits.info, config.seed)
        own = dict(parts.model.named_parameters()) | dict(parts.model.named_buffers())
        full = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in own.items()}
        there = dict(plain.named_parameters()) | dict(plain.named_buffers())
        assert full.keys() == there.keys()
        wrong = [name for name, value in there.items() if not torch.equal(value, full[name])]
        trained = {name for name, value in own.items() if value.requires_grad}
        if trained != {name for name, value in there.items() if value.requires_grad}:
            wrong.append("what is trained")
        images = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
        parts.model(images).sum().backward()
        plain(images).sum().backward()
        for name, value in plain.named_parameters():
            if value.grad is not None:  # of a tied weight both its uses
                gradient = parts.model.get_parameter(name).grad
                if not torch.allclose(gradient.full_tensor(), value.grad, atol=1e-5):  # type: ignore[union-attr]
                    wrong.append(f"gradient of {name}")
        return wrong


@pytest.mark.parametrize("more", ["looks=false", "looks=true", "keeps=true"])
def test_every_rank_has_its_part_of_the_very_weights_of_the_plain_model(more: str) -> None:
    assert run_ranks(3, _differences, config_of("odd", f"model.{more}")) == [[]] * 3


def _grown(env: RankEnv, config: Config) -> float:
    """MiB of memory that building the model took this rank at most."""

    def peak() -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
        assert found is not None
        return int(found[1])

    with distributed(env, use_gpu=False) as dist:
        splits = build_data(config.data)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = peak()
        parts = build(config, dist, splits)
        assert sum(parameter.numel() for parameter in parts.model.parameters()) * 4 > LARGE << 20
        return (peak() - before) / 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process its peak")
def test_only_rank_0_ever_holds_the_whole_model_in_memory() -> None:
    first, *others = run_ranks(3, _grown, config_of("large"))
    assert first > LARGE
    assert max(others) < LARGE * 0.85  # a third, one whole tensor at a time, and 30 MiB that a rank touches else


def test_a_model_is_made_without_its_numbers_wherever_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    config = config_of("odd")
    info = build_data(config.data).info
    monkeypatch.setattr(
        "trainkit.training.hollow.build_model",
        lambda *given: made.append(build_model(*given)) or made[-1],  # type: ignore[func-returns-value]
    )
    assert all(tensor.is_meta for tensor in build_hollow(config, info).parameters())
    assert len(made) == 1
    assert all(tensor.is_meta for tensor in made[0].buffers())
