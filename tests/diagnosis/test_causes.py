from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.diagnosis.score import answers
from trainkit.cluster.slurm_jobs import JobState
from trainkit.config.loading import load, to_yaml
from trainkit.data import build_data
from trainkit.diagnosis.case import rows
from trainkit.diagnosis.causes import Cause, cause_of
from trainkit.errors import UserError
from trainkit.records.events import append_event
from trainkit.records.rundir import RunDir

RECORDED: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("recorded.yaml").read_text())
IN_THE_WILD: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("in_the_wild.yaml").read_text())
WITHOUT_TEXT = {"exception", "said-by-the-kit", "lost-connection", "no-words"}
Diagnose = Callable[..., Cause | None]


@pytest.fixture(scope="module")
def config() -> str:
    return to_yaml(load("ddp").config)


@pytest.fixture
def run(tmp_path: Path, config: str) -> RunDir:
    """A run of two ranks on n1 and n2 whose job 4711 is over."""
    made = RunDir.create(tmp_path / "runs" / "ddp-0001", config)
    made.attempt_logs(0).mkdir()
    made.plan.write_text(json.dumps({"time_limit_seconds": 3600, "world_size": 2, "ntasks_per_node": 1}))
    append_event(made, "submitted", executor="slurm", job_id="4711")
    for rank in (0, 1):
        (made.attempt_logs(0) / f"rank-{rank}.out").write_text("")
    return made


def diagnose(run: RunDir, job: str = "FAILED|NonZeroExitCode", *, batch: str = "", rank: str = "") -> Cause | None:
    (run.logs / "batch.out").write_text(f"Attempt 0 on n[1-2]: the ranks' output is in {run.logs}/0\n{batch}\n")
    if rank:
        (run.attempt_logs(0) / "rank-1.err").write_text(rank + "\n")
        if "srun: error: n2" not in batch:
            batch += "\nsrun: error: n2: task 1: Exited with exit code 1"
        (run.logs / "batch.out").write_text(f"Attempt 0 on n[1-2]: ...\n{batch}\n")
    state, _, reason = job.partition("|")
    return cause_of(run, JobState(state, "4711", "slurm", reason.replace("None", ""), "n[1-2]"))


@pytest.mark.parametrize("said", RECORDED, ids=[f"{item['cause']}-{item['from']}" for item in RECORDED])
def test_what_was_printed_is_known_for_what_it_is(run: RunDir, said: dict[str, Any]) -> None:
    cause = diagnose(
        run, said.get("job", "FAILED|NonZeroExitCode"), batch=said.get("batch", ""), rank=said.get("rank", "")
    )
    assert cause is not None
    assert (cause.name, said["says"] in cause.what) == (said["cause"], True), f"{said['says']!r} not in {cause.what!r}"
    assert said.get("command", "") in cause.command
    assert cause.evidence
    assert not re.search(r"[{}?]", cause.what + cause.command)


@pytest.mark.parametrize("said", IN_THE_WILD, ids=[f"{item['cause']}-{item['from']}" for item in IN_THE_WILD])
def test_what_users_have_met_elsewhere_is_known_for_what_it_is(run: RunDir, said: dict[str, Any]) -> None:
    cause = diagnose(
        run, said.get("job", "FAILED|NonZeroExitCode"), batch=said.get("batch", ""), rank=said.get("rank", "")
    )
    assert cause is not None
    assert cause.name == said["cause"], cause.what
    assert not re.search(r"[{}]|--exclude *$", cause.what + cause.command)


def test_what_an_error_says_already_is_not_said_twice(run: RunDir) -> None:
    what, why = "train.class_weights has 2 weights, and digits has 10 classes.", "Each class has one."
    append_event(run, "failed", attempt=0, rank=1, host="n2", error=f"{what} {why}")
    cause = diagnose(run, rank=f"{what}\n  why: {why}\n  fix: Give 10.")
    assert cause is not None
    assert (cause.what, cause.why) == (what, why)


