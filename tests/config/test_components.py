"""Parts of a configuration that must fit one another, checked at once and without torch."""

import re
from pathlib import Path

import pytest

from tests.config.conftest import Write
from trainkit.common.errors import UserError
from trainkit.config import yaml
from trainkit.config.loading import load
from trainkit.config.schema import OptimConfig
from trainkit.config.task_metrics import Metric, judged_by, metrics_of
from trainkit.launch.preparation import check

OWN = """
METRICS = {"mae": ("years", "lower", "Mean absolute error")}
HEADLINE = "mae"

def build(splits, *, power: float = 1.0):
    import torch
"""


@pytest.fixture
def ages(write: Write) -> Path:
    """A task of the user's own, which nobody needs to import."""
    return write("ages_task.py", OWN)


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
        (["task.name=multilabel"], "does not go with data.name=digits", "task.name=classification"),
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
        'METRICS = {"mae": "years"}', 'METRICS = {"lr": ("", "lower", "Rate")}',
        'METRICS = {"ema_mae": ("", "lower", "Error")}', 'METRICS = {"a b": ("", "lower", "Error")}',
        'METRICS = {"other": ("", "lower", "Error")}', "METRICS = dict(mae=3)",
    ],
)  # fmt: skip
def test_metrics_that_cannot_be_are_refused_with_an_example(ages: Path, wrong: str) -> None:
    ages.write_text(OWN.replace('METRICS = {"mae": ("years", "lower", "Mean absolute error")}', wrong))
    error = refused("task.name=ages_task:build")
    assert error.what == "The file of task 'ages_task:build' does not state its metrics."
    assert error.key == "task.name"
    assert 'METRICS = {"mae": ' in error.fix


# Optimizers and schedules that are not ours, checked before anything is queued.


