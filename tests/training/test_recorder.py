"""What comes of a training: its best model, checkpoints and summary, an early stop, and broken images."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import Linear, Notes, evaluated, keeper_of, parts_of
from tests.training.test_resume import final_weights
from trainkit.checkpoint import format
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.data.base import Batch, normalize
from trainkit.report.collection import collect
from trainkit.report.end_lines import summary_lines
from trainkit.report.writers import write_logbook
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.loop import train
from trainkit.training.progress import Progress
from trainkit.training.recorder import Recorder, too_many
from trainkit.training.train_state import TrainState
from trainkit.training.update import Updater


@pytest.mark.parametrize(("prefix", "lost"), [("", math.nan), ("ema_", math.inf)])
def test_a_model_whose_loss_is_not_finite_is_never_the_best(prefix: str, lost: float) -> None:
    progress, by = Progress(step=1), f"val/{prefix}acc1"
    assert not progress.judge({f"{prefix}acc1": 90.0, f"{prefix}loss": lost}, by, higher_is_better=True)
    assert (progress.best, progress.best_step, progress.stalled) == (None, None, 1)
    other = "loss" if prefix else "ema_loss"  # that of the other weights does not matter
    assert progress.judge({f"{prefix}acc1": 10.0, f"{prefix}loss": 2.0, other: lost}, by, higher_is_better=True)


@pytest.mark.parametrize(
    ("what", "overrides", "steps"),
    [
        ("validation", (), [3, 6, 9, 11]),
        ("validation", ("train.eval_every_epochs=2",), [6, 11]),
        ("validation", ("train.eval_every_epochs=9",), [11]),
        ("saving", (), [3, 6, 9, 11]),
        ("saving", ("checkpoint.every_epochs=2",), [6, 11]),
        ("saving", ("checkpoint.every_epochs=null",), [11]),
        ("saving", ("checkpoint.every_epochs=null", "checkpoint.every_steps=4"), [4, 8, 11]),
        ("saving", ("checkpoint.every_epochs=2", "checkpoint.every_steps=5"), [5, 6, 10, 11]),
    ],
)
def test_what_is_due_every_so_many_epochs_or_steps_and_at_the_end(
    tmp_path: Path, what: str, overrides: tuple[str, ...], steps: list[int]
) -> None:
    """Of 11 updates, 3 an epoch."""
    progress = Progress()
    keeper = keeper_of(parts_of("train.max_steps=11", *overrides), tmp_path / "run", progress)
    found = []
    for progress.step in range(1, 12):
        found += [progress.step] * getattr(keeper, f"{what}_is_due")()
    assert found == steps


def records(keeper: Recorder) -> list[dict[str, Any]]:
    assert isinstance(keeper.metrics, Notes)
    return keeper.metrics.records


def test_a_validation_is_recorded_with_its_place_and_judged(tmp_path: Path) -> None:
    progress = Progress(step=3)
    keeper = keeper_of(parts_of("checkpoint.best=val/loss"), tmp_path / "run", progress)
    assert keeper.validate({}, should_stop=lambda: True) is None
    assert (records(keeper), progress) == ([], Progress(step=3)), "one that is stopped half way leaves no trace"
    assert keeper.validate({"step": 3, "lr": 0.5}) is True
    (record,) = records(keeper)
    assert {"step": 3, "lr": 0.5, "split": "val", "samples": 10}.items() <= record.items()
    assert progress.best == record["loss"] == progress.val["loss"]
    assert progress.validated_step == 3
    assert keeper.validate({}) is False


@pytest.mark.parametrize(
    ("best_step", "is_of_the_saved", "average"),
    [(3, True, ()), (2, True, ("train.ema_decay=0.9",)), (None, False, ())],
    ids=["the best", "the newest where the best is lost", "the last without a best"],
)
def test_the_test_is_that_of_the_best_weights(
    tmp_path: Path, best_step: int | None, is_of_the_saved: bool, average: tuple[str, ...]
) -> None:
    progress, model = Progress(step=3), Linear()
    keeper = keeper_of(parts_of(*average, model=model), tmp_path / "run", progress)
    before = keeper.test({})
    assert ("ema_acc1" in before) == bool(average)
    keeper.writer.run.confusion.unlink()
    keeper.save()
    model.layer.weight.data.neg_()
    progress.step, progress.best_step = 6, best_step
    now = keeper.test({"epoch": 2.0})
    assert (now == before) == is_of_the_saved
    assert records(keeper)[-1] == {"epoch": 2.0, "split": "test", **now}
    assert now["samples"] == 6
    counted = json.loads(keeper.writer.run.confusion.read_text())
    assert (counted["step"], counted["split"]) == (3 if is_of_the_saved else 6, "test")
    right = sum(count for label, told, count in counted["raw"] if label == told)
    assert 100 * right / 6 == pytest.approx(now["acc1"])
    keeper.checkpoints.save(model, None, step=7, state={})
    progress.step, progress.best_step = 9, 7
    assert "ema_acc1" not in keeper.test({}), "of a checkpoint without an average"


def test_a_checkpoint_has_progress_precision_and_ranks_and_is_an_event(tmp_path: Path) -> None:
    """It can leave the optimizer out, and hold tensors of its own."""
    progress = Progress(step=3, validated_step=3, best_step=3, best=1.0, images=24)
    beats: list[int] = []
    keeper = keeper_of(parts_of(), tmp_path / "run", progress, beat=lambda: beats.append(1))
    keeper.save(optimizer=False, extra={"common": {"momentum": torch.ones(2)}}, round=4)
    run = keeper.writer.run
    state = format.verified(run.checkpoints, 3).state
    assert Progress.of(state) == progress
    for impossible in ({"validated_step": 5}, {"validated_step": -1}, {"position": -1}):
        with pytest.raises(ValueError, match="impossible"):
            Progress.of({"progress": {**state["progress"], **impossible}})
    assert (state["world_size"], state["precision"]) == (1, keeper.state.precision.state_dict())
    assert format.pointed(run.checkpoints, "best") == format.pointed(run.checkpoints, "latest") == 3
    files = {path.name for path in format.path_of(run.checkpoints, 3).glob("*.safetensors")}
    assert files == {"model.safetensors", "common.safetensors"}
    assert [(event["step"], event["round"]) for event in read_events(run, "saved")] == [(3, 4)]
    assert len(beats) >= 2


def test_the_summary_says_what_came_of_it(tmp_path: Path) -> None:
    progress = Progress(step=3, best_step=2, best=math.nan, val={"acc1": 40.0}, train_seconds=1.23456, images=1000)
    keeper = keeper_of(parts_of(), tmp_path / "run", progress)
    keeper.summarize("finished", epochs=1.23456, test={"acc1": 45.0}, rounds=7)
    text = keeper.writer.run.summary.read_text()
    summary = json.loads(text)
    expected = {
        "outcome": "finished", "steps": 3, "epochs": 1.2346, "best": {"val/acc1": None}, "best_step": 2,
        "val": {"acc1": 40.0}, "test": {"acc1": 45.0}, "train_seconds": 1.235, "images_per_sec": 810.01,
        "world_size": 1, "grad_accum_steps": 2, "micro_batch_size": 4, "precision": "fp32", "skipped_steps": 0,
        "broken_images": 0, "device": "cpu", "params": 7 * 48 + 7, "rounds": 7,
    }  # fmt: skip
    assert expected.items() <= summary.items()
    assert set(summary) - set(expected) == {
        "seconds", "mfu", "flops_per_image", "max_memory_mb", "max_memory_mb_of_ranks",
        "max_memory_reserved_mb_of_ranks", "energy", "advice",
    }  # fmt: skip
    assert summary["max_memory_mb_of_ranks"] == [summary["max_memory_mb"]]
    assert text.startswith('{\n  "outcome"')
    assert [path.name for path in keeper.writer.run.path.glob("*summary*")] == ["summary.json"]
    progress.train_seconds = progress.images = 0
    keeper.summarize("finished", epochs=0, test=None)
    assert json.loads(keeper.writer.run.summary.read_text())["images_per_sec"] is None


def make_an_update(keeper: Recorder) -> None:
    images = torch.full((8, 3, 4, 4), 100, dtype=torch.uint8)
    batch = Batch(images[:4], torch.zeros(4).long(), torch.arange(4))
    made = Updater(keeper.state)(iter([batch] * 2), lr=0.5, seed=0)
    assert keeper.state.ema is not None
    keeper.state.ema.update(made.stepped.nonfinite, updates=keeper.progress.ema_updates)
    keeper.progress.ema_updates += 1


def what_learns(keeper: Recorder) -> list[torch.Tensor]:
    """The weights, their averages and the optimizer's moments."""
    model, optimizer, ema = keeper.state.model, keeper.state.optimizer, keeper.state.ema
    assert ema is not None
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *ema.tensors().values(), *moments)]