def test_every_row_of_the_tables_has_a_recorded_text() -> None:
    known = {row.name for row in rows()}
    told = {item["cause"] for item in [*RECORDED, *IN_THE_WILD]} | {answer.name for answer in answers()}
    unrecorded = {"requeue-refused", "no-progress", "hang", "controller-gone"}  # our own words: below
    unrecorded |= {"signalled", "batch-script-killed", "run-read-only", "code-gone"}
    assert told - known == WITHOUT_TEXT
    assert known - told == unrecorded
    assert len(told) >= 25


def test_every_row_has_one_command_and_no_placeholder_for_the_user_in_it() -> None:
    assert [row.name for row in rows() if not row.command or "FOLDER" in row.command] == []


def test_a_killed_rank_goes_before_those_that_missed_it(run: RunDir) -> None:
    append_event(
        run, "failed", attempt=0, rank=0, host="n1", error="RuntimeError: words of a missed rank, nobody knows them"
    )
    cause = diagnose(run, batch="srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 1")
    assert cause is not None
    assert cause.what.startswith("Rank 1 on n2 was killed")
    assert "srun: error: n2: task 1: Killed" in [quote.text for quote in cause.evidence]


@pytest.mark.parametrize(
    "ended",
    [
        "srun: launch/slurm: _step_signal: Terminating StepId=12883802.0",  # to 22.05
        "srun: Terminating StepId=12883802.0",
        "slurmstepd-n1: error: *** STEP 12883802.0 ON n1 CANCELLED AT 2026-11-21T19:13:27 ***",
        # of 25.11
        "[2026-11-21T21:44:30.107] error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T21:44:30 DUE TO TASK FAILURE ***",
    ],
)
def test_what_srun_ended_itself_is_no_cause(run: RunDir, ended: str) -> None:
    batch = f"srun: error: n2: task 1: Exited with exit code 3\n{ended}\nsrun: error: n1: task 0: Killed"
    cause = diagnose(run, batch=batch)
    assert cause is not None
    assert cause.what == "Rank 1 on n2 failed: Exited with exit code 3 (on n2)."


def test_of_sruns_errors_the_first_is_believed(run: RunDir) -> None:
    cause = diagnose(
        run, batch="srun: error: n2: task 1: Exited with exit code 7\nsrun: error: n1: task 0: Exited with exit code 1"
    )
    assert cause is not None
    assert cause.failure is not None
    assert (cause.failure.rank, cause.failure.host) == (1, "n2")


def test_a_rank_that_exited_and_left_no_log_here_is_on_a_node_that_does_not_see_the_folder(run: RunDir) -> None:
    """SLURM since 23.02 makes the folder there; 22.05 says "launch failed"."""
    (run.attempt_logs(0) / "rank-1.out").unlink()
    cause = diagnose(run, batch="srun: error: n2: task 1: Exited with exit code 1")
    assert cause is not None
    assert (cause.name, cause.command) == ("launch-failure", f"srun -N1 -n1 -w n2 ls -ld {run.logs}")
    other = diagnose(
        run,
        batch="slurmstepd-n2: error: execve(): bash: No such file or directory\n"
        "srun: error: n2: task 1: Exited with exit code 2",
    )
    assert other is not None
    assert other.name == "no-environment", "what SLURM says goes before what is not there"


def test_a_failed_job_without_any_log_ran_on_a_node_that_does_not_see_the_folder(run: RunDir) -> None:
    for log in run.attempt_logs(0).iterdir():
        log.unlink()
    run.attempt_logs(0).rmdir()
    cause = cause_of(run, JobState("FAILED", "4711", "slurm", "NonZeroExitCode", "n2"))
    assert cause is not None
    assert cause.what.startswith(f"n2 could not start its part of the job: it does not see {run.logs}")
    on_no_node = cause_of(run, JobState("FAILED", "4711", "slurm", "NonZeroExitCode"))
    assert on_no_node is not None
    assert on_no_node.name == "no-words"


