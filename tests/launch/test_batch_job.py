"""The hooks of a batch script around its ranks, with a SLURM made of shell scripts."""

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pytest

from tests.cluster.test_node_health import a_report
from tests.shell import python
from trainkit.cluster import slurm, slurm_commands
from trainkit.cluster.signals import hang
from trainkit.common import jsonl
from trainkit.common.errors import RunFailedError
from trainkit.launch import batch_job
from trainkit.launch.batch_job import pronounce
from trainkit.recovery.retries import (
    FAILED_PREFLIGHT,
    LOST_NODE,
    MOST_ENDED,
    budget_spent,
    culprits,
    passing_failure,
    spared,
)
from trainkit.run.events import Attempt, read_events, submitted
from trainkit.run.folder import PREFLIGHT, RunDir
from trainkit.run.history import history_of

FakeCommand = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(slurm_commands, "PATIENCE", (0.0, 0.0))
    # SLURM ends the script of a job that it requeues; tests/slurm has that.
    monkeypatch.setattr(batch_job, "_wait_for_the_end", lambda: "")
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: None)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "my run", "seed: 0\n")


def job(run: RunDir, **more: str) -> dict[str, str]:
    return {**os.environ, "TRAINKIT_RUN_DIR": str(run.path), "SLURM_JOB_ID": "7", **more}


def begun(run: RunDir) -> dict[str, str]:
    """The environment of a job's ranks."""
    env = job(run, SLURM_JOB_NODELIST="gpu[03-04]")
    words = (shlex.split(line)[1].partition("=") for line in batch_job.begin(env).splitlines())
    return env | {name: value for name, _, value in words}


def test_it_begins_an_attempt_on_the_first_node_with_a_secret_of_its_own(run: RunDir) -> None:
    first, second = begun(run), begun(run)
    assert [Attempt.named_in(env) for env in (first, second)] == [Attempt(run, 0), Attempt(run, 1)]
    assert first["MASTER_ADDR"] == "gpu03"
    assert first["MASTER_PORT"].isdigit()
    assert len(first["TRAINKIT_SECRET"]) >= 16
    assert first["TRAINKIT_SECRET"] != second["TRAINKIT_SECRET"]
    written = "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    assert first["TRAINKIT_SECRET"] not in written, "no secret is ever written into a run folder"


def test_ranks_meet_by_the_name_that_a_node_has_in_their_network(run: RunDir) -> None:
    """Where that has names of its own, which a site's profile says once."""
    lines = batch_job.begin(job(run, SLURM_JOB_NODELIST="jwb[0038-0039]", TRAINKIT_HEAD_SUFFIX="i")).splitlines()
    assert "export MASTER_ADDR=jwb0038i" in lines


def attempt_in(env: dict[str, str]) -> Attempt:
    attempt = Attempt.named_in(env)
    assert attempt is not None
    return attempt


def handed_back(run: RunDir, how: batch_job.How = "requeue", more: Mapping[str, str] = {}, step: int = 5) -> int:
    """An attempt whose ranks saved because they were told to, ended; the exit code of its job."""
    env = begun(run) | dict(more)
    attempt_in(env).saved(step)
    attempt_in(env).handed_back(node_rank=0, step=step, signals=["SIGUSR2"])
    return batch_job.end(0, env, how=how)


def test_only_the_task_that_was_handed_back_is_requeued(run: RunDir, requeues: Path) -> None:
    """The last task of an array has the array's own number as SLURM_JOB_ID, which would requeue all of them."""
    handed_back(run, more={"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"})
    assert requeues.read_text() == "requeue 7_2\n"


def test_a_queue_that_does_not_answer_loses_no_training(run: RunDir, fake_command: FakeCommand) -> None:
    asked = fake_command("squeue", "echo slurm_load_jobs error: Unable to contact >&2; exit 1")
    calls = fake_command("scontrol", "exit 0")
    handed_back(run)
    assert len(asked.read_text().splitlines()) == 3, "it is asked again"
    assert calls.read_text() == "requeue 7\n", "and the requeue is tried anyway"


@pytest.mark.parametrize("is_submitted", [True, False], ids=["submitted", "template"])
def test_a_refused_requeue_is_tried_again_and_never_ends_with_0(
    run: RunDir, fake_command: FakeCommand, capsys: pytest.CaptureFixture[str], is_submitted: bool
) -> None:
    if is_submitted:
        run.plan.write_text("{}")
    fake_command("squeue", "echo RUNNING")
    calls = fake_command("scontrol", "echo 'Requeue is disabled for this partition' >&2; exit 1")
    assert handed_back(run) == 1
    assert len(calls.read_text().splitlines()) == 3
    assert "Requeue is disabled for this partition" in history_of(run).failures[0].error
    assert history_of(run).outcome == "FAILED"
    said = capsys.readouterr().out
    assert ("jobs.resume" in said, "TRAINKIT_CONTINUE=" in said) == (is_submitted, not is_submitted)


