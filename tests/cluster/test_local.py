import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HERE, last_event, wait_until
from trainkit.cluster.job_states import job_state
from trainkit.cluster.plan import Plan, Side
from trainkit.cluster.scheduler import named
from trainkit.common.accelerators import mask_variables
from trainkit.common.process import KEEP_FREED_MEMORY, visible_cpus
from trainkit.launch.run_folders import write_launch
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_lease import ProcessId

MakeRun = Callable[..., tuple[RunDir, Plan]]
MakeFunction = Callable[[str], Callable[[str], str]]

SAY_WHO = "json.dump(dict(os.environ), open(run / f'env-{rank}.json', 'w'))"


def finish(run: RunDir) -> str:
    """Wait for the end of a run's job; its state."""
    wait_until(lambda: job_state(run).alive == "no", 200)
    return job_state(run).state


def start(run: RunDir, plan: Plan, function: Callable[[str], str], **env: str) -> ProcessId:
    """Hand a run over locally; its controller."""
    named(plan.executor).submit(run.path, [run], plan, function, cwd=Path.cwd(), env={**os.environ, **env})
    submission = history_of(run).submission
    controller = submission.process if submission is not None else None
    assert controller is not None
    return controller


def test_two_simulated_nodes_of_two_ranks_each_run_the_snapshot(
    local_run: MakeRun, rank_function: MakeFunction, tmp_path: Path
) -> None:
    (tmp_path / "trainkit").mkdir()
    (tmp_path / "trainkit" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    run, plan = local_run(nodes=2, ntasks_per_node=2)
    function = rank_function(
        f"{SAY_WHO}\nimport trainkit.common.errors\n(run / 'from').write_text(trainkit.common.errors.__file__)"
    )
    start(run, plan, function, SLURM_JOB_ID="1", RANK="7", OMP_NUM_THREADS="")
    assert finish(run) == "COMPLETED"
    ranks: list[dict[str, str]] = [json.loads((run.path / f"env-{rank}.json").read_text()) for rank in range(4)]
    assert [env["SUBMITIT_LOCAL_NODEID"] for env in ranks] == ["0", "0", "1", "1"]
    assert [env["SUBMITIT_LOCAL_LOCALID"] for env in ranks] == ["0", "1", "0", "1"]
    assert {env["MASTER_PORT"] for env in ranks} == {ranks[0]["MASTER_PORT"]}
    assert ranks[3].items() >= {
        "MASTER_ADDR": "127.0.0.1", "TRAINKIT_SIMULATED_NODES": "2", "TRAINKIT_ATTEMPT": "0", "OMP_NUM_THREADS": "1",
        "TRAINKIT_RUN_DIR": str(run.path),
    }.items()  # fmt: skip
    assert not {"SLURM_JOB_ID", "RANK"} & set(ranks[0]), "the variables of a job around it must not reach the ranks"
    assert sorted(path.name for path in run.attempt_logs(0).iterdir()) == [
        "node-0",
        *(f"rank-{rank}.{kind}" for rank in range(4) for kind in ("err", "out")),
    ]
    assert (run.path / "from").read_text().startswith(str(run.code))
    (pickled,) = run.submitit.glob("*_submitted.pkl")
    assert pickled.stat().st_size < 1000, "it holds no code"
    submission: Any = pickle.loads(pickled.read_bytes())
    assert (submission.args, submission.kwargs, submission.function is function) == ((str(run.path),), {}, True)


@pytest.mark.nightly
@pytest.mark.parametrize(("gpus", "threads"), [(0, visible_cpus()), (1, 1)], ids=["cpu", "gpu"])
def test_a_rank_has_all_cores_or_one_thread_beside_its_gpu(
    local_run: MakeRun, rank_function: MakeFunction, gpus: int, threads: int
) -> None:
    run, plan = local_run(site=replace(HERE, gpus=gpus), ntasks_per_node=1)
    start(run, plan, rank_function(SAY_WHO), OMP_NUM_THREADS="")
    assert finish(run) == "COMPLETED"
    env = json.loads((run.path / "env-0.json").read_text())
    assert env["OMP_NUM_THREADS"] == str(threads)
    assert (env.items() >= KEEP_FREED_MEMORY.items()) == (gpus == 0)


@pytest.mark.nightly
def test_a_run_beside_others_has_its_share_of_the_cpus_and_its_gpu(
    local_run: MakeRun, rank_function: MakeFunction
) -> None:
    run, plan = local_run(site=replace(HERE, gpus=4), runs_per_gpu=2)
    plan = replace(plan, side=Side(1, 2, 3))
    write_launch(run.path, plan, None)
    body = "(run / 'cpus').write_text(repr(sorted(os.sched_getaffinity(0))))"
    start(run, plan, rank_function(f"{SAY_WHO}\n{body}"), CUDA_VISIBLE_DEVICES="7,5,3,1")
    assert finish(run) == "COMPLETED"
    assert json.loads((run.path / "env-0.json").read_text())["CUDA_VISIBLE_DEVICES"] == "1"
    cpus = sorted(os.sched_getaffinity(0))
    assert (run.path / "cpus").read_text() == repr(cpus[1::2] or cpus)


@pytest.mark.nightly
def test_a_killed_rank_is_named_and_the_run_started_again(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(nodes=2)
    first = "if os.environ['TRAINKIT_ATTEMPT'] == '0':\n"
    start(run, plan, rank_function(f"{first}  if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n  time.sleep(60)"))
    assert finish(run) == "COMPLETED"
    assert [event["event"] for event in read_events(run)] == ["submitted", "failed", "requeued", "ended"]
    failed = last_event(run, "failed") or {}
    assert (failed["rank"], "killed by SIGKILL" in failed["error"]) == (1, True)


ATTEMPT = "from trainkit.run.events import Attempt\nattempt = Attempt.named_in(os.environ)\n"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [  # progress does not count for failures
        ("attempt.saved(attempt.number)\nos.kill(os.getpid(), signal.SIGKILL)", "ended", "3 attempts have failed"),
        ("attempt.handed_back(node_rank=0, step=0, signals=[])", "failed", "2 restarts have not come to a new"),
    ],
    ids=["killed each time", "told to stop each time"],
)
def test_a_run_is_started_three_times_in_vain_and_no_more(
    local_run: MakeRun, rank_function: MakeFunction, body: str, kind: str, why: str
) -> None:
    run, plan = local_run()
    start(run, plan, rank_function(ATTEMPT + body))
    assert finish(run) == "FAILED"
    assert run.attempts() == [0, 1, 2]
    event = last_event(run, kind) or {}
    assert why in str(event.get("why", event.get("error")))


STOPS_ONCE = """
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2, signal.SIGTERM))
attempt = os.environ['TRAINKIT_ATTEMPT']
(run / f'port-{attempt}').write_text(os.environ['MASTER_PORT'])
(run / f'up-{attempt}-{rank}').touch()
if attempt == '0':
    while not asked: time.sleep(0.02)
    if rank == 0: Attempt(RunDir(run), 0).handed_back(node_rank=0, step=1, signals=[])
"""


def wait_until_up(run: RunDir, ranks: int) -> None:
    for rank in range(ranks):
        wait_until((run.path / f"up-0-{rank}").exists, 200)  # each has read its code by then


@pytest.mark.nightly
def test_a_preempted_run_goes_on_where_the_shared_code_is_gone(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(nodes=2)
    controller = start(run, plan, rank_function(STOPS_ONCE))
    wait_until_up(run, 2)
    shutil.rmtree(run.code.resolve().parent)
    controller.signal(signal.SIGUSR2)
    assert finish(run) == "COMPLETED"
    assert run.attempts() == [0, 1]
    assert [event["event"] for event in read_events(run)] == ["submitted", "handed_back", "requeued", "ended"]
    assert not run.code.is_symlink()
    assert (run.code / "jobs" / "train.py").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "number", "state", "attempts"),
    [
        ({"time": "0:10", "signal_seconds": 5}, None, "COMPLETED", [0, 1]),  # before its time limit
        ({"nodes": 2}, signal.SIGTERM, "CANCELLED", [0]),
        ({"requeue": False}, signal.SIGUSR2, "PREEMPTED", [0]),
        ({"requeue": False}, signal.SIGKILL, "FAILED", [0]),
    ],
)
def test_a_run_that_is_told_to_stop_may_save_and_goes_on_or_not(
    local_run: MakeRun, rank_function: MakeFunction, flags: dict[str, Any], number: int | None, state: str,
    attempts: list[int],
) -> None:  # fmt: skip
    run, plan = local_run(**flags)
    dies = f"if {number} == signal.SIGKILL: os.kill(os.getpid(), signal.SIGKILL)\n"
    began = time.monotonic()
    controller = start(run, plan, rank_function(dies + STOPS_ONCE))
    if number in (signal.SIGTERM, signal.SIGUSR2):
        wait_until_up(run, flags.get("nodes", 1))
        controller.signal(number)
    assert finish(run) == state
    assert run.attempts() == attempts
    assert history_of(run).handed_back == (set() if number == signal.SIGKILL else {0})
    assert number is not None or time.monotonic() - began >= 5