def test_the_words_of_another_attempt_are_not_those_of_this(run: RunDir) -> None:
    run.attempt_logs(1).mkdir()
    (run.logs / "batch.out").write_text(
        "Attempt 0 on n1: ...\nsrun: error: n1: task 0: Killed\n"
        "Attempt 1 on n2: ...\nsrun: error: n2: task 0: Segmentation fault\n"
    )
    state = JobState("FAILED", "4711", "slurm")
    newest, first = cause_of(run, state), cause_of(run, state, 0)
    assert newest is not None
    assert first is not None
    assert (newest.name, first.name) == ("segfault", "killed")


def test_where_all_ranks_waited_the_one_with_the_fewest_collectives_is_behind(run: RunDir) -> None:
    words = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)\nlast enqueued work: {}, last completed"
    (run.attempt_logs(0) / "rank-0.err").write_text(words.format(11))
    cause = diagnose(run, rank=words.format(12))
    assert cause is not None
    assert "rank 0 did not come to it" in cause.what


def test_a_hang_names_the_rank_that_was_waited_for(run: RunDir) -> None:
    append_event(run, "failed", attempt=0, rank=1, host="n2", error="no progress for 600 s (launch.hang_seconds)")
    cause = diagnose(run)
    assert cause is not None
    assert (cause.name, cause.what) == (
        "hang",
        "Rank 1 on n2 made no progress for 600 s and kept the others waiting: a hang.",
    )


def test_a_refused_requeue_is_the_cause_in_slurms_words(run: RunDir) -> None:
    words = "not queued again: requeue refused: Requested operation is presently disabled"
    append_event(run, "handed_back", attempt=0, node_rank=0, step=1, signals=["SIGUSR2"])
    append_event(run, "failed", attempt=0, rank=None, error=words)
    cause = diagnose(run)
    assert cause is not None
    assert cause.what.endswith("its job back into the queue: Requested operation is presently disabled.")


def test_a_spent_budget_is_no_cause_of_a_failure_but_of_saving_in_vain(run: RunDir) -> None:
    append_event(
        run, "failed", attempt=0, rank=None, error="not queued again: 2 restarts have not come to a checkpoint"
    )
    cause = diagnose(run, batch="srun: error: n2: task 1: Killed")
    assert cause is not None
    assert cause.name == "killed"
    append_event(run, "handed_back", attempt=0, node_rank=0, step=1, signals=["SIGUSR2"])
    words = "not queued again: 2 restarts have not come to a new checkpoint"
    append_event(run, "failed", attempt=0, rank=None, error=words)
    cause = diagnose(run)
    assert cause is not None
    assert (cause.name, cause.command) == ("no-progress", f"python -m jobs.resume {run.path} --time 2:00:00")


def test_a_run_that_completed_or_runs_has_no_cause(run: RunDir) -> None:
    assert diagnose(run, "COMPLETED|") is None
    assert diagnose(run, "RUNNING|", batch="srun: error: n2: task 1: Killed") is None


def test_paths_in_a_command_are_quoted(tmp_path: Path, config: str) -> None:
    run = RunDir.create(tmp_path / "my runs" / "ddp-0001", config)
    append_event(run, "submitted", executor="slurm", job_id="4711")
    cause = cause_of(run, JobState("NODE_FAIL", "4711", "slurm", "NodeDown", "n2"))
    assert cause is not None
    assert cause.command == f"python -m jobs.resume '{run.path}' --exclude n2"


def test_words_of_a_log_stay_one_word_of_a_command(run: RunDir) -> None:
    cause = diagnose(run, rank="FileNotFoundError: [Errno 2] No such file or directory: '/data/x; touch y'")
    assert cause is not None
    assert cause.command.endswith(" ls -ld '/data/x; touch y'")


