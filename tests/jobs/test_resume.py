from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.loading import load
from trainkit.launch.plan import Plan
from trainkit.run.events import Attempt, ProcessId, append_event, read_events, writing
from trainkit.run.folder import RunDir

pytestmark = pytest.mark.usefixtures("no_slurm")

PROJECT = Path(__file__).parents[2]
Command = Callable[..., Any]
MakeRun = Callable[..., tuple[RunDir, Plan]]


OLDER = """launch:
  executor: auto
  cluster: {profile}
  nodes: 2
  gpus_per_node: 0
  ntasks_per_node: null
  cpus_per_task: null
  mem: null
  time: '30:00'
  partition: null
  account: null
  qos: null
  constraint: null
  nodelist: null
  exclude: null
  reservation: null
  gres: null
  job_name: null
  dependency: null
  mail_user: null
  mail_type: null
  requeue: true
  signal_seconds: null
  setup: []
  sbatch: {{}}
  srun: {{}}
"""
"""As the first version wrote it."""


@pytest.fixture
def stopped(local_run: MakeRun) -> RunDir:
    """A run that waited for another job, ran as job 17, and was cancelled."""
    run, _ = local_run("ddp-0001", dependency="afterok:3", time="30:00")
    append_event(run, "submitted", executor="slurm", job_id="17")
    run.attempt_logs(0).mkdir()
    return run


def test_a_stopped_run_is_queued_again_in_its_own_folder(command: Command, fake_slurm: Path, stopped: RunDir) -> None:
    """Resources may change, the settings stay, and the job that it waited for is over."""
    before = load(str(stopped.config)).config
    assert command("resume", "ddp-0001", "optim.lr=1").code == 2
    done = command("resume", "ddp-0001", "--nodes", "2", "--time", "2:00:00")
    assert done.code == 0, done.err
    assert "Submitted job 4711" in done.out
    script = (fake_slurm / "submitted.sbatch").read_text()
    assert f"export TRAINKIT_RUN_DIR={stopped.path}\n" in script
    assert "#SBATCH --nodes=2\n" in script
    assert "--dependency" not in script
    assert [event["job_id"] for event in read_events(stopped, "submitted")] == ["17", "4711"]
    after = load(str(stopped.config)).config
    assert (after.launch.nodes, after.launch.time) == (2, "2:00:00")
    assert after.model_copy(update={"launch": before.launch}) == before


def test_an_older_run_is_told_nothing_that_its_own_code_does_not_know(
    command: Command, fake_slurm: Path, stopped: RunDir
) -> None:
    """A key without which the older version has written the file; that code runs the job."""
    older = "".join(
        line
        for line in stopped.config.read_text().splitlines(keepends=True)
        if not line.strip().startswith(("label_smoothing:", "hang_seconds:", "interface:"))
    )
    stopped.config.write_text(older)
    assert command("resume", "ddp-0001", "--nodes", "2").code == 0
    now = stopped.config.read_text()
    assert "nodes: 2" in now
    assert not {"label_smoothing", "hang_seconds", "interface"} & {
        line.strip().partition(":")[0] for line in now.split("\n")
    }


def test_another_sites_profile_takes_the_place_of_the_one_before(
    command: Command, fake_slurm: Path, local_run: MakeRun, tmp_path: Path
) -> None:
    here, there = tmp_path / "here.yaml", tmp_path / "there.yaml"
    here.write_text(
        "launch: {partition: main, qos: long, time: '8:00:00', modules: [cuda/12.4], environment: 'conda:old',\n"
        "  sbatch: {comment: here, licenses: here}, srun: {mpi: pmi2}}\n"
    )
    there.write_text(
        "launch: {account: proj42, time: '4:00:00', setup: [module load python], sbatch: {licenses: there}}\n"
    )
    run, _ = local_run("ddp-0001", mem="2G")
    text = run.config.read_text().replace("time: 1:00:00", "time: '8:00:00'").replace("qos: null", "qos: long")
    text = text.replace("modules: []", "modules: [cuda/12.4]").replace("environment: null", "environment: conda:old")
    text = text.replace("sbatch: {}", "sbatch: {comment: here, licenses: here, hold: ''}")
    text = text.replace("srun: {}", "srun: {mpi: pmi2}")
    run.config.write_text(text.replace("cluster: null", f"cluster: {here}").replace("partition: null", "partition: p"))
    append_event(run, "submitted", executor="slurm", job_id="17")
    done = command("resume", "ddp-0001", "--cluster", str(there), "--partition", "main")
    assert done.code == 0, done.err
    launch = load(str(run.config)).config.launch
    assert (launch.account, launch.time, launch.setup) == ("proj42", "4:00:00", ("module load python",)), "as there"
    assert (launch.qos, launch.modules, launch.environment) == (None, (), None), "which only the other site knows"
    assert (launch.sbatch, launch.srun) == ({"licenses": "there", "hold": ""}, {}), "and of mappings each entry"
    assert (launch.partition, launch.mem) == ("main", "2G"), "as the user says, and said"


