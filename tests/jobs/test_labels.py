"""Name, tag, note and find runs."""

import json
from pathlib import Path

import pytest

from tests.jobs.conftest import Command, make_run
from trainkit.common import jsonl
from trainkit.config.loading import load
from trainkit.monitor import tensorboard
from trainkit.monitor.base import Start
from trainkit.run.folder import RunDir
from trainkit.run.labels import labels_of, say

pytestmark = pytest.mark.usefixtures("no_slurm")


@pytest.fixture
def three(tmp_path: Path) -> list[RunDir]:
    runs = [make_run(tmp_path / "runs" / f"ddp-{number:04}") for number in (1, 2, 3)]
    for run, acc1 in zip(runs, (50.0, 70.0, 60.0), strict=True):
        jsonl.append_jsonl(run.metrics, {"split": "val", "step": 19, "epoch": 1.0, "acc1": acc1, "loss": 1.0})
    return runs


def names(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[1:]]


def test_a_run_is_named_tagged_and_noted_when_it_is_submitted(command: Command, fake_slurm: Path) -> None:
    told = ("--name", "vit-lr3", "--tag", "paper", "--note", "first try")
    command("submit", "ddp", "--gpus-per-node", "0", "--time", "10", *told).ok("runs/vit-lr3")
    run = RunDir(Path("runs/vit-lr3").absolute())
    assert (labels_of(run).tags, labels_of(run).notes[0].text) == (("paper",), "first try")
    again = command("submit", "ddp", "--gpus-per-node", "0", "--time", "10", "--name", "vit-lr3")
    again.refused(2, "There is already a run vit-lr3.", "resume vit-lr3")


@pytest.mark.parametrize("name", ["a/b", "..", "-x", "7", ".hidden", "", "a b"])
def test_a_name_is_a_folder_and_a_word(command: Command, name: str) -> None:
    command("submit", "single", f"--name={name}").refused(2, "is not a valid name of a run")
    assert not Path("runs").exists()


def test_a_mistake_in_a_label_leaves_no_run(command: Command) -> None:
    command("submit", "single", "--tag", "two words").refused(2, "is not a tag")
    command("submit", "single", "--note", "password=hunter2secret9").refused(3, "looks like a secret")
    assert not Path("runs").exists()


def test_tag_and_note_add_list_and_remove(command: Command, three: list[RunDir]) -> None:
    assert command("tag", "ddp-0001", "paper", "baseline").ok().out == "ddp-0001: baseline paper\n"
    assert command("tag", "ddp-0001", "paper", "--remove").ok().out == "ddp-0001: baseline\n"
    command("tag", "ddp-0001", "--remove").refused(2, "--remove needs a tag")
    command("note", "ddp-0001", "warm-up too short").ok("1  ", "warm-up too short")
    command("note", "ddp-0001", "--remove", "1").ok("no notes")
    command("tag", "ddp-0009").refused(2, "No run 'ddp-0009'")


def test_runs_are_found_by_tag_preset_age_and_state(command: Command, three: list[RunDir]) -> None:
    say(three[1], tags=["paper"])
    three[2].manifest.write_text(json.dumps({"command": ["python", "-m", "jobs.submit", "fsdp"]}))
    assert names(command("status", "--tag", "paper").ok("#paper").out) == ["ddp-0002"]
    assert names(command("status", "--preset", "fsdp").ok().out) == ["ddp-0003"]
    assert len(names(command("status", "--since", "7d").ok().out)) == 3
    command("status", "--state", "failed").ok("No such run in")
    assert len(names(command("status", "--state", "not submitted").ok().out)) == 3


def test_runs_are_sorted_by_what_they_have_measured(command: Command, three: list[RunDir]) -> None:
    done = command("status", "--sort", "val/acc1", "--best", "2").ok("best val/acc1", "70", "60")
    assert names(done.out) == ["ddp-0002", "ddp-0003"]
    told = json.loads(command("status", "--best", "1", "--json").ok().out)
    assert [(row["run"], row["sorted_by"], row["tags"]) for row in told] == [("ddp-0002", 70.0, [])]
    command("status", "--sort", "val/acc9").refused(2, "No run here has measured val/acc9")
    command("status", "--best", "0").refused(2, "shows nothing")


def test_labels_that_cannot_be_read_do_not_hide_other_runs(command: Command, three: list[RunDir]) -> None:
    three[0].labels.symlink_to("/etc/passwd")
    assert names(command("status").ok("Cannot read").out)[-2:] == ["ddp-0002", "ddp-0003"]


def test_tags_and_notes_stand_in_status_log_book_and_page(command: Command, three: list[RunDir]) -> None:
    say(three[0], tags=["paper"], notes=["warm-up too *short*"])
    command("status", "ddp-0001").ok("#paper", "warm-up too *short*")
    command("report", "ddp-0001").ok()
    book = (three[0].path / "logbook.md").read_text()
    assert "- tags: paper\n" in book
    assert r"warm-up too \*short\*" in book
    assert "warm-up too *short*" in (three[0].path / "report.html").read_text()


def test_tags_and_notes_stand_in_tensorboard(three: list[RunDir]) -> None:
    say(three[0], tags=["paper"], notes=["warm-up too short"])
    tensorboard.build(three[0], load("ddp").config, Start(total_steps=60)).close()
    (file,) = three[0].tensorboard.rglob("events.*")
    assert b"warm-up too short" in file.read_bytes()
