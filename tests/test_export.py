"""What an exported file says of itself, and which models cannot be one."""

import importlib.util
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import trainkit
from tests.rank_functions import run_command, run_ranks, train_run
from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.export import export_model
from trainkit.run.folder import RunDir

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, info):
        super().__init__()
        self.layer = nn.Linear(info.in_chans * info.image_size**2, info.num_classes)

    def forward(self, images):
        scores = self.layer(images.flatten(1))
        if float(scores.detach().sum()) > 1e9:  # which no exporter follows
            return scores * 2
        return scores

net = Net
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a vision transformer that enlarges its images, on photos that have moved."""
    home = tmp_path_factory.mktemp("export")
    for number in range(16):
        folder = home / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), (16 * number,) * 3).save(folder / f"{number}.png")
    data = ("data.name=image_folder", f"data.root={home / 'photos'}", "data.image_size=32", "data.workers=0")
    train = ("train.max_steps=2", "train.global_batch_size=4", "train.ema_decay=0.5")
    model = ("model.name=timm/test_vit.r160_in1k", "model.drop_rate=0.1")
    run_ranks(1, train_run, home / "run", "single", (*data, *model, *train))
    (home / "photos").rename(home / "elsewhere")
    return home / "run"


def noted(file: Path) -> dict[str, Any]:
    with safe_open(file, "pt") as opened:
        return dict(json.loads(opened.metadata()["trainkit"]))


def test_a_file_of_weights_says_how_to_make_the_network_and_its_images(run: Path, tmp_path: Path) -> None:
    done = run_command("export", str(run), "x.safetensors", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "x.safetensors: the averaged weights of step 2 (best).\n"), done.stderr
    assert noted(tmp_path / "x.safetensors") == {
        "library": "timm", "name": "test_vit.r160_in1k", "task": "classification", "classes": ["cat", "dog"],
        "arguments": {"num_classes": 2, "in_chans": 3, "drop_rate": 0.1},
        "enlarged": {"size": 160, "interpolation": "bilinear"},
        "in_chans": 3, "size": 32, "resize": 37, "crop": 0.8649, "interpolation": "bilinear",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "run": "run", "step": 2, "weights": "ema",
    }  # fmt: skip


def test_a_program_has_the_averaged_weights_and_enlarges_by_itself(run: Path, tmp_path: Path) -> None:
    done = run_command("export", str(run), "x.pt2", "--checkpoint", "latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "It gives the model's scores to" in done.stdout
    model = trainkit.open(run, checkpoint="latest").model()
    program = torch.export.load(tmp_path / "x.pt2").module()
    for count in (1, 5):
        images = torch.rand(count, 3, 32, 32)
        torch.testing.assert_close(program(images), model(images))


def test_an_onnx_file_takes_any_batch_and_says_the_same(run: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for file in ("x.onnx", "x.safetensors"):
        done = run_command("export", str(run), file, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    note = session.get_modelmeta().custom_metadata_map["trainkit"]
    assert json.loads(note) == noted(tmp_path / "x.safetensors")
    images = torch.rand(4, 3, 32, 32)
    (scores,) = session.run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(scores), trainkit.open(run).model()(images), rtol=1e-3, atol=1e-4)


def test_a_library_that_is_not_there_is_named_with_its_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("onnx") else find(name))
    config = load(str(run / "config.yaml"), []).config
    with pytest.raises(UserError) as error:
        export_model(config, RunDir(run), "best", None, tmp_path / "x.onnx", "onnx")
    assert error.value.fix.startswith('pip install "trainkit-vision[onnx]"')
    assert not os.listdir(tmp_path)


def test_what_cannot_be_exported_is_refused_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    done = run_command(
        "train", "single", "model.name=own_net:net", "train.max_steps=1", "--run-dir", "run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "x.pt2").write_text("of yesterday")
    done = run_command("export", "run", "x.pt2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("own_net:net cannot be exported as torch.\n  why: "), done.stderr
    assert "safetensors" in done.stderr
    assert (tmp_path / "x.pt2").read_text() == "of yesterday"
    done = run_command("export", "run", "x.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = noted(tmp_path / "x.safetensors")
    assert (told["library"], told["name"], told["options"]) == ("user", "own_net:net", {})
    for words, says in (
        (("x.bin",), "x.safetensors or x.pt2 or x.onnx"),
        (("x.pt2", "--format", "onnx"), "Give x.onnx."),
    ):
        done = run_command("export", "run", *words, cwd=tmp_path)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_a_file_that_gives_other_scores_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another(content: io.BytesIO) -> Any:
        return SimpleNamespace(module=lambda: lambda images: images[:, 0, 0, :2])

    monkeypatch.setattr(torch.export, "load", of_another)
    config = load(str(run / "config.yaml"), []).config
    with pytest.raises(UserError, match="gives other scores than the model"):
        export_model(config, RunDir(run), "best", None, tmp_path / "x.pt2", "torch")
    assert not os.listdir(tmp_path)
