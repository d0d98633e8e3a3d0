"""Machines with faults: a full disk of a volunteer and of the creator, a clock that is off. One story."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.swarm.conftest import FAST, TOKEN, started_in
from trainkit.common import fileio, jsonl
from trainkit.run.contributions import Contributions
from trainkit.run.folder import RunDir


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


@pytest.mark.long
@pytest.mark.swarm
def test_full_disks_stop_no_round_and_a_clock_that_is_off_is_named(tmp_path: Path) -> None:
    """A creator whose disk, a small file system in memory, is full for some rounds; and a volunteer whose disk is full
    from its third round on, to the end."""
    disk, runs = tmp_path / "disk", tmp_path / "runs"
    with small_disk(disk), small_disk(runs), started_in(tmp_path) as commands:
        creator, token = commands.create("collaborative.round_seconds=4", "collaborative.rounds=60")
        full = commands.join(token, "--name", "anna", "--run-dir", str(disk / "anna"))
        full.says(r"(2 peers averaged(.*\n)+.*){2}")
        fill(disk / "ballast")
        full.says("cannot write into the run folder")
        told = full.output.count("2 peers averaged")

        clock = "The clock of this machine "
        apart = clock + r"differs from the swarm's by more than three seconds\."
        remedy = "`timedatectl set-ntp true`"
        tried = [
            ("3600", ("jobs.join", token, "--allow-code"), apart),
            ("-3600", ("jobs.join", token, "--allow-code"), apart),
            # Less than hivemind minds: it would find nobody in a round.
            ("2.5", ("jobs.join", token, "--allow-code"), clock + r"is \d\.\d s ahead of the swarm's\."),
            ("3600", ("jobs.swarm", "status", token), apart),
            ("3600", ("jobs.swarm", "doctor", token), rf"(?m)^FAIL +clock .*\n +fix: Set the clock: {remedy}"),
        ]
        off = [commands._start("tests.swarm.elsewhen", seconds, *words) for seconds, words, _ in tried]
        for command, (_, _, says) in zip(off, tried, strict=True):
            assert command.ends() == 2, command.output
            assert re.search(says, command.output), command.output
            assert remedy in command.output

        full.says(rf"(2 peers averaged(.*\n)+.*){{{told + 3}}}")
        fill(runs / "ballast")
        creator.says("cannot write into the run folder")
        number = creator.output.count("\nround ")
        creator.says(rf"^round {number + 3}/60")
        (runs / "ballast").unlink()
        creator.says("there is room on the disk again")
        creator.says(rf"^round {number + 5}/60")
        creator.process.send_signal(signal.SIGINT)
        assert [creator.ends(), full.ends()] == [0, 1]

        for peer in (creator, full):
            assert peer.output.count("cannot write into the run folder: No space left on device") == 1
        assert "Traceback" not in full.output
        assert "There is no room for the results of anna." in full.output
        lines = (disk / "anna" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["split"] for line in lines if line.endswith("}")][:2] == ["train", "train"]
        # And the swarm does not notice.
        rounds = re.findall(r"^round .*", creator.output, re.MULTILINE)
        with_it = rounds[next(index for index, line in enumerate(rounds) if "2 peers averaged" in line) :]
        assert len(with_it) >= 5
        assert [line for line in with_it[:-1] if "2 peers averaged" not in line] == []

        # What the creator has measured meanwhile is written once there is room.
        run = commands.run("hivemind-0001")
        metrics, events = (list(jsonl.read_jsonl(run / name)) for name in ("metrics.jsonl", "events.jsonl"))
        validated = [record["round"] for record in metrics if record["split"] == "val"]
        said = re.findall(r"^round (\d+)/.* val loss", creator.output, re.MULTILINE)
        assert validated == [int(number) for number in said]
        assert len(validated) >= 6
        times = [record["time"] for record in metrics]
        assert times == sorted(times)
        kinds = [event["event"] for event in events]
        assert (kinds.count("save_failed"), kinds.count("save_recovered")) == (1, 1)
        last, saved = metrics[-1]["round"], [event["round"] for event in events if event["event"] == "saved"]
        assert last - 1 <= saved[-1] <= last
        assert fileio.read_object(run / "checkpoints" / "latest" / "state.json")["state"]["round"] in (last - 1, last)


@pytest.mark.long
@pytest.mark.swarm
def test_who_joins_a_creator_without_room_is_credited_once_there_is(tmp_path: Path) -> None:
    """And leaves with a word on its clock, which was set meanwhile; the creator's own clock ends it likewise."""
    runs, early, late = tmp_path / "runs", tmp_path / "early", tmp_path / "late"
    with small_disk(runs), started_in(tmp_path) as commands:
        creator = commands._start(
            *("tests.swarm.elsewhen", f"-3600@{late}", "jobs.swarm", "create", "hivemind", "--name", "creator"),
            *("--host", "127.0.0.1", *FAST, "collaborative.round_seconds=4", "collaborative.rounds=60"),
        )
        token = creator.says(TOKEN)[1]
        creator.says("^round 2/60")
        fill(runs / "ballast")
        creator.says("cannot write into the run folder")
        join = ("jobs.join", token, "--allow-code", "--name", "anna")
        anna = commands._start("tests.swarm.elsewhen", f"10@{early}", *join, "--run-dir", str(tmp_path / "anna"))
        full = commands.start("join", token, "--allow-code", "--name", "ben")  # into that very folder
        anna.says(r"(2 peers averaged(.*\n)+.*){2}")
        assert full.ends() == 2
        assert "No space left on device" in full.output
        early.touch()
        assert anna.ends() == 2
        assert re.search(r"The clock of this machine is (9\.\d|10\.\d) s ahead of the swarm's\.", anna.output)
        (runs / "ballast").unlink()
        creator.says("there is room on the disk again")
        creator.says(rf"^round {creator.output.count(chr(10) + 'round ') + 2}/60")
        credited = [row.name for row in Contributions.of(RunDir(commands.run("hivemind-0001"))).best_first()]
        late.touch()
        assert creator.ends() == 2
    assert "guest anna" in credited
    assert re.search(r"The clock of this machine was set back by 3,(599|600)\.\d s\.", creator.output)
    for command in (creator, anna, full):
        assert "Traceback" not in command.output
