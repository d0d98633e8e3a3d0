"""Causes among several signs."""

import time

import pytest

from tests.diagnosis.runs import EXITED, TRACEBACK, diagnose
from trainkit.cluster.scheduler import JobState
from trainkit.diagnosis.causes import cause_of
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir


def test_a_progress_bar_of_a_megabyte_in_one_line_is_read_at_once(run: RunDir) -> None:
    """Patterns that begin with any words would try each of its places: for minutes."""
    bar = "".join(f" {step}%|####| {step}/9000 [00:01<00:10, 3.2it/s, loss=0.5]\r" for step in range(20000))
    begun = time.process_time()
    cause = diagnose(run, batch=f"{bar}\n{EXITED.format(1)}")
    assert cause.name == "failed"
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        ("salloc: Prolog failure on node n2\nsalloc: error: Job allocation 7 has been revoked", "boot-failure"),
        ("sbatch: error: Please name a project\nsbatch: error: Batch job submission failed: Unspecified error",
         "job-refused"),
        ("Lmod has detected the following error: The following module(s) are unknown: \"conda/9\"\n"
         + TRACEBACK.format("ImportError: No module named torch"), "module-load"),
        (TRACEBACK.format("OSError: [Errno 24] Too many open files")
         + TRACEBACK.format("RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly"), "too-many-files"),
        (TRACEBACK.format("RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly"), "loader-died"),
    ],
    ids=["salloc's", "sbatch's", "of the set-up", "of a worker", "of nobody"],
)  # fmt: skip
def test_what_was_said_before_explains_an_error_that_only_follows_from_it(run: RunDir, rank: str, name: str) -> None:
    assert diagnose(run, rank=rank).name == name


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("/var/spool/slurmd/job7/slurm_script: line 12: conda: command not found", "conda-not-set-up"),
        ("/var/spool/slurmd/job7/slurm_script: line 12: module: command not found", "no-module-command"),
        ('slurmstepd: error: Munge encode failed: Failed to connect to "/run/munge/munge.socket.2"', "authentication"),
    ],
)
def test_what_a_shell_printed_counts_without_a_traceback(run: RunDir, line: str, name: str) -> None:
    assert diagnose(run, rank=line).name == name
    raised = f"{line}\n{TRACEBACK.format('ValueError: my own')}"
    assert diagnose(run, rank=raised).name == "exception", "the rank went on after it"


@pytest.mark.parametrize(
    "warning",
    [
        "Retrying in 1s [Retry 1/5]: ReadTimeout(HTTPSConnectionPool(host='a.b', port=443): Read timed out.)",
        "/bin/sh: 1: nvcc: not found",
        "UserWarning: Corrupt EXIF data. Expecting to read 4 bytes but only got 0.",
        "n2:1:2 [0] NCCL INFO nvidia-peermem not loaded, GPU Direct RDMA disabled",
        "[W socket.cpp:697] [c10d] The client socket cannot be initialized to connect to [localhost]:29500",
        "libibverbs: Warning: couldn't load driver 'libx.so': libx.so: cannot open shared object file",
        "UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    ],
)
@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited\n"
         "Last error:\nConnection closed by remote peer n3<3>", "peer-gone"),
        ("RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly", "loader-died"),
        ("RuntimeError: an odd thing", "exception"),
    ],
    ids=["another rank went", "a worker went", "unknown"],
)  # fmt: skip
def test_a_warning_of_what_went_on_is_no_cause(run: RunDir, warning: str, error: str, name: str) -> None:
    assert diagnose(run, rank=f"{warning}\n{TRACEBACK.format(error)}").name == name


def test_what_an_error_says_already_is_not_said_twice(run: RunDir) -> None:
    what, why = "train.class_weights has 2 weights, and digits has 10 classes.", "Each class has one."
    append_event(run, "failed", attempt=0, rank=1, host="n2", error=f"{what} {why}")
    cause = diagnose(run, rank=f"{what}\n  why: {why}\n  fix: Give 10.")
    assert (cause.what, cause.why) == (what, why)


def test_a_killed_rank_goes_before_those_that_missed_it(run: RunDir) -> None:
    append_event(run, "failed", attempt=0, rank=0, host="n1", error="RuntimeError: of a missed rank, unknown")
    cause = diagnose(run, batch="srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 1")
    assert cause.what.startswith("Rank 1 on n2 was killed")
    assert "srun: error: n2: task 1: Killed" in [quote.text for quote in cause.evidence]


MINE = TRACEBACK.format("ValueError: mine")


