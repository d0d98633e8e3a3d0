import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.jobs.conftest import Command
from tests.rank_functions import run_command, run_ranks, train_run
from tests.runs import wait_until
from tests.shell import python
from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import StopFlag
from trainkit.common.errors import RunFailedError
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import Attempt, read_events, writing
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

QUICK = ("train.max_steps=3", "train.precision=fp32", "monitor.loggers=[jsonl]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which a run ``here`` was trained, and what was said."""
    folder = tmp_path_factory.mktemp("train")
    done = python("-m", "jobs", "train", "single", *QUICK, "--run-dir", "here", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_alone_it_makes_a_run_folder_and_says_how_it_went(trained: tuple[Path, str]) -> None:
    folder, said = trained
    assert "val acc1" in said
    summary = json.loads((folder / "here/summary.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["test"]["samples"] > 200) == (3, 1, True)
    manifest = json.loads((folder / "here/manifest.json").read_text())
    assert manifest["command"][:4] == ["python", "-m", "jobs.train", "single"]


def test_a_run_that_is_being_written_is_left_alone(trained: tuple[Path, str], command: Command) -> None:
    run = RunDir(trained[0] / "here")
    before = run.metrics.read_bytes()
    with writing(Attempt.begin(run)):
        command("train", str(run.path), "--allow-code").refused(2, f"is being written by process {os.getpid()}")
    assert run.metrics.read_bytes() == before


def test_the_rate_is_shown_epoch_by_epoch_and_nothing_is_trained(tmp_path: Path) -> None:
    words = ("ddp", "--show-lr", "train.epochs=2", "schedule.name=constant", "optim.lr=0.5")
    done = run_command("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["epoch", "update", "lr"]
    assert [row[1] for row in rows[1:]] == ["0", "18", "19", "37"]  # each epoch, where it is highest, and the last
    assert [float(row[2]) for row in rows[2:]] == [0.5, 0.5, 0.5]
    assert list(tmp_path.iterdir()) == []


def test_fine_tuning_needs_its_file_once_and_trains_what_is_not_frozen(tmp_path: Path) -> None:
    settings = ("train.max_steps=2", "optim.lr=0.1", "schedule.name=constant")
    run_ranks(1, train_run, tmp_path / "first", "single", settings)
    file = tmp_path / "weights.safetensors"
    shutil.copy(tmp_path / "first/checkpoints/latest/model.safetensors", file)
    tuned = ("train.max_steps=3", "schedule.name=constant", f"model.checkpoint={file}", 'model.freeze=["?.*", "10.*"]')
    run_ranks(1, train_run, tmp_path / "tuned", "single", tuned, 2)
    file.unlink()
    run_ranks(1, train_run, tmp_path / "tuned", "single", tuned)
    before = load_file(tmp_path / "first/checkpoints/latest/model.safetensors")
    after = load_file(tmp_path / "tuned/checkpoints/latest/model.safetensors")
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert same == {name for name in before if len(name.partition(".")[0]) == 1 or name.startswith("10.")}
    assert same != set(before)


def test_other_settings_do_not_go_on_with_a_run(command: Command, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "here", "seed: 3\n")
    command("train", "single", *QUICK, "--run-dir", "here").refused(2, "was started with other settings")
    assert run.config.read_text() == "seed: 3\n"


def test_a_script_makes_the_run_before_its_ranks_have_loaded_anything(command: Command, tmp_path: Path) -> None:
    """The templates do so. When SLURM starts the job again, the run is there, and only the job is written down."""
    make = ("train", "single", *QUICK, "--run-dir", "here", "--make")
    Attempt.begin(RunDir(tmp_path / "here"))  # of an older template, which has not come to the run
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "42")
        for _ in range(2):
            command(*make).ok()
    run = RunDir(tmp_path / "here")
    assert {file.name for file in run.path.iterdir()} == {"config.yaml", "manifest.json", "logs", "events.jsonl"}
    assert [(item.executor, item.job_id, item.attempts_before) for item in history_of(run).submissions] == [
        ("slurm", "42", 1)
    ]
    command(*make, "seed=5").refused(2, "was started with other settings")
    command("train", "here", *QUICK, "--run-dir", "there", "--make").refused(2, "here is a run, and trains in its own")
    assert not (tmp_path / "there").exists()


def test_a_script_leaves_a_run_that_another_job_has(
    command: Command, tmp_path: Path, fake_command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two templates with one TRAINKIT_CONTINUE. The run would be told by the job that its lease has refused."""
    make = ("train", "single", *QUICK, "--run-dir", "here", "--make")
    fake_command("sacct", "true")
    fake_command("squeue", "echo '42|RUNNING|None|0:10|n1'")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    for _ in range(2):  # SLURM has started it again
        command(*make).ok()
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    command(*make).refused(2, "here is RUNNING (job 42)")
    fake_command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    command(*make).ok()
    assert [item.job_id for item in history_of(RunDir(tmp_path / "here")).submissions] == ["42", "43"]


@pytest.mark.nightly
def test_a_stop_signal_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    settings = ("train.precision=fp32", "monitor.loggers=[jsonl]", "train.epochs=400")
    command = [sys.executable, "-m", "jobs.train", "single", *settings, "--run-dir", "here"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "here/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, 120)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, "Go on with: python -m jobs.train" in out) == (0, True), out
    run_dir = RunDir(tmp_path / "here")
    assert (run_dir.checkpoints / "latest/state.json").exists()
    assert read_events(run_dir, "handed_back")[0]["signals"] == ["SIGTERM"]


def _loses_the_lease(env: RankEnv, folder: Path) -> str:
    from trainkit.training import experiment

    with ExitStack() as held:

        def open_run() -> Attempt:
            run = RunDir.create(folder, to_yaml(config))
            writer = held.enter_context(writing(Attempt.begin(run)))
            run.lease.write_text(json.dumps({**json.loads(run.lease.read_text()), "token": "another's"}))
            return writer

        config = load("single", (*QUICK, "launch.gpus_per_node=0")).config
        try:
            experiment.run(config, env, StopFlag(), open_run=open_run)
        except RunFailedError as error:
            return error.what
    return "finished"


def test_a_writer_that_has_lost_its_run_stops_before_its_next_write(tmp_path: Path) -> None:
    (what,) = run_ranks(1, _loses_the_lease, tmp_path / "run")
    assert "has another writer now" in what
    run = RunDir(tmp_path / "run")
    assert [file for file in (run.metrics, run.summary, *run.checkpoints.glob("step-*")) if file.exists()] == []


def _with_settings_of_its_own(env: RankEnv, folder: Path) -> str:
    return train_run(env, folder, "ddp", (f"seed={env.rank}", "train.max_steps=1"))


def test_ranks_with_different_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="different settings: rank 1 differs from rank 0"):
        run_ranks(2, _with_settings_of_its_own, tmp_path / "run")
