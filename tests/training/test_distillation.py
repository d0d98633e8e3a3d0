"""Learning from the model of another run, which sees the very images that this one sees."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import Linear, keeper_of, parts_of
from tests.training.test_resume import final_weights
from tests.training.test_update import LABELS, micro_batches
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.launch.preparation import check
from trainkit.models.library import build_model
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.run.teacher import teacher_of
from trainkit.training.progress import Progress
from trainkit.training.saved_model import open_saved
from trainkit.training.train_state import TrainState
from trainkit.training.update import Updater

MODEL = ("model.name=fashion_cnn",)


def saved_run(folder: Path, *settings: str) -> Path:
    """A run with a checkpoint, of untrained weights."""
    parts = parts_of(*MODEL, *settings)
    model = build_model(parts.config.model, parts.splits.info, seed=3)
    keeper_of(parts_of(*MODEL, *settings, model=model), folder, Progress()).save()
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose data is not there any more."""
    folder = saved_run(tmp_path_factory.mktemp("teacher") / "run")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("name: synthetic", "name: image_folder"))
    return folder


def loss_by_hand(folder: Path, parts: TrainState, images: Tensor, alpha: float, temperature: float) -> float:
    config = parts.config.model_copy(update={"model": load(str(folder / "config.yaml")).config.model})
    saved = open_saved(config, RunDir(folder), "best")
    (mean, std), (own_mean, own_std) = (
        (torch.tensor(info.mean).view(-1, 1, 1), torch.tensor(info.std).view(-1, 1, 1))
        for info in (saved.info, parts.splits.info)
    )
    told = saved.module((images * own_std + own_mean - mean) / std) / temperature
    own = Linear()(images) / temperature
    soft = (told.softmax(1) * (told.log_softmax(1) - own.log_softmax(1))).sum(1).mean() * temperature**2
    return float(((1 - alpha) * functional.cross_entropy(own * temperature, LABELS) + alpha * soft).detach())


@pytest.mark.parametrize(("alpha", "temperature"), [(0.5, 2.0), (1.0, 4.0), (0.0, 1.0)])
def test_the_loss_is_hintons_of_labels_and_softened_outputs(teacher: Path, alpha: float, temperature: float) -> None:
    how = (f"train.distill_from={teacher}", f"train.distill_alpha={alpha}", f"train.distill_temperature={temperature}")
    parts = parts_of(*how)
    info = replace(parts.splits.info, mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.3))  # other than the teacher's
    parts = replace(parts, splits=replace(parts.splits, info=info))
    images, labels, _ = (torch.cat(column) for column in zip(*micro_batches(), strict=True))
    assert torch.equal(labels, LABELS)
    made = Updater(parts)(micro_batches(), lr=0.0, seed=0)
    expected = loss_by_hand(teacher, parts, parts.normalized(images), alpha, temperature)
    assert made.loss.item() == pytest.approx(expected, rel=1e-5)


def test_what_the_teacher_says_moves_the_model_and_never_the_teacher(teacher: Path) -> None:
    parts = parts_of(f"train.distill_from={teacher}", "train.distill_alpha=1", "optim.name=sgd")
    update = Updater(parts)
    assert parts.teacher is not None
    before = [value.clone() for value in parts.teacher._model.state_dict().values()]
    losses = [update(micro_batches(), lr=0.5, seed=0).loss.item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    after = parts.teacher._model.state_dict().values()
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert not parts.teacher._model.training
    assert update.meter.read()["loss"] != pytest.approx(losses[-1]), "records tell the loss of the labels"


@pytest.mark.nightly
def test_a_pupil_goes_on_exactly_and_on_any_number_of_ranks(tmp_path: Path) -> None:
    small = ("data.name=synthetic", "data.train_size=160", "data.val_size=40", "data.test_size=20", "data.image_size=8")
    sizes = ("train.global_batch_size=32", "train.max_steps=8", "schedule.name=constant")
    run_ranks(1, train_run, tmp_path / "teacher", "single", (*small, *sizes))
    how = (*small, *sizes, f"train.distill_from={tmp_path}/teacher", "augment.mixup_alpha=0.8", "seed=1")
    assert run_ranks(1, train_run, tmp_path / "whole", "single", how) == ["finished"]
    run_ranks(1, train_run, tmp_path / "broken", "single", how, 4)
    assert run_ranks(1, train_run, tmp_path / "broken", "single", how) == ["finished"]
    assert final_weights(tmp_path / "broken") == final_weights(tmp_path / "whole")
    assert run_ranks(2, train_run, tmp_path / "two", "fsdp", how) == ["finished"] * 2
    one, two = ([r["loss"] for r in read_metrics(RunDir(tmp_path / name), "val")] for name in ("whole", "two"))
    assert two == pytest.approx(one, rel=1e-4)


def test_a_run_that_cannot_teach_is_refused_and_says_why(teacher: Path, tmp_path: Path) -> None:
    def refused(folder: Path, *settings: str) -> str:
        with pytest.raises(UserError) as caught:
            check(load("single", [f"train.distill_from={folder}", *settings]))
        return str(caught.value)

    assert "There is nothing there" in refused(tmp_path / "none")
    shutil.copytree(teacher, tmp_path / "empty", ignore=shutil.ignore_patterns("step-*", "best", "latest"))
    assert "has no checkpoint yet" in refused(tmp_path / "empty")
    shutil.copytree(teacher, tmp_path / "strange")
    text = (teacher / "config.yaml").read_text()
    (tmp_path / "strange/config.yaml").write_text(text.replace("name: fashion_cnn", "name: evil:build"))
    assert "would import code that is not this run's" in refused(tmp_path / "strange")
    own = load("single", [f"train.distill_from={tmp_path}/strange", "model.name=evil:build"]).config
    assert teacher_of(own) is not None, "the pupil's own code"
    for setting, why in (("data.num_classes=6", "7 classes"), ("data.in_chans=1", "3 channels")):
        with pytest.raises(UserError, match=why):
            assert parts_of(f"train.distill_from={teacher}", setting).teacher
    for preset, setting in (("single", "train.class_weights=balanced"), ("hivemind", "seed=1")):
        with pytest.raises(UserError, match="does not go with"):
            load(preset, [f"train.distill_from={teacher}", setting])


def test_a_teacher_gets_images_of_the_size_it_has_learned(tmp_path: Path) -> None:
    parts = parts_of(f"train.distill_from={saved_run(tmp_path / 'run', 'data.image_size=8')}")
    assert parts.teacher is not None
    seen: list[Any] = []
    parts.teacher._model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    Updater(parts)(micro_batches(), lr=0.1, seed=0)
    assert seen == [(4, 3, 8, 8)] * 2
