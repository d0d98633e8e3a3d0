"""A creator that is killed, or sleeps, and volunteers behind routers, who find it again by themselves: one story."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil
import pytest

from tests.swarm.conftest import TOKEN, Command, Commands, started_in
from tests.swarm.internet import internet
from trainkit import fileio

pytestmark = [pytest.mark.swarm, pytest.mark.long]

ROUND_SECONDS = 4
SETTINGS = (
    "monitor.loggers=[jsonl]",
    "collaborative.matchmaking_seconds=1.5",
    f"collaborative.round_seconds={ROUND_SECONDS}",
    "collaborative.rounds=120",
    "model.name=tests.swarm.patient:model",
)


@dataclass
class Story:
    """The creator is killed while it saves, the volunteers wait, it is resumed, sleeps for three rounds, leaves by
    Ctrl-C, and is resumed once more."""

    commands: Commands
    creator: Command
    again: Command
    volunteers: list[Command]
    last: Command
    addresses: list[str]
    """Of the creator, each time."""
    cut: str
    """The checkpoint on which the kill has left nothing but a beginning."""


def sleep_for(command: Command, seconds: float) -> None:
    """As a laptop whose lid is closed: none of its processes does anything."""
    command.note_family()
    for act, wait in ((psutil.Process.suspend, seconds), (psutil.Process.resume, 0.0)):
        for one in command.alive():
            with suppress(psutil.NoSuchProcess):
                act(one)
        time.sleep(wait)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with internet(public=1, homes=2) as net, started_in(tmp_path_factory.mktemp("swarm")) as commands:
        create = ("swarm", "create", "hivemind", "--name", "creator", "--port", "4711", "--allow-code", *SETTINGS)
        creator = commands.start(*create, on=net.on("pub1"))
        token = creator.says(TOKEN)[1]
        addresses = [commands.address()]
        volunteers = [
            commands.join(token, "--name", name, on=net.on(f"lan{number}"))
            for number, name in ((1, "anna"), (2, "ben"))
        ]
        creator.says("anna has joined")
        creator.says(r"round [3-9]/.* 3 peers averaged.*val loss")  # so that there are two checkpoints
        creator.kill()
        newest = (commands.run("hivemind-0001") / "checkpoints" / "latest").resolve()
        weights = newest / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        for peer in volunteers:
            peer.says("Waiting for it for up to 1 d")
        run = str(commands.run("hivemind-0001"))
        again = commands.start("resume", run, "--allow-code", on=net.on("pub1"))
        again.says("3 peers averaged", 120)
        addresses.append(commands.address())
        sleep_for(again, 3.5 * ROUND_SECONDS)
        slept = len(again.output)
        again.says(rf"(?s)\A.{{{slept}}}.*3 peers averaged", 120)
        again.process.send_signal(signal.SIGINT)
        for command in (again, *volunteers):
            command.ends()
        last = commands.start("swarm", "create", "--resume", run, "--allow-code", "--no-train", on=net.on("pub1"))
        last.says(r"round \d+/120")
        addresses.append(commands.address())
        last.process.send_signal(signal.SIGINT)
        last.ends()
        yield Story(commands, creator, again, volunteers, last, addresses, newest.name)


def rounds_in(output: str) -> list[int]:
    lines = [line for line in output.splitlines() if line.startswith("round ")]
    return [int(line.split()[1].partition("/")[0]) for line in lines]


def test_the_creator_comes_back_under_its_address_after_the_last_round_saved(story: Story) -> None:
    assert len(story.addresses) == 3
    assert len(set(story.addresses)) == 1
    last, first = rounds_in(story.creator.output)[-1], rounds_in(story.again.output)[0]
    # The last checkpoint may have been on its way, and the one before is cut; it is passed over in words.
    assert max(2, last - 2) <= first <= last + 1
    assert story.cut in story.again.output
    key = story.commands.run("hivemind-0001") / "swarm_identity"
    assert key.stat().st_mode & 0o777 == 0o600


def test_volunteers_keep_their_weights_and_come_back_by_themselves(story: Story) -> None:
    for peer in story.volunteers:
        before, _, after = peer.output.partition("Back in hivemind-0001, in round")
        assert "The weights of round" in before
        assert before.count("Nobody of the swarm answers") == 1
        assert "3 peers averaged" in after
    for run in story.commands.runs_root.glob("*-peer-*"):
        assert list(run.glob("checkpoints/step-*/common.safetensors"))
        kinds = [event["event"] for event in fileio.read_jsonl(run / "events.jsonl")]
        assert kinds.count("swarm_lost") == kinds.count("swarm_back") >= 1


def test_a_creator_that_has_slept_goes_on_with_the_round_that_it_is_by_then(story: Story) -> None:
    rounds = rounds_in(story.again.output)
    skipped = [after - before for before, after in pairwise(rounds) if after > before + 1]
    assert rounds == sorted(set(rounds))
    assert any(2 <= gap <= 6 for gap in skipped)


def test_ctrl_c_is_a_stop_that_can_be_resumed_and_not_an_end(story: Story) -> None:
    """By a creator that does not train, and still judges."""
    assert [one.process.returncode for one in (story.again, *story.volunteers, story.last)] == [0, 0, 0, 0]
    assert "Go on with it: python -m jobs.resume" in story.again.output
    output = story.last.output
    said = re.search(r"^Goes on after round (\d+): .*; the optimizer within rounds begins anew\.$", output, re.M)
    assert said is not None
    assert rounds_in(output)[0] > max(int(said[1]), rounds_in(story.again.output)[-1] - 2)
    assert "images/s here" not in output
    assert "val acc1" in output
