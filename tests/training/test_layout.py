"""What `train.channels_last`, `train.compile` and `train.deterministic` do to a model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import timm
import torch
from torch import nn

from tests.rank_functions import QUICK, run_ranks, train_run
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.layout import make_deterministic, placed, use_own_compiler_cache

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
