"""``sync: gradients``: the creator is killed while an anchor lives, and comes back. One story."""

import re
import signal

import pytest

from tests.swarm.conftest import GRADIENTS, Commands


def updates(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"^round (\d+)/200", output, re.MULTILINE)]


@pytest.mark.long
@pytest.mark.swarm
def test_volunteers_go_on_through_the_anchor_and_the_creator_takes_it_over(commands: Commands) -> None:
    creator, token = commands.create(*GRADIENTS, "collaborative.rounds=200", "train.global_batch_size=512")
    trusted = commands.invite("anchors", "--reduce")
    anchor = commands.start("swarm", "anchor", trusted, "--allow-code", "--host", "127.0.0.1", "--name", "anchor")
    anchor.says("Joined")
    volunteers = [commands.join(token, "--name", name) for name in ("anna", "ben")]
    creator.says(r"4 peers averaged(.*\n)+.*4 peers averaged", 150)
    creator.kill()
    anchor.says(r"creator has left(.*\n)+(.*3 peers averaged.*\n(.*\n)*){4}", 150)
    again = commands.start("resume", str(commands.run("hivemind-0001")), "--allow-code")
    again.says(r"4 peers averaged", 150)
    again.process.send_signal(signal.SIGINT)
    assert [peer.ends() for peer in (again, anchor, *volunteers)] == [0, 0, 0, 0]

    made = updates(anchor.output)
    assert made == sorted(set(made)), "none is made twice"
    assert all("Waiting for it" not in peer.output for peer in volunteers)

    match = re.search(r"The others have gone on from round (\d+) to (\d+)", again.output)
    assert match is not None, again.output
    before = updates(creator.output)[-1]
    assert before - 1 <= int(match[1]) <= before
    assert int(match[2]) >= before + 3
    assert updates(again.output)[0] > int(match[2])
