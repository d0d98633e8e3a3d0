import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import Command, make_run
from trainkit.common import jsonl
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/my_model.py", line 7, in forward\nValueError: bad\n'


@pytest.fixture
def queued(fake_slurm: Path, tmp_path: Path) -> RunDir:
    """A run whose job SLURM has."""
    return make_run(tmp_path / "runs" / "ddp-0001", executor="slurm", job_id="4711")


@pytest.fixture
def failed(tmp_path: Path, no_slurm: dict[str, str]) -> RunDir:
    """A local run whose rank 1 raised."""
    run = make_run(tmp_path / "runs" / "ddp-0001", executor="local", job_id="1")
    run.attempt_logs(0).mkdir()
    for rank in (0, 1):
        (run.attempt_logs(0) / f"rank-{rank}.out").write_text("")
    (run.attempt_logs(0) / "rank-1.err").write_text("a warning\n" + TRACEBACK)
    append_event(run, "failed", attempt=0, rank=1, host="n2", error="ValueError: bad")
    append_event(run, "ended", attempt=0, state="FAILED")
    return run


def test_one_cause_its_lines_and_one_command_are_said(command: Command, failed: RunDir) -> None:
    done = command("why", "ddp-0001")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "ddp-0001: FAILED (job 1). Rank 1 on n2 raised ValueError: bad, at my_model.py:7.",
        "  why: logs/0/rank-1.err:4  ValueError: bad",
        "       status               FAILED",
        f"  fix: Mend my_model.py:7: `python -m jobs.submit {failed.path}`",
    ]


def test_of_a_rank_without_a_traceback_logs_show_its_last_words(command: Command, failed: RunDir) -> None:
    failed.events.write_text(failed.events.read_text().replace("ValueError: bad", "killed by SIGKILL"))
    (failed.attempt_logs(0) / "rank-1.err").write_text("the last words\n")
    logs = command("logs", "ddp-0001").out.splitlines()
    assert logs[0].startswith("--- ddp-0001: FAILED. Rank 1 on n2 was killed (SIGKILL)")
    assert logs[1] == "the last words"


def test_an_attempt_can_be_asked_for_and_a_missing_one_is_an_error(command: Command, failed: RunDir) -> None:
    assert "raised ValueError: bad" in command("why", "ddp-0001", "--attempt", "0").out
    command("why", "ddp-0001", "--attempt", "7").refused(2, "Its attempts: 0.")
    append_event(failed, "submitted", executor="local", job_id="2")
    append_event(failed, "ended", attempt=1, state="COMPLETED")
    assert command("why", "ddp-0001").out == "ddp-0001: COMPLETED (job 2). It has finished; nothing failed.\n"


@pytest.mark.usefixtures("queued")
def test_a_job_that_waits_says_for_what(command: Command, fake_slurm: Path) -> None:
    said = command("why", "ddp-0001").out
    assert said.startswith("ddp-0001: PENDING (job 4711). Nothing is wrong: it waits for its turn (PENDING Resources).")
    assert said.splitlines()[-1] == "  fix: `squeue -j 4711 --start`"
    (fake_slurm / "squeue").write_text("#!/bin/bash\necho '4711|PENDING|Priority|0:00||2035-11-21T22:04:10'\n")
    assert "SLURM plans to start it about 2035-11-21 22:04, " in command("why", "ddp-0001").out


def test_a_job_that_was_queued_again_says_what_ended_the_attempt_before(command: Command, queued: RunDir) -> None:
    queued.attempt_logs(0).mkdir()
    (queued.logs / "batch.out").write_text("Attempt 0 on n[1-2]: ...\nsrun: error: n2: task 1: Killed\n")
    append_event(queued, "requeued", attempt=0, job_id="4711")
    lines = command("why", "ddp-0001").out.splitlines()
    assert "Nothing is wrong" in lines[0]
    assert any(line.startswith("Attempt 0 failed and was queued again. Rank 1 on n2 was killed") for line in lines)
    append_event(queued, "handed_back", attempt=0, node_rank=0, step=1, signals=["SIGUSR2"])
    assert command("why", "ddp-0001").out.endswith("\nAttempt 0 was told to stop; it saved, and the run continues.\n")


