"""What runs take, what may go, and what never does."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import Command, make_run
from tests.shell import python
from trainkit.checkpoint import format
from trainkit.run import user_lists
from trainkit.run.code_files import read_tree
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.run.labels import say
from trainkit.run.run_lease import Holder, ProcessId, lease_on
from trainkit.run.snapshot import STORE, restore_code, write_code
from trainkit.run.trash import TRASH, parts_of, size_of

pytestmark = pytest.mark.usefixtures("no_slurm")


def ended(path: Path, *overrides: str, state: str = "COMPLETED") -> RunDir:
    """A run with checkpoints of steps 1, 2 and 3, of which the second is the best."""
    run = make_run(path, *overrides, executor="local", job_id="1", **ProcessId("far", 1, "1").fields())
    run.attempt_logs(0).mkdir()
    Attempt(run, 0).started(total_steps=3)
    Attempt(run, 0).ended(state)
    for step in (1, 2, 3):
        (folder := format.path_of(run.checkpoints, step)).mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
            (folder / name).write_bytes(os.urandom(50_000))
    format.point(run.checkpoints, "latest", 3)
    format.point(run.checkpoints, "best", 2)
    return run


@pytest.fixture
def done(tmp_path: Path) -> RunDir:
    return ended(tmp_path / "runs" / "ddp-0001")


@pytest.fixture
def failed(tmp_path: Path) -> RunDir:
    return ended(tmp_path / "runs" / "ddp-0002", state="FAILED")


def test_without_a_rule_goes_what_is_neither_best_nor_newest(command: Command, done: RunDir, failed: RunDir) -> None:
    out = (
        command("clean")
        .ok("ddp-0001", "checkpoints", "To remove: files of 2 runs that can be made again", "select more")
        .out
    )
    assert "COMPLETED" in out
    assert format.steps(done.checkpoints) == [1, 2, 3]
    command("clean", "--yes").ok("Moved to the trash")
    assert [format.steps(run.checkpoints) for run in (done, failed)] == [[2, 3], [2, 3]]


def test_offline_files_of_wandb_go_that_sync_does_not_need(command: Command, done: RunDir, failed: RunDir) -> None:
    for run in (done, failed):
        (run.wandb / "offline-run-1").mkdir(parents=True)
        (run.wandb / "run-2").mkdir()
    command("clean", "--yes").ok()
    assert (done.wandb / "offline-run-1").exists(), "there are no metrics to send"
    done.metrics.write_text("{}\n")
    failed.metrics.write_text("{}\n")
    command("clean", "--yes").ok()
    assert [path.name for path in done.wandb.iterdir()] == ["run-2"]
    assert (failed.wandb / "offline-run-1").exists(), "it may go on"


def test_nothing_goes_that_was_only_shown(command: Command, done: RunDir, failed: RunDir) -> None:
    command("clean", "--keep-best").ok("To remove: all checkpoints but the best of 2 runs")
    command("clean", "--state", "failed").ok("To remove: 1 run,")
    command("clean", "ddp-0001").ok("To remove: 1 run,")
    assert all(format.steps(run.checkpoints) == [1, 2, 3] for run in (done, failed))
    assert not (done.path.parent / TRASH).exists()


def test_all_checkpoints_but_the_best_go_and_the_newest_of_one_that_goes_on(
    command: Command, done: RunDir, failed: RunDir
) -> None:
    command("clean", "--keep-best", "--yes").ok("Moved to the trash")
    assert (format.steps(done.checkpoints), format.pointed(done.checkpoints, "latest")) == ([2], 2)
    assert (format.steps(failed.checkpoints), format.pointed(failed.checkpoints, "latest")) == ([2, 3], 3)
    assert (format.path_of(done.checkpoints, 2) / "optimizer.safetensors").exists()
    command("clean", "--keep-best").ok("Nothing to remove")


def test_the_optimizer_of_the_best_goes_where_only_weights_are_kept(
    command: Command, done: RunDir, failed: RunDir
) -> None:
    command("clean", "--weights-only").refused(2, "needs --keep-best")
    command("clean", "--keep-best", "--weights-only", "--yes").ok("all but the best weights")
    there = {file.name for file in format.path_of(done.checkpoints, 2).iterdir()}
    assert there == {"model.safetensors", "state.json"}
    assert (format.path_of(failed.checkpoints, 2) / "optimizer.safetensors").exists(), "it may be resumed"


def test_failed_runs_of_long_ago_go_and_can_be_copied_back(command: Command, done: RunDir, failed: RunDir) -> None:
    command("clean", "--state", "failed", "--older-than", "30d", "--yes").ok("Nothing to remove")
    for file in failed.path.iterdir():
        os.utime(file, (time.time() - 31 * 86400,) * 2, follow_symlinks=False)
    out = command("clean", "--state", "failed", "--older-than", "30d", "--yes").ok("1 run,", "cp -a").out
    assert (failed.path.exists(), done.path.exists()) == (False, True)
    (heap,) = (done.path.parent / TRASH).iterdir()
    assert f"cp -a {heap}/. {heap.parents[1]}" in out
    os.rename(heap / failed.name, failed.path)
    command("status", "ddp-0002").ok("FAILED")


def test_runs_of_another_clone_are_asked_whether_they_need_one_and_never_go(
    command: Command, done: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(user_lists, "own_file", lambda name: user_lists.state_file("projects") / "other" / name)
        other = ended(tmp_path / "far" / "ddp-0001", f"model.checkpoint={done.checkpoints}/best", state="FAILED")
    command("clean", "--state", "failed", "--yes").ok("Nothing to remove")
    command("clean", str(done.path), "--yes").ok("stays: ddp-0001 names it in its settings")
    assert other.path.exists()


def test_the_trash_is_emptied_when_asked_and_by_itself(command: Command, done: RunDir, failed: RunDir) -> None:
    command("clean", "ddp-0002", "--yes").ok()
    trash = done.path.parent / TRASH
    command("clean", "--empty-trash").ok("--yes deletes it for good")
    assert trash.exists()
    command("clean", "--empty-trash", "--yes").ok("Deleted from the trash")
    assert not trash.exists()
    (heap := trash / "1000000000-0123abcd").mkdir(parents=True)
    command("clean", "--yes").ok()
    assert not heap.exists()


def test_a_submission_empties_the_trash_of_what_is_old(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    (trash := tmp_path / "runs" / TRASH / "1000000000-0123abcd").mkdir(parents=True)
    command("submit", "ddp", "--gpus-per-node", "0", "--time", "10").ok()
    assert not trash.exists()


def test_a_run_that_is_tagged_keep_stays(command: Command, done: RunDir) -> None:
    say(done, tags=["keep"])
    command("clean", "ddp-0001", "--yes").ok("stays: tagged keep", "Nothing to remove")
    command("clean", "--keep-best", "--yes").ok("stays: tagged keep")
    done.labels.unlink()
    done.labels.symlink_to("/etc/passwd")
    command("clean", "ddp-0001", "--yes").ok("stays: Cannot read")
    assert format.steps(done.checkpoints) == [1, 2, 3]


def test_what_runs_or_is_queued_stays(command: Command, tmp_path: Path, fake_slurm: Path) -> None:
    me = ProcessId.of(os.getpid())
    make_run(tmp_path / "runs" / "ddp-0001", executor="local", job_id=str(me.pid), **me.fields())
    make_run(tmp_path / "runs" / "ddp-0002", job="4711")
    out = command("clean", "ddp-0001", "ddp-0002", "--yes").ok("Nothing to remove").out
    assert out.count("stays: it is PENDING") == 2


def test_what_another_command_is_just_about_to_queue_stays(command: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "ddp-0001")
    command("clean", "ddp-0001", "--yes").ok("stays: it was made just now, and may be about to be queued")
    assert run.path.exists()
    os.utime(run.config, (time.time() - 61, time.time() - 61))
    command("clean", "ddp-0001", "--yes").ok("1 run,")
    assert not run.path.exists()


def test_what_nobody_can_tell_the_state_of_stays(command: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "ddp-0001", executor="slurm", job_id="4711")
    command("clean", "ddp-0001", "--yes").ok("stays: nobody can tell whether its job has ended")
    assert run.path.exists()


def test_what_a_process_writes_stays(command: Command, done: RunDir) -> None:
    """As torchrun does, of which no scheduler knows."""
    with lease_on(done, Holder.me()):
        command("clean", "ddp-0001", "--yes").ok("stays: a process writes it")
        assert done.path.exists()
    command("clean", "ddp-0001", "--yes").ok("Moved to the trash")
    assert not done.path.exists()


def test_what_another_run_needs_stays_unless_that_goes_too(command: Command, done: RunDir, tmp_path: Path) -> None:
    weights = f"model.checkpoint={done.checkpoints}/best/model.safetensors"
    ended(tmp_path / "runs" / "ddp-0003", weights)
    ended(tmp_path / "runs" / "ddp-00010", f"data.root={done.path}0")  # another name that begins alike
    command("clean", "ddp-0001", "--yes").ok("stays: ddp-0003 names it in its settings", "Nothing to remove")
    command("clean", "ddp-0001", "ddp-0003", "--yes").ok("2 runs")
    assert not done.path.exists()


def test_a_run_whose_job_another_job_waits_for_stays(command: Command, tmp_path: Path, fake_slurm: Path) -> None:
    first = ended(tmp_path / "runs" / "ddp-0001")
    second = make_run(tmp_path / "runs" / "ddp-0002", job="4711")
    second.plan.write_text(json.dumps({"directives": [{"name": "dependency", "value": "afterok:1"}]}))
    command("clean", "ddp-0001", "--yes").ok("stays: the job of ddp-0002 waits for it")
    assert first.path.exists()


def test_a_folder_that_is_a_link_or_somebody_elses_stays(command: Command, done: RunDir, tmp_path: Path) -> None:
    (link := done.path.with_name("ddp-0009")).symlink_to(done.path.rename(tmp_path / "elsewhere"))
    command("clean", str(link), "--yes").ok("stays: it is a link")
    assert (tmp_path / "elsewhere" / "config.yaml").exists()


def test_checkpoints_that_are_a_link_are_not_followed(command: Command, done: RunDir, tmp_path: Path) -> None:
    done.checkpoints.rename(there := tmp_path / "there")
    done.checkpoints.symlink_to(there)
    command("clean", "--keep-best", "--yes").ok("Nothing to remove")
    assert format.steps(there) == [1, 2, 3]


def test_a_sweep_goes_as_a_whole(command: Command, tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "ddp-0001"
    for name in ("0", "1"):
        ended(sweep / name)
    (sweep / "sweep.json").write_text("[]")
    command("clean", "ddp-0001/1", "--yes").ok("1 run,")
    assert (sweep / "0").exists()
    command("clean", "ddp-0001", "--yes").ok("1 run,")
    assert not sweep.exists()
    assert len(list(sweep.parent.glob(".trash/*/ddp-0001/sweep.json"))) == 1


def test_what_is_no_file_of_a_sweep_stays_and_is_said(command: Command, tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "ddp-0001"
    for name in ("0", "1"):
        ended(sweep / name)
    (sweep / "paper").mkdir()
    own = {"sweep.json": "[]", "prune.json": "{}", "logbook.md": "![](curves.svg)", "curves.svg": "<svg/>"}
    theirs = {"notes.ipynb": "{}", "figure.svg": "<svg/>", "paper/main.tex": "x"}
    for name, text in (own | theirs).items():
        (sweep / name).write_text(text)
    said = "its sweep is removed; these files stay in ddp-0001: figure.svg, notes.ipynb, paper"
    command("clean", "ddp-0001").ok("2 runs,", said)
    command("clean", "ddp-0001", "--yes").ok("2 runs,", said)
    assert {str(path.relative_to(sweep)) for path in sweep.rglob("*") if path.is_file()} == set(theirs)
    (heap,) = (tmp_path / "runs" / ".trash").iterdir()
    assert {path.name for path in (heap / "ddp-0001").iterdir()} == {"0", "1", *own}


def test_a_file_of_that_name_makes_no_sweep_of_a_run_without_a_number(command: Command, done: RunDir) -> None:
    """W&B's sweeps have files of that name, too."""
    runs = done.path.parent
    (runs / "sweep.json").write_text("{}")
    (runs / "thesis.tex").write_text("x")
    command("clean", "ddp-0001", "--yes").ok("1 run,")
    assert {path.name for path in runs.iterdir()} == {".trash", "sweep.json", "thesis.tex"}