@pytest.fixture
def gone_bad(tmp_path: Path) -> Recorder:
    """Of a run that saved after step 3, and whose next updates were no good."""
    progress = Progress(step=3, position=3, images=24, best=0.5, best_step=3, rollbacks=1)
    keeper = keeper_of(parts_of("train.ema_decay=0.9"), tmp_path / "run", progress)
    make_an_update(keeper)
    make_an_update(keeper)  # or the average would be the weights
    keeper.save()
    make_an_update(keeper)
    keeper.state.precision.skipped_steps = 5
    progress.step, progress.position, progress.nonfinite, progress.images, progress.best = 7, 9, 3, 56, 0.75
    return keeper


def test_a_rollback_is_back_at_the_newest_checkpoint_with_later_data(gone_bad: Recorder, tmp_path: Path) -> None:
    bad = what_learns(gone_bad)
    assert gone_bad.roll_back(9) is True
    good = what_learns(gone_bad)
    there = Progress(step=3, position=9, images=24, best=0.5, best_step=3, rollbacks=2, ema_updates=2)
    assert replace(gone_bad.progress, seconds={}) == there
    assert not any(torch.equal(*pair) for pair in zip(good, bad, strict=True))
    make_an_update(gone_bad)
    assert all(torch.allclose(*pair) for pair in zip(what_learns(gone_bad), bad, strict=True))
    assert gone_bad.state.precision.skipped_steps == 0
    (event,) = read_events(gone_bad.writer.run, "rolled_back")
    assert (event["step"], event["from_step"], event["position"]) == (3, 7, 9)
    saved = format.verified(gone_bad.writer.run.checkpoints, 3).state
    assert replace(Progress.of(saved), seconds={}) == there, "a run that is resumed does not meet the bad data again"
    assert gone_bad.roll_back(12) is True
    assert gone_bad.roll_back(15) is False, "three times at most"
    assert (gone_bad.progress.position, gone_bad.progress.rollbacks) == (12, 3)
    assert keeper_of(parts_of(), tmp_path / "new", Progress(step=7)).roll_back(9) is False, "there is no checkpoint"


