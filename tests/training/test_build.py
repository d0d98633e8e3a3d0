"""A sharded model has the weights of the plain one; what the settings of training do to a model."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.rank_functions import QUICK, run_ranks
from tests.training.parts import SMALL
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.models.library import build_model
from trainkit.training.placement import checkpoint_activations, make_deterministic, to_device, use_own_compiler_cache
from trainkit.training.train_state import build


def _differences(env: RankEnv, config: Config) -> list[str]:
    """Names of the tensors that are others than those of the plain model; and how a batch goes through it."""
    with distributed(env, use_gpu=False) as dist:
        return _different(dist, config)


def _different(dist: Distributed, config: Config) -> list[str]:
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


def test_every_rank_has_its_part_of_the_very_weights_of_the_plain_model() -> None:
    sizes = ("train.global_batch_size=12", "train.micro_batch_size=null")
    chosen = config(*SMALL, "model.name=tests.training.hollow_models:odd", *sizes, preset="fsdp")
    assert run_ranks(3, _differences, chosen) == [[]] * 3


# What the settings of training do to a model: layout, compiler, determinism, activation checkpointing.

CPU = torch.device("cpu")


def config(*settings: str, preset: str = "single") -> Config:
    return load(preset, (*QUICK, *settings)).config


@pytest.fixture
def as_it_was() -> Iterator[None]:
    yield
    make_deterministic(False)


def test_filters_are_laid_out_as_the_images_unless_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "in_parts.py").write_text("SHARDED = True\ndef build(dist): ...\n")
    for last, strategy in ((True, "single"), (False, "single"), (True, "fsdp"), (True, "in_parts:build")):
        chosen = config(f"train.channels_last={str(last).lower()}", f"strategy.name={strategy}")
        weight = to_device(nn.Conv2d(3, 8, 3), chosen, CPU).get_parameter("weight")
        is_last = weight.is_contiguous(memory_format=torch.channels_last)
        assert (is_last, weight.is_contiguous()) == ((True, False) if last and strategy == "single" else (False, True))


@pytest.mark.parametrize("how", ["off", "model", "blocks"])
def test_what_is_compiled_keeps_its_names(how: Literal["off", "model", "blocks"]) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=48, depth=2, num_heads=3)
    names = list(model.state_dict())
    to_device(model, config(f"train.compile={how}"), CPU)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == {"off": [], "model": [""], "blocks": ["blocks.0", "blocks.1"]}[how]
    assert list(model.state_dict()) == names


def test_deterministic_keeps_other_kernels_out(as_it_was: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    make_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark, "else convolutions are not the quickest of their kind on this GPU"


@pytest.mark.parametrize(("planted", "given"), [(False, ""), (True, ""), (True, "/scratch/mine")])
def test_compiled_code_is_kept_where_nobody_else_writes(
    planted: bool, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would run the code that it finds in a folder of that name in /tmp, whoever has laid it there."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    own = shared / f"trainkit-{os.geteuid()}"
    if planted:
        own.mkdir()
        own.chmod(0o777)
    use_own_compiler_cache()
    state = tmp_path / "state" / "trainkit" / "cache"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (given or f"{state if planted else own}/torchinductor")


def network(which: Any) -> nn.Sequential:
    """Four blocks with dropout and BatchNorm."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5)) for _ in range(4))
    model = nn.Sequential(*blocks, nn.Linear(128, 5))
    checkpoint_activations(model, which)
    return model


def trained(which: Any) -> dict[str, Tensor]:
    """The model's tensors and gradients after three updates."""
    model = network(which)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(8, 128)).square().sum().backward()
        optimizer.step()
    gradients = {f"{name}.grad": value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {**model.state_dict(), **gradients}


@pytest.mark.parametrize("which", ["full", 2])
def test_weights_gradients_and_statistics_are_the_same_to_the_last_bit(which: Any) -> None:
    plain, thrifty = trained("none"), trained(which)
    assert plain.keys() == thrifty.keys(), "names in checkpoints stay those of the plain model"
    assert [name for name, value in plain.items() if not torch.equal(value, thrifty[name])] == []


def kept(which: Any) -> int:
    """Bytes that the forward pass keeps for the backward pass."""
    model, storages = network(which), {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor  # alive, or another could come to lie there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randn(1024, 128))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(item.untyped_storage().nbytes() for place, item in storages.items() if place not in own)


def test_the_more_blocks_it_is_the_less_is_kept() -> None:
    none, half, full = kept("none"), kept(2), kept("full")
    assert half < 0.65 * none
    assert full < 0.4 * none


def test_a_model_without_so_many_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"activation_checkpointing=5 is not possible[\s\S]*must be 4 or less"):
        network(5)
    with pytest.raises(UserError, match="must be none: Linear has no blocks that repeat"):
        checkpoint_activations(nn.Linear(2, 2), "full")


VIT = ("model.name=vit_tiny_patch16_224", "model.embed_dim=48", "model.depth=1", "model.num_heads=3",
       "model.patch_size=4", "model.img_size=16", "data.image_size=16")  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("augment.min_size=8", "data.image_size=8"), "must be smaller than the images, which have 8"),
        ((*VIT, "augment.min_size=8"), "model.dynamic_img_size=true"),
        ((*VIT, "augment.min_size=10", "model.dynamic_img_size=true"), "cannot take images of 1 x 10 x 10"),
        ((*VIT, "augment.min_size=8", "augment.size_increment=7", "model.dynamic_img_size=true"), "1 x 14 x 14"),
    ],
)
def test_what_cannot_be_trained_at_each_size_is_refused_before_the_first(settings: Any, says: str) -> None:
    chosen = config("augment.ramp_epochs=[0,2]", *settings)
    with pytest.raises(UserError, match=re.escape(says)) as refused:
        build(chosen, Distributed(RankEnv.single(), CPU), build_data(chosen.data))
    assert refused.value.key == "augment.min_size"


def test_a_transformer_that_takes_any_size_is_trained_at_each() -> None:
    chosen = config("augment.ramp_epochs=[0,2]", *VIT, "augment.min_size=8", "model.dynamic_img_size=true")
    assert build(chosen, Distributed(RankEnv.single(), CPU), build_data(chosen.data)).size_at(0) == 8