def test_a_controller_gone_for_minutes_is_asked_until_it_is_back(run: RunDir, fake_command: FakeCommand) -> None:
    silent = "slurm_requeue error: Unable to contact slurm controller (connect failure)"
    fake_command("squeue", "echo RUNNING")
    calls = fake_command("scontrol", f'[ "$(wc -l <scontrol.calls)" -ge 5 ] || {{ echo "{silent}" >&2; exit 1; }}')
    handed_back(run)
    assert len(calls.read_text().splitlines()) == 5
    assert history_of(run).requeued == {0}


@pytest.mark.parametrize(
    ("state", "is_requeued"),
    [
        ("COMPLETING", False),
        ("CANCELLED", False),
        # Its signal came too early for ranks that were still starting, or somebody has shortened the limit.
        ("COMPLETING|||TimeLimit", True),
    ],
)
def test_a_cancelled_job_is_not_requeued_and_one_at_its_time_limit_is(
    run: RunDir, fake_command: FakeCommand, state: str, is_requeued: bool
) -> None:
    fake_command("squeue", f"echo '{state}'")
    calls = fake_command("scontrol", "exit 0")
    assert handed_back(run) == 1, "jobs that wait for a finished training must not start"
    assert calls.exists() == is_requeued


def test_without_requeue_a_saved_run_is_left_as_it_is_and_is_no_success(run: RunDir, fake_command: FakeCommand) -> None:
    calls = fake_command("scontrol", "exit 0")
    assert handed_back(run, "no") == 1
    assert not calls.exists()
    assert history_of(run).outcome == "PREEMPTED"


def test_the_hand_back_of_an_earlier_attempt_requeues_nothing(run: RunDir, fake_command: FakeCommand) -> None:
    calls = fake_command("scontrol", "exit 0")
    attempt_in(begun(run)).handed_back(node_rank=0, step=5, signals=["SIGUSR2"])
    assert batch_job.end(1, begun(run), how="requeue") == 1
    assert not calls.exists()


def test_a_script_of_which_a_rank_has_failed_is_not_requeued_by_the_others(
    run: RunDir, fake_command: FakeCommand
) -> None:
    """srun tells them to stop, as a preemption would."""
    calls = fake_command("scontrol", "exit 0")
    env = begun(run)
    attempt = attempt_in(env)
    attempt.started(script=True, step=0, world_size=2, hosts=["gpu03", "gpu04"])
    attempt.failed("ValueError: mistake", rank=1)
    attempt.handed_back(node_rank=0, step=None, signals=["SIGTERM"])
    assert batch_job.end(1, env, how="requeue") == 1
    assert not calls.exists()
    assert history_of(run).outcome == "FAILED"


def failed(env: dict[str, str], *errors: str, code: int = 1, host: str = "gpu03") -> int:
    """An attempt whose ranks have failed with these words, ended."""
    for rank, error in enumerate(errors):
        attempt_in(env).failed(error, rank=rank, host=host)
    return batch_job.end(code, env, how="requeue")


LOST = "RuntimeError: Connection closed by peer [10.0.0.2]:1234"


@pytest.fixture
def requeues(fake_command: FakeCommand) -> Path:
    """The calls of a scontrol that takes every requeue, of a job that runs on gpu03 and gpu04 of five nodes."""
    fake_command("squeue", "echo 'RUNNING|'")
    fake_command("sinfo", "printf 'gpu0%s idle\\n' 1 2 3 4 5")
    return fake_command("scontrol", "exit 0")


@pytest.mark.parametrize(
    ("errors", "code", "again"),
    [
        ((), 137, True), ((LOST,), 1, True), ((hang(600),), 1, True), (("ValueError: bad label",), 1, False),
        ((LOST, "ValueError: bad label"), 137, False), ((), 1, False),
    ],
)  # fmt: skip
def test_a_failure_is_requeued_unless_it_is_the_programs(
    run: RunDir, requeues: Path, errors: tuple[str, ...], code: int, again: bool
) -> None:
    assert failed(begun(run), *errors, code=code) == code
    assert requeues.exists() == again
    assert history_of(run).requeued == ({0} if again else set())
    assert history_of(run).outcome == "FAILED"
    assert history_of(run).failures or not again, "that it failed is written down"


