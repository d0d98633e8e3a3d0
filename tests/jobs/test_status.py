import json
import os
import re
import time
from pathlib import Path

import pytest

from jobs.status import ASK_SECONDS, LOOK_SECONDS
from tests.jobs.conftest import NO_ANSWER, Command, make_run
from tests.runs import script
from trainkit.cluster import job_states
from trainkit.common import jsonl, terminal
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import ProcessId

pytestmark = pytest.mark.usefixtures("no_slurm")


@pytest.fixture
def listed(tmp_path: Path) -> RunDir:
    """A run whose job is 4711 of SLURM."""
    return make_run(tmp_path / "runs" / "ddp-0001", executor="slurm", job_id="4711")


@pytest.fixture
def mine(tmp_path: Path) -> RunDir:
    """A local run, which this very process trains."""
    me = ProcessId.of(os.getpid())
    return make_run(tmp_path / "runs" / "ddp-0001", executor="local", job_id=str(me.pid), **me.fields())


def calls(fake_slurm: Path) -> int:
    """How often SLURM was asked."""
    return len((fake_slurm / "calls").read_text().split())


def test_without_runs_it_says_how_to_start_one(command: Command) -> None:
    assert "python -m jobs.submit ddp" in command("status").out
    assert json.loads(command("status", "--json").out) == []


def test_a_run_is_listed_with_state_progress_and_accuracy(command: Command, mine: RunDir) -> None:
    mine.attempt_logs(0).mkdir()
    append_event(mine, "started", attempt=0, total_steps=380)
    jsonl.append_jsonl(mine.metrics, {"split": "val", "step": 19, "epoch": 1.0, "acc1": 55.39})
    jsonl.append_jsonl(mine.metrics, {"split": "train", "step": 30, "epoch": 1.58, "acc1": 47.5})
    header, line = command("status").ok().out.splitlines()
    assert header.split()[:3] == ["run", "state", "job"]
    assert line.split()[:8] == ["ddp-0001", "RUNNING", str(os.getpid()), "1", "30/380", "1.6", "acc1", "55.39"]


def test_a_run_of_another_folder_is_listed_by_its_path_and_shown_by_its_name(command: Command, tmp_path: Path) -> None:
    """With its history: of checkpoints in a row the last is shown."""
    far = ProcessId("far", 1, "1").fields()
    run = make_run(tmp_path / "elsewhere" / "mine-0004", executor="local", job_id="1", **far)
    run.summary.write_text(json.dumps({"advice": "62% data wait: data.workers=4"}))
    for attempt, step in ((0, 1), (0, 2), (1, 3)):
        append_event(run, "saved", attempt=attempt, step=step)
    assert str(run.path) in command("status").out
    done = command("status", "mine-0004").ok(f"folder  {run.path}", "it runs on far; ask there")
    assert "faster  62% data wait: data.workers=4" in done.out
    assert re.findall(r"saved      attempt=(\d) step=(\d)", done.out) == [("0", "2"), ("1", "3")]


@pytest.mark.parametrize("how", ["pruned", "stopped_early"])
def test_a_run_that_has_ended_early_says_how(command: Command, tmp_path: Path, how: str) -> None:
    run = make_run(tmp_path / "runs" / "ddp-0001", executor="local", job_id="1")
    append_event(run, "started", attempt=0, total_steps=57)
    append_event(run, how, attempt=0, step=19)
    append_event(run, "ended", attempt=0, state="COMPLETED")
    run.summary.write_text(json.dumps({"stopped_early": "it was behind"}))
    assert command("status").ok().out.splitlines()[-1].endswith(f"  {how.replace('_', ' ')}: it was behind")


def test_only_the_newest_runs_are_listed_unless_asked(command: Command, tmp_path: Path) -> None:
    for index in range(22):
        run = make_run(tmp_path / "runs" / f"ddp-{index:04}")
        os.utime(run.config, (time.time() - 1000 + index,) * 2)
    assert "ddp-0000" not in command("status").ok("2 older runs are not shown", "ddp-0021").out
    command("status", "--all").ok("ddp-0000")