MODEL = ("data.name=image_folder", "data.in_chans=1", "data.image_size=28", "train.global_batch_size=4",
         "train.max_steps=6", "model.dropout=0", "checkpoint.every_steps=2", "checkpoint.keep=9")  # fmt: skip


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """12 images to train on, of which three are broken, two in a row, and 6 to validate, of which one is."""
    root = tmp_path / "images"
    for split, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (30, 30), 40 + 100 * label + number).save(root / split / name / f"{number}.png")
    for name in ("train/cat/2", "train/cat/3", "train/dog/0", "val/dog/1"):
        (root / f"{name}.png").write_bytes(b"nothing")
    return root


@pytest.mark.nightly
def test_broken_images_are_skipped_alike_by_all_ranks_and_named_once(tmp_path: Path, images: Path) -> None:
    settings = (*MODEL, f"data.root={images}", "data.max_broken=4")
    whole, broken = tmp_path / "whole", tmp_path / "run"
    assert run_ranks(2, train_run, broken, "ddp", settings, 4) == ["preempted"] * 2
    assert run_ranks(2, train_run, broken, "ddp", (*settings, "data.workers=1")) == ["finished"] * 2
    events = read_events(RunDir(broken), "broken_image")
    assert sorted(str(event["file"]).split("images/")[1] for event in events) == [
        "train/cat/2.png", "train/cat/3.png", "train/dog/0.png", "val/dog/1.png",
    ]  # fmt: skip
    assert json.loads((broken / "summary.json").read_text())["broken_images"] == 4
    assert {record["samples"] for record in read_metrics(RunDir(broken), "val")} == {5}
    for name, next_whole in (("cat/2", "cat/4"), ("cat/3", "cat/4"), ("dog/0", "dog/1")):
        (images / f"train/{name}.png").write_bytes((images / f"train/{next_whole}.png").read_bytes())
    assert run_ranks(2, train_run, whole, "ddp", settings) == ["finished"] * 2
    assert final_weights(broken) == final_weights(whole)


