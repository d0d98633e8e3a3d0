"""What must fit the task in a configuration is said at once, without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.checking import check
from trainkit.config.loading import load
from trainkit.config.task import Metric, judged_by, metrics_of
from trainkit.errors import UserError

OWN = """
METRICS = {"mae": ("years", "lower", "Mean absolute error")}
HEADLINE = "mae"

def build(splits, *, power: float = 1.0):
    import torch
"""


@pytest.fixture
def ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task of the user's own, which nobody needs to import."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "ages_task.py"
    file.write_text(OWN)
    return file


def refused(*overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        check(load("ddp", overrides))
    return caught.value


def test_a_best_model_is_judged_by_the_headline_unless_told_otherwise() -> None:
    assert judged_by(load("ddp", ()).config) == "val/acc1"
    assert judged_by(load("ddp", ("checkpoint.best=val/loss",)).config) == "val/loss"


@pytest.mark.parametrize(
    ("overrides", "what", "fix"),
    [
        (["checkpoint.best=val/ac1"], "checkpoint.best=val/ac1 is not valid", "Did you mean 'val/acc1'?"),
        (["checkpoint.best=val/f1"], "checkpoint.best=val/f1 is not valid", "val/acc1"),
        (["task.name=clasification"], "Unknown task 'clasification'", "Did you mean 'classification'?"),
        (["task.threshold=0.5"], "Unknown key 'task.threshold'", "Remove 'task.threshold'"),
        (["task.label_smoothing=0.1"], "Unknown key 'task.label_smoothing'", "Remove 'task.label_smoothing'"),
        (
            ["task.name=multilabel"],
            "task.name=multilabel does not go with data.name=digits",
            "task.name=classification",
        ),
    ],
)
def test_what_does_not_fit_the_task_is_refused(overrides: list[str], what: str, fix: str) -> None:
    error = refused(*overrides)
    assert what in error.what
    assert fix in error.fix
    assert overrides[-1] in str(error)


def test_class_weights_do_not_go_with_several_labels(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("image,labels\n" + "".join(f"{name}.png,cat;dog\n" for name in "abcdefgh"))
    photos = ("task.name=multilabel", "data.name=image_csv", f"data.root={tmp_path}", "train.global_batch_size=2")
    assert judged_by(load("ddp", photos).config) == "val/mAP"
    check(load("ddp", (*photos, "task.threshold=0.3", "train.label_smoothing=0.1", "checkpoint.best=val/f1")))
    error = refused(*photos, "train.class_weights=balanced")
    assert error.what == "train.class_weights does not go with task.name=multilabel."


def test_a_task_of_ones_own_states_its_metrics(ages: Path) -> None:
    described = metrics_of("ages_task:build")
    assert described.metrics["mae"] == Metric("years", False, "Mean absolute error")
    check(load("ddp", ("task.name=ages_task:build", "task.power=2", "checkpoint.best=val/mae")))
    assert "has: power" in refused("task.name=ages_task:build", "task.pover=2").why
    assert "train.label_smoothing" in refused("task.name=ages_task:build", "train.label_smoothing=0.1").what


@pytest.mark.parametrize(
    "wrong",
    [
        'METRICS = {"mae": ("years", "down", "Mean absolute error")}',
        'METRICS = {"mae": "years"}',
        'METRICS = {"lr": ("", "lower", "Rate")}',
        'METRICS = {"ema_mae": ("", "lower", "Error")}',
        'METRICS = {"a b": ("", "lower", "Error")}',
        'METRICS = {"other": ("", "lower", "Error")}',
        "METRICS = dict(mae=3)",
    ],
)
def test_metrics_that_cannot_be_are_refused_with_an_example(ages: Path, wrong: str) -> None:
    ages.write_text(OWN.replace('METRICS = {"mae": ("years", "lower", "Mean absolute error")}', wrong))
    error = refused("task.name=ages_task:build")
    assert error.what == "The file of task 'ages_task:build' does not state its metrics."
    assert error.key == "task.name"
    assert 'METRICS = {"mae": ' in error.fix