@pytest.mark.parametrize("module", ["trainkit", "my_model", "utils", "torchvision_of_somebody"])
def test_nobody_is_told_to_install_a_package_that_may_be_a_strangers(run: RunDir, module: str) -> None:
    cause = diagnose(run, rank=f"ModuleNotFoundError: No module named '{module}'")
    assert cause is not None
    assert cause.name == "missing-module"
    assert "pip" not in cause.command + cause.fix


TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/lab/train.py", line 9, in <module>\n    main()\n{}\n'


@pytest.mark.parametrize(
    "rank",
    [
        "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old\n" + TRACEBACK,
        TRACEBACK + "[W socket.cpp:464] [c10d] The server socket has failed to bind: Address already in use",
        TRACEBACK.format("torch.OutOfMemoryError: CUDA out of memory") + "going on with less\n" * 50 + TRACEBACK,
        TRACEBACK.format("FileNotFoundError: No such file or directory: '/data/x'")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACEBACK,
    ],
    ids=["a warning before it", "others after it", "one that was dealt with", "one that was being handled"],
)
def test_the_error_that_ended_a_rank_is_the_cause_and_not(run: RunDir, rank: str) -> None:
    cause = diagnose(run, rank=rank.replace("{}", "ValueError: mine"))
    assert cause is not None
    assert (cause.name, "raised ValueError: mine, at train.py:9" in cause.what) == ("exception", True), cause.what


def test_what_a_healthy_run_prints_is_no_cause(run: RunDir) -> None:
    cause = diagnose(run, rank="CUDA out of memory at first, going on with less\nKilled 3 zombies\nall good")
    assert cause is not None
    assert cause.what == "Rank 1 on n2 failed: Exited with exit code 1 (on n2); its last words: all good."


def test_a_crash_goes_before_a_traceback_that_the_rank_survived(run: RunDir) -> None:
    at = 'Current thread 0x7f (most recent call first):\n  File "/home/me/lab/model.py", line 77 in forward\n'
    cause = diagnose(
        run,
        batch="srun: error: n2: task 1: Segmentation fault (core dumped)",
        rank=TRACEBACK.format("KeyError: 'dealt with'") + f"Fatal Python error: Segmentation fault\n\n{at}",
    )
    assert cause is not None
    assert cause.what == "Rank 1 on n2 crashed in compiled code, at model.py:77."


def test_of_many_ranks_the_one_that_did_not_miss_another_is_the_cause(run: RunDir) -> None:
    for rank in range(64):
        words = "ValueError: mine" if rank == 37 else "RuntimeError: [n1]:4711: Connection reset by peer"
        (run.attempt_logs(0) / f"rank-{rank}.err").write_text(TRACEBACK.format(words))
    told = [f"srun: error: n{rank // 32 + 1}: task {rank}: Exited with exit code 1" for rank in range(64)]
    cause = diagnose(run, batch="\n".join(told))
    assert cause is not None
    assert cause.what.startswith("Rank 37 on n2 raised ValueError: mine")


def test_the_node_of_a_rank_is_known_without_its_word(run: RunDir) -> None:
    (run.attempt_logs(0) / "rank-1.err").write_text(TRACEBACK.format("ValueError: mine"))
    cause = cause_of(run, JobState("FAILED", "4711", "slurm", "", "n[1-2]"))
    assert cause is not None
    assert cause.what.startswith("Rank 1 on n2 raised")


def no_splits(root: Path) -> tuple[int, int]:
    """A user's own data function, which is to return Splits."""
    return 1, 2


def test_own_code_that_is_to_be_mended_is_submitted_anew_for_the_run_keeps_its_old_code(run: RunDir) -> None:
    data = load("single", [f"data.name={__name__}:no_splits"]).config.data
    with pytest.raises(UserError, match="returned no Splits") as said:
        build_data(data)
    cause = diagnose(run, rank=str(said.value))
    assert cause is not None
    assert cause.command == f"python -m jobs.submit {run.path}"