@pytest.mark.parametrize(
    ("words", "trained", "again"),
    [
        ("Unable to confirm allocation for job 7: Unable to contact slurm controller", False, True),
        ("Task launch for 7.0 failed on node gpu04: Socket timed out on send/recv operation", False, True),  # 20.11
        ("Unable to create step for job 7: More processors requested than permitted", False, False),
        # A controller that is gone while ranks train excuses no failure.
        ("Unable to confirm step completion: Unable to contact slurm controller", True, False),
    ],
)
def test_an_srun_whose_controller_or_node_does_not_answer_is_tried_again(
    run: RunDir, requeues: Path, words: str, trained: bool, again: bool
) -> None:
    env = begun(run)
    (run.logs / "batch.out").write_text(f"Attempt 0 on gpu[03-04]: the ranks' output\nsrun: error: {words}\n")
    if trained:
        Attempt(run, 0).started(step=0)
    assert failed(env) == 1
    assert requeues.exists() == again
    errors = [f"srun could not start the ranks: {words}"] * again
    assert [item.error for item in history_of(run).failures] == errors


def test_three_failures_end_the_run_and_say_so(run: RunDir, requeues: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (5, 9, 13):
        env = begun(run)
        attempt_in(env).saved(step)
        failed(env, code=137)
    assert requeues.read_text().count("requeue") == 2
    assert "3 attempts have failed" in capsys.readouterr().out
    assert history_of(run).outcome == "FAILED"


@pytest.mark.parametrize(("steps", "requeued"), [(range(1, 9), 8), ((4, 8, 8, 8, 8), 3)])
def test_as_long_as_there_is_progress_there_is_no_limit(
    run: RunDir, requeues: Path, capsys: pytest.CaptureFixture[str], steps: Sequence[int], requeued: int
) -> None:
    for step in steps:
        handed_back(run, step=step)
    assert requeues.read_text() == "requeue 7\n" * requeued
    is_over = requeued < len(steps)
    assert ("2 restarts have not come to a new checkpoint" in capsys.readouterr().out) == is_over
    assert (history_of(run).outcome == "FAILED") == is_over


def test_a_job_that_slurm_has_restarted_in_vain_is_not_begun_again(run: RunDir) -> None:
    for _ in range(3):  # of which nobody could say a word: power cuts
        begun(run)
    slurm = {"SLURM_JOB_NODELIST": "gpu03", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}
    with pytest.raises(RunFailedError, match="2 restarts"):
        batch_job.begin(job(run, **slurm))
    assert history_of(run).outcome == "FAILED"


def test_a_job_of_a_finished_run_ends_without_another_attempt(run: RunDir) -> None:
    """Its script was lost with slurmd, and its ranks went on to the end."""
    attempt = attempt_in(begun(run))
    attempt.ended("COMPLETED")
    before = run.events.read_bytes()
    assert batch_job.begin(job(run, SLURM_JOB_NODELIST="gpu03", SLURM_RESTART_COUNT="1")) == "exit 0"
    assert run.attempts() == [0]
    assert run.events.read_bytes() == before


def test_a_resumed_run_has_all_its_tries_again(run: RunDir, requeues: Path) -> None:
    for step in (8, 8, 8):
        handed_back(run, step=step)
    submitted(run, "slurm", "8")
    requeues.unlink()
    for _ in range(2):
        handed_back(run, step=8)
    assert requeues.read_text() == "requeue 7\n" * 2


@pytest.mark.parametrize(
    ("before", "sinfo", "of_user", "out"),
    [
        ([], "gpu01 idle\\ngpu02 mix\\ngpu03 alloc\\ngpu04 down*\\n", "gpu[08-09]", "gpu04,gpu08,gpu09"),
        # One that was excluded before is taken back where too few others are left by now.
        (["gpu01"], "gpu01 idle\\ngpu03 alloc\\ngpu04 down*\\n", "gpu01,gpu09|", "gpu04,gpu09"),
    ],
)
def test_a_node_that_slurm_calls_down_is_excluded_from_the_restart(
    run: RunDir, requeues: Path, fake_command: FakeCommand, before: list[str], sinfo: str, of_user: str, out: str
) -> None:
    for node in before:
        Attempt(run, 0).excluded(node, "its ranks were behind in 2 hangs")
    fake_command("sinfo", f"printf '{sinfo}'")
    fake_command("squeue", f"echo 'RUNNING|{of_user}'")
    failed(begun(run) | {"SLURM_JOB_NUM_NODES": "2"}, LOST)
    assert requeues.read_text().splitlines() == ["requeue 7", f"update job=7 ExcNodeList={out}"]
    event = list(read_events(run, "excluded"))[-1]
    assert (event["node"], event["attempt"]) == ("gpu04", 0)
    assert "down" in event["why"]


def test_a_node_that_is_down_after_a_silent_end_is_excluded(run: RunDir, fake_command: FakeCommand) -> None:
    fake_command("sinfo", "printf 'gpu03 idle\\ngpu04 down*\\ngpu05 down\\n'")
    begun(run)
    Attempt(run, 0).started(step=0, hosts=["gpu03.site", "gpu04.site"])
    begun(run)
    assert [event["node"] for event in read_events(run, "excluded")] == ["gpu04"]


def test_a_requeued_job_does_not_take_a_crashed_node_again(run: RunDir, fake_command: FakeCommand) -> None:
    """gpu04 has crashed during an attempt of which nobody could say a word, and is back by now."""
    fake_command("squeue", "echo 'RUNNING||'")
    fake_command("sinfo", "printf 'gpu0%s idle gpu:a100:4 ib\\n' 1 2 3 4 5")
    facts = "Arch=x86_64 State=IDLE BootTime=2020-01-01T00:00:00 SlurmdStartTime"  # as SLURM 22.05 and 24.05 write it
    shown = f"NodeName=gpu03 {facts}=2020-01-01T00:00:00 OS=Linux\nNodeName=gpu04 {facts}=2099-01-01T00:00:00 OS=Linux"
    calls = fake_command("scontrol", f"[ $1 != show ] || echo '{shown}'")
    begun(run)
    nodes = {"SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(RunFailedError, match="queued again, for other nodes"):
        batch_job.begin(job(run, **nodes, SLURM_RESTART_COUNT="1"))
    assert calls.read_text().splitlines()[-2:] == ["requeue 7", "update job=7 ExcNodeList=gpu04"]
    (event,) = read_events(run, "excluded")
    assert (event["node"], event["attempt"], "slurmd was started at 2099" in event["why"]) == ("gpu04", 0, True)
    assert run.attempts() == [0]
    batch_job.begin(job(run, **nodes, SLURM_RESTART_COUNT="2"))
    assert calls.read_text().count("requeue") == 1, "it is sent back once and no more"


@pytest.mark.parametrize(
    ("sinfo", "squeue", "words"),
    [
        ("cpu01 idle (null)\\ngpu03 alloc gpu:4\\ngpu04 down* gpu:4\\n", "RUNNING|gpu05|", "too few nodes"),
        ("gpu02 idle\\ngpu03 idle\\ngpu04 down*\\n", "RUNNING|gpu05|gpu[03-04]", "they are in --nodelist"),
    ],
    ids=["others are of another kind", "asked for"],
)
def test_a_job_that_could_not_start_without_a_bad_node_keeps_it(
    run: RunDir, requeues: Path, fake_command: FakeCommand, capsys: pytest.CaptureFixture[str],
    sinfo: str, squeue: str, words: str,
) -> None:  # fmt: skip
    fake_command("sinfo", f"printf '{sinfo}'")
    fake_command("squeue", f"echo '{squeue}'")
    failed(begun(run) | {"SLURM_JOB_NUM_NODES": "2"}, LOST)
    assert requeues.read_text() == "requeue 7\n", "what the user has excluded stays so"
    assert not read_events(run, "excluded")
    assert f"gpu04 should be left out, but {words}" in capsys.readouterr().err


def test_of_bad_nodes_the_newest_is_left_out_first_where_not_all_can_be() -> None:
    assert spared(["old", "new"], ["old", "new", "good"], needed=2) == ["new"]


def submitted_files(run: RunDir) -> None:
    (run.path / "submit.sbatch").write_text("#!/bin/bash\n")
    (run.path / ".submitit").mkdir()
    (run.path / ".submitit" / "7_submitted.pkl").write_text("the path of the run")


@pytest.mark.parametrize("sbatch", ["echo 'Socket timed out on send/recv operation' >&2; exit 1", "exit 0"])
def test_no_job_is_queued_twice_where_sbatch_had_no_answer(run: RunDir, fake_command: FakeCommand, sbatch: str) -> None:
    queue = "12|afterany:70(unfulfilled)\\n11|afterany:7(unfulfilled),singleton(unfulfilled)\\n"
    fake_command("squeue", f"case \"$*\" in *%E*) printf '{queue}';; *) echo 'RUNNING|';; esac")
    calls = fake_command("sbatch", sbatch)
    submitted_files(run)
    assert handed_back(run, "chain") == 1
    assert len(calls.read_text().splitlines()) == 1
    assert (run.path / ".submitit" / "11_submitted.pkl").exists()


def test_a_queue_that_speaks_nonsense_ends_no_script_with_a_traceback(
    run: RunDir, fake_command: FakeCommand, capfd: pytest.CaptureFixture[str]
) -> None:
    queue = "RUNNING|n[1-99999999999]|n[1"
    fake_command("squeue", f"case \"$*\" in *%o*) printf 'caf\\xe9\\n';; *) echo '{queue}';; esac")
    fake_command("scontrol", "printf 'caf\\xe9\\n' >&2; exit 1")
    assert handed_back(run, "chain") == 1
    assert "squeue does not say what job 7 is" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("shown", "told"),  # SLURM before 23.11, since then, and a copy of the template from before it told its arguments
    [(" ddp optim.lr=1e-3", "ddp\noptim.lr=1e-3"), ("", "ddp\noptim.lr=1e-3"), (" ddp optim.lr=1e-3", None)],
)
def test_a_chained_template_has_its_arguments_and_what_it_was_granted(
    run: RunDir, fake_command: FakeCommand, tmp_path: Path, shown: str, told: str | None
) -> None:
    template = tmp_path / "train.sbatch"
    template.write_text("#!/bin/bash\n")
    granted = f"thesis|gpu|(null)|1-00:00:00|2|(null)|{template}{shown}"
    fake_command("squeue", f"case \"$*\" in *%o*) echo '{granted}';; *) echo 'RUNNING|n9|';; esac")
    fake_command("scontrol", "echo 'Requeue is disabled' >&2; exit 1")
    calls = fake_command("sbatch", f'[ "$TRAINKIT_CONTINUE" = \'{run.path}\' ] && [ -z "$SLURM_JOB_ID" ] && echo 11')
    job_says = {"SLURM_GPUS_PER_NODE": "4", "SLURM_MEM_PER_NODE": "8000"}
    assert handed_back(run, more=job_says | ({} if told is None else {slurm.ARGUMENTS: told})) == 1
    granted_words = "--account=thesis --partition=gpu --time=1-00:00:00 --nodes=2 --gpus-per-node=4 --mem=8000"
    flags = f"--no-requeue --job-name={run.path.name} --dependency=afterany:7,singleton --export=ALL {granted_words}"
    assert calls.read_text() == f"--parsable {flags} --exclude=n9 {template} ddp optim.lr=1e-3\n"
    submission = history_of(run).submission
    assert submission is not None
    assert submission.job_id == "11"


def test_the_script_of_a_stale_attempt_queues_nothing_again(
    run: RunDir, fake_command: FakeCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    """slurmd was killed, SLURM has started the job again elsewhere, and the old script lives on."""
    calls = [fake_command(name, "echo '7|RUNNING|'") for name in ("squeue", "scontrol")]
    env = begun(run)
    attempt_in(env).handed_back(node_rank=0, step=5, signals=["SIGTERM"])
    Attempt.begin(run).started(step=0)
    before = run.events.read_bytes()
    assert batch_job.end(0, env, how="requeue") == 1
    assert "Attempt 1 has taken over" in capsys.readouterr().out
    assert [file.exists() for file in calls] == [False, False]
    assert run.events.read_bytes() == before


def test_a_refusal_before_a_run_is_in_the_jobs_own_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = begun(RunDir(tmp_path / "dpd-job7"))
    said = "Unknown preset 'dpd'.\n  why: There are: ddp, dp.\n  fix: Did you mean 'dp'?"
    (attempt_in(env).logs / "rank-0.err").write_text(f"a warning\n{said}\n")
    assert batch_job.end(2, env, how="requeue") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "dpd-job7" / "events.jsonl").exists(), "and leaves no record"


# What a job does with the check of its nodes.


def test_a_bad_node_ends_the_attempt_and_another_may_avoid_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = Attempt.begin(run)
    report = a_report("n1", "n2", "n3")
    report["ranks"]["1"]["memory_free_mb"] = 7
    PREFLIGHT.at(attempt.logs).write_text(f"a library's own words\n{json.dumps(report)}\n")
    assert pronounce(attempt.environment()) == 3
    assert "BAD  n2: memory: 7 MB" in capsys.readouterr().out
    assert passing_failure(attempt, 3) == "failed preflight: n2: memory: 7 MB of 64000 free"
    assert culprits(attempt, ["n1", "n2", "n3"], {}) == {"n2": "failed preflight: memory: 7 MB of 64000 free"}


@pytest.mark.parametrize("said", ["", "srun: error", '{"ranks": torn'])
def test_a_check_without_an_answer_holds_nothing_back(run: RunDir, said: str) -> None:
    attempt = Attempt.begin(run)
    PREFLIGHT.at(attempt.logs).write_text(said)
    assert pronounce(attempt.environment()) == 0
    assert culprits(attempt, ["n1"], {}) == {}


@pytest.mark.parametrize(
    ("error", "code", "again"),
    [
        ("", 0, True),
        ("", 143, True),
        ("", 3, False),
        ("Traceback (most recent call last):\n  File \"train.py\", line 3\nValueError: mistake\n", 1, False),
    ],
)  # fmt: skip
def test_a_mistake_of_a_script_is_none_that_was_handed_back(
    run: RunDir, requeues: Path, error: str, code: int, again: bool
) -> None:
    """Of its ranks, which each hand back for themselves, one has failed, and the others were told to end for that."""
    env = begun(run)
    attempt = attempt_in(env)
    attempt.started(script=True, step=0)
    attempt.handed_back(node_rank=0, step=None, signals=["SIGTERM"])
    (attempt.logs / "rank-1.err").write_text(error)
    batch_job.end(code, env, how="requeue")
    assert requeues.exists() == again
    assert history_of(run).outcome == (None if again else "FAILED")


def test_a_script_that_has_ended_has_finished(run: RunDir, requeues: Path) -> None:
    env = begun(run)
    attempt_in(env).started(script=True, step=0)
    assert batch_job.end(0, env, how="requeue") == 0
    assert history_of(run).finished
    assert not requeues.exists()


def test_a_script_may_queue_its_job_again_by_itself(run: RunDir) -> None:
    """SLURM then ends its ranks, which is no failure; but one whose job nobody else has queued is."""

    def taken(count: int) -> None:
        for _ in range(count):
            attempt = Attempt.begin(run)
            attempt.started(script=True)
            attempt.failed("killed by SIGTERM", rank=0)

    taken(MOST_ENDED - 1)
    assert budget_spent(run) == ""
    jsonl.append_jsonl(run.metrics, {"time": time.time(), "step": 10})
    taken(1)
    assert budget_spent(run) == ""
    taken(MOST_ENDED - 1)
    assert "20 times" in budget_spent(run)
    for number in range(3):
        Attempt(run, number).requeued("7")
    assert budget_spent(run) == "3 attempts have failed"


def ended_scripts(run: RunDir, count: int) -> None:
    """So many attempts of a script that did not stop when it was told to."""
    for _ in range(count):
        attempt = Attempt.begin(run)
        attempt.started(script=True)
        attempt.handed_back(node_rank=0, step=None, signals=["SIGUSR2"], was_ended=True)


def test_a_script_that_never_says_it_has_saved_is_not_begun_anew_for_ever(run: RunDir) -> None:
    ended_scripts(run, MOST_ENDED - 1)
    assert budget_spent(run) == ""
    jsonl.append_jsonl(run.metrics, {"time": time.time(), "step": 10})
    ended_scripts(run, MOST_ENDED - 1)
    assert budget_spent(run) == "", "a record of a further step counts"
    jsonl.append_jsonl(run.metrics, {"time": time.time(), "step": 10})
    ended_scripts(run, 1)
    assert "20 times" in budget_spent(run)
    Attempt.begin(run).handed_back(node_rank=0, step=None, signals=["SIGUSR2"])
    assert budget_spent(run) == "", "it has saved"


# Spare nodes


@pytest.fixture
def spare(run: RunDir, fake_command: FakeCommand) -> dict[str, str]:
    """The environment of the ranks of a job that has a third node, and whose script runs on the first."""
    fake_command("squeue", "echo 'RUNNING||||gpu[03-05]'")
    fake_command("sinfo", "printf 'gpu0%s idle\\n' 1 2 3 4 5")
    fake_command("scontrol", "exit 0")
    place = {"SLURM_JOB_NODELIST": "gpu[03-05]", "SLURMD_NODENAME": "gpu03", "TRAINKIT_RANK_NODES": "2-3"}
    return variables(batch_job.begin(job(run, **place)), job(run, **place))


def variables(lines: str, env: Mapping[str, str]) -> dict[str, str]:
    words = (shlex.split(line)[1].partition("=") for line in lines.splitlines())
    return dict(env) | {name: value for name, _, value in words}


def test_ranks_leave_the_node_of_the_script_to_it_where_they_can(spare: dict[str, str]) -> None:
    assert (spare["TRAINKIT_NODELIST"], spare["MASTER_ADDR"]) == ("gpu04,gpu05", "gpu04")


def test_a_lost_node_is_replaced_in_the_same_job_and_left_out(run: RunDir, spare: dict[str, str]) -> None:
    Attempt(run, 0).failed(LOST_NODE, rank=1, host="gpu05.site")
    env = variables(batch_job.again(137, spare), spare)
    assert (env["TRAINKIT_NODELIST"], env["MASTER_ADDR"], env["TRAINKIT_ATTEMPT"]) == ("gpu03,gpu04", "gpu03", "1")
    assert env["TRAINKIT_SECRET"] != spare["TRAINKIT_SECRET"]
    (requeued,) = read_events(run, "requeued")
    assert (requeued["attempt"], requeued["in_place"], requeued["spare_nodes"]) == (0, True, 0)
    assert [(event["node"], event["why"]) for event in read_events(run, "excluded")] == [("gpu05", "it did not answer")]
    Attempt(run, 1).saved(5)
    Attempt(run, 1).failed(LOST_NODE, rank=1, host="gpu04")
    assert batch_job.again(137, env) == "", "there is no further node"


@pytest.mark.parametrize(
    ("queue", "sinfo", "error", "nodes"),
    [
        ("RUNNING||||gpu[03-05]", "idle", "killed by SIGKILL", "gpu04,gpu05"),  # of which nobody is to blame
        ("RUNNING||||gpu[03-05]|N/A", "idle", "killed by SIGKILL", "gpu04,gpu05"),  # without a limit
        ("RUNNING||||gpu[03-05]|3020-01-01T00:00:00", "idle", "killed by SIGKILL", "gpu04,gpu05"),
        ("RUNNING||||gpu[03-05]|SOON", "idle", "killed by SIGKILL", ""),  # its signal has reached nobody
        ("RUNNING||||gpu[03-04]", "down*", "killed by SIGKILL", "gpu03,gpu04"),  # SLURM has taken it away
        ("RUNNING||||gpu[04-05]", "idle", "killed by SIGKILL", ""),  # the job has lost its script
        ("COMPLETING||||gpu[03-05]", "idle", "killed by SIGKILL", ""),  # cancelled
        ("RUNNING||||gpu[03-05]", "idle", "ValueError: bad label", ""),
        ("RUNNING||||gpu[03-05]", "idle", f"{FAILED_PREFLIGHT}gpu05: disk: full", "gpu04,gpu05"),
    ],
)
def test_ranks_start_in_the_job_where_another_start_may_mend_it(
    run: RunDir, spare: dict[str, str], fake_command: FakeCommand, queue: str, sinfo: str, error: str, nodes: str
) -> None:
    run.plan.write_text('{"lead_seconds": 60}')
    queue = queue.replace("SOON", datetime.fromtimestamp(time.time() + 130).isoformat(timespec="seconds"))
    fake_command("squeue", f'case "$*" in *-s*) printf "7.0\\n7.batch\\n" ;; *) echo "{queue}" ;; esac')
    fake_command("sinfo", f"printf 'gpu03 idle\\ngpu04 idle\\ngpu05 {sinfo}\\n'")
    ended = fake_command("scancel", "exit 0")
    Attempt(run, 0).failed(error, rank=1)
    lines = batch_job.again(137, spare)
    assert (variables(lines, {}).get("TRAINKIT_NODELIST", "")) == nodes
    assert [event.get("in_place") for event in read_events(run, "requeued")] == [True] * bool(nodes)
    if nodes == "gpu04,gpu05":
        assert ended.read_text() == "--signal=KILL 7.0\n", "ranks whose srun was killed live on, the script too"


@pytest.mark.parametrize(
    ("code", "log", "why"),
    [
        (137, "", "a rank was killed by signal 9"),
        (1, "srun: error: Unable to contact slurm controller", "srun could not start the ranks: "),
    ],
)
def test_what_cannot_start_in_place_is_queued_again(
    run: RunDir, spare: dict[str, str], fake_command: FakeCommand, code: int, log: str, why: str
) -> None:
    """The failure is on record by then."""
    calls = fake_command("scontrol", "exit 0")
    fake_command("squeue", "echo 'RUNNING||||gpu[04-05]'")  # the job has lost its script
    if log:
        (run.logs / "batch.out").write_text(f"Attempt 0 on gpu[04-05]: the ranks' output\n{log}\n")
    assert batch_job.main(["end", str(code), "--in-place"], spare) == code
    assert calls.read_text().startswith("requeue 7\n")
    assert history_of(run).failures[-1].error.startswith(why)


@pytest.mark.parametrize("sent", ["TERM", "USR2"])
def test_a_signal_to_all_of_a_job_that_has_no_ranks_just_now_hands_it_back(
    run: RunDir, spare: dict[str, str], fake_command: FakeCommand, sent: str
) -> None:
    calls = fake_command("scontrol", 'case "$1" in requeue) kill -TERM "$PPID" ;; esac')
    fake_command("squeue", f"kill -{sent} $PPID; echo 'RUNNING||||gpu[03-05]'")
    Attempt(run, 0).failed("killed by SIGKILL", rank=1)
    done = python("-m", "trainkit.launch.batch_job", "end", "137", "--in-place", cwd=run.path, **spare)
    assert (done.returncode, done.stdout) == (137, "")
    assert calls.read_text().startswith("requeue 7\n")
    assert run.attempts() == [0]


@pytest.mark.parametrize("words", [(), ("--in-place",), ("--no-requeue",)])
def test_a_script_told_to_stop_without_ranks_hands_the_run_back(
    run: RunDir, spare: dict[str, str], fake_command: FakeCommand, words: tuple[str, ...]
) -> None:
    calls = fake_command("scontrol", "exit 0")
    assert batch_job.main(["end", "140", *words, "--without-ranks"], spare) == 140
    assert [event["signals"] for event in read_events(run, "handed_back")] == [["SIGUSR2"]]
    assert [event["state"] for event in read_events(run, "ended")] == ["PREEMPTED"] * ("--no-requeue" in words)
    assert calls.exists() == ("--no-requeue" not in words)
    assert not history_of(run).failures


def test_after_a_loss_a_job_waits_for_no_more_nodes_than_its_ranks_take(
    run: RunDir, spare: dict[str, str], fake_command: FakeCommand
) -> None:
    calls = fake_command("scontrol", "exit 0")
    Attempt(run, 0).failed(LOST_NODE, rank=1, host="gpu05")
    assert batch_job.end(137, spare | {"SLURM_NTASKS_PER_NODE": "4"}, how="requeue") == 137
    lines = ["requeue 7", "update job=7 NumNodes=2-3 NumTasks=8", "update job=7 ExcNodeList=gpu05"]
    assert calls.read_text().splitlines() == lines


def test_a_job_that_has_too_few_nodes_for_its_ranks_waits_for_more(run: RunDir, fake_command: FakeCommand) -> None:
    calls = fake_command("scontrol", "exit 0")
    place = {"SLURM_JOB_NODELIST": "gpu03", "SLURMD_NODENAME": "gpu03", "TRAINKIT_RANK_NODES": "2-3"}
    with pytest.raises(RunFailedError, match="queued again, for more nodes"):
        batch_job.begin(job(run, **place))
    assert calls.read_text().splitlines() == ["requeue 7", "update job=7 NumNodes=2-3 NumTasks=2"]


def test_the_script_of_a_job_does_without_the_classes_of_the_configuration() -> None:
    words = "import sys, trainkit.launch.batch_job; from trainkit.cluster.scheduler import named; named('slurm')"
    done = python("-c", f"{words}; print([name for name in sys.modules if name.startswith('pydantic')])")
    assert done.stdout == "[]\n", done.stderr


def test_one_process_begins_the_next_attempt_or_does_what_is_left_to_do(
    run: RunDir, spare: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says on stdout is for the shell: nothing where the job is over, or goes back into the queue."""
    Attempt(run, 0).failed(LOST_NODE, rank=1, host="gpu05")
    capsys.readouterr()
    assert batch_job.main(["end", "137", "--in-place"], spare) == 0
    said = capsys.readouterr().out
    assert said.startswith("umask")
    env = variables(said, spare)
    Attempt(run, 1).saved(5)
    Attempt(run, 1).failed(LOST_NODE, rank=1, host="gpu04")
    assert batch_job.main(["end", "137", "--in-place"], env) == 137
    assert capsys.readouterr().out == ""
    assert [event.get("in_place", False) for event in read_events(run, "requeued")] == [True, False]
