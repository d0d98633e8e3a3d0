from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import HERE
from trainkit.cluster.containers import Container
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.launch.planning import make_plan
from trainkit.launch.run_folders import undone_on_error, write_run
from trainkit.run.events import submitted
from trainkit.run.folder import RunDir


def test_what_fails_after_a_job_was_queued_leaves_its_folder(tmp_path: Path) -> None:
    """`jobs.submit | head -1`: the job is there, and nobody hears the rest."""
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    submitted(run, "slurm", "7")
    with pytest.raises(BrokenPipeError), undone_on_error(run.path):
        raise BrokenPipeError
    assert run.config.is_file()


def test_a_disk_that_is_full_before_leaves_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    with pytest.raises(UserError), undone_on_error(run.path):
        raise OSError(28, "No space left on device", "plan.json")
    assert not run.path.exists()


@pytest.mark.parametrize("where", ["inside", "behind a link"])
def test_a_container_that_does_not_see_the_shared_code_has_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It has the folder of the submission; what a link in that leads to is elsewhere."""
    for name in ("project", "scratch"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("runs").mkdir() if where == "inside" else Path("runs").symlink_to("../scratch")
    loaded = load("ddp", flags={"launch.executor": ("local", "test")})
    path = Path("runs").absolute() / "ddp-0001"
    plan = replace(make_plan(loaded, HERE, path), container=Container("apptainer", "torch.sif", (), "python3"))
    run = write_run(path, loaded.config, plan, None, ["test"])
    assert run.code.is_symlink() == (where == "inside")
