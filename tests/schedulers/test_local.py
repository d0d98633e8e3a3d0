from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import last_event
from trainkit.launch.controller import gpu_mask
from trainkit.launch.plan import Plan
from trainkit.run.events import history_of, read_events
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
from trainkit.schedulers.base import named, pickled
from trainkit.schedulers.slurm_submission import SbatchError, sbatch
from trainkit.schedulers.states import job_state

MakeRun = Callable[..., tuple[RunDir, Plan]]
MakeFunction = Callable[[str], Callable[[str], str]]

SAY_WHO = "json.dump(dict(os.environ), open(run / f'env-{rank}.json', 'w'))"


def finish(run: RunDir, seconds: float = 60) -> str:
    """Wait for the end of a run's job; its state."""
    deadline = time.monotonic() + seconds
    while job_state(run).alive != "no":
        assert time.monotonic() < deadline, (run.logs / "batch.out").read_text()
        time.sleep(0.05)
    return job_state(run).state


def start(run: RunDir, plan: Plan, function: Callable[[str], str], **env: str) -> ProcessId:
    """Hand a run over locally; its controller."""
    named(plan.executor).submit(run.path, [run], plan, function, cwd=Path.cwd(), env={**os.environ, **env})
    submission = history_of(run).submission
    controller = submission.process if submission is not None else None
    assert controller is not None
    return controller


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_two_simulated_nodes_of_two_ranks_each(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(nodes=2, ntasks_per_node=2)
    start(run, plan, rank_function(SAY_WHO), SLURM_JOB_ID="1", RANK="7", OMP_NUM_THREADS="")
    assert finish(run) == "COMPLETED"
    ranks: list[dict[str, str]] = [json.loads((run.path / f"env-{rank}.json").read_text()) for rank in range(4)]
    assert [env["SUBMITIT_LOCAL_NODEID"] for env in ranks] == ["0", "0", "1", "1"]
    assert [env["SUBMITIT_LOCAL_LOCALID"] for env in ranks] == ["0", "1", "0", "1"]
    assert {env["MASTER_PORT"] for env in ranks} == {ranks[0]["MASTER_PORT"]}
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "TRAINKIT_SIMULATED_NODES": "2",
        "TRAINKIT_ATTEMPT": "0",
        "OMP_NUM_THREADS": "1",
    }
    assert shared.items() <= ranks[3].items()
    assert ranks[3]["TRAINKIT_RUN_DIR"] == str(run.path)
    assert not {"SLURM_JOB_ID", "RANK"} & set(ranks[0]), "the variables of a job around it must not reach the ranks"
    assert sorted(path.name for path in run.attempt_logs(0).iterdir()) == [
        "node-0",
        *(f"rank-{rank}.{kind}" for rank in range(4) for kind in ("err", "out")),
    ]


