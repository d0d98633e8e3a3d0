import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.conftest import Command, make_run
from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import named
from trainkit.monitor import log_tail
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad\n'


@pytest.fixture
def ended(tmp_path: Path, no_slurm: dict[str, str]) -> RunDir:
    """A run with two attempts of two ranks, the second of which failed."""
    run = make_run(tmp_path / "runs" / "ddp-0001", executor="local", job_id="1")
    for attempt in (0, 1):
        run.attempt_logs(attempt).mkdir()
        for rank in (0, 1):
            (run.attempt_logs(attempt) / f"rank-{rank}.out").write_text(f"words of rank {rank}, attempt {attempt}\n")
            (run.attempt_logs(attempt) / f"rank-{rank}.err").write_text(TRACEBACK if rank == 1 else "a warning\n")
    append_event(run, "failed", attempt=1, rank=1, error="ValueError: bad")
    append_event(run, "ended", state="FAILED")
    return run


def test_an_attempt_whose_ranks_have_not_opened_their_logs_is_no_mistake(command: Command, ended: RunDir) -> None:
    ended.attempt_logs(2).mkdir()
    done = command("logs", "ddp-0001").ok("no rank has started")
    assert "words of rank" not in done.out, "those are of the attempt before"


def test_ranks_an_attempt_and_stderr_can_be_asked_for(command: Command, ended: RunDir) -> None:
    assert command("logs", "ddp-0001", "--rank", "1", "--attempt", "0").out == "words of rank 1, attempt 0\n"
    assert command("logs", "ddp-0001", "--err").out == "a warning\n"
    done = command("logs", "ddp-0001", "--rank", "all", "--attempt", "0")
    assert done.out == "[rank 0] words of rank 0, attempt 0\n[rank 1] words of rank 1, attempt 0\n"
    for rank in (2, 3, 10):
        (ended.attempt_logs(1) / f"rank-{rank}.out").write_text(f"words of rank {rank}\n")
    done = command("logs", "ddp-0001", "--rank", "1-3,10")
    assert [line.split("]")[0] for line in done.out.splitlines()] == ["[rank  1", "[rank  2", "[rank  3", "[rank 10"]


def test_lines_can_be_searched_for(command: Command, ended: RunDir) -> None:
    (ended.attempt_logs(1) / "rank-1.out").write_text("epoch 1 loss 2.5\nepoch 2 loss nan\nepoch 3 loss nan")
    done = command("logs", "ddp-0001", "--rank", "all", "--grep", r"loss (nan|inf)")
    assert done.out == "[rank 1] epoch 2 loss nan\n[rank 1] epoch 3 loss nan\n", "also one without its end"
    assert command("logs", "ddp-0001", "--grep", "nan").out == "", "rank 0 has said nothing of that"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--attempt", "7"), "Its attempts: 0, 1."),
        (("--rank", "9"), "There are ranks 0, 1."),
        (("--rank", "0,9"), "has no rank 9 in attempt 1"),
        (("--rank", "3-1"), "names no ranks"),
        (("--grep", "("), r"--grep '\('"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    command: Command, ended: RunDir, arguments: tuple[str, ...], words: str
) -> None:
    done = command("logs", "ddp-0001", *arguments).refused(2, words)
    assert done.out == ""


def test_before_the_start_it_says_what_the_job_waits_for(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "ddp-0001", executor="slurm", job_id="4711")
    done = command("logs", "ddp-0001")
    assert (done.code, done.out) == (0, "ddp-0001: PENDING (Resources); no rank has started.\n")


@pytest.mark.nightly
def test_following_goes_across_attempts_and_ends_with_the_job(
    no_slurm: dict[str, str],
    local_run: Callable[..., tuple[RunDir, Plan]],
    rank_function: Callable[[str], Callable[[str], str]],
    tmp_path: Path,
) -> None:
    body = """
    from trainkit.run.events import Attempt
    from trainkit.run.folder import RunDir
    attempt = os.environ['TRAINKIT_ATTEMPT']
    print(f'attempt {attempt} begins', flush=True)
    time.sleep(1)
    print(f'attempt {attempt} ends', flush=True)
    if attempt == '0': Attempt(RunDir(run), 0).handed_back(node_rank=0, step=1, signals=[])
    """
    run, plan = local_run()
    function = rank_function("\n".join(line.strip() for line in body.splitlines()))
    named(plan.executor).submit(run.path, [run], plan, function, cwd=tmp_path, env=dict(os.environ))
    began = time.monotonic()
    logs = [sys.executable, "-m", "jobs.logs", str(run.path), "-f"]
    done = subprocess.run(logs, env=no_slurm, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stdout.splitlines() if "attempt" in line]
    assert lines == ["attempt 0 begins", "attempt 0 ends", "--- attempt 1", "attempt 1 begins", "attempt 1 ends"]
    assert (done.returncode, time.monotonic() - began < 30) == (0, True)


def test_a_reader_who_has_read_enough_is_no_fault_of_the_logs(no_slurm: dict[str, str], ended: RunDir) -> None:
    (ended.attempt_logs(1) / "rank-0.out").write_text("much to read\n" * 20_000)
    command = [sys.executable, "-m", "jobs.logs", str(ended.path), "--rank", "all"]
    with subprocess.Popen(command, env=no_slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        assert done.stdout.readline() == "[rank 0] much to read\n"
        done.stdout.close()  # as `head` does
        assert (done.stderr.read(), done.wait(60)) == ("", 0)


@pytest.mark.parametrize("flags", [(), ("-f",)])
def test_a_log_that_holds_nothing_but_holes_has_an_end(
    command: Command, ended: RunDir, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "_LONGEST_LOG", 1 << 20)
    with (ended.attempt_logs(1) / "rank-0.out").open("wb") as log:
        log.truncate(300 << 30)
        log.write(b"the end")
    out = command("logs", "ddp-0001", *flags).out
    assert f"--- left out: {(300 << 30) - (1 << 20):,} bytes of rank-0.out" in out
    assert out.count("\0") == 1 << 20


def test_a_log_that_has_become_shorter_is_not_read_again(tmp_path: Path) -> None:
    log = log_tail.LogTail(tmp_path / "rank-0.out")
    log.path.write_text("words of its first life\n")
    assert "".join(log.new()) == "words of its first life\n"
    log.path.write_text("anew\n")
    assert "".join(log.new()) == ""