@pytest.fixture
def running(mine: RunDir) -> RunDir:
    """The same, which has made a step a second, twenty of 380."""
    for attempt in (0, 1):
        mine.attempt_logs(attempt).mkdir()
    now = time.time()
    jsonl.append_jsonl(mine.events, {"time": now - 60, "event": "started", "attempt": 1, "total_steps": 380})
    for step in range(1, 21):
        jsonl.append_jsonl(mine.metrics, {"time": now - 20 + step, "split": "train", "step": step, "epoch": step / 19})
    return mine


def test_programs_are_told_everything(command: Command, running: RunDir) -> None:
    val = {"time": time.time(), "split": "val", "step": 20, "epoch": 1.1, "acc1": 55.4, "loss": 2.0}
    jsonl.append_jsonl(running.metrics, val)
    (told,) = json.loads(command("status", "--json").out)
    assert (told["run"], told["folder"]) == ("ddp-0001", str(running.path))
    assert (told["state"], told["alive"]) == ("RUNNING", "yes")
    assert (told["attempts"], told["step"], told["total_steps"]) == (2, 20, 380)
    assert (told["val"]["acc1"], told["val"]["step"]) == (55.4, 20)
    assert told["living_jobs"] == [str(os.getpid())]
    assert told["estimated_end"] == pytest.approx(time.time() + 360, abs=30), "from the pace of late"
    shown = command("status", "ddp-0001").ok("ends    about").out
    assert "  6 min  " in shown.splitlines()[1]


def test_an_estimate_counts_the_starts_that_are_still_to_come(command: Command, running: RunDir) -> None:
    """360 s of training in attempts of 100 s, the third of which has lasted for 60; each restart has cost 30 s."""
    now = time.time()
    before = []
    for begun in (now - 320, now - 190):
        before += [
            {"time": begun, "event": "started", "total_steps": 380},
            {"time": begun + 100, "event": "handed_back", "attempt": 0, "node_rank": 0, "signals": ["SIGUSR2"]},
        ]
    running.events.write_text("".join(json.dumps(event) + "\n" for event in before) + running.events.read_text())
    (told,) = json.loads(command("status", "--json").out)
    assert told["estimated_end"] == pytest.approx(now + 360 + 4 * 30, abs=30)
    assert "with 4 further starts, if each takes 30 s as before" in command("status", "ddp-0001").out


def test_why_a_rank_was_refused_stands_in_its_row_too(command: Command, listed: RunDir) -> None:
    """Ranks that are refused before they have met write no event: their own words are in their logs."""
    (listed.logs / "0").mkdir(parents=True)
    said = "train.global_batch_size=2048 is larger than the training data.\n  why: It has 1350.\n  fix: Use 1024.\n"
    (listed.logs / "0" / "rank-0.err").write_text(said)
    (listed.logs / "batch.out").write_text("srun: error: n1: task 0: Exited with exit code 2\n")
    append_event(listed, "ended", attempt=0, state="FAILED", exit_codes=[2])
    (row,) = (line for line in command("status").out.splitlines() if line.startswith("ddp-0001"))
    assert row.endswith("train.global_batch_size=2048 is larger than the training data.")


def test_a_run_that_has_diverged_says_so_in_its_row(command: Command, mine: RunDir) -> None:
    append_event(mine, "started", attempt=0, step=0, total_steps=40)
    for step, loss in ((5, 2.3), (10, None), (15, None)):
        jsonl.append_jsonl(mine.metrics, {"split": "train", "step": step, "epoch": step / 20, "loss": loss})
        append_event(mine, "nonfinite", attempt=0, step=step, loss="nan")
    assert "DIVERGED: loss nan from step 10, 3 of 15 updates skipped" in command("status").out
    jsonl.append_jsonl(mine.metrics, {"split": "train", "step": 20, "epoch": 1.0, "loss": 2.1})
    assert "DIVERGED" not in command("status").out


