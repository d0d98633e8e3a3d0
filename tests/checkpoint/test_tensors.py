"""A checkpoint's weights in one file, as other libraries take them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from jobs import export as export_command
from tests.checkpoint.reading import tensors
from tests.rank_functions import run_command, run_ranks, train_run
from trainkit.checkpoint import format
from trainkit.checkpoint import tensors as checkpoint_tensors
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.tensors import export
from trainkit.checkpoint.transfer import send_rest
from trainkit.data.base import DataInfo
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError
from trainkit.models.libraries import timm_model, torchvision_model
from trainkit.ranks.env import RankEnv
from trainkit.run.folder import RunDir

INFO = DataInfo("x", 7, 3, 32, tuple("abcdefg"), (0.5,) * 3, (0.5,) * 3)


def exported(tmp_path: Path, model: nn.Module) -> Path:
    dist = Distributed(RankEnv.single(), torch.device("cpu"))
    Checkpoints(tmp_path / "checkpoints", keep=1, dist=dist).save(model, None, step=1, state={}, best_step=1)
    export(tmp_path / "checkpoints", "best", ("model",), tmp_path / "file.safetensors", {})
    return tmp_path / "file.safetensors"


def by_timm(file: Path) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("resnet10t", num_classes=7, checkpoint_path=str(file))
    return model


def by_torchvision(file: Path) -> nn.Module:
    from torchvision.models import mobilenet_v3_small

    model: nn.Module = mobilenet_v3_small(num_classes=7)
    model.load_state_dict(load_file(file))
    return model


@pytest.mark.parametrize(
    ("make", "load"),
    [
        (lambda: timm_model("resnet10t", INFO, {}), by_timm),
        (lambda: torchvision_model("mobilenet_v3_small", INFO, {}), by_torchvision),
    ],
    ids=["timm", "torchvision"],
)
def test_a_library_loads_what_is_exported(
    tmp_path: Path, make: Callable[[], nn.Module], load: Callable[[Path], nn.Module]
) -> None:
    model, images = make().eval(), torch.randn(2, 3, 32, 32)
    other = load(exported(tmp_path, model)).eval()
    assert torch.equal(model(images), other(images))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks that share a model and its average."""
    folder = tmp_path_factory.mktemp("export") / "run"
    run_ranks(2, train_run, folder, "fsdp", ("train.max_steps=3", "train.ema_decay=0.9"))
    return folder


@pytest.mark.parametrize(("arguments", "stem"), [((), "ema"), (("--weights", "raw"), "model")])
def test_what_two_ranks_wrote_is_one_file(run: Path, tmp_path: Path, arguments: tuple[str, ...], stem: str) -> None:
    file = tmp_path / "out.safetensors"
    done = run_command("export", str(run), str(file), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected: dict[str, Tensor] = tensors(run / "checkpoints", stem, "best")
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    with safe_open(file, framework="pt") as opened:
        notes = opened.metadata()
    assert notes == {"format": "pt", "step": "3", "run": "run", "model": "fashion_cnn", "data": "digits"}


def test_a_runs_copy_elsewhere_is_exported_from_its_url(run: Path, tmp_path: Path) -> None:
    url = send_rest(RunDir(run), f"file://{tmp_path}/bucket")
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    assert export_command.main([str(run), str(here)], {}) == 0
    assert export_command.main([url, str(there)], {}) == 0
    assert there.read_bytes() == here.read_bytes()


def test_a_run_without_an_average_says_so(tmp_path: Path) -> None:
    exported(tmp_path, nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"it has no ema\.safetensors"):
        export(tmp_path / "checkpoints", "best", ("ema",), tmp_path / "other.safetensors", {})


def test_an_export_that_fails_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = exported(tmp_path, nn.Linear(2, 2))
    before, write = file.read_bytes(), checkpoint_tensors.write

    def half(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_tensors, "write", half)
    with pytest.raises(UserError, match="No space left"):
        export(tmp_path / "checkpoints", "best", ("model",), file, {})
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_has_changed_on_the_disk_is_not_exported(tmp_path: Path) -> None:
    exported(tmp_path, nn.Linear(2, 2))
    weights = format.path_of(tmp_path / "checkpoints", 1) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"the content of model\.safetensors has changed"):
        export(tmp_path / "checkpoints", "best", ("model",), tmp_path / "other.safetensors", {})
    assert not (tmp_path / "other.safetensors").exists()


def test_a_name_that_libraries_would_not_know_is_refused(run: Path, tmp_path: Path) -> None:
    done = run_command("export", str(run), "weights.pt", cwd=tmp_path)
    assert done.returncode == 2
    assert "weights.safetensors" in done.stderr
