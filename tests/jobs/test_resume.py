import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.conftest import Command, make_run
from tests.runs import script
from tests.shell import python
from trainkit.cluster.plan import Plan
from trainkit.cluster.site import Site
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import Attempt, append_event, read_events, writing
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.metrics import read_metrics
from trainkit.run.run_lease import ProcessId

pytestmark = pytest.mark.usefixtures("no_slurm")

MakeRun = Callable[..., tuple[RunDir, Plan]]


@pytest.fixture
def stopped(local_run: MakeRun) -> RunDir:
    """A run that waited for another job, ran as job 17, and was cancelled."""
    run, _ = local_run("ddp-0001", Site("slurm", 0, 2), dependency="afterok:3", time="30:00")
    append_event(run, "submitted", executor="slurm", job_id="17")
    run.attempt_logs(0).mkdir()
    return run


def test_a_stopped_run_is_queued_again_in_its_own_folder(command: Command, fake_slurm: Path, stopped: RunDir) -> None:
    """Resources may change, the settings stay, and the job that it waited for is over. A dry run has no effect."""
    before = load(str(stopped.config)).config
    assert command("resume", "ddp-0001", "optim.lr=1").code == 2
    assert command("resume", "ddp-0001", "optim.lr=1", "--dry-run").code == 2
    files = {path: path.stat().st_mtime_ns for path in stopped.path.rglob("*")}
    dry = command("resume", "ddp-0001", "--nodes", "2", "--dry-run")
    assert ("#SBATCH --nodes=2\n" in dry.out, " diverged" in dry.err) == (True, False)
    assert {path: path.stat().st_mtime_ns for path in stopped.path.rglob("*")} == files
    command("resume", "ddp-0001", "--nodes", "2", "--time", "2:00:00").ok("Submitted job 4711")
    text = (fake_slurm / "submitted.sbatch").read_text()
    assert f"export TRAINKIT_RUN_DIR={stopped.path}\n" in text
    assert ("#SBATCH --nodes=2\n" in text, "--dependency" in text) == (True, False)
    assert [event["job_id"] for event in read_events(stopped, "submitted")] == ["17", "4711"]
    after = load(str(stopped.config)).config
    assert (after.launch.nodes, after.launch.time) == (2, "2:00:00")
    assert after.model_copy(update={"launch": before.launch}) == before


@pytest.mark.usefixtures("fake_slurm")
def test_an_older_run_is_told_nothing_that_its_own_code_does_not_know(command: Command, stopped: RunDir) -> None:
    """A key without which the older version has written the file; that code runs the job."""
    newer = ("label_smoothing:", "hang_seconds:", "interface:")
    lines = stopped.config.read_text().splitlines(keepends=True)
    stopped.config.write_text("".join(line for line in lines if not line.strip().startswith(newer)))
    assert command("resume", "ddp-0001", "--nodes", "2").code == 0
    now = stopped.config.read_text()
    assert "nodes: 2" in now
    assert [line for line in now.splitlines() if line.strip().startswith(newer)] == []


@pytest.mark.usefixtures("fake_slurm")
def test_another_sites_profile_takes_the_place_of_the_one_before(command: Command, tmp_path: Path) -> None:
    here, there = tmp_path / "here.yaml", tmp_path / "there.yaml"
    here.write_text(
        "launch: {partition: main, qos: long, time: '8:00:00', modules: [cuda/12.4], environment: 'conda:old',\n"
        "  sbatch: {comment: here, licenses: here}, srun: {mpi: pmi2}}\n"
    )
    there.write_text(
        "launch: {account: proj42, time: '4:00:00', setup: [module load python], sbatch: {licenses: there}}\n"
    )
    before = {
        "time": "'8:00:00'", "qos": "long", "modules": "[cuda/12.4]", "environment": "conda:old", "partition": "p",
        "sbatch": "{comment: here, licenses: here, hold: ''}", "srun": "{mpi: pmi2}", "cluster": here, "mem": "2G",
    }  # fmt: skip
    run = make_run(tmp_path / "runs" / "ddp-0001", *(f"launch.{name}={value}" for name, value in before.items()))
    append_event(run, "submitted", executor="slurm", job_id="17")
    command("resume", "ddp-0001", "--cluster", str(there), "--partition", "main").ok()
    launch = load(str(run.config)).config.launch
    assert (launch.account, launch.time, launch.setup) == ("proj42", "4:00:00", ("module load python",)), "as there"
    assert (launch.qos, launch.modules, launch.environment) == (None, (), None), "which only the other site knows"
    assert (launch.sbatch, launch.srun) == ({"licenses": "there", "hold": ""}, {}), "and of mappings each entry"
    assert (launch.partition, launch.mem) == ("main", "2G"), "as the user says, and said"


