"""The creator's disk is full for some rounds: a small file system in memory, that a test may fill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.swarm.conftest import started_in
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


def test_training_goes_on_without_room_and_is_written_once_there_is(tmp_path: Path) -> None:
    with small_disk(tmp_path / "runs"), started_in(tmp_path) as commands:
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
        assert creator.ends() == 0
        assert creator.output.count("cannot write into the run folder: No space left on device") == 1

        run = commands.run("hivemind-0001")
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