STOPS_WHEN_TOLD = """
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.cluster.signals import stop_on_signal
with stop_on_signal() as stop:
    while os.environ['TRAINKIT_ATTEMPT'] == '0' and not stop.requested: time.sleep(0.02)
    if stop.requested: Attempt(RunDir(run), 0).handed_back(node_rank=0, step=1, signals=stop.signals)
"""


def test_a_preemption_before_the_controller_listens_is_no_loss(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run()
    start(run, plan, rank_function(STOPS_WHEN_TOLD)).signal(signal.SIGUSR2)
    assert finish(run) == "COMPLETED"
    assert history_of(run).handed_back == {0}
    assert run.attempts() == [0, 1]


def test_simulated_nodes_divide_the_devices_that_were_visible() -> None:
    masks = {
        (None, 0, 2): "0,1", (None, 2, 4): "2,3", ("5,6", 0, 2): "5,6", ("5,6", 1, 2): "6",
        ("GPU-a,GPU-b", 1, 2): "GPU-b", (None, 0, 0): "", ("0,1", 1, 1): "",
    }  # fmt: skip
    for (inherited, *which), left in masks.items():
        env = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
        made = mask_variables(env, *which)
        assert made["CUDA_VISIBLE_DEVICES"] == made["HIP_VISIBLE_DEVICES"] == left
    assert mask_variables({"ZE_AFFINITY_MASK": "2,3"}, 1, 2)["ZE_AFFINITY_MASK"] == "3"
    assert "ZE_AFFINITY_MASK" not in mask_variables({}, 0, 0), "an empty one hides nothing"
