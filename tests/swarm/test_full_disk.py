"""The creator's disk is full for some rounds: a small file system in memory, that a test may fill."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.swarm.conftest import Command, started_in
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


def pour(file: IO[bytes], size: int) -> None:
    while True:
        file.write(b"0" * size)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                pour(file, size)


@dataclass
class Story:
    """The disk was full for three rounds, then there was room; then Ctrl-C."""

    creator: Command
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    newest: dict[str, Any]
    """What the newest checkpoint says of itself."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("swarm")
    with small_disk(folder / "runs"), started_in(folder) as commands:
        creator, _ = commands.create("collaborative.round_seconds=4", "collaborative.rounds=60")
        creator.says(r"^round 2/60")
        ballast = commands.runs_root / "ballast"
        fill(ballast)
        creator.says("cannot write into the run folder")
        told = creator.output.count("\nround ")
        creator.says(rf"^round {told + 3}/60")
        ballast.unlink()
        creator.says("there is room on the disk again")
        creator.says(rf"^round {told + 5}/60")
        creator.process.send_signal(signal.SIGINT)
        creator.ends()
        run = commands.run("hivemind-0001")
        metrics, events = (list(fileio.read_jsonl(run / name)) for name in ("metrics.jsonl", "events.jsonl"))
        yield Story(creator, metrics, events, fileio.read_object(run / "checkpoints" / "latest" / "state.json"))


def test_training_goes_on_and_says_once_why_nothing_is_written(story: Story) -> None:
    assert story.creator.process.returncode == 0
    assert story.creator.output.count("cannot write into the run folder: No space left on device") == 1


def test_nothing_that_was_measured_meanwhile_is_lost(story: Story) -> None:
    rounds = [record["round"] for record in story.metrics if record["split"] == "val"]
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 6
    times = [record["time"] for record in story.metrics]
    assert times == sorted(times)


def test_it_is_an_event_and_so_is_its_end(story: Story) -> None:
    kinds = [event["event"] for event in story.events]
    assert (kinds.count("save_failed"), kinds.count("save_recovered")) == (1, 1)


def test_the_weights_are_saved_again_as_soon_as_there_is_room(story: Story) -> None:
    last = story.metrics[-1]["round"]
    assert "round" in json.dumps(story.newest)
    saved = [event["round"] for event in story.events if event["event"] == "saved"]
    assert last - 1 <= saved[-1] <= last