def test_without_the_right_to_write_nothing_is_lost(command: Command, done: RunDir) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    done.path.parent.chmod(0o500)
    try:
        command("clean", "ddp-0001", "--yes").refused(2, "Cannot move")
    finally:
        done.path.parent.chmod(0o700)
    assert done.config.exists()


def trained(tmp_path: Path, *overrides: str) -> RunDir:
    submit = "-m jobs.submit single --executor debug schedule.name=constant schedule.warmup_epochs=0"
    assert python(*submit.split(), *overrides, cwd=tmp_path).returncode == 0
    return RunDir(tmp_path / "runs" / "single-0001")


def test_unpacked_code_goes_once_all_runs_of_it_have_ended_and_comes_back(
    command: Command, done: RunDir, failed: RunDir
) -> None:
    for run in (done, failed):
        assert write_code(run, store=run.path.parent / STORE) == []
    files, copy = read_tree(done.code), done.code.resolve()
    Attempt(failed, 1).started(total_steps=3)
    command("clean", "--yes").ok()
    assert copy.exists(), "a job may still start with it"
    Attempt(failed, 1).ended("FAILED")
    command("clean", "--yes").ok("Moved to the trash")
    assert not copy.exists()
    for run in (done, failed):
        restore_code(run)
        assert run.code.resolve() == copy, "one copy is enough"
        assert read_tree(copy) == files