@pytest.mark.parametrize(
    ("batch", "rank", "what"),
    [
        pytest.param(
            EXITED.format(3) + f"\n{ended}\nsrun: error: n1: task 0: Killed", "",
            "failed: Exited with exit code 3 (on n2).", id=f"not what was ended after {ended[:20]}",
        )
        for ended in (
            "srun: launch/slurm: _step_signal: Terminating StepId=12883802.0",  # to 22.05
            "srun: Terminating StepId=12883802.0",
            "slurmstepd-n1: error: *** STEP 12883802.0 ON n1 CANCELLED AT 2026-11-21T19:13:27 ***",
            "[2026-11-21T21:44:30.107] error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T21:44:30 ***",  # of 25.11
        )
    ]
    + [
        pytest.param(
            EXITED.format(7) + "\nsrun: error: n1: task 0: Exited with exit code 1", "",
            "failed: Exited with exit code 7 (on n2).", id="of srun's errors the first",
        ),
        pytest.param(
            "", "CUDA out of memory at first, going on with less\nKilled 3 zombies\nall good",
            "failed: Exited with exit code 1 (on n2); its last words: all good.", id="not what a healthy run prints",
        ),
        pytest.param(
            "", "warning: out of memory, retrying\nstep 4 loss nan\nepoch 3 done",
            "failed: Exited with exit code 1 (on n2); its last words: epoch 3 done.", id="not a warning before the end",
        ),
        pytest.param(
            "srun: error: n2: task 1: Segmentation fault (core dumped)",
            TRACEBACK.format("KeyError: 'dealt with'") + "Fatal Python error: Segmentation fault\n\n"
            'Current thread 0x7f (most recent call first):\n  File "/home/me/lab/model.py", line 77 in forward\n',
            "crashed in compiled code, at model.py:77.", id="a crash, not a traceback that the rank survived",
        ),
    ],
)  # fmt: skip
def test_the_cause_of_several_signs_is(run: RunDir, batch: str, rank: str, what: str) -> None:
    assert diagnose(run, batch=batch, rank=rank).what == f"Rank 1 on n2 {what}"


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("UserWarning: CUDA initialization: The NVIDIA driver on your system is too old\n", "", "ValueError: mine"),
        ("", "[W socket.cpp:464] [c10d] The server socket has failed to bind: Address already in use",
         "ValueError: mine"),
        (TRACEBACK.format("FileNotFoundError: No such file or directory: '/data/x'")
         + "\nDuring handling of the above exception, another exception occurred:\n\n", "", "ValueError: mine"),
        ("/tmp/x/main.c:4:10: fatal error: cuda.h: No such file or directory\n", "", "ValueError: mine"),
        ("", "", "AssertionError: Permission denied was to be handled"),
        ("", "", "RuntimeError: the queue's lock is held: Resource temporarily busy"),
        ("", "", "ValueError: this batch would give CUDA out of memory: No space left on device"),
    ],
    ids=[
        *("a warning before it", "others after it", "being handled", "a tool's"),
        *("its words", "words of no row", "two causes in its words"),
    ],
)  # fmt: skip
def test_an_error_of_ones_own_code_is_the_cause_and_not(run: RunDir, before: str, after: str, error: str) -> None:
    cause = diagnose(run, rank=before + TRACEBACK.replace("main()", "raise error").format(error) + after)
    assert (cause.name, cause.fix) == ("exception", "Mend train.py:9:")
    assert f"raised {error}, at train.py:9" in cause.what


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("out = layer(images)", "gpu-out-of-memory"),
        ("if full: raise ValueError(words)", "exception"),
        ("assert not full, words", "exception"),
        ('"of the statement above")', "exception"),
    ],
    ids=["a call", "a raise", "an assert", "the end of a raise"],
)
def test_an_error_counts_as_ones_own_only_where_its_line_raises_it(run: RunDir, line: str, name: str) -> None:
    """Compiled code leaves no frame: what it raises seems to come from the line that called it."""
    traceback = TRACEBACK.replace("main()", line)
    assert diagnose(run, rank=traceback.format("ValueError: CUDA out of memory")).name == name


LIBRARY = '  File "/env/lib/python3.11/site-packages/lib/x.py", line 3, in f\n    g()\nValueError: odd'


@pytest.mark.parametrize(
    ("traceback", "fix"),
    [
        (MINE.replace("ValueError: mine", LIBRARY), "Look at train.py:9, which called this:"),
        (f"Traceback (most recent call last):\n{LIBRARY}", ""),
    ],
)
def test_an_error_inside_a_library_is_not_the_users_to_mend(run: RunDir, traceback: str, fix: str) -> None:
    assert diagnose(run, rank=traceback).fix == fix


def test_what_a_script_grumbles_of_is_no_cause_of_what_a_rank_raised(run: RunDir) -> None:
    batch = "bash: /etc/profile.d/site.sh: Permission denied\ncp: /tmp/x: No space left on device"
    assert diagnose(run, batch=batch, rank=MINE).name == "exception"
    (run.attempt_logs(0) / "rank-1.err").unlink()
    assert diagnose(run, batch=f"{batch}\n{EXITED.format(1)}").name == "disk-full", "it is all there is"


NO_GUARD = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
RuntimeError:
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase.
            if __name__ == '__main__':
                freeze_support()
Traceback (most recent call last):
  File "/home/me/lab/train.py", line 9, in <module>
    torch.multiprocessing.spawn(train, nprocs=2)
torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 1
"""


def test_a_script_is_not_told_to_submit_settings_that_it_would_be_refused(run: RunDir) -> None:
    assert diagnose(run, rank=NO_GUARD).command.endswith(" data.workers=0")
    append_event(run, "started", script=True)
    cause = diagnose(run, rank=NO_GUARD)
    assert (cause.name, cause.command) == ("no-guard", f"python -m jobs.submit {run.path}")


def test_where_no_rank_failed_the_line_of_the_batch_script_is_the_error(run: RunDir) -> None:
    said = "EnvironmentNameNotFound: Could not find conda environment: torch2"
    assert diagnose(run, batch=said).what.endswith(f": {said}.")


def test_a_failed_job_without_any_log_did_not_see_the_folder(run: RunDir) -> None:
    for log in run.attempt_logs(0).iterdir():
        log.unlink()
    run.attempt_logs(0).rmdir()
    (run.logs / "batch.out").unlink(missing_ok=True)
    found = [cause_of(run, JobState("FAILED", "4711", "slurm", "NonZeroExitCode", node)) for node in ("n2", "")]
    told = [cause.what for cause in found if cause is not None]
    assert told[0].startswith(f"n2 could not start its part of the job: it does not see {run.logs}")
    assert told[1].startswith("The job ended (FAILED NonZeroExitCode) before a rank of it said anything")


def test_a_rank_that_exited_without_a_log_did_not_see_the_folder(run: RunDir) -> None:
    """SLURM since 23.02 makes the folder there; 22.05 says "launch failed"."""
    (run.attempt_logs(0) / "rank-1.out").unlink()
    cause = diagnose(run, batch=EXITED.format(1))
    assert (cause.name, cause.command) == ("launch-failure", f"srun -N1 -n1 -w n2 ls -ld {run.logs}")
    said = "slurmstepd-n2: error: execve(): bash: No such file or directory"
    other = diagnose(run, batch=f"{said}\n{EXITED.format(2)}")
    assert other.name == "no-environment", "what SLURM says goes before what is not there"


def test_the_words_of_another_attempt_are_not_those_of_this(run: RunDir) -> None:
    run.attempt_logs(1).mkdir()
    (run.logs / "batch.out").write_text(
        "Attempt 0 on n1: ...\nsrun: error: n1: task 0: Killed\n"
        "Attempt 1 on n2: ...\nsrun: error: n2: task 0: Segmentation fault\n"
    )
    state = JobState("FAILED", "4711", "slurm")
    newest_and_first = [cause_of(run, state), cause_of(run, state, 0)]
    assert [cause.name for cause in newest_and_first if cause is not None] == ["segfault", "killed"]


def test_where_all_waited_the_rank_with_the_fewest_collectives_is_behind(run: RunDir) -> None:
    words = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)\nlast enqueued work: {}, last completed"
    (run.attempt_logs(0) / "rank-0.err").write_text(words.format(11))
    assert "rank 0 did not reach it" in diagnose(run, rank=words.format(12)).what


def test_a_spent_budget_is_no_cause_of_a_failure_but_of_saving_in_vain(run: RunDir) -> None:
    words = "not queued again: 2 restarts have not come to a checkpoint"
    append_event(run, "failed", attempt=0, rank=None, error=words)
    assert diagnose(run, batch="srun: error: n2: task 1: Killed").name == "killed"
    append_event(run, "handed_back", attempt=0, node_rank=0, step=1, signals=["SIGUSR2"])
    append_event(run, "failed", attempt=0, rank=None, error=words.replace("a checkpoint", "a new checkpoint"))
    cause = diagnose(run)
    assert (cause.name, cause.command) == ("no-progress", f"python -m jobs.resume {run.path} --time 2:00:00")


def test_a_run_that_completed_or_runs_has_no_cause(run: RunDir) -> None:
    (run.logs / "batch.out").write_text("srun: error: n2: task 1: Killed\n")
    assert cause_of(run, JobState("COMPLETED", "4711", "slurm")) is None
    assert cause_of(run, JobState("RUNNING", "4711", "slurm", "", "n[1-2]")) is None


def test_the_node_of_a_rank_is_known_without_its_word(run: RunDir) -> None:
    (run.attempt_logs(0) / "rank-1.err").write_text(TRACEBACK.format("ValueError: mine"))
    assert diagnose(run).what.startswith("Rank 1 on n2 raised")


@pytest.mark.parametrize(
    "said",
    ["FileNotFoundError: [Errno 2] No such file or directory", "ModuleNotFoundError: No module named 'jobs.cli'"],
)
def test_code_that_was_removed_as_a_run_began_is_the_cause(run: RunDir, said: str) -> None:
    run.code.symlink_to(run.path.parent / ".code" / "0123456789abcdef")
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{said}'
    for words in ({"batch": traceback}, {"rank": traceback}):
        cause = diagnose(run, **words)
        assert (cause.name, cause.command) == ("code-gone", f"python -m jobs.resume {run.path}")
    run.code.unlink()
    run.code.mkdir()
    assert diagnose(run, rank=traceback).name != "code-gone"