def said(preset: str, *settings: str) -> str:
    with pytest.raises(UserError) as refused:
        check(load(preset, settings))
    return str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        ("optim.name=adan", "optim.betas=[0.9, 0.9, 0.9]", "optim.eps=1e-6", "optim.no_prox=true"),
        ("optim.name=timm/adamw", "optim.eps=1e-6"), ("optim.name=torch/adafactor",),
        ("optim.name=rmsprop", "optim.momentum=0.5", "optim.centered=true"),
        ("optim.name=rprop", "optim.weight_decay=0"), ("optim.name=adafactor", "strategy.name=zero"),
        ("optim.name=lion", "strategy.name=fsdp"),
    ],
)  # fmt: skip
def test_optimizers_of_timm_and_torch_are_taken(settings: tuple[str, ...]) -> None:
    check(load("ddp", settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("optim.name=adaam",), r"Unknown optimizer 'adaam'(.|\n)*adamw, sgd, lamb, muon, (.|\n)*mean 'adam'"),
        (("optim.name=adan", "optim.epz=1"), r"Unknown key 'optim.epz'(.|\n)*mean 'optim.eps'"),
        (("optim.name=rmsprop", "optim.alpha=big"), "optim.alpha=big is not possible"),
        (("optim.name=adan", "optim.betas=[0.9, 0.99]"), r"does not take 2 numbers(.|\n)*It has 3"),
        (("optim.name=adafactor", "optim.betas=[0.9, 0.9, 0.9]"), r"does not take 3 numbers(.|\n)*It has 2"),
        (("optim.name=rprop",), "weight_decay=0.05 does not go with optim.name=rprop"),
        (("optim.name=kron",), r"not possible(.|\n)*checkpoint does not hold it"),
        (("optim.name=lbfgs",), r"not possible(.|\n)*several times an update"),
        (("optim.name=torch/muon",), r"not possible(.|\n)*matrices only"),
        (("optim.name=bnbadam8bit",), r"not possible(.|\n)*bitsandbytes"),
        (("optim.name=lambc", "optim.max_grad_norm=1"), "Use train.grad_clip_norm"),
        (("optim.name=adafactor", "strategy.name=fsdp"), r"not possible(.|\n)*whole weight"),
        (("optim.name=adan", "optim.caution=true", "strategy.name=fsdp"), r"not possible(.|\n)*whole weight"),
        (("schedule.name=cosin",), r"Unknown schedule 'cosin'(.|\n)*mean 'cosine'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(settings: tuple[str, ...], says: str) -> None:
    assert re.search(says, said("ddp", *settings))


@pytest.mark.parametrize("key", ["optim.wieght_decay", "optim.eps", "schedule.gama"])
def test_ours_have_no_further_keys(key: str) -> None:
    with pytest.raises(UserError, match=f"Unknown key '{key}'"):
        load("ddp", [f"{key}=1"])


def test_the_defaults_of_ours_are_theirs_alone() -> None:
    ours, lion = (load("ddp", [f"optim.name={name}"]).config.optim for name in ("sgd", "lion"))
    assert (ours.betas, ours.momentum, ours.nesterov) == ((0.9, 0.999), 0.9, False)
    assert (lion.betas, lion.momentum, lion.nesterov) == (None, None, None)
    assert OptimConfig(betas=None).given() == {}


def test_muon_is_its_authors() -> None:
    muon = load("ddp", ["optim.name=muon"]).config.optim
    assert (muon.momentum, muon.nesterov, muon.muon_as) == (0.95, True, "author")
    other = load("ddp", ["optim.name=muon", "optim.momentum=0.9", "optim.nesterov=false"]).config.optim
    assert (other.momentum, other.nesterov, other.muon_as) == (0.9, False, "author")
    assert OptimConfig.model_validate(muon.model_dump()) == muon


def test_the_configuration_of_a_run_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    config = load("ddp", ["optim.name=muon", "optim.momentum=0.9", "optim.nesterov=false"]).config
    stored = config.model_dump(mode="json")
    del stored["optim"]["muon_as"]
    stored["collaborative"]["give_code"] = False
    (tmp_path / "config.yaml").write_text(yaml.dump(stored))
    optim = load(str(tmp_path)).config.optim
    assert (optim.momentum, optim.nesterov, optim.muon_as) == (0.9, False, "timm")


def test_another_optimizer_does_not_inherit_what_was_for_the_one_before(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("optim: {name: sgd, momentum: 0.8, lr: 0.5}\n")
    assert load(str(preset), ["optim.name=muon"]).config.optim.momentum == 0.8
    adam = load(str(preset), ["optim.name=adam"]).config.optim
    assert (adam.lr, adam.momentum, adam.options) == (0.5, None, {})
    preset.write_text("optim: {name: adan, eps: 0.5}\n")
    assert load(str(preset), ["optim.name=sgd"]).config.optim.options == {}


def test_functions_of_the_users_own_are_checked_by_their_keywords(write: Write) -> None:
    write(
        "own_rates.py",
        "def optimizer(groups, lr, *, drag: float = 0.5): ...\n"
        "def rate(step, total_steps, lr, *, floor: float, gamma: float, steps_per_epoch): ...\n",
    )
    check(load("ddp", ["optim.name=own_rates:optimizer", "optim.drag=1"]))
    check(load("ddp", ["schedule.name=own_rates:rate", "schedule.floor=1"]))
    assert "Unknown key 'optim.darg'" in said("ddp", "optim.name=own_rates:optimizer", "optim.darg=1")
    assert "Unknown key 'optim.betas'" in said("ddp", "optim.name=own_rates:optimizer", "optim.betas=[0.9, 0.9]")
    assert "schedule.floor=low is not possible" in said("ddp", "schedule.name=own_rates:rate", "schedule.floor=low")
    assert "needs 'schedule.floor'" in said("ddp", "schedule.name=own_rates:rate")
    assert "has no 'speed'" in said("ddp", "schedule.name=own_rates:speed")
    assert "No module 'yours'" in said("ddp", "optim.name=yours:build")
