"""docs/model.md: its programs run as they stand, in order, in one folder with a run of that name."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import trainkit
from tests import readme
from tests.rank_functions import run_command, run_ranks, train_run
from tests.shell import python
from trainkit.data.datasets.digits import build

PAGE = readme.DOCS / "model.md"
BLOCKS = dict(re.findall(r"```python\n# ([\w.]+)[^\n]*\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
WITHOUT_US = "import sys; sys.modules['trainkit'] = None\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and a picture."""
    folder = tmp_path_factory.mktemp("model")
    run_ranks(1, train_run, folder / "runs" / "ddp-0001", "ddp", ("train.max_steps=40",))
    timm = ("model.name=test_resnet", "train.max_steps=40", "data.image_size=32", "optim.lr=1e-2")
    run_ranks(1, train_run, folder / "runs" / "timm", "single", timm)
    pixels, _ = build(folder).test[0]
    Image.fromarray(pixels[0].numpy()).save(folder / "digit.png")
    return folder


def typed(program: str, home: Path) -> str:
    done = python("-c", program, cwd=home, TRAINKIT_RUNS="runs", PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, f"{program}\n{done.stderr}"
    return done.stdout


@pytest.mark.nightly
def test_a_run_is_opened_in_python(home: Path) -> None:
    _, label = build(home).test[0]
    assert re.fullmatch(rf"{label} \[<{label}: 0\.\d+>\]\n", typed(BLOCKS["digit.png"], home))


@pytest.mark.parametrize(
    ("file", "run"),
    [
        pytest.param("model.pt2", "ddp-0001", marks=pytest.mark.long),
        pytest.param("model.pt2", "timm", marks=pytest.mark.long),
        pytest.param("model.onnx", "ddp-0001", marks=pytest.mark.nightly),
        pytest.param("model.safetensors", "timm", marks=pytest.mark.long),
    ],
)
def test_a_file_is_used_without_trainkit(file: str, run: str, home: Path) -> None:
    """And tells of an image what the run tells."""
    if file == "model.onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    done = run_command("export", f"runs/{run}", file, cwd=home)
    assert done.returncode == 0, done.stderr
    (home / "prepare.py").write_text(BLOCKS["prepare.py"])
    told = typed(WITHOUT_US + BLOCKS[file] + "print(*map(float, scores[0]))", home).splitlines()
    opened = trainkit.open(home / "runs" / run)
    with torch.no_grad():
        scores = opened.model()(opened.transform(home / "digit.png")[None])[0]
    assert told[0] == opened.classes[scores.argmax()]
    assert [*map(float, told[1].split())] == pytest.approx(scores.tolist(), abs=1e-4)
