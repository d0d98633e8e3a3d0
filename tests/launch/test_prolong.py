"""A run that goes on with other settings: longer, and else the same to the last bit; what cannot be is said before."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.rank_functions import run_ranks, train_run
from tests.training.test_resume import final_weights
from trainkit.checkpoint import format
from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.config import yaml
from trainkit.config.layers import flatten
from trainkit.config.loading import load, to_yaml
from trainkit.config.schema import SECTIONS, Config, field_of
from trainkit.launch.prolong import Change, Prolongation, Schedule, may_change, prolongation
from trainkit.launch.resume import refuse_finished
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.metrics import read_metrics
from trainkit.training.progress import JUDGED
from trainkit.training.schedule import lr_at

CONSTANT = ("schedule.name=constant", "schedule.warmup_epochs=0.5")


def prolonged(run: RunDir, *overrides: str, schedule: Schedule | None = None) -> Prolongation:
    def loaded(more: Sequence[str]) -> object:
        return load(str(run.config), more)

    return prolongation(run, Change(overrides, schedule), loaded)  # type: ignore[arg-type]


def write(item: Prolongation) -> None:
    """Record and write it, as `resume` does under its lease."""
    with item.recorded():
        fileio.write(item.run.config, to_yaml(item.loaded.config), item.run.path)


@pytest.mark.parametrize(
    ("preset", "world_size", "settings"),
    [
        ("single", 1, ("train.ema_decay=0.9", "model.dropout=0.2")),
        pytest.param("ddp", 2, ("model.dropout=0.2",), marks=pytest.mark.nightly),
    ],
)
def test_a_prolonged_run_is_that_which_was_trained_so_long_from_the_start(
    tmp_path: Path, preset: str, world_size: int, settings: tuple[str, ...]
) -> None:
    """Weights, average and optimizer; and the curves, but for the record in which the first part has ended."""
    long = tmp_path / "long"
    short = tmp_path / "short"
    settings = (*CONSTANT, "monitor.log_every=10", *settings)
    run_ranks(world_size, train_run, long, preset, ("train.epochs=2", *settings))
    run_ranks(world_size, train_run, short, preset, ("train.epochs=1", *settings))
    run = RunDir(short)
    assert history_of(run).finished
    write(prolonged(run, "train.epochs=2"))
    assert (history_of(run).finished, run.summary.exists()) == (False, False)
    run_ranks(world_size, train_run, short, str(run.config), ("monitor.log_every=10",))
    assert history_of(run).finished
    assert final_weights(short) == final_weights(long)
    losses = [{record["step"]: record["loss"] for record in read_metrics(RunDir(it), "train")} for it in (short, long)]
    assert losses[0] == {**losses[1], 19: losses[0][19]}


# No validation after the first is better by so much: each counts as a stand-still.
STANDS_STILL = (
    *("train.early_stopping_patience=2", "train.early_stopping_min_delta=100", "train.ema_decay=0.9"),
    *("schedule.name=plateau", "schedule.warmup_epochs=0", "schedule.patience=0", "schedule.gamma=0.5"),
    *("checkpoint.best=val/ema_loss", "checkpoint.keep=1", "monitor.log_every=1"),
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first", "then", "rhythm", "ends_at"),
    [("train.max_steps=25", "train.max_steps=60", 1, 57), ("train.epochs=3", "train.epochs=5", 2, 95)],  # 19 an epoch
)
def test_an_end_between_two_validations_is_as_if_it_had_not_been_validated(
    tmp_path: Path, first: str, then: str, rhythm: int, ends_at: int
) -> None:
    """Its rates, its end and its best model are those of the long run, though the short one was best at its end."""
    short, long = RunDir(tmp_path / "short"), RunDir(tmp_path / "long")
    settings = (*STANDS_STILL, f"train.eval_every_epochs={rhythm}")
    run_ranks(1, train_run, long.path, "single", (then, *settings))
    run_ranks(1, train_run, short.path, "single", (first, *settings))
    old_end = format.steps(short.checkpoints)[-1]
    assert format.pointed(short.checkpoints, "best") == old_end
    item = prolonged(short, then)
    assert (item.inexact, item.standing and item.standing.stalled) == ("", 0)
    write(item)
    run_ranks(1, train_run, short.path, str(short.config), ("monitor.log_every=1",))
    of_both = []
    for run in (short, long):
        progress = format.manifest_of(run.checkpoints, format.steps(run.checkpoints)[-1]).state["progress"]
        judged = {name: progress[name] for name in JUDGED}
        rates = {record["step"]: record["lr"] for record in read_metrics(run, "train")}
        best = format.pointed(run.checkpoints, "best")
        summary = fileio.read_object(run.summary)
        ends = {name: summary.get(name) for name in ("steps", "best", "best_step", "test", "stopped_early")}
        of_both.append((progress["step"], judged, rates, best, ends, final_weights(run.path)))
    assert of_both[0] == of_both[1]
    assert of_both[0][0] == ends_at


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., RunDir]:
    """Makes a run that has trained its 40 updates, of 20 an epoch, with a fingerprint that another may have."""

    def make(*overrides: str, step: int = 40) -> RunDir:
        settings = ("train.epochs=2", "train.global_batch_size=64", *overrides)
        run = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp", settings).config))
        fileio.write(run.manifest, '{"fingerprint": "old"}', run.path)
        append_event(run, "started", attempt=0, total_steps=40, steps_per_epoch=20)
        append_event(run, "ended", attempt=0, state="COMPLETED" if step == 40 else "CANCELLED")
        (run.checkpoints / f"step-{step:08}").mkdir(parents=True)
        return run

    return make


def rate(config: Config, step: int, total: int) -> float:
    return lr_at(step, optim=config.optim, schedule=config.schedule, steps_per_epoch=20, total_steps=total)


@pytest.mark.parametrize("step", [40, 25])
@pytest.mark.parametrize("name", ["onecycle", "cosine", "wsd"])
def test_a_schedule_that_goes_by_the_length_is_stretched_or_begun_anew(
    trained: Callable[..., RunDir], name: str, step: int
) -> None:
    run = trained(f"schedule.name={name}", step=step)
    if name == "wsd" and step == 25:  # which has not come down yet
        assert prolonged(run, "train.epochs=4").schedule is None
        return
    with pytest.raises(UserError, match="which depends on its length") as refused:
        prolonged(run, "train.epochs=4")
    stretched, anew = (prolonged(run, "train.epochs=4", schedule=how) for how in ("stretch", "restart"))
    jump, first = rate(stretched.loaded.config, step, 80), rate(anew.loaded.config, step, 80)
    assert jump == rate(load("ddp", [f"schedule.name={name}"]).config, step, 80)
    rest = [rate(load("ddp", [f"schedule.name={name}"]).config, at, 80 - step) for at in range(80 - step)]
    assert [rate(anew.loaded.config, at, 80) for at in range(step, 80)] == rest
    assert f"jumps to {jump:.3g};" in refused.value.fix
    assert f"the next is {jump:.3g}." in stretched.told
    assert f"the next is {first:.3g}." in anew.told
    for each in (stretched, anew):
        write(each)
        assert fileio.read_object(run.manifest)["fingerprint"] == "", "no run from the start is like that"


def test_a_warm_up_that_the_first_length_has_cut_short_is_no_constant_rate(trained: Callable[..., RunDir]) -> None:
    with pytest.raises(UserError, match="--restart-schedule") as refused:
        prolonged(trained("schedule.name=constant", "schedule.warmup_epochs=3"), "train.epochs=4")
    assert refused.value.why == "Its warm-up took half of its 40 updates; of 80 it would have been longer."
    assert "jumps" not in refused.value.fix


def test_a_rate_that_has_fallen_on_a_plateau_goes_on_where_it_is(trained: Callable[..., RunDir]) -> None:
    run = trained("schedule.name=plateau", "schedule.warmup_epochs=0", "optim.lr=1")
    record = format.CheckpointManifest(40, {"progress": {"falls": 2}}, {})
    (run.checkpoints / "step-00000040" / "state.json").write_text(record.to_json())
    assert prolonged(run, "train.epochs=4").schedule is None
    assert "The rate was 0.01, and the next is 0.01." in prolonged(run, "train.epochs=4", schedule="restart").told


def test_of_a_function_of_the_users_own_nobody_says_the_rates(trained: Callable[..., RunDir]) -> None:
    run = trained("schedule.name=my_schedule:falling")  # which is not there to be asked
    with pytest.raises(UserError, match="your own function"):
        prolonged(run, "train.epochs=4")
    assert "The rate" not in prolonged(run, "train.epochs=4", schedule="stretch").told


def test_every_setting_is_in_the_table_or_has_a_reason_to_stay() -> None:
    table = yaml.packaged("continuation")
    sections = {*SECTIONS, *(name for name in Config.model_fields if name not in SECTIONS)}
    for key in (*table["may_change"], *table["inexact"]):
        assert key in SECTIONS or field_of(key) is not None, key
    keys = [key for key, _ in flatten(Config().model_dump(mode="json"))]
    assert {key.partition(".")[0] for key in keys if not may_change(key)} == table["must_stay"].keys()
    assert table["must_stay"].keys() <= sections
    assert all(map(may_change, table["inexact"]))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("optim.lr=1",), r"optim\.lr cannot change(.|\n)*submit \S+ optim\.lr=1` starts a new run"),
        (("seed=1", "train.epochs=3"), "seed cannot change"),
        (("data.name=cifar10",), "data.name cannot change"),
        (("schedule.start_step=4",), "--restart-schedule"),
        (("train.epochs=1",), r"nothing left to train(.|\n)*40 updates \(2 epochs\), and 20 were requested"),
        (("train.epochs=2",), "nothing left to train"),
        (("monitor.log_every=1",), "nothing left to train"),
        (("train.max_steps=30", "train.epochs=9"), r"max_steps=30 takes precedence(.|\n)*Give train\.max_steps=180"),
        (("train.epochs=3", "checkpoint.best=val/acc2"), "measures: val/loss"),
        (("train.epochs=3", "monitor.loggers=[own:build]"), "own copy of the code"),
        (("train.epochs=3", "monitor.loggers=[jsnol]"), "jsonl"),
    ],
    ids=" ".join,
)
def test_what_cannot_change_is_said_and_nothing_is_written(
    trained: Callable[..., RunDir], settings: tuple[str, ...], says: str
) -> None:
    run = trained("schedule.name=constant")
    before = {file: file.stat().st_mtime_ns for file in run.path.rglob("*")}
    with pytest.raises(UserError, match=says):
        prolonged(run, *settings)
    assert {file: file.stat().st_mtime_ns for file in run.path.rglob("*")} == before


def test_a_run_that_stopped_early_goes_on_with_more_patience(trained: Callable[..., RunDir]) -> None:
    run = trained("schedule.name=constant", "train.early_stopping_patience=3", step=25)
    append_event(run, "ended", attempt=0, state="COMPLETED")
    record = format.CheckpointManifest(25, {"progress": {"stalled": 3}}, {})
    (run.checkpoints / "step-00000025" / "state.json").write_text(record.to_json())
    with pytest.raises(
        UserError, match=r"Give train\.early_stopping_patience=6 as well, or train\.early_stopping_patience=null"
    ):
        prolonged(run, "train.epochs=3")
    write(prolonged(run, "train.early_stopping_patience=null"))
    assert (history_of(run).finished, load(str(run.config)).config.train.epochs) == (False, 2)


@pytest.mark.parametrize("name", ["constant", "plateau"])
def test_the_advice_on_an_early_stop_can_be_followed(trained: Callable[..., RunDir], name: str) -> None:
    """The advice lifts `early_stopping_min_delta` too, unless the schedule needs it."""
    settings = ("train.early_stopping_patience=3", "train.early_stopping_min_delta=0.5")
    run = trained(f"schedule.name={name}", *settings, step=25)
    append_event(run, "ended", attempt=0, state="COMPLETED")
    fileio.write(run.summary, '{"stopped_early": "val/acc1 has not improved"}', run.path)
    record = format.CheckpointManifest(25, {"progress": {"stalled": 3}}, {})
    (run.checkpoints / "step-00000025" / "state.json").write_text(record.to_json())
    with pytest.raises(UserError) as refused:
        refuse_finished(run)
    with pytest.raises(UserError) as again:
        prolonged(run, "train.epochs=3")
    for fix in (refused.value.fix, again.value.fix):
        advice = re.findall(r"train\.\w+=(?:null|0)\b", fix)
        assert advice
        assert prolonged(run, *advice).inexact == ""


NOT_THE_SAME = "It does not become the run that was trained so from the start."


@pytest.mark.parametrize(
    ("end", "settings", "says"),
    [
        ({"before_end": {"stalled": 0, "best_step": 20}}, (), ""),
        ({"before_end": {"stalled": 0, "best_step": None}}, (), ""),
        ({"before_end": {"stalled": 0, "best_step": 10}}, (), "update 10, whose checkpoint has been deleted."),
        ({"stalled": 0}, (), "update 30, was validated between two validations"),
        ({"before_end": {}}, ("train.eval_every_epochs=2",), "train.eval_every_epochs was different so far."),
        ({"before_end": {}}, ("train.early_stopping_patience=9",), "train.early_stopping_patience was different"),
        ({"before_end": {}}, ("train.early_stopping_min_delta=1", "train.early_stopping_patience=9"), "delta and"),
    ],
)
def test_what_does_not_become_the_long_run_is_said_and_equals_none(
    trained: Callable[..., RunDir], end: dict[str, object], settings: tuple[str, ...], says: str
) -> None:
    run = trained("train.max_steps=30", "schedule.name=constant", "schedule.warmup_epochs=0", step=30)
    (run.checkpoints / "step-00000020").mkdir()
    run.code.mkdir()
    (run.code / "own.py").write_text("")
    record = format.CheckpointManifest(30, {"progress": end}, {})
    (run.checkpoints / "step-00000030" / "state.json").write_text(record.to_json())
    item = prolonged(run, "train.max_steps=60", *settings)
    assert (NOT_THE_SAME in item.told, says in item.inexact, bool(item.inexact)) == (bool(says), True, bool(says))
    write(item)
    assert bool(fileio.read_object(run.manifest)["fingerprint"]) == (not says)


def test_older_code_is_asked_for_nothing_that_it_does_not_know(trained: Callable[..., RunDir]) -> None:
    run = trained("schedule.name=cosine")
    text = run.config.read_text()
    assert "start_step" in text
    run.config.write_text(re.sub(r",?\s*start_step: 0", "", text))
    with pytest.raises(UserError, match=r"does not know schedule\.start_step"):
        prolonged(run, "train.epochs=3", schedule="restart")
    assert prolonged(run, "train.epochs=3", schedule="stretch").schedule == "stretch"


def test_without_a_checkpoint_or_a_longer_way_a_schedule_cannot_be_changed(trained: Callable[..., RunDir]) -> None:
    run = trained(step=20)
    with pytest.raises(UserError, match="changes nothing"):
        prolonged(run, "monitor.log_every=5", schedule="restart")
    for checkpoint in run.checkpoints.iterdir():
        checkpoint.rmdir()
    with pytest.raises(UserError, match="It has no checkpoint"):
        prolonged(run, "train.epochs=3")


def test_killed_before_its_settings_are_written_it_equals_no_run(trained: Callable[..., RunDir]) -> None:
    """And the same command makes up for it."""
    run = trained("schedule.name=constant")
    with pytest.raises(KeyboardInterrupt), prolonged(run, "train.epochs=3").recorded():
        raise KeyboardInterrupt
    assert (fileio.read_object(run.manifest)["fingerprint"], history_of(run).finished) == ("", False)
    write(prolonged(run, "train.epochs=3"))
    assert load(str(run.config)).config.train.epochs == 3