def test_a_run_of_an_older_version_does_not_ask_its_profile_again(
    command: Command, fake_slurm: Path, stopped: RunDir, tmp_path: Path
) -> None:
    """Its configuration has no keys that came later. The profile has changed since, and says things it did not say."""
    profile = tmp_path / "site.yaml"
    profile.write_text("launch: {account: other, hang_seconds: 60, modules: [cuda/99]}\n")
    text = stopped.config.read_text()
    begin, end = text.index("launch:\n"), text.index("collaborative:\n")
    stopped.config.write_text(text[:begin] + OLDER.format(profile=profile) + text[end:])
    assert command("resume", "ddp-0001").code == 0
    launch = load(str(stopped.config)).config.launch
    assert (launch.account, launch.hang_seconds, launch.modules) == (None, 600, ())
    profile.unlink()
    (fake_slurm / "squeue").write_text("#!/bin/bash\n")
    assert command("resume", "ddp-0001").code == 0, "nor does it need it"


def test_it_runs_where_it_was_submitted_from(
    command: Command, fake_slurm: Path, stopped: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a model of the user's own is found, from any folder."""
    text = stopped.config.read_text()
    assert "name: fashion_cnn" in text
    stopped.config.write_text(text.replace("name: fashion_cnn", "name: 'my_own_model:build'"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    done = command("resume", str(stopped.path))
    assert done.code == 0, done.err
    assert f"\ncd {tmp_path}\n" in stopped.script.read_text()


def test_a_dry_run_changes_nothing(command: Command, fake_slurm: Path, stopped: RunDir) -> None:
    before = {path: path.stat().st_mtime_ns for path in stopped.path.rglob("*")}
    done = command("resume", "ddp-0001", "--nodes", "2", "--dry-run")
    assert "#SBATCH --nodes=2\n" in done.out
    assert {path: path.stat().st_mtime_ns for path in stopped.path.rglob("*")} == before


def test_a_run_that_is_running_is_not_started_twice(command: Command, local_run: MakeRun) -> None:
    run, _ = local_run("ddp-0001")
    me = ProcessId.of(os.getpid())
    append_event(run, "submitted", executor="local", job_id="1", host=me.host, pid=me.pid, process_started=me.started)
    done = command("resume", "ddp-0001")
    assert done.code == 2
    assert "jobs.cancel" in done.err


def test_of_two_resumes_at_once_one_queues_a_job(fake_slurm: Path, stopped: RunDir, tmp_path: Path) -> None:
    sbatch = fake_slurm / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("\n", "\nsleep 2\n", 1))
    command = [sys.executable, "-m", "jobs.resume", str(stopped.path)]
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=env, cwd=tmp_path, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], errors
    assert "Two " in "".join(errors)
    assert [event["job_id"] for event in read_events(stopped, "submitted")] == ["17", "4711"]


def test_a_run_that_may_still_run_is_resumed_by_force_only(command: Command, fake_slurm: Path, stopped: RunDir) -> None:
    for name in ("squeue", "sacct"):
        (fake_slurm / name).write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    refused = command("resume", "ddp-0001")
    assert refused.code == 2
    assert "--force" in refused.err
    assert "Unable to contact" in refused.err
    assert command("resume", "ddp-0001", "--force").code == 0


def test_a_run_that_a_process_writes_is_not_resumed(command: Command, fake_slurm: Path, stopped: RunDir) -> None:
    """Of `jobs.train`, which no scheduler knows."""
    with writing(Attempt.begin(stopped)):
        done = command("resume", "ddp-0001")
    assert done.code == 2
    assert f"is being written by process {os.getpid()}" in done.err


def test_a_finished_run_is_not_resumed(command: Command, local_run: MakeRun) -> None:
    run, _ = local_run("ddp-0001")
    append_event(run, "ended", state="COMPLETED", step=380)
    done = command("resume", "ddp-0001")
    assert done.code == 2
    assert "has finished" in done.err
    assert "jobs.submit" in done.err
    run.summary.write_text('{"stopped_early": "val/acc1 has not improved in 3 validations in a row"}')
    assert command("resume", "ddp-0001").err.splitlines() == [
        "ddp-0001 has stopped early.",
        "  why: val/acc1 has not improved in 3 validations in a row.",
        f"  fix: `python -m jobs.submit {run.path} train.early_stopping_patience=null` trains anew, to the end.",
    ]


def test_a_run_that_diverged_is_told_to_lower_its_learning_rate(
    command: Command, fake_slurm: Path, stopped: RunDir
) -> None:
    assert " diverged" not in command("resume", "ddp-0001", "--dry-run").err
    error = "Training has diverged: 3 updates in a row were not finite. The loss of the last one is nan."
    append_event(stopped, "failed", attempt=0, rank=0, host="n1", error=error)
    append_event(stopped, "ended", attempt=0, state="FAILED", job_id="17", exit_codes=[1])
    (fake_slurm / "squeue").write_text("#!/bin/bash\nexit 0\n")
    done = command("resume", "ddp-0001")
    assert done.code == 0
    assert "ddp-0001 diverged, and may do so again with the same settings. With a smaller learning rate:" in done.err
    assert f"`python -m jobs.submit {stopped.path} optim.lr=" in done.err
