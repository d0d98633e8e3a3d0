"""A creator that is killed, volunteers that only call out, and how they find each other again: one story."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.collaborative.conftest import Command, Commands, started_in

pytestmark = [pytest.mark.swarm, pytest.mark.long]


@dataclass
class Story:
    """The creator is killed, the volunteers wait, it is resumed, leaves by Ctrl-C, and is resumed once more."""

    commands: Commands
    creator: Command
    again: Command
    volunteers: list[Command]
    last: Command
    addresses: list[str]
    """Of the creator, each time."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with started_in(tmp_path_factory.mktemp("swarm")) as commands:
        creator, token = commands.create("collaborative.round_seconds=4", "collaborative.rounds=60")
        addresses = [commands.address()]
        volunteers = [commands.join(token, "--name", name) for name in ("anna", "ben")]
        creator.says("anna has joined")
        creator.says("3 peers averaged.*val loss")
        creator.note_family()
        creator.process.kill()
        creator.process.wait(10)
        for peer in volunteers:
            peer.says("Waiting for it for up to 24 hours")
        run = str(commands.run("hivemind-0001"))
        again = commands.start("resume", run, "--allow-code")
        again.says("3 peers averaged")
        addresses.append(commands.address())
        again.process.send_signal(signal.SIGINT)
        for command in (again, *volunteers):
            command.ends()
        last = commands.start("swarm", "create", "--resume", run, "--allow-code", "--no-train")
        last.says(r"round \d+/60")
        addresses.append(commands.address())
        last.process.send_signal(signal.SIGINT)
        last.ends()
        yield Story(commands, creator, again, volunteers, last, addresses)


def rounds_in(output: str) -> list[int]:
    lines = [line for line in output.splitlines() if line.startswith("round ")]
    return [int(line.split()[1].partition("/")[0]) for line in lines]


def events(run: Path, kind: str) -> int:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line)["event"] == kind for line in lines)


def test_the_creator_comes_back_under_its_address(story: Story) -> None:
    assert len(story.addresses) == 3
    assert len(set(story.addresses)) == 1


def test_its_rounds_go_on_after_the_last_one_that_was_saved(story: Story) -> None:
    last = rounds_in(story.creator.output)[-1]  # whose checkpoint may have been on its way
    assert last - 1 <= rounds_in(story.again.output)[0] <= last + 1


def test_volunteers_who_only_call_out_keep_their_weights_and_come_back_by_themselves(story: Story) -> None:
    for peer in story.volunteers:
        before, _, after = peer.output.partition("Back in hivemind-0001, in round")
        assert "The weights of round" in before
        assert "3 peers averaged" in after
    for run in story.commands.runs_root.glob("*-peer-*"):
        assert list(run.glob("checkpoints/step-*/theta.safetensors")) or list(run.glob("checkpoints/step-*/outer*"))
        assert (events(run, "swarm_lost"), events(run, "swarm_back")) == (1, 1)


def test_ctrl_c_is_a_stop_that_can_be_resumed_and_not_an_end(story: Story) -> None:
    assert story.again.process.returncode == 0
    assert "Go on with it: python -m jobs.resume" in story.again.output
    assert [peer.process.returncode for peer in story.volunteers] == [0, 0]
    assert rounds_in(story.last.output)[0] > rounds_in(story.again.output)[-1] - 2


def test_a_creator_that_does_not_train_still_judges(story: Story) -> None:
    assert "images/s here" not in story.last.output
    assert "val acc1" in story.last.output
    assert story.last.process.returncode == 0


def test_the_key_is_in_the_run_folder_for_its_user_alone(story: Story) -> None:
    key = story.commands.run("hivemind-0001") / "swarm_identity"
    assert key.stat().st_mode & 0o777 == 0o600
