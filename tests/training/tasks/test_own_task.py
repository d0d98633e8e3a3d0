"""A task of the user's own that is no classification: the age on a picture, lower errors are better."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.rank_functions import run_command
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics, task_metrics

TASK = """
import torch
from torch.nn import functional
from trainkit.tasks.base import Task

METRICS = {"mse": ("", "lower", "Mean squared error"), "mae": ("years", "lower", "Mean absolute error")}
HEADLINE = "mae"


class Ages(Task):
    def __init__(self, delta):
        self.delta = delta

    def loss(self, output, target, reduction):
        return functional.huber_loss(output[:, 0], target, reduction=reduction, delta=self.delta)

    def sums(self, output, target):
        error = output[:, 0] - target
        return torch.stack([error**2, error.abs()], dim=1)

    def metrics(self, sums, samples):
        return {"mse": sums[0] / samples, "mae": sums[1] / samples}


def build(splits, *, delta: float = 1.0):
    return Ages(delta)
"""
DATA = '''
import torch
from trainkit.data.base import DataInfo, Splits


class Faces:
    """The brighter, the older."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        shade = (self.first + index) * 37 % 200
        return torch.full((1, 8, 8), shade, dtype=torch.uint8), shade / 100


def build(root):
    parts = Faces(0, 96), Faces(96, 21), Faces(117, 20)
    as_it_is = lambda image: image
    return Splits(DataInfo("faces", 1, 1, 8, ("age",), (0.4,), (0.2,)), *parts, as_it_is, as_it_is)
'''
SETTINGS = (
    "task.name=ages_task:build", "task.delta=2.0", "data.name=ages_data:build", "data.workers=0", "train.epochs=8",
    "train.global_batch_size=16", "train.precision=fp32", "launch.gpus_per_node=0", "optim.lr=0.01",
    "train.early_stopping_patience=7", "train.ema_decay=0.5", "monitor.loggers=[console,jsonl,tensorboard]",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the task, the data, and a run that has trained on them."""
    home = tmp_path_factory.mktemp("home")
    (home / "ages_task.py").write_text(TASK)
    (home / "ages_data.py").write_text(DATA)
    done = run_command("train", "single", *SETTINGS, "--run-dir", "run", cwd=home)
    assert done.returncode == 0, done.stderr
    newest = read_metrics(RunDir(home / "run"), "val")[-1]
    line = next(line for line in done.stdout.splitlines() if line.startswith("val") and f" {newest['step']}/" in line)
    assert f"loss {newest['loss']:.4f}  mae {newest['mae']:.4f} years  lr " in line
    assert line.endswith(f"mse {newest['mse']:.4f}  ema mae {newest['ema_mae']:.4f} years")
    return home


@pytest.mark.nightly
def test_the_best_model_has_the_lowest_error(home: Path) -> None:
    run = RunDir(home / "run")
    val = [record["mae"] for record in read_metrics(run, "val")]
    summary = json.loads(run.summary.read_text())
    assert summary["best"] == {"val/mae": min(val)}
    assert min(val) < val[0]
    assert summary["test"].keys() == {"loss", "mse", "mae", "samples", "ema_loss", "ema_mse", "ema_mae"}
    assert summary["test"]["samples"] == 20
    assert not [file for file in run.path.iterdir() if file.name.startswith(("mistakes", "confusion"))]


def test_readers_know_its_metrics_by_the_run_alone(home: Path, tmp_path: Path) -> None:
    run = RunDir(home / "run")
    assert task_metrics(run).headline == "mae"
    assert not task_metrics(run).metrics["mse"].higher_is_better
    status = run_command("status", str(run.path), cwd=tmp_path)  # a folder without the task
    assert f"mae {read_metrics(run, 'val')[-1]['mae']:.4f} years" in status.stdout
    report = run_command("report", str(run.path), "--out", str(tmp_path / "report"), cwd=tmp_path)
    assert report.returncode == 0, report.stderr


def test_evaluate_and_predict_give_its_own_numbers(home: Path) -> None:
    done = run_command("evaluate", "run", "--weights", "raw", "--allow-code", cwd=home)
    assert done.returncode == 0, done.stderr
    test = json.loads((home / "run" / "summary.json").read_text())["test"]
    assert f"mse {test['mse']:.4f}  mae {test['mae']:.4f} years  loss {test['loss']:.4f}  over 20 images" in done.stdout
    (home / "faces").mkdir(exist_ok=True)
    Image.new("L", (8, 8), 150).save(home / "faces" / "old.png")
    done = run_command("predict", "run", "faces", "--allow-code", cwd=home)
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(done.stdout.splitlines())
    assert row.keys() == {"image", "age"}
    assert float(row["age"]) == pytest.approx(1.5, abs=0.5)


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [("return Ages(delta)", "return delta", "float"), ("def metrics(", "def metric(", "metrics")],
)
def test_what_is_no_task_is_refused_before_there_is_a_run(tmp_path: Path, line: str, instead: str, says: str) -> None:
    (tmp_path / "ages_task.py").write_text(TASK.replace(line, instead))
    (tmp_path / "ages_data.py").write_text(DATA)
    done = run_command("train", "single", *SETTINGS, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "ages_task:build returned no Task." in done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