def test_unpacked_code_stays_without_an_archive_or_outside_the_runs(
    command: Command, done: RunDir, failed: RunDir, tmp_path: Path
) -> None:
    assert write_code(done, store=done.path.parent / STORE) == []
    done.code_archive.unlink()
    (outside := tmp_path / STORE / "0123").mkdir(parents=True)
    failed.code.symlink_to(outside)
    failed.code_archive.touch()
    command("clean", "--yes").ok()
    assert done.code.exists()
    assert outside.exists()


@pytest.mark.long
def test_fifty_small_runs_take_less_than_50_mb_and_go_on_bit_for_bit(command: Command, tmp_path: Path) -> None:
    """One is trained, and its code is what all fifty share. Its best model is, like most, not its last."""
    run = trained(tmp_path, "train.epochs=3", "checkpoint.keep=2")
    best = format.steps(run.checkpoints)[0]
    format.point(run.checkpoints, "best", best)
    shutil.copytree(run.path, (other := RunDir(run.path.with_name("other"))).path, symlinks=True)
    command("clean", "single-0001", "--keep-best").ok("1 run")
    command("clean", "--yes").ok("Moved to the trash")
    assert format.steps(run.checkpoints) == [best]
    own, shared = sum(parts_of(run).values()), size_of(run.code.parent)
    assert 50 * own + shared + run.code_archive.stat().st_size < 50_000_000, (own, shared)
    command("evaluate", "single-0001").ok("acc1")
    format.point(other.checkpoints, "latest", max(format.steps(other.checkpoints)))
    for one in (run, other):
        resume = ("-m", "jobs.resume", str(one.path), "--executor", "debug", "train.epochs=4")
        assert python(*resume, cwd=tmp_path).returncode == 0
    records = [format.verified(each.checkpoints, format.steps(each.checkpoints)[-1]) for each in (run, other)]
    assert (records[0].step, records[0].files) == (records[1].step, records[1].files)


@pytest.mark.nightly
def test_a_run_that_has_finished_keeps_only_its_best_and_its_newest(tmp_path: Path) -> None:
    run = trained(tmp_path, "train.epochs=4")
    assert set(format.steps(run.checkpoints)) == {format.pointed(run.checkpoints, name) for name in ("best", "latest")}


@pytest.mark.nightly
def test_fifty_small_runs_take_less_than_35_mb_without_optimizers(command: Command, tmp_path: Path) -> None:
    run = trained(tmp_path, "train.epochs=4")
    before = sum(parts_of(run).values())
    command("clean", "--keep-best", "--weights-only", "--yes").ok("Moved to the trash")
    own, shared = sum(parts_of(run).values()), size_of(tmp_path / "runs" / ".code")
    assert own < before
    assert 50 * own + shared + run.code_archive.stat().st_size < 35_000_000, (own, shared)
    command("evaluate", "single-0001").ok("acc1")