def test_an_image_is_named_once_in_a_runs_life_and_too_many_are_told(tmp_path: Path) -> None:
    """An attempt that ends before its first checkpoint has named some, and the next one meets them anew."""
    progress = Progress()
    keeper = keeper_of(parts_of(), tmp_path / "run", progress)
    keeper.remark("broken_image", file="0.png", why="cut short")
    keeper.state.broken.met, keeper.state.broken.most = {"1.png": "no image", "0.png": "cut short"}, 2
    keeper.state.broken.waited = {"7.tar": 30.0}
    keeper.tell_broken()
    (event,) = read_events(keeper.writer.run, "data_waited")
    assert (event["file"], event["seconds"]) == ("7.tar", 30.0)
    found = [(event["file"], event["why"]) for event in read_events(keeper.writer.run, "broken_image")]
    assert (found, progress.broken) == ([("0.png", "cut short"), ("1.png", "no image")], ["0.png", "1.png"])
    keeper.state.broken.met = {f"{number}.png": "" for number in range(2, 6)}
    with pytest.raises(UserError, match=r"6 images are broken[^$]*0\.png, 1\.png, 2\.png, 3\.png, 4\.png and 1 more\."):
        keeper.tell_broken()
    with pytest.raises(UserError, match=r"^1 image is broken[\s\S]*decoded: a\.png\.\n"):
        raise too_many(["a.png"], 0)


def refused(env: RankEnv, folder: Path, settings: tuple[str, ...]) -> str:
    with pytest.raises(UserError) as caught:
        train_run(env, folder, "ddp", settings)
    return str(caught.value)


def test_one_more_than_may_be_ends_the_run_on_all_ranks_alike(tmp_path: Path, images: Path) -> None:
    settings = (*MODEL, f"data.root={images}", "data.max_broken=3")
    one, other = run_ranks(2, refused, tmp_path / "run", settings)
    assert one == other
    assert one.startswith("4 images are broken, and data.max_broken=3.")
    assert all(f"{images}/{name}.png" in one for name in ("train/cat/2", "val/dog/1"))


@pytest.mark.parametrize(
    ("by", "values", "min_delta", "stalled", "best"),
    [
        ("val/acc1", [50, 60, 60, 70], 0.0, [0, 0, 1, 0], 70),
        ("val/acc5", [50, 60, 60, 40], 0.0, [0, 0, 1, 2], 60),  # of equals the first is the best
        ("val/loss", [0.5, 0.6, 0.4, 0.4], 0.0, [0, 1, 0, 1], 0.4),
        # Small steps add up to one that counts: they are measured against the last that did.
        ("val/acc1", [50, 50.6, 51.2, 51.3], 1.0, [0, 1, 0, 1], 51.3),
        ("val/acc1", [50, math.nan, math.inf, 60], 0.0, [0, 1, 2, 0], 60),
        ("val/loss", [math.nan, 0.5, math.inf], 0.0, [1, 0, 1], 0.5),
    ],
)
def test_validations_that_are_no_better_are_counted(
    by: str, values: list[float], min_delta: float, stalled: list[int], best: float
) -> None:
    progress, found = Progress(), []
    for progress.step, value in enumerate(values, start=1):
        val, before = {by.removeprefix("val/"): value}, progress.best
        is_best = progress.judge(val, by, higher_is_better=by != "val/loss", min_delta=min_delta)
        assert is_best == (progress.best != before)
        assert (progress.val, progress.validated_step) == (val, progress.step)
        found.append(progress.stalled)
    assert (found, progress.best, progress.best_step) == (stalled, best, values.index(best) + 1)
    assert progress.judge({"f1": 0.1}, "val/f1", higher_is_better=True), "two measures do not compare"


