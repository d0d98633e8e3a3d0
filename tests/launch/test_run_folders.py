import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import HERE
from trainkit.cluster.containers import Container
from trainkit.cluster.plan import Plan
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.launch.planning import make_plan
from trainkit.launch.run_folders import undone_on_error, write_run, write_sweep
from trainkit.run import snapshot
from trainkit.run.events import submitted
from trainkit.run.folder import RunDir
from trainkit.run.ownership import require_own_code


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


def test_the_runs_of_a_sweep_share_one_snapshot_and_each_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    variants = [[f"checkpoint.remote=file:///backup/{number}"] for number in range(3)]
    loadeds = [load("ddp", variant, flags={"launch.executor": ("local", "test")}) for variant in variants]
    plan = make_plan(loadeds[0], HERE, tmp_path / "sweep")
    configs = [loaded.config for loaded in loadeds]
    runs = write_sweep(tmp_path / "sweep", configs, plan, "#!/bin/sh\n", ["test"], variants, ["a", "b", "c"])
    assert len({os.stat(run.code_archive).st_ino for run in runs}) == 1
    first, *others = [json.loads(run.manifest.read_text()) for run in runs]
    assert [manifest.pop("fingerprint") for manifest in (first, *others)] == ["a", "b", "c"]
    assert others == [first, first]
    for run, variant in zip(runs, variants, strict=True):
        assert snapshot.has_code_in_place(run)
        assert load(str(run.path)).config.checkpoint.remote == variant[0].partition("=")[2]
        assert (run.path / "submit.sbatch").read_text() == "#!/bin/sh\n"
        assert Plan.read(run.path / "plan.json") == plan
        run.path.chmod(0o777)  # as if others could have written it: then what was vouched for counts
        assert require_own_code(run.path, load(str(run.path)), allow_code=False, starts_snapshot=True).own