@pytest.mark.usefixtures("fake_slurm")
def test_it_runs_where_it_was_submitted_from(
    command: Command, stopped: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a model of the user's own is found, from any folder."""
    text = stopped.config.read_text()
    assert "name: fashion_cnn" in text
    stopped.config.write_text(text.replace("name: fashion_cnn", "name: 'my_own_model:build'"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    command("resume", str(stopped.path)).ok()
    assert f"\ncd {tmp_path}\n" in stopped.script.read_text()


def test_of_two_resumes_at_once_one_queues_a_job(fake_slurm: Path, stopped: RunDir, tmp_path: Path) -> None:
    sbatch = (fake_slurm / "sbatch").read_text().partition("\n")[2]
    script(fake_slurm / "sbatch", f"sleep 2\n{sbatch}")
    command, pipe = [sys.executable, "-m", "jobs.resume", str(stopped.path)], subprocess.PIPE
    both = [subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], errors
    assert "Two " in "".join(errors)
    assert [event["job_id"] for event in read_events(stopped, "submitted")] == ["17", "4711"]


def test_a_job_of_slurm_goes_on_without_it_only_if_that_is_asked_for(command: Command, stopped: RunDir) -> None:
    before = stopped.config.read_text()
    append_event(stopped, "ended", attempt=0, state="TIMEOUT")
    command("resume", "ddp-0001").refused(3, "ddp-0001 was a job of SLURM", "module load slurm", "--executor local")
    assert stopped.config.read_text() == before
    done = command("resume", "ddp-0001", "--executor", "local", "--partition", "gpu", "--dry-run").ok("# local: 1 x 1")
    assert "Note: --partition is for a scheduler, and without effect on this machine." in done.err


def test_a_run_that_a_process_writes_is_not_started_twice(command: Command, stopped: RunDir) -> None:
    """One that no scheduler knows, as of `jobs.train`; and that of a local job."""
    with writing(Attempt.begin(stopped)):
        here = ("resume", "ddp-0001", "--force", "--executor", "local")
        command(*here).refused(2, f"is being written by process {os.getpid()}")
    append_event(stopped, "submitted", executor="local", job_id="1", **ProcessId.of(os.getpid()).fields())
    command("resume", "ddp-0001", "--force").refused(2, "jobs.cancel")
    assert [event["job_id"] for event in read_events(stopped, "submitted")] == ["17", "1"]


@pytest.mark.usefixtures("fake_slurm")
def test_a_run_whose_controller_is_gone_is_resumed(command: Command, tmp_path: Path) -> None:
    gone = ProcessId.of(os.getpid()).fields() | {"process_started": "1"}
    run = make_run(tmp_path / "runs" / "ddp-0001", executor="local", job_id="1", **gone)
    command("resume", "ddp-0001", "--executor", "slurm").ok("Submitted job 4711")
    assert [event["job_id"] for event in read_events(run, "submitted")] == ["1", "4711"]


def test_a_finished_run_is_not_resumed(command: Command, stopped: RunDir) -> None:
    append_event(stopped, "ended", state="COMPLETED", step=380)
    done = command("resume", "ddp-0001")
    assert (done.code, "has finished" in done.err, "jobs.submit" in done.err) == (2, True, True)
    stopped.summary.write_text('{"stopped_early": "val/acc1 has not improved in 3 validations in a row"}')
    assert command("resume", "ddp-0001").err.splitlines() == [
        "ddp-0001 has stopped early.",
        "  why: val/acc1 has not improved in 3 validations in a row.",
        f"  fix: `python -m jobs.resume {stopped.path} train.early_stopping_patience=null` continues to the end.",
    ]


QUICK = ("monitor.loggers=[jsonl]", "launch.gpus_per_node=0", "model.width=8", "data.workers=0")
CONSTANT = ("schedule.name=constant", "schedule.warmup_epochs=0")


def test_a_finished_run_trains_on_and_equals_what_it_has_become(command: Command) -> None:
    """It is up to date as the longer run, and no more as the shorter one."""
    words = ("submit", "single", *QUICK, *CONSTANT, "train.max_steps=2")
    command(*words, "--executor", "debug", "--run-dir", "runs/single-0001").ok()
    run = RunDir(Path.cwd() / "runs" / "single-0001")
    command(*words, "--executor", "local", "--dry-run").ok()
    command(*words, "--executor", "local").ok("single-0001 is up to date")
    files = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    longer = ("resume", "single-0001", "train.max_steps=4", "monitor.log_every=1", "--executor", "debug")
    command(*longer, "--dry-run").ok("has trained 2 of 2 updates, and continues to 4, with the rates")
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == files
    command(*longer).ok()
    assert [event["step"] for event in read_events(run, "started")] == [0, 2]
    assert [record["step"] for record in read_metrics(run, "train")] == [2, 3, 4]
    assert [record["step"] for record in read_metrics(run, "test")] == [2, 4]
    status = command("status", "single-0001", "--json").ok().out
    assert '"finished": true' in status
    more = ("submit", "single", *QUICK, *CONSTANT, "monitor.log_every=1", "--executor", "local")
    command(*more, "train.max_steps=4").ok("single-0001 is up to date")
    command(*words, "--dry-run", "--executor", "local").ok()
    command("resume", "single-0001").refused(2, "has finished", "train.epochs=N` trains it longer")


@pytest.fixture
def finished(local_run: MakeRun) -> RunDir:
    """A run that has trained its 380 updates as job 17, with a rate that does not go by their number."""
    run, _ = local_run("ddp-0001")
    run.config.write_text(run.config.read_text().replace("name: onecycle", "name: constant"))
    append_event(run, "submitted", executor="slurm", job_id="17")
    append_event(run, "started", attempt=0, total_steps=380, steps_per_epoch=19)
    append_event(run, "ended", attempt=0, state="COMPLETED", step=380, job_id="17")
    (run.checkpoints / "step-00000380").mkdir(parents=True)
    run.attempt_logs(0).mkdir()
    return run


@pytest.mark.usefixtures("fake_slurm")
def test_a_prolonged_run_is_queued_and_no_longer_finished(command: Command, finished: RunDir) -> None:
    command("resume", "ddp-0001", "train.epochs=30", "--time", "2:00:00").ok("continues to 570", "Submitted job 4711")
    config = load(str(finished.config)).config
    assert (config.train.epochs, config.launch.time) == (30, "2:00:00")
    (event,) = read_events(finished, "prolonged")
    assert (event["step"], event["total_steps_before"], event["total_steps"]) == (380, 380, 570)
    assert not history_of(finished).finished
    assert '"state": "PENDING"' in command("status", "ddp-0001", "--json").ok().out
    command("resume", "ddp-0001", "train.epochs=40").refused(2, "is PENDING")
    assert load(str(finished.config)).config.train.epochs == 30, "it is not changed while it may run"


@pytest.mark.nightly
def test_of_two_that_prolong_at_once_one_queues_a_job(fake_slurm: Path, finished: RunDir, tmp_path: Path) -> None:
    sbatch = (fake_slurm / "sbatch").read_text().partition("\n")[2]
    script(fake_slurm / "sbatch", f"sleep 2\n{sbatch}")
    pipe = subprocess.PIPE
    commands = [[sys.executable, "-m", "jobs.resume", str(finished.path), f"train.epochs={n}"] for n in (30, 40)]
    both = [subprocess.Popen(words, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) for words in commands]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], errors
    (event,) = read_events(finished, "prolonged")
    assert load(str(finished.config)).config.train.epochs * 19 == event["total_steps"]


def test_a_sweep_is_prolonged_as_one_array_but_for_what_it_varies(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    varied = ("--sweep", "train.max_steps=2,3", "schedule.name=constant", "schedule.warmup_epochs=0")
    command("submit", "ddp", *varied, "--run-dir", "runs/sweep", "--executor", "slurm").ok()
    command("resume", "sweep", "train.max_steps=4").refused(2, "train.max_steps is varied by the sweep")
    script(fake_slurm / "squeue", "")
    runs = [RunDir(tmp_path / "runs" / "sweep" / name) for name in "01"]
    for run, steps in zip(runs, (2, 3), strict=True):
        append_event(run, "started", attempt=0, total_steps=steps, steps_per_epoch=19)
        append_event(run, "ended", attempt=0, state="COMPLETED", job_id="4711")
        (run.checkpoints / f"step-{steps:08}").mkdir(parents=True)
    command("resume", "sweep").refused(2, "No run of this sweep needs to be queued again")
    command("resume", "sweep", "optim.lr=1").refused(2, "optim.lr cannot change when 0 continues")
    command("resume", "sweep", "train.max_steps=null", "train.epochs=1").refused(2, "is varied by the sweep")
    command("resume", "sweep/1", "train.max_steps=null", "train.epochs=1").ok("continues to 19", "Submitted job 4711")
    assert [load(str(run.config)).config.train.max_steps for run in runs] == [2, None]


def test_the_settings_of_a_swarm_are_those_of_all_who_joined(command: Command, tmp_path: Path) -> None:
    settings = to_yaml(load("hivemind").config)
    run = RunDir.create(tmp_path / "runs" / "hivemind-0001", settings)
    command("resume", "hivemind-0001", "train.epochs=30").refused(2, "is a swarm, whose settings cannot change")
    append_event(run, "submitted", executor="swarm")
    command("resume", "hivemind-0001", "train.epochs=30").refused(2, "is a swarm, whose settings cannot change")
    assert run.config.read_text() == settings


# Runs that `train` has made, which have no copy of their code


OWN_MODEL = """
from torch import nn

def build(info):
    return nn.Sequential(nn.Flatten(), nn.Linear(info.in_chans * info.image_size**2, info.num_classes))
"""


@pytest.mark.nightly
def test_a_run_of_train_takes_the_code_that_is_there_and_trains_on(command: Command, tmp_path: Path) -> None:
    """Its own model and its relative paths are those of its first folder, wherever `resume` is called."""
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "own_model.py").write_text(OWN_MODEL)
    settings = ("train.epochs=1", "train.precision=fp32", "monitor.loggers=[jsonl]")
    words = ("single", *settings, "model.name=own_model:build", "data.root=my data")
    done = python("-m", "jobs", "train", *words, "--run-dir", str(tmp_path / "runs" / "mine"), cwd=thesis)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / "mine")
    assert not run.code.exists()
    longer = ("resume", "mine", "--restart-schedule", "--executor", "local")
    command(*longer, "train.epochs=2").ok("mine has no copy of its code")
    assert (run.code / "own_model.py").read_text() == OWN_MODEL
    assert load(str(run.config)).config.data.root == str(thesis / "my data")
    assert [record["step"] for record in read_metrics(run, "val")] == [19, 38]
    assert "no copy" not in command(*longer, "train.epochs=3", "--dry-run").ok().out


def test_what_sbatch_refuses_leaves_the_run_as_it_was(command: Command, fake_slurm: Path, finished: RunDir) -> None:
    """Else the same command, given again without the mistake, would change nothing any more."""
    kept = (finished.config, finished.manifest, finished.summary, finished.plan, finished.script)
    before = {file: file.read_bytes() for file in kept if file.exists()}
    script(fake_slurm / "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    words = ("resume", finished.name, "train.epochs=30", "--restart-schedule")
    for _ in range(2):
        command(*words).refused(4, "sbatch refused the job")
        assert {file: file.read_bytes() for file in kept if file.exists()} == before
        assert history_of(finished).finished
    script(fake_slurm / "sbatch", "echo 4711")
    command(*words).ok("Submitted job 4711")
    assert not history_of(finished).finished