@pytest.mark.long
def test_interrupted_ranks_stop_early_at_the_same_step_as_others(tmp_path: Path) -> None:
    """No validation after the first is 100 percent better, so that the third is the second that is not."""
    small = ("data.name=synthetic", "data.train_size=160", "data.val_size=40", "data.test_size=20", "train.epochs=9")
    patient = ("train.early_stopping_patience=2", "train.early_stopping_min_delta=100", "train.global_batch_size=32")
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def trained(folder: Path, stop_after: int | None = None) -> set[str]:
        return set(run_ranks(2, train_run, folder, "ddp", (*small, *patient), stop_after))

    assert trained(whole) == {"finished"}
    # In the second epoch, and in the validation after step 15, which is owed then.
    for stop_after in (8, 9):
        assert trained(broken, stop_after) == {"preempted"}
    assert trained(broken) == {"finished"}
    assert [event["step"] for event in read_events(RunDir(broken), "started")] == [0, 7, 15]
    told = []
    for folder in (whole, broken):
        run = RunDir(folder)
        (event,) = read_events(run, "stopped_early")
        assert (event["step"], event["total_steps"]) == (15, 45)
        assert [record["step"] for record in read_metrics(run, "val")] == [5, 10, 15]
        assert [record["step"] for record in read_metrics(run, "test")] == [15]
        assert read_events(run, "ended")[-1]["state"] == "COMPLETED"
        summary = json.loads(run.summary.read_text())
        assert (summary["outcome"], summary["steps"], summary["stopped_early"]) == ("finished", 15, event["why"])
        told.append(event["why"])
    assert told[0] == told[1]
    assert told[0] == "val/acc1 has not improved in 2 validations in a row"
    assert final_weights(broken) == final_weights(whole)
    assert f"stopped early    {told[0]}" in summary_lines(RunDir(whole))
    logbook = write_logbook(collect([RunDir(whole)]), tmp_path / "report")[0].read_text()
    assert f"Finished after 15 steps. Stopped early: {told[0]}." in logbook


PLATEAU = ("schedule.name=plateau", "schedule.patience=1", "schedule.gamma=0.5", "schedule.final_lr_ratio=0.1")


@pytest.mark.parametrize(
    ("best", "min_delta", "patience", "lowest"),
    [("val/loss", 0.0, 1, 0.1), ("val/acc1", 5.0, 0, 0), ("val/loss", 0.5, 3, 0)],
)
def test_the_rate_falls_where_torchs_reduce_lr_on_plateau_lets_it(
    tmp_path: Path, best: str, min_delta: float, patience: int, lowest: float
) -> None:
    how = (f"schedule.patience={patience}", f"schedule.final_lr_ratio={lowest}", f"checkpoint.best={best}")
    much = ("train.epochs=25", "schedule.warmup_epochs=0", "optim.name=sgd", "optim.lr=2")
    parts = parts_of(*PLATEAU, *how, *much, f"train.early_stopping_min_delta={min_delta}")
    keeper = keeper_of(parts, tmp_path / "run", Progress())
    assert train(parts, keeper, lambda: False)
    torchs = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    mode: Any = "min" if best == "val/loss" else "max"
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        torchs, mode, 0.5, patience, threshold=min_delta, threshold_mode="abs", min_lr=2 * lowest
    )
    for record in records(keeper):
        assert record["lr"] == pytest.approx(torchs.param_groups[0]["lr"]), record["step"]
        if record["split"] == "val":
            theirs.step(record[best.removeprefix("val/")])
    assert keeper.progress.falls > 3
    assert torchs.param_groups[0]["lr"] < 0.5


