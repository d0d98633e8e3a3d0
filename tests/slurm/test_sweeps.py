"""A sweep on a real SLURM: more runs than an array may have, what failed queued again, and a job that waits for all."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests import readme
from tests.slurm.conftest import Cluster, job_in
from tests.slurm.test_queries import first_in_path
from trainkit.config.loading import load
from trainkit.run.events import chosen_point, read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

pytestmark = pytest.mark.slurm

TINY = ("train.max_steps=2", "monitor.loggers=[jsonl]")
ONE_RANK = ("--nodes", "1", "--gpus-per-node", "0", "--time", "5")


def job_ids(sweep: Path) -> list[str]:
    lives = [history_of(RunDir(sweep / str(index))) for index in range(3)]
    return [life.submission.job_id if life.submission is not None else "" for life in lives]


def test_a_sweep_over_the_limit_of_arrays_trains_and_resumes(devcluster: Cluster, light: dict[str, str]) -> None:
    limit = '[ "$2" = config ] && exec echo "MaxArraySize = 2"; exec $real "$@"'
    env = {**light, **first_in_path(devcluster, "small", scontrol=limit)}
    points = ("--sweep", "model.luck=0..2", "--max-parallel", "2")
    slow = ("model.name=light_model:build", "model.seconds=1")  # so that who waits for it is seen to wait
    words = ("ddp", *TINY, *ONE_RANK, *slow, "--run-dir", "runs/sweep")
    assert "Submitted 3 of 3 runs." in devcluster.job("submit", *words, *points, env=env).stdout
    sweep = devcluster.home / "runs" / "sweep"
    first, _, single = job_ids(sweep)
    array = first.removesuffix("_0")
    assert job_ids(sweep) == [f"{array}_0", f"{array}_1", single]
    assert "ArrayTaskThrottle=2" in devcluster.run("scontrol", "show", "job", array).stdout
    assert f"Dependency=afterany:{array}" in devcluster.run("scontrol", "show", "job", single).stdout
    assert devcluster.wait(single) == "FAILED", devcluster.logs()
    # Accounting hears of each task by itself, and of the last one may hear first.
    devcluster.wait_for("both tasks", lambda: sorted(devcluster.states(array)) == ["COMPLETED", "FAILED"])
    for index in range(3):
        assert re.search(rf"luck: {index}\b", (sweep / str(index) / "config.yaml").read_text())

    again = devcluster.job("resume", "runs/sweep", "--sbatch", "begin=now+1hour", env=env).stdout
    found = re.search(r"Submitted job (\d+) for 2 of 3 runs: 1, 2", again)
    assert found, again
    assert job_ids(sweep) == [f"{array}_0", f"{found[1]}_0", f"{found[1]}_1"]
    waiting = devcluster.job(
        "submit", "ddp", *TINY, *ONE_RANK, "--run-dir", "runs/after", "-d", "afterany:sweep"
    ).stdout
    waiter = waiting.split()[2].rstrip(":")
    told = devcluster.run("scontrol", "show", "job", waiter).stdout
    for index in (0, 1):
        assert f"afterany:{found[1]}_{index}" in told
    devcluster.run("scancel", waiter)
    devcluster.run("scontrol", "update", f"JobId={found[1]}", "StartTime=now")
    assert devcluster.wait(found[1]) == "COMPLETED", devcluster.logs()
    assert all((sweep / str(index) / "summary.json").is_file() for index in range(3))
    assert "Attempt 1 on" in (sweep / "2" / "logs" / "batch.out").read_text()
    table = devcluster.job("report", "runs/sweep").stdout
    assert len(re.findall(r"^\| [012] +\| [012] +\| +\d+\.\d\d", table, flags=re.MULTILINE)) == 3, table


def test_runs_of_a_sweep_share_a_gpu_of_which_each_has_a_shard(devcluster: Cluster, light: dict[str, str]) -> None:
    words = ("single", *TINY, "--time", "5", "launch.runs_per_gpu=4", "--nodelist", "n1", "--run-dir", "runs/shared")
    slow = ("model.name=light_model:build", "model.seconds=4")  # so that all of them run at the same time
    said = devcluster.job("submit", *words, *slow, "--sweep", "seed=0..3", env=light).stdout
    (array,) = re.findall(r"Submitted job (\d+) \(array of 4\)", said)
    devcluster.wait_for("all four", lambda: devcluster.states(array).count("RUNNING") == 4)
    told = devcluster.run("scontrol", "show", "job", "-d", array).stdout
    assert re.findall(r"GRES=shard:1\(IDX:(\d)\)", told) == ["0"] * 4, told
    assert devcluster.wait(array) == "COMPLETED", devcluster.logs()


@pytest.mark.long
def test_trials_of_an_array_learn_from_those_before_them(devcluster: Cluster, light: dict[str, str]) -> None:
    """Two at a time, on different nodes: the last two of twelve begin when ten have ended, or nearly."""
    optuna = pytest.importorskip("optuna")
    env = {"PYTHONPATH": os.pathsep.join([light["PYTHONPATH"], str(Path(optuna.__file__).parents[1])])}
    choice = ("--sweep", "optim.lr=1e-4..1e-1:log", "--trials", "12", "--sampler", "tpe", "--max-parallel", "2")
    words = ("ddp", *TINY, *ONE_RANK, *choice, "--run-dir", "runs/chosen")
    (array,) = re.findall(r"Submitted job (\d+)", devcluster.job("submit", *words, env=env).stdout)
    assert devcluster.wait(array, timeout=400) == "COMPLETED", devcluster.logs()
    runs = [RunDir(devcluster.home / "runs" / "chosen" / str(number)) for number in range(12)]
    told = sorted((read_events(run, "sampled")[0]["time"], read_events(run, "sampled")[0]["by"]) for run in runs)
    assert all(len(read_events(run, "sampled")) == 1 for run in runs)
    assert [by for _, by in told[:10]] == ["random"] * 10
    assert re.fullmatch(r"tpe, 1[01] results", told[-1][1])
    assert len({str(chosen_point(run)) for run in runs}) == 12
    for run in runs:
        rate = load(str(run.config)).config.optim.lr
        assert chosen_point(run) == [f"optim.lr={rate:.4g}"]
    table = devcluster.job("report", "runs/chosen").stdout
    assert f"| {told[-1][1]} |" in table


@pytest.mark.long
def test_the_script_of_the_page_ends_runs_side_by_side_as_they_can_go_on(
    devcluster: Cluster, light: dict[str, str]
) -> None:
    page = (readme.DOCS / "training.md").read_text("utf-8")
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    quick = "monitor.loggers=[jsonl] model.name=light_model:build model.seconds=4"
    launch = f"{sys.executable} -m jobs.launch single {quick}"
    (devcluster.home / "side.sh").write_text(script.replace("trainkit launch single", launch))
    paths = os.pathsep.join([light["PYTHONPATH"], str(devcluster.home)])
    job = devcluster.sbatch("--time=5", "side.sh", env={"PYTHONPATH": paths})
    runs = [devcluster.home / "runs" / f"lr-{rate}" for rate in ("1e-3", "3e-3")]
    for run in runs:
        devcluster.wait_for_start(run)
    devcluster.run("scancel", "--batch", "--signal=USR2", job)
    devcluster.wait(job)
    assert [[event["state"] for event in devcluster.events(run, "ended")] for run in runs] == [["PREEMPTED"]] * 2
    assert all(devcluster.events(run, "saved") for run in runs), devcluster.logs()
    devcluster.run(sys.executable, "-m", "jobs.launch", str(runs[0]), env={"PYTHONPATH": paths})
    assert history_of(RunDir(runs[0])).finished
    assert not history_of(RunDir(runs[1])).finished


AT_MOST_THREE = """
array=$(grep -o -- '--array=[^ %]*' <<< "$*" || sed -n 's/^#SBATCH //; /^--array/p' "${@: -1}")
tasks=${array#--array=}; tasks=${tasks%%%*}
asked=$(tr , '\\n' <<< "${tasks:-0}" | grep -c .)
case "$tasks" in *-*) asked=$((${tasks#*-} + 1));; esac
there=$(squeue -h -r -t PD,R,CF,CG -n fed,fed-feed -o %i | wc -l)
if [ $((asked + there)) -gt 3 ]; then echo "sbatch: error: AssocMaxSubmitJobLimit" >&2; exit 1; fi
exec $real "$@"
"""
"""An sbatch that refuses as SLURM does under MaxSubmitJobs=3, for jobs of these names."""


def test_a_sweep_over_the_limit_of_jobs_is_fed_to_the_queue_by_a_job(
    devcluster: Cluster, light: dict[str, str]
) -> None:
    env = {**light, **first_in_path(devcluster, "limit", sbatch=AT_MOST_THREE)}
    words = ("ddp", *TINY, *ONE_RANK, "--job-name", "fed", "--run-dir", "runs/fed", "--sweep", "seed=0..5")
    said = devcluster.job("submit", *words, env=env).stdout
    found = re.search(r"Submitted 2 of 6 runs\. .*AssocMaxSubmitJobLimit.*\nJob (\d+) submits the other 4", said)
    assert found, said
    assert "4 runs are not in the queue yet" in devcluster.job("status", "runs/fed").stdout
    devcluster.job("cancel", "runs/fed/5")
    runs = [RunDir(devcluster.home / "runs" / "fed" / str(number)) for number in range(6)]
    devcluster.wait_for("five runs", lambda: all(history_of(run).finished for run in runs[:5]))
    assert devcluster.wait(found[1]) == "COMPLETED", devcluster.logs()
    assert [len(read_events(run, "submitted")) for run in runs] == [1, 1, 1, 1, 1, 0]
    assert "REQUEUED" in devcluster.states(found[1])


def test_a_sweep_of_several_arrays_leaves_a_place_for_the_job_that_feeds_it(
    devcluster: Cluster, light: dict[str, str]
) -> None:
    """Its first array alone fits into the queue exactly."""
    arrays = '[ "$2" = config ] && exec echo "MaxArraySize = 3"; exec $real "$@"'
    words = ("ddp", *TINY, *ONE_RANK, "--sbatch", "begin=now+1hour", "--sweep", "seed=20..24", "--again")
    left = ("squeue", "-h", "-r", "-t", "PD,R,CF,CG", "-n", "fed,fed-feed", "-o", "%j")
    limits = {"sbatch": AT_MOST_THREE}
    two = ("--max-parallel", "2")
    for name, limit, more, queued in (
        ("exact", limits, (), 2), ("all", {}, (), 5), ("chain-exact", limits, two, 1), ("chain-all", {}, two, 5),
    ):  # fmt: skip
        env = {**light, **first_in_path(devcluster, f"fits-{name}", scontrol=arrays, **limit)}
        own = ("--job-name", "fed", "--run-dir", f"runs/fits-{name}")
        said = devcluster.job("submit", *words, *more, *own, env=env).stdout
        there = sorted(devcluster.run(*left).stdout.split())
        devcluster.job("cancel", f"runs/fits-{name}")
        assert f"Submitted {queued} of 5 runs." in said
        assert there == ["fed"] * queued + ["fed-feed"] * (queued < 5), there
        devcluster.wait_for("an empty queue", lambda: not devcluster.run(*left).stdout.strip())


def test_a_sweep_that_is_cancelled_is_fed_no_more_and_resumes(devcluster: Cluster, light: dict[str, str]) -> None:
    env = {**light, **first_in_path(devcluster, "limit", sbatch=AT_MOST_THREE)}
    words = ("ddp", *TINY, *ONE_RANK, "--job-name", "fed", "--run-dir", "runs/ended", "--sweep", "seed=10..14")
    said = devcluster.job("submit", *words, "--sbatch", "begin=now+1hour", env=env).stdout
    assert "Submitted 2 of 5 runs" in said, said
    assert "3 runs will not be queued." in devcluster.job("cancel", "runs/ended").stdout
    left = ("squeue", "-h", "-t", "PD,R,CF,CG", "-n", "fed,fed-feed", "-o", "%i")
    devcluster.wait_for("an empty queue", lambda: not devcluster.run(*left).stdout.strip())
    told = devcluster.job("status", "runs/ended").stdout
    assert len(re.findall("CANCELLED", told)) >= 5, told
    again = devcluster.job("resume", "runs/ended", "--sbatch", "begin=now", env=light).stdout
    array = job_in(again)
    assert "for 5 of 5 runs" in again
    assert devcluster.wait(array) == "COMPLETED", devcluster.logs()