def test_the_pickle_holds_one_path_and_no_code(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run()
    function = rank_function("pass")
    start(run, plan, function)
    assert finish(run) == "COMPLETED"
    (pickled,) = run.submitit.glob("*_submitted.pkl")
    assert pickled.stat().st_size < 1000
    submission: Any = pickle.loads(pickled.read_bytes())
    assert (submission.args, submission.kwargs) == ((str(run.path),), {})
    assert submission.function is function


def test_ranks_run_the_snapshot_and_not_the_folder_of_the_submission(
    local_run: MakeRun, rank_function: MakeFunction, tmp_path: Path
) -> None:
    (tmp_path / "trainkit").mkdir()
    (tmp_path / "trainkit" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    run, plan = local_run()
    start(run, plan, rank_function("import trainkit.errors\n(run / 'from').write_text(trainkit.errors.__file__)"))
    assert finish(run) == "COMPLETED"
    assert (run.path / "from").read_text().startswith(str(run.code))


def test_a_rank_that_raises_fails_the_run_with_its_traceback(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(nodes=2)
    start(run, plan, rank_function("if rank == 1: raise RuntimeError('no such luck')\ntime.sleep(60)"))
    began = time.monotonic()
    assert finish(run) == "FAILED"
    assert time.monotonic() - began < 20
    assert "RuntimeError: no such luck" in (run.attempt_logs(0) / "rank-1.err").read_text()
    assert (last_event(run, "failed") or {})["rank"] == 1


def test_a_rank_that_is_killed_is_named(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(nodes=2)
    start(run, plan, rank_function("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"))
    assert finish(run) == "FAILED"
    failed = last_event(run, "failed") or {}
    assert failed["rank"] == 1
    assert "killed by SIGKILL" in failed["error"]


def test_a_rank_that_is_killed_starts_the_run_again(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(nodes=2)
    first = "if os.environ['TRAINKIT_ATTEMPT'] == '0':\n"
    start(run, plan, rank_function(f"{first}  if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n  time.sleep(60)"))
    assert finish(run) == "COMPLETED"
    assert [event["event"] for event in read_events(run)] == ["submitted", "failed", "requeued", "ended"]


def test_a_rank_that_is_killed_each_time_ends_the_run_after_the_third(
    local_run: MakeRun, rank_function: MakeFunction
) -> None:
    run, plan = local_run()
    save = "from trainkit.run.events import Attempt\nattempt = Attempt.named_in(os.environ)\n"
    save += "attempt.saved(attempt.number)"  # progress does not count for failures
    start(run, plan, rank_function(f"{save}\nos.kill(os.getpid(), signal.SIGKILL)"))
    assert finish(run) == "FAILED"
    assert run.attempts() == [0, 1, 2]
    assert (last_event(run, "ended") or {})["why"] == "3 attempts have failed"


def test_a_rank_that_is_told_to_stop_each_time_before_it_has_saved_anything_new_ends_the_run(
    local_run: MakeRun, rank_function: MakeFunction
) -> None:
    run, plan = local_run()
    again = "from trainkit.run.events import Attempt\nAttempt.named_in(os.environ)"
    start(run, plan, rank_function(f"{again}.handed_back(node_rank=0, step=0, signals=[])"))
    assert finish(run) == "FAILED"
    assert run.attempts() == [0, 1, 2]
    assert "2 restarts have not come to a new checkpoint" in (last_event(run, "failed") or {})["error"]


def test_an_error_of_the_program_is_not_tried_again(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run()
    start(run, plan, rank_function("raise ValueError('bad label')"))
    assert finish(run) == "FAILED"
    assert run.attempts() == [0]


def test_without_requeue_a_killed_rank_ends_the_run(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(requeue=False)
    start(run, plan, rank_function("os.kill(os.getpid(), signal.SIGKILL)"))
    assert finish(run) == "FAILED"
    assert run.attempts() == [0]


STOPS_ONCE = """
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
attempt = os.environ['TRAINKIT_ATTEMPT']
(run / f'port-{attempt}').write_text(os.environ['MASTER_PORT'])
(run / f'up-{attempt}-{rank}').touch()
if attempt == '0':
    while not asked: time.sleep(0.02)
    if rank == 0: Attempt(RunDir(run), 0).handed_back(node_rank=0, step=1, signals=[])
"""


def test_a_preempted_run_goes_on_with_the_next_attempt(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(nodes=2)
    controller = start(run, plan, rank_function(STOPS_ONCE))
    for rank in range(2):
        wait_for(run.path / f"up-0-{rank}")
    controller.signal(signal.SIGUSR2)
    assert finish(run) == "COMPLETED"
    assert run.attempts() == [0, 1]
    assert [event["event"] for event in read_events(run)] == ["submitted", "handed_back", "requeued", "ended"]


def test_a_run_goes_on_with_its_own_code_when_the_shared_one_is_gone(
    local_run: MakeRun, rank_function: MakeFunction
) -> None:
    run, plan = local_run()
    controller = start(run, plan, rank_function(STOPS_ONCE))
    wait_for(run.path / "up-0-0")
    shutil.rmtree(run.code.resolve().parent)
    controller.signal(signal.SIGUSR2)
    assert finish(run) == "COMPLETED"
    assert not run.code.is_symlink()
    assert (run.code / "jobs" / "train.py").is_file()


def test_ranks_are_told_to_save_before_the_time_limit(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(time="0:15", signal_seconds=7)
    began = time.monotonic()
    start(run, plan, rank_function(STOPS_ONCE))
    assert finish(run) == "COMPLETED"
    assert 8 <= time.monotonic() - began < 20
    assert run.attempts() == [0, 1]


def test_a_run_that_does_not_heed_its_time_limit_is_ended(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(time="0:03", signal_seconds=1)
    body = "for number in (signal.SIGUSR2, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\ntime.sleep(60)"
    start(run, plan, rank_function(body))
    assert finish(run) == "TIMEOUT"


def test_a_cancelled_run_may_save_and_is_not_started_again(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(nodes=2)
    controller = start(run, plan, rank_function(STOPS_ONCE))
    for rank in range(2):
        wait_for(run.path / f"up-0-{rank}")
    controller.signal(signal.SIGTERM)
    assert finish(run) == "CANCELLED"
    assert history_of(run).handed_back == {0}
    assert run.attempts() == [0]


def test_without_requeue_a_saved_run_stays_as_it_is(local_run: MakeRun, rank_function: MakeFunction) -> None:
    run, plan = local_run(requeue=False)
    controller = start(run, plan, rank_function(STOPS_ONCE))
    wait_for(run.path / "up-0-0")
    controller.signal(signal.SIGUSR2)
    assert finish(run) == "PREEMPTED"


SBATCH = 'env > "${0%/*}/sbatch.env"; cat "${@: -1}" > "${0%/*}/sbatch.script"; echo "4711;sandbox"'


@pytest.fixture
def slurm(fake_command: Callable[[str, str], Path]) -> Callable[[str], Path]:
    def make(sbatch: str) -> Path:
        fake_command("srun", "exit 0")
        return fake_command("sbatch", sbatch)

    return make


def queue(run: RunDir, function: Callable[[str], str], count: int = 1, **env: str) -> list[str]:
    runs = [run] * count
    run.script.write_text("#!/bin/bash\n# exactly this\n")
    environment = {**os.environ, **env}
    return pickled(run.path, runs, function, lambda: sbatch(run.script, environment))


def test_sbatch_is_given_the_script_of_the_run_folder(
    local_run: MakeRun, rank_function: MakeFunction, slurm: Callable[[str], Path], tmp_path: Path
) -> None:
    run, _ = local_run()
    calls = slurm(SBATCH)
    assert queue(run, rank_function("pass")) == ["4711"]
    assert calls.read_text() == f"--parsable {run.script}\n"
    assert (tmp_path / "bin" / "sbatch.script").read_text() == run.script.read_text()
    assert (run.submitit / "4711_submitted.pkl").is_file()


def test_the_variables_of_a_job_around_it_do_not_reach_sbatch(
    local_run: MakeRun,
    rank_function: MakeFunction,
    slurm: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaks = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPUS_PER_TASK": "2",
        "SBATCH_PARTITION": "x",
        "PMI_RANK": "0",
        "MASTER_PORT": "1",
    }
    for name, text in leaks.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    run, _ = local_run()
    slurm(SBATCH)
    queue(run, rank_function("pass"))
    seen = {line.partition("=")[0] for line in (tmp_path / "bin" / "sbatch.env").read_text().splitlines()}
    assert not seen & set(leaks)
    assert "SLURM_CONF" in seen


def test_an_array_has_one_pickle_for_each_run(
    local_run: MakeRun, rank_function: MakeFunction, slurm: Callable[[str], Path]
) -> None:
    run, _ = local_run()
    calls = slurm(SBATCH)
    assert queue(run, rank_function("pass"), count=3) == ["4711_0", "4711_1", "4711_2"]
    assert len(calls.read_text().splitlines()) == 1
    assert sorted(path.name for path in run.submitit.glob("*.pkl")) == [
        f"4711_{index}_submitted.pkl" for index in range(3)
    ]


def test_what_sbatch_says_when_it_refuses_is_what_the_user_reads(
    local_run: MakeRun, rank_function: MakeFunction, slurm: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = local_run()
    slurm("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    with pytest.raises(SbatchError) as error:
        queue(run, rank_function("pass"))
    assert "Invalid account" in error.value.why
    assert error.value.is_answer
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "is_answer"),
    [
        ("echo \"sbatch: unrecognized option '--bogus'\" >&2; exit 255", True),
        ("echo 'you have to name a project here' >&2; exit 1", True),
        ("echo 'Socket timed out on send/recv operation' >&2; exit 1", False),
        ("echo 'Zero Bytes were transmitted or received' >&2; exit 1", False),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", False),
        ("exit 1", False),
        ("echo 'retrying' >&2; kill -9 $$", False),
        ("echo 'retrying' >&2; (exit 143)", False),
    ],
)
def test_only_what_says_no_is_an_answer(
    local_run: MakeRun, rank_function: MakeFunction, slurm: Callable[[str], Path], script: str, is_answer: bool
) -> None:
    run, _ = local_run()
    slurm(script)
    with pytest.raises(SbatchError) as error:
        queue(run, rank_function("pass"))
    assert error.value.is_answer is is_answer


@pytest.mark.parametrize(
    ("inherited", "node", "gpus", "mask"),
    [
        (None, 0, 2, "0,1"),
        (None, 1, 2, "2,3"),
        ("5,6", 0, 2, "5,6"),
        ("5,6", 1, 1, "6"),
        ("GPU-a,GPU-b", 1, 1, "GPU-b"),
        (None, 0, 0, ""),
        ("0,1", 1, 0, ""),
    ],
)
def test_simulated_nodes_divide_the_devices_that_were_visible(
    inherited: str | None, node: int, gpus: int, mask: str
) -> None:
    assert gpu_mask(inherited, node, gpus) == mask
