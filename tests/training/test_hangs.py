"""Runs that hang and runs that are only slow, here: two ranks under a controller and their own watchdogs."""

import shutil
from pathlib import Path

import pytest

from tests.rank_functions import QUICK, run_command
from tests.runs import wait_until
from trainkit.cluster.job_states import job_state
from trainkit.run.events import read_events
from trainkit.run.folder import HANG_LIMIT, RunDir

pytestmark = pytest.mark.long

SETTINGS = (
    *QUICK,
    *("--ntasks-per-node", "2", "--executor", "local", "--no-follow", "data.name=stuck:data", "model.name=stuck:model"),
    *("data.workers=1", "train.epochs=2", "train.micro_batch_size=16", "launch.hang_seconds=6"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Its first attempt waits for data, its second for the disk, its third is slow; it has ended."""
    folder = tmp_path_factory.mktemp("hangs")
    shutil.copy(Path(__file__).with_name("stuck.py"), folder)
    done = run_command("submit", "ddp", *SETTINGS, "--run-dir", str(folder / "run"), cwd=folder)
    assert done.returncode == 0, done.stderr
    run = RunDir(folder / "run")
    wait_until(lambda: job_state(run).alive == "no", 400)
    return run


def test_each_hang_starts_the_run_again_and_slowness_is_none(run: RunDir) -> None:
    assert job_state(run).state == "COMPLETED", (run.logs / "batch.out").read_text()
    assert [event["attempt"] for event in read_events(run, "failed")] == [0, 1]
    assert run.attempts() == [0, 1, 2]


def test_a_rank_that_waits_for_its_data_is_named_with_its_loaders_stack(run: RunDir) -> None:
    hang = read_events(run, "failed")[0]
    assert hang["rank"] == 1
    assert "for its data loader" in hang["error"]
    assert "_read_from_a_dead_disk" in (run.attempt_logs(0) / "rank-1.err").read_text()


def test_a_rank_that_does_not_come_to_the_end_of_a_save_is_named(run: RunDir) -> None:
    hang = read_events(run, "failed")[1]
    assert hang["rank"] == 0
    assert "for its checkpoint to be written" in hang["error"]
    assert "in _wait_for_a_dead_disk" in (run.attempt_logs(1) / "rank-0.err").read_text()


def test_a_hang_in_an_update_is_noticed_by_the_pace_of_the_run(tmp_path: Path) -> None:
    """Within seconds, though `launch.hang_seconds` is 600: for data, a validation and a save the ranks have that."""
    shutil.copy(Path(__file__).with_name("paced.py"), tmp_path)
    words = [word.replace("stuck:", "paced:").replace("hang_seconds=6", "hang_seconds=600") for word in SETTINGS]
    done = run_command("submit", "ddp", *words, "--run-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    wait_until(lambda: job_state(run).alive == "no", 300)
    assert job_state(run).state == "COMPLETED", (run.logs / "batch.out").read_text()
    (failed,) = read_events(run, "failed")
    assert (failed["attempt"], failed["rank"]) == (0, 1)
    assert "while all ranks compute an update" in failed["error"]
    assert "paced.py" in failed["error"]
    (again,) = read_events(run, "requeued")
    assert again["in_place"] is True
    assert HANG_LIMIT.read(run.attempt_logs(1)) != ""