@pytest.mark.parametrize(("asked", "given"), [("16G", " --mem 32G"), ("0", ""), (None, " --mem 0")])
def test_more_memory_is_twice_what_was_asked_for(run: RunDir, asked: str | None, given: str) -> None:
    directives = [{"name": "mem", "value": asked}] if asked is not None else []
    run.plan.write_text(json.dumps({"directives": directives}))
    cause = diagnose(run, batch="srun: error: n2: task 1: Out Of Memory")
    assert cause is not None
    assert cause.command == f"python -m jobs.resume {run.path}{given}"


def test_a_smaller_micro_batch_divides_the_ranks_share(run: RunDir) -> None:
    run.config.write_text("train:\n  global_batch_size: 50\n")  # 25 on each of two ranks
    cause = diagnose(run, rank=TRACEBACK.format("torch.OutOfMemoryError: CUDA out of memory."))
    assert cause is not None
    assert cause.command.endswith("train.micro_batch_size=5")


def test_a_node_that_the_run_asks_for_by_name_is_not_excluded_as_well(run: RunDir) -> None:
    run.plan.write_text(json.dumps({"directives": [{"name": "nodelist", "value": "n[1-2]"}]}))
    cause = diagnose(run, "NODE_FAIL|NodeDown", batch="srun: error: Node failure on n2")
    assert cause is not None
    assert (cause.command, "--nodelist" in cause.fix) == (f"python -m jobs.resume {run.path}", True)


def test_a_bench_is_not_said_to_go_on(run: RunDir) -> None:
    cause = diagnose(run, "CANCELLED|None")
    assert cause is not None
    assert "jobs.resume" in cause.advice
    (run.path / "bench.json").write_text("{}")
    cause = diagnose(run, "CANCELLED|None")
    assert cause is not None
    assert "jobs.resume" not in cause.advice
    assert f"jobs.bench --show {run.path}" in cause.advice


@pytest.mark.parametrize("reason", ["JobLaunchFailure", "exit code 0:9"])
def test_a_batch_script_that_was_killed_after_a_save_did_see_its_folder(run: RunDir, reason: str) -> None:
    """As a devcluster's squeue and sacct have it after `kill -9` of the batch script."""
    append_event(run, "started", attempt=0, hosts=["n1", "n2"], world_size=2)
    append_event(run, "handed_back", attempt=0, node_rank=0, step=1051, signals=["SIGTERM"])
    batch = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish."
    cause = diagnose(run, f"FAILED|{reason}", batch=batch)
    assert cause is not None
    assert (cause.name, cause.command) == ("batch-script-killed", f"python -m jobs.resume {run.path}")


def test_what_the_ranks_of_all_nodes_say_blames_no_node(run: RunDir) -> None:
    words = TRACEBACK.format("RuntimeError: No CUDA GPUs are available")
    cause = diagnose(run, rank=words)
    assert cause is not None
    assert cause.command.endswith(" --exclude n2"), "of one node it is told"
    (run.attempt_logs(0) / "rank-0.err").write_text(words)
    cause = diagnose(run, rank=words)
    assert cause is not None
    assert (cause.name, cause.command) == ("cuda-sees-none", f"python -m jobs.resume {run.path}")
    assert cause.fix.startswith("Every node of the job says so")


@pytest.mark.parametrize(("lr", "advised"), [("4.0e-3", "0.002"), ("1.0e+9", "0.002"), ("0.4", "0.2")])
def test_a_learning_rate_that_nothing_trains_with_is_not_halved(run: RunDir, lr: str, advised: str) -> None:
    run.config.write_text(f"optim:\n  lr: {lr}\n")
    cause = diagnose(run, rank=TRACEBACK.format("FloatingPointError: the loss is nan"))
    assert cause is not None
    assert f" optim.lr={advised} " in cause.command


