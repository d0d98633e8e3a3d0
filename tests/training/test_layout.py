"""What the settings of training do to a model: layout, compiler, determinism, activation checkpointing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.rank_functions import QUICK, run_ranks, train_run
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.layout import checkpoint_activations, make_deterministic, placed, use_own_compiler_cache

CPU = torch.device("cpu")


def config(*settings: str, preset: str = "single") -> Config:
    return load(preset, (*QUICK, *settings)).config


@pytest.fixture
def as_it_was() -> Iterator[None]:
    yield
    make_deterministic(False)


def test_filters_are_laid_out_as_the_images_are() -> None:
    model = placed(nn.Conv2d(3, 8, 3), config("train.channels_last=true"), CPU)
    assert model.get_parameter("weight").is_contiguous(memory_format=torch.channels_last)
    assert placed(nn.Conv2d(3, 8, 3), config(), CPU).get_parameter("weight").is_contiguous()


def test_sharded_strategies_get_contiguous_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "in_parts.py").write_text("SHARDED = True\ndef build(dist): ...\n")
    for strategy in ("fsdp", "in_parts:build"):
        chosen = config("train.channels_last=true", f"strategy.name={strategy}")
        assert placed(nn.Conv2d(3, 8, 3), chosen, CPU).get_parameter("weight").is_contiguous()


@pytest.mark.parametrize("how", ["off", "model", "blocks"])
def test_what_is_compiled_keeps_its_names(how: Literal["off", "model", "blocks"]) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=48, depth=2, num_heads=3)
    names = list(model.state_dict())
    placed(model, config(f"train.compile={how}"), CPU)
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


SETTINGS = ("train.max_steps=12", "data.augment=true", "model.norm=batch")


def losses(folder: Path) -> list[float]:
    return [record["loss"] for split in ("train", "val") for record in read_metrics(RunDir(folder), split)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("layout") / "run"
    run_ranks(1, train_run, folder, "single", SETTINGS)
    return losses(folder)


@pytest.mark.parametrize(("preset", "world_size"), [("single", 1), ("fsdp", 1)])
def test_channels_last_trains_alike(tmp_path: Path, reference: list[float], preset: str, world_size: int) -> None:
    run_ranks(world_size, train_run, tmp_path / "run", preset, (*SETTINGS, "train.channels_last=true"))
    assert losses(tmp_path / "run") == pytest.approx(reference, rel=1e-4)


VIT = ("model.name=vit_tiny_patch16_224", "model.img_size=8", "model.patch_size=4", "model.embed_dim=48")


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "how", "model"), [("ddp", "model", ()), ("fsdp", "blocks", (*VIT, "model.depth=2", "model.num_heads=3"))]
)
def test_a_compiled_model_trains_alike(tmp_path: Path, preset: str, how: str, model: tuple[str, ...]) -> None:
    settings = ("train.max_steps=5", "data.augment=true", *model)
    run_ranks(1, train_run, tmp_path / "plain", preset, settings)
    run_ranks(1, train_run, tmp_path / "compiled", preset, (*settings, f"train.compile={how}"))
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


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
    with pytest.raises(UserError, match="activation_checkpointing=5 would do nothing") as refused:
        network(5)
    assert refused.value.fix == "Leave it out, or use 4 or less."
    with pytest.raises(UserError, match="full would do nothing"):
        checkpoint_activations(nn.Linear(2, 2), "full")
