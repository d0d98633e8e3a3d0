"""What `submit --fit`, `--by` and `--budget` answer before a job is queued."""

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

import trainkit
from tests.jobs.conftest import Command
from tests.runs import script
from trainkit.common.errors import UserError
from trainkit.common.jsonl import append_jsonl
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir


def test_fit_proposes_by_earlier_runs_and_queues_nothing(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    asked = ("ddp", "--gpus-per-node", "0", "--mem=64G", "-t", "60")
    command("submit", *asked, "--fit").refused(2, "Nothing is known of what ddp needs", "  why: ", "  fix: ")
    assert command("submit", *asked, "--run-dir", "runs/before").code == 0
    run = RunDir(tmp_path / "runs" / "before")
    append_event(run, "started", attempt=0, world_size=1, hosts=["n1"], device="cuda")
    for index in range(100):
        sample = {"time": time.time() + index, "process_memory_mb": 2000.0, "process_cpu_percent": 150.0}
        append_jsonl(run.hardware("n1"), sample)
    append_event(run, "ended", attempt=0, state="COMPLETED")
    run.summary.write_text('{"outcome": "finished"}')
    before = (fake_slurm / "submitted.sbatch").read_text()
    said = command("submit", *asked, "--fit", "optim.lr=1e-4").ok("the newest before:").out
    assert said.splitlines()[-1].endswith("ddp --gpus-per-node 0 optim.lr=1e-4 --time 05:00 --mem 3G")
    assert (fake_slurm / "submitted.sbatch").read_text() == before
    command("submit", "runs/before", "--fit").ok("the newest before:")
    command("submit", *asked, "--fit", "train.epochs=3").refused(2, "Nothing is known")


def test_by_says_what_would_tell_and_then_goes_on_as_asked(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    asked = ("ddp", "--gpus-per-node", "0", "-t", "60", "train.max_steps=1000")
    command("submit", *asked, "--by", "soon").refused(2, "'soon' is not a time", "  why: ", "'Friday 9:00'")
    command("submit", *asked, "--by", "2020-01-01").refused(2, "'2020-01-01' has passed")
    command("submit", *asked, "--budget", "0").refused(2, "--budget 0 is not possible")
    command("submit", *asked, "--budget", "4", "--fit").refused(2, "do not go with --fit")
    short = "A short run tells: python -m jobs.submit ddp --gpus-per-node 0 -t 60 train.max_steps=200\n"
    command("submit", *asked, "--by", "2d", "--run-dir", "runs/before").ok(short, "Submitted job 4711")
    run = RunDir(tmp_path / "runs" / "before")
    append_event(run, "started", attempt=0, world_size=1, hosts=["n1"], device="cpu", step=0)
    record = {"split": "train", "epoch": 1.0, "loss": 1.0, "lr": 0.1, "images_per_sec": 1.0}
    append_jsonl(run.metrics, {"time": time.time() + 1000, "step": 100, **record})
    start = f"{datetime.fromtimestamp(time.time() + 3600):%Y-%m-%dT%H:%M:%S}"
    says = f"echo 'sbatch: Job 1 to start at {start} using 1 processors on nodes n1 in partition main' >&2"
    script(fake_slurm / "sbatch", f'case "$*" in *--test-only*) {says};; *) echo 4711;; esac')
    waited = [f"{job}|ann|1|node=1|60|{time.time() - 9000:.0f}|{time.time() - 8990:.0f}|Unknown" for job in range(30)]
    script(fake_slurm / "sacct", "echo '" + "\n".join(waited) + "'")
    said = command("submit", *asked, "--by", "8h", "--dry-run", "--json").ok().out
    found = json.loads(said)["outlook"]
    rows = {row["nodes"]: row for row in found["rows"]}
    assert {nodes: (row["basis"], row["jobs"], row["odds"], row["parts"]) for nodes, row in rows.items()} == {
        1: ("measured", 30, 100.0, 3),
        2: ("if N times the ranks are N times as fast; not measured", 30, 100.0, 2),
    }
    assert (found["nodes"], rows[1]["start"] is None, rows[2]["start"]) == (1, False, None)
    mine = trainkit.submit("ddp", ["train.max_steps=1000"], by="8h", gpus_per_node=0, time="60", again=True)
    assert isinstance(mine, trainkit.Run)
    assert mine.outlook is not None
    assert mine.outlook.keys() == found.keys()
    same = ("nodes", "parts", "basis", "odds", "jobs", "refusal")
    assert [[row[key] for key in same] for row in mine.outlook["rows"]] == [
        [row[key] for key in same] for row in found["rows"]
    ]
    assert (mine.status, trainkit.open(mine.name).outlook) == ("PENDING", None)
    for wrong in ({"by": "soon"}, {"budget": 0.0}):
        with pytest.raises(UserError):
            trainkit.submit("ddp", ["train.max_steps=1000"], gpus_per_node=0, **wrong)
    assert rows[1]["seconds"] == pytest.approx(10_000, rel=0.01)
    assert rows[1]["hours"] == pytest.approx(10_000 / 3600, rel=0.01)
    assert (
        found["notes"][0]
        == "Odds: by 30 jobs in main in 28 days, of one user alone: the site may hide those of others."
    )
    command("submit", *asked, "--by", "1h", "--dry-run").ok()
    command("submit", *asked, "--budget", "1", "--dry-run", "--json").ok(
        "Cannot be done: it takes at least 2.78 rank-hours"
    )


def test_questions_about_a_script_go_by_its_own_words(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("")
    asked = ("my.py", "-N1", "--gpus-per-node", "0", "-t60")
    own = ("--", "--time", "5", "--by", "me", "-t3")
    command("submit", *asked, "--fit", *own).refused(2, "Nothing is known of what my needs", "with the same arguments")
    command("submit", *asked, "--by", "2d", "--run-dir", "runs/before", *own).ok("unknown until it has run once")
    run = RunDir(tmp_path / "runs" / "before")
    append_event(run, "started", attempt=0, world_size=1, hosts=["n1"], script=True, step=0)
    append_jsonl(run.hardware("n1"), {"time": time.time() + 1, "process_memory_mb": 2000.0})
    append_event(run, "ended", attempt=0, state="COMPLETED", time=time.time() + 5)
    said = command("submit", *asked, "--fit", *own).ok("the newest before:").out
    assert said.splitlines()[-1].endswith("my.py -N1 --gpus-per-node 0 --time 05:00 -- --time 5 --by me -t3")
    answer = json.loads(command("submit", *asked, "--by", "2d", "--dry-run", "--json", *own).ok().out)
    assert answer["outlook"]["rows"][0]["basis"] == "measured"
    command("submit", *asked, "--fit", "--", "--time", "6").refused(2, "with the same arguments")


def test_fit_and_estimate_are_two_questions(command: Command, fake_slurm: Path) -> None:
    command("submit", "ddp", "--fit", "--estimate").refused(2, "not allowed with")
    command("submit", "hivemind", "--join", "token", "--fit").refused(2, "--fit and --join do not go together")


def test_a_queue_that_does_not_answer_refuses_nothing(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    asked = ("ddp", "-N1", "--gpus-per-node", "0", "train.max_steps=100")
    command("submit", *asked, "--run-dir", "runs/before").ok("Submitted job 4711")
    run = RunDir(tmp_path / "runs" / "before")
    append_event(run, "started", attempt=0, world_size=1, hosts=["n1"], device="cpu", step=0)
    append_jsonl(run.metrics, {"time": time.time() + 9, "step": 100, "split": "train", "epoch": 1.0, "loss": 1.0})
    unreached = "Unable to contact slurm controller (connect failure)"
    script(fake_slurm / "sbatch", f"echo 'sbatch: error: {unreached}' >&2; exit 1")
    said = command("submit", *asked, "--by", "2d", "--dry-run").ok()
    assert f"the queue does not tell: {unreached}." in " ".join(said.err.split())
    assert "Unknown: neither the queue nor the accounts tell when it would start." in said.err
    command("submit", *asked, "--estimate").refused(4, "Nobody tells when this job would start", unreached)
