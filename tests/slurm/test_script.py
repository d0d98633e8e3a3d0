"""Training scripts of the user's own on a real SLURM: their variables, their interruptions, their ends."""

import json
import subprocess
from typing import Any

import pytest

from tests.slurm.conftest import DEVCLUSTER, Cluster, Submitted, job_in
from tests.slurm.test_train_sbatch import edited

pytestmark = pytest.mark.slurm

TELL = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], f"said-{os.environ['RANK']}.out").write_text(json.dumps({"argv": sys.argv, **os.environ}))
"""
# It saves when it is told to, and goes on from there.
SAVES = """
import os, signal, sys, time
from pathlib import Path
file = Path(sys.argv[1], f"state-{os.environ['RANK']}")
told = []
signal.signal(signal.SIGNUMBER, lambda *_: told.append(1))
step = int(file.read_text()) if "--resume" in sys.argv else 0
print("begins at", step, flush=True)
while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    step += 1
    time.sleep(0.1)
    if told:
        file.write_text(str(step))
        sys.exit(CODE)
file.write_text("done")
"""
IGNORES = """
import signal, sys, time, os
from pathlib import Path
with open(Path(sys.argv[1], f"starts-{os.environ['RANK']}"), "a") as file:
    file.write("x")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(300)
"""
# As Lightning's Trainer does; SLURM then ends it. It notes who has told it: slurmstepd, or a process of ours.
REQUEUES = """
import os, signal, subprocess, sys
from pathlib import Path
rank = os.environ["RANK"]
signal.signal(signal.SIGUSR2, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
Path(sys.argv[1], f"ready-{rank}").touch()
while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sender = signal.sigwaitinfo([signal.SIGUSR2]).si_pid
    with open(Path(sys.argv[1], f"told-{rank}"), "a") as file:
        file.write(Path(f"/proc/{sender}/comm").read_text())
    if rank == "0":
        subprocess.Popen(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
"""
# Its first start lasts until something ends it.
LASTS = """
import json, os, sys, time
from pathlib import Path
attempt, rank = os.environ["TRAINKIT_ATTEMPT"], os.environ["RANK"]
told = {"argv": sys.argv[2:], "node": os.uname().nodename, **os.environ}
partial = Path(sys.argv[1], f"said-{attempt}-{rank}.partial")
partial.write_text(json.dumps(told))
partial.rename(partial.with_suffix(".out"))
while attempt == "0":
    time.sleep(0.1)
"""
FAILS_ALONE = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("mistake")
time.sleep(300)
"""


def submit(cluster: Cluster, name: str, body: str, *flags: str, words: tuple[str, ...] = ("{run}",)) -> Submitted:
    folder = cluster.home / name
    folder.mkdir()
    (folder / "train.py").write_text(body)
    run = cluster.home / "runs" / name
    given = (f"{name}/train.py", "--nodes", "2", "--gpus-per-node", "0", *flags, "--run-dir", str(run), "--", *words)
    said = cluster.job("submit", *given)
    return Submitted(job_in(said.stdout), run, said.stdout + said.stderr)


@pytest.fixture(scope="module")
def runs(devcluster: Cluster) -> dict[str, Submitted]:
    """All of this file, submitted at once."""
    restart = "launch.on_restart=--resume"
    short = ("--time", "20", "launch.signal_seconds=590")
    usr2 = SAVES.replace("SIGNUMBER", "SIGUSR2").replace("CODE", "0")
    term = SAVES.replace("SIGNUMBER", "SIGTERM").replace("CODE", "85")
    return {
        "told": submit(devcluster, "told", TELL, words=("{run}", "{node_rank}/{num_nodes}", "{gpus_per_node}")),
        "fails": submit(
            devcluster, "fails", "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('mistake')\n"
        ),
        "fails alone": submit(devcluster, "fails-alone", FAILS_ALONE, restart, "launch.requeue=always"),
        "saves": submit(devcluster, "saves", usr2, *short, restart),
        "terms": submit(
            devcluster, "terms", term, *short, restart, "launch.stop_signal=TERM", "launch.stop_exit_code=85"
        ),
        "requeues": submit(devcluster, "requeues", REQUEUES),
        "ignores": submit(
            devcluster, "ignores", IGNORES, "--time", "1", "launch.signal_seconds=24", "launch.requeue=always"
        ),
    }


def test_ranks_have_the_variables_of_torchrun_and_of_slurm(devcluster: Cluster, runs: dict[str, Submitted]) -> None:
    done = runs["told"]
    assert devcluster.wait(done.job_id) == "COMPLETED"
    ranks = [json.loads((done.run / f"said-{rank}.out").read_text()) for rank in (0, 1)]
    assert [rank["argv"][2:] for rank in ranks] == [["0/2", "1"], ["1/2", "1"]]
    assert [rank["SLURM_PROCID"] for rank in ranks] == ["0", "1"]
    assert {(rank["WORLD_SIZE"], rank["MASTER_PORT"], rank["SLURM_JOB_ID"]) for rank in ranks} == {
        ("2", ranks[0]["MASTER_PORT"], done.job_id)
    }
    assert "COMPLETED" in devcluster.job("status", str(done.run)).stdout


def test_the_traceback_of_a_script_is_the_cause_of_its_end(devcluster: Cluster, runs: dict[str, Submitted]) -> None:
    done = runs["fails"]
    assert devcluster.wait(done.job_id) == "FAILED"
    assert len(devcluster.states(done.job_id)) == 1
    why = devcluster.job("why", str(done.run), check=False).stdout
    assert "Rank 1" in why
    assert "mistake" in why
    assert "train.py:3" in why


def test_a_failure_of_one_rank_is_no_interruption_of_the_others(
    devcluster: Cluster, runs: dict[str, Submitted]
) -> None:
    """srun ends them by a SIGTERM, as a preemption would."""
    done = runs["fails alone"]
    assert devcluster.wait(done.job_id) == "FAILED"
    assert devcluster.states(done.job_id) == ["FAILED"]
    assert "mistake" in devcluster.job("why", str(done.run), check=False).stdout


@pytest.mark.parametrize("name", ["saves", "terms"])
def test_who_saves_when_told_is_requeued_and_goes_on(
    devcluster: Cluster, runs: dict[str, Submitted], name: str
) -> None:
    done = runs[name]
    devcluster.wait_for_start(done.run)
    devcluster.run("sleep", "3")
    devcluster.run("scancel", f"--signal={'USR2' if name == 'saves' else 'TERM'}", f"{done.job_id}.0")
    assert devcluster.wait(done.job_id) == "COMPLETED"
    assert devcluster.states(done.job_id) == ["REQUEUED", "COMPLETED"]
    assert [(done.run / f"state-{rank}").read_text() for rank in (0, 1)] == ["done", "done"]
    assert "begins at 0" not in (done.run / "logs" / "1" / "rank-0.out").read_text()


def test_who_requeues_by_itself_is_told_by_slurm_alone_and_has_not_failed(
    devcluster: Cluster, runs: dict[str, Submitted]
) -> None:
    """scancel repeats the signal on all nodes where one has not answered within 10 s (22.05)."""
    done = runs["requeues"]
    devcluster.wait_for("both ranks", lambda: len(list(done.run.glob("ready-*"))) == 2)
    devcluster.run("scancel", "--signal=USR2", f"{done.job_id}.0", check=False)  # or it hears that the job is over
    assert devcluster.wait(done.job_id) == "COMPLETED"
    assert devcluster.states(done.job_id) == ["REQUEUED", "COMPLETED"]
    for rank in (0, 1):
        assert set((done.run / f"told-{rank}").read_text().split()) == {"slurmstepd"}
    assert devcluster.events(done.run, "requeued") == []


def test_who_ignores_the_time_limit_is_ended_and_requeued(devcluster: Cluster, runs: dict[str, Submitted]) -> None:
    done = runs["ignores"]
    assert devcluster.wait(done.job_id) == "COMPLETED"
    assert devcluster.states(done.job_id) == ["REQUEUED", "COMPLETED"]
    assert (done.run / "starts-0").read_text() == "xx"


def test_a_template_starts_a_script_and_goes_on_with_it(devcluster: Cluster) -> None:
    """With neither submitit nor a copy of the code."""
    body = SAVES.replace("SIGNUMBER", "SIGUSR2").replace("CODE", "0")
    (devcluster.home / "templated.py").write_text(
        body.replace("Path(sys.argv[1],", "Path(os.environ['TRAINKIT_RUN_DIR'],")
    )
    words = ("templated.py", "launch.on_restart=--resume", "--", "a")
    job_id = devcluster.sbatch("--gpus-per-node=0", "--ntasks-per-node=1", edited(devcluster, "script.sbatch"), *words)
    run = devcluster.home / "runs" / f"templated-job{job_id}"
    devcluster.wait_for_start(run)
    devcluster.run("sleep", "3")
    devcluster.run("scancel", "--signal=USR2", f"{job_id}.0")
    assert devcluster.wait(job_id) == "COMPLETED"
    assert devcluster.states(job_id) == ["REQUEUED", "COMPLETED"]
    assert [(run / f"state-{rank}").read_text() for rank in (0, 1)] == ["done", "done"]


def test_a_node_that_a_script_has_lost_is_replaced_by_a_spare_one(devcluster: Cluster) -> None:
    """The spare node is none of the script's own: neither in its variables nor in its arguments."""
    words = ("{run}", "{node_rank}/{num_nodes}")
    job, run, _ = submit(devcluster, "spare", LASTS, "--spare-nodes", "1", "launch.on_restart=--resume", words=words)

    def told(attempt: int) -> list[dict[str, Any]]:
        return [json.loads((run / f"said-{attempt}-{rank}.out").read_text()) for rank in (0, 1)]

    def node(verb: str, name: str) -> None:
        subprocess.run([str(DEVCLUSTER), verb, name], env={**devcluster.env}, check=True, capture_output=True)

    devcluster.wait_for("both ranks", lambda: len(list(run.glob("said-0-*.out"))) == 2)
    lost = told(0)[1]["node"]
    node("crash", lost)
    try:
        devcluster.wait_for("both ranks again", lambda: len(list(run.glob("said-1-*.out"))) == 2)
    finally:
        node("boot", lost)
    assert devcluster.wait(job) == "COMPLETED", devcluster.logs()
    assert "REQUEUED" not in devcluster.states(job)
    assert [rank["argv"] for rank in told(1)] == [["0/2", "--resume"], ["1/2", "--resume"]]
    assert [(rank["WORLD_SIZE"], rank["SLURM_NNODES"], rank["SLURM_NTASKS"]) for rank in told(1)] == [
        ("2", "2", "2")
    ] * 2
    assert lost not in [rank["node"] for rank in told(1)]
