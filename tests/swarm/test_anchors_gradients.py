"""``sync: gradients``: the creator is killed while an anchor lives, and comes back. One story."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.swarm.conftest import Command, started_in

pytestmark = [pytest.mark.swarm, pytest.mark.long]

GRADIENTS = (
    "collaborative.sync=gradients",
    "collaborative.rounds=200",
    "collaborative.round_seconds=12",
    "train.global_batch_size=512",
    "train.micro_batch_size=64",
    "data.workers=0",
)


@dataclass
class Story:
    """Two volunteers, an anchor, and a creator that is killed when all make updates together."""

    creator: Command
    anchor: Command
    volunteers: list[Command]
    again: Command
    without: int
    """How much the anchor had said when the creator was killed."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with started_in(tmp_path_factory.mktemp("gradients")) as commands:
        creator, token = commands.create(*GRADIENTS)
        trusted = commands.invite("anchors", "--reduce")
        anchor = commands.start("swarm", "anchor", trusted, "--allow-code", "--host", "127.0.0.1", "--name", "anchor")
        anchor.says("Joined")
        volunteers = [commands.join(token, "--name", name) for name in ("anna", "ben")]
        creator.says(r"4 peers averaged(.*\n)+.*4 peers averaged", 150)
        creator.kill()
        without = len(anchor.output)
        anchor.says(r"creator has left(.*\n)+(.*3 peers averaged.*\n(.*\n)*){4}", 150)
        again = commands.start("resume", str(commands.run("hivemind-0001")), "--allow-code")
        again.says(r"4 peers averaged", 150)
        again.process.send_signal(signal.SIGINT)
        for command in (again, anchor, *volunteers):
            command.ends()
        yield Story(creator, anchor, volunteers, again, without)


def updates(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"^round (\d+)/200", output, re.MULTILINE)]


def test_the_volunteers_make_updates_through_the_anchor(story: Story) -> None:
    meanwhile = story.anchor.output[story.without :]
    assert meanwhile.count("3 peers averaged") >= 4
    made = updates(story.anchor.output)
    assert made == sorted(set(made)), "none is made twice"
    assert all("Waiting for it" not in peer.output for peer in story.volunteers)


def test_the_creator_takes_over_what_they_have_reached(story: Story) -> None:
    match = re.search(r"The others have gone on from round (\d+) to (\d+)", story.again.output)
    assert match is not None, story.again.output
    before = updates(story.creator.output)[-1]
    assert before - 1 <= int(match[1]) <= before
    assert int(match[2]) >= before + 3
    assert updates(story.again.output)[0] > int(match[2])
    peers = (story.again, story.anchor, *story.volunteers)
    assert [peer.process.returncode for peer in peers] == [0, 0, 0, 0]
