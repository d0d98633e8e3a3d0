"""Machines with faults: a full disk of a volunteer and of the creator, a clock that is off. One story."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.swarm.conftest import Command, Commands, started_in
from trainkit import fileio

pytestmark = [pytest.mark.swarm, pytest.mark.long]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while file.write(b"0" * size):
                    pass
    assert shutil.disk_usage(ballast).free == 0


@dataclass
class Story:
    """A creator whose disk, a small file system in memory, is full for some rounds; and a volunteer whose disk is full
    from its third round on, to the end."""

    commands: Commands
    creator: Command
    full: Command
    run: Path
    """Of the volunteer."""
    off: dict[str, Command]
    """What was tried with a clock that is off."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("swarm")
    with small_disk(folder / "disk"), small_disk(folder / "runs"), started_in(folder) as commands:
        creator, token = commands.create("collaborative.round_seconds=4", "collaborative.rounds=60")
        run = folder / "disk" / "anna"
        full = commands.join(token, "--name", "anna", "--run-dir", str(run))
        full.says(r"(2 peers averaged(.*\n)+.*){2}")
        fill(folder / "disk" / "ballast")
        full.says("cannot write into the run folder")
        told = full.output.count("2 peers averaged")
        words = {
            "fast": ("3600", "jobs.join", token, "--allow-code"),
            "slow": ("-3600", "jobs.join", token, "--allow-code"),
            "a little": ("2.5", "jobs.join", token, "--allow-code"),
            "status": ("3600", "jobs.swarm", "status", token),
            "doctor": ("3600", "jobs.swarm", "doctor", token),
        }
        off = {name: commands._start("tests.swarm.elsewhen", *own) for name, own in words.items()}
        for command in off.values():
            command.ends()
        full.says(rf"(2 peers averaged(.*\n)+.*){{{told + 3}}}")
        fill(folder / "runs" / "ballast")
        creator.says("cannot write into the run folder")
        number = creator.output.count("\nround ")
        creator.says(rf"^round {number + 3}/60")
        (folder / "runs" / "ballast").unlink()
        creator.says("there is room on the disk again")
        creator.says(rf"^round {number + 5}/60")
        creator.process.send_signal(signal.SIGINT)
        for command in (creator, full):
            command.ends()
        yield Story(commands, creator, full, run, off)


def test_a_volunteer_whose_disk_is_full_trains_on_and_says_so_once(story: Story) -> None:
    assert story.full.output.count("cannot write into the run folder: No space left on device") == 1
    assert "Traceback" not in story.full.output
    assert story.full.process.returncode == 1
    assert "There is no room for the results of anna." in story.full.output
    lines = (story.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["split"] for line in lines if line.endswith("}")][:2] == ["train", "train"]
    # And the swarm does not notice.
    rounds = re.findall(r"^round .*", story.creator.output, re.MULTILINE)
    with_it = rounds[next(index for index, line in enumerate(rounds) if "2 peers averaged" in line) :]
    assert len(with_it) >= 5
    assert [line for line in with_it[:-1] if "2 peers averaged" not in line] == []


def test_a_creator_trains_on_without_room_and_writes_all_of_it_once_there_is(story: Story) -> None:
    assert story.creator.process.returncode == 0
    assert story.creator.output.count("cannot write into the run folder: No space left on device") == 1
    run = story.commands.run("hivemind-0001")
    metrics, events = (list(fileio.read_jsonl(run / name)) for name in ("metrics.jsonl", "events.jsonl"))
    rounds = [record["round"] for record in metrics if record["split"] == "val"]
    assert rounds == list(range(1, len(rounds) + 1))  # nothing that was measured meanwhile is lost
    assert len(rounds) >= 6
    times = [record["time"] for record in metrics]
    assert times == sorted(times)
    kinds = [event["event"] for event in events]
    assert (kinds.count("save_failed"), kinds.count("save_recovered")) == (1, 1)
    last, saved = metrics[-1]["round"], [event["round"] for event in events if event["event"] == "saved"]
    assert last - 1 <= saved[-1] <= last
    assert fileio.read_object(run / "checkpoints" / "latest" / "state.json")["state"]["round"] in (last - 1, last)


def test_a_clock_that_is_off_is_named_with_its_remedy_by_every_command(story: Story) -> None:
    says = {
        **dict.fromkeys(("fast", "slow", "status"), r"differs from the swarm's by more than three seconds\."),
        "a little": r"is \d\.\d s ahead of the swarm's\.",  # less than hivemind minds: it would find nobody in a round
    }
    for name, words in says.items():
        command = story.off[name]
        assert command.process.returncode == 2, command.output
        assert re.search(rf"The clock of this machine {words}", command.output), command.output
        assert "timedatectl set-ntp true" in command.output
    doctor = story.off["doctor"]
    assert doctor.process.returncode == 2, doctor.output
    assert re.search(r"^FAIL +clock .*\n +fix: Set it: `timedatectl set-ntp true`", doctor.output, re.MULTILINE)