def test_of_a_job_that_runs_it_says_what_it_does_and_what_smells(
    command: Command, queued: RunDir, fake_slurm: Path
) -> None:
    (fake_slurm / "squeue").write_text("#!/bin/bash\necho '4711|RUNNING|None|10:00|n1|2026-11-21T12:00:00'\n")
    queued.attempt_logs(0).mkdir()
    then = time.time() - 700
    jsonl.append_jsonl(queued.events, {"time": then - 200, "event": "started", "attempt": 0, "total_steps": 380})
    for step in (10, 20):
        jsonl.append_jsonl(queued.metrics, {"time": then + step, "split": "train", "step": step, "epoch": step / 19})
    lines = command("why", "ddp-0001").out.splitlines()
    assert lines[0].startswith("ddp-0001: RUNNING (job 4711). It trains: step 20 of 380 (epoch 1.1), attempt 0, 1 s a")
    assert "ago. It ends about 20" in lines[0]
    assert lines[1] == "  why: metrics.jsonl  nothing for 11 min; of late 10 s passed between two records at most"
    assert "smells  metrics.jsonl  nothing for 11 min" in command("status", "ddp-0001").out


def sweep(folder: Path, *ends: tuple[str, int, int, str] | None) -> None:
    """A sweep whose runs failed as (node, rank, line of the user's code, error) say; None: one that completed."""
    folder.mkdir()
    (folder / "sweep.json").write_text("{}")
    for index, end in enumerate(ends):
        run = make_run(folder / str(index), executor="local", job_id=str(index))
        run.attempt_logs(0).mkdir()
        if end is not None:
            host, rank, line, error = end
            words = TRACEBACK.replace("line 7", f"line {line}").replace("ValueError: bad", error)
            (run.attempt_logs(0) / f"rank-{rank}.err").write_text(words if line else "")
            append_event(run, "failed", attempt=0, rank=rank, host=host, error=error)
        append_event(run, "ended", attempt=0, state="FAILED" if end else "COMPLETED")


def test_of_a_sweep_each_cause_is_said_once_and_other_errors_are_others(command: Command, failed: RunDir) -> None:
    killed = ("n1", 0, 0, "killed by SIGKILL")
    sweep(
        failed.path.parent / "odd",
        ("n1", 0, 7, "ValueError: bad"),
        ("n2", 1, 7, "ValueError: bad"),  # the same on another rank and node
        ("n1", 0, 9, "ValueError: bad"),
        ("n1", 0, 7, "ValueError: worse"),
        ("n1", 0, 7, "ModuleNotFoundError: No module named 'one'"),
        ("n1", 0, 7, "ModuleNotFoundError: No module named 'two'"),
        killed,
        None,
        killed,
    )
    said = command("why", "odd").out.splitlines()
    assert said[0] == "9 runs: 8 FAILED, 1 COMPLETED."
    assert [line[0] for line in said if ": FAILED (job " in line] == ["0", "2", "3", "4", "5", "6"]
    assert [line for line in said if "The same" in line] == ["The same: 1.", "The same: 8."]
    assert sum("Rank 0 on n1 was killed (SIGKILL)" in line for line in said) == 1


def why_with_mounts(run: RunDir, env: dict[str, str], mounts: str) -> str:
    """What `why` says where some folder is mounted otherwise; the mounts are of that process alone."""
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mounts}exec "$1" -m jobs.why "$0"', str(run.path), sys.executable],
        env={**env, "PATH": f"{env.get('PATH', '')}:/usr/bin:/bin:/usr/sbin:/sbin"},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no mounts of one's own here")
    return done.stdout


@pytest.mark.parametrize("mounts", ['mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && ', ""])
def test_a_run_whose_folder_went_read_only_is_told_so(failed: RunDir, no_slurm: dict[str, str], mounts: str) -> None:
    (failed.attempt_logs(0) / "rank-1.err").write_text("")
    events = [line for line in failed.events.read_text().splitlines() if '"failed"' not in line]
    failed.events.write_text("\n".join(events) + "\n")
    said = why_with_mounts(failed, no_slurm, mounts)
    assert ("The run's folder cannot be written any more" in said) == bool(mounts), said


def test_a_disk_without_inodes_is_not_said_to_be_out_of_bytes(
    failed: RunDir, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    full = f"OSError: [Errno 28] No space left on device: '{disk}/x.pt'"
    (failed.attempt_logs(0) / "rank-1.err").write_text(TRACEBACK.replace("ValueError: bad", full))
    failed.events.write_text(failed.events.read_text().replace("ValueError: bad", full))
    said = why_with_mounts(failed, no_slurm, f"mount -t tmpfs -o size=1m,nr_inodes=1 tmpfs {disk} && ")
    assert f"No inodes left on the disk of {disk}: too many files" in said
    assert f"df -i {disk}" in said
