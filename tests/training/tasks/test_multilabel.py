"""Several classes an image: the metrics are scikit-learn's, on any number of ranks."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional

from tests.rank_functions import run_command, run_ranks, train_run
from trainkit.cluster.ranks import RankEnv
from trainkit.common.image_input import DataInfo
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics, task_metrics
from trainkit.training.tasks.meter import Meter, Mistakes, Pool
from trainkit.training.tasks.multilabel import MultiLabel, average_precision

NAMES = ("cat", "dog", "eel", "fox", "gnu")
INFO = DataInfo("pets", 5, 3, 4, NAMES, (0.0,) * 3, (1.0,) * 3)
TASK = MultiLabel(INFO, 0.0, 0.5)
ALONE = Distributed(RankEnv.single(), torch.device("cpu"))
_RANDOM = torch.Generator().manual_seed(0)
SCORES = torch.randn(60, 5, generator=_RANDOM).mul(4).round() / 2  # many are equal
LABELS = (torch.rand(60, 5, generator=_RANDOM) < 0.3).byte()
LABELS[:, 4] = 0  # nobody shows the last


def by_sklearn() -> dict[str, float]:
    from sklearn import metrics as sklearn_metrics

    probabilities, found, there = SCORES.sigmoid().numpy(), (SCORES.sigmoid() > 0.5).numpy(), LABELS.numpy()
    f1: Any = sklearn_metrics.f1_score
    return {
        "loss": functional.binary_cross_entropy_with_logits(SCORES, LABELS.float()).item(),
        "mAP": 100 * sklearn_metrics.average_precision_score(there[:, :4], probabilities[:, :4], average="macro"),
        "f1": 100 * f1(there, found, average="macro", zero_division=0),
        "f1_micro": 100 * f1(there, found, average="micro"),
        "samples": 60,
    }


def measured(dist: Distributed, batch: int = 7) -> dict[str, float]:
    """Of this rank's share in batches; what fills the last ones up is masked."""
    meter, pool = Meter(TASK, dist), Pool(TASK, dist)
    per_round = batch * dist.world_size
    for start in range(dist.rank * batch, dist.rank * batch - (-60 // per_round) * per_round, per_round):
        places = torch.arange(start, start + batch)
        at, mask = places.clamp(max=59), places < 60
        meter.add_masked(TASK.loss(SCORES[at], LABELS[at], "none"), SCORES[at], LABELS[at], mask)
        pool.add(SCORES[at], SCORES[at], LABELS[at], mask)
    return {**meter.read(), **pool.read()}


def _measured(env: RankEnv) -> dict[str, float]:
    with distributed(env, use_gpu=False) as dist:
        return measured(dist)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_loss_map_and_f1_are_scikit_learns_on_any_number_of_ranks(world_size: int) -> None:
    assert run_ranks(world_size, _measured) == [pytest.approx(by_sklearn(), rel=1e-6)] * world_size


def test_scores_that_are_not_finite_find_nothing() -> None:
    scores, there = torch.tensor([[float("nan")] * 5, [float("inf")] * 5, [1.0] * 5]), torch.ones(3, 5).byte()
    assert TASK.sums(scores, there).view(3, 3, 5).sum((0, 2)).tolist() == [5, 5, 15]
    assert average_precision(scores[:, 0], torch.tensor([True, False, False])) == pytest.approx(1 / 3)


def test_labels_are_smoothed_in_training_alone() -> None:
    smooth = MultiLabel(INFO, 0.2, 0.5)
    soft = LABELS.float() * 0.8 + 0.1
    expected = functional.binary_cross_entropy_with_logits(SCORES, soft)
    assert smooth.training_loss(SCORES, LABELS, "mean").item() == pytest.approx(expected.item())
    assert smooth.loss(SCORES, LABELS, "mean").item() == pytest.approx(by_sklearn()["loss"])


def test_a_mistake_is_an_image_with_a_class_told_wrong_surely() -> None:
    mistakes = Mistakes(TASK, ALONE)
    scores = torch.tensor([[9.0, -9, -9, -9, -9], [9.0, -9, 3, -9, -9], [-9.0, -9, -9, -9, -9]])
    there = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).byte()
    mistakes.add(torch.zeros(3, 3, 4, 4, dtype=torch.uint8), scores, there, torch.ones(3).bool())
    (found,) = mistakes.read()
    assert (found["label"], found["told"]) == ("cat, dog", "cat, eel")
    assert found["confidence"] == pytest.approx(0.9999, abs=1e-4)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with a red, a green and a blue half, or none, and their table."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "below").mkdir()
    rows = [("image", "labels")]
    for number in range(48):
        shown = [at for at in range(3) if number >> at & 1]
        pixels = torch.randint(0, 60, (16, 16, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        for at in shown:
            pixels[:, :, at] += 180
        name = f"below/{number}.png"
        Image.fromarray(pixels.numpy()).save(folder / name)
        rows.append((name, " ; ".join(("red", "green", "blue")[at] for at in shown)))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


SETTINGS = (
    "task.name=multilabel", "data.name=image_csv", "data.image_size=16", "data.workers=0", "model.name=resnet9",
    "train.global_batch_size=8", "train.epochs=6", "train.ema_decay=0.9", "checkpoint.best=val/f1", "optim.lr=0.01",
    "augment.mixup_alpha=0.2", "train.label_smoothing=0.05", "monitor.loggers=[console,jsonl,tensorboard]",
    "model.width=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two ranks, trained to the end."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_ranks(2, train_run, folder, "ddp", (*SETTINGS, f"data.root={photos}"))
    return RunDir(folder)


@pytest.mark.nightly
def test_a_run_learns_it_and_its_best_model_is_that_of_the_highest_f1(run: RunDir) -> None:
    assert task_metrics(run).headline == "mAP"
    val = read_metrics(run, "val")
    assert {"loss", "mAP", "f1", "f1_micro", "ema_mAP", "ema_f1"} <= val[-1].keys()
    summary = json.loads(run.summary.read_text())
    assert summary["best"] == {"val/f1": max(record["f1"] for record in val)}
    assert summary["test"]["mAP"] > 90
    assert not run.confusion.exists()
    assert "mAP" not in read_metrics(run, "train")[0]  # a ranking needs all samples of a pass
    assert "f1" in read_metrics(run, "train")[0]


@pytest.mark.nightly
def test_a_matrix_that_there_is_none_of_is_refused_at_once(run: RunDir, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    done = run_command("evaluate", str(run.path), "--confusion", "x.csv", cwd=tmp_path)
    assert (done.returncode, "There is no confusion matrix." in done.stderr) == (2, True)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_predict_gives_each_class_a_probability_of_its_own(run: RunDir, photos: Path) -> None:
    out = photos / "told.csv"
    words = (str(run.path), str(photos / "below"), "--top", "3", "--out", str(out))
    done = run_command("predict", *words, cwd=run.path.parent)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(out.read_text().splitlines()))
    both = next(row for row in rows if row["image"] == "3.png")
    assert {both["class"], both["class_2"]} == {"red", "green"}
    assert float(both["probability"]) + float(both["probability_2"]) > 1.0
