"""One who is banned and one who is revoked, in a swarm of real peers: they are out, and stay out. One story."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.swarm.attacked import HARDER, Swarm
from tests.swarm.conftest import Command, started_in

pytestmark = [pytest.mark.swarm, pytest.mark.long]


@dataclass(frozen=True)
class Story(Swarm):
    """How a swarm got rid of two, and kept them away after its creator was killed and came back."""

    resumed: Command
    """The creator that came back."""
    mallory: tuple[Command, ...]
    """Banned; comes back at once, and once more when nobody but the creator's folder knows of it any more."""
    anna: tuple[Command, ...]
    """Revoked; comes back."""
    deaf: Command | None
    """A second machine with anna's invitation, that does not leave when it is told to."""
    different: Command
    """With another torch."""
    told_after: float
    """Seconds from what ``swarm revoke anna`` says until anna had left."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """One sends its pseudo-gradient fifty times as long and turned round, until it is out; another is revoked."""
    with started_in(tmp_path_factory.mktemp("attack")) as commands:
        endless = (*HARDER, "collaborative.rounds=500")
        creator, guests = commands.create(*endless)

        def join(name: str, token: str) -> tuple[str, ...]:
            return ("join", token, "--allow-code", "--name", name, "--run-dir", str(commands.run(name)))

        honest = commands.start(*join("honest", guests))
        different = commands.attack("other-torch", *join("other-torch", guests))
        different.ends(60)
        hers = commands.invite("mallory")
        mallory = commands.attack("times-50", *join("mallory", hers))
        creator.says("mallory is banned")
        mallory.ends(30)
        mallory_again = commands.start(*join("mallory-again", hers))
        mallory_again.ends(60)
        annas = commands.invite("anna")
        anna = commands.start(*join("anna", annas))
        deaf = commands.attack("deaf", *join("deaf", annas))
        creator.says("(anna|deaf) has joined.*\n(.*\n)*.*4 peers averaged")
        revoke = commands.start("swarm", "revoke", "anna", "hivemind-0001")
        revoke.says("Revoked: anna")
        revoked = time.monotonic()
        anna.ends(60)
        told_after = time.monotonic() - revoked
        assert revoke.ends() == 0
        anna_again = commands.start(*join("anna-again", annas))
        anna_again.ends(60)
        creator.says("anna has left.*\n(.*\n)*.*2 peers averaged")
        still_there = deaf.process.poll() is None
        creator.kill()
        resumed = commands.start("resume", str(commands.run("hivemind-0001")), "--allow-code")
        resumed.says("2 peers averaged")
        mallory_later = commands.start(*join("mallory-later", hers))
        mallory_later.ends(60)
        resumed.says("2 peers averaged(.*\n)*.*2 peers averaged")
        resumed.process.send_signal(signal.SIGINT)
        assert [command.ends(60) for command in (resumed, honest)] == [0, 0]
        run = commands.run("hivemind-0001")
        found = Swarm(creator, [honest], [mallory], run, "")
        yield Story(
            **vars(found),
            resumed=resumed,
            mallory=(mallory, mallory_again, mallory_later),
            anna=(anna, anna_again),
            deaf=deaf if still_there else None,
            different=different,
            told_after=told_after,
        )


def test_an_attacker_does_not_spoil_the_model(story: Story) -> None:
    losses = [float(text) for text in re.findall(r"val loss (\S+)", story.creator.output)]
    assert losses[-1] < losses[0] < 2.4
    assert max(losses) < 2.4  # who knows nothing has 2.3


def test_three_times_left_out_is_a_ban_and_each_time_an_event_and_a_line(story: Story) -> None:
    dropped, (banned,) = story.events("peer_dropped"), story.events("peer_banned")
    assert {event["peer"] for event in dropped} == {banned["peer"]}
    assert all(re.match(r"was .* times longer|points against", event["why"]) for event in dropped)
    assert re.search(r"^  mallory was left out of round \d+: ", story.creator.output, re.MULTILINE)
    assert (banned["name"], banned["round"]) == ("mallory", [event["round"] for event in dropped][2])
    assert "To lift it: python -m jobs.swarm unban mallory" in story.creator.output
    assert "mallory" in (story.run / "bans.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ("mallory", "You were banned from the run.\n  why: 3 times in a row"),
        ("anna", "Your invitation was revoked."),
    ],
)
def test_who_is_out_is_told_so_and_why_whenever_it_comes_back(story: Story, who: str, says: str) -> None:
    peers: tuple[Command, ...] = getattr(story, who)
    assert [peer.process.returncode for peer in peers] == [3] * len(peers)
    assert all(says in peer.output and "Traceback" not in peer.output for peer in peers)


def test_a_ban_holds_when_only_the_killed_creators_folder_knows_it(story: Story) -> None:
    assert "mallory-later" not in story.resumed.output
    assert "3 peers averaged" not in story.resumed.output


def test_another_torch_is_refused_before_any_average(story: Story) -> None:
    peer = story.different
    assert peer.process.returncode == 3, peer.output
    assert "This peer differs from the run in: torch.\n  why: torch: " in peer.output
    assert "other-torch" not in story.creator.output


def test_who_is_revoked_is_out_within_15_seconds_and_the_others_go_on(story: Story) -> None:
    print(f"out {story.told_after:.1f} s after `swarm revoke` has said so")
    assert story.told_after < 15


def test_a_revoked_peer_that_does_not_leave_averages_with_nobody(story: Story) -> None:
    assert story.deaf is not None
    _, _, afterwards = story.creator.output.partition("anna has left")
    _, _, without = afterwards.partition("2 peers averaged")
    assert without
    assert not re.search("[34] peers averaged", without)
