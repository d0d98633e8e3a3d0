"""What ranks leave in their stderr, seldom as tidy as in a book; and what the records of a running job show."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainkit import fileio
from trainkit.config.loading import load, to_yaml
from trainkit.diagnosis.evidence import Failure, RankLog, course_of, failure_of
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

TRACEBACK = """\
some warning
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: {}
and some words after it
"""


@pytest.fixture
def failed_run(tmp_path: Path) -> RunDir:
    """A run whose second attempt is over."""
    run_dir = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    for attempt in (0, 1):
        run_dir.attempt_logs(attempt).mkdir()
    return run_dir


def first_failure(run: RunDir, attempt: int = 1) -> Failure:
    failure = failure_of(run, attempt)
    assert failure is not None
    return failure


def err(run: RunDir, attempt: int, rank: int, text: str, when: float) -> None:
    path = run.attempt_logs(attempt) / f"rank-{rank}.err"
    path.write_text(text)
    os.utime(path, (when, when))


def test_the_first_rank_that_said_it_failed_is_the_one(failed_run: RunDir) -> None:
    append_event(failed_run, "failed", attempt=0, rank=3, error="of an earlier attempt")
    append_event(failed_run, "failed", attempt=1, rank=2, error="ValueError: bad")
    append_event(failed_run, "failed", attempt=1, rank=0, error="connection closed by peer")
    err(failed_run, 1, 2, TRACEBACK.format("bad"), 20)
    failure = first_failure(failed_run)
    assert (failure.rank, failure.error) == (2, "ValueError: bad")
    assert failure.traceback[0].startswith("Traceback")
    assert failure.traceback[-1] == "ValueError: bad"
    assert first_failure(failed_run, 0).rank == 3


def test_without_events_the_oldest_traceback_is_the_one(failed_run: RunDir) -> None:
    err(failed_run, 1, 0, TRACEBACK.format("peer is gone"), 30)
    err(failed_run, 1, 1, TRACEBACK.format("the cause"), 20)
    err(failed_run, 1, 2, "no traceback here\n", 10)
    failure = first_failure(failed_run)
    assert (failure.rank, failure.error) == (1, "ValueError: the cause")


def test_a_rank_ended_with_the_step_is_the_one_where_others_only_miss_one(failed_run: RunDir) -> None:
    err(failed_run, 1, 1, TRACEBACK.format("Connection reset by peer"), 10)
    (failed_run.logs / "batch.out").write_text("srun: Terminating StepId=7.0\nsrun: error: n1: task 0: Killed\n")
    assert first_failure(failed_run).rank == 0
    err(failed_run, 1, 1, TRACEBACK.format("the cause"), 10)
    assert first_failure(failed_run).rank == 1


def test_a_run_that_says_nothing_of_a_failure_has_none(failed_run: RunDir) -> None:
    assert failure_of(failed_run, 1) is None


RAISED = """\
Traceback (most recent call last):
  File "/home/me/lab/train.py", line 9, in <module>
    main()
{}
"""
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLED = "\nDuring handling of the above exception, another exception occurred:\n\n"
LOADER = """\
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/home/me/lab/data.py", line 44, in __getitem__
    raise ValueError("bad image 7")
ValueError: bad image 7
"""
KEY = "KeyError: 'x'"
ABORTED = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: bad\nframe #0"
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 2, in <module>
  |     raise ExceptionGroup('two', [error, KeyError('x')]) from None
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 1, in <module>
    |     1 / 0
    | ZeroDivisionError: division by zero
    +---------------- 2 ----------------
    | KeyError: 'x'
    +------------------------------------
"""
BAR = "  0%|          | 0/10 [00:00<?, ?it/s]\r 10%|#         | 1/10 [00:01<00:09, 1.0s/it]"
NOISE = (
    "[W1106 12:00:00.000000000 socket.cpp:464] [c10d] The server socket has failed to bind: Address already in use\n"
)


UNRAISED = f"""\
{RAISED.format("KeyError: 'dealt with'")}
going on
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 2, in <module>
  |     raise ExceptionGroup('two', [ValueError('a'), KeyError('x')])
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +---------------- 2 ----------------
    | KeyError: 'x'
    +------------------------------------
"""