@pytest.mark.parametrize(
    ("error", "place"),
    [
        ("OSError: [Errno 122] Disk quota exceeded: '{home}/.cache/matplotlib/f.json'", "{home}/.cache/matplotlib"),
        ("OSError: [Errno 28] No space left on device: '/tmp/torchinductor_me/x.cpp'", "/tmp/torchinductor_me"),
        ("PermissionError: [Errno 13] Permission denied: '/data/imagenet'", "/data/imagenet"),
        ("OSError: [Errno 28] No space left on device", "{run}"),
    ],
    ids=["a cache", "the node's disk", "the data", "nothing"],
)
def test_the_fix_looks_where_the_message_points(run: RunDir, error: str, place: str) -> None:
    known = {"home": str(Path.home()), "run": str(run.path.parent)}
    cause = diagnose(run, rank=TRACEBACK.format(error.format(**known)))
    assert cause is not None
    assert re.search(rf"{re.escape(place.format(**known))}(/f\.json)?($|;| )", cause.command), cause.command


def test_a_host_that_is_not_found_is_looked_up_by_the_name_in_the_message(run: RunDir) -> None:
    cause = diagnose(run, rank="ssh: Could not resolve hostname licence7: Name or service not known")
    assert cause is not None
    assert cause.command == "srun -N1 -n1 -w n2 getent hosts licence7"


def test_an_error_inside_a_library_is_not_the_users_to_mend(run: RunDir) -> None:
    inside = '  File "/env/lib/python3.11/site-packages/lib/x.py", line 3, in f\n    g()\nValueError: odd'
    cause = diagnose(run, rank=TRACEBACK.format("g()").replace("\ng()\n", f"\n{inside}\n"))
    assert cause is not None
    assert cause.fix == "Look at train.py:9, which called this:"
    cause = diagnose(run, rank=f"Traceback (most recent call last):\n{inside}")
    assert cause is not None
    assert cause.fix == ""


def test_the_second_error_of_other_ranks_is_not_the_cause(run: RunDir) -> None:
    """Rank 1 runs out of memory; rank 0 only learns of it, says so first, and louder."""
    lost = (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error"
    )
    (run.attempt_logs(0) / "rank-0.err").write_text(TRACEBACK.format(lost) + "ncclRemoteError: NCCL WARN NET/IB\n" * 30)
    batch = "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Exited with exit code 1"
    cause = diagnose(run, batch=batch, rank=TRACEBACK.format("torch.OutOfMemoryError: CUDA out of memory."))
    assert cause is not None
    assert (cause.name, cause.what) == ("gpu-out-of-memory", "Rank 1 on n2 ran out of GPU memory.")


def test_a_log_of_200_mb_in_colour_is_read_from_its_end(run: RunDir) -> None:
    log = run.attempt_logs(0) / "rank-1.err"
    with log.open("w") as file:
        file.write("\x1b[31mCUDA out of memory\x1b[0m, going on with less\n")
        file.truncate(200 << 20)
        file.seek(0, os.SEEK_END)
        file.write("\n\x1b[1;31m" + TRACEBACK.format("\x1b[1;31msqlite3.OperationalError\x1b[0m: database is locked"))
    began = time.monotonic()
    cause = diagnose(run, batch="srun: error: n2: task 1: Exited with exit code 1")
    assert cause is not None
    assert cause.name == "locked-database"
    assert time.monotonic() - began < 5


def test_kernels_that_a_compiler_refuses_are_told_by_the_compilers_words(run: RunDir) -> None:
    raised = TRACEBACK.format(
        "subprocess.CalledProcessError: Command '['gcc', 'main.c']' returned non-zero exit status 1."
    )
    told = "/tmp/x/main.c:4:10: fatal error: cuda.h: No such file or directory\ncompilation terminated.\n"
    cause = diagnose(run, rank=told + raised)
    assert cause is not None
    assert (cause.name, "n2 lacks cuda.h" in cause.what) == ("headers-missing", True)
    dealt_with = diagnose(run, rank=told + TRACEBACK.format("ValueError: mine"))
    assert dealt_with is not None
    assert dealt_with.name == "exception"


