from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.errors import UserError
from trainkit.launch.submission import undone_on_error
from trainkit.records.attempts import submitted
from trainkit.records.rundir import RunDir


def test_what_fails_after_a_job_was_queued_leaves_its_folder(tmp_path: Path) -> None:
    """`jobs.submit | head -1`: the job is there, and nobody hears the rest."""
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    submitted(run, "slurm", "7")
    with pytest.raises(BrokenPipeError), undone_on_error(run.path):
        raise BrokenPipeError
    assert run.config.is_file()


def test_what_fails_before_leaves_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    with pytest.raises(UserError), undone_on_error(run.path):
        raise OSError(28, "No space left on device", "plan.json")
    assert not run.path.exists()
