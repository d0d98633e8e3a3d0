from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.run.folder import RunDir
from trainkit.schedulers.base import named, unclaimed
from trainkit.schedulers.slurm_submission import run as slurm


def place(folder: Path, index: int) -> Path:
    """The pickle of a run whose job has no name yet; where it lies."""
    (folder / ".submitit").mkdir(parents=True, exist_ok=True)
    pickle = folder / ".submitit" / unclaimed(index)
    pickle.write_bytes(b"what to run")
    return pickle.parent


def test_a_job_claims_what_it_has_to_run_unless_it_has_its_name(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    pickle = place(run.path, 0) / "42_submitted.pkl"
    named("slurm").claim(run, {"SLURM_JOB_ID": "42"})
    assert pickle.read_bytes() == b"what to run"
    pickle.write_bytes(b"its own")
    named("slurm").claim(run, {"SLURM_JOB_ID": "42"})
    assert pickle.read_bytes() == b"its own"


@pytest.mark.parametrize(("index", "part"), [(3, ""), (0, ".submitit/array-1")])
def test_a_task_of_an_array_claims_the_pickle_of_its_number(tmp_path: Path, index: int, part: str) -> None:
    run = RunDir.create(tmp_path / "sweep" / "3", "seed: 0\n")
    array = tmp_path / "sweep" / part
    folder = place(array, index)
    if part:
        (array / str(index)).symlink_to(run.path)
    named("slurm").claim(run, {"SLURM_JOB_ID": "99", "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": str(index)})
    assert (folder / f"42_{index}_submitted.pkl").is_file()


def test_what_changes_slurm_s_answers_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANCEL_STATE", "RUNNING")
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    told = slurm("env").out
    words = ("SCANCEL_STATE", "SLURM_CLUSTERS", "SLURM_CONF=/etc/here.conf")
    assert [word in told for word in words] == [False, False, True]