def test_what_a_script_grumbles_of_is_no_cause_of_what_a_rank_raised(run: RunDir) -> None:
    batch = "bash: /etc/profile.d/site.sh: Permission denied\ncp: /tmp/x: No space left on device"
    cause = diagnose(run, batch=batch, rank=TRACEBACK.format("ValueError: mine"))
    assert cause is not None
    assert cause.name == "exception"
    (run.attempt_logs(0) / "rank-1.err").unlink()
    cause = diagnose(run, batch=f"{batch}\nsrun: error: n2: task 1: Exited with exit code 1")
    assert cause is not None
    assert cause.name == "disk-full", "where no rank has said anything, it is all there is"


@pytest.mark.parametrize(
    ("batch", "rank", "name"),
    [
        ("run.sh: Zeile 40: torchrun: Kommando nicht gefunden.\nsrun: error: n2: task 1: Exited with exit code 127", "",
         "program-missing"),
        ("", "/tmp/x/main.c:4:10: schwerwiegender Fehler: Python.h: Datei oder Verzeichnis nicht gefunden\n"
         + TRACEBACK.format("subprocess.CalledProcessError: Command 'gcc' returned non-zero exit status 1."),
         "headers-missing"),
        ("", TRACEBACK.format("OSError: [Errno 28] Kein Platz auf dem Ger\u00e4t: '/data/x'"), "disk-full"),
        ("", TRACEBACK.format("OSError: [Errno 122] Plattenkontingent \u00fcberschritten: '/data/x'"), "quota-full"),
        ("", TRACEBACK.format("PermissionError: [Errno 13] Keine Berechtigung: '/data/x'"), "permission"),
        ("", TRACEBACK.format("OSError: [Errno 116] Veralteter Dateizugriff: '/data/x'"), "stale-file"),
    ],
    ids=["bash", "gcc", "disk", "quota", "permission", "stale"],
)  # fmt: skip
def test_messages_of_another_language_are_known_by_their_numbers(run: RunDir, batch: str, rank: str, name: str) -> None:
    cause = diagnose(run, batch=batch, rank=rank)
    assert cause is not None
    assert cause.name == name, cause.what


@pytest.mark.parametrize(
    "error",
    [
        "KeyError: 'No space left on device'",
        "AssertionError: Permission denied was to be handled",
        "ValueError: this batch would give CUDA out of memory",
        "RuntimeError: the queue's lock is held: Resource temporarily busy",
    ],
)
def test_an_error_of_ones_own_code_that_mentions_a_cause_is_none(run: RunDir, error: str) -> None:
    cause = diagnose(run, rank=TRACEBACK.format(error))
    assert cause is not None
    assert (cause.name, cause.fix) == ("exception", "Mend train.py:9:")


def test_a_warning_about_memory_in_a_run_that_then_ends_otherwise_is_no_cause(run: RunDir) -> None:
    cause = diagnose(run, rank="warning: out of memory, retrying\nstep 4 loss nan\nepoch 3 done")
    assert cause is not None
    assert cause.name == "failed"


def test_of_a_job_of_this_machine_slurm_is_not_asked(run: RunDir) -> None:
    cause = cause_of(run, JobState("PENDING", "4711", "local", "waits"))
    assert cause is not None
    assert cause.name == "waits"
    assert cause.command == f"python -m jobs.status {run.path}"


@pytest.mark.parametrize(
    "said",
    ["FileNotFoundError: [Errno 2] No such file or directory", "ModuleNotFoundError: No module named 'jobs.cli'"],
)
def test_code_that_was_removed_as_a_run_began_is_the_cause(run: RunDir, said: str) -> None:
    run.code.symlink_to(run.path.parent / ".code" / "0123456789abcdef")
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{said}'
    for words in ({"batch": traceback}, {"rank": traceback}):
        cause = diagnose(run, **words)
        assert cause is not None
        assert (cause.name, cause.command) == ("code-gone", f"python -m jobs.resume {run.path}")
    run.code.unlink()
    run.code.mkdir()
    cause = diagnose(run, rank=traceback)
    assert cause is None or cause.name != "code-gone"