@pytest.mark.nightly
def test_a_plateau_goes_on_from_a_checkpoint_to_the_last_bit(tmp_path: Path) -> None:
    """The rate falls in the third validation and in the fifth."""
    small = ("data.name=synthetic", "data.train_size=160", "data.val_size=40", "data.test_size=20", "train.epochs=6")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = (*small, *PLATEAU, "train.early_stopping_min_delta=100", "train.global_batch_size=32")

    def trained(folder: Path, stop_after: int | None = None) -> set[str]:
        return set(run_ranks(2, train_run, folder, "ddp", settings, stop_after))

    assert trained(whole) == {"finished"}
    for stop_after in (19, 9):  # in the third validation, which is owed then, and in the fifth epoch
        assert trained(broken, stop_after) == {"preempted"}
    assert trained(broken) == {"finished"}
    rates = [[record["lr"] for record in read_metrics(RunDir(folder), "train")] for folder in (whole, broken)]
    assert rates[0] == rates[1]
    assert [rates[0][step] for step in (14, 15, 24, 25)] == [0.002, 0.001, 0.001, 0.0005]
    assert [event["step"] for event in read_events(RunDir(broken), "started")] == [0, 15, 21]
    assert final_weights(broken) == final_weights(whole)


@pytest.mark.parametrize(
    ("step", "stalled", "patience", "is_over", "why"),
    [
        (6, 1, 2, False, ""),
        (6, 2, 2, True, "val/acc1 has not improved in 2 validations in a row"),
        (6, 20, None, False, ""),
        (9, 2, 2, True, ""),  # there was nothing left to train
    ],
)
def test_a_run_cut_off_after_its_last_validation_trains_no_further(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step: int,
    stalled: int,
    patience: int | None,
    is_over: bool,
    why: str,
) -> None:
    settings = ("train.epochs=3", "schedule.name=constant", f"train.early_stopping_patience={patience or 'null'}")
    keeper = keeper_of(parts_of(*settings), tmp_path / "run", Progress(step=step, stalled=stalled))
    assert (keeper.is_over(), keeper.tell_early_stop()) == (is_over, why)
    told = [(e["step"], e["total_steps"], e["why"]) for e in read_events(keeper.writer.run, "stopped_early")]
    assert told == [(step, 9, why)] * bool(why)
    assert capsys.readouterr().out == f"Stopped early after {step} of 9 steps: {why}.\n" * bool(why)


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("single", ["train.early_stopping_min_delta=0.1"], "train.early_stopping_patience=5"),
        ("single", ["train.early_stopping_patience=0"], "train.early_stopping_patience"),
        ("single", ["train.early_stopping_patience=2", "train.early_stopping_min_delta=-1"], "early_stopping_min"),
        ("hivemind", ["train.early_stopping_patience=2"], "jobs.swarm stop"),
        ("hivemind", ["schedule.name=plateau"], "schedule.name=plateau does not go with"),
    ],
)
def test_what_stops_nothing_or_cannot_be_stopped_is_refused(preset: str, overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(preset, overrides)
    assert words in str(caught.value)


def by_hand(parts: TrainState) -> dict[str, float]:
    """Metrics of the validation split in one batch."""
    samples = [parts.splits.val[index] for index in range(len(parts.splits.val))]
    images = torch.stack([parts.splits.eval_transform(image) for image, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    logits = Linear()(normalize(images, parts.splits.info))
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    return {
        "loss": functional.cross_entropy(logits, labels).item(),
        "acc1": 100 * (ranks < 1).float().mean().item(),
        "acc5": 100 * (ranks < 5).float().mean().item(),
        "samples": len(samples),
    }


def test_each_sample_counts_once_whatever_pads_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And evaluation makes no optimizer."""
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", None)
    parts = parts_of()
    for batch_size in (10, 4, 3, 1, 16):
        assert evaluated(parts, batch_size=batch_size) == pytest.approx(by_hand(parts), rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_needs_no_gradients_and_leaves_the_model_as_it_was(training: bool) -> None:
    """Each batch, of training's size where nobody says another, is a sign of life."""
    model, beats = Linear().train(training), list[int]()
    parts, answers = parts_of(model=model), iter([False, True])
    evaluated(parts, beat=lambda: beats.append(1))
    evaluated(parts, batch_size=6)
    assert not evaluated(parts, should_stop=lambda: next(answers)), "it has no result, if it is told to stop"
    assert model.calls == [(size, False, False) for size in (4, 4, 4, 6, 6, 4)]
    assert len(beats) == 3
    assert model.training is training
    assert torch.is_grad_enabled()