def test_an_earlier_job_that_lives_is_named(command: Command, fake_slurm: Path, listed: RunDir) -> None:
    append_event(listed, "submitted", executor="slurm", job_id="4712")
    script(fake_slurm / "squeue", 'for i in 4711 4712; do echo "$i|RUNNING|None|0:39|n1"; done')
    assert "job 4711 is RUNNING too" in command("status").out


@pytest.fixture
def counted(fake_slurm: Path, listed: RunDir, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLURM that counts who asks it; of its jobs 4711 is PENDING and 4712 forgotten, by squeue and sacct."""
    monkeypatch.setattr(job_states, "KEPT_SECONDS", 600.0)  # a busy machine may be slow
    for name, says in (("squeue", "echo '4711|PENDING|Resources|0:00||2035-11-21T22:04:10'"), ("sacct", "exit 1")):
        script(fake_slurm / name, f"echo x >> {fake_slurm}/calls\n{says}")
    return fake_slurm


def test_who_asks_again_within_seconds_hears_what_slurm_said_and_when(
    command: Command, counted: Path, tmp_path: Path
) -> None:
    make_run(tmp_path / "runs" / "ddp-0002", executor="slurm", job_id="4712")
    began = time.time()
    first = command("status").out.splitlines()
    assert first[1].split()[1:3] == ["PENDING", "4711"]
    assert "Resources; to start about 2035-11-21 22:04" in first[1]
    assert calls(counted) == 2
    *again, said = command("status").out.splitlines()
    assert [line.split()[:3] for line in again] == [line.split()[:3] for line in first]
    assert re.match(r"SLURM's answer is \d+ s old", said)
    (one, _) = json.loads(command("status", "--json").out)
    assert began - 1 < one["asked"] < time.time() + 1
    assert calls(counted) == 2


def test_slurm_is_asked_anew_of_what_has_happened_since_and_after_a_while(
    command: Command, counted: Path, listed: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("status")
    for kind, asked in (("saved", 1), ("cancelled", 2)):
        append_event(listed, kind, attempt=0, job_id="4711")
        command("status")
        assert calls(counted) == asked
    monkeypatch.setattr(job_states, "KEPT_SECONDS", 0.0)
    command("status")
    assert calls(counted) == 3


@pytest.mark.usefixtures("listed")
def test_what_slurm_did_not_say_is_asked_again(command: Command, fake_slurm: Path) -> None:
    squeue = (fake_slurm / "squeue").read_text()
    script(fake_slurm / "squeue", NO_ANSWER)
    assert "UNKNOWN" in command("status").out
    (fake_slurm / "squeue").write_text(squeue)
    assert "PENDING" in command("status").out


def test_watching_asks_the_scheduler_seldom_and_shows_what_changes(
    command: Command, fake_slurm: Path, listed: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = f"echo x >> {fake_slurm}/calls; echo '4711|RUNNING|None|0:01|n1'"
    script(fake_slurm / "squeue", f"{says}\nexec >&- 2>&-; sleep 0.1")  # it need not end at once
    looks: list[int] = []
    really = time.sleep

    def sleep(seconds: float) -> None:
        if seconds != LOOK_SECONDS:  # of one who waits for squeue's end
            really(seconds)
            return
        looks.append(len(looks))
        record = {"time": time.time(), "split": "train", "step": 10 * len(looks), "epoch": 0.1}
        jsonl.append_jsonl(listed.metrics, record)
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    done = command("status", "--watch")
    assert done.code == 130
    assert [line.split()[4] for line in done.out.splitlines() if line.startswith("ddp-0001")] == ["-", "10", "20", "30"]
    assert calls(fake_slurm) == 1
    assert 2 * 60 / ASK_SECONDS <= 6, "squeue and sacct, each time"


def test_watching_shows_the_header_and_the_newest_of_a_long_list() -> None:
    assert terminal.fitting("run\n1\n2\n3\n4", 3) == "run\n3\n4"
    assert terminal.fitting("run\n1\n2", 3) == "run\n1\n2"