@pytest.fixture
def stderr(tmp_path: Path) -> Path:
    return tmp_path / "rank-1.err"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param(BAR + RAISED.format(KEY), KEY, id="behind a progress bar"),
        pytest.param(RAISED.replace("\n", "\x1b[0m\n\x1b[31m").format(KEY), KEY, id="in colours"),
        pytest.param(RAISED.replace("\n", "\n[default1]:").format(KEY), KEY, id="torchrun --tee"),
        pytest.param("[rank1]: " + RAISED.replace("\n", "\n[rank1]: ").format(KEY), KEY, id="torch's prefix"),
        pytest.param(RAISED.format(LOADER), "ValueError: bad image 7", id="of a loader's worker"),
        pytest.param(RAISED.format(KEY) + NOISE * 20, KEY, id="with others after it"),
        pytest.param(GROUP, "ZeroDivisionError: division by zero", id="the first of a group"),
        pytest.param(UNRAISED, "ExceptionGroup: two (2 sub-exceptions)", id="a group of errors that nobody raised"),
        pytest.param(ABORTED, "CUDA error: bad", id="as C++ aborts"),
        pytest.param(
            RAISED.format(KEY) + "It wrote Traceback (most recent call last)\n", KEY, id="with a heading in a line"
        ),
    ],
)
def test_the_error_is_found(stderr: Path, text: str, error: str) -> None:
    stderr.write_text("some warning\n" + text)
    log = RankLog(stderr)
    assert log.error == error
    assert log.traceback is None or NOISE not in log.traceback.message, "others' words are no part of it"


def test_bytes_that_are_no_text_hide_nothing(stderr: Path) -> None:
    stderr.write_bytes(os.urandom(10_000) + b"\n" + RAISED.format("KeyError: 'x'").encode() + os.urandom(1000))
    assert RankLog(stderr).error == "KeyError: 'x'"


def test_a_traceback_cut_off_is_none_and_an_older_one_ended_no_rank(stderr: Path) -> None:
    stderr.write_text(RAISED.format("KeyError: 'dealt with'") + RAISED[:70])
    assert RankLog(stderr).traceback is None


@pytest.mark.parametrize(("words", "caused"), [(CAUSE, True), (HANDLED, False)], ids=["raised from", "being handled"])
def test_an_error_is_caused_by_what_it_was_raised_from(stderr: Path, words: str, caused: bool) -> None:
    stderr.write_text(RAISED.format("OSError: disk") + words + RAISED.format("RuntimeError: not saved"))
    found = RankLog(stderr).traceback
    assert found is not None
    assert (found.error, found.first, "OSError" in found.causes) == ("RuntimeError: not saved", "OSError: disk", caused)


def test_a_crash_in_compiled_code_is_known_from_faulthandler(stderr: Path) -> None:
    with stderr.open("w") as file:
        subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", "import os; os.kill(os.getpid(), 11)"],
            stderr=file,
            check=False,
        )
    assert RankLog(stderr).crash[0] == "Segmentation fault"
    assert 'File "<string>", line 1' in "\n".join(RankLog(stderr).crash)


def test_of_an_endless_log_only_the_end_is_read(stderr: Path) -> None:
    with stderr.open("wb") as file:
        file.truncate(1 << 36)  # takes no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + RAISED.format("KeyError: 'x'").encode())
    log = RankLog(stderr)
    assert (log.error, log.tail[-1]) == ("KeyError: 'x'", (0, "KeyError: 'x'"))


NOW = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def training(tmp_path: Path) -> RunDir:
    """Its second attempt began ten minutes ago on two nodes, and has made a step every two seconds until now."""
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    for attempt in (0, 1):
        run.attempt_logs(attempt).mkdir()
    began(run, 600, hosts=["n1", "n2"])
    for step in range(1, 31):
        record(run, 60 - 2 * step, step)
    return run


def began(run: RunDir, ago: float, attempt: int = 1, **facts: Any) -> None:
    event = {"time": NOW - ago, "event": "started", "attempt": attempt, "total_steps": 330, **facts}
    fileio.append_jsonl(run.events, event)


def record(run: RunDir, ago: float, step: int) -> None:
    written = {"time": NOW - ago, "split": "train", "step": step, "epoch": step / 10, "loss": 1.0}
    fileio.append_jsonl(run.metrics, written)


def sample(run: RunDir, host: str, ago: float, *used: float) -> None:
    gpus = {"gpus": [{"index": index, "util_percent": value} for index, value in enumerate(used)]} if used else {}
    fileio.append_jsonl(run.hardware(host), {"time": NOW - ago, "cpu_percent": 50.0, **gpus})


def test_it_says_what_it_does_and_at_what_pace(training: RunDir) -> None:
    words = "It trains: step 30 of 330 (epoch 3.0), attempt 1, 2 s a step, the last record 3 s ago."
    assert str(course_of(training, NOW + 3)) == words
    assert str(course_of(training, NOW + 3, ends="It ends soon.")) == f"{words} It ends soon."


def test_what_an_earlier_attempt_did_is_not_taken_for_this_ones_work(training: RunDir) -> None:
    began(training, -1)
    assert str(course_of(training, NOW + 41)) == "Attempt 1 began 40 s ago; no step of it is recorded yet."
    training.attempt_logs(2).mkdir()
    assert str(course_of(training, NOW)) == "Its ranks start, and have not met yet."


def test_records_that_do_not_come_any_more_smell(training: RunDir) -> None:
    assert "why" not in str(course_of(training, NOW + 59))
    lines = str(course_of(training, NOW + 300)).splitlines()
    assert lines[1] == "  why: metrics.jsonl  nothing for 5 min; of late 2 s passed between two records at most"
    assert lines[2] == f"  fix: See what its ranks do: `python -m jobs.logs {training.path} --rank all`"


def test_a_long_validation_is_no_silence(training: RunDir) -> None:
    record(training, -200, 31)
    assert course_of(training, NOW + 1000).smells == ()


def test_an_attempt_without_a_first_step_smells_after_ten_minutes(training: RunDir) -> None:
    began(training, -1)
    assert course_of(training, NOW + 600).smells == ()
    assert "no step in the 11 min since the attempt began" in str(course_of(training, NOW + 661))
    record(training, -1, 1)
    assert course_of(training, NOW + 600).smells == (), "how long a step takes nobody knows yet"
    assert "nothing for 11 min" in str(course_of(training, NOW + 661))


def test_gpus_that_do_nothing_are_named(training: RunDir) -> None:
    for ago in range(30, -1, -5):
        sample(training, "n1", ago, 97.0, 0.0, 0.0)
        sample(training, "n2", ago, 97.0, 97.0 if ago == 10 else 0.0, 40.0)
    (smell,) = course_of(training, NOW).smells
    assert smell.where == "system-n1.jsonl"
    assert smell.text == "GPUs 1, 2 of n1 idle for 25 s: the ranks wait, for data or for others"


def test_a_node_that_says_nothing_any_more_is_named(training: RunDir) -> None:
    sample(training, "n1", 2)
    sample(training, "n2", 240)
    (smell,) = course_of(training, NOW).smells
    assert smell.text == "nothing from n2 for 4 min: the node or its file system hangs"


def test_records_that_nobody_could_have_written_are_passed_over(training: RunDir) -> None:
    with training.hardware("n1").open("a") as file:
        file.write(
            '[]\n{"time": "x"}\n{"time": NaN}\n' + 6 * f'{{"time": {NOW}, "gpus": [3, {{"index": "a"}}, {{}}]}}\n'
        )
    with training.metrics.open("a") as file:
        file.write('{"time": 1e300, "step": -1}\nnot JSON\n{"step"')
    assert course_of(training, NOW).smells == ()


def test_a_rank_of_this_attempt_for_which_all_others_wait_is_named(training: RunDir) -> None:
    for attempt, rank, times in ((0, 1, 9.0), (1, 3, 2.0), (1, 3, 2.5)):
        event = {"event": "straggler", "attempt": attempt, "rank": rank, "host": f"n{rank}", "times": times, "step": 9}
        fileio.append_jsonl(training.events, {"time": NOW - 300, **event})
    (smell,) = course_of(training, NOW).smells
    assert smell.text == "rank 3 on n3 needs 2.5 times as long as the others, who wait for it"
